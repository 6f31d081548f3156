"""When the memory counts as back: the readings are a script, the clock is the test's."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpu_turnstile.gpu.base import Holder, Reading
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.gpu.none import NoCard
from gpu_turnstile.gpu.settle import Expected, SettleState, Settling, wait_free

GB = 2**30
TOTAL = 24 * GB
BEFORE = Reading(TOTAL, 20 * GB)


def at(used):
    return None if used is None else Reading(TOTAL, round(used * GB))


def settle(readings, *, need=None, held=None, before=BEFORE, timeout=60.0, poll=0.1):
    """Feed readings (GB used, None = unknown), the last for ever; the decision and how many looks it took."""
    bytes_ = [None if size is None else round(size * GB) for size in (need, held)]
    settling = Settling(Expected(*bytes_, before), timeout, now=0.0)
    looks, now = 0, 0.0
    while True:
        settled = settling.see(at(readings[min(looks, len(readings) - 1)]), now)
        looks += 1
        if settled is not None:
            return settled, looks
        now += poll


AFTER_3_S = [20] * 30 + [0.5]


def test_the_next_one_fits_at_once_without_waiting():
    settled, looks = settle([0.5], need=20)
    assert (settled.state, looks, settled.freed_bytes) == (SettleState.FREE, 1, round(19.5 * GB))


def test_memory_that_falls_three_seconds_late_is_waited_for():
    settled, _ = settle(AFTER_3_S, need=20)
    assert settled.state is SettleState.FREE
    assert settled.seconds == pytest.approx(3.0)


def test_memory_that_falls_late_is_waited_for_when_only_what_it_held_is_known():
    settled, _ = settle(AFTER_3_S, held=19.5)
    assert settled.state is SettleState.FREE
    assert settled.seconds == pytest.approx(3.0)


def test_memory_that_falls_late_is_waited_for_when_nothing_is_known():
    settled, looks = settle(AFTER_3_S)
    assert settled.state is SettleState.STABLE
    assert looks == 35


def test_a_neighbour_that_takes_600_mb_meanwhile_keeps_nobody_waiting():
    readings = [20, 20.6, 20.6, 0.6]
    assert settle(readings, need=20)[0].state is SettleState.FREE
    for unmet in ({"need": 24}, {"need": 24, "held": 20}, {}):
        settled, looks = settle(readings, **unmet)
        assert settled.state is SettleState.STABLE
        assert looks == 8
    assert settle(readings, held=20)[0].state is SettleState.FREE


def test_memory_that_never_falls_ends_at_the_limit():
    for known in ({"need": 20}, {"held": 19}, {"need": 20, "held": 19}):
        settled, _ = settle([20], **known)
        assert settled.state is SettleState.TIMEOUT
        assert settled.seconds == pytest.approx(60, abs=0.2)
        assert settled.freed_bytes == 0


def test_a_small_first_part_is_not_taken_for_the_whole():
    settled, _ = settle([20] + [17] * 20 + [0.5], held=19.5, need=23.9)
    assert settled.state is SettleState.STABLE
    assert settled.freed_bytes == round(19.5 * GB)


def test_memory_in_motion_is_not_stable():
    falling = [20 - n * 0.5 for n in range(40)]
    settled, looks = settle([*falling, 0.5], need=24)
    assert settled.state is SettleState.STABLE
    assert looks > 40


def test_looks_in_quick_succession_are_not_yet_a_stable_card():
    settled, looks = settle([20, 1], poll=0.01)
    assert settled.state is SettleState.STABLE
    assert looks > 30


def test_what_held_nothing_is_back_at_once():
    assert settle([20], held=0)[1] == 1


def test_a_card_that_says_nothing_is_unknown_after_a_few_looks():
    settled, looks = settle([None], need=20)
    assert (settled.state, looks, settled.freed_bytes) == (SettleState.UNKNOWN, 5, None)


def test_a_reading_missed_now_and_then_does_not_matter():
    assert settle([20, None, None, 20, None, None, None, 0.5], need=20)[0].state is SettleState.FREE


def test_a_card_that_says_nothing_until_a_short_limit_is_unknown():
    assert settle([None], need=20, timeout=0.2)[0].state is SettleState.UNKNOWN


def test_when_nobody_knows_what_should_fall_quiet_ends_the_wait_as_unknown():
    for known in ({"before": BEFORE}, {"before": None}, {"before": None, "held": 19.5}):
        settled, _ = settle([4], **{**known, "before": known["before"] and at(4)})
        assert settled.state is SettleState.UNKNOWN
        assert settled.seconds == pytest.approx(10, abs=0.2)


def test_without_a_reading_from_before_the_need_still_decides():
    settled, _ = settle([20, 20, 1], need=20, before=None)
    assert (settled.state, settled.freed_bytes) == (SettleState.FREE, None)


def test_a_good_reading_at_the_limit_is_good():
    assert settle([20, 0.5], need=20, timeout=0.1)[0].state is SettleState.FREE


def test_who_holds_the_card_is_named():
    settling = Settling(Expected(20 * GB, None, BEFORE), 1.0, now=0.0)
    settled = settling.see(Reading(TOTAL, 20 * GB, (Holder(42, "python", None),)), 1.0)
    assert settled is not None
    assert settled.detail == "after 1 s: 20.0 GB used, 4.0 GB free, 20.0 GB needed; held by python (42)"


class ScriptedCard:
    kind, name = "scripted", "scripted"

    def __init__(self, *readings):
        self.readings = list(readings)

    def read(self):
        reading = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if isinstance(reading, Exception):
            raise reading
        return reading

    def close(self):
        pass


class HangingCard(ScriptedCard):
    def __init__(self):
        self.reads = 0
        self.unhang = threading.Event()

    def read(self):
        self.reads += 1
        self.unhang.wait(10)
        return at(0.5)


def test_waiting_reads_the_card_until_it_is_free():
    async def main():
        return await wait_free(Gauge(ScriptedCard(at(20), at(20), at(1))), 20 * GB, BEFORE, 5, poll=0.001)

    settled = asyncio.run(main())
    assert (settled.state, settled.freed_bytes) == (SettleState.FREE, 19 * GB)


def test_a_card_that_raises_is_an_unknown_reading():
    async def main():
        return await wait_free(Gauge(ScriptedCard(OSError("gone"))), 1, None, 5, poll=0.001)

    assert asyncio.run(main()).state is SettleState.UNKNOWN


def test_without_a_card_the_answer_is_unknown_at_once():
    async def main():
        return await wait_free(Gauge(NoCard()), 20 * GB, None, 60)

    assert asyncio.run(main()).seconds == 0.0


def test_a_driver_that_hangs_blocks_nobody_and_costs_one_thread():
    async def main():
        card = HangingCard()
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        settled = await wait_free(Gauge(card), 20 * GB, BEFORE, 0.3, poll=0.05)
        ticking.cancel()
        card.unhang.set()
        return settled, card.reads, ticks

    settled, reads, ticks = asyncio.run(main())
    assert settled.state is SettleState.UNKNOWN
    assert settled.seconds < 2
    assert reads == 1
    assert ticks > 5


def test_a_reading_that_was_late_is_used_when_it_comes():
    async def main():
        card = HangingCard()
        gauge = Gauge(card)
        assert await gauge.read(0.01) is None
        card.unhang.set()
        return await gauge.read(5), card.reads

    reading, reads = asyncio.run(main())
    assert reading is not None
    assert reads <= 2
