"""The commands' way to a running gate: the Python client, and one sentence with an exit code when it raises."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterator
from typing import Any

from gpu_turnstile.cli import places
from gpu_turnstile.cli.say import FAILED, HELD, NO_GATE, NOT_YOURS, WRONG, fail
from gpu_turnstile.client import (
    BadRequest,
    Event,
    Locked,
    NotHeld,
    StaleLock,
    Turnstile,
    TurnstileError,
    Unreachable,
)


class Gate:
    """`url` is what was given on the command line or in TURNSTILE_URL; None = the default.

    The key comes from TURNSTILE_API_KEY only: others can read command lines.
    """

    def __init__(self, url: str | None, owner: str | None = None) -> None:
        self.url = places.gate_url(url)
        self.client = Turnstile(self.url, owner=owner)
        logging.getLogger("gpu_turnstile.client").setLevel(logging.CRITICAL)  # commands say it in their own words

    @contextlib.contextmanager
    def calling(self) -> Iterator[Turnstile]:
        """The client, whose errors end the command."""
        try:
            yield self.client
        except TurnstileError as problem:
            fail(sentence(problem), code(problem))

    def events(self, since: int | None, follow: bool) -> Generator[dict[str, Any]]:
        """What the feed says, one dict an event; `kind` is `lost` where the gate was faster than we were."""
        with self.calling() as ts:
            for event in ts.events(since, follow):
                yield as_dict(event)


def as_dict(event: Event) -> dict[str, Any]:
    if event.id is None:
        return {"kind": event.kind, "fields": event.fields}
    return {"id": event.id, "time": event.time, "kind": event.kind, "fields": event.fields}


def sentence(problem: TurnstileError) -> str:
    if isinstance(problem, Unreachable):
        return f"{problem}; start it with `turnstile serve`, or see --url"
    return str(problem)


def code(problem: TurnstileError) -> int:
    """The exit code that tells it to a script."""
    match problem:
        case Unreachable():
            return NO_GATE
        case Locked():
            return HELD
        case StaleLock() | NotHeld():
            return NOT_YOURS
        case BadRequest(status=400):
            return WRONG
    return FAILED
