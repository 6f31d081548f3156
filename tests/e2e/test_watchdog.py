"""An engine that is alive and gets nowhere, in front of real requests (swap document, incident of 2026-09-14)."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import pytest

from gpu_turnstile.engines import llama_server
from tests.aio import run_async, until
from tests.e2e.house import House, house, llama

LIMIT = 1.0


@pytest.fixture(autouse=True)
def fresh_looks(monkeypatch):
    """The rule that spares llama-server's `/slots` is longer than the whole of these tests' limits."""
    monkeypatch.setattr(llama_server, "SLOTS_SPACING", 0.02)


async def fault(h: House, model: str, **switches) -> None:
    url = h.app.arbiter.seats[model].engine.url
    assert (await h.http.post(f"{url}/__sim__/faults", json=switches)).status_code == 200


def pid(h: House, model: str) -> int:
    return h.app.arbiter.seats[model].runtime.pid


@run_async
async def test_a_request_that_gets_nowhere_is_ended_and_the_next_one_finds_the_engine_anew(tmp_path):
    async with house(tmp_path, [llama("a")], llmc_watchdog_s=LIMIT) as h:
        await h.chat("a")
        before = pid(h, "a")
        await fault(h, "a", stall_after=2)
        began = time.monotonic()
        asking = asyncio.ensure_future(h.chat("a", max_tokens=50))
        await until(lambda: h.app.watchdog.view(), 5)
        warnings = (await h.http.get(f"{h.gate}/status")).json()["warnings"]
        assert any("a may be stuck" in warning for warning in warnings)
        answer = await asking
        assert LIMIT * 0.9 < time.monotonic() - began < LIMIT * 4
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (503, "swap_failed")
        assert "got nowhere" in answer.json()["error"]["message"]
        assert (await h.chat("a")).status_code == 200
        assert pid(h, "a") != before
        assert "wedged" in h.kinds()
        assert "gpu_turnstile_engine_restarts_total 1.0" in (await h.http.get(f"{h.gate}/metrics")).text


@run_async
async def test_a_wedge_left_behind_by_a_client_that_went_away_does_not_hit_the_next_one(tmp_path):
    async with house(tmp_path, [llama("a", runtime="parallel = 1\nstop_grace_s = 1")], llmc_watchdog_s=LIMIT) as h:
        await h.chat("a")
        await fault(h, "a", ignore_disconnect=True, stall_after=5)
        async with h.streaming("a", max_tokens=100):
            pass
        await until(lambda: "wedged" in h.kinds(), 10)
        assert (await h.chat("a", max_tokens=8)).json()["usage"]["completion_tokens"] == 8


@run_async
async def test_a_slow_engine_that_gets_on_is_left_alone(tmp_path):
    async with house(tmp_path, [llama("a", "--sim-tokens-per-s", "8")], llmc_watchdog_s=LIMIT) as h:
        began = time.monotonic()
        answer = await h.chat("a", max_tokens=24)
        assert answer.json()["usage"]["completion_tokens"] == 24
        assert time.monotonic() - began > LIMIT * 2.5
        assert "wedged" not in h.kinds()


@run_async
async def test_a_client_that_reads_slowly_is_not_the_engines_fault(tmp_path):
    async with house(tmp_path, [llama("a", "--sim-tokens-per-s", "100000")], llmc_watchdog_s=LIMIT) as h:
        body = {"model": "a", "stream": True, "max_tokens": 60_000, "messages": [{"role": "user", "content": "x"}]}
        async with h.http.stream("POST", f"{h.gate}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            await asyncio.sleep(LIMIT * 2.5)  # nothing is read meanwhile
        await until(lambda: not h.view.leases, 10)
        assert "wedged" not in h.kinds()


@run_async
async def test_an_engine_that_is_stopped_in_its_tracks_is_replaced(tmp_path):
    presets = [llama("a", runtime="stop_grace_s = 1")]
    async with house(tmp_path, presets, llmc_watchdog_s=LIMIT, probe_timeout=0.3) as h:
        async with h.streaming("a", max_tokens=500) as lines:
            os.kill(pid(h, "a"), signal.SIGSTOP)
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]
        assert (await h.chat("a")).status_code == 200


@run_async
async def test_without_a_watchdog_nothing_is_looked_at(tmp_path):
    async with house(tmp_path, [llama("a")], llmc_watchdog_s=0.0) as h:
        await h.chat("a")
        await fault(h, "a", stall_after=2)
        with pytest.raises(httpx.ReadTimeout):
            await h.http.post(
                f"{h.gate}/v1/chat/completions",
                json={"model": "a", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]},
                timeout=LIMIT * 2,
            )
        assert "wedged" not in h.kinds()
