"""Real llama.cpp servers behind the gate; skipped with the reason where there are none (TURNSTILE_REAL=1 insists)."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import openai
import pytest

from gpu_turnstile.core.model import Phase
from gpu_turnstile.engines import llama_server
from tests.aio import run_async, until
from tests.e2e.house import house, llama
from tests.real.engine import llama_command, real_engine_missing, tiny_model

MISSING = real_engine_missing()
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bool(MISSING) and not os.environ.get("TURNSTILE_REAL"), reason=str(MISSING)),
]


def two(tmp_path, **more):
    """Two presets with real engines and models of half a megabyte."""
    return [
        llama(name, command=llama_command(), path=str(tiny_model(tmp_path, name, seed=seed)), **more)
        for seed, name in enumerate(("one", "two"))
    ]


@run_async
async def test_two_real_engines_take_turns_and_answer(tmp_path):
    async with house(tmp_path, two(tmp_path), turnstile_gpu="none") as h:
        for model in ("one", "two", "one"):
            answer = await h.chat(model, max_tokens=8)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 8
            assert h.view.residents == (model,)
        assert h.kinds().count("evicted") == 2


@run_async
async def test_the_official_client_streams_through_the_gate(tmp_path):
    async with house(tmp_path, two(tmp_path), turnstile_gpu="none") as h:
        client = openai.AsyncOpenAI(base_url=f"{h.gate}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(
            model="one", messages=[{"role": "user", "content": "hi"}], max_tokens=16, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError, match="no preset is called"):
            await client.chat.completions.create(model="three", messages=[])
        await client.close()


@run_async
async def test_streams_one_behind_the_other_all_arrive(tmp_path):
    """llama.cpp closes the connection behind each stream and does not say so."""
    async with house(tmp_path, two(tmp_path)[:1], turnstile_gpu="none") as h:

        async def client() -> list[int]:
            body = {"model": "one", "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
            return [(await h.http.post(f"{h.gate}/v1/chat/completions", json=body)).status_code for _ in range(60)]

        for answers in await asyncio.gather(client(), client(), client()):
            assert answers == [200] * 60


@run_async
async def test_a_real_engine_killed_in_its_answer_is_respawned(tmp_path):
    async with house(tmp_path, two(tmp_path), turnstile_gpu="none") as h:
        async with h.streaming("one", max_tokens=20_000) as lines:
            os.kill(h.app.arbiter.seats["one"].runtime.pid, signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]
        await until(lambda: h.view.phase is Phase.IDLE)
        assert (await h.chat("one")).status_code == 200


@run_async
async def test_alternating_clients_lose_no_request(tmp_path):
    async with house(tmp_path, two(tmp_path), turnstile_gpu="none") as h:

        async def client(models):
            for model in models:
                answer = await h.chat(model, max_tokens=4)
                assert answer.status_code == 200, answer.text

        await asyncio.gather(*(client(("one", "two", "two", "one", "two")) for _ in range(4)))


@run_async
async def test_a_real_engine_that_cannot_load_its_model_says_why(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    preset = llama("broken", command=llama_command(), path=str(tmp_path / "broken.gguf"))
    async with house(tmp_path, [preset], turnstile_gpu="none") as h:
        answer = await h.chat("broken")
        assert answer.status_code == 503
        assert "last words" in answer.json()["error"]["message"]


@run_async
async def test_a_real_engine_that_hangs_is_found_out_and_replaced(tmp_path):
    presets = two(tmp_path, runtime="stop_grace_s = 0.5")
    async with house(tmp_path, presets, turnstile_gpu="none", llmc_watchdog_s=2.0, probe_timeout=0.3) as h:
        async with h.streaming("one", max_tokens=20_000) as lines:
            os.kill(h.app.arbiter.seats["one"].runtime.pid, signal.SIGSTOP)
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]
        assert (await h.chat("one")).status_code == 200


@run_async
async def test_the_long_prefill_of_a_real_engine_is_no_reason_to_end_it(tmp_path, monkeypatch):
    """It is silent for longer than the watchdog waits; its own books show that it gets on."""
    monkeypatch.setattr(llama_server, "SLOTS_SPACING", 0.1)
    model = str(tiny_model(tmp_path, "wide", embd=512, layers=5, ff=2048))
    preset = llama("wide", "-b", "32", "-ub", "32", "-t", "1", "-tb", "1", command=llama_command(), path=model)
    async with house(tmp_path, [preset], turnstile_gpu="none", llmc_watchdog_s=3.0) as h:
        await h.chat("wide")
        body = {"model": "wide", "prompt": "word " * 350, "max_tokens": 1}
        asking = asyncio.ensure_future(h.http.post(f"{h.gate}/v1/completions", json=body, timeout=120))
        await until(lambda: h.app.watchdog.view(), 20)
        answer = await asking
        assert answer.status_code == 200, answer.text
        assert "wedged" not in h.kinds()
