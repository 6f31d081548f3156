"""ComfyUI: jobs are followed by queue and history, and `/free` is sent once, to an idle server."""

from __future__ import annotations

import asyncio
import time

import pytest

from gpu_turnstile.engines.base import Health, JobEnd, JobPhase, Released, Timing
from gpu_turnstile.engines.comfyui import ComfyUI
from tests.engines.fake import CUT, HANG, run, serving

POLL = 0.02
QUICK = Timing(
    unload_timeout=0.15, unload_poll=0.01, history_poll=POLL, job_timeout=5, free_timeout=0.2, call_timeout=0.2
)
SUCCESS = {"prompt": [0, "j", {}, {}, ["9"]], "outputs": {}, "status": {"status_str": "success", "completed": True}}
STOPPED = {"status": {"status_str": "error", "completed": False, "messages": [["execution_interrupted", {}]]}}
FAILED = {"status": {"status_str": "error", "completed": False, "messages": [["execution_error", {}]]}}


class FakeComfy:
    def __init__(self, running=(), pending=(), history=None, free=(200, "")):
        self.running, self.pending, self.history = list(running), list(pending), dict(history or {})
        self.free = free

    def __call__(self, method, path, body):
        if path == "/system_stats":
            return {"system": {"os": "linux", "comfyui_version": "0.33.0"}, "devices": []}
        if path == "/queue":
            return {"queue_running": self.items(self.running), "queue_pending": self.items(self.pending)}
        if path.startswith("/history/"):
            job = path.removeprefix("/history/")
            return {job: self.history[job]} if job in self.history else {}
        return self.free

    @staticmethod
    def items(jobs):
        return [
            [number, job, {"1": {"class_type": "EmptyImage"}}, {"client_id": "c"}, ["9"]]
            for number, job in enumerate(jobs)
        ]

    def finish(self, job, entry=None):
        self.running = [other for other in self.running if other != job]
        self.pending = [other for other in self.pending if other != job]
        if entry is not None:
            self.history[job] = entry


def with_comfy(fake, story, timing=QUICK):
    """`story(comfy, server)` returns what the test looks at."""

    async def main():
        async with serving(fake) as (server, http):
            return await story(ComfyUI(server.url, http, timing), server)

    return run(main())


async def follow(comfy, server, *acts):
    """Track job `j`; each act is done once the phase named before it was told. The end, the phases, the polls after."""
    phases: list[JobPhase] = []
    told = asyncio.Event()

    def on_phase(phase):
        phases.append(phase)
        told.set()

    tracking = asyncio.create_task(comfy.track("j", on_phase))
    for phase, act in acts:
        while phase not in phases:
            told.clear()
            await told.wait()
        if phase is not JobPhase.UNREACHABLE:
            await server.asked_for("/queue", times=server.paths().count("GET /queue") + 2)  # it was seen so for a while
        done = act()
        if done is not None:
            await done
        server.asked.clear()
    return await tracking, phases


ENDS = [
    (SUCCESS, JobEnd.SUCCESS),
    (FAILED, JobEnd.ERROR),
    (STOPPED, JobEnd.INTERRUPTED),
    ({"outputs": {}}, JobEnd.SUCCESS),
    (None, JobEnd.CLEARED),
]


@pytest.mark.parametrize(("entry", "expected"), ENDS)
def test_a_running_job_ends_within_two_polls_as_its_history_says(entry, expected):
    fake = FakeComfy(running=["j"])

    async def story(comfy, server):
        end, phases = await follow(comfy, server, (JobPhase.RUNNING, lambda: fake.finish("j", entry)))
        return end, phases, server.paths().count("GET /queue")

    end, phases, polls = with_comfy(fake, story)
    assert end is expected
    assert phases == [JobPhase.RUNNING]
    assert polls <= 2


def test_a_job_deleted_from_the_queue_is_deleted():
    fake = FakeComfy(running=["other"], pending=["j"])
    end, phases = with_comfy(fake, lambda c, s: follow(c, s, (JobPhase.QUEUED, lambda: fake.finish("j"))))
    assert end is JobEnd.DELETED
    assert phases == [JobPhase.QUEUED]


def test_phases_are_told_when_they_change():
    fake = FakeComfy(pending=["j"])

    def start():
        fake.pending, fake.running = [], ["j"]

    acts = [(JobPhase.QUEUED, start), (JobPhase.RUNNING, lambda: fake.finish("j", SUCCESS))]
    end, phases = with_comfy(fake, lambda c, s: follow(c, s, *acts))
    assert end is JobEnd.SUCCESS
    assert phases == [JobPhase.QUEUED, JobPhase.RUNNING]


def test_a_hundred_cached_jobs_that_were_done_before_the_reply_end_at_the_first_look():
    fake = FakeComfy(history={"j": SUCCESS})

    async def story(comfy, server):
        ends = [await comfy.track("j") for _ in range(100)]
        return set(ends), server.paths()[:2], len(server.asked)

    assert with_comfy(fake, story) == ({JobEnd.SUCCESS}, ["GET /queue", "GET /history/j"], 200)


def test_a_job_nobody_knows_is_lost_after_two_looks():
    async def story(comfy, server):
        return await comfy.track("j"), server.paths().count("GET /queue")

    assert with_comfy(FakeComfy(), story) == (JobEnd.LOST, 2)


@pytest.mark.parametrize("downtime", [0.0, 0.1])
@pytest.mark.parametrize("where", ["running", "pending"])
def test_a_job_is_lost_when_the_server_was_replaced_however_quickly(where, downtime):
    fake = FakeComfy(**{where: ["j"]})

    async def story(comfy, server):
        async def replace():
            await server.stop()
            server.handler = FakeComfy()
            await asyncio.sleep(downtime)
            await server.start()

        phase = JobPhase.RUNNING if where == "running" else JobPhase.QUEUED
        return (await follow(comfy, server, (phase, replace)))[0]

    assert with_comfy(fake, story) is JobEnd.LOST


def test_a_server_that_is_away_and_comes_back_with_the_job_keeps_it():
    fake = FakeComfy(running=["j"])

    async def story(comfy, server):
        acts = [
            (JobPhase.RUNNING, server.stop),
            (JobPhase.UNREACHABLE, server.start),
            (JobPhase.RUNNING, lambda: fake.finish("j", SUCCESS)),
        ]
        return await follow(comfy, server, *acts)

    end, phases = with_comfy(fake, story)
    assert end is JobEnd.SUCCESS
    assert phases[:2] == [JobPhase.RUNNING, JobPhase.UNREACHABLE]


def test_a_server_that_stays_away_is_a_timeout():
    async def story(comfy, server):
        await server.stop()
        return await comfy.track("j")

    assert with_comfy(FakeComfy(), story, Timing(job_timeout=0.2, history_poll=POLL)) is JobEnd.TIMEOUT


@pytest.mark.parametrize("answer", [HANG, (500, "x"), (200, "<html>"), {}, CUT])
def test_answers_that_say_nothing_keep_the_job_until_its_limit(answer):
    began = time.monotonic()
    timing = Timing(job_timeout=0.15, history_poll=POLL, call_timeout=0.05)
    assert with_comfy(lambda *_: answer, lambda c, _: c.track("j"), timing) is JobEnd.TIMEOUT
    assert time.monotonic() - began < 2


def test_a_job_id_cannot_leave_its_path():
    async def story(comfy, server):
        await comfy.track("../queue?x")
        return server.paths()[1]

    assert with_comfy(FakeComfy(), story) == "GET /history/..%2Fqueue%3Fx"


def test_free_is_sent_once_and_its_yes_is_only_accepted():
    async def story(comfy, server):
        return await comfy.release(), server.asked

    result, asked = with_comfy(FakeComfy(), story)
    assert result.outcome is Released.ACCEPTED
    assert asked[-1] == ("POST", "/free", {"unload_models": True, "free_memory": True})
    assert [path for _, path, _ in asked] == ["/queue", "/free"]


def test_free_waits_for_the_queue_to_empty():
    fake = FakeComfy(running=["a"], pending=["b"])

    async def story(comfy, server):
        releasing = asyncio.create_task(comfy.release())
        await server.asked_for("/queue", times=3)
        assert "POST /free" not in server.paths()
        fake.running, fake.pending = [], []
        return await releasing, server.paths().count("POST /free")

    result, frees = with_comfy(fake, story)
    assert (result.outcome, frees) == (Released.ACCEPTED, 1)


def test_a_queue_that_does_not_empty_ends_at_the_limit_without_free():
    async def story(comfy, server):
        return await comfy.release(), server.paths()

    result, paths = with_comfy(FakeComfy(running=["a"], pending=["b"]), story)
    assert result.outcome is Released.TIMEOUT
    assert result.left == ("a", "b")
    assert "1 running, 1 pending" in result.detail
    assert "POST /free" not in paths


def test_the_last_look_cut_short_by_the_limit_does_not_hide_what_runs():
    fake, looks = FakeComfy(running=["a"]), []

    def handler(method, path, body):
        looks.append(path)
        return fake(method, path, body) if len(looks) == 1 else HANG

    timing = Timing(unload_timeout=0.2, unload_poll=0.01, call_timeout=5)
    assert with_comfy(handler, lambda c, _: c.release(), timing).detail.endswith("1 running, 0 pending")


@pytest.mark.parametrize(
    ("free", "outcome"),
    [((404, ""), Released.UNSUPPORTED), ((500, "oops"), Released.REFUSED), (HANG, Released.TIMEOUT)],
)
def test_what_becomes_of_free_is_told(free, outcome):
    assert with_comfy(FakeComfy(free=free), lambda c, _: c.release()).outcome is outcome


@pytest.mark.parametrize("answer", [HANG, (500, "x"), (200, "<html>")])
def test_a_queue_that_cannot_be_read_is_not_an_empty_queue(answer):
    result = with_comfy(lambda *_: answer, lambda c, _: c.release())
    assert result.outcome is Released.TIMEOUT
    assert "could not be read" in result.detail


def test_a_comfyui_that_is_off_is_unreachable_and_down_and_of_unknown_work():
    async def story(comfy, server):
        await server.stop()
        return (await comfy.release()).outcome, (await comfy.probe()).health, await comfy.busy()

    assert with_comfy(FakeComfy(), story) == (Released.UNREACHABLE, Health.DOWN, None)


def test_probe_and_busy_tell_what_it_says():
    async def story(comfy, server):
        probe = await comfy.probe()
        return probe.health, probe.detail, await comfy.busy(), await comfy.loaded()

    assert with_comfy(FakeComfy(), story) == (Health.READY, "ComfyUI 0.33.0", False, None)
    assert with_comfy(FakeComfy(pending=["a"]), story)[2] is True


def test_prompts_that_went_past_the_gate_are_found():
    fake = FakeComfy(running=["mine"], pending=["theirs", "mine-too"])
    assert with_comfy(fake, lambda c, _: c.find_unknown({"mine", "mine-too"})) == ("theirs",)
    assert with_comfy(lambda *_: (500, ""), lambda c, _: c.find_unknown(set())) is None
