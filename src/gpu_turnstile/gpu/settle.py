"""Is the memory back? The last word of an eviction: the next engine starts after this, or somebody decides anyway.

Engines report themselves gone seconds before the driver has their memory, so their word is not asked. `Settling`
decides, purely, from readings and times:

  free     what comes next fits into what is free now; or, if nobody knows what comes next needs, all that the
           evicted one held is back
  stable   memory has fallen (by half of what it held, or visibly if that is unknown) and lies still: what is missing
           is held by others, and waiting brings no more
  unknown  the card says nothing in several looks running; or it lies still and nobody knew how much should come back
  timeout  none of that in time: it may still hold the card

Memory that has not fallen is never taken for stable: drivers need seconds to begin. Memory that somebody else took
meanwhile keeps nobody waiting.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum

from gpu_turnstile.gpu.base import Reading
from gpu_turnstile.gpu.gauge import READ_TIMEOUT, Gauge

AGREEING_LOOKS = 5  # consecutive readings that lie still, or that say nothing ...
AGREEING_FOR = 0.3  # ... over so many seconds at least, however fast the looks follow each other
STILL_WITHIN = 64 * 2**20  # bytes they may differ
VISIBLE_FALL = 256 * 2**20  # bytes, where it is unknown how much should come back
BACK_SHARE = 0.95  # of what it held: engines round, and a driver keeps a little
CONTEXT = 768 << 20  # bytes a process may keep on the card for its driver's context
QUIET = 10.0  # seconds without a fall after which nothing is expected, if nobody knows that something should be


class SettleState(StrEnum):
    FREE = "free"
    STABLE = "stable"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Settled:
    """`freed_bytes` since before the eviction, None = not known; `seconds` it took; `detail` for a person."""

    state: SettleState
    freed_bytes: int | None
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Expected:
    """Bytes, each None if unknown: what comes next needs, what the evicted one held; the card before the eviction."""

    need: int | None
    held: int | None
    before: Reading | None


class _Run:
    """Consecutive looks that agree within `STILL_WITHIN`, since when."""

    def __init__(self, now: float) -> None:
        self.looks, self._since, self._low, self._high = 0, now, 0, 0

    def goes_on(self, used: int, now: float) -> bool:
        """Whether, with this look, it is long enough to be believed. One that does not agree begins a new run."""
        low, high = min(self._low, used), max(self._high, used)
        if self.looks and high - low <= STILL_WITHIN:
            self.looks, self._low, self._high = self.looks + 1, low, high
        else:
            self.looks, self._since, self._low, self._high = 1, now, used, used
        return self.looks >= AGREEING_LOOKS and now - self._since >= AGREEING_FOR


class Settling:
    def __init__(self, expected: Expected, timeout: float, now: float) -> None:
        self._expected = expected
        self._began = now
        self._timeout = timeout
        self._still = _Run(now)
        self._silent = _Run(now)
        self._highest = expected.before.used if expected.before else 0
        self._last: Reading | None = None

    def see(self, reading: Reading | None, now: float) -> Settled | None:
        """The decision, once there is one. The limit counts last: a good reading at the bound is still good."""
        state, detail = self._on_silence(now) if reading is None else self._on_reading(reading, now)
        if state is None:
            state, detail = self._on_time(now)
        if state is None:
            return None
        return Settled(state, self._freed(), now - self._began, detail)

    def _on_silence(self, now: float) -> tuple[SettleState | None, str]:
        self._still = _Run(now)
        if not self._silent.goes_on(0, now):
            return None, ""
        return SettleState.UNKNOWN, f"the card could not be read {self._silent.looks} times running"

    def _on_reading(self, reading: Reading, now: float) -> tuple[SettleState | None, str]:
        need, held = self._expected.need, self._expected.held
        self._silent = _Run(now)
        self._last = reading
        self._highest = max(self._highest, reading.used)
        lies_still = self._still.goes_on(reading.used, now)
        if need is not None and reading.free >= need:
            return SettleState.FREE, f"{_gb(reading.free)} free, {_gb(need)} needed"
        fallen = self._highest - reading.used
        if need is None and held is not None and fallen >= held * BACK_SHARE:
            return SettleState.FREE, f"{_gb(max(fallen, 0))} of {_gb(held)} came back"
        if not lies_still:
            return None, ""
        if fallen >= (VISIBLE_FALL if held is None else held / 2):
            return SettleState.STABLE, self._what_is_there(reading)
        if need is None and not self._knows_what_should_fall() and now - self._began >= QUIET:
            return SettleState.UNKNOWN, f"nothing fell in {QUIET:g} s, and it is not known what should"
        return None, ""

    def _on_time(self, now: float) -> tuple[SettleState | None, str]:
        if now - self._began < self._timeout:
            return None, ""
        if self._last is None:
            return SettleState.UNKNOWN, "the card could not be read"
        return SettleState.TIMEOUT, f"after {self._timeout:g} s: {self._what_is_there(self._last)}"

    def _knows_what_should_fall(self) -> bool:
        """Without a reading from before, it may have fallen already."""
        return self._expected.held is not None and self._expected.before is not None

    def _what_is_there(self, reading: Reading) -> str:
        need = self._expected.need
        wanted = "" if need is None else f", {_gb(need)} needed"
        holders = ", ".join(f"{h.name} ({h.pid})" for h in reading.holders or ())
        return f"{_gb(reading.used)} used, {_gb(reading.free)} free{wanted}" + (
            f"; held by {holders}" if holders else ""
        )

    def _freed(self) -> int | None:
        before = self._expected.before
        return None if before is None or self._last is None else before.used - self._last.used


async def wait_free(
    gauge: Gauge,
    need_bytes: int | None,
    before: Reading | None,
    timeout: float,
    *,
    held_bytes: int | None = None,
    poll: float = 0.1,
) -> Settled:
    """Return when the memory is back or it is certain enough that no more will come; `timeout` in seconds bounds it.

    Never raises and never blocks the loop. `before` was read before the eviction began.
    """
    began = time.monotonic()
    if gauge.blind:
        return Settled(SettleState.UNKNOWN, None, 0.0, "no card can be read")
    settling = Settling(Expected(need_bytes, held_bytes, before), timeout, began)
    while True:
        reading = await gauge.read(min(READ_TIMEOUT, max(poll, began + timeout - time.monotonic())))
        settled = settling.see(reading, time.monotonic())
        if settled is not None:
            return settled
        await asyncio.sleep(poll)


async def wait_still(gauge: Gauge, above: int, timeout: float, *, poll: float = 0.1) -> None:
    """Return when no more than `above` bytes are used, or when what is used has lain still for a while, or in time.

    For memory that nobody accounts for: it may be on its way back, or belong to somebody else and stay.
    """
    began = time.monotonic()
    still = _Run(began)
    while time.monotonic() - began < timeout:
        reading = await gauge.read()
        if reading is None or reading.used <= above or still.goes_on(reading.used, time.monotonic()):
            return
        await asyncio.sleep(poll)


def _gb(size: int) -> str:
    return f"{size / 2**30:.1f} GB"
