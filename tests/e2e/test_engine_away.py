"""An engine somebody else runs that is off: who asks for it waits, and nobody else waits for that.

A request for it is tried again until its client leaves (turnstile document), but without the card: nobody is made to
leave for an engine that does not answer, and nobody is kept out by it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from gpu_turnstile.sim import serve
from tests.aio import run_async, until
from tests.e2e.house import House, house
from tests.e2e.test_document import chat, idle_or_serving, of_kind, posts, prompt, two

QUICK = {"backoff_initial": 0.03, "backoff_max": 0.1}


@contextlib.asynccontextmanager
async def without(tmp_path, away: str, **settings) -> AsyncIterator[tuple[House, object, int]]:
    """A house whose `ollama` or `comfy` is off; with its simulator and the port it will have."""
    parts = two(tmp_path)
    sim = parts[away]
    async with serve(sim) as url:
        pass
    given = {**QUICK, f"{away}_url": url, **parts, away: None, **settings}
    async with house(tmp_path, **given) as h:
        yield h, sim, httpx.URL(url).port


async def tries(h: House, more: int = 3) -> None:
    before = h.app.gateway.counts.unreachable
    await until(lambda: h.app.gateway.counts.unreachable >= before + more)


@run_async
async def test_chats_go_on_while_an_image_job_waits_for_a_comfyui_that_is_off(tmp_path):
    async with without(tmp_path, "comfy") as (h, sim, port):
        assert (await chat(h)).status_code == 200
        job = asyncio.create_task(prompt(h, 0.02))
        await tries(h)
        assert (await asyncio.wait_for(chat(h), 1)).status_code == 200
        evictions = len(of_kind(h, "evicting"))
        later = asyncio.create_task(prompt(h, 0.02))
        await tries(h, 4)
        assert len(of_kind(h, "evicting")) == evictions, "nobody leaves for an engine that is known to be off"
        async with serve(sim, port=port):
            answers = await asyncio.gather(job, later)
            assert [answer.status_code for answer in answers] == [200, 200]
            assert len(posts(sim, "/prompt")) == 2
            await until(lambda: h.app.jobs.ends == {"success": 2})
            assert (await chat(h)).status_code == 200


@run_async
async def test_image_jobs_go_on_while_a_chat_waits_for_an_ollama_that_is_off(tmp_path):
    async with without(tmp_path, "ollama", history_poll_interval=0.05) as (h, sim, port):
        talk = asyncio.create_task(chat(h))
        await tries(h)
        assert (await asyncio.wait_for(prompt(h, 0.02), 1)).status_code == 200
        await until(lambda: h.app.jobs.ends == {"success": 1})
        async with serve(sim, port=port):
            assert (await talk).status_code == 200
            assert len(posts(sim, "/api/chat")) == 1
            await idle_or_serving(h)


@pytest.mark.parametrize("away", ["ollama", "comfy"])
@run_async
async def test_status_says_who_is_off_until_it_is_back(tmp_path, away):
    async with without(tmp_path, away) as (h, sim, port):
        asked = asyncio.create_task(chat(h) if away == "ollama" else prompt(h, 0.02))
        await tries(h)
        name = "ollama" if away == "ollama" else "comfyui"
        warnings = (await h.http.get(f"{h.gate}/status")).json()["warnings"]
        assert any(w.startswith(f"{name} did not take the last connection") for w in warnings)
        async with serve(sim, port=port):
            assert (await asked).status_code == 200
            warnings = (await h.http.get(f"{h.gate}/status")).json()["warnings"]
            assert not any("did not take the last connection" in w for w in warnings)
            await idle_or_serving(h)


@run_async
async def test_a_client_that_leaves_while_its_engine_is_off_leaves_nothing_behind(tmp_path):
    async with without(tmp_path, "comfy") as (h, sim, port):
        with pytest.raises(httpx.TimeoutException):
            await h.http.post(f"{h.comfy_gate}/prompt", json={"prompt": {}}, timeout=0.3)
        before = h.app.gateway.counts.unreachable
        async with serve(sim, port=port):
            assert (await prompt(h, 0.02)).status_code == 200
            await until(lambda: h.app.jobs.ends == {"success": 1})
            assert len(posts(sim, "/prompt")) == 1
        assert h.app.gateway.counts.unreachable == before


@run_async
async def test_a_job_whose_comfyui_ended_and_does_not_come_back_is_given_up_and_chats_go_on(tmp_path):
    async with without(tmp_path, "comfy", unload_timeout=0.4, history_poll_interval=0.05) as (h, sim, port):
        async with serve(sim, port=port):
            assert (await prompt(h, 30.0)).status_code == 200
            await until(lambda: sim.queue.running)
            began = asyncio.get_running_loop().time()
        answer = await asyncio.wait_for(chat(h), 3)
        assert answer.status_code == 200
        assert asyncio.get_running_loop().time() - began >= 0.4, "a restart may take a while"
        assert h.app.jobs.ends == {"lost": 1}
