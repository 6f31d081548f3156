"""Who goes when: batches, fairness, windows between a look and a deed, agents that ask in the middle of a render."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from typing import Any

import pytest
import websockets

from tests.aio import run_async, until
from tests.e2e.house import graph, house, llama
from tests.e2e.test_document import (
    CHAT,
    LLM_WORK,
    chat,
    entries,
    idle,
    leases,
    leave,
    of_kind,
    posts,
    prompt,
    raw,
    two,
    waiting,
    working,
)


@contextlib.asynccontextmanager
async def crossing(tmp_path, *, ollama: dict[str, Any] | None = None, **settings: Any):
    async with house(tmp_path, **settings, **two(tmp_path, **(ollama or {}))) as h:
        yield h


def order(h) -> str:
    """The work the engines were sent, in the order of its arrival: c = chat, i = image, f = free."""
    letters = {"/api/chat": "c", "/prompt": "i", "/free": "f"}
    calls = sorted((*posts(h.ollama, "/api/chat"), *posts(h.comfy, "/prompt", "/free")), key=lambda e: e.time)
    return "".join(letters[entry.path] for entry in calls)


async def in_line(h, count: int) -> None:
    await until(lambda: len(h.view.waiting) == count)


# ---------------------------------------------------------------------------------------------- drain before a swap


@pytest.mark.parametrize("kind", ["streaming", "whole", "prefill"])
@run_async
async def test_an_answer_that_is_being_made_is_complete_before_its_model_is_told_to_go(tmp_path, kind):
    pace = {"tokens_per_s": 100, "prompt_tokens_per_s": 6 if kind == "prefill" else 0}
    async with crossing(tmp_path, ollama=pace) as h:
        body = {**CHAT, "stream": kind != "whole", "options": {"num_predict": 2 if kind == "prefill" else 30}}
        body["messages"] = [{"role": "user", "content": "one two"}]
        direct = await h.http.post(f"{h.ollama.url}/api/chat", json=body)
        h.ollama.log.clear()
        ended = []

        async def answer() -> bytes:
            reply = await h.http.post(f"{h.gate}/api/chat", json=body)
            ended.append(time.time())
            return reply.content

        first = asyncio.create_task(answer())
        await until(lambda: h.ollama.in_flight)
        image = asyncio.create_task(prompt(h, 0.1))
        await in_line(h, 1)
        late = asyncio.create_task(chat(h))
        await in_line(h, 2)
        text = await first
        assert len(text.splitlines()) == len(direct.content.splitlines())
        assert b'"done":true' in text.replace(b" ", b"")
        assert (await image).status_code == 200
        assert (await late).status_code == 200
        assert posts(h.ollama, "/api/generate")[0].time >= ended[0] - 0.05
        assert order(h) == "cifc"


@run_async
async def test_an_open_websocket_is_no_work_and_holds_off_no_swap(tmp_path):
    async with crossing(tmp_path) as h:
        url = h.comfy_gate.replace("http", "ws")
        async with websockets.connect(f"{url}/ws?clientId=tab", max_queue=None):
            await prompt(h, 0.05)
            await idle(h)
            assert (await asyncio.wait_for(chat(h), 1.0)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["reset", "close"])
@run_async
async def test_an_engine_that_works_on_after_its_client_left_is_not_taken_for_idle(tmp_path, stream, how):
    async with crossing(tmp_path, ollama={"prompt_tokens_per_s": 4}) as h:
        await chat(h)
        h.ollama.faults.ignore_disconnect = True
        words = [{"role": "user", "content": "three more words"}]
        writer = await raw(h.gate, "/api/chat", {**CHAT, "stream": stream, "messages": words})
        await until(lambda: h.ollama.in_flight)
        image = asyncio.create_task(prompt(h, 0.05))
        await in_line(h, 1)
        leave(writer, how)
        await until(lambda: h.ollama.counters["clients_gone"], 0.2)
        await until(lambda: not h.ollama.in_flight)
        assert not posts(h.comfy, "/prompt"), "it was still reading the prompt of a client that had left"
        assert (await image).status_code == 200
        await idle(h)


@pytest.mark.parametrize("fault", ["load_error", "server_error", "down"])
@run_async
async def test_an_engine_that_fails_to_load_tells_who_asked_and_serves_the_next_one(tmp_path, fault):
    async with crossing(tmp_path) as h:
        setattr(h.ollama.faults, fault, True)
        answers = await asyncio.gather(*(chat(h) for _ in range(5)))
        assert {answer.status_code for answer in answers} == {502 if fault == "down" else 500}
        h.ollama.faults.heal()
        assert (await chat(h)).status_code == 200
        assert (await prompt(h, 0.05)).status_code == 200
        await idle(h)


# --------------------------------------------------------------------------------------------------------- batches


@run_async
async def test_twenty_images_and_then_a_chat_are_two_hand_overs(tmp_path):
    async with crossing(tmp_path, history_poll_interval=0.02) as h:
        await chat(h)
        images = [asyncio.create_task(prompt(h, 0.01, seed)) for seed in range(20)]
        await in_line(h, 19)
        late = asyncio.create_task(chat(h))
        assert {(await image).status_code for image in images} == {200}
        assert (await late).status_code == 200
        assert order(h) == "c" + 20 * "i" + "fc"
        assert len([f for f in of_kind(h, "swapped") if f["target"]]) == 3
        assert h.comfy.counters["frees"] == 1


@run_async
async def test_a_chat_that_has_waited_long_enough_ends_a_batch_between_two_jobs(tmp_path):
    async with crossing(tmp_path, turnstile_image_batch_max_wait=0.3, history_poll_interval=0.02) as h:
        images = [asyncio.create_task(prompt(h, 0.1, seed)) for seed in range(8)]
        await in_line(h, 7)
        began = time.monotonic()
        assert (await chat(h)).status_code == 200
        waited = time.monotonic() - began
        assert 0.3 < waited < 0.3 + 0.1 + 0.4, "the limit, the job that runs, the hand-over"
        assert {(await image).status_code for image in images} == {200}
        await idle(h)
        told = order(h)
        assert told.count("f") == 2
        assert "ic" not in told, "the card was freed before the chat"


@run_async
async def test_several_chats_that_waited_long_enough_are_served_together(tmp_path):
    async with crossing(tmp_path, turnstile_image_batch_max_wait=0.2, history_poll_interval=0.02) as h:
        images = [asyncio.create_task(prompt(h, 0.1, seed)) for seed in range(6)]
        await in_line(h, 5)
        chats = [asyncio.create_task(chat(h)) for _ in range(5)]
        assert {(await task).status_code for task in (*chats, *images)} == {200}
        await idle(h)
        assert "ifcccccif" in re.sub("i+", "i", order(h))


@run_async
async def test_without_batches_every_job_is_freed_once_and_no_chat_comes_in_between(tmp_path):
    async with crossing(tmp_path, turnstile_image_batch_max_wait=0.0, history_poll_interval=0.02) as h:
        images = [asyncio.create_task(prompt(h, 0.02, seed)) for seed in range(6)]
        await in_line(h, 5)
        late = asyncio.create_task(chat(h))
        assert {(await image).status_code for image in images} == {200}
        assert (await late).status_code == 200
        assert order(h) == 6 * "if" + "c"
        assert h.comfy.counters["frees"] == 6


@run_async
async def test_a_batch_is_not_interrupted_by_the_gate_for_loads_of_any_kind(tmp_path):
    async with crossing(tmp_path, warm_model="llama3", history_poll_interval=0.02) as h:
        await chat(h)
        loads = h.ollama.counters["loads"]
        images = [asyncio.create_task(prompt(h, 0.05, seed)) for seed in range(5)]
        await until(lambda: len(posts(h.comfy, "/prompt")) == 5)
        assert h.ollama.counters["loads"] == loads
        assert {(await image).status_code for image in images} == {200}


# ------------------------------------------------------------------------------------------------ bounded waiting


@run_async
async def test_a_stream_of_chats_without_end_does_not_keep_an_image_job_out(tmp_path):
    async with crossing(tmp_path) as h:
        done = False

        async def chatter() -> None:
            while not done:
                assert (await chat(h)).status_code == 200

        chatters = [asyncio.create_task(chatter()) for _ in range(4)]
        await until(lambda: len(posts(h.ollama, "/api/chat")) > 8)
        began = time.monotonic()
        assert (await prompt(h, 0.05)).status_code == 200
        assert time.monotonic() - began < 1.0
        done = True
        await asyncio.gather(*chatters)


@run_async
async def test_a_stream_of_images_without_end_does_not_keep_a_chat_out(tmp_path):
    async with crossing(tmp_path, turnstile_image_batch_max_wait=0.2, history_poll_interval=0.02) as h:
        done = False

        async def painter(seed: int) -> None:
            while not done:
                assert (await prompt(h, 0.03, seed := seed + 10)).status_code == 200

        painters = [asyncio.create_task(painter(n)) for n in range(3)]
        await until(lambda: len(posts(h.comfy, "/prompt")) > 3)
        for _ in range(3):
            began = time.monotonic()
            assert (await chat(h)).status_code == 200
            assert time.monotonic() - began < 1.2
        done = True
        await asyncio.gather(*painters)


@run_async
async def test_wishes_for_both_sides_at_once_never_make_an_engine_come_and_go_for_nothing(tmp_path):
    async with crossing(tmp_path, turnstile_image_batch_max_wait=0.1, history_poll_interval=0.02) as h:
        dice, tasks = random.Random(5), []
        for number in range(14):
            tasks.append(asyncio.create_task(chat(h) if number % 2 else prompt(h, 0.04, number)))
            await asyncio.sleep(dice.random() * 0.03)
        assert {(await task).status_code for task in tasks} == {200}
        await idle_or_quiet(h)
        served: list[str] = []
        for kind, fields in h.events:
            if kind == "admitted":
                served.append(fields["tenant"])
        turns = order(h)
        for tenant, letter in (("comfyui", "i"), ("ollama", "c")):
            assert served.count(tenant) <= turns.count(letter)
        assert h.comfy.counters["frees"] == served.count("comfyui"), "each stay served a job, and ended once"
        assert h.ollama.counters["loads"] == served.count("ollama")


async def idle_or_quiet(h) -> None:
    await until(lambda: not h.view.leases and not h.view.waiting and h.view.phase != "swapping", 10)


@run_async
async def test_twenty_first_chats_and_twenty_in_the_middle_of_an_unload_make_one_load_each(tmp_path):
    async with crossing(tmp_path, ollama={"load_s": 0.1}) as h:
        first = await asyncio.gather(*(chat(h) for _ in range(20)))
        h.ollama.faults.unload_s = 0.2
        image = asyncio.create_task(prompt(h, 0.05))
        await until(lambda: of_kind(h, "evicting"))
        second = await asyncio.gather(*(chat(h) for _ in range(20)))
        assert {answer.status_code for answer in (*first, *second, await image)} == {200}
        assert h.ollama.counters["loads"] == 2
        assert [f["tenant"] for f in of_kind(h, "admitted")] == ["ollama", "comfyui", "ollama"]


# ------------------------------------------------------------------------------------------- check, then act


@pytest.mark.parametrize("moment", ["drain", "evicting", "evicted", "admitting", "admitted", "swapped", "job"])
@run_async
async def test_requests_that_come_in_any_moment_of_a_hand_over_reach_ollama_only_after_it(tmp_path, moment):
    async with crossing(tmp_path) as h:
        await chat(h)
        h.ollama.log.clear()
        h.ollama.faults.unload_s = 0.05
        tasks: list[asyncio.Task[Any]] = []

        def burst(kind: str, fields: dict[str, Any]) -> None:
            if kind == moment and not tasks:
                bodies = [*LLM_WORK.items()][:5]
                tasks.extend(asyncio.create_task(h.http.post(h.gate + path, json=body)) for path, body in bodies)
                tasks.extend(asyncio.create_task(h.http.get(f"{h.gate}/api/ps")) for _ in range(3))

        h.app.arbiter.watch(burst)
        async with h.streaming("llama3", max_tokens=20):
            image = asyncio.create_task(prompt(h, 0.15))
            await in_line(h, 1)
        assert (await image).status_code == 200
        await until(lambda: tasks)
        assert {(await task).status_code for task in tasks} == {200}
        freed = entries(h.comfy, "/free")[0].time
        sent = posts(h.comfy, "/prompt")[0].time
        work = [e for e in posts(h.ollama) if json.loads(e.body).get("keep_alive") != 0]
        inside = [e.path for e in work if sent < e.time < freed]
        assert not inside
        assert len([e for e in work if e.time > freed]) >= 5


@run_async
async def test_images_and_chats_of_one_instant_are_served_one_side_after_the_other(tmp_path):
    async with crossing(tmp_path, history_poll_interval=0.01, turnstile_image_batch_max_wait=5.0) as h:
        dice = random.Random(11)
        for _ in range(6):
            work = [chat(h), chat(h), prompt(h, 0.02, 1), prompt(h, 0.02, 2)]
            dice.shuffle(work)
            answers = await asyncio.gather(*work)
            assert {answer.status_code for answer in answers} == {200}
        await idle_or_quiet(h)
        assert not h.card.alarms()


# -------------------------------------------------------------------------------------- in another one's tenure


@run_async
async def test_an_agent_that_asks_during_a_render_reads_at_once_and_loads_nothing(tmp_path):
    async with crossing(tmp_path) as h:
        first = await working(h, 0.4)
        others = [asyncio.create_task(prompt(h, 0.1, seed)) for seed in (1, 2)]
        await in_line(h, 2)
        job = first.json()["prompt_id"]
        began = time.monotonic()
        for _ in range(5):
            for url in ("/api/tags", "/v1/models", "/api/ps"):
                assert (await h.http.get(h.gate + url)).status_code == 200
            for url in ("/queue", f"/history/{job}", "/system_stats"):
                assert (await h.http.get(h.comfy_gate + url)).status_code == 200
        picture = {"image": ("a.png", b"png", "image/png")}
        assert (await h.http.post(f"{h.comfy_gate}/upload/image", files=picture)).status_code == 200
        async with websockets.connect(h.comfy_gate.replace("http", "ws") + "/ws"):
            pass
        assert time.monotonic() - began < 0.39
        assert leases(h, "comfyui") == 1
        asked = [asyncio.create_task(chat(h))]
        asked.append(asyncio.create_task(h.http.post(f"{h.gate}/api/embed", json=LLM_WORK["/api/embed"])))
        await until(lambda: waiting(h, "ollama") == 2)
        assert {(await task).status_code for task in (*others, *asked)} == {200}
        assert h.ollama.counters["loads"] == 2, "one for each model that was asked for, none in between"
        assert posts(h.ollama)[0].time > entries(h.comfy, "/free")[0].time
        assert h.comfy.counters["frees"] == 1


@run_async
async def test_positions_in_the_line_are_the_order_of_service(tmp_path):
    async with crossing(tmp_path) as h:
        async with h.streaming("llama3"):
            writers = [await raw(h.comfy_gate, "/prompt", {"prompt": graph(0.01, 1)})]
            await in_line(h, 1)
            for count in (2, 3):
                writers.append(await raw(h.gate, "/api/chat", CHAT))
                await in_line(h, count)
            writers.append(await raw(h.comfy_gate, "/prompt", {"prompt": graph(0.01, 2)}))
            await in_line(h, 4)
            line = (await h.http.get(f"{h.gate}/status")).json()["queue"]
            assert [(w["position"], w["wants"][0]) for w in line] == [
                (1, "comfyui"),
                (2, "comfyui"),
                (3, "ollama"),
                (4, "ollama"),
            ]
        await until(lambda: len(posts(h.ollama, "/api/chat")) == 2)
        for writer in writers:
            writer.close()
        assert order(h) == "iifcc"


# -------------------------------------------------------------------------------------------- owned beside others


@run_async
async def test_an_owned_engine_and_an_external_comfyui_take_turns_on_one_card(tmp_path):
    parts = two(tmp_path)
    async with house(tmp_path, [llama("coder")], card=parts["card"], comfy=parts["comfy"]) as h:
        for seed in range(2):
            assert (await h.chat("coder")).status_code == 200
            assert (await prompt(h, 0.05, seed)).status_code == 200
        assert (await h.chat("coder")).status_code == 200
        assert [f["tenant"] for f in of_kind(h, "admitted")] == ["coder", "comfyui"] * 2 + ["coder"]


@run_async
async def test_a_long_answer_is_not_idle_time_and_a_request_at_the_moment_of_the_unload_is_served(tmp_path):
    async with house(tmp_path, [llama("a", runtime="idle_unload_s = 0.2")]) as h:
        async with h.streaming("a", max_tokens=60) as lines:
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest
        assert not of_kind(h, "evicting")
        assert (await h.chat("a")).status_code == 200
        assert len(of_kind(h, "admitted")) == 1
        racing: list[asyncio.Task[Any]] = []
        stop = h.app.arbiter.watch(
            lambda kind, _: racing.append(asyncio.create_task(h.chat("a"))) if kind == "evicting" else None
        )
        await until(lambda: racing)
        stop()
        assert (await racing[0]).status_code == 200
