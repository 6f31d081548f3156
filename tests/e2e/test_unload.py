"""Taking an engine off the card that somebody else runs: its acknowledgement, its list and its memory are three things.

Whatever the engine does: the next one starts only when the memory is back, or when UNLOAD_TIMEOUT is over, and then
the events say that nobody was sure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest

from gpu_turnstile.sim import GB, SimCard, SimModel
from gpu_turnstile.sim.base import cut, gone
from gpu_turnstile.sim.ledger import MB
from tests.aio import run_async, until
from tests.e2e.house import House, house
from tests.e2e.test_document import (
    LLM_WORK,
    MODELS,
    chat,
    entries,
    gaps,
    idle,
    of_kind,
    posts,
    prompt,
    told_to_go,
    two,
    working,
)

LIMIT = 0.6  # seconds: UNLOAD_TIMEOUT where it is to be reached


@contextlib.asynccontextmanager
async def street(tmp_path, *, ollama: dict[str, Any] | None = None, alarms: bool = False, **settings: Any):
    async with house(tmp_path, alarms=alarms, **settings, **two(tmp_path, **(ollama or {}))) as h:
        yield h
        for entry in posts(h.ollama, "/api/generate"):
            body = json.loads(entry.body)
            assert body.get("keep_alive") != 0 or not body.get("prompt"), "an unload with a prompt would generate"


def arrival(sim, path: str) -> float:
    return entries(sim, path)[-1].time


def last_back(h: House, name: str) -> float:
    """When the card last got memory back from `name` (wall clock)."""
    return max(e.time for e in h.card.events() if e.name == name and (e.what == "back" or e.bytes < GB))


async def timed(work: Any) -> float:
    began = time.monotonic()
    answer = await work
    assert answer.status_code == 200
    return time.monotonic() - began


def sure(h: House, tenant: str = "ollama") -> list[bool]:
    return [fields["sure"] for fields in of_kind(h, "evicted") if fields["tenant"] == tenant]


# ------------------------------------------------------------------------------------------- Ollama goes, somehow


@pytest.mark.parametrize("seconds", [0.0, 0.4])
@run_async
async def test_an_image_job_starts_only_after_the_last_model_is_off_the_card(tmp_path, seconds):
    async with street(tmp_path) as h:
        await chat(h)
        h.ollama.faults.unload_s = seconds
        assert await timed(prompt(h, 0.05)) > seconds
        assert last_back(h, "ollama") < arrival(h.comfy, "/prompt")
        assert sure(h) == [True]
        await idle(h)


@pytest.mark.parametrize("every", [1, 2, 3])
@run_async
async def test_a_list_that_flickers_is_not_taken_for_an_empty_one(tmp_path, every):
    async with street(tmp_path) as h:
        await chat(h)
        h.ollama.faults.unload_s = 0.4
        h.ollama.faults.ps_flicker = every
        assert (await prompt(h, 0.05)).status_code == 200
        assert last_back(h, "ollama") < arrival(h.comfy, "/prompt")
        await idle(h)


@run_async
async def test_a_list_that_flickers_before_the_first_model_was_told_to_go_hides_none(tmp_path):
    async with street(tmp_path, ollama={"max_loaded": 3}) as h:
        await chat(h)
        await chat(h, model="qwen3:8b")
        h.ollama.faults.ps_flicker = 2
        assert (await prompt(h, 0.05)).status_code == 200
        assert {body["model"] for _, body in told_to_go(h.ollama)} == {"llama3:latest", "qwen3:8b"}
        assert last_back(h, "ollama") < arrival(h.comfy, "/prompt")
        await idle(h)


@run_async
async def test_every_kind_of_loaded_model_is_told_to_go_once_and_the_embedding_one_twice(tmp_path):
    models = [*MODELS, SimModel("x", 2.0)]
    async with street(tmp_path, ollama={"models": models, "max_loaded": 4}) as h:
        await chat(h)
        await chat(h, model="qwen3:8b", keep_alive=-1)
        await chat(h, model="x", keep_alive="8760h")
        await h.http.post(f"{h.gate}/api/embed", json=LLM_WORK["/api/embed"])
        listed = h.ollama.runners.listed
        h.ollama.runners.listed = lambda: [*listed(), *listed()]
        h.ollama.log.clear()
        assert (await prompt(h, 0.05)).status_code == 200
        told = sorted((path, body["model"]) for path, body in told_to_go(h.ollama))
        assert told == [
            ("/api/embed", "bge-m3:latest"),
            ("/api/generate", "bge-m3:latest"),
            ("/api/generate", "llama3:latest"),
            ("/api/generate", "qwen3:8b"),
            ("/api/generate", "x:latest"),
        ]
        assert not listed()
        assert last_back(h, "ollama") < arrival(h.comfy, "/prompt")
        assert sure(h) == [True]
        await idle(h)


@run_async
async def test_memory_that_comes_back_after_the_list_is_empty_is_waited_for(tmp_path):
    async with street(tmp_path) as h:
        await chat(h)
        h.ollama.faults.memory_late_s = 0.6
        assert await timed(prompt(h, 0.05)) > 0.55
        assert last_back(h, "ollama") < arrival(h.comfy, "/prompt")
        assert sure(h) == [True]
        await idle(h)


@run_async
async def test_a_foreign_process_that_takes_a_little_memory_meanwhile_keeps_nobody_waiting(tmp_path):
    async with street(tmp_path, unload_timeout=8.0) as h:
        await chat(h)
        h.ollama.faults.memory_late_s = 0.2
        image = asyncio.create_task(prompt(h, 0.05))
        await until(lambda: of_kind(h, "evicting"))
        h.card.hold("game", 600 * MB, pid=0)
        began = time.monotonic()
        assert (await image).status_code == 200
        assert time.monotonic() - began < 2.0
        assert sure(h) == [True]
        await idle(h)
        assert (await chat(h)).status_code == 200


# --------------------------------------------------------------------------------------------- Ollama does not go


@pytest.mark.parametrize(
    ("fault", "value"),
    [("unload_s", -1), ("ps_hang", True), ("ps_flicker", 1), ("hang", True), ("down", True), ("server_error", True)],
)
@run_async
async def test_an_ollama_that_never_lets_go_is_waited_for_as_long_as_the_limit_says_and_no_longer(
    tmp_path, fault, value
):
    async with street(tmp_path, alarms=True, unload_timeout=LIMIT, probe_timeout=0.15) as h:
        await chat(h, keep_alive=-1)
        h.ollama.faults.unload_s = -1
        setattr(h.ollama.faults, fault, value)
        if fault == "ps_flicker":
            h.ollama.faults.ps_flicker = 2
        seconds = await timed(prompt(h, 0.05))
        assert LIMIT * 0.9 < seconds < 2 * LIMIT + 0.4
        assert sure(h) == [False]
        assert of_kind(h, "evicted")[0]["detail"]
        await idle(h)
        h.ollama.faults.heal()
        assert (await chat(h)).status_code == 200


@run_async
async def test_memory_that_never_comes_back_is_waited_for_until_the_limit_and_the_log_says_so(tmp_path):
    async with street(tmp_path, alarms=True, unload_timeout=LIMIT) as h:
        await chat(h)
        h.ollama.faults.memory_leak = True
        seconds = await timed(prompt(h, 0.05))
        assert LIMIT * 0.9 < seconds < 2 * LIMIT + 0.3
        assert sure(h) == [False]
        assert "8.0 GB used" in of_kind(h, "evicted")[0]["detail"]
        await idle(h)


@run_async
async def test_a_model_that_hangs_in_stopping_is_told_to_go_a_bounded_number_of_times(tmp_path):
    async with street(tmp_path, alarms=True, unload_timeout=1.0) as h:
        await chat(h)
        h.ollama.faults.unload_s = -1
        assert (await prompt(h, 0.05)).status_code == 200
        assert len(told_to_go(h.ollama)) <= 2
        assert "llama3:latest" in of_kind(h, "evicted")[0]["detail"]
        await idle(h)


@run_async
async def test_at_the_default_settings_the_list_is_asked_five_times_a_second_at_most(tmp_path):
    async with street(tmp_path, unload_poll_interval=0.5) as h:
        await chat(h)
        h.ollama.faults.unload_s = 1.6
        h.ollama.log.clear()
        assert (await prompt(h, 0.02)).status_code == 200
        looks = [entry.time for entry in entries(h.ollama, "/api/ps")]
        for first in looks:
            assert sum(first < look <= first + 1.0 for look in looks) <= 5
        assert sum(gap < 0.15 for gap in gaps(looks)) <= 1, "what it holds is asked, then the release begins"
        await idle(h)


@pytest.mark.parametrize("fault", ["unload_s", "ps_hang", "hang"])
@run_async
async def test_the_gate_answers_while_an_unload_hangs(tmp_path, fault):
    async with street(tmp_path, alarms=True, unload_timeout=LIMIT, probe_timeout=0.3) as h:
        await chat(h)
        setattr(h.ollama.faults, fault, -1 if fault == "unload_s" else True)
        image = asyncio.create_task(prompt(h, 0.02))
        await until(lambda: of_kind(h, "evicting"))
        slowest = 0.0
        while not image.done() and h.view.phase == "swapping":
            for base, path in (
                (h.gate, "/status"),
                (h.gate, "/healthz"),
                (h.comfy_gate, "/queue"),
                (h.gate, "/metrics"),
            ):
                slowest = max(slowest, await timed(h.http.get(base + path)))
        assert 0 < slowest < 0.2
        assert (await image).status_code == 200
        h.ollama.faults.heal()
        await idle(h)


@run_async
async def test_a_client_that_leaves_while_an_unload_hangs_leaves_nothing_behind(tmp_path):
    async with street(tmp_path, unload_timeout=LIMIT) as h:
        await chat(h)
        h.ollama.faults.unload_s = 0.3
        image = asyncio.create_task(prompt(h, 0.02))
        await until(lambda: of_kind(h, "evicting"))
        image.cancel()
        await idle(h)
        assert not posts(h.comfy, "/prompt")
        assert (await chat(h)).status_code == 200


@pytest.mark.parametrize("seconds", [0.0, 0.5])
@run_async
async def test_memory_of_an_ollama_that_died_is_waited_for_as_any_other(tmp_path, seconds):
    """Its port refuses at once, the driver takes its time."""
    parts = two(tmp_path)
    parts["card"] = SimCard(tmp_path / "slow.json", lag_s=seconds)
    parts["card"].read()  # whoever looks first writes the file, and with it the lag
    parts["ollama"].card = parts["comfy"].card = parts["comfy"].queue.card = parts["card"]
    async with house(tmp_path, turnstile_gpu=f"sim:{tmp_path / 'slow.json'}", **parts) as h:
        await chat(h)
        h.ollama.exit(137)
        await h.ollama.exited.wait()
        assert seconds <= await timed(prompt(h, 0.05)) < 2.0
        await idle(h)


# -------------------------------------------------------------------------------------------------- ComfyUI goes


def first_free(h: House, what: str) -> None:
    """The first call to /free goes wrong; everything else works."""
    answer, asked = h.comfy._answer, []

    async def wrong(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/free" or asked:
            await answer(scope, receive, send)
            return
        asked.append(what)
        if what == "cut":
            await cut(scope, receive)
        elif what == "hang":
            await gone(receive)
        else:
            await h.comfy.server_error()(scope, receive, send)

    h.comfy._answer = wrong


@pytest.mark.parametrize("what", ["cut", "hang", "500"])
@run_async
async def test_a_free_that_failed_once_is_asked_for_again_before_full_memory_is_handed_over(tmp_path, what):
    async with street(tmp_path, unload_timeout=1.5, free_timeout=0.2) as h:
        first_free(h, what)
        await working(h, 0.05)
        assert (await chat(h)).status_code == 200
        assert last_back(h, "comfyui") < arrival(h.ollama, "/api/chat")
        assert 2 <= len(entries(h.comfy, "/free")) <= 4
        assert sure(h, "comfyui") == [True]


@run_async
async def test_a_comfyui_without_free_is_waited_for_as_long_as_its_memory_may_still_come_back(tmp_path):
    async with street(tmp_path, unload_timeout=2.0) as h:
        h.comfy.faults.free_missing = True
        await working(h, 0.05)
        late = asyncio.create_task(chat(h))
        await until(lambda: entries(h.comfy, "/free"))
        asyncio.get_running_loop().call_later(0.3, h.comfy.queue.free, True, True)
        assert (await late).status_code == 200
        assert last_back(h, "comfyui") < arrival(h.ollama, "/api/chat")


@run_async
async def test_a_chat_starts_only_after_comfyuis_memory_is_back(tmp_path):
    async with street(tmp_path) as h:
        h.comfy.faults.free_late_s = 0.4
        await working(h, 0.1)
        assert (await chat(h)).status_code == 200
        assert last_back(h, "comfyui") < arrival(h.ollama, "/api/chat")
        assert sure(h, "comfyui") == [True]


@run_async
async def test_free_is_called_once_per_hand_over_and_only_when_nothing_runs(tmp_path):
    async with street(tmp_path) as h:
        busy, free = [], h.comfy.queue.free
        h.comfy.queue.free = lambda *wish: (busy.append(h.comfy.queue.remaining), free(*wish))
        for _ in range(4):
            await working(h, 0.05)
            assert (await chat(h)).status_code == 200
        assert busy == [0] * 4
        assert len(entries(h.comfy, "/free")) == 4


@pytest.mark.parametrize("fault", ["free_ignored", "free_missing", "free_hang", "hang", "down", "server_error"])
@run_async
async def test_a_comfyui_that_does_not_free_is_waited_for_until_the_limit_and_then_the_chat_is_served(tmp_path, fault):
    settings = {"unload_timeout": LIMIT, "free_timeout": 0.3, "probe_timeout": 0.2}
    async with street(tmp_path, alarms=True, **settings) as h:
        await working(h, 0.05)
        late = asyncio.create_task(timed(chat(h)))
        await until(lambda: h.app.jobs.ends)
        setattr(h.comfy.faults, fault, True)
        assert await late < 2 * LIMIT + 0.6
        assert sure(h, "comfyui") == [False]
        assert len(entries(h.comfy, "/free")) <= 3, "no storm"
        h.comfy.faults.heal()
        assert (await prompt(h, 0.05)).status_code == 200
        await idle(h)


@run_async
async def test_memory_that_free_did_not_bring_back_is_not_handed_over_before_the_limit(tmp_path):
    async with street(tmp_path, alarms=True, unload_timeout=LIMIT) as h:
        h.comfy.faults.free_ignored = True
        await working(h, 0.05)
        assert (await chat(h)).status_code == 200
        assert arrival(h.ollama, "/api/chat") - entries(h.comfy, "/free")[0].time > LIMIT * 0.9


@pytest.mark.parametrize("how", ["free_by_the_client", "nothing_ran", "unloads_by_itself"])
@run_async
async def test_memory_that_came_back_before_anybody_asked_is_not_waited_for(tmp_path, how):
    async with street(tmp_path, unload_timeout=8.0) as h:
        for seed in range(2):  # the second time only the driver's context is left, which never goes
            await working(h, 0.2, seed=seed)
            if how == "free_by_the_client":
                assert (await h.http.post(f"{h.comfy_gate}/free", json={"unload_models": True})).status_code == 200
            elif how == "nothing_ran":
                assert (await h.http.post(f"{h.comfy_gate}/interrupt")).status_code == 200
            else:
                h.comfy.queue.free(True, False)
            assert await timed(chat(h)) < 2.0
            assert sure(h, "comfyui")[-1] is True


@run_async
async def test_a_model_that_left_by_itself_is_not_waited_for(tmp_path):
    async with street(tmp_path, unload_timeout=8.0) as h:
        await chat(h, keep_alive=0)
        await until(lambda: not h.card.held_by("ollama"))
        assert await timed(prompt(h, 0.05)) < 1.0
        await idle(h)


@run_async
async def test_a_job_that_was_refused_is_not_waited_for(tmp_path):
    async with street(tmp_path, unload_timeout=8.0) as h:
        await working(h, 0.05)
        await idle(h)
        assert (await h.http.post(f"{h.comfy_gate}/prompt", json={})).status_code == 400
        assert await timed(chat(h)) < 1.0


@run_async
async def test_without_a_card_to_read_the_engines_lists_decide_and_the_events_say_that_nobody_was_sure(tmp_path):
    async with street(tmp_path, turnstile_gpu="none") as h:
        await chat(h)
        h.ollama.faults.unload_s = 0.3
        assert await timed(prompt(h, 0.05)) > 0.3
        assert sure(h) == [False]
        assert (await chat(h)).status_code == 200


@run_async
async def test_memory_of_a_model_that_is_listed_no_more_is_waited_for_too(tmp_path):
    """Ollama changed its model a moment ago: the first one's memory is still on its way back."""
    async with street(tmp_path) as h:
        await chat(h)
        h.card.hold("ollama", 3 << 30, part="the one before")
        h.card.free("ollama", part="the one before", after=0.25)
        assert (await prompt(h, 0.02)).status_code == 200
        await idle(h)
        assert not h.card.held_by("ollama")
