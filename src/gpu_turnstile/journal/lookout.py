"""What no note says, looked at now and then: who else holds memory of the card, and which leases are still open."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import psutil

from gpu_turnstile.journal.history import BEAT, History, LeaseRow, short
from gpu_turnstile.journal.schema import HOLDERS, Holder
from gpu_turnstile.rounds import Rounds

FLOOR = 50 << 20  # bytes a process must hold to be written down …
STEP = 64 << 20  # … and what it must gain or lose to be written down again
HOLDERS_LIMIT = 64
AFRESH = 3600.0  # seconds after which a sample is written though nothing changed


class _Process(Protocol):
    """A process as a reading of the card lists it."""

    @property
    def pid(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def used(self) -> int | None: ...


class _Reading(Protocol):
    @property
    def holders(self) -> Sequence[_Process] | None: ...


class Lookout:
    """Looks every BEAT seconds at what no note says: which leases are open, and who else holds memory of the card."""

    def __init__(
        self,
        history: History,
        *,
        read: Callable[[], Awaitable[_Reading | None]],
        ours: Callable[[], Awaitable[Iterable[int]]],
        leases: Callable[[], Iterable[LeaseRow]],
        interval: float = BEAT,
    ) -> None:
        """`read`: the card; `ours`: pids of engines (their descendants, and the gate's own, are ours as well)."""
        self.history = history
        self._read = read
        self._ours = ours
        self._leases = leases
        self._last: dict[int, Holder] | None = None
        self._said_at: float | None = None
        self.rounds = Rounds("looking at the card", self.look, interval)

    async def look(self) -> None:
        """Write down what is to be seen now."""
        try:
            reading = await self._read()
            listed = None if reading is None else reading.holders
            found = None
            if listed is not None:
                found = await asyncio.to_thread(strangers, listed, frozenset(await self._ours()))
            self._note(found)
        finally:
            self.history.beat(self._leases())

    def _note(self, found: dict[int, Holder] | None) -> None:
        now = time.monotonic()
        if self._said_at is not None and now - self._said_at < AFRESH and not _differs(self._last, found):
            return
        self._last, self._said_at = found, now
        listed = None
        if found is not None:
            listed = [
                {"pid": h.pid, "name": h.name, "used": h.used, "lineage": list(h.lineage)} for h in found.values()
            ]
        self.history.take(HOLDERS, {"holders": listed})


def _differs(before: dict[int, Holder] | None, now: dict[int, Holder] | None) -> bool:
    if before is None or now is None:
        return before is not now
    if before.keys() != now.keys():
        return True
    return any(
        (holder.used is None) != (before[pid].used is None) or abs((holder.used or 0) - (before[pid].used or 0)) >= STEP
        for pid, holder in now.items()
    )


def strangers(listed: Iterable[_Process], ours: frozenset[int]) -> dict[int, Holder]:
    """Processes on the card that are neither the gate's nor its engines' nor began by these. Reads /proc."""
    found: dict[int, Holder] = {}
    for process in listed:
        if process.used is not None and process.used < FLOOR:
            continue
        line = lineage(process.pid)
        if ours.isdisjoint(line) and os.getpid() not in line:
            found[process.pid] = Holder(process.pid, short(process.name), process.used, line)
    biggest = sorted(found.values(), key=lambda h: -(h.used or 0))[:HOLDERS_LIMIT]
    return {holder.pid: holder for holder in biggest}


def lineage(pid: int) -> tuple[int, ...]:
    """The pid and its ancestors, nearest first, as far as they can be seen."""
    try:
        return (pid, *(parent.pid for parent in psutil.Process(pid).parents()))
    except psutil.Error:
        return (pid,)
