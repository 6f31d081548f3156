"""How answers end: a complete one is complete, and a cut one can never be taken for complete.

The oracle is h11, which reads what the client got: a cut answer must never reach its `EndOfMessage`. Where the gate
puts an error into a stream, it stands between two events, in the caller's own dialect, and an abort follows it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any

import anthropic
import h11
import httpx
import ollama
import openai
import pytest

from tests.aio import run_async, until
from tests.gateway.bench import NDJSON, OK, SSE, Bench, bench, chunk, get, post

CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


@dataclass(frozen=True)
class Kind:
    path: str
    head: bytes
    event: bytes
    line_end: bytes  # what ends an event

    def error_in(self, text: bytes) -> dict[str, Any] | None:
        """The error that `text`, one whole event, tells a client of this kind."""
        lines = text.decode().splitlines()
        if self.path == "/api/chat":
            [line] = lines
            error = json.loads(line)
            return error if isinstance(error.get("error"), str) and "done" not in error else None
        if self.path == "/v1/messages":
            assert lines[0] == "event: error"
            lines = lines[1:]
        data, *rest = lines
        assert data.startswith("data: ")
        assert not any(rest)
        error = json.loads(data[6:])
        if self.path == "/v1/messages":
            assert error["type"] == "error"
            assert error["error"]["type"] == "api_error"
        return error if isinstance(error["error"]["message"], str) else None


KINDS = {
    "openai": Kind("/v1/chat/completions", SSE, 'data: {"c":"日本"}\n\n'.encode(), b"\n\n"),
    "openai, CRLF": Kind("/v1/chat/completions", SSE, b'data: {"c":"x"}\r\n\r\n', b"\r\n\r\n"),
    "anthropic": Kind("/v1/messages", SSE, b'event: ping\ndata: {"type":"ping"}\n\n', b"\n\n"),
    "ollama": Kind("/api/chat", NDJSON, b'{"message":{"content":"x"},"done":false}\n', b"\n"),
}
every_kind = pytest.mark.parametrize("name", KINDS)
every_death = pytest.mark.parametrize("death", ["reset", "close"])


def read_strictly(data: bytes) -> tuple[int, bytes, bool]:
    """(status, body, whether it is complete) of what a client got before the connection was cut."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 24)
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data)
    status, body = 0, b""
    while True:
        event = parser.next_event()
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return status, body, True
        elif event is h11.NEED_DATA:
            return status, body, False


async def cut_answer(b: Bench, pieces: list[bytes], death: str, path: str = "/api/chat") -> tuple[bytes, bool]:
    """What a client gets of an engine that sends `pieces`, each after the client has the one before, and dies."""
    go = asyncio.Event()

    async def die(connection, seen):
        for piece in pieces:
            await connection.send(piece)
            await go.wait()
            go.clear()
        getattr(connection, death)()

    b.engine.script(die)
    client = await b.client()
    await client.send(post(path, CHAT))
    got, ended = b"", False
    sizes = [len(piece) for piece in pieces]
    while not ended:
        if sizes:
            head_grew = b"\r\n\r\n" in got
            want = sum(sizes[:1])
            before = len(got)
            if not head_grew:
                got += await client.reader.readuntil(b"\r\n\r\n")
            else:
                while len(got) - before < want:
                    data = await client.read()
                    assert data, "the connection ended before the engine died"
                    got += data
            sizes.pop(0)
            go.set()
        else:
            rest, reset = await client.read_all()
            return got + rest, reset
    raise AssertionError


# ---------------------------------------------------------------------------------------- cut answers

EVENT = b"data: 0123456789\n\n"
CUTS = {
    "right after the head": [],
    "inside a size line": [chunk(EVENT), b"1"],
    "before a size line's LF": [chunk(EVENT), b"12\r"],
    "inside a chunk": [chunk(EVENT), b"12\r\ndata: 01"],
    "before a chunk's CRLF": [chunk(EVENT), b"12\r\n" + EVENT],
    "before a chunk's LF": [chunk(EVENT), b"12\r\n" + EVENT + b"\r"],
    "between two chunks": [chunk(EVENT)],
    "between two chunks, inside an event": [chunk(EVENT), chunk(b"data: 01")],
    "between two chunks, inside an event's line ends": [chunk(EVENT), chunk(b"data: 01\n")],
    "inside the last chunk's size": [chunk(EVENT), b"0"],
    "before the last chunk's LF": [chunk(EVENT), b"0\r"],
    "after the last chunk's line": [chunk(EVENT), b"0\r\n"],
    "before the very last LF": [chunk(EVENT), b"0\r\n\r"],
    "inside a trailer": [chunk(EVENT), b"0\r\nX-A: b\r\n"],
}


@every_death
@pytest.mark.parametrize("head", [SSE, NDJSON, JSON], ids=["sse", "ndjson", "json"])
@pytest.mark.parametrize("place", CUTS)
@run_async
async def test_a_chunked_answer_cut_anywhere_is_never_complete(place, head, death):
    async with bench() as b:
        data, _ = await cut_answer(b, [head, *CUTS[place]], death)
        status, body, complete = read_strictly(data)
        assert (status, complete) == (200, False)
        sent = b"".join(CUTS[place])
        assert data.partition(b"\r\n\r\n")[2].startswith(sent)
        assert b"[DONE]" not in body
        assert b'"done":true' not in body.replace(b" ", b"")
        assert b"finish_reason" not in body
        assert b.gateway.counts.died_midstream == 1


@every_death
@every_kind
@pytest.mark.parametrize("count", [0, 1, 3])
@run_async
async def test_a_stream_cut_between_events_tells_the_caller_in_its_own_dialect(name, count, death):
    kind = KINDS[name]
    async with bench() as b:
        data, _ = await cut_answer(b, [kind.head, *[chunk(kind.event)] * count], death, kind.path)
        _, body, complete = read_strictly(data)
        assert not complete
        assert body.startswith(kind.event * count)
        added = body[len(kind.event) * count :].strip()
        error = kind.error_in(added)
        assert error is not None
        assert "engine" in json.dumps(error)
        assert b.gateway.counts.died_midstream == 1


INSIDE = [b"d", b"data: 1", b"data: 1\n", b"event: x\n", b": comment\n", b"id: 1\r\n", b"\xe6\x97"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("part", INSIDE)
@run_async
async def test_nothing_is_put_into_an_event_that_was_cut(path, part):
    """Ending a half event with an empty line would make a decoder take the half for the whole."""
    async with bench() as b:
        data, _ = await cut_answer(b, [SSE, chunk(EVENT), chunk(part)], "reset", path)
        _, body, complete = read_strictly(data)
        assert not complete
        assert body == EVENT + part


@pytest.mark.parametrize("part", [b"{", b'{"message":{"content":"x"},"done":false}', b'{"a":"\xe6'])
@run_async
async def test_nothing_is_put_into_a_line_that_was_cut(part):
    line = b'{"message":{"content":"x"},"done":false}\n'
    async with bench() as b:
        data, _ = await cut_answer(b, [NDJSON, chunk(line), chunk(part)], "reset")
        _, body, complete = read_strictly(data)
        assert not complete
        assert body == line + part


@pytest.mark.parametrize("sizes", [[1], [5, 1], [17, 1], [18], [9, 9]])
@run_async
async def test_an_event_that_came_in_several_chunks_still_has_its_end_found(sizes):
    parts, position = [], 0
    for size in sizes:
        parts.append(EVENT[position : position + size])
        position += size
    async with bench() as b:
        data, _ = await cut_answer(b, [SSE, *map(chunk, parts)], "reset", "/v1/chat/completions")
        _, body, _ = read_strictly(data)
        whole = position == len(EVENT)
        assert body.startswith(b"".join(parts))
        assert (b'"error"' in body) == whole


@run_async
async def test_nothing_is_put_into_a_compressed_stream():
    async with bench() as b:
        head = SSE[:-2] + b"Content-Encoding: gzip\r\n\r\n"
        data, _ = await cut_answer(b, [head, chunk(b"\x1f\x8b\x08\n\n")], "reset", "/v1/chat/completions")
        assert data.endswith(chunk(b"\x1f\x8b\x08\n\n"))


@every_death
@run_async
async def test_an_answer_shorter_than_its_length_is_never_complete(death):
    async with bench() as b:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\n"
        data, _ = await cut_answer(b, [head, b"data: 1\n\n"], death)
        _, body, complete = read_strictly(data)
        assert not complete
        assert len(body) < 1000
        assert b.gateway.counts.died_midstream == 1


@pytest.mark.parametrize("kind", ["text/event-stream", "application/x-ndjson", "application/json"])
@run_async
async def test_a_close_delimited_answer_cut_by_a_reset_ends_with_a_reset(kind):
    """There a plain end of the connection is the end of the answer."""
    async with bench() as b:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n" % kind.encode()
        data, reset = await cut_answer(b, [head, b'{"a":1}\n\n'], "reset")
        assert reset
        assert data.startswith(b"HTTP/1.1 200 ")
        assert b.gateway.counts.died_midstream == 1


@every_death
@every_kind
@run_async
async def test_a_cut_stream_to_an_http_1_0_client_ends_with_a_reset(name, death):
    kind = KINDS[name]
    async with bench() as b:
        go = asyncio.Event()

        async def die(connection, seen):
            await connection.send(kind.head + chunk(kind.event))
            await go.wait()
            getattr(connection, death)()

        b.engine.script(die)
        client = await b.client()
        await client.send(b"POST %s HTTP/1.0\r\nContent-Length: 13\r\n\r\n" % kind.path.encode() + b'{"model":"m"}')
        await client.read_until(kind.event)
        go.set()
        _, reset = await client.read_all()
        assert reset


@pytest.mark.parametrize(
    "garbage", [b"zz\r\n", b"-1\r\n", b"12\n", b"0x12\r\n", b" 12\r\n", b"1_2\r\n", b"\r\n", b"f" * 17 + b"\r\n"]
)
@pytest.mark.parametrize("before", [chunk(EVENT), b""], ids=["own packet", "behind the rest of a chunk"])
@run_async
async def test_broken_framing_cuts_the_answer_and_an_error_never_lands_inside_a_chunk(garbage, before):
    whole = chunk(EVENT)
    async with bench() as b:
        pieces = [SSE, whole, garbage] if before else [SSE, whole[:8], whole[8:] + garbage]
        go = asyncio.Event()

        async def send(connection, seen):
            await connection.send(pieces[0] + pieces[1])
            await go.wait()
            await connection.send(pieces[2])
            await connection.closed.wait()

        b.engine.script(send)
        client = await b.client()
        await client.send(post("/v1/chat/completions", CHAT))
        got = await client.read_until(pieces[1])
        go.set()
        rest, _ = await client.read_all()
        _, body, complete = read_strictly(got + rest)
        assert not complete
        first, _, added = body.partition(b"\n\n")
        assert EVENT.startswith(first[: len(EVENT)])
        assert b"error" not in first
        assert not added.strip() or KINDS["openai"].error_in(added.strip())
        assert b.gateway.counts.died_midstream == 1


# ------------------------------------------------------------------------------ before the answer began

HEADS = [b"", b"H", b"HTTP/1.1 200 OK\r\nContent-Type: te", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r"]


@every_death
@pytest.mark.parametrize("part", HEADS)
@run_async
async def test_an_engine_that_dies_before_its_answers_body_is_a_502_and_not_asked_again(part, death):
    async with bench() as b:

        async def die(connection, seen):
            if part:
                await connection.send(part)
            getattr(connection, death)()

        b.engine.script(die)
        status, headers, body = await b.ask(post("/v1/chat/completions", CHAT))
        assert (status, headers["x-turnstile-error"]) == (502, "upstream_died")
        assert json.loads(body)["error"]["message"]
        assert len(b.engine.seen) == 1
        assert b.gateway.counts.died_midstream == 0


BAD_HEADS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhello",
    b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\nhello",
    b"HTTP/2 200 OK\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
]


@pytest.mark.parametrize("answer", BAD_HEADS, ids=[h[:60].decode("latin-1") for h in BAD_HEADS])
@run_async
async def test_an_answer_that_two_readers_could_frame_differently_is_a_502(answer):
    async with bench() as b:
        b.engine.answer(answer)
        status, headers, _ = await b.ask(post("/api/chat", CHAT))
        assert (status, headers["x-turnstile-error"]) == (502, "upstream_died")


# ------------------------------------------------------------------------------------ more than an answer

ONE = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\none"
TOO_MUCH = {
    "more than its length": ONE + b" and more",
    "two answers": ONE + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\ntwo",
    "garbage behind it": ONE + b"\x00\xff\r\n",
    "an empty line behind it": ONE + b"\r\n",
    "garbage behind a chunked one": SSE + b"3\r\none\r\n0\r\n\r\nGARBAGE",
    "an answer behind a chunked one": SSE + b"3\r\none\r\n0\r\n\r\n" + OK,
    "a body behind a 204": b"HTTP/1.1 204 No Content\r\n\r\nsurprise",
    "a body behind a 304": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 8\r\n\r\nsurprise",
}


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "a moment later"])
@pytest.mark.parametrize("case", TOO_MUCH)
@run_async
async def test_what_comes_behind_an_answer_reaches_nobody(case, apart):
    data = TOO_MUCH[case]
    size = (
        len(ONE)
        if data.startswith(ONE)
        else data.find(b"0\r\n\r\n") + 5
        if data.startswith(SSE)
        else data.find(b"\r\n\r\n") + 4
    )
    async with bench() as b:
        served = 0

        async def answer(connection, seen):
            nonlocal served
            served += 1
            if served == 2:
                await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecond")
            elif apart:
                await connection.send(data[:size])
                await asyncio.sleep(0.01)
                await connection.send(data[size:])
            else:
                await connection.send(data)

        b.engine.script(answer)
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        status, _, body = await client.response()
        assert body == (b"one" if status == 200 else b"")
        if apart:
            await until(lambda: b.engine.connections[0].closed.is_set())
        await client.send(post("/api/chat", CHAT))
        assert (await client.response())[2] == b"second"
        assert len(b.engine.connections) == 2


@run_async
async def test_a_head_answer_has_no_body_whatever_its_fields_say():
    async with bench() as b:
        b.engine.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        b.engine.answer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        b.engine.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        client = await b.client()
        for fields in (b"Content-Length: 1000", b"Transfer-Encoding: chunked"):
            await client.send(get("/api/tags", method="HEAD"))
            assert fields in await client.read_until(b"\r\n\r\n")
        await client.send(get("/api/tags"))
        assert (await client.read_until(b"ok")).endswith(b"\r\n\r\nok")


# ------------------------------------------------------------------------ answers before the request ended

REFUSAL = b"HTTP/1.1 413 Too Big\r\nContent-Length: 8\r\nConnection: close\r\n\r\ntoo big!"


async def upload_to(b: Bench, port: int, head: bytes, size: int) -> bytes:
    """A client as simple ones are: it sends all it has, or as much as it can, and then reads."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        try:
            await loop.sock_sendall(sock, head + b"\r\nContent-Length: %d\r\n\r\n" % size)
            for _ in range(size // 65536):
                await loop.sock_sendall(sock, b"z" * 65536)
        except ConnectionError:
            pass
        got = b""
        while b"\r\n\r\n" not in got or not got.endswith((b"!", b"}")):
            data = await loop.sock_recv(sock, 65536)
            if not data:
                break
            got += data
        return got


@pytest.mark.parametrize("size", [1 << 20, 32 << 20])
@run_async
async def test_an_engines_answer_before_the_upload_was_complete_reaches_the_client(size):
    async with bench() as b:
        gone = asyncio.Event()

        async def early(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(REFUSAL)
            writer.write_eof()
            while await reader.read(65536):
                pass
            gone.set()
            writer.close()

        server = await asyncio.start_server(early, "127.0.0.1", 0)
        b.comfy_engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        got = await upload_to(b, b.comfy_port, b"POST /upload/image HTTP/1.1\r\nHost: g", size)
        assert got.startswith(b"HTTP/1.1 413 Too Big\r\n")
        assert got.endswith(b"too big!")
        await asyncio.wait_for(gone.wait(), 1)
        server.close()


@pytest.mark.parametrize("expect", [b"", b"\r\nExpect: 100-continue"], ids=["", "Expect"])
@run_async
async def test_the_gates_own_refusal_of_an_upload_reaches_a_client_that_sends_on(expect):
    async with bench(body_limit=1000) as b:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g" + expect
        got = await upload_to(b, b.port, head, 16 << 20)
        assert got.startswith(b"HTTP/1.1 413 ")
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_large"
        assert not b.engine.seen


@run_async
async def test_an_answer_before_the_upload_ends_does_not_end_the_connection_in_the_middle_of_it():
    """The engine goes on reading; nothing of the body may be taken for a next request."""
    async with bench() as b:

        async def early(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok!")
            await reader.read(-1)
            writer.close()

        server = await asyncio.start_server(early, "127.0.0.1", 0)
        b.comfy_engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        smuggled = post("/prompt", {"prompt": {}})
        client = await b.client(b.comfy_port)
        await client.send(b"POST /upload/image HTTP/1.1\r\nHost: g\r\nContent-Length: 100000\r\n\r\n")
        got = await client.read_until(b"ok!")
        await client.send(smuggled)
        rest, _ = await client.read_all()
        assert rest == b""
        assert got.count(b"HTTP/1.1") == 1
        assert not b.view.leases
        server.close()


# ---------------------------------------------------------------------------------------- client libraries


async def _openai(b: Bench) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{b.port}/v1", api_key="k", max_retries=0) as client:
        async for _ in await client.chat.completions.create(**CHAT):
            pass


async def _anthropic(b: Bench) -> None:
    async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{b.port}", api_key="k", max_retries=0) as client:
        stream = await client.messages.create(max_tokens=9, **CHAT)
        async for _ in stream:
            pass


async def _ollama(b: Bench) -> None:
    async for _ in await ollama.AsyncClient(f"http://127.0.0.1:{b.port}").chat(**CHAT):
        pass


async def _httpx(b: Bench) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post(f"http://127.0.0.1:{b.port}/api/chat", json=CHAT)


OPENAI_EVENT = b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[]}\n\n'
OLLAMA_LINE = (
    b'{"model":"m","created_at":"2024-01-01T00:00:00Z","message":{"role":"assistant","content":"x"},"done":false}\n'
)
LIBRARIES = {
    "openai": (_openai, SSE, OPENAI_EVENT, openai.APIError),
    "anthropic": (_anthropic, SSE, b'event: ping\ndata: {"type":"ping"}\n\n', anthropic.APIError),
    "ollama": (_ollama, NDJSON, OLLAMA_LINE, ollama.ResponseError),
    "httpx": (_httpx, SSE, b"data: 1\n\n", httpx.RemoteProtocolError),
}


@every_death
@pytest.mark.parametrize("inside", [False, True], ids=["between events", "inside an event"])
@pytest.mark.parametrize("library", LIBRARIES)
@run_async
async def test_a_client_library_raises_when_its_stream_was_cut(library, inside, death):
    use, head, event, error = LIBRARIES[library]
    async with bench() as b:

        async def die(connection, seen):
            await connection.send(head + chunk(event) + (chunk(event)[:-20] if inside else b""))
            await asyncio.sleep(0.01)  # so that the reset does not overtake the bytes
            getattr(connection, death)()

        b.engine.script(die)
        with pytest.raises(Exception) as raised:  # noqa: PT011 (each library has its own HTTP client's errors as well)
            await use(b)
        of_the_transport = any(base.__name__ == "TransportError" for base in type(raised.value).__mro__)
        assert isinstance(raised.value, error) or (inside and of_the_transport), repr(raised.value)
        if not inside and library != "httpx":
            assert "engine" in str(raised.value)
