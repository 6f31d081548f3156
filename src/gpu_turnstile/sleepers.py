"""Asleep instead of stopped: an engine that gives the card back and keeps its process, for a quick return.

A `Bed` is one preset's: it lays its engine down and wakes it, and says when it must be stopped instead. The `Dorm`
knows who sleeps, keeps what they hold in main memory within its limit, and ends those whose preset is gone.

Kept true here: an engine counts as asleep only when its memory was seen to be back, less a driver's context; nothing is
woken before what it needs was seen to be free (a failed wake kills some engines); who is in the dorm is being worked on
by nobody, and is taken out before anything is done to it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import structlog

from gpu_turnstile.engines.base import Health, Sleeper
from gpu_turnstile.gpu.base import Reading
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.gpu.settle import CONTEXT, SettleState, wait_free
from gpu_turnstile.runtimes.base import Runtime, StopFailed

log = structlog.get_logger("sleepers")

GB = 1 << 30
SETTLE_FOR = 5.0  # seconds: engines answer after they have let go, so what is not back soon does not come back
SETTLE_POLL = 0.01  # seconds between two looks at the card
IDLE_WITHIN = 3.0  # seconds for work whose clients were cut off to end
IDLE_POLL = 0.05  # seconds between two looks
FAILURES = 2  # in a row, after which an engine is stopped as if it could not sleep
EVENTS = ("asleep", "awake", "sleep_failed", "wake_failed", "sleeper_ended")

Tell = Callable[[str, dict[str, Any]], None]


class State(StrEnum):
    UP = "up"  # awake, or not running at all
    ASLEEP = "asleep"
    UNSURE = "unsure"  # it loads, lies down or wakes, or did not do so to the end: it may hold anything


@dataclass(slots=True)
class Costs:
    """Seconds the last one of each took; None = not measured yet."""

    stop: float | None = None
    load: float | None = None
    sleep: float | None = None
    wake: float | None = None

    @property
    def sleep_is_slower(self) -> bool:
        """Whether the preset is better off stopped, by what was measured."""
        if self.load is None or self.sleep is None or self.wake is None:
            return False
        return self.sleep + self.wake > (self.stop or 0.0) + self.load


class Dorm:
    """`limit`: bytes of main memory that sleepers may hold together; 0 = no limit. `tell` hears what people may.

    `counts`: how often each of these happened, by the event's name.
    """

    def __init__(self, limit: int, tell: Tell) -> None:
        self.limit = limit
        self.counts = Counter(dict.fromkeys(EVENTS, 0))
        self._tell = tell
        self.closed = False  # nobody is put to sleep any more
        self._asleep: list[Bed] = []  # longest first
        self._known: set[Bed] = set()
        self._ending = asyncio.Lock()  # held while somebody is being ended

    def know(self, beds: Iterable[Bed | None]) -> None:
        """The beds of the presets there are now. Whoever sleeps in another is ended by the next `sweep`."""
        self._known = {bed for bed in beds if bed is not None}

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        self.counts[kind] += 1
        self._tell(kind, fields)

    @property
    def sleeping(self) -> int:
        """How many sleep."""
        return len(self._asleep)

    @property
    def ram(self) -> int:
        """Bytes of main memory that they hold."""
        return sum(bed.ram for bed in self._asleep)

    @property
    def occupied(self) -> bool:
        """Whether anybody sleeps, or is being ended."""
        return bool(self._asleep) or self._ending.locked()

    def takes(self, bed: Bed) -> bool:
        return not self.closed and bed in self._known

    def enter(self, bed: Bed) -> None:
        self._asleep.append(bed)

    def leave(self, bed: Bed) -> None:
        if bed in self._asleep:
            self._asleep.remove(bed)

    async def sweep(self) -> None:
        """End those whose preset is gone or has changed. When this returns, none of them runs."""
        async with self._ending:
            for bed in [bed for bed in self._asleep if bed not in self._known]:
                await self._end(bed, "its preset is gone or has changed")

    async def has_ram(self, size: int) -> bool:
        """Whether `size` bytes more may be held in main memory; those who slept longest end for it."""
        if self.limit and size > self.limit:
            return False
        async with self._ending:
            while self.limit and self.ram + size > self.limit:
                longest = next(bed for bed in self._asleep if bed.ram)
                await self._end(longest, "others need the main memory it holds (LLMC_SLEEP_RAM_GB)")
        return True

    async def make_room(self, gauge: Gauge, need: int, guest: Bed | None) -> None:
        """End those who slept longest until `need` bytes of the card are free or nobody but the `guest` sleeps."""
        async with self._ending:
            while others := [bed for bed in self._asleep if bed is not guest]:
                before = await gauge.read()
                if before is None or before.free >= need:
                    return
                await self._end(others[0], "what it keeps of the card is needed")
                await wait_free(gauge, None, before, SETTLE_FOR, held_bytes=others[0].left, poll=SETTLE_POLL)

    async def empty(self, reason: str) -> None:
        async with self._ending:
            while self._asleep:
                await self._end(self._asleep[0], reason)

    async def close(self) -> None:
        """The gate ends: nobody is left behind."""
        self.closed = True
        await self.empty("the gate is shutting down")

    async def _end(self, bed: Bed, reason: str) -> None:
        self.leave(bed)
        try:
            await bed.runtime.stop()
        except StopFailed as error:
            log.warning("left_behind", tenant=bed.name, reason=str(error))
        except asyncio.CancelledError:
            self.enter(bed)  # for whoever ends the rest
            raise
        bed.state = State.UP
        self.tell("sleeper_ended", {"tenant": bed.name, "reason": reason})


class Bed:
    """`level`: the engine's own; `limit`: seconds one sleep or wake may take."""

    def __init__(
        self, name: str, engine: Sleeper, runtime: Runtime, gauge: Gauge, dorm: Dorm, *, level: int, limit: float
    ) -> None:
        self.name = name
        self.engine = engine
        self.runtime = runtime
        self.state = State.UP
        self.left = 0  # bytes of the card it keeps while it sleeps
        self.costs = Costs()
        self.size = 0  # … and holds while it is awake
        self._level = level
        self._limit = limit
        self._gauge = gauge
        self._dorm = dorm
        self._failures = 0
        self._began = 0.0  # its loading

    @property
    def ram(self) -> int:
        """Bytes of main memory it holds asleep, at most: what it held on the card, unless it drops its weights."""
        return self.size if self.engine.keeps_weights(self._level) else 0

    # ------------------------------------------------------------------------------------------ lying down

    async def sleep(self, held: int | None) -> str | None:
        """Put it to sleep; how that went, or None: it is to be stopped. `held`: bytes it holds; None = not known."""
        before = await self._gauge.read()
        why = self._why_not(held, before)
        if why is None and not await self._fits(held or 0):
            why = "LLMC_SLEEP_RAM_GB is too small for it"
        if why is None and not await self._idle():
            why = "it works on something that did not come from the gate, or that it does not give up"
        if why is not None or held is None or before is None:
            log.info("stopped_instead_of_asleep", tenant=self.name, reason=why)
            return None
        began = time.monotonic()
        self.state = State.UNSURE
        problem = await self.engine.sleep(self._level, self._limit)
        if problem is None:
            back = max(0, held - CONTEXT)
            settled = await wait_free(self._gauge, None, before, SETTLE_FOR, held_bytes=back, poll=SETTLE_POLL)
            if settled.state is SettleState.FREE:
                self.left = max(0, held - (settled.freed_bytes or 0))
                self._laid(time.monotonic() - began, settled.detail)
                return f"asleep; {settled.detail}"
            problem = f"its memory did not come back: {settled.detail}"
        self._failed("sleep_failed", problem)
        return None

    def _why_not(self, held: int | None, before: Reading | None) -> str | None:
        if not self._dorm.takes(self):
            return "the gate ends, or its preset is gone or has changed"
        if self.state is not State.UP:
            return "it is not known to be well: it was interrupted, did not come up, or was stuck"
        if held is None or before is None:
            return "it is not known what it holds, so it could not be seen to come back"
        if self._failures >= FAILURES:
            return f"it failed {self._failures} times running"
        return "stopping and loading it is quicker, as measured" if self.costs.sleep_is_slower else None

    async def _idle(self) -> bool:
        """Whether nothing is cut off by it; what a client has just left may take a moment to end."""
        deadline = time.monotonic() + IDLE_WITHIN
        while await self.engine.busy() is True:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(IDLE_POLL)
        return True

    async def _fits(self, held: int) -> bool:
        self.size = held
        return await self._dorm.has_ram(self.ram)

    def _laid(self, seconds: float, detail: str) -> None:
        self.state = State.ASLEEP
        self.costs.sleep = seconds
        self._dorm.enter(self)
        told = {"seconds": round(seconds, 3), "ram_gb": round(self.ram / GB, 1), "detail": detail}
        self._dorm.tell("asleep", {"tenant": self.name, **told})

    # ---------------------------------------------------------------------------------------------- waking

    async def wake(self) -> str | None:
        """Wake it if what it needs is free. None = it serves; else why it does not: it is to be stopped."""
        self._dorm.leave(self)
        began = time.monotonic()
        problem = await self._wake()
        if problem is not None:
            self._failed("wake_failed", problem)
            return problem
        self.state = State.UP
        self._failures = 0
        self.costs.wake = time.monotonic() - began
        self._dorm.tell("awake", {"tenant": self.name, "seconds": round(self.costs.wake, 3)})
        return None

    async def _wake(self) -> str | None:
        need = self.size - self.left
        self.state = State.UNSURE
        await self._dorm.make_room(self._gauge, need, self)
        reading = await self._gauge.read()
        if reading is None:
            return "what is free on the card cannot be read"
        if reading.free < need:
            return f"{reading.free / GB:.1f} GB of the card are free, {need / GB:.1f} GB are needed"
        problem = await self.engine.wake(self._level, self._limit)
        if problem is not None:
            return problem
        if await self.engine.sleeping() is True:
            return "it says that it still sleeps"
        probe = await self.engine.probe()
        return None if probe.health is Health.READY else probe.detail or str(probe.health)

    # ----------------------------------------------------------------------------- its process begins and ends

    def loading(self) -> None:
        self.state = State.UNSURE
        self._began = time.monotonic()

    def loaded(self) -> None:
        self.state = State.UP
        self.costs.load = time.monotonic() - self._began

    def stopped(self, seconds: float) -> None:
        """It was stopped, in so many seconds."""
        self.state = State.UP
        self.costs.stop = seconds

    def ended(self, reason: str) -> None:
        """It ended while it slept. The next request starts it."""
        self._dorm.leave(self)
        self.state = State.UP
        self._dorm.tell("sleeper_ended", {"tenant": self.name, "reason": reason})

    def _failed(self, kind: str, problem: str) -> None:
        self._failures += 1
        self._dorm.tell(kind, {"tenant": self.name, "reason": problem})
