"""The watchdog: an engine that is alive and gets nowhere is found out and started again.

From the swap document: a client that left at the wrong moment wedged an engine's only slot, and the damage landed on
the requests after it, for 89 minutes. So an engine of ours is looked at when a client has left in the middle of its
work, and when a request that was granted has had no byte for a while. What is seen is judged by `judge`, which is
pure:

    it does not answer at all, or says that it cannot serve     stuck, when consecutive looks agree
    it works on something and gets nowhere                      stuck, when that has lasted long enough
    it has a request of ours and works on nothing               the same
    it works on something nobody asked for any more, and        the same
    does not show whether it gets on
    it gets on with its work, however slowly                    fine

A long prefill sends no byte for minutes and is fine: what counts is whether the engine gets on, by its own books.
Silence alone never ends anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from gpu_turnstile.arbiter import Arbiter
from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health, Probe
from gpu_turnstile.rounds import Rounds
from gpu_turnstile.seats import Seat

log = structlog.get_logger("watchdog")

AGREEING_LOOKS = 3  # that find no answer
LOOKS = 20  # in the time an engine has
FASTEST, SLOWEST = 0.1, 5.0  # seconds between two looks


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of an engine. `pulse`: see `engines.base.Pulsed`; `quiet`: our request it owes an answer to."""

    at: float
    probe: Probe
    busy: bool | None = None
    pulse: str | None = None
    waits: bool = False  # a request of ours has had no byte for a while
    held: bool = False  # there are requests of ours at all


@dataclass(slots=True)
class Suspicion:
    """Why an engine is looked at, and what has not changed since when."""

    last: Look
    same_since: float
    dead_looks: int = 0


def judge(suspicion: Suspicion | None, look: Look, limit: float) -> tuple[Suspicion | None, str | None]:
    """What is thought of an engine after one more look, and the diagnosis if it is stuck; None, None = it is fine.

    `limit`: seconds it may get nowhere.
    """
    dead = look.probe.health is not Health.READY
    if suspicion is None:
        return (Suspicion(look, look.at, int(dead)), None) if dead or _is_odd(look) else (None, None)
    if dead:
        suspicion.dead_looks += 1
        if suspicion.dead_looks >= AGREEING_LOOKS:
            return suspicion, f"it does not serve any more: {look.probe.detail or look.probe.health}"
        suspicion.last = look
        return suspicion, None
    suspicion.dead_looks = 0
    if not _is_odd(look):
        return None, None
    if _has_moved(suspicion.last, look):
        return Suspicion(look, look.at), None
    suspicion.last = look
    stuck_for = look.at - suspicion.same_since
    return suspicion, _diagnosis(look, stuck_for) if stuck_for >= limit else None


def _is_odd(look: Look) -> bool:
    """Whether it is worth another look: it owes us something, or works with nobody there."""
    return look.waits or (look.busy is True and not look.held)


def _has_moved(before: Look, now: Look) -> bool:
    if before.probe.health is not now.probe.health or before.busy is not now.busy:
        return True
    return before.pulse != now.pulse


def _diagnosis(look: Look, seconds: float) -> str | None:
    """None: what was seen does not say that it is stuck."""
    if look.busy is True and look.pulse is not None:
        return f"it works on something and has got nowhere for {seconds:.0f} s"
    if look.busy is True and not look.held:
        return f"it has been busy for {seconds:.0f} s with work nobody waits for any more"
    if look.busy is False and look.waits:
        return f"it has had a request for {seconds:.0f} s and works on nothing"
    return None


class Watchdog:
    """`quiet`: seconds for which each tenant has sent nothing of some request."""

    def __init__(self, arbiter: Arbiter, quiet: Callable[[], Mapping[str, float]], limit: float) -> None:
        """`limit`: seconds without a byte or any progress until an engine is taken for stuck; 0 = never look."""
        self._arbiter = arbiter
        self._quiet = quiet
        self._patience = limit / 2  # half of it passes before an engine is looked at, half while it is
        self._left: dict[str, float] = {}  # tenants that a client has left, and when
        self._suspicions: dict[str, Suspicion] = {}
        pause = min(max(limit / LOOKS, FASTEST), SLOWEST) if limit > 0 else 0.0
        self.rounds = Rounds("looking for stuck engines", self._round, pause)
        self.restarts = 0
        if limit > 0:
            arbiter.on_abandoned = self._abandoned

    def view(self) -> list[dict[str, Any]]:
        """What is under suspicion: tenant and seconds without progress."""
        now = time.monotonic()
        return [
            {"tenant": name, "seconds": round(now - suspicion.same_since, 1)}
            for name, suspicion in self._suspicions.items()
        ]

    def _abandoned(self, tenant: str) -> None:
        self._left[tenant] = time.monotonic()

    async def _round(self) -> None:
        quiet = self._quiet()
        for name in {*quiet, *self._left, *self._suspicions}:
            seat = self._arbiter.seat(name)
            watched = seat is not None and seat.owned and seat.tenant.mode is Mode.LLM
            if seat is None or not watched or name not in self._arbiter.snapshot().residents:
                self._forget(name)
            elif name in self._left or name in self._suspicions or quiet.get(name, 0.0) >= self._patience:
                await self._look_at(name, seat, quiet.get(name, 0.0) >= self._patience)

    async def _look_at(self, name: str, seat: Seat, waits: bool) -> None:
        left = self._left.get(name)
        look = await self._see(name, seat, waits)
        suspicion, diagnosis = judge(self._suspicions.get(name), look, self._patience)
        if suspicion is None:
            self._suspicions.pop(name, None)
            if left == self._left.get(name):
                self._left.pop(name, None)
            return
        self._suspicions[name] = suspicion
        if diagnosis is not None and self._arbiter.seat(name) is seat:
            self._forget(name)
            self.restarts += 1
            log.warning("engine_stuck", engine=name, diagnosis=diagnosis, action="it is ended and started again")
            self._arbiter.wedged(name, f"{name} was stuck and is started again: {diagnosis}")

    async def _see(self, name: str, seat: Seat, waits: bool) -> Look:
        probe = await seat.engine.probe()
        now, held = time.monotonic(), self._arbiter.has_leases(name)
        if probe.health is not Health.READY:
            return Look(now, probe, waits=waits, held=held)
        busy = await seat.engine.busy()
        pulse = getattr(seat.engine, "pulse", None)
        return Look(now, probe, busy, await pulse() if pulse is not None and busy else None, waits, held)

    def _forget(self, name: str) -> None:
        self._left.pop(name, None)
        self._suspicions.pop(name, None)
