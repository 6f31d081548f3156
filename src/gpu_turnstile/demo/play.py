"""The script of the demo, and what it prints: who holds the card, who waits, what a swap cost, and a summary."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from gpu_turnstile.demo.stage import Real, Stage, StageError, stage
from gpu_turnstile.demo.traffic import Clients

LOOK = 0.4  # seconds between two looks at the gate's status


@dataclass(slots=True)
class Swaps:
    """What swaps cost, step by step, in seconds."""

    evict: list[float] = field(default_factory=list)
    admit: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


class Teller:
    """Prints what happens, one short line each, with the seconds since the beginning."""

    def __init__(self, console: Console) -> None:
        self.swaps = Swaps()
        self._console = console
        self._began = time.monotonic()
        self._last = ""

    def line(self, tag: str, text: str, style: str = "") -> None:
        now = time.monotonic() - self._began
        self._console.print(f"{now:5.1f}s  {tag:<10} {text}", style=style, highlight=False, soft_wrap=True)

    def client(self, who: str, text: str) -> None:
        self.line(who, text, "cyan")

    def event(self, kind: str, e: dict[str, Any]) -> None:
        """One event of the gate."""
        match kind:
            case "drain":
                self.line(
                    "gate",
                    f"{_names(e['victims'])} drains ({e['inflight']} in flight): {e['target'] or 'nobody'} is next",
                )
            case "forced":
                self.line("gate", f"the grace is over: {e['cut']} request(s) are cut", "red")
            case "evicted":
                self.swaps.evict.append(e["seconds"])
                self.line("gate", f"{e['tenant']} is off the card after {e['seconds']:.2f} s: {e['detail']}", "yellow")
            case "admitted":
                self.swaps.admit.append(e["seconds"])
                self.line("gate", f"{e['tenant']} is ready after {e['seconds']:.2f} s", "green")
            case "swapped" if e["target"]:
                self.swaps.whole.append(e["seconds"])
            case "engine_lost":
                self.line("gate", f"{e['tenant']} is gone ({e['reason']}), {e['cut']} request(s) cut", "red")
            case "job_end":
                self.line("gate", f"image job ended: {e['end']}, {e['seconds']:.1f} s", "magenta")

    def status(self, status: dict[str, Any]) -> None:
        """Who holds the card and who waits, whenever that changes."""
        held: dict[str, int] = {}
        for lease in status["inflight"]:
            held[lease["tenant"]] = held.get(lease["tenant"], 0) + 1
        holder = _names(status["residents"]) or (f"({status['target']} is coming)" if status["target"] else "nobody")
        flight = ", ".join(f"{n}× {tenant}" for tenant, n in held.items()) or "nothing"
        queue = ", ".join(f"{'/'.join(w['wants'])}" for w in status["queue"]) or "nobody"
        line = f"{holder:<18} in flight: {flight:<14} waiting: {queue}"
        if line != self._last:
            self._last = line
            self.line("CARD", line, "bold")


def _names(names: list[str]) -> str:
    return ", ".join(names)


async def play(real: Real | None, console: Console) -> int:
    """Run the whole demo; returns the exit code: 0 when everything ended as it should."""
    try:
        async with stage(real) as set_up:
            return await _play(set_up, real, console)
    except StageError as error:
        console.print(f"the demo cannot start: {error}", style="red", highlight=False)
        return 1


async def _play(set_up: Stage, real: Real | None, console: Console) -> int:
    kind = "two real llama.cpp servers" if real else "two simulated llama-servers"
    console.print(f"One card, four engines: {kind} that the gate owns (coder and writer),")
    console.print("and an Ollama and a ComfyUI, both simulated, that it only stands in front of.")
    console.print(f"The gate listens at {set_up.gate} and {set_up.comfy}.\n", highlight=False)
    teller = Teller(console)
    clients = Clients(set_up.gate, set_up.comfy, teller.client)
    watchers = [asyncio.create_task(_watch_events(set_up, teller)), asyncio.create_task(_watch_status(set_up, teller))]
    try:
        await _script(set_up, clients, teller)
        await _settle(set_up)
        if real:
            await _show_answers(clients, teller)
    finally:
        await clients.close()
        broken = [task.exception() for task in watchers if task.done()]
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    for problem in broken:
        console.print(f"the gate's own reports ended early: {problem!r}", style="red")
    return _summary(set_up, clients, teller, console) or int(bool(broken))


async def _script(set_up: Stage, c: Clients, teller: Teller) -> None:
    """About a minute. Every scene shows one thing the gate does."""
    say = teller.line
    say("—", "Scene 1: the first request loads its model, the second one joins it.")
    await _together(c.chat("anna", "coder"), _later(1.0, c.chat("ben", "coder")))
    say("—", "Scene 2: another preset is asked for. The running answer is finished first, then the card changes hands.")
    await _together(c.chat("anna", "coder", tokens=60), _later(0.5, c.chat("carl", "writer")))
    say("—", "Scene 3: native Ollama, an image job, and a chat that waits for it. Unloading is proven, not hoped for.")
    await _together(c.ollama("dora", "llama3"), _later(1.0, c.image("eve")), _later(2.0, c.ollama("dora", "llama3")))
    say("—", "Scene 4: three images in a row are one batch; a model list and a client that gives up disturb nobody.")
    await _together(
        c.image("eve"), c.image("finn"), c.image("gus"),
        _later(0.5, c.give_up("hans", "writer", 1.5)), _later(1.0, c.chat("ida", "writer")),
    )  # fmt: skip
    say("—", "Scene 5: a model nobody knows swaps nothing.")
    before = len(c.outcomes)
    await c.refused("jan", "koder", "404 unknown_model") if await _owned_only(set_up) else None
    if len(c.outcomes) == before:
        await c.refused("jan", "cap:telepathy", "404 unknown_model")
    say(
        "—",
        "Scene 6: an engine is killed in the middle of an answer. The client sees it; the next request respawns it.",
    )
    await c.chat_cut_off("kim", "coder", lambda: _kill_engine("coder.gguf"))
    await c.chat("kim", "coder")
    say("—", "Scene 7: everybody at once.")
    await _together(
        c.chat("anna", "coder"), c.chat("carl", "writer"), c.ollama("dora", "llama3"), c.image("eve"),
        c.chat("ben", "coder"), c.chat("ida", "writer"),
    )  # fmt: skip


async def _together(*scenes: Coroutine[Any, Any, Any]) -> None:
    await asyncio.gather(*scenes)


async def _later(seconds: float, scene: Coroutine[Any, Any, Any]) -> None:
    await asyncio.sleep(seconds)
    await scene


async def _owned_only(set_up: Stage) -> bool:
    """Whether unknown names are refused; where there is an Ollama, they are its business."""
    async with httpx.AsyncClient(trust_env=False) as http:
        status = (await http.get(f"{set_up.gate}/status")).json()
    return not any(engine["name"] == "ollama" for engine in status["engines"])


async def _settle(set_up: Stage) -> None:
    """Give the gate the moment it needs to see that the last job is over."""
    async with httpx.AsyncClient(trust_env=False) as http:
        for _ in range(100):
            status = (await http.get(f"{set_up.gate}/status")).json()
            if not status["inflight"] and not status["queue"] and status["phase"] in ("idle", "serving"):
                return
            await asyncio.sleep(0.1)


def _kill_engine(model: str) -> None:
    """kill -9 of the engine that serves this model file, as an out-of-memory killer would."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(word).endswith("/" + model) for word in process.info["cmdline"] or ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


async def _watch_events(set_up: Stage, teller: Teller) -> None:
    async with (
        httpx.AsyncClient(trust_env=False, timeout=None) as http,
        http.stream("GET", f"{set_up.gate}/events") as answer,
    ):
        kind = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                teller.event(kind, json.loads(line[6:])["fields"])


async def _watch_status(set_up: Stage, teller: Teller) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        while True:
            teller.status((await http.get(f"{set_up.gate}/status", timeout=10)).json())
            await asyncio.sleep(LOOK)


async def _show_answers(clients: Clients, teller: Teller) -> None:
    """The real engines really answer."""
    for prompt in ("Write one sentence about a turnstile.", "What is the capital of France?"):
        outcome = await clients.chat("you", "writer", prompt, tokens=48)
        teller.line("you", prompt)
        teller.line("writer", " ".join(outcome.text.split()), "green")


def _summary(set_up: Stage, clients: Clients, teller: Teller, console: Console) -> int:
    outcomes, swaps = clients.outcomes, teller.swaps
    table = Table(title="What each client saw", title_justify="left")
    for column in ("client", "asked", "requests", "first byte, s (worst)", "ended"):
        table.add_column(column, justify="left" if column in ("client", "asked", "ended") else "right")
    for who, what in dict.fromkeys((o.who, o.what) for o in outcomes):
        mine = [o for o in outcomes if (o.who, o.what) == (who, what)]
        ends = ", ".join(dict.fromkeys(o.end for o in mine))
        table.add_row(who, what, str(len(mine)), f"{max(o.waited for o in mine):.1f}", ends)
    console.print()
    console.print(table)
    console.print(f"swaps: {len(swaps.whole)}; off the card {_spread(swaps.evict)}, ready {_spread(swaps.admit)}")
    odd = [o for o in outcomes if not o.expected]
    alarms = set_up.alarms
    console.print(f"the card was held by two engines at once: {alarms} times")
    console.print(f"requests that did not end as they should: {len(odd)}")
    for outcome in odd:
        console.print(f"  {outcome.who} {outcome.what}: {outcome.end}", style="red")
    return 1 if odd or alarms else 0


def _spread(seconds: list[float]) -> str:
    return f"in {min(seconds):.2f}–{max(seconds):.2f} s" if seconds else "never"


def main(real: Real | None) -> int:
    try:
        return asyncio.run(play(real, Console()))
    except KeyboardInterrupt:
        return 130
