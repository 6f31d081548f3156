"""The commands for locks: take, renew and end one, see the queue, break the glass."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from gpu_turnstile.cli import show
from gpu_turnstile.cli.gate import Gate
from gpu_turnstile.cli.say import SIGNAL, WRONG, clean, fail, warn
from gpu_turnstile.client import Granted, Lock, Queued
from gpu_turnstile.client.wire import who

OWNER = "TURNSTILE_OWNER"
TOKEN = "TURNSTILE_LOCK"
STOPPERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal told the program to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def stop_by_exception() -> None:
    """From now on a signal to end is an exception, so that what was begun is ended on the way out."""

    def stop(number: int, frame: object) -> NoReturn:
        raise Stopped(number)

    for number in STOPPERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, stop)


def caller() -> str:
    """Who holds a lock that outlives the command: the shell that called it, unless TURNSTILE_OWNER says else."""
    return os.environ.get(OWNER) or f"{who()}:{os.getppid()}"


def lock(
    url: str | None, preset: str | None, owner: str | None, ttl: float | None, wait: bool | float, as_json: bool
) -> None:
    gate = Gate(url)
    stop_by_exception()
    try:
        with gate.calling() as ts:
            held = ts.lock(preset, owner or caller(), ttl, wait, on_wait=Waiting())
    except Stopped as stopped:
        raise typer.Exit(SIGNAL + stopped.number) from None
    assert held.granted is not None
    _say(held.granted, as_json, "locked")


def renew(url: str | None, owner: str | None, ttl: float | None, token: int | None, as_json: bool) -> None:
    with Gate(url).calling() as ts:
        answer = ts.renew(owner or caller(), ttl, _token(owner, token))
    _say(answer, as_json, "renewed")


def unlock(
    url: str | None,
    owner: str | None,
    token: int | None,
    force: bool,
    leave: bool,
    reason: str | None,
    as_json: bool,
) -> None:
    """Without an owner: the caller's own; with force and without an owner: everybody's."""
    everybody = force and owner is None and not leave
    token = None if force or leave else _token(owner, token)
    with Gate(url).calling() as ts:
        done = ts.unlock(owner or caller(), token, force=force, everybody=everybody, leave=leave, reason=reason)
    if as_json:
        typer.echo(json.dumps(done.raw, indent=2))
        return
    if done.owners:
        typer.echo(f"unlocked: {', '.join(map(clean, done.owners))}")
    if done.waiters:
        typer.echo(f"left the queue: {', '.join(map(clean, done.waiters))}")
    if not (done.owners or done.waiters):
        nothing = "was not in the queue" if leave else "held no lock and was not in the queue"
        typer.echo("nobody" if everybody else f"{clean(owner or caller())} {nothing}")


def queue(url: str | None, as_json: bool) -> None:
    with Gate(url).calling() as ts:
        locks = ts.status()["locks"]
    if as_json:
        typer.echo(json.dumps(locks, indent=2))
        return
    out = show.console()
    out.print(show.holders(locks))
    for part in show.lock_queue(locks):
        out.print(part)


def release(url: str | None, reason: str, as_json: bool) -> None:
    if not reason.strip():
        fail("--reason: say why; it is told to everybody whose work is cut", WRONG)
    with Gate(url).calling() as ts:
        cut = ts.release(reason)
    if as_json:
        typer.echo(json.dumps({"released": cut, "reason": reason}, indent=2))
        return
    for item in cut:
        what = "a swap" if item.get("swap") else f"a request of {clean(item.get('client') or 'somebody')}"
        age = f", {show.ago(item['age_s'])} old" if "age_s" in item else ""
        typer.echo(f"cut: {what} on {clean(item.get('tenant') or 'the card')}{age}")
    typer.echo("released; the locks are ended" if cut else "released; no work was on the card, the locks are ended")


def _token(owner: str | None, token: int | None) -> int | None:
    """The token that is in the environment goes with the owner that is."""
    found = os.environ.get(TOKEN, "")
    return int(found) if token is None and owner is None and os.environ.get(OWNER) and found.isdigit() else token


def _say(answer: Granted | Queued, as_json: bool, verb: str) -> None:
    if as_json:
        typer.echo(json.dumps(answer.raw, indent=2))
        return
    for said in (answer.ended, answer.raw.get("warning")):
        if said:
            warn(said)
    if isinstance(answer, Queued):
        typer.echo(f"{clean(answer.owner)} waits for {clean(answer.preset)} at position {answer.position}")
        return
    others = [clean(o.owner) for o in answer.owners if o.owner != answer.owner]
    line = f"{verb} {clean(answer.preset)} for {clean(answer.owner)}, token {answer.token}, until "
    line += f"{show.ago(answer.ttl)} of silence"
    typer.echo(line + (f"; shared with {', '.join(others)}" if others else ""))


class Waiting:
    """Says on standard error where in the queue one is, whenever it changes."""

    def __init__(self, say: Callable[[str], Any] = warn) -> None:
        self.since = time.monotonic()
        self.told = False
        self._say = say
        self._last: tuple[Any, ...] = ()

    def __call__(self, lock: Lock) -> None:
        place = lock.queued
        if place is None:
            return
        holders = tuple(o.owner for o in place.owners)
        now = (place.position, len(place.queue), holders, place.raw.get("preset"), lock.trouble is not None)
        if now != self._last:
            self._last, self.told = now, True
            self._say(self._line(lock, place))

    @staticmethod
    def _line(lock: Lock, place: Queued) -> str:
        if lock.trouble is not None:
            return f"the gate does not answer; still waiting for {clean(place.preset)}"
        line = (
            f"waiting for {clean(place.preset)}, position {place.position} of {max(place.position, len(place.queue))}"
        )
        if place.owners:
            owners = ", ".join(clean(o.owner) for o in place.owners)
            return f"{line}; {clean(place.raw.get('preset'))} is locked by {owners}"
        ahead = clean(place.queue[0].owner) if place.queue else "somebody"
        return f"{line}; the lock is free and {ahead} is next"
