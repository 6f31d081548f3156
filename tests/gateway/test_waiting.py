"""While a request waits: minutes of silence are fine, and a streaming client hears that it still waits.

What it hears is harmless in its own protocol: a comment line in an event stream, an object with empty content where
native Ollama streams. A client that does not stream gets one document and not a byte before it. Once a sign of life
is out, the status of the answer is 200 for good, so whatever goes wrong later is told inside the stream, and the
stream is then cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime

import anthropic
import ollama
import openai
import pytest

from tests.aio import run_async, until
from tests.gateway.bench import NDJSON, OK, SSE, Bench, RawClient, bench, chunk, post

MESSAGES = [{"role": "user", "content": "hi"}]
STREAM = {"model": "m", "stream": True, "messages": MESSAGES}
INTERVAL = 0.02
COMMENT = re.compile(rb": waiting for the card(?:, position \d+)?\n\n")

CHUNK = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
OPENAI_EVENTS = b"".join(
    b"data: " + json.dumps({**CHUNK, "choices": [{"index": 0, "delta": {"content": word}}]}).encode() + b"\n\n"
    for word in ("Hel", "lo", " wörld")
)
ANTHROPIC_EVENTS = b"".join(
    f"event: {kind}\ndata: {json.dumps({'type': kind, **rest})}\n\n".encode()
    for kind, rest in (
        (
            "message_start",
            {
                "message": {
                    "id": "m1",
                    "type": "message",
                    "role": "assistant",
                    "model": "m",
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": {"input_tokens": 1, "output_tokens": 1},
                }
            },
        ),
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "Hello wörld"}}),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}),
        ("message_stop", {}),
    )
)
CHAT_LINES = (
    b'{"model":"m","created_at":"2024-01-01T00:00:00Z","message":{"role":"assistant","content":"Hello"},"done":false}\n'
    b'{"model":"m","created_at":"2024-01-01T00:00:01Z","message":{"role":"assistant","content":""},"done":true}\n'
)
GENERATE_LINES = (
    b'{"model":"m","created_at":"2024-01-01T00:00:00Z","response":"Hello","done":false}\n'
    b'{"model":"m","created_at":"2024-01-01T00:00:01Z","response":"","done":true}\n'
)
END = b"0\r\n\r\n"
SSE_ANSWER = SSE + chunk(OPENAI_EVENTS) + chunk(b"data: [DONE]\n\n") + END


@contextlib.asynccontextmanager
async def held(b: Bench) -> AsyncIterator[Callable[[], None]]:
    """An image job holds the card until what is yielded is called."""
    go = asyncio.Event()

    async def render(connection, seen):
        await go.wait()
        await connection.send(OK)

    b.comfy._scripts.clear()
    b.comfy.seen.clear()
    b.comfy.script(render)
    artist = await b.client(b.comfy_port)
    await artist.send(post("/prompt", {"prompt": {}}))
    await until(lambda: b.comfy.seen)
    yield go.set
    go.set()
    assert (await artist.response())[0] == 200
    artist.close()


async def waiting_client(b: Bench, request: bytes) -> RawClient:
    client = await b.client()
    before = len(b.view.waiting)
    await client.send(request)
    await until(lambda: len(b.view.waiting) > before)
    return client


async def hears(client: RawClient, times: int) -> tuple[bytes, bytes]:
    """(head, everything behind it) of a client that gets `times` signs of life, one chunk each."""
    head = await client.reader.readuntil(b"\r\n\r\n")
    signs = b""
    for _ in range(times):
        async with asyncio.timeout(2):
            size = int(await client.reader.readuntil(b"\r\n"), 16)
            signs += (await client.reader.readexactly(size + 2))[:-2]
    return head, signs


async def rest_of(client: RawClient) -> tuple[bytes, bool]:
    """(the payload of the remaining chunks, whether the last chunk came)."""
    got = b""
    while not got.endswith(END):
        try:
            data = await client.read()
        except ConnectionError:
            break
        if not data:
            break
        got += data
    payload = b""
    while got:
        line, found, got = got.partition(b"\r\n")
        if not found:
            return payload, False
        size = int(line, 16)
        if size == 0:
            return payload, True
        payload, got = payload + got[:size], got[size + 2 :]
    return payload, False


def fields(head: bytes) -> dict[bytes, bytes]:
    lines = head.strip().split(b"\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}


async def silent(client: RawClient, seconds: float) -> bool:
    try:
        return not await client.read(seconds)
    except TimeoutError:
        return True


# ------------------------------------------------------------------------------------------------ patience


SHORT = {"head_timeout": 0.05, "idle_timeout": 0.05, "body_timeout": 0.05, "upstream_idle": 0.02, "connect_timeout": 1}


@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_an_engine_may_be_silent_before_and_in_its_answer_for_as_long_as_it_likes(stream):
    """Every limit the gate has is about something else, and is ten times shorter than the silence."""
    async with bench(**SHORT) as b:

        async def think(connection, seen):
            await asyncio.sleep(0.5)
            await connection.send(SSE + chunk(b"data: 1\n\n"))
            await asyncio.sleep(0.5)
            await connection.send(chunk(b"data: 2\n\n") + END)

        b.engine.script(think)
        status, _, body = await b.ask(post("/v1/chat/completions", {**STREAM, "stream": stream}))
        assert (status, body) == (200, b"data: 1\n\ndata: 2\n\n")


@run_async
async def test_a_request_may_wait_in_the_queue_for_as_long_as_its_own_limit_says():
    async with bench(**SHORT, keepalive_interval=0) as b:
        b.engine.answer()
        async with held(b) as end:
            client = await waiting_client(b, post("/v1/chat/completions", {**STREAM, "stream": False}))
            assert await silent(client, 0.5)
            end()
        assert (await client.response())[0] == 200


@run_async
async def test_reading_and_listing_may_take_as_long_as_the_engine_likes():
    async with bench(**SHORT) as b:

        async def slow(connection, seen):
            await asyncio.sleep(0.4)
            await connection.send(OK)

        b.engine.script(slow)
        assert (await b.ask(b"GET /api/tags HTTP/1.1\r\nHost: g\r\n\r\n", method="GET"))[0] == 200


# ----------------------------------------------------------------------------------------------- comments

COMMENTED = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/completion", "/v1/responses"]


@pytest.mark.parametrize("path", COMMENTED)
@run_async
async def test_a_streaming_request_that_waits_gets_comments_and_then_the_engines_own_stream(path):
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer(SSE_ANSWER)
        async with held(b) as end:
            client = await waiting_client(b, post(path, STREAM))
            head, signs = await hears(client, 3)
            end()
        assert head.startswith(b"HTTP/1.1 200 ")
        assert fields(head)[b"content-type"].startswith(b"text/event-stream")
        assert fields(head)[b"transfer-encoding"] == b"chunked"
        assert fields(head)[b"x-accel-buffering"] == b"no"
        assert b"content-length" not in fields(head)
        assert signs == b": waiting for the card, position 1\n\n" * 3
        body, complete = await rest_of(client)
        assert COMMENT.sub(b"", body) == OPENAI_EVENTS + b"data: [DONE]\n\n"
        assert complete


@run_async
async def test_the_comment_tells_the_place_in_the_queue():
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer(SSE_ANSWER)
        async with held(b) as end:
            first = await waiting_client(b, post("/v1/chat/completions", STREAM))
            second = await waiting_client(b, post("/v1/chat/completions", STREAM))
            assert (await hears(first, 1))[1] == b": waiting for the card, position 1\n\n"
            assert (await hears(second, 1))[1] == b": waiting for the card, position 2\n\n"
            first.reset()
            async with asyncio.timeout(2):
                await second.reader.readuntil(b"position 1\n\n\r\n")
            end()
        assert (await rest_of(second))[1]


@run_async
async def test_a_request_that_waits_for_its_engine_to_be_brought_in_gets_comments_as_well():
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer(SSE_ANSWER)
        b.comfy_engine.release_gate = asyncio.Event()
        async with held(b) as end:
            end()
            await until(lambda: b.comfy_engine.released)
            client = await waiting_client(b, post("/v1/chat/completions", STREAM))
            assert COMMENT.fullmatch((await hears(client, 1))[1])
            b.comfy_engine.release_gate.set()
        assert (await rest_of(client))[1]


@run_async
async def test_the_first_comment_does_not_come_before_its_time_and_none_when_the_wait_is_short():
    async with bench(keepalive_interval=0.2) as b:
        b.engine.answer(SSE_ANSWER)
        async with held(b) as end:
            began = time.monotonic()
            client = await waiting_client(b, post("/v1/chat/completions", STREAM))
            await hears(client, 1)
            assert time.monotonic() - began >= 0.198  # timers round to milliseconds
            short = await waiting_client(b, post("/v1/chat/completions", STREAM))
            end()
            got = await short.read_until(END)
        assert got.replace(b"X-Accel-Buffering: no\r\n", b"") == SSE_ANSWER
        await rest_of(client)


@run_async
async def test_no_comment_follows_the_engines_first_byte():
    async with bench(keepalive_interval=INTERVAL) as b:

        async def slow(connection, seen):
            await connection.send(SSE + chunk(b"data: 1\n\n")[:7])
            await asyncio.sleep(INTERVAL * 5)
            await connection.send(chunk(b"data: 1\n\n")[7:] + END)

        b.engine.script(slow)
        async with held(b) as end:
            client = await waiting_client(b, post("/v1/chat/completions", STREAM))
            await hears(client, 1)
            end()
        body, complete = await rest_of(client)
        assert complete
        assert COMMENT.sub(b"", body) == b"data: 1\n\n"
        assert body.endswith(b"data: 1\n\n")


ANSWERS = {
    "chunked": SSE_ANSWER,
    "with a length": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s"
    % (len(OPENAI_EVENTS), OPENAI_EVENTS),
    "close-delimited": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    + OPENAI_EVENTS,
}


@pytest.mark.parametrize("framing", ANSWERS)
@run_async
async def test_the_engines_stream_follows_whatever_its_framing_and_the_connection_stays_usable(framing):
    async with bench(keepalive_interval=INTERVAL) as b:

        async def answer(connection, seen):
            await connection.send(ANSWERS[framing])
            if framing == "close-delimited":
                connection.close()

        b.engine.script(answer).answer()
        async with held(b) as end:
            client = await waiting_client(b, post("/v1/chat/completions", STREAM))
            await hears(client, 1)
            end()
        body, complete = await rest_of(client)
        assert complete
        assert COMMENT.sub(b"", body).removesuffix(b"data: [DONE]\n\n") == OPENAI_EVENTS
        await client.send(post("/api/chat", {"model": "m"}))
        assert (await client.response())[0] == 200


@run_async
async def test_after_a_comment_the_engine_is_not_asked_to_compress():
    """The head that would have told the coding is out already."""
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer(SSE_ANSWER)
        async with held(b) as end:
            client = await waiting_client(b, post("/v1/chat/completions", STREAM, "Accept-Encoding: gzip, br"))
            await hears(client, 1)
            end()
        await rest_of(client)
        assert b.engine.seen[0].header("accept-encoding") in (None, "identity")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
@run_async
async def test_an_http_1_0_client_never_gets_chunks(path):
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer(SSE_ANSWER if path.startswith("/v1") else NDJSON + chunk(CHAT_LINES) + END)
        payload = json.dumps(STREAM).encode()
        async with held(b) as end:
            head = b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(payload))
            client = await waiting_client(b, head + payload)
            await asyncio.sleep(INTERVAL * 3)
            end()
        data, reset = await client.read_all()
        head, _, body = data.partition(b"\r\n\r\n")
        assert not reset
        assert b"chunked" not in head.lower()
        expected = OPENAI_EVENTS + b"data: [DONE]\n\n" if path.startswith("/v1") else CHAT_LINES
        assert body.endswith(expected)
        for line in filter(None, body.split(b"\n")):
            assert line.startswith((b":", b"data: ", b"{"))


# ------------------------------------------------------------------------------------------------ decoders


def read_events(body: bytes) -> list[dict[str, object]]:
    """A strict reader: JSON-parses the data of every event, and an event without data is an error."""
    events = []
    for block in body.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            data = [line[6:] for line in lines if line.startswith("data: ")]
            assert data, f"an event without data: {block!r}"
            if data != ["[DONE]"]:
                events.append(json.loads("\n".join(data)))
    return events


async def while_held(b: Bench, use, signs: int = 3):
    """Run a client library's request that waits for `signs` intervals before the card is free."""
    async with held(b) as end:
        running = asyncio.ensure_future(use)
        await until(lambda: b.view.waiting or running.done())
        await asyncio.sleep(INTERVAL * (signs + 0.5))
        end()
        return await running


@run_async
async def test_openais_library_and_a_strict_reader_see_only_the_engines_events():
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer(SSE_ANSWER)
        sdk = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{b.port}/v1", api_key="k", max_retries=0)

        async def use():
            stream = await sdk.chat.completions.create(**STREAM)
            return [part.choices[0].delta.content async for part in stream]

        assert await while_held(b, use()) == ["Hel", "lo", " wörld"]
        async with held(b) as end:
            client = await waiting_client(b, post("/v1/chat/completions", STREAM))
            _, signs = await hears(client, 2)
            end()
        body, _ = await rest_of(client)
        assert len(read_events(signs + body)) == 3
        await sdk.close()


@run_async
async def test_anthropics_library_sees_only_the_engines_events():
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer(SSE + chunk(ANTHROPIC_EVENTS) + END)
        sdk = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{b.port}", api_key="k", max_retries=0)

        async def use():
            async with sdk.messages.stream(model="m", max_tokens=9, messages=MESSAGES) as stream:
                return await stream.get_final_text()

        assert await while_held(b, use()) == "Hello wörld"
        await sdk.close()


@run_async
async def test_ollamas_library_sees_empty_parts_and_then_the_engines():
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer(NDJSON + chunk(CHAT_LINES) + END)
        sdk = ollama.AsyncClient(f"http://127.0.0.1:{b.port}")

        async def use():
            return [part async for part in await sdk.chat(model="m", messages=MESSAGES, stream=True)]

        parts = await while_held(b, use())
        assert len(parts) >= 4
        assert "".join(part.message.content for part in parts) == "Hello"
        assert [part.done for part in parts][-2:] == [False, True]
        assert not any(part.done for part in parts[:-1])
        await sdk._client.aclose()


# ------------------------------------------------------------------------------------------------- ndjson


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("stream", [{}, {"stream": True}], ids=["by default", "said so"])
@run_async
async def test_native_ollama_streams_get_empty_objects_of_their_own_shape(path, stream):
    lines = CHAT_LINES if path == "/api/chat" else GENERATE_LINES
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer(NDJSON + chunk(lines) + END)
        async with held(b) as end:
            client = await waiting_client(b, post(path, {"model": "llama3:8b", **stream}))
            head, signs = await hears(client, 2)
            end()
        assert fields(head)[b"content-type"].startswith(b"application/x-ndjson")
        assert fields(head)[b"x-accel-buffering"] == b"no"
        for line in signs.decode().splitlines():
            sign = json.loads(line)
            assert datetime.fromisoformat(sign.pop("created_at")).tzinfo is not None
            content = {"message": {"role": "assistant", "content": ""}} if path == "/api/chat" else {"response": ""}
            assert sign == {"model": "llama3:8b", **content, "done": False}
        assert signs.endswith(b"\n")
        body, complete = await rest_of(client)
        assert complete
        assert body.endswith(lines)
        assert all(json.loads(line) for line in body.splitlines())


NOT_STREAMING = [
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"stream": False}),
    ("/v1/chat/completions", {"stream": None}),
    ("/v1/completions", {}),
    ("/v1/messages", {}),
    ("/v1/messages", {"stream": False}),
    ("/v1/embeddings", {}),
    ("/v1/rerank", {}),
    ("/v1/images/generations", {}),
    ("/api/chat", {"stream": False}),
    ("/api/generate", {"stream": False}),
    ("/api/embed", {}),
    ("/api/embed", {"stream": True}),
    ("/api/embeddings", {}),
]


@pytest.mark.parametrize(("path", "extra"), NOT_STREAMING, ids=[f"{p} {e}" for p, e in NOT_STREAMING])
@run_async
async def test_a_request_that_does_not_stream_gets_not_a_byte_before_its_answer(path, extra):
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer()
        async with held(b) as end:
            client = await waiting_client(b, post(path, {"model": "m", **extra}))
            assert await silent(client, INTERVAL * 4)
            end()
        assert await client.read_until(b"{}") == OK


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
@run_async
async def test_nobody_gets_signs_of_life_when_they_are_switched_off(path):
    async with bench(keepalive_interval=0) as b:
        b.engine.answer()
        async with held(b) as end:
            client = await waiting_client(b, post(path, STREAM))
            assert await silent(client, INTERVAL * 4)
            end()
        assert await client.read_until(b"{}") == OK


@run_async
async def test_an_image_job_gets_not_a_byte_before_its_answer():
    async with bench(keepalive_interval=INTERVAL) as b:
        async with held(b):
            b.comfy.answer()
            client = await b.client(b.comfy_port)
            await client.send(post("/prompt", {"prompt": {}, "stream": True}))
            assert await silent(client, INTERVAL * 4)
        assert await client.read_until(b"{}") == OK


# ------------------------------------------------------------------------------------- trouble afterwards

DIALECTS = {
    "openai": ("/v1/chat/completions", lambda e: e["error"]["message"]),
    "anthropic": ("/v1/messages", lambda e: e["type"] == "error" and e["error"]["message"]),
    "ollama": ("/api/chat", lambda e: e["error"]),
}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)


def error_in(dialect: str, body: bytes) -> str:
    """The message of the error that must be the only thing but signs of life in a stream."""
    if dialect == "ollama":
        lines = [json.loads(line) for line in body.splitlines()]
        [error] = [line for line in lines if "error" in line]
        assert lines[-1] == error
    else:
        [error] = read_events(body)
        if dialect == "anthropic":
            assert b"event: error\ndata: " in body
    message = DIALECTS[dialect][1](error)
    assert isinstance(message, str)
    assert message
    return message


@every_dialect
@pytest.mark.parametrize("status", [400, 404, 500, 503])
@run_async
async def test_an_engines_refusal_after_a_sign_of_life_is_told_inside_the_stream(dialect, status):
    path = DIALECTS[dialect][0]
    async with bench(keepalive_interval=INTERVAL) as b:
        text = b'{"error":{"message":"tools are not supported"}}'
        head = b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        b.engine.answer(head % (status, len(text)) + text)
        async with held(b) as end:
            client = await waiting_client(b, post(path, STREAM))
            _, signs = await hears(client, 1)
            end()
        body, complete = await rest_of(client)
        assert not complete
        message = error_in(dialect, signs + body)
        assert str(status) in message or "tools are not supported" in message
        assert b'"done": true' not in body
        assert b"[DONE]" not in body


@every_dialect
@run_async
async def test_the_gates_own_refusal_after_a_sign_of_life_is_told_inside_the_stream(dialect):
    path = DIALECTS[dialect][0]
    async with bench(keepalive_interval=INTERVAL, llm_wait=INTERVAL * 4) as b:
        b.engine.answer()
        async with held(b):
            client = await waiting_client(b, post(path, STREAM))
            _, signs = await hears(client, 1)
            body, complete = await rest_of(client)
            assert not complete
            error_in(dialect, signs + body)
        assert not b.engine.seen


@every_dialect
@run_async
async def test_the_gates_own_refusal_before_a_sign_of_life_is_a_plain_error(dialect):
    path = DIALECTS[dialect][0]
    async with bench(keepalive_interval=10, llm_wait=0.05) as b:
        b.engine.answer()
        async with held(b):
            client = await waiting_client(b, post(path, STREAM))
            status, headers, body = await client.response()
            assert (status, headers["x-turnstile-error"]) == (503, "busy")
            assert int(headers["retry-after"]) >= 1
            assert DIALECTS[dialect][1](json.loads(body))


@every_dialect
@pytest.mark.parametrize("death", ["reset", "close"])
@pytest.mark.parametrize("after", ["nothing", "its head", "an event"])
@run_async
async def test_an_engine_that_dies_after_a_sign_of_life_is_told_inside_the_stream(dialect, death, after):
    path = DIALECTS[dialect][0]
    head, event = (NDJSON, CHAT_LINES[: CHAT_LINES.index(b"\n") + 1]) if dialect == "ollama" else (SSE, b": engine\n\n")
    async with bench(keepalive_interval=INTERVAL) as b:

        async def die(connection, seen):
            await connection.send({"nothing": b"", "its head": head, "an event": head + chunk(event)}[after])
            await asyncio.sleep(0.01)  # so that a reset does not overtake what was sent
            getattr(connection, death)()

        b.engine.script(die)
        async with held(b) as end:
            client = await waiting_client(b, post(path, STREAM))
            _, signs = await hears(client, 1)
            end()
        body, complete = await rest_of(client)
        assert not complete
        error_in(dialect, signs + body)


@pytest.mark.parametrize("way", ["reset", "close"])
@run_async
async def test_a_client_that_leaves_between_two_signs_of_life_is_out_of_the_queue_at_once(way):
    async with bench(keepalive_interval=INTERVAL) as b:
        b.engine.answer()
        async with held(b) as end:
            client = await waiting_client(b, post("/v1/chat/completions", STREAM))
            await hears(client, 1)
            getattr(client, way)()
            await until(lambda: not b.view.waiting, 0.1)
            await asyncio.sleep(INTERVAL * 2)
            end()
        assert not b.engine.seen
