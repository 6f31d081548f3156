"""Work sent past the gate, to an engine's own port: noticed, shown, waited for or unloaded, and never trampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gpu_turnstile.sim import serve
from gpu_turnstile.sim.faults import JobFate, PromptReply
from tests.aio import run_async, until
from tests.e2e.house import House, graph, house
from tests.e2e.test_document import (
    CHAT,
    chat,
    entries,
    idle,
    leases,
    of_kind,
    posts,
    prompt,
    raw,
    told_to_go,
    two,
    working,
)
from tests.e2e.test_program import program

LOOKS = [0.05, 0.0]  # TURNSTILE_BYPASS_POLL: found by a look now and then, or only by the hand-over itself


@contextlib.asynccontextmanager
async def fence(tmp_path, *, alarms: bool = False, ollama: dict[str, Any] | None = None, **settings: Any):
    given = {"turnstile_bypass_poll": 0.05, "probe_timeout": 0.5, **settings}
    async with house(tmp_path, alarms=alarms, **given, **two(tmp_path, **(ollama or {}))) as h:
        yield h


async def past(h: House, seconds: float = 0.5, seed: int = 77) -> str:
    """A job that nobody sent through the gate; its id."""
    body = {"prompt": graph(seconds, seed)}
    return str((await h.http.post(f"{h.comfy.url}/prompt", json=body)).json()["prompt_id"])


async def talk_past(h: House, **more: Any) -> httpx.Response:
    return await h.http.post(f"{h.ollama.url}/api/chat", json={**CHAT, **more})


def noticed(h: House, tenant: str) -> list[str]:
    return [str(fields["what"]) for fields in of_kind(h, "bypass") if fields["tenant"] == tenant]


async def shown(h: House) -> list[dict[str, Any]]:
    return (await h.http.get(f"{h.gate}/status")).json()["bypass"]


def ends(h: House) -> list[float]:
    """When ComfyUI's jobs ended (wall clock)."""
    return [entry["status"]["messages"][-1][1]["timestamp"] / 1000 for entry in h.comfy.queue.history.values()]


def last(sim, path: str) -> float:
    return entries(sim, path)[-1].time


# ------------------------------------------------------------------------------------------ a job past the gate


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("jobs", [1, 3])
@run_async
async def test_a_chat_waits_for_jobs_that_were_sent_past_the_gate(tmp_path, look, jobs):
    async with fence(tmp_path, turnstile_bypass_poll=look) as h:
        for number in range(jobs):
            await past(h, 0.15, number)
        answer = await chat(h)
        assert answer.status_code == 200
        assert len(ends(h)) == jobs
        assert max(ends(h)) <= last(h.comfy, "/free") <= last(h.ollama, "/api/chat")
        assert noticed(h, "comfyui")


@pytest.mark.parametrize("look", LOOKS)
@run_async
async def test_a_job_past_the_gate_is_waited_for_however_long_it_takes(tmp_path, look):
    async with fence(tmp_path, turnstile_bypass_poll=look, unload_timeout=0.2) as h:
        await past(h, 0.6)
        assert (await chat(h)).status_code == 200
        assert max(ends(h)) <= last(h.ollama, "/api/chat")


@run_async
async def test_a_job_past_the_gate_is_shown_while_it_runs_and_not_afterwards(tmp_path):
    async with fence(tmp_path) as h:
        assert await shown(h) == []
        await past(h, 0.5)
        await until(lambda: noticed(h, "comfyui"))
        (item,) = await shown(h)
        assert item["tenant"] == "comfyui"
        assert item["what"]
        assert (await h.http.get(f"{h.gate}/healthz")).json()["state"] == "image"
        await until(lambda: h.app.jobs.ends == {"success": 1})
        await idle(h)
        await until(lambda: not h.app.bypass.view())
        assert await shown(h) == []
        assert len(noticed(h, "comfyui")) == 1, "told once, not at every look"


@run_async
async def test_a_job_past_the_gate_during_a_chat_gets_the_card_before_the_next_chat(tmp_path):
    async with fence(tmp_path, alarms=True) as h:
        async with h.streaming("llama3", max_tokens=60) as lines:
            await past(h, 0.6)
            await until(lambda: noticed(h, "comfyui"))
            late = asyncio.create_task(chat(h))
            await until(lambda: len(h.view.waiting) >= 2)
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest, "nobody's answer is cut for it"
        assert (await late).status_code == 200
        assert max(ends(h)) <= last(h.ollama, "/api/chat")


@run_async
async def test_a_job_past_the_gate_behind_one_of_ours_is_waited_for_too(tmp_path):
    async with fence(tmp_path) as h:
        await working(h, 0.2)
        await past(h, 0.4)
        assert (await chat(h)).status_code == 200
        assert len(ends(h)) == 2
        assert max(ends(h)) <= last(h.comfy, "/free") <= last(h.ollama, "/api/chat")
        assert noticed(h, "comfyui")


@pytest.mark.parametrize("look", LOOKS)
@run_async
async def test_a_job_of_ours_behind_one_past_the_gate_holds_the_card_to_its_own_end(tmp_path, look):
    async with fence(tmp_path, turnstile_bypass_poll=look) as h:
        await past(h, 0.3)
        assert (await prompt(h, 0.3)).status_code == 200
        assert (await chat(h)).status_code == 200
        assert len(ends(h)) == 2
        assert max(ends(h)) <= last(h.ollama, "/api/chat")


@pytest.mark.parametrize("look", LOOKS)
@run_async
async def test_memory_taken_past_the_gate_is_waited_for_when_it_is_freed(tmp_path, look):
    async with fence(tmp_path, turnstile_bypass_poll=look) as h:
        h.comfy.faults.free_late_s = 0.4
        await past(h, 0.3)
        await until(lambda: h.card.held_by("comfyui") > 8 << 30)
        await until(lambda: leases(h, "comfyui") or not look)
        assert (await chat(h)).status_code == 200
        assert last(h.ollama, "/api/chat") - entries(h.comfy, "/free")[0].time > 0.38


@run_async
async def test_jobs_past_the_gate_can_be_only_shown_if_somebody_wants_that(tmp_path):
    async with fence(tmp_path, turnstile_bypass="ignore") as h:
        await past(h, 0.5)
        await until(lambda: noticed(h, "comfyui"))
        assert (await shown(h))[0]["tenant"] == "comfyui"
        assert not h.view.leases
        assert not h.view.waiting


# ---------------------------------------------------------------------------------------- a model past the gate


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("keep", [300, -1])
@run_async
async def test_a_model_loaded_past_the_gate_is_unloaded_before_an_image_job(tmp_path, look, keep):
    async with fence(tmp_path, turnstile_bypass_poll=look) as h:
        await talk_past(h, keep_alive=keep)
        assert (await prompt(h, 0.05)).status_code == 200
        assert [body["model"] for _, body in told_to_go(h.ollama)] == ["llama3:latest"]
        assert noticed(h, "ollama")
        await idle(h)
        assert not h.card.held_by("ollama")


@run_async
async def test_a_model_loaded_past_the_gate_is_shown_by_name_until_it_is_gone(tmp_path):
    async with fence(tmp_path) as h:
        await talk_past(h)
        await until(lambda: noticed(h, "ollama"))
        (item,) = await shown(h)
        assert item["tenant"] == "ollama"
        assert "llama3:latest" in item["what"]
        assert (await prompt(h, 0.05)).status_code == 200
        await idle(h)
        await until(lambda: not h.app.bypass.view())


@pytest.mark.parametrize("look", LOOKS)
@run_async
async def test_an_answer_past_the_gate_is_finished_before_its_model_goes_and_the_image_job_waits(tmp_path, look):
    async with fence(tmp_path, turnstile_bypass_poll=look, ollama={"tokens_per_s": 50}) as h:
        answer = asyncio.create_task(talk_past(h, options={"num_predict": 40}))
        await until(lambda: h.ollama.in_flight)
        await until(lambda: h.card.held_by("ollama"))
        assert (await prompt(h, 0.05)).status_code == 200
        assert answer.done(), "the image job was sent when the answer was out"
        assert json.loads((await answer).content)["eval_count"] == 40
        await idle(h)


@run_async
async def test_a_model_loaded_past_the_gate_in_the_middle_of_an_unload_goes_too(tmp_path):
    async with fence(tmp_path, ollama={"max_loaded": 3}) as h:
        await chat(h)
        h.ollama.faults.unload_s = 0.25
        image = asyncio.create_task(prompt(h, 0.05))
        await until(lambda: told_to_go(h.ollama))
        await talk_past(h, model="qwen3:8b")
        assert (await image).status_code == 200
        assert {body["model"] for _, body in told_to_go(h.ollama)} == {"llama3:latest", "qwen3:8b"}
        await idle(h)
        assert not h.card.held_by("ollama")


@run_async
async def test_a_model_loaded_past_the_gate_during_an_image_job_is_gone_before_the_next_one(tmp_path):
    async with fence(tmp_path, alarms=True) as h:
        await working(h, 0.3)
        await talk_past(h)
        await idle(h)
        h.card.reset()
        assert (await prompt(h, 0.05)).status_code == 200
        assert noticed(h, "ollama")
        await idle(h)
        assert not h.card.alarms()


@run_async
async def test_work_past_the_gate_in_every_moment_of_a_run_leaves_both_sides_working(tmp_path):
    settings = {"history_poll_interval": 0.02, "turnstile_bypass_poll": 0.02, "unload_timeout": 0.6}
    async with fence(tmp_path, alarms=True, **settings) as h:
        wild = []
        for number in range(5):
            wild.append(asyncio.create_task(talk_past(h)))
            assert (await chat(h)).status_code == 200
            wild.append(asyncio.create_task(past(h, 0.03, 100 + number)))
            assert (await prompt(h, 0.03, number)).status_code == 200
        await asyncio.gather(*wild)
        await until(lambda: not h.comfy.queue.remaining)
        assert (await chat(h)).status_code == 200
        await until(lambda: not h.view.leases and not h.view.waiting)


# ---------------------------------------------------------------------------------------------- no false alarms


@run_async
async def test_work_that_came_through_the_gate_is_never_taken_for_a_bypass(tmp_path):
    settings = {"turnstile_bypass_poll": 0.005, "history_poll_interval": 0.02, "warm_model": "llama3"}
    async with fence(tmp_path, **settings) as h:
        for seed in range(3):
            replies = await asyncio.gather(prompt(h, 0.02, seed), prompt(h, 0.02, seed + 50), chat(h), chat(h))
            assert {reply.status_code for reply in replies} == {200}
        h.comfy.faults.prompt_reply = PromptReply.AFTER_END
        gone = await raw(h.comfy_gate, "/prompt", {"prompt": graph(0.1, 60)})
        await until(lambda: h.comfy.queue.running)
        gone.close()
        await until(lambda: not h.comfy.queue.remaining)
        h.comfy.faults.prompt_reply = PromptReply.LOST
        await prompt(h, 0.1, 61, prompt_id=str(uuid.uuid4()))
        h.comfy.faults.heal()
        await until(lambda: not h.view.leases)
        await idle_or_warm(h)
        assert of_kind(h, "bypass") == []
        assert await shown(h) == []


async def idle_or_warm(h: House) -> None:
    await until(lambda: not h.view.leases and not h.view.waiting and h.view.phase != "swapping", 10)


@run_async
async def test_clients_that_unload_and_free_through_the_gate_are_no_bypass_and_disturb_nobody(tmp_path):
    async with fence(tmp_path) as h:
        await chat(h, keep_alive=0)
        reply = await h.http.post(f"{h.gate}/api/generate", json={"model": "llama3", "keep_alive": 0})
        assert reply.status_code == 200
        await working(h, 0.1)
        assert (await h.http.post(f"{h.comfy_gate}/free", json={"unload_models": True})).status_code == 200
        await idle(h)
        assert (await chat(h)).status_code == 200
        assert of_kind(h, "bypass") == []


# ------------------------------------------------------------------------------------------------- at the start


@contextlib.asynccontextmanager
async def before(tmp_path) -> AsyncIterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Engines that ran before the gate: (parts for `house`, the simulators)."""
    sims = two(tmp_path)
    async with serve(sims["ollama"]) as ollama, serve(sims["comfy"]) as comfy:
        yield {"ollama_url": ollama, "comfy_url": comfy, "card": sims["card"], "turnstile_bypass_poll": 0.05}, sims


@run_async
async def test_a_job_that_runs_when_the_gate_starts_is_not_trampled(tmp_path):
    async with before(tmp_path) as (parts, sims), httpx.AsyncClient(trust_env=False, verify=False) as http:
        comfy, ollama = sims["comfy"], sims["ollama"]
        await http.post(f"{comfy.url}/prompt", json={"prompt": graph(0.6)})
        await until(lambda: comfy.queue.running)
        async with house(tmp_path, **parts) as h:
            assert (await h.http.get(f"{h.gate}/healthz")).json()["state"] == "image"
            assert (await chat(h)).status_code == 200
            ended = next(iter(comfy.queue.history.values()))["status"]["messages"][-1][1]["timestamp"] / 1000
            assert ended <= last(comfy, "/free") <= last(ollama, "/api/chat")


@run_async
async def test_an_answer_that_streams_when_the_gate_starts_is_finished_before_an_image_job(tmp_path):
    async with before(tmp_path) as (parts, sims), httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as http:
        ollama = sims["ollama"]
        body = {**CHAT, "options": {"num_predict": 100}}
        answer = asyncio.create_task(http.post(f"{ollama.url}/api/chat", json=body))
        await until(lambda: ollama.in_flight)
        async with house(tmp_path, **parts) as h:
            assert (await prompt(h, 0.05)).status_code == 200
            assert answer.done()
            assert (await answer).json()["eval_count"] == 100
            await idle(h)


@run_async
async def test_a_gate_killed_in_the_middle_of_a_job_starts_again_and_waits_for_it(tmp_path):
    async with before(tmp_path) as (_, sims), httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as http:
        comfy, ollama = sims["comfy"], sims["ollama"]
        env = {
            "OLLAMA_URL": ollama.url,
            "COMFY_URL": comfy.url,
            "LISTEN_COMFY": "127.0.0.1:0",
            "TURNSTILE_GPU": f"sim:{tmp_path / 'card.json'}",
        }
        async with program(tmp_path, **env) as p:
            gate = await p.until_listening()
            port = p.said.rpartition("comfyui=127.0.0.1:")[2].split()[0]
            reply = await http.post(f"http://127.0.0.1:{port}/prompt", json={"prompt": graph(3.0)})
            assert reply.status_code == 200
            await until(lambda: comfy.queue.running)
            p.process.send_signal(signal.SIGKILL)
            await p.end()
        async with program(tmp_path, **env) as p:
            gate = await p.until_listening()
            assert comfy.queue.running, "the job is still there when the gate is back"
            began = time.time()
            assert (await http.post(f"{gate}/api/chat", json=CHAT)).status_code == 200
            assert not comfy.queue.remaining
            assert began < last(comfy, "/free") <= last(ollama, "/api/chat")
            assert len(posts(comfy, "/prompt")) == 1
        assert not sims["card"].alarms()


@pytest.mark.parametrize("sent", ["through", "past"])
@run_async
async def test_a_job_that_never_ends_gets_the_time_of_one_job_and_is_not_taken_up_again(tmp_path, sent):
    """ComfyUI 0.3.64: a prompt with `extra_data: null` ends its worker and stays in the queue, running, for ever."""
    async with fence(tmp_path, alarms=True, job_timeout=0.4, unload_timeout=0.4) as h:
        h.comfy.faults.job_end = JobFate.NEVER
        if sent == "through":
            assert (await prompt(h)).status_code == 200
        else:
            await past(h)
        await until(lambda: of_kind(h, "job_end"))
        assert (await chat(h)).status_code == 200
        looks = len(entries(h.comfy, "/queue"))
        await until(lambda: len(entries(h.comfy, "/queue")) > looks + 5)
        assert (await asyncio.wait_for(chat(h), 0.3)).status_code == 200
        assert [fields["end"] for fields in of_kind(h, "job_end")] == ["timeout"]
        assert not of_kind(h, "no_job")
        assert h.comfy.queue.running
        h.comfy.faults.heal()
