"""`turnstile top`: the card on a live screen. One reader follows the events and wakes the screen; one draws it.

A gate that goes away is shown as such and looked for again. Piped, it prints one screen and ends.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gpu_turnstile.cli import show
from gpu_turnstile.cli.gate import Gate, as_dict
from gpu_turnstile.cli.say import clean
from gpu_turnstile.client import Turnstile, TurnstileError

EVERY = 1.0  # seconds between two screens when nothing happens
BRIEF = 0.1  # seconds that pass at least between two screens
KEPT = 40  # events
BAR = 30  # characters
_NOISE = frozenset(("renewed",))


class Events:
    """The newest events, from a thread of their own. `news` is set when one comes."""

    def __init__(self, ts: Turnstile) -> None:
        self.news = threading.Event()
        self.kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._ts = ts
        threading.Thread(target=self._follow, name="turnstile-events", daemon=True).start()

    def _follow(self) -> None:
        while True:
            try:
                for event in self._ts.events(since=0):  # a gate that restarted begins anew
                    self._take(as_dict(event))
            except TurnstileError:
                pass
            time.sleep(EVERY)

    def _take(self, event: dict[str, Any]) -> None:
        same = [old for old in self.kept if (old.get("id"), old.get("time")) == (event.get("id"), event.get("time"))]
        if event["kind"] not in _NOISE and not same:
            self.kept.append(event)
            self.news.set()


def top(url: str | None, as_json: bool) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        _top(url, as_json)


def _top(url: str | None, as_json: bool) -> None:
    gate = Gate(url)
    out = show.console()
    with gate.calling() as ts:
        found = ts.status()
        past = deque((as_dict(event) for event in ts.events(0, follow=False)), maxlen=KEPT)
    if as_json:
        _stream(gate, found)
    if not out.is_terminal:
        out.print(screen(found, [e for e in past if e["kind"] not in _NOISE], gate.url, 80))
        return
    events = Events(gate.client)
    with Live(console=out, screen=True, auto_refresh=False) as live:
        trouble = ""
        while True:
            height, width = out.size.height, out.size.width
            live.update(_fit(out, screen(found, list(events.kept), gate.url, width, trouble), height), refresh=True)
            events.news.wait(EVERY)
            events.news.clear()
            time.sleep(BRIEF)
            try:
                found, trouble = gate.client.status(), ""
            except TurnstileError as problem:
                trouble = str(problem)


def _stream(gate: Gate, found: dict[str, Any]) -> None:
    """A status a second, one object a line."""
    while True:
        typer.echo(json.dumps(found))
        time.sleep(EVERY)
        with gate.calling() as ts:
            found = ts.status()


def screen(
    found: dict[str, Any], events: list[dict[str, Any]], url: str, width: int, trouble: str = ""
) -> RenderableType:
    """What matters most first: what does not fit is at the end."""
    head = Text(f"{clean(found['phase'])}  {clean(found['mode'])}  ", style="bold")
    head.append(", ".join(map(clean, found["residents"])) or "nobody", style="bold")
    if found["target"]:
        deadline = found["drain_deadline_in_s"]
        head.append(
            f"  then {clean(found['target'])}" + ("" if deadline is None else f", by force in {show.ago(deadline)}")
        )
    parts: list[RenderableType] = [head]
    if trouble:
        parts.append(Text(f"! {clean(trouble)}; what follows is the last that was known", style="red"))
    parts.append(Text(memory(found["card"])))
    parts.append(Text(f"lock    {show.holders(found['locks'])}"))
    parts += show.lock_queue(found["locks"])
    parts += show.work(found)
    parts += [Text.assemble(("! ", "yellow"), clean(line)) for line in found["warnings"]]
    parts += [Text(), Text("lately, newest first", style="bold")]
    for event in reversed(events):
        line = show.event(event)
        line.truncate(width, overflow="ellipsis")
        parts.append(line)
    parts.append(Text(f"{url}, gpu-turnstile {clean(found['version'])}, up {show.ago(found['uptime_s'])}", style="dim"))
    return Group(*parts)


def memory(card: dict[str, Any]) -> str:
    """`memory  [######........]  22.4 of 31.8 GB`."""
    if card["total_gb"] is None:
        return f"memory  {show.memory(card)}"
    full = round(BAR * min(1.0, card["used_gb"] / card["total_gb"])) if card["total_gb"] else 0
    return f"memory  [{'#' * full}{'.' * (BAR - full)}]  {card['used_gb']:g} of {card['total_gb']:g} GB"


def _fit(out: Console, what: RenderableType, height: int) -> RenderableType:
    """As many lines as the screen has."""
    lines = out.render_lines(what, pad=False)[:height]
    text = Text("\n").join(Text.assemble(*((segment.text, segment.style or "") for segment in line)) for line in lines)
    return Group(text)
