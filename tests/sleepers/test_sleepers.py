"""A bed and its dorm by themselves: what is proven before and after a sleep, and who ends whom."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from gpu_turnstile.engines.base import Timing
from gpu_turnstile.engines.vllm import VLLM
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.gpu.none import NoCard
from gpu_turnstile.runtimes.base import StopFailed
from gpu_turnstile.sim import GB, SimCard, VLLMSim, serve
from gpu_turnstile.sleepers import Bed, Costs, Dorm, State
from tests.aio import run_async, until


class FakeRuntime:
    def __init__(self, sim):
        self.sim = sim
        self.fails = False
        self.hangs = asyncio.Event()
        self.hangs.set()
        self.stops = 0

    async def stop(self):
        await self.hangs.wait()
        self.stops += 1
        if self.fails:
            raise StopFailed("it does not end")
        self.sim.end()


class Dormitory:
    def __init__(self, card, limit_gb, http):
        self.card = card
        self.http = http
        self.told = []
        self.dorm = Dorm(int(limit_gb * GB), lambda kind, fields: self.told.append((kind, fields)))
        self.gauge = Gauge(card)
        self.beds = []

    @asynccontextmanager
    async def bed(self, name, level=1, gb=8.0, gauge=None):
        sim = VLLMSim(name, card=self.card, vram_gb=gb, load_s=0)
        async with serve(sim) as url:
            await until(lambda: sim.ready)
            engine = VLLM(url, self.http, Timing(call_timeout=1.0))
            bed = Bed(name, engine, FakeRuntime(sim), gauge or self.gauge, self.dorm, level=level, limit=2.0)
            self.beds.append(bed)
            self.dorm.know(self.beds)
            yield bed, sim

    def kinds(self):
        return [(kind, fields["tenant"]) for kind, fields in self.told]


@asynccontextmanager
async def dormitory(limit_gb=0.0):
    async with httpx.AsyncClient(trust_env=False) as http:
        yield Dormitory(SimCard(), limit_gb, http)


@run_async
async def test_what_is_free_is_looked_at_before_it_is_woken():
    async with dormitory() as d, d.bed("s", gb=16.0) as (bed, sim):
        assert "asleep" in await bed.sleep(16 * GB)
        d.card.hold("foreign", 12 * GB, pid=0)
        problem = await bed.wake()
        assert "are needed" in problem
        assert not [entry for entry in sim.log if entry.path == "/wake_up"]
        assert d.kinds() == [("asleep", "s"), ("wake_failed", "s")]
        assert bed.state is State.UNSURE
        d.card.free("foreign", pid=0)


@run_async
async def test_a_card_that_cannot_be_read_proves_nothing_so_nobody_sleeps_on_it():
    async with dormitory() as d, d.bed("s", gauge=Gauge(NoCard())) as (bed, sim):
        assert await bed.sleep(8 * GB) is None
        assert not sim.asleep


@run_async
async def test_who_is_not_known_to_hold_something_does_not_sleep():
    async with dormitory() as d, d.bed("s") as (bed, sim):
        assert await bed.sleep(None) is None
        assert not sim.asleep


@run_async
async def test_after_two_failures_running_it_is_not_tried_again():
    async with dormitory() as d, d.bed("s") as (bed, sim):
        sim.faults.sleep_refused = True
        for _ in range(2):
            assert await bed.sleep(8 * GB) is None
            assert bed.state is State.UNSURE
            bed.stopped(0.1)
        sim.faults.heal()
        assert await bed.sleep(8 * GB) is None
        assert d.kinds() == [("sleep_failed", "s")] * 2


@run_async
async def test_a_wake_that_went_well_forgets_failures():
    async with dormitory() as d, d.bed("s") as (bed, sim):
        for _ in range(3):
            sim.faults.sleep_refused = True
            assert await bed.sleep(8 * GB) is None
            bed.stopped(0.1)
            sim.faults.heal()
            assert await bed.sleep(8 * GB) is not None
            assert await bed.wake() is None


@run_async
async def test_one_that_was_interrupted_is_neither_asleep_nor_woken_and_does_not_sleep_again():
    async with dormitory() as d, d.bed("s") as (bed, sim):
        await bed.sleep(8 * GB)
        sim.faults.wake_hang = True
        waking = asyncio.ensure_future(bed.wake())
        await until(lambda: d.card.held_by("s") > 7 * GB)
        waking.cancel()
        await asyncio.wait([waking])
        assert bed.state is State.UNSURE
        await d.dorm.close()
        assert bed.runtime.stops == 0, "whoever waked it ends it"
        assert await bed.sleep(8 * GB) is None


@run_async
async def test_level_2_holds_no_main_memory_and_may_sleep_under_any_limit():
    async with dormitory(limit_gb=1) as d, d.bed("two", level=2) as (two, _), d.bed("one") as (one, _):
        assert await two.sleep(8 * GB) is not None
        assert await one.sleep(8 * GB) is None
        assert two.runtime.stops == 0
        assert await two.wake() is None


@run_async
async def test_an_end_that_is_interrupted_is_finished_by_the_next():
    async with dormitory() as d, d.bed("s") as (bed, _):
        await bed.sleep(8 * GB)
        d.dorm.know([])
        bed.runtime.hangs.clear()
        sweeping = asyncio.ensure_future(d.dorm.sweep())
        await until(lambda: d.dorm._ending.locked())
        sweeping.cancel()
        await asyncio.wait([sweeping])
        bed.runtime.hangs.set()
        await d.dorm.close()
        assert bed.runtime.stops == 1


@run_async
async def test_one_that_cannot_be_ended_does_not_keep_the_others():
    async with dormitory() as d, d.bed("s") as (first, _), d.bed("t") as (second, _):
        await first.sleep(8 * GB)
        await second.sleep(8 * GB)
        first.runtime.fails = True
        await d.dorm.close()
        assert (first.runtime.stops, second.runtime.stops) == (1, 1)


@pytest.mark.parametrize(
    ("costs", "slower"),
    [
        (Costs(), False),
        (Costs(load=1.0, sleep=0.5), False),
        (Costs(load=1.0, sleep=0.4, wake=0.5), False),
        (Costs(load=1.0, sleep=0.6, wake=0.5), True),
        (Costs(stop=0.2, load=1.0, sleep=0.6, wake=0.5), False),
        (Costs(stop=0.2, sleep=9.0, wake=9.0), False),
    ],
)
def test_sleep_is_given_up_only_when_it_was_measured_to_be_slower(costs, slower):
    assert costs.sleep_is_slower is slower


@run_async
async def test_what_runs_keeps_it_awake_and_is_not_cut_off():
    async with dormitory() as d, d.bed("s") as (bed, sim):
        body = {"model": "s", "stream": True, "max_tokens": 5000, "messages": []}
        async with d.http.stream("POST", f"{sim.url}/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            assert await bed.sleep(8 * GB) is None
            assert bed.state is State.UP
            assert sim.in_flight == 1
        assert await bed.sleep(8 * GB) is not None, "a client that left is waited for"
