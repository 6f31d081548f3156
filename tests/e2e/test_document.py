"""The turnstile document, sentence by sentence, in front of an Ollama and a ComfyUI that somebody else runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest
import websockets

from gpu_turnstile.core.model import Phase
from gpu_turnstile.sim import ComfySim, OllamaSim, SimCard, SimModel, serve
from gpu_turnstile.sim.faults import JobFate, PromptReply
from tests.aio import run_async, until
from tests.e2e.house import GRAPH, House, graph, house

MODELS = (SimModel("llama3:latest"), SimModel("qwen3:8b", 6.0), SimModel("bge-m3:latest", 1.2, embedding=True))
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "llama3", "stream": False, "messages": MESSAGES}
LLM_WORK: dict[str, dict[str, Any]] = {
    "/api/generate": {"model": "llama3", "prompt": "hi", "stream": False},
    "/api/chat": CHAT,
    "/api/embed": {"model": "bge-m3", "input": "hi"},
    "/api/embeddings": {"model": "bge-m3", "prompt": "hi"},
    "/v1/chat/completions": {"model": "llama3", "messages": MESSAGES},
    "/v1/completions": {"model": "llama3", "prompt": "hi"},
    "/v1/embeddings": {"model": "bge-m3", "input": "hi"},
    "/v1/responses": {"model": "llama3", "input": "hi"},
    "/v1/messages": {"model": "llama3", "max_tokens": 4, "messages": MESSAGES},
}
STREAMS: dict[str, dict[str, Any]] = {
    "/api/generate": {"model": "llama3", "prompt": "hi", "options": {"num_predict": 12}},
    "/api/chat": {"model": "llama3", "messages": MESSAGES, "options": {"num_predict": 12}},
    "/v1/chat/completions": {"model": "llama3", "messages": MESSAGES, "stream": True, "max_tokens": 12},
    "/v1/completions": {"model": "llama3", "prompt": "hi", "stream": True, "max_tokens": 12},
    "/v1/responses": {"model": "llama3", "input": "hi", "stream": True, "max_output_tokens": 12},
    "/v1/messages": {"model": "llama3", "messages": MESSAGES, "stream": True, "max_tokens": 12},
}
LLM_NEUTRAL = [
    ("GET", "/", None),
    ("HEAD", "/", None),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    ("GET", "/api/version", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/llama3", None),
    ("POST", "/api/show", {"model": "llama3"}),
    ("POST", "/api/pull", {"model": "llama3"}),
]
COMFY_NEUTRAL = [
    ("GET", "/prompt", None),
    ("GET", "/queue", None),
    ("POST", "/queue", {"delete": ["nobody"]}),
    ("GET", "/history", None),
    ("GET", "/history/nobody", None),
    ("GET", "/system_stats", None),
    ("GET", "/object_info", None),
    ("GET", "/object_info/EmptyImage", None),
    ("POST", "/interrupt", {"prompt_id": "nobody"}),
    ("POST", "/free", {}),
    ("GET", "/features", None),
]


# --------------------------------------------------------------------------------------------- what the tests share


def two(tmp_path, *, comfy: dict[str, Any] | None = None, **ollama: Any) -> dict[str, Any]:
    """A simulated Ollama and a simulated ComfyUI on one card, as `house` takes them."""
    card = SimCard(tmp_path / "card.json")
    given = {"models": MODELS, "load_s": 0.01, "answer_tokens": 4, **ollama}
    return {"card": card, "ollama": OllamaSim(card=card, **given), "comfy": ComfySim(card=card, **(comfy or {}))}


async def chat(h: House, **more: Any) -> httpx.Response:
    return await h.http.post(f"{h.gate}/api/chat", json={**CHAT, **more})


async def prompt(h: House, seconds: float = 0.2, seed: int = 0, **more: Any) -> httpx.Response:
    return await h.http.post(f"{h.comfy_gate}/prompt", json={"prompt": graph(seconds, seed), **more})


def entries(sim, *paths: str) -> list[Any]:
    return [entry for entry in sim.log if entry.path in paths]


def posts(sim, *paths: str) -> list[Any]:
    return [entry for entry in sim.log if entry.method == "POST" and (not paths or entry.path in paths)]


def told_to_go(sim) -> list[tuple[str, dict[str, Any]]]:
    """Unload calls, as (path, body)."""
    found = [(e.path, json.loads(e.body)) for e in posts(sim, "/api/generate", "/api/embed") if e.body]
    return [(path, body) for path, body in found if body.get("keep_alive") == 0]


def of_kind(h: House, kind: str) -> list[dict[str, Any]]:
    return [fields for name, fields in h.events if name == kind]


def leases(h: House, tenant: str) -> int:
    return sum(lease.tenant == tenant for lease in h.view.leases)


def waiting(h: House, tenant: str) -> int:
    return sum(tenant in ticket.wants for ticket in h.view.waiting)


async def idle(h: House) -> None:
    await until(lambda: h.view.phase is Phase.IDLE and not h.view.waiting, 10)


async def working(h: House, seconds: float = 0.5, **more: Any) -> httpx.Response:
    """An image job that runs now."""
    reply = await prompt(h, seconds, **more)
    assert reply.status_code == 200
    await until(lambda: h.comfy.queue.running)
    return reply


async def raw(base: str, path: str, body: object, *, missing: int = 0) -> asyncio.StreamWriter:
    """A request on a connection of its own, whose answer nobody reads. `missing`: bytes of the body never sent."""
    url = httpx.URL(base)
    _, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data[: len(data) - missing])
    await writer.drain()
    return writer


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    """`reset`: the connection is aborted; `close`: it is ended in peace."""
    writer.transport.abort() if how == "reset" else writer.close()


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


# --------------------------------------------------------------------------------------------------- lock semantics


@run_async
async def test_llm_requests_share_the_card_and_healthz_counts_them(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h, contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(h.streaming("llama3"))
        for base in (h.gate, h.comfy_gate):
            told = (await h.http.get(f"{base}/healthz")).json()
            assert told == {"state": "llm", "llm_inflight": 3, "image_pending": False}


@run_async
async def test_an_image_job_that_waits_lets_no_new_llm_request_start_and_goes_first(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        async with h.streaming("llama3"):
            image = asyncio.create_task(prompt(h))
            await until(lambda: waiting(h, "comfyui"))
            late = [asyncio.create_task(chat(h)) for _ in range(3)]
            await until(lambda: waiting(h, "ollama") == 3)
            told = (await h.http.get(f"{h.gate}/healthz")).json()
            assert told == {"state": "llm", "llm_inflight": 1, "image_pending": True}
            assert not posts(h.comfy, "/prompt")
            assert not posts(h.ollama, "/api/chat")
        assert (await image).status_code == 200
        assert {(await answer).status_code for answer in late} == {200}
        freed = entries(h.comfy, "/free")[0].time
        assert all(freed < entry.time for entry in posts(h.ollama, "/api/chat"))


@run_async
async def test_image_jobs_run_one_at_a_time_in_the_order_they_came(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        depth, put = [], h.comfy.queue.put
        h.comfy.queue.put = lambda job: (depth.append(h.comfy.queue.remaining), put(job))
        tasks = []
        for number in range(6):
            tasks.append(asyncio.create_task(prompt(h, 0.02, number)))
            await until(lambda n=number: len(posts(h.comfy, "/prompt")) + waiting(h, "comfyui") == n + 1)
        assert {(await task).status_code for task in tasks} == {200}
        await idle(h)
        seeds = [json.loads(e.body)["prompt"]["2"]["inputs"]["seed"] for e in posts(h.comfy, "/prompt")]
        assert seeds == list(range(6))
        assert depth == [0] * 6


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/messages"])
@run_async
async def test_the_longest_wait_ends_in_503_with_retry_after_in_the_callers_own_shape(tmp_path, path):
    async with house(tmp_path, llm_wait_timeout=0.15, busy_retry_after=7, **two(tmp_path)) as h:
        await working(h, 0.5)
        began = time.monotonic()
        answer = await h.http.post(f"{h.gate}{path}", json=LLM_WORK[path])
        assert 0.1 < time.monotonic() - began < 0.4
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert answer.headers["x-turnstile-error"] == "busy"
        assert answer.json()["error"]
        assert not h.view.waiting
        assert not posts(h.ollama)


@pytest.mark.parametrize("status", [503, 429])
@run_async
async def test_reject_mode_answers_at_once_while_an_image_job_runs_or_waits(tmp_path, status):
    settings = {"llm_busy_mode": "reject", "llm_busy_status": status, "busy_retry_after": 9}
    async with house(tmp_path, **settings, **two(tmp_path)) as h:
        assert (await chat(h)).status_code == 200, "an idle card is nobody's: the first request is served"
        async with h.streaming("llama3"):
            assert (await chat(h)).status_code == 200, "llm requests do not block each other"
            image = asyncio.create_task(prompt(h, 0.4))
            await until(lambda: waiting(h, "comfyui"))
            refused = [await chat(h)]
        assert (await image).status_code == 200, "an image job is never refused"
        began = time.monotonic()
        refused += [await h.http.post(f"{h.gate}{path}", json=body) for path, body in LLM_WORK.items()]
        assert time.monotonic() - began < 0.35
        assert {(a.status_code, a.headers["retry-after"]) for a in refused} == {(status, "9")}


@pytest.mark.parametrize("how", ["reset", "close"])
@run_async
async def test_whoever_leaves_while_waiting_is_out_of_the_line_and_its_work_is_never_done(tmp_path, how):
    async with house(tmp_path, **two(tmp_path)) as h:
        await working(h, 0.4)
        gone = [await raw(h.gate, "/api/chat", CHAT) for _ in range(10)]
        gone += [await raw(h.comfy_gate, "/prompt", {"prompt": graph(0.1)}) for _ in range(10)]
        torn = [await raw(h.gate, "/api/chat", CHAT, missing=20) for _ in range(5)]
        lives = asyncio.create_task(chat(h, model="qwen3:8b"))
        await until(lambda: len(h.view.waiting) == 21)
        for writer in gone + torn:
            leave(writer, how)
        await until(lambda: len(h.view.waiting) == 1, 1.0)
        assert (await lives).status_code == 200
        await idle_or_serving(h)
        assert len(posts(h.comfy, "/prompt")) == 1
        assert [json.loads(e.body)["model"] for e in posts(h.ollama, "/api/chat")] == ["qwen3:8b"]


async def idle_or_serving(h: House) -> None:
    await until(lambda: not h.view.leases and not h.view.waiting, 10)


# ------------------------------------------------------------------------------------------ endpoint classification


@run_async
async def test_every_path_that_makes_ollama_use_the_card_waits_for_it(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        await working(h, 0.4)
        tasks = [asyncio.create_task(h.http.post(f"{h.gate}{path}", json=body)) for path, body in LLM_WORK.items()]
        sound = {"file": ("a.wav", b"RIFF" * 10, "audio/wav")}
        speech = h.http.post(f"{h.gate}/v1/audio/transcriptions", data={"model": "llama3"}, files=sound)
        tasks.append(asyncio.create_task(speech))
        await until(lambda: waiting(h, "ollama") == len(tasks))
        assert not posts(h.ollama)
        assert [(await task).status_code for task in tasks] == [200] * len(tasks)
        freed = entries(h.comfy, "/free")[0].time
        assert all(freed < entry.time for entry in posts(h.ollama))


@run_async
async def test_everything_else_on_the_ollama_listener_passes_at_once_while_an_image_job_runs(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        await working(h, 0.6)
        for method, path, body in LLM_NEUTRAL:
            answer = await h.http.request(method, h.gate + path, json=body)
            assert answer.status_code == 200, (method, path)
        assert h.comfy.queue.running
        assert not h.view.waiting


@pytest.mark.parametrize("prefix", ["", "/api"])
@run_async
async def test_everything_but_post_prompt_passes_at_once_on_the_comfyui_listener_while_a_chat_runs(tmp_path, prefix):
    async with house(tmp_path, **two(tmp_path)) as h, h.streaming("llama3"):
        for method, path, body in COMFY_NEUTRAL:
            answer = await h.http.request(method, h.comfy_gate + prefix + path, json=body)
            assert answer.status_code == 200, (method, path)
        picture = {"image": ("a.png", b"png", "image/png")}
        assert (await h.http.post(f"{h.comfy_gate}{prefix}/upload/image", files=picture)).status_code == 200
        assert (await h.http.get(f"{h.comfy_gate}{prefix}/view?filename=a.png&type=input")).status_code == 200
        assert leases(h, "ollama") == 1
        assert not h.view.waiting


@run_async
async def test_post_prompt_is_image_work_however_it_is_spelled(tmp_path):
    spellings = ["/prompt", "/api/prompt", "/api/api/prompt", "/prompt/", "//prompt", "/%70rompt"]
    async with house(tmp_path, **two(tmp_path)) as h:
        async with h.streaming("llama3"):
            body = {"prompt": graph(0.02)}
            tasks = [asyncio.create_task(h.http.post(h.comfy_gate + path, json=body)) for path in spellings]
            await until(lambda: waiting(h, "comfyui") == len(spellings))
            assert not posts(h.comfy)
        await asyncio.gather(*tasks)
        await idle(h)


@run_async
async def test_a_websocket_lives_through_hand_overs_and_never_takes_or_holds_the_card(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        url = h.comfy_gate.replace("http", "ws")
        async with websockets.connect(f"{url}/ws?clientId=me") as ws, websockets.connect(f"{url}/api/ws"):
            assert json.loads(await ws.recv())["data"]["sid"] == "me"
            assert not h.view.leases
            assert (await chat(h)).status_code == 200
            reply = await prompt(h, 0.1, client_id="me")
            kinds = []
            while kinds[-1:] != ["executing-end"]:
                message = json.loads(await ws.recv())
                ended = message["type"] == "executing" and message["data"]["node"] is None
                kinds.append("executing-end" if ended else message["type"])
            assert "execution_success" in kinds
            assert reply.status_code == 200
            assert (await chat(h)).status_code == 200


# ------------------------------------------------------------------------------------------------- image job flow


@run_async
async def test_the_calls_of_one_image_job_are_the_documents_in_its_order(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        assert (await chat(h)).status_code == 200
        h.ollama.log.clear()
        h.comfy.log.clear()
        body = b'{ "prompt" :' + json.dumps(graph(0.2)).encode() + b',"extra_data":{"\\u00e9": 1.0}  }'
        reply = await h.http.post(f"{h.comfy_gate}/prompt", content=body)
        assert reply.status_code == 200
        assert set(reply.json()) == {"prompt_id", "number", "node_errors"}
        await idle(h)
        calls = sorted([*h.ollama.log, *h.comfy.log], key=lambda entry: entry.time)
        steps: list[tuple[str, str]] = []
        for entry in calls:
            if not steps or steps[-1] != (entry.method, entry.path):
                steps.append((entry.method, entry.path))
        job = f"/history/{reply.json()['prompt_id']}"
        wanted = [
            ("GET", "/api/ps"),
            ("POST", "/api/generate"),
            ("GET", "/api/ps"),
            ("POST", "/prompt"),
            ("GET", job),
            ("POST", "/free"),
        ]
        assert [step for step in steps if step != ("GET", "/queue")] == wanted
        assert [json.loads(e.body) for e in posts(h.ollama)] == [{"model": "llama3:latest", "keep_alive": 0}]
        assert posts(h.comfy, "/prompt")[0].body.encode() == body
        free = posts(h.comfy, "/free")
        assert [json.loads(e.body) for e in free] == [{"unload_models": True, "free_memory": True}]
        assert not h.card.held_by("ollama")


@run_async
async def test_an_embedding_only_model_is_unloaded_by_the_embed_route(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        assert (await h.http.post(f"{h.gate}/api/embed", json=LLM_WORK["/api/embed"])).status_code == 200
        h.ollama.log.clear()
        assert (await prompt(h, 0.05)).status_code == 200
        assert told_to_go(h.ollama) == [
            ("/api/generate", {"model": "bge-m3:latest", "keep_alive": 0}),
            ("/api/embed", {"model": "bge-m3:latest", "input": "x", "keep_alive": 0}),
        ]
        await idle(h)


@run_async
async def test_the_list_is_polled_at_the_unload_poll_interval(tmp_path):
    async with house(tmp_path, unload_poll_interval=0.1, **two(tmp_path)) as h:
        await chat(h)
        h.ollama.faults.unload_s = 0.55
        h.ollama.log.clear()
        assert (await prompt(h, 0.05)).status_code == 200
        looks = [entry.time for entry in entries(h.ollama, "/api/ps")]
        assert 5 <= len(looks) <= 10
        told = posts(h.ollama)[0].time
        assert min(gaps([t for t in looks if t > told])) > 0.08
        await idle(h)


@run_async
async def test_a_job_is_polled_at_the_history_poll_interval(tmp_path):
    async with house(tmp_path, history_poll_interval=0.1, **two(tmp_path)) as h:
        assert (await prompt(h, 0.65)).status_code == 200
        await idle(h)
        looks = [entry.time for entry in entries(h.comfy, "/queue")]
        freed = entries(h.comfy, "/free")[0].time
        during = [t for t in looks if posts(h.comfy, "/prompt")[0].time < t < freed]
        assert 6 <= len(during) <= 10
        assert min(gaps(during[:6])) > 0.08


@run_async
async def test_a_chat_that_waits_is_sent_only_after_free_was_called_and_the_memory_is_back(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        h.comfy.faults.free_late_s = 0.2
        await working(h, 0.1)
        assert (await chat(h)).status_code == 200
        back = [e.time for e in h.card.events() if e.name == "comfyui" and e.bytes < 1 << 30][-1]
        assert entries(h.comfy, "/free")[0].time < back < posts(h.ollama, "/api/chat")[0].time


# ------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("trouble", ["gone", "down", "hang", "server_error", "ps_hang"])
@run_async
async def test_an_ollama_that_cannot_be_asked_does_not_keep_an_image_job_from_running(tmp_path, trouble):
    settings = {"unload_timeout": 0.6, "probe_timeout": 0.2}
    async with house(tmp_path, alarms=True, **settings, **two(tmp_path)) as h:
        await chat(h)
        if trouble == "gone":
            h.ollama.exit(1)
            await h.ollama.exited.wait()
        else:
            setattr(h.ollama.faults, trouble, True)
        began = time.monotonic()
        assert (await prompt(h, 0.05)).status_code == 200
        assert time.monotonic() - began < (0.4 if trouble == "gone" else 1.6)
        assert of_kind(h, "evicted")[0]["sure"] is False
        await idle(h)
        assert h.app.jobs.ends == {"success": 1}


@pytest.mark.parametrize("listener", ["ollama", "comfy"])
@run_async
async def test_an_upstream_that_refuses_connections_is_tried_again_with_doubling_pauses(tmp_path, listener):
    parts = two(tmp_path)
    sim = parts[listener]
    async with contextlib.AsyncExitStack() as stack:
        async with serve(sim) as url:
            pass
        settings = {f"{listener}_url": url, "backoff_initial": 0.05, "backoff_max": 0.2}
        async with house(tmp_path, **settings, **{**parts, listener: None}) as h:
            began = time.monotonic()
            request = asyncio.create_task(chat(h) if listener == "ollama" else prompt(h, 0.02))
            await until(lambda: h.app.gateway.counts.unreachable == 4)
            assert 0.3 < time.monotonic() - began < 0.8, "0.05 + 0.1 + 0.2 s lie between the first four tries"
            await stack.enter_async_context(serve(sim, port=httpx.URL(url).port))
            assert (await request).status_code == 200
            assert len(posts(sim, "/api/chat", "/prompt")) == 1
            await idle_or_serving(h)


@run_async
async def test_a_client_that_leaves_ends_the_tries_to_reach_an_upstream(tmp_path):
    async with serve(OllamaSim()) as url:
        pass
    async with house(tmp_path, ollama_url=url, backoff_initial=0.02, backoff_max=0.02) as h:
        writer = await raw(h.gate, "/api/chat", CHAT)
        await until(lambda: h.app.gateway.counts.unreachable >= 2)
        leave(writer, "close")
        await until(lambda: not h.view.leases)


@run_async
async def test_a_prompt_that_comfyui_rejects_comes_back_as_it_is_and_holds_nothing(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        body = {"prompt": {"1": {"class_type": "NoSuchNode", "inputs": {}}}}
        direct = await h.http.post(f"{h.comfy.url}/prompt", json=body)
        reply = await h.http.post(f"{h.comfy_gate}/prompt", json=body)
        assert reply.status_code == direct.status_code == 400
        assert reply.content == direct.content
        assert "x-turnstile-error" not in reply.headers
        await until(lambda: not h.view.leases, 0.2)
        assert (await chat(h)).status_code == 200
        assert not of_kind(h, "job")


@run_async
async def test_a_job_that_never_ends_is_given_up_after_the_job_timeout(tmp_path):
    settings = {"job_timeout": 0.4, "unload_timeout": 0.3}
    async with house(tmp_path, alarms=True, **settings, **two(tmp_path)) as h:
        h.comfy.faults.job_end = JobFate.NEVER
        began = time.monotonic()
        assert (await prompt(h)).status_code == 200
        await until(lambda: h.app.jobs.ends)
        assert 0.3 < time.monotonic() - began < 0.8
        assert h.app.jobs.ends == {"timeout": 1}
        assert of_kind(h, "job_end")[0]["end"] == "timeout"
        assert (await chat(h)).status_code == 200


# ------------------------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize("path", list(STREAMS))
@run_async
async def test_the_first_chunk_of_a_stream_arrives_before_the_last_one_is_made(tmp_path, path):
    async with house(tmp_path, **two(tmp_path, tokens_per_s=40)) as h:
        arrived = []
        async with h.http.stream("POST", h.gate + path, json=STREAMS[path]) as answer:
            assert answer.status_code == 200
            assert "content-length" not in answer.headers
            async for _ in answer.aiter_raw():
                arrived.append(time.monotonic())
        assert len(arrived) >= 10
        assert arrived[-1] - arrived[0] > 0.2
        assert max(gaps(arrived)) < 0.15


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/messages"])
@run_async
async def test_a_client_that_leaves_in_mid_stream_cancels_the_engines_work_and_frees_its_place(tmp_path, path):
    async with house(tmp_path, **two(tmp_path, tokens_per_s=50, answer_tokens=1000)) as h:
        body = {k: v for k, v in STREAMS[path].items() if k not in ("options", "max_tokens", "max_output_tokens")}
        body |= {"max_tokens": 1000} if path == "/v1/messages" else {}
        async with h.http.stream("POST", h.gate + path, json=body) as answer:
            await anext(answer.aiter_raw())
            assert leases(h, "ollama") == 1
        await until(lambda: not h.view.leases, 1.0)
        await until(lambda: h.ollama.in_flight == 0, 1.0)
        assert h.ollama.counters["clients_gone"] == 1


# ----------------------------------------------------------------------------------------------------- WARM_MODEL


def warmed(h: House) -> list[dict[str, Any]]:
    found = [json.loads(entry.body) for entry in posts(h.ollama, "/api/generate") if entry.body]
    return [body for body in found if body.get("keep_alive") == -1]


@run_async
async def test_no_model_is_warmed_unless_somebody_asked_for_it(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        await prompt(h, 0.05)
        await idle(h)
        assert (await chat(h)).status_code == 200
        assert not warmed(h)


@run_async
async def test_the_warm_model_is_loaded_after_an_image_job_when_the_card_is_idle(tmp_path):
    async with house(tmp_path, warm_model="llama3", **two(tmp_path, load_s=0.3)) as h:
        assert (await prompt(h, 0.05)).status_code == 200
        await until(lambda: warmed(h))
        assert warmed(h) == [{"model": "llama3", "keep_alive": -1}]
        assert entries(h.comfy, "/free")[0].time < posts(h.ollama, "/api/generate")[0].time
        assert leases(h, "ollama") == 1, "a load is LLM work: it has a lease"
        assert (await h.http.get(f"{h.gate}/healthz")).json()["state"] == "llm"
        image = asyncio.create_task(prompt(h, 0.05))
        await until(lambda: waiting(h, "comfyui"))
        assert not h.card.alarms()
        assert (await image).status_code == 200
        await until(lambda: len(warmed(h)) == 2)
        await idle_or_serving(h)
        assert h.ollama.runners.listed()


@run_async
async def test_a_batch_of_images_warms_the_model_once_and_at_its_end(tmp_path):
    async with house(tmp_path, warm_model="llama3", **two(tmp_path)) as h:
        await asyncio.gather(*(prompt(h, 0.05, seed) for seed in range(4)))
        await until(lambda: warmed(h))
        await idle_or_serving(h)
        assert len(warmed(h)) == 1
        assert len(entries(h.comfy, "/free")) == 1


@run_async
async def test_a_chat_that_waits_already_makes_warming_needless(tmp_path):
    async with house(tmp_path, warm_model="llama3", **two(tmp_path)) as h:
        await working(h, 0.2)
        assert (await chat(h, model="qwen3:8b")).status_code == 200
        await idle_or_serving(h)
        assert not warmed(h)


@pytest.mark.parametrize("trouble", ["hang", "down", "server_error", "load_error", "gone"])
@run_async
async def test_a_warming_that_fails_or_hangs_is_over_at_its_limit_and_disturbs_nobody(tmp_path, trouble):
    async with house(tmp_path, warm_model="llama3", warm_timeout=0.3, **two(tmp_path)) as h:
        assert (await prompt(h, 0.15)).status_code == 200
        if trouble == "gone":
            h.ollama.exit(1)
        else:
            setattr(h.ollama.faults, trouble, True)
        await until(lambda: h.app.jobs.ends)
        await until(lambda: not h.view.leases and h.view.phase is not Phase.SWAPPING, 1.5)
        before = len(entries(h.ollama, "/api/generate"))
        assert trouble == "gone" or before == 1, "it was tried, and once"
        h.ollama.faults.heal()
        assert (await prompt(h, 0.05)).status_code == 200


# -------------------------------------------------------------------------------------------------- observability


@run_async
async def test_healthz_says_image_from_the_unload_until_the_memory_is_free(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        await chat(h)
        h.ollama.faults.unload_s = 0.15
        h.comfy.faults.free_late_s = 0.15
        states, done = [], False

        async def look() -> None:
            while not done:
                told = (await h.http.get(f"{h.comfy_gate}/healthz")).json()
                assert set(told) == {"state", "llm_inflight", "image_pending"}
                if states[-1:] != [told["state"]]:
                    states.append(told["state"])

        looking = asyncio.create_task(look())
        await until(lambda: states)
        await prompt(h, 0.1)
        await idle(h)
        done = True
        await looking
        assert states == ["idle", "image", "idle"] or states == ["idle", "image"]


@run_async
async def test_metrics_have_the_documents_exact_names_and_types(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        await chat(h)
        await prompt(h, 0.05)
        await idle(h)
        answer = await h.http.get(f"{h.gate}/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        assert 'gpu_turnstile_state{state="idle"} 1.0' in lines
        assert 'gpu_turnstile_state{state="llm"} 0.0' in lines
        assert 'gpu_turnstile_state{state="image"} 0.0' in lines
        assert "gpu_turnstile_llm_inflight 0.0" in lines
        assert "gpu_turnstile_image_jobs_total 1.0" in lines
        assert 'gpu_turnstile_lock_wait_seconds_count{kind="llm"} 1.0' in lines
        assert 'gpu_turnstile_lock_wait_seconds_count{kind="image"} 1.0' in lines
        assert "gpu_turnstile_unload_seconds_count 2.0" in lines
        types = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
        assert types["gpu_turnstile_state"] == "gauge"
        assert types["gpu_turnstile_llm_inflight"] == "gauge"
        assert types["gpu_turnstile_image_jobs_total"] == "counter"
        assert types["gpu_turnstile_lock_wait_seconds"] == "histogram"
        assert types["gpu_turnstile_unload_seconds"] == "histogram"


# ----------------------------------------------------------------------------------------------------- edge cases


@pytest.mark.parametrize("listener", ["llm", "comfyui"])
@run_async
async def test_a_get_that_the_engine_answers_with_5xx_is_tried_again_and_then_the_answer_is_the_engines(
    tmp_path, listener
):
    async with house(tmp_path, backoff_initial=0.03, backoff_max=0.1, **two(tmp_path)) as h:
        sim, base, path = (h.ollama, h.gate, "/api/tags") if listener == "llm" else (h.comfy, h.comfy_gate, "/features")
        sim.faults.server_error = True
        answer = await h.http.get(base + path)
        assert answer.status_code == 500
        assert "x-turnstile-error" not in answer.headers
        tries = [entry.time for entry in entries(sim, path)]
        assert 2 <= len(tries) <= 4, "at most three more tries"
        assert min(gaps(tries)) > 0.02
        request = asyncio.create_task(h.http.get(base + path))
        await until(lambda: len(entries(sim, path)) > len(tries))
        sim.faults.heal()
        assert (await request).status_code == 200


@run_async
async def test_a_post_that_the_engine_answers_with_5xx_is_never_sent_twice(tmp_path):
    async with house(tmp_path, backoff_initial=0.02, **two(tmp_path)) as h:
        h.comfy.faults.prompt_reply = PromptReply.ERROR
        reply = await prompt(h)
        assert reply.status_code == 500
        assert "Server got itself in trouble" in reply.text
        await idle(h)
        assert len(posts(h.comfy, "/prompt")) == 1
        h.ollama.faults.server_error = True
        answer = await chat(h)
        assert answer.status_code == 500
        assert len(posts(h.ollama, "/api/chat")) == 1
        h.ollama.faults.heal()
        assert (await chat(h)).status_code == 200


@run_async
async def test_a_post_that_may_have_reached_the_engine_is_never_sent_twice(tmp_path):
    async with house(tmp_path, backoff_initial=0.02, **two(tmp_path)) as h:
        h.ollama.faults.down = True
        answer = await chat(h)
        assert answer.status_code == 502
        assert answer.headers["x-turnstile-error"]
        assert len(posts(h.ollama, "/api/chat")) == 1


@run_async
async def test_both_upstreams_are_probed_once_at_the_start(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        await until(lambda: entries(h.ollama, "/api/version") and entries(h.comfy, "/system_stats"))
        assert len(entries(h.ollama, "/api/version")) == 1
        assert len(entries(h.comfy, "/system_stats")) == 1


@pytest.mark.parametrize("trouble", ["down", "hang", "server_error"])
@run_async
async def test_a_start_in_front_of_broken_upstreams_is_bounded_and_not_fatal(tmp_path, trouble):
    parts = two(tmp_path)
    for sim in (parts["ollama"], parts["comfy"]):
        setattr(sim.faults, trouble, True)
    began = time.monotonic()
    async with house(tmp_path, probe_timeout=0.2, **parts) as h:
        assert time.monotonic() - began < 1.5
        assert (await h.http.get(f"{h.gate}/healthz")).status_code == 200
        h.ollama.faults.heal()
        h.comfy.faults.heal()
        assert (await chat(h)).status_code == 200
        assert (await prompt(h, 0.05)).status_code == 200


@run_async
async def test_a_restart_of_the_gate_is_a_new_beginning_with_nothing_held(tmp_path):
    parts = two(tmp_path)
    async with house(tmp_path, **parts) as h:
        await chat(h)
    async with house(tmp_path, **parts) as h:
        told = (await h.http.get(f"{h.gate}/healthz")).json()
        assert told == {"state": "idle", "llm_inflight": 0, "image_pending": False}
        assert (await h.http.post(f"{h.comfy_gate}/prompt", json={"prompt": GRAPH})).status_code == 200
        await idle(h)
