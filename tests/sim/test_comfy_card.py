"""The simulated ComfyUI on the card, and its faults."""

from __future__ import annotations

import asyncio
import uuid

import httpx
import pytest

from gpu_turnstile.sim import GB, ComfyFaults, JobFate, PromptReply, SimCard
from gpu_turnstile.sim.ledger import MB

from .comfy_desk import ended, graph, running, started, submit
from .helpers import eventually, in_loop, within

FREE = {"unload_models": True, "free_memory": True}


# ---------------------------------------------------------------------------------------------- the card


@in_loop
async def test_a_job_takes_the_card_keeps_it_and_free_leaves_a_residual() -> None:
    async with started() as (sim, http):
        assert sim.card.read().used == 0
        await ended(http, await submit(http, graph()))
        assert sim.card.read().used == 10 * GB
        answer = await http.post("/free", json=FREE)
        assert (answer.status_code, answer.content) == (200, b"")
        await eventually(lambda: sim.card.read().used == 512 * MB)
        free = (await http.get("/system_stats")).json()["devices"][0]["vram_free"]
        assert free == 24 * GB - 512 * MB
        entry = await ended(http, await submit(http, graph()))
        assert entry["status"]["messages"][1][1]["nodes"] == []


@in_loop
async def test_unloading_models_alone_keeps_the_results() -> None:
    async with started() as (sim, http):
        await ended(http, await submit(http, graph()))
        await http.post("/free", json={"unload_models": True})
        await eventually(lambda: sim.card.read().used == 512 * MB)
        entry = await ended(http, await submit(http, graph()))
        assert entry["status"]["messages"][1][1]["nodes"] == ["1", "2", "9"]
        assert sim.card.read().used == 512 * MB


@in_loop
async def test_free_without_a_wish_frees_nothing() -> None:
    async with started() as (sim, http):
        await ended(http, await submit(http, graph()))
        await http.post("/free", json={})
        await ended(http, await submit(http, graph(seed=2)))
        assert sim.card.read().used == 10 * GB


@in_loop
async def test_free_never_acts_during_a_job() -> None:
    async with started() as (sim, http):
        job = await submit(http, graph(0.1))
        await running(http, job)
        await http.post("/free", json=FREE)
        await eventually(lambda: sim.queue.node == "2")
        assert sim.card.read().used == 10 * GB
        await ended(http, job)
        await eventually(lambda: sim.card.read().used == 512 * MB)


@in_loop
async def test_a_job_without_room_ends_out_of_memory_and_the_card_raises_an_alarm() -> None:
    card = SimCard(total=12 * GB)
    card.hold("ollama", 8 * GB)
    async with started(card=card) as (_, http):
        entry = await ended(http, await submit(http, graph()))
        assert entry["status"]["messages"][-1][1]["exception_type"] == "torch.OutOfMemoryError"
    assert {alarm.kind for alarm in card.alarms()} == {"two_engines", "over_total"}


# ---------------------------------------------------------------------------------------------- faults


@in_loop
async def test_free_may_be_ignored_missing_or_late() -> None:
    async with started() as (sim, http):
        await ended(http, await submit(http, graph()))
        sim.faults.update({"free_ignored": True})
        assert (await http.post("/free", json=FREE)).status_code == 200
        sim.faults.update({"free_ignored": False, "free_missing": True})
        assert (await http.post("/free", json=FREE)).status_code == 404
        assert sim.card.read().used == 10 * GB
        sim.faults.update({"free_missing": False, "free_late_s": 0.1})
        assert (await http.post("/free", json=FREE)).status_code == 200
        assert sim.card.read().used == 10 * GB
        await eventually(lambda: sim.card.read().used == 512 * MB)


@in_loop
async def test_free_may_hang() -> None:
    async with started(faults=ComfyFaults(free_hang=True)) as (_, http):
        with pytest.raises(TimeoutError):
            await within(0.05, http.post("/free", json=FREE))


@in_loop
async def test_the_reply_to_a_prompt_may_be_lost_after_it_was_queued() -> None:
    job = str(uuid.uuid4())
    async with started(faults=ComfyFaults(prompt_reply=PromptReply.LOST)) as (_, http):
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/prompt", json={"prompt": graph(), "prompt_id": job})
        assert (await ended(http, job))["status"]["completed"]


@in_loop
async def test_the_reply_to_a_prompt_may_come_after_its_end() -> None:
    async with started(faults=ComfyFaults(prompt_reply=PromptReply.AFTER_END)) as (_, http):
        job = await submit(http, graph(0.02))
        assert job in (await http.get("/history")).json()


@pytest.mark.parametrize(
    ("reply", "status", "says"), [("no_id", 200, '"prompt_id": null'), ("html", 200, "<html>"), ("error", 500, "500")]
)
@in_loop
async def test_the_reply_to_a_prompt_may_be_nonsense_and_then_nothing_is_queued(
    reply: str, status: int, says: str
) -> None:
    async with started() as (sim, http):
        await http.post("/__sim__/faults", json={"prompt_reply": reply})
        answer = await http.post("/prompt", json={"prompt": graph()})
        assert answer.status_code == status
        assert says in answer.text
        assert sim.counters["prompts"] == 0


@pytest.mark.parametrize(
    ("fate", "event"),
    [
        (JobFate.ERROR, "execution_error"),
        (JobFate.OOM, "execution_error"),
        (JobFate.INTERRUPTED, "execution_interrupted"),
    ],
)
@in_loop
async def test_a_job_may_end_badly_whatever_its_graph(fate: JobFate, event: str) -> None:
    async with started() as (sim, http):
        await ended(http, await submit(http, graph()))
        sim.faults.job_end = fate
        entry = await ended(http, await submit(http, graph()))
        assert entry["status"]["messages"][-1][0] == event


@in_loop
async def test_a_job_may_never_end_until_it_is_interrupted_or_healed() -> None:
    async with started(faults=ComfyFaults(job_end=JobFate.NEVER)) as (sim, http):
        job = await submit(http, graph())
        await running(http, job)
        await http.post("/interrupt")
        assert (await ended(http, job))["status"]["messages"][-1][0] == "execution_interrupted"
        job = await submit(http, graph())
        await running(http, job)
        sim.faults.heal()
        assert (await ended(http, job))["status"]["completed"]


@in_loop
async def test_a_restart_loses_the_queue_the_history_and_the_card() -> None:
    async with started() as (sim, http):
        await ended(http, await submit(http, graph()))
        job = await submit(http, graph(30, seed=2))
        await submit(http, graph(seed=3))
        await running(http, job)
        await http.post("/__sim__/restart")
        assert (await http.get("/queue")).json() == {"queue_running": [], "queue_pending": []}
        assert (await http.get("/history")).json() == {}
        assert sim.card.read().used == 0
        assert (await ended(http, await submit(http, graph())))["status"]["completed"]


@in_loop
async def test_a_hundred_jobs_leave_the_queue_empty_and_every_end_counted() -> None:
    async with started() as (sim, http):
        jobs = await asyncio.gather(*(submit(http, graph(seed=n % 7)) for n in range(100)))
        await ended(http, jobs[-1])
        await eventually(lambda: sim.queue.remaining == 0)
        assert sim.counters["jobs_success"] == 100
        assert set((await http.get("/history")).json()) == set(jobs)
