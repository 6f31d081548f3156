"""The clients people use, through the gate: streams, plain answers, and errors that become the library's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
import requests
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve

from gpu_turnstile.core.routes import Directory
from tests.aio import run_async
from tests.gateway.bench import NDJSON, SSE, Bench, bench, chunk
from tests.gateway.test_waiting import ANTHROPIC_EVENTS, CHAT_LINES, CHUNK, GENERATE_LINES, OPENAI_EVENTS

MESSAGES = [{"role": "user", "content": "Grüß Gott"}]
END = b"0\r\n\r\n"


def answer(value: Any, status: bytes = b"200 OK") -> bytes:
    body = json.dumps(value, ensure_ascii=False).encode()
    head = b"HTTP/1.1 %s\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


COMPLETION = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Servus 世界"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}
MESSAGE = {
    "id": "m1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "Servus 世界"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 2},
}
LAST_EVENT = {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
LAST_EVENTS = b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(LAST_EVENT).encode()
OPENAI_STREAM = SSE + chunk(OPENAI_EVENTS) + chunk(LAST_EVENTS) + END


@contextlib.asynccontextmanager
async def openai_client(b: Bench) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{b.port}/v1", api_key="k", max_retries=0) as client:
        yield client


@contextlib.asynccontextmanager
async def anthropic_client(b: Bench) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{b.port}", api_key="k", max_retries=0) as client:
        yield client


@contextlib.asynccontextmanager
async def ollama_client(b: Bench) -> AsyncIterator[ollama.AsyncClient]:
    client = ollama.AsyncClient(f"http://127.0.0.1:{b.port}")
    yield client
    await client._client.aclose()


def know_only(b: Bench, name: str) -> None:
    """Make every other model unknown."""
    b.gateway.table.directory = Directory(names=("ollama",), aliases={name: "ollama"})
    b.gateway.table.external = None


# -------------------------------------------------------------------------------------------------- openai


@run_async
async def test_openai_chats_streams_embeds_and_lists():
    async with bench() as b, openai_client(b) as client:
        b.engine.answer(answer(COMPLETION)).answer(OPENAI_STREAM)
        whole = await client.chat.completions.create(model="m", messages=MESSAGES)
        assert whole.choices[0].message.content == "Servus 世界"
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        parts = [part.choices[0].delta.content or "" async for part in stream]
        assert "".join(parts) == "Hello wörld"
        vector = {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        b.engine._scripts.clear()
        b.engine.answer(answer({"object": "list", "data": [vector], "model": "m", "usage": usage}))
        got = await client.embeddings.create(model="m", input="x", encoding_format="float")
        assert got.data[0].embedding == [0.5, -1.0]
        model = {"id": "m", "object": "model", "created": 1, "owned_by": "me"}
        b.engine._scripts.clear()
        b.engine.answer(answer({"object": "list", "data": [model]}))
        assert [m.id async for m in client.models.list()] == ["m"]


@run_async
async def test_openais_upload_of_a_recording_reaches_the_engine_whole():
    async with bench() as b, openai_client(b) as client:
        b.engine.answer(answer({"text": "hello"}))
        audio = bytes(range(256)) * 4000 + b"\r\n--boundary--\r\n"
        got = await client.audio.transcriptions.create(model="m", file=("録音 ü.wav", audio))
        assert got.text == "hello"
        assert audio in b.engine.seen[0].body


OPENAI_ERRORS = [
    (400, openai.BadRequestError),
    (401, openai.AuthenticationError),
    (404, openai.NotFoundError),
    (422, openai.UnprocessableEntityError),
    (429, openai.RateLimitError),
    (500, openai.InternalServerError),
]


@pytest.mark.parametrize(("status", "error"), OPENAI_ERRORS)
@run_async
async def test_the_engines_own_errors_are_openais_exceptions(status, error):
    async with bench() as b, openai_client(b) as client:
        b.engine.answer(answer({"error": {"message": "the engine says no", "type": "x"}}, b"%d No" % status))
        with pytest.raises(error, match="the engine says no"):
            await client.chat.completions.create(model="m", messages=MESSAGES)


@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_an_unknown_model_is_openais_not_found_error_with_our_message(stream):
    async with bench() as b, openai_client(b) as client:
        know_only(b, "qwen3-coder")
        with pytest.raises(openai.NotFoundError) as raised:
            await client.chat.completions.create(model="qwen3-codr", messages=MESSAGES, stream=stream)
        assert raised.value.code == "unknown_model"
        assert "qwen3-coder" in str(raised.value)
        assert raised.value.response.headers["x-turnstile-error"] == "unknown_model"


@run_async
async def test_a_busy_card_is_openais_server_error_with_the_time_to_come_back():
    async with bench(llm_wait=0) as b, openai_client(b) as client:
        b.comfy.answer(answer({"prompt_id": "p"}))
        async with httpx.AsyncClient(trust_env=False) as artist:
            await artist.post(f"http://127.0.0.1:{b.comfy_port}/prompt", json={"prompt": {}})
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert raised.value.status_code == 503
        assert int(raised.value.response.headers["retry-after"]) >= 1
        b.arbiter.release(b.followed[0][0])


# ----------------------------------------------------------------------------------------------- anthropic


@run_async
async def test_anthropic_asks_and_streams():
    async with bench() as b, anthropic_client(b) as client:
        b.engine.answer(answer(MESSAGE)).answer(SSE + chunk(ANTHROPIC_EVENTS) + END)
        whole = await client.messages.create(model="m", max_tokens=9, messages=MESSAGES)
        assert whole.content[0].text == "Servus 世界"
        async with client.messages.stream(model="m", max_tokens=9, messages=MESSAGES) as stream:
            assert await stream.get_final_text() == "Hello wörld"
        seen = b.engine.seen[0]
        assert seen.header("anthropic-version")
        assert "k" in (seen.header("x-api-key"), (seen.header("authorization") or "").removeprefix("Bearer "))


@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_an_unknown_model_is_anthropics_not_found_error_with_our_message(stream):
    async with bench() as b, anthropic_client(b) as client:
        know_only(b, "qwen3-coder")
        with pytest.raises(anthropic.NotFoundError, match="qwen3-codr"):
            await client.messages.create(model="qwen3-codr", max_tokens=9, messages=MESSAGES, stream=stream)


@run_async
async def test_the_engines_own_errors_are_anthropics_exceptions():
    async with bench() as b, anthropic_client(b) as client:
        error = {"type": "error", "error": {"type": "overloaded_error", "message": "the engine says no"}}
        b.engine.answer(answer(error, b"529 Overloaded"))
        with pytest.raises(anthropic.APIStatusError, match="the engine says no") as raised:
            await client.messages.create(model="m", max_tokens=9, messages=MESSAGES)
        assert raised.value.status_code == 529


# -------------------------------------------------------------------------------------------------- ollama


@run_async
async def test_ollama_chats_generates_streams_and_lists():
    async with bench() as b, ollama_client(b) as client:
        b.engine.answer(NDJSON + chunk(CHAT_LINES) + END)
        parts = [part async for part in await client.chat(model="m", messages=MESSAGES, stream=True)]
        assert ["".join(p.message.content for p in parts), parts[-1].done] == ["Hello", True]
        b.engine._scripts.clear()
        b.engine.answer(NDJSON + chunk(GENERATE_LINES) + END)
        parts = [part async for part in await client.generate(model="m", prompt="x", stream=True)]
        assert ["".join(p.response for p in parts), parts[-1].done] == ["Hello", True]
        b.engine._scripts.clear()
        whole = {"model": "m", "message": {"role": "assistant", "content": "Servus 世界"}, "done": True}
        b.engine.answer(answer(whole))
        assert (await client.chat(model="m", messages=MESSAGES)).message.content == "Servus 世界"
        b.engine._scripts.clear()
        b.engine.answer(answer({"models": [{"model": "llama3:latest"}]}))
        assert (await client.list()).models[0].model == "llama3:latest"
        assert (await client.ps()).models[0].model == "llama3:latest"


@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_an_unknown_model_is_ollamas_response_error_with_our_message(stream):
    async with bench() as b, ollama_client(b) as client:
        know_only(b, "qwen3-coder")

        async def ask() -> None:
            got = await client.chat(model="qwen3-codr", messages=MESSAGES, stream=stream)
            if stream:
                async for _ in got:
                    pass

        with pytest.raises(ollama.ResponseError, match="qwen3-codr") as raised:
            await ask()
        assert raised.value.status_code == 404


# ------------------------------------------------------------------------------------- plain HTTP clients


@run_async
async def test_httpx_streams_uploads_and_keeps_its_connection():
    async with bench() as b, httpx.AsyncClient(base_url=f"http://127.0.0.1:{b.port}", trust_env=False) as client:
        b.engine.answer(OPENAI_STREAM)
        for _ in range(3):
            async with client.stream("POST", "/v1/chat/completions", json={"model": "m", "stream": True}) as got:
                assert got.headers["content-type"] == "text/event-stream"
                assert b"".join([part async for part in got.aiter_bytes()]).startswith(OPENAI_EVENTS)

        async def pieces():
            yield b'{"model": "m", "pad": "'
            yield b"x" * 100_000
            yield b'"}'

        assert (await client.post("/v1/chat/completions", content=pieces())).status_code == 200
        assert json.loads(b.engine.seen[-1].body)["pad"] == "x" * 100_000
        assert len(b.gateway.connections) == 1


@run_async
async def test_requests_asks_streams_and_uploads():
    async with bench() as b:
        b.engine.answer(OPENAI_STREAM)
        b.comfy.answer(answer({"name": "a.png", "subfolder": "", "type": "input"}))
        picture = bytes(range(256)) * 1000

        def use() -> None:
            with requests.Session() as session:
                session.trust_env = False
                url = f"http://127.0.0.1:{b.port}"
                got = session.post(f"{url}/v1/chat/completions", json={"model": "m", "stream": True}, stream=True)
                lines = [line for line in got.iter_lines() if line]
                assert lines[-1] == b"data: [DONE]"
                got = session.post(f"{url}/v1/chat/completions", data=iter([b'{"model":', b'"m"}']))
                assert got.status_code == 200
                files = {"image": ("ü.png", picture, "image/png")}
                got = session.post(f"{url}/comfyui/upload/image", files=files, data={"overwrite": "true"})
                assert got.json()["name"] == "a.png"
                got = session.post(f"{url}/v1/chat/completions", data=b"{")
                assert got.status_code == 400
                assert got.json()["error"]["code"] == "bad_request"

        await asyncio.to_thread(use)
        assert picture in b.comfy.seen[0].body


@run_async
async def test_websockets_talks_to_comfyui_by_the_mount_and_by_the_listener():
    async def greet(ws):
        await ws.send(json.dumps({"type": "status", "data": {"sid": ws.request.path}}))
        assert json.loads(await ws.recv())["type"] == "feature_flags"
        await ws.send(b"\x00\x00\x00\x01" + b"preview" * 1000)

    async with bench() as b, serve(greet, "127.0.0.1", 0) as engine:
        b.comfy_engine.url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        for place in (f"{b.port}/comfyui", str(b.comfy_port)):
            async with connect(f"ws://127.0.0.1:{place}/ws?clientId=abc", proxy=None) as ws:
                assert json.loads(await ws.recv())["data"]["sid"] == "/ws?clientId=abc"
                await ws.send(json.dumps({"type": "feature_flags", "data": {}}))
                assert (await ws.recv())[:4] == b"\x00\x00\x00\x01"


# ---------------------------------------------------------------------------------------------------- curl

CURL = shutil.which("curl")


async def curl(*arguments: str) -> tuple[int, bytes]:
    """(exit code, standard output)."""
    process = await asyncio.create_subprocess_exec(
        CURL, "-sS", "--noproxy", "*", "--max-time", "10", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return process.returncode, output


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
@run_async
async def test_curl_streams_uploads_with_expect_and_sees_cut_answers():
    async with bench() as b:
        url = f"http://127.0.0.1:{b.port}"
        b.engine.answer(OPENAI_STREAM)
        assert await curl("-N", f"{url}/v1/chat/completions", "-d", '{"model":"m","stream":true}') == (
            0,
            OPENAI_EVENTS + LAST_EVENTS,
        )
        big = json.dumps({"model": "m", "pad": "x" * 80_000})
        code, _ = await curl(f"{url}/v1/chat/completions", "-H", "Expect: 100-continue", "-d", big)
        assert code == 0
        assert b.engine.seen[-1].body == big.encode()
        assert b.engine.seen[-1].header("expect") is None
        code, output = await curl("-0", f"{url}/v1/chat/completions", "-d", '{"model":"m"}')
        assert (code, output.startswith(OPENAI_EVENTS)) == (0, True)

        async def die(connection, seen):
            await connection.send(SSE + chunk(b"data: 1\n\n"))
            connection.close()

        b.engine._scripts.clear()
        b.engine.script(die)
        code, output = await curl("-N", f"{url}/v1/chat/completions", "-d", '{"model":"m"}')
        assert code in (18, 56)
        assert output.startswith(b"data: 1\n\n")


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
@run_async
async def test_curl_reads_heads_and_several_answers_on_one_connection():
    async with bench() as b:
        url = f"http://127.0.0.1:{b.port}"
        b.engine.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
        code, output = await curl("-I", f"{url}/api/tags")
        assert code == 0
        assert b"Content-Length: 2" in output
        b.engine._scripts.clear()
        b.engine.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        code, output = await curl("-w", "%{num_connects} ", f"{url}/api/tags", f"{url}/api/version", f"{url}/api/ps")
        assert (code, output) == (0, b"ok1 ok0 ok0 ")
