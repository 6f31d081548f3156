"""Work that somebody sent past the gate: noticed, shown, and, unless told otherwise, waited for.

The gate cannot keep anybody from an engine's own port. It looks now and then at the engines others run that do not
hold the card, and at a ComfyUI of its own that does:

  a ComfyUI with jobs that nobody sent through here   it gets a ticket like any image job, and the lease is held until
                                                      those jobs have ended: from then on nothing tramples them
  an Ollama with models loaded                        it is shown; before the next hand-over it is unloaded, as always

Jobs outlive the gate that sent them (a gate that was killed): those of engines it had started itself are taken over
before the first request comes in, because its own engines are stopped, not asked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import structlog

from gpu_turnstile.arbiter import Arbiter, Ticket
from gpu_turnstile.engines.comfyui import ComfyUI
from gpu_turnstile.jobs import JobBook
from gpu_turnstile.rounds import Rounds
from gpu_turnstile.seats import Seat

log = structlog.get_logger("bypass")


@dataclass(slots=True)
class Bypass:
    """What was seen last. `since` is on the arbiter's clock."""

    tenant: str
    what: str
    since: float


class BypassWatch:
    def __init__(self, arbiter: Arbiter, jobs: JobBook, interval: float, *, wait: bool) -> None:
        """`interval` in seconds, 0 = never look; `wait`: jobs sent past the gate get a ticket."""
        self._arbiter = arbiter
        self._jobs = jobs
        self._wait = wait
        self._seen: dict[str, Bypass] = {}
        self._waiting: dict[str, Ticket] = {}
        self.rounds = Rounds("looking for work past the gate", self.look, interval)
        arbiter.swaps.before_evict = self.look_at

    def view(self) -> list[dict[str, Any]]:
        now = self._arbiter.now
        return [{"tenant": b.tenant, "what": b.what, "age_s": round(now - b.since, 3)} for b in self._seen.values()]

    async def take_over(self) -> None:
        """At the start: what an earlier gate's engines work on holds the card until it has ended."""
        for name, seat in tuple(self._arbiter.seats.items()):
            if not seat.owned or not self._may_be_past(seat):
                continue
            _, jobs = await self._strange(seat)
            if jobs:
                self._note(name, f"{len(jobs)} job(s) sent by an earlier gate")
                self._adopt(name)

    def _may_be_past(self, seat: Seat) -> bool:
        """Whether it can have work that this gate did not send. One of its own that is not on the card does not run."""
        if not seat.owned:
            return True
        return isinstance(seat.engine, ComfyUI) and seat.tenant.name in self._arbiter.snapshot().residents

    async def look(self) -> None:
        """Look once at every engine that may work on something nobody sent through here."""
        for name, seat in tuple(self._arbiter.seats.items()):
            if self._arbiter.swapping or not self._may_be_past(seat):
                continue
            what, jobs = await self._strange(seat)
            self._note(name, what)
            if jobs and self._wait and name not in self._waiting:
                self._adopt(name)

    async def look_at(self, name: str) -> None:
        """One more look at an engine before it has to leave: its release waits for what is found there."""
        seat = self._arbiter.seat(name)
        if seat is not None and isinstance(seat.engine, ComfyUI) and not seat.owned:
            what, _ = await self._strange(seat)
            self._note(name, what)

    async def _strange(self, seat: Seat) -> tuple[str, tuple[str, ...]]:
        """What an engine does that nobody asked for through here; empty = nothing."""
        engine, name = seat.engine, seat.tenant.name
        if isinstance(engine, ComfyUI):
            jobs = await engine.find_unknown(self._jobs.known)
            if not jobs or self._arbiter.has_leases(name):  # a job of ours may be on its way into the book
                return "", ()
            return f"{len(jobs)} job(s) sent past the gate", jobs
        if self._arbiter.resident == name or self._arbiter.swapping:
            return "", ()
        loaded = await engine.loaded()
        models = ", ".join(model.name for model in loaded or ())
        return (f"loaded past the gate: {models}", ()) if models else ("", ())

    def _note(self, tenant: str, what: str) -> None:
        before = self._seen.get(tenant)
        if not what:
            if self._seen.pop(tenant, None) is not None:
                self._arbiter.tell("bypass_end", {"tenant": tenant})
        elif before is None or before.what != what:
            self._seen[tenant] = Bypass(tenant, what, time.monotonic())
            self._arbiter.tell("bypass", {"tenant": tenant, "what": what})

    def _adopt(self, tenant: str) -> None:
        """Take a ticket for what is running there already, and hold the card until it has ended."""

        def answered(ticket: Ticket) -> None:
            self._waiting.pop(tenant, None)
            if ticket.tenant is not None:
                self._jobs.follow(ticket, None)

        ticket = self._arbiter.acquire(
            (tenant,), client="past the gate", on_answer=answered, on_cut=lambda reason: None
        )
        self._waiting[tenant] = ticket
        if ticket.tenant is not None or ticket.refusal is not None:
            answered(ticket)
