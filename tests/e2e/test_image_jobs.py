"""However an image job ends, its lease lives exactly as long as the job, and the end has its right name.

In every test: the lease is there while ComfyUI has the job, it is gone two polls after the end at the latest, the
book and the event name the end, and the next LLM request works.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from gpu_turnstile.engines.base import JobEnd
from gpu_turnstile.sim import serve
from gpu_turnstile.sim.base import Sim
from gpu_turnstile.sim.faults import JobFate, PromptReply
from tests.aio import run_async, until
from tests.e2e.house import GRAPH, House, graph, house
from tests.e2e.test_document import chat, entries, idle, leases, leave, of_kind, posts, prompt, raw, two, working

POLL = 0.08
SLACK = 0.15  # seconds for a loop that five tests share with the engines they test


@contextlib.asynccontextmanager
async def studio(tmp_path, *, alarms: bool = False, comfy: dict[str, Any] | None = None, **settings: Any):
    given = {"history_poll_interval": POLL, "probe_timeout": 0.5, **settings}
    async with house(tmp_path, alarms=alarms, **given, **two(tmp_path, comfy=comfy)) as h:
        yield h


class Watch:
    """Looks at every turn of the loop whether the lease and the job agree."""

    def __init__(self, h: House, alive: Callable[[], object] | None = None) -> None:
        self._h = h
        self._alive = alive or (lambda: h.comfy.queue.remaining)
        self.ended: float | None = None
        self.released: float | None = None
        self.missing = False

    async def run(self) -> None:
        while self.released is None:
            now, alive, held = time.monotonic(), bool(self._alive()), leases(self._h, "comfyui")
            if alive:
                self.ended = None
            elif self.ended is None:
                self.ended = now
            if alive and not held:
                self.missing = True
            if not held:
                self.released = now
            await asyncio.sleep(0.002)

    def check(self) -> None:
        assert not self.missing, "the lease was given up while the job was alive"
        assert self.ended is not None
        assert self.released is not None
        assert self.released - self.ended <= 2 * POLL + SLACK


@contextlib.asynccontextmanager
async def watched(h: House, alive: Callable[[], object] | None = None) -> AsyncIterator[None]:
    """From inside to the end of the lease, lease and job are compared."""
    watch = Watch(h, alive)
    looking = asyncio.create_task(watch.run())
    try:
        yield
        await asyncio.wait_for(asyncio.shield(looking), 8)
        watch.check()
    finally:
        looking.cancel()


async def ended_as(h: House, end: str, count: int = 1) -> None:
    """The end is told in the book, in the events and in the metrics, and life goes on."""
    assert h.app.jobs.ends == {end: count}
    told = of_kind(h, "job_end")
    assert [fields["end"] for fields in told] == [end] * count
    assert all(fields["prompt_id"] for fields in told)
    text = (await h.http.get(f"{h.gate}/metrics")).text
    assert f'gpu_turnstile_image_job_ends_total{{end="{end}"}} {count}.0' in text
    assert f"gpu_turnstile_image_jobs_total {count}.0" in text
    assert (await chat(h)).status_code == 200


def stalled(h: House) -> asyncio.Event:
    """ComfyUI takes no job out of its queue until the event is set."""
    resume, run_next = asyncio.Event(), h.comfy.queue._run_next

    async def later() -> None:
        await resume.wait()
        if h.comfy.queue._heap:
            await run_next()

    h.comfy.queue._run_next = later
    return resume


class Forgets(dict):
    """A history that was cleared before anybody could look."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


# ----------------------------------------------------------------------------------------------- ends of a job


@pytest.mark.parametrize("fate", ["normal", "error", "oom", "interrupted"])
@run_async
async def test_a_job_that_ends_by_itself_is_named_after_its_end(tmp_path, fate):
    async with studio(tmp_path) as h:
        h.comfy.faults.job_end = JobFate(fate)
        await prompt(h, 0.25)
        async with watched(h):
            pass
        h.comfy.faults.heal()
        await ended_as(h, {"normal": "success", "oom": "error"}.get(fate, fate))


@pytest.mark.parametrize("kind", ["value", "oom"])
@run_async
async def test_a_node_that_fails_in_the_middle_of_a_graph_is_an_error(tmp_path, kind):
    async with studio(tmp_path) as h:
        bad = graph(0.15)
        bad["3"] = {"class_type": "RaiseNode", "inputs": {"image": ["2", 0], "kind": kind}}
        bad["9"]["inputs"]["images"] = ["3", 0]
        await h.http.post(f"{h.comfy_gate}/prompt", json={"prompt": bad})
        async with watched(h):
            pass
        await ended_as(h, "error")


@pytest.mark.parametrize("path", ["/interrupt", "/api/interrupt"])
@run_async
async def test_a_job_that_somebody_interrupts_through_the_gate_ends_as_interrupted(tmp_path, path):
    async with studio(tmp_path) as h:
        await working(h, 2.0)
        async with watched(h):
            assert (await h.http.post(h.comfy_gate + path)).status_code == 200
        await ended_as(h, "interrupted")


@pytest.mark.parametrize("wish", ["delete", "clear", "cancel"])
@run_async
async def test_a_job_taken_out_of_comfyuis_queue_before_it_ran_ends_as_deleted(tmp_path, wish):
    async with studio(tmp_path) as h:
        resume = stalled(h)
        job = (await prompt(h)).json()["prompt_id"]
        await until(lambda: of_kind(h, "job")[-1]["phase"] == "queued")
        async with watched(h):
            if wish == "cancel":
                await h.http.post(f"{h.comfy_gate}/api/jobs/{job}/cancel")
            else:
                await h.http.post(
                    f"{h.comfy_gate}/queue", json={"clear": True} if wish == "clear" else {"delete": [job]}
                )
        resume.set()
        await ended_as(h, "deleted")


@run_async
async def test_a_job_whose_history_was_cleared_before_anybody_looked_ends_as_cleared(tmp_path):
    async with studio(tmp_path) as h:
        h.comfy.queue.history = Forgets()
        await working(h, 0.4)
        await until(lambda: of_kind(h, "job")[-1]["phase"] == "running")
        async with watched(h):
            pass
        await ended_as(h, "cleared")


@contextlib.asynccontextmanager
async def replaced(sim: Sim[Any]) -> AsyncIterator[None]:
    """Its process ends and a fresh one takes the same port; inside, that one runs."""
    sim.exit(0)
    await sim.exited.wait()
    async with serve(sim, port=httpx.URL(sim.url).port):
        yield


@pytest.mark.parametrize("when", ["queued", "running"])
@run_async
async def test_a_job_that_a_restart_of_comfyui_lost_ends_as_lost(tmp_path, when):
    async with studio(tmp_path) as h:
        if when == "queued":
            stalled(h)
            await prompt(h)
        else:
            await working(h, 3.0)
        await until(lambda: of_kind(h, "job")[-1]["phase"] == when)
        async with contextlib.AsyncExitStack() as stack:
            async with watched(h):
                await stack.enter_async_context(replaced(h.comfy))
            await ended_as(h, "lost")


@pytest.mark.parametrize("trouble", ["down", "hang", "server_error"])
@run_async
async def test_a_comfyui_that_is_away_for_a_while_keeps_its_job_and_the_card(tmp_path, trouble):
    async with studio(tmp_path, probe_timeout=0.1) as h:
        await working(h, 0.6)
        async with watched(h):
            setattr(h.comfy.faults, trouble, True)
            before = len(h.comfy.log)
            await until(lambda: len(h.comfy.log) > before + 3)
            assert (await h.http.get(f"{h.gate}/status")).json()["jobs"][0]["phase"] == "unreachable"
            h.comfy.faults.heal()
        await ended_as(h, "success")


@run_async
async def test_a_job_that_ended_while_comfyui_could_not_be_asked_is_released_when_it_can_be_again(tmp_path):
    async with studio(tmp_path, probe_timeout=0.1) as h:
        await working(h, 0.2)
        away = True
        async with watched(h, lambda: away):
            h.comfy.faults.hang = True
            await until(lambda: not h.comfy.queue.remaining)
            before = len(h.comfy.log)
            await until(lambda: len(h.comfy.log) > before + 1)
            h.comfy.faults.heal()
            away = False
        await ended_as(h, "success")


# --------------------------------------------------------------------------------------------------- cached jobs


@run_async
async def test_a_hundred_and_twenty_jobs_that_take_no_time_leak_no_lease(tmp_path):
    async with studio(tmp_path, comfy={"job_s": 0}, history_poll_interval=0.02) as h:
        replies = await asyncio.gather(*(same(h) for _ in range(100)))
        replies += await asyncio.gather(*(same(h) for _ in range(20)))
        assert {reply.status_code for reply in replies} == {200}
        await idle(h)
        assert len({reply.json()["prompt_id"] for reply in replies}) == 120
        await ended_as(h, "success", 120)


@run_async
async def test_cached_jobs_in_a_row_are_each_released_within_a_poll(tmp_path):
    async with studio(tmp_path, comfy={"job_s": 0}) as h:
        for _ in range(8):
            assert (await same(h)).status_code == 200
            async with watched(h):
                pass
        await idle(h)
        assert h.app.jobs.ends == {"success": 8}
        assert all(fields["seconds"] <= POLL + SLACK for fields in of_kind(h, "job_end"))


async def same(h: House) -> Any:
    return await h.http.post(f"{h.comfy_gate}/prompt", json={"prompt": GRAPH})


# ----------------------------------------------------------------------------------------- answers to /prompt


@run_async
async def test_a_partly_valid_prompt_is_a_job_whose_reply_is_passed_on_with_its_errors(tmp_path):
    async with studio(tmp_path) as h:
        mixed = graph(0.25)
        mixed["8"] = {"class_type": "SaveImage", "inputs": {"images": ["77", 0], "filename_prefix": "t"}}
        reply = await h.http.post(f"{h.comfy_gate}/prompt", json={"prompt": mixed})
        assert reply.status_code == 200
        assert reply.json()["node_errors"]
        async with watched(h):
            pass
        await ended_as(h, "success")


@pytest.mark.parametrize("reply", ["no_id", "html", "error"])
@run_async
async def test_a_reply_that_names_no_job_is_passed_on_and_holds_nothing(tmp_path, reply):
    async with studio(tmp_path) as h:
        h.comfy.faults.prompt_reply = PromptReply(reply)
        answer = await prompt(h, 0.2)
        assert answer.status_code == (500 if reply == "error" else 200)
        assert "x-turnstile-error" not in answer.headers
        assert "text/html" in answer.headers["content-type"] if reply == "html" else True
        await until(lambda: not h.view.leases, 2 * POLL + SLACK)
        h.comfy.faults.heal()
        assert (await chat(h)).status_code == 200
        assert len(posts(h.comfy, "/prompt")) == 1


BROKEN = {
    "nothing": {},
    "no_prompt": {"client_id": "x"},
    "empty_graph": {"prompt": {}},
    "bad_id": {"prompt": GRAPH, "prompt_id": "not a uuid"},
    "no_outputs": {"prompt": {"1": GRAPH["1"]}},
    "unknown_node": {"prompt": {"1": {"class_type": "Nothing", "inputs": {}}}},
}


@run_async
async def test_a_prompt_that_is_refused_comes_back_word_for_word_and_holds_nothing(tmp_path):
    async with studio(tmp_path) as h:
        for body in BROKEN.values():
            direct = await h.http.post(f"{h.comfy.url}/prompt", json=body)
            reply = await h.http.post(f"{h.comfy_gate}/prompt", json=body)
            assert (reply.status_code, reply.content) == (direct.status_code, direct.content)
            assert reply.status_code == 400
            await until(lambda: not h.view.leases, POLL + SLACK)
        assert not h.app.jobs.ends
        assert (await chat(h)).status_code == 200


@run_async
async def test_a_body_that_is_no_json_object_is_comfyuis_to_refuse(tmp_path):
    async with studio(tmp_path) as h:
        refused, broken = [b"[]", b'"x"', b"[1]"], [b"", b"not json", b"null", b"\xff\xfe", b"[" * 5000]
        bodies = [*refused, *broken]
        for body in bodies:
            reply = await h.http.post(f"{h.comfy_gate}/prompt", content=body)
            assert reply.status_code == (400 if body in refused else 500)
            assert "x-turnstile-error" not in reply.headers
            await until(lambda: not h.view.leases, 3 * POLL + SLACK)
        assert len(posts(h.comfy, "/prompt")) == len(bodies)


@pytest.mark.parametrize("chosen", [True, False], ids=["id_of_the_client", "id_of_the_server"])
@pytest.mark.parametrize("path", ["/prompt", "/api/prompt"])
@run_async
async def test_a_job_whose_reply_was_lost_is_found_and_holds_the_card_to_its_end(tmp_path, chosen, path):
    async with studio(tmp_path) as h:
        assert (await chat(h)).status_code == 200
        h.comfy.faults.prompt_reply = PromptReply.LOST
        body = {"prompt": graph(0.4)} | ({"prompt_id": str(uuid.uuid4())} if chosen else {})
        asked = asyncio.create_task(h.http.post(h.comfy_gate + path, json=body))
        await until(lambda: h.comfy.queue.running)
        h.comfy.faults.prompt_reply = PromptReply.NORMAL
        async with watched(h):
            answer = await asked
            assert (answer.status_code, bool(answer.headers["x-turnstile-error"])) == (502, True)
            late = asyncio.create_task(chat(h))
        assert len(posts(h.comfy, path)) == 1, "a prompt that may have arrived is never sent twice"
        assert (await late).status_code == 200
        await ended_as(h, "success")
        assert of_kind(h, "job_end")[0]["prompt_id"] == body.get("prompt_id", of_kind(h, "job_end")[0]["prompt_id"])


@run_async
async def test_a_reply_lost_before_anything_was_queued_holds_nothing(tmp_path):
    async with studio(tmp_path) as h:
        await prompt(h, 0.01)
        await idle(h)
        h.comfy.faults.down = True
        asked = asyncio.create_task(prompt(h, 0.1))
        await until(lambda: len(posts(h.comfy, "/prompt")) == 2)
        h.comfy.faults.heal()
        assert (await asked).status_code == 502
        await until(lambda: not h.view.leases, 4 * POLL + SLACK)
        assert (await chat(h)).status_code == 200


@pytest.mark.parametrize("how", ["reset", "close"])
@run_async
async def test_a_client_that_left_before_the_reply_leaves_a_job_that_holds_the_card_to_its_end(tmp_path, how):
    async with studio(tmp_path) as h:
        h.comfy.faults.prompt_reply = PromptReply.AFTER_END
        writer = await raw(h.comfy_gate, "/prompt", {"prompt": graph(0.5)})
        await until(lambda: h.comfy.queue.running)
        async with watched(h):
            leave(writer, how)
            late = asyncio.create_task(chat(h))
        assert (await late).status_code == 200
        await ended_as(h, "success")


@run_async
async def test_a_client_that_leaves_while_it_waits_never_has_a_job(tmp_path):
    async with studio(tmp_path) as h:
        async with h.streaming("llama3"):
            writer = await raw(h.comfy_gate, "/prompt", {"prompt": graph(0.5)})
            await until(lambda: h.view.waiting)
            leave(writer, "close")
            await until(lambda: not h.view.waiting, 1.0)
        assert (await chat(h)).status_code == 200
        assert not posts(h.comfy, "/prompt")
        assert not h.app.jobs.ends


@run_async
async def test_a_job_that_was_done_before_its_reply_was_read_is_released_at_once(tmp_path):
    async with studio(tmp_path) as h:
        h.comfy.faults.prompt_reply = PromptReply.AFTER_END
        began = time.monotonic()
        reply = await prompt(h, 0.2)
        assert reply.status_code == 200
        assert time.monotonic() - began > 0.15
        await until(lambda: not h.view.leases, 2 * POLL + SLACK)
        await ended_as(h, "success")


@run_async
async def test_a_client_may_choose_the_id_of_its_job(tmp_path):
    async with studio(tmp_path) as h:
        mine = str(uuid.uuid4())
        reply = await prompt(h, 0.2, prompt_id=mine, client_id="me")
        assert reply.json()["prompt_id"] == mine
        assert json.loads(posts(h.comfy, "/prompt")[0].body)["client_id"] == "me"
        async with watched(h):
            assert [job["prompt_id"] for job in (await h.http.get(f"{h.gate}/status")).json()["jobs"]] == [mine]
        assert of_kind(h, "job_end")[0]["prompt_id"] == mine
        await ended_as(h, "success")


@pytest.mark.parametrize("at_once", [True, False])
@run_async
async def test_two_jobs_of_one_id_are_two_jobs(tmp_path, at_once):
    async with studio(tmp_path) as h:
        mine = str(uuid.uuid4())
        if at_once:
            replies = await asyncio.gather(*(prompt(h, 0.2, seed, prompt_id=mine) for seed in range(2)))
        else:
            replies = [await prompt(h, 0.1, 0, prompt_id=mine)]
            await until(lambda: h.app.jobs.ends)
            replies.append(await prompt(h, 0.2, 1, prompt_id=mine))
        assert {reply.status_code for reply in replies} == {200}
        async with watched(h):
            pass
        await idle(h)
        await ended_as(h, "success", 2)


@run_async
async def test_a_second_job_of_an_id_that_history_knows_already_is_held_while_it_is_queued(tmp_path):
    async with studio(tmp_path) as h:
        mine = str(uuid.uuid4())
        await prompt(h, 0.01, prompt_id=mine)
        await until(lambda: h.app.jobs.ends)
        resume = stalled(h)
        await prompt(h, 0.1, 5, prompt_id=mine)
        await asyncio.wait_for(asyncio.shield(asyncio.create_task(looks(h, 3))), 5)
        assert leases(h, "comfyui") == 1
        async with watched(h):
            resume.set()
        await ended_as(h, "success", 2)


async def looks(h: House, count: int) -> None:
    before = len(entries(h.comfy, "/queue"))
    await until(lambda: len(entries(h.comfy, "/queue")) >= before + count)


# ----------------------------------------------------------------------------------------------- all of them


@run_async
async def test_every_end_of_a_job_is_in_the_metrics_from_the_start(tmp_path):
    async with studio(tmp_path) as h:
        text = (await h.http.get(f"{h.gate}/metrics")).text
        for end in JobEnd:
            assert f'gpu_turnstile_image_job_ends_total{{end="{end}"}} 0.0' in text


@run_async
async def test_a_run_of_all_ends_leaves_no_job_no_lease_and_the_right_counts(tmp_path):
    async with studio(tmp_path, history_poll_interval=0.03) as h:
        fates = ["normal", "error", "interrupted", "oom", "normal", "error"]
        for fate in fates:
            h.comfy.faults.job_end = JobFate(fate)
            assert (await prompt(h, 0.02)).status_code == 200
            await until(lambda: not h.view.leases)
        h.comfy.faults.heal()
        await idle(h)
        assert h.app.jobs.ends == {"success": 2, "error": 3, "interrupted": 1}
        status = (await h.http.get(f"{h.gate}/status")).json()
        assert (status["jobs"], status["inflight"], status["queue"]) == ([], [], [])
