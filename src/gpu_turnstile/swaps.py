"""Carries out swaps, one at a time, and says who is on the card by the word of the engines themselves.

    room for it? -> evict, prove the memory back -> ask those past the gate to leave -> admit, wait until it answers

Whatever goes wrong, it ends in SwapSucceeded or SwapFailed with what is true then: who still serves, and who may hold
memory and serves no more. It decides nothing: who leaves for whom is in the order.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from gpu_turnstile.core.model import Code, Mode, Sized, StartSwap, StartUnload, SwapFailed, SwapSucceeded
from gpu_turnstile.core.policy import Rules
from gpu_turnstile.engines.base import Health
from gpu_turnstile.seats import GB, AdmitFailed, Evicted, Seat
from gpu_turnstile.tally import Histogram

log = structlog.get_logger("swaps")


@dataclass(frozen=True, slots=True)
class Found:
    """What is on the card when the gate starts. `coming`: it was being started when the earlier gate ended."""

    residents: tuple[str, ...]
    coming: str | None
    unready: tuple[str, ...]


class Swaps:
    """`seats`: by the names of the presets there are now; `seated`: what runs under a name, whatever its preset says.

    `fail_closed`: nobody is started on a card that cannot be read. `tell` hears what people may.
    """

    def __init__(
        self, seats: Iterable[Seat], rules: Rules, tell: Callable[[str, dict[str, Any]], None], *, fail_closed: bool
    ) -> None:
        self.seats = {seat.tenant.name: seat for seat in seats}
        self.seated: dict[str, Seat] = {}
        self.before_evict: Callable[[str], Awaitable[None]] | None = None  # a last look at who is to leave
        self.swap_seconds = Histogram()
        self.unload_seconds = Histogram()
        self.unload_failures = 0  # evictions after which memory did not come back, or nobody said that it would
        self._rules = rules
        self._tell = tell
        self._fail_closed = fail_closed

    def seat(self, name: str) -> Seat | None:
        """What runs under a tenant's name now."""
        return self.seated.get(name) or self.seats.get(name)

    # ------------------------------------------------------------------------------------------ the truth

    async def look_around(self) -> Found:
        """Take over what an earlier gate left, and find out who holds the card."""
        left = await self._adopt_all()
        loading = [name for name in left if await self.seats[name].loading()]
        residents = await self._residents()
        unready = [name for name in left if name not in residents]
        beside = len(unready) > 1 or (residents and not self._rules.colocate)
        coming = next((name for name in unready if name in loading and not beside), None)
        self.seated = {name: self.seats[name] for name in (*residents, *left)}
        return Found(tuple(residents), coming, tuple(name for name in unready if name != coming))

    async def _adopt_all(self) -> list[str]:
        """Who may hold the card therefore, ready or not."""
        left = []
        for name, seat in self.seats.items():
            if await seat.adopt():
                left.append(name)
                self._tell("adopted", {"tenant": name})
        return left

    async def _residents(self) -> list[str]:
        """Who serves; whoever works on something first, so that it is not trampled."""
        found = await self.truth(self.seats)
        busy = {name for name in found if _may_work(self.seats[name]) and await self.seats[name].engine.busy()}
        return sorted(found, key=lambda name: name not in busy)

    async def truth(self, names: Iterable[str]) -> list[str]:
        """Who of these is on the card, by what engines and runtimes say now."""
        found = []
        for name in names:
            seat = self.seats.get(name)
            if seat is not None and await self._is_there(seat):
                found.append(name)
        return found

    @staticmethod
    async def _is_there(seat: Seat) -> bool:
        if seat.owned:
            there = seat.serves and await seat.runtime.alive()
            return there and (await seat.engine.probe()).health is Health.READY
        loaded = await seat.engine.loaded()
        return bool(loaded) if loaded is not None else await seat.engine.busy() is True

    # -------------------------------------------------------------------------------------------- one swap

    async def carry_out(self, order: StartSwap | StartUnload) -> SwapSucceeded | SwapFailed:
        target, began = (order.target if isinstance(order, StartSwap) else None), time.monotonic()
        try:
            coming = isinstance(order, StartSwap) and order.coming
            unfit = None if coming else await self._has_no_room(target, order.evict)
            if unfit is not None:
                return SwapFailed(order.swap, unfit, order.evict, code=Code.MODEL_UNAVAILABLE)
            problem, stuck = await self._evict(order.evict, target)
            if problem is None and target is not None:
                if not coming:
                    await self._evict_strangers(target, order.evict)
                problem = await self._admit(target, coming)
                if problem is not None:
                    stuck = await self._clean_up(target)
            residents = [] if problem is None else await self.truth((*order.evict, *([target] if target else [])))
        except Exception as error:  # a bug must not leave the card in a swap for ever
            log.exception("a swap failed in a way nobody expected")
            problem, residents, stuck = f"internal error: {error!r}", [], list(order.evict)
        if problem is not None:
            return SwapFailed(order.swap, problem, tuple(n for n in residents if n not in stuck), tuple(stuck))
        if target is None:
            return SwapSucceeded(order.swap)
        self.swap_seconds.observe(time.monotonic() - began)
        newcomer = self.seated.get(target)
        return SwapSucceeded(order.swap, 0.0 if newcomer is None else newcomer.refill_s)

    async def _has_no_room(self, target: str | None, evict: tuple[str, ...]) -> str | None:
        """Why the target cannot fit beside what others hold on the card, before anybody is evicted for it.

        What nobody of ours is known to hold belongs to other processes. Where that cannot be told, it is not guessed.
        """
        seat = self.seats.get(target or "")
        if seat is None:
            return None
        tenant = seat.tenant
        reading = await seat.reading()
        if reading is None and self._fail_closed:
            return f"what the card holds cannot be read, so {tenant.name} is not started (LLMC_VRAM_UNKNOWN=refuse)"
        ours = [*(seat.held for seat in self.seated.values()), *(seat.left for seat in self.seats.values())]
        if not tenant.footprint or not self._rules.capacity or reading is None or any(held is None for held in ours):
            return None
        foreign = reading.used - sum(held or 0 for held in ours)
        room = (reading.total - foreign) / GB
        if tenant.sized is not Sized.LEARNED:
            room = min(self._rules.capacity, room)
        if tenant.footprint <= room:
            return None
        holders = ", ".join(f"{h.name} ({h.pid})" for h in reading.holders or ())
        others = f"; on the card are {holders}" if holders else ""
        return (
            f"{tenant.name} needs {tenant.size}, and {room:.1f} GB are left beside "
            f"{foreign / GB:.1f} GB that other processes hold{others}"
        )

    async def _evict(self, names: tuple[str, ...], target: str | None) -> tuple[str | None, list[str]]:
        need = self.seats[target].tenant.footprint if target in self.seats else 0.0
        problem: str | None = None
        stuck: list[str] = []
        for name in names:
            seat = self.seat(name)
            if seat is None:
                continue
            self._tell("evicting", {"tenant": name})
            if self.before_evict is not None:
                await self.before_evict(name)
            done = await seat.evict(need)
            self._evicted(name, done)
            if not done.gone:
                problem = f"{name} could not be taken off the card: {done.detail}"
                stuck.append(name)
        return problem, stuck

    async def _evict_strangers(self, target: str, evicted: tuple[str, ...]) -> None:
        """Engines others run are asked, never assumed: one that holds something past the gate leaves like any other."""
        if self._rules.colocate:
            return
        for name, seat in tuple(self.seats.items()):
            if not seat.owned and name != target and name not in evicted and await self._is_there(seat):
                self._tell("bypass", {"tenant": name, "what": "holds the card past the gate; it is made to leave"})
                self._evicted(name, await seat.evict(self.seats[target].tenant.footprint))

    def _evicted(self, name: str, done: Evicted) -> None:
        self.unload_seconds.observe(done.seconds)
        self.unload_failures += not done.clean
        fields = {"tenant": name, "seconds": round(done.seconds, 3), "sure": done.sure, "detail": done.detail}
        if done.gone:
            self.seated.pop(name, None)
        self._tell("evicted" if done.gone else "evict_failed", fields)

    async def _admit(self, name: str, coming: bool) -> str | None:
        began = time.monotonic()
        self._tell("admitting", {"tenant": name})
        seat = self.seats.get(name)
        if seat is None:
            return f"the preset {name!r} was removed while the card was made free for it"
        self.seated[name] = seat
        try:
            await (seat.resume() if coming else seat.admit())
        except AdmitFailed as error:
            self._tell("admit_failed", {"tenant": name, "reason": str(error)})
            return str(error)
        self._tell("admitted", {"tenant": name, "seconds": round(time.monotonic() - began, 3)})
        return None

    async def _clean_up(self, name: str) -> list[str]:
        """After a failed start: leave the card provably empty."""
        seat = self.seated.get(name)
        if seat is None or not seat.owned:
            return []
        done = await seat.evict()
        self._evicted(name, done)
        return [] if done.gone else [name]


def _may_work(seat: Seat) -> bool:
    """Whether it may work on something though no gate has run: its clients go past it, or its jobs outlive it."""
    return not seat.owned or seat.tenant.mode is Mode.COMFYUI
