"""The simulated vLLM and SGLang: what sleeping does to them, to whoever is being answered, and to the card."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import pytest

from gpu_turnstile.sim import GB, SGLangSim, SimCard, VLLMSim, serve
from tests.aio import run_async, until

CHAT = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
CALLS = {
    VLLMSim: ("/sleep", "/wake_up"),
    SGLangSim: ("/release_memory_occupation", "/resume_memory_occupation"),
}
each = pytest.mark.parametrize("kind", CALLS)


@asynccontextmanager
async def running(kind, **settings):
    sim = kind("m", card=SimCard(), load_s=0, **settings)
    async with serve(sim) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        await until(lambda: sim.ready)
        yield sim, http


@each
@run_async
async def test_asleep_it_keeps_a_context_of_the_card_and_is_healthy_and_serves_nobody(kind):
    down, up = CALLS[kind]
    async with running(kind) as (sim, http):
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert sim.card.read().used == 8 * GB
        assert (await http.post(down)).status_code == 200
        assert 0 < sim.card.read().used < GB
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 500
        assert (await http.post(up)).status_code == 200
        await until(lambda: not sim.asleep)
        assert sim.card.read().used == 8 * GB
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


@each
@run_async
async def test_sleep_cuts_off_what_runs(kind):
    async with running(kind, tokens_per_s=50) as (_, http):
        body = {**CHAT, "stream": True, "max_tokens": 1000}
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await http.post(CALLS[kind][0])
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]


@each
@run_async
async def test_a_wake_where_memory_is_not_free_kills_it(kind):
    down, up = CALLS[kind]
    async with running(kind) as (sim, http):
        await http.post(down)
        sim.card.hold("foreign", 20 * GB, pid=0)
        try:
            await http.post(up)
        except httpx.HTTPError:
            pass
        await until(sim.exited.is_set)
        assert sim.exit_code == 1


@each
@run_async
async def test_without_its_flag_it_does_not_sleep(kind):
    async with running(kind, can_sleep=False) as (sim, http):
        assert (await http.post(CALLS[kind][0])).status_code == 500
        assert not sim.asleep


@run_async
async def test_after_level_2_it_answers_only_when_its_weights_were_read_again():
    async with running(VLLMSim) as (sim, http):
        await http.post("/sleep?level=2")
        await http.post("/wake_up?tags=weights")
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        await http.post("/wake_up?tags=kv_cache")
        assert not sim.weights
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 500
        await http.post("/collective_rpc", json={"method": "reload_weights"})
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
