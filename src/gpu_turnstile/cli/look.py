"""The commands that look at a running gate, or change what is on its card."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import typer

from gpu_turnstile.cli import show
from gpu_turnstile.cli.gate import Gate
from gpu_turnstile.cli.say import NO_GATE, clean, fail

EVERY = 1.0  # seconds between two looks of --watch


def status(url: str | None, as_json: bool, watch: bool) -> None:
    gate = Gate(url)
    if not watch:
        found = _status(gate)
        if as_json:
            _print_json(found)
        else:
            show.console().print(show.status(found, gate.url))
    elif as_json:
        while True:
            typer.echo(json.dumps(_status(gate)))
            time.sleep(EVERY)
    else:
        _watch(gate)


def _watch(gate: Gate) -> None:
    from rich.live import Live

    with Live(show.status(_status(gate), gate.url), console=show.console(), auto_refresh=False) as live:
        while True:
            time.sleep(EVERY)
            live.update(show.status(_status(gate), gate.url), refresh=True)


def mode(url: str | None, wish: str | None, model: str | None, as_json: bool) -> None:
    gate = Gate(url)
    with gate.calling() as ts:
        found = ts.mode(wish, model)
    _report(found, as_json)


def unload(url: str | None, as_json: bool) -> None:
    with Gate(url).calling() as ts:
        found = ts.unload()
    _report(found, as_json)
    if found["residents"] and not as_json:
        typer.echo("not empty yet: it is unloaded as soon as the requests in flight are done", err=True)


def _report(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    residents = ", ".join(map(clean, found["residents"])) or "nobody"
    target = f", on its way: {clean(found['target'])}" if found["target"] else ""
    typer.echo(f"{found['mode']}: {residents} ({found['phase']}{target})")


def events(url: str | None, follow: bool, count: int, since: int | None, as_json: bool) -> None:
    gate = Gate(url)
    out = show.console()

    def put(found: dict[str, Any]) -> None:
        if as_json:
            typer.echo(json.dumps(found))
        else:
            out.print(show.event(found), soft_wrap=True)

    past = deque(gate.events(since or 0, follow=False), maxlen=count if since is None else None)
    for found in past:
        put(found)
    if not follow:
        return
    last = max((found["id"] for found in past if "id" in found), default=since or 0)
    for found in gate.events(last, follow=True):
        put(found)
    fail("the gate has ended the stream: it is shutting down", NO_GATE)


def _status(gate: Gate) -> dict[str, Any]:
    with gate.calling() as ts:
        return ts.status()


def _print_json(found: Any) -> None:
    typer.echo(json.dumps(found, indent=2))
