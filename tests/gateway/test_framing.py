"""Where bodies end, both ways: chunked requests, HTTP/1.0 clients, content codings, HEAD, trailers."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import brotli
import pytest

from tests.aio import run_async, until
from tests.gateway.bench import NDJSON, OK, SSE, bench, chunk, get, post, proved
from tests.gateway.oracle import h11_response, llhttp_response

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
BODY = json.dumps(CHAT).encode()
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding: chunked\r\n\r\n"


# ---------------------------------------------------------------------------------------- content codings

PACKED = {
    "gzip": gzip.compress(BODY),
    "deflate": zlib.compress(BODY),
    "br": brotli.compress(BODY),
    "zstd": b"\x28\xb5\x2f\xfd whatever the engine means by it",
    "x-unheard-of": b"\x00\xff\x00",
}


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("coding", PACKED)
@run_async
async def test_a_compressed_answer_passes_untouched_with_its_label(coding, status):
    async with bench() as b:
        body = PACKED[coding]
        answer = b"HTTP/1.1 %d X\r\nContent-Encoding: %s\r\nVary: Accept-Encoding\r\nContent-Length: %d\r\n\r\n%s"
        answer %= (status, coding.encode(), len(body), body)
        b.engine.answer(answer)
        client = await b.client()
        await client.send(post("/v1/chat/completions", CHAT, "Accept-Encoding: gzip, deflate, br"))
        assert await client.read_until(body) == answer
        assert b.engine.seen[0].header("accept-encoding") == "gzip, deflate, br"


@run_async
async def test_no_accept_encoding_is_added_for_a_client_that_sent_none():
    async with bench() as b:
        b.engine.answer()
        await b.ask(post("/v1/chat/completions", CHAT))
        assert b.engine.seen[0].header("accept-encoding") is None


@run_async
async def test_a_compressed_stream_arrives_flush_by_flush():
    async with bench() as b:
        go = asyncio.Event()
        packer = zlib.compressobj(wbits=31)
        pieces = [packer.compress(b"data: %d\n\n" % n) + packer.flush(zlib.Z_SYNC_FLUSH) for n in range(5)]

        async def stream(connection, seen):
            await connection.send(SSE.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"))
            for piece in pieces:
                await connection.send(chunk(piece))
                await go.wait()
                go.clear()
            await connection.send(chunk(packer.flush()) + b"0\r\n\r\n")

        b.engine.script(stream)
        client = await b.client()
        await client.send(post("/v1/chat/completions", CHAT))
        for piece in pieces:
            assert (await client.read_until(chunk(piece), 1)).endswith(chunk(piece))
            go.set()
        await client.read_until(b"\r\n0\r\n\r\n")


@run_async
async def test_an_answer_never_has_both_a_length_and_chunks():
    async with bench() as b:
        for answer in (OK, SSE + chunk(b"data: 1\n\n") + b"0\r\n\r\n"):
            b.engine.answer(answer)
        for _ in range(2):
            _, headers, _ = await b.ask(post("/v1/chat/completions", CHAT))
            assert ("content-length" in headers) != ("transfer-encoding" in headers)


# ------------------------------------------------------------------------------------------ HEAD and others


@pytest.mark.parametrize(
    "framing",
    ["Transfer-Encoding: chunked", "Content-Length: 1000", "Content-Encoding: gzip\r\nContent-Length: 9", "A: b"],
)
@run_async
async def test_an_answer_to_head_has_no_body_whatever_its_fields_say(framing):
    async with bench() as b:
        b.engine.answer(f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n".encode())
        client = await b.client()
        for _ in range(2):
            await client.send(get("/api/tags", method="HEAD"))
            head = await client.read_until(b"\r\n\r\n")
            assert head.endswith(b"\r\n\r\n")
            assert f"{framing}\r\n".encode() in head
            await proved()
        assert len(b.engine.connections) == 1 or framing == "A: b"


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("field", ["Content-Length: 5", "Transfer-Encoding: chunked", "A: b"])
@run_async
async def test_a_status_that_has_no_body_never_has_one(status, field):
    async with bench() as b:
        b.engine.answer(f"HTTP/1.1 {status} X\r\n{field}\r\n\r\n".encode())
        client = await b.client()
        for _ in range(2):
            await client.send(get("/api/tags"))
            assert (await client.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 %d " % status)


@run_async
async def test_interim_answers_are_no_answer():
    async with bench() as b:
        hints = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        b.engine.answer(hints + b"HTTP/1.1 100 Continue\r\n\r\n" + OK)
        assert (await b.ask(post("/api/chat", CHAT)))[2] == b"{}"
        client = await b.client()
        await client.send(post("/api/chat", CHAT).replace(b"HTTP/1.1", b"HTTP/1.0"))
        data, _ = await client.read_all()
        assert data.startswith(b"HTTP/1.1 200 ")
        assert data.count(b"HTTP/1.1 ") == 1


@run_async
async def test_an_answer_that_ends_with_its_connection_is_whole():
    async with bench() as b:

        async def until_close(connection, seen):
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it")
            connection.close()

        b.engine.script(until_close)
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        data, reset = await client.read_all()
        assert data.endswith(b"\r\n\r\nall of it")
        assert not reset
        assert h11_response(data, closed=True).complete


@run_async
async def test_the_trailers_of_an_answer_reach_the_client():
    async with bench() as b:
        end = b"0\r\nX-Sum: 1\r\n\r\n"
        b.engine.answer(b"HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"x") + end)
        client = await b.client()
        await client.send(post("/api/chat", CHAT, "TE: trailers"))
        assert (await client.read_until(end)).endswith(end)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@run_async
async def test_an_answer_may_come_in_any_pieces(size):
    answer = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"5;a=b\r\nhello\r\n"
        + chunk(b"\r\n0\r\n\r\n")
        + b"0\r\nA: b\r\n\r\n"
    )
    async with bench() as b:

        async def drip(connection, seen):
            for start in range(0, len(answer), size):
                await connection.send(answer[start : start + size])
                await asyncio.sleep(0)

        b.engine.script(drip)
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        assert await client.read_until(b"A: b\r\n\r\n") == answer


# ------------------------------------------------------------------------------------------ chunked requests


def only_lengths(answer: bytes = OK):
    """An engine that insists on a length, as mlx_lm does."""

    async def script(connection, seen):
        fine = seen.header("content-length") == str(len(seen.body)) and seen.header("transfer-encoding") is None
        await connection.send(answer if fine else b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n")

    return script


@pytest.mark.parametrize("extension", [b"", b";x", b";a=b", b';a="b"'])
@run_async
async def test_a_request_in_one_byte_chunks_reaches_its_engine_with_one_length(extension):
    async with bench() as b:
        b.engine.script(only_lengths())
        chunks = b"".join(b"1%s\r\n%c\r\n" % (extension, byte) for byte in BODY)
        assert (await b.ask(CHUNKED + chunks + b"0\r\nX-Trailer: t\r\n\r\n"))[0] == 200
        assert b.engine.seen[0].body == BODY
        assert b.engine.seen[0].header("x-trailer") is None


@run_async
async def test_a_chunked_request_may_come_byte_by_byte():
    async with bench() as b:
        b.engine.script(only_lengths())
        client = await b.client()
        for byte in CHUNKED + chunk(BODY) + b"0\r\n\r\n":
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.response())[0] == 200
        assert b.engine.seen[0].body == BODY


@run_async
async def test_an_empty_chunked_body_is_an_empty_body():
    async with bench() as b:
        b.engine.answer()
        assert (await b.ask(CHUNKED + b"0\r\n\r\n"))[0] in (200, 400)
        for seen in b.engine.seen:
            assert (seen.body, seen.header("content-length")) == (b"", "0")


@run_async
async def test_a_chunked_upload_that_is_not_work_passes_as_it_comes():
    async with bench() as b:
        b.comfy.answer()
        client = await b.client(b.comfy_port)
        head = CHUNKED.replace(b"/v1/chat/completions", b"/upload/image")
        await client.send(head + chunk(b"first"))
        await until(lambda: b.comfy.connections)
        await client.send(chunk(b"second") + b"0\r\nT: r\r\n\r\n")
        assert (await client.response())[0] == 200
        seen = b.comfy.seen[0]
        assert seen.body == b"firstsecond"
        assert (seen.header("transfer-encoding"), seen.header("content-length")) == ("chunked", None)


@run_async
async def test_a_chunked_request_and_the_next_one_in_the_same_packet_are_two():
    async with bench() as b:
        b.engine.script(only_lengths())
        client = await b.client()
        await client.send((CHUNKED + chunk(BODY) + b"0\r\n\r\n") * 3)
        for _ in range(3):
            await client.read_until(b"\r\n\r\n{}")
        await until(lambda: len(b.engine.seen) == 3)
        assert {s.body for s in b.engine.seen} == {BODY}


@pytest.mark.parametrize("framing", ["Content-Length: 2\r\nTransfer-Encoding: chunked", "Content-Length: 2, 2"])
@run_async
async def test_a_request_with_two_framings_is_refused_and_nothing_hangs(framing):
    async with bench() as b:
        client = await b.client()
        await client.send(f"POST /api/chat HTTP/1.1\r\nHost: g\r\n{framing}\r\n\r\n".encode() + b"0\r\n\r\n")
        data, _ = await client.read_all()
        assert data.startswith(b"HTTP/1.1 400 ")
        assert not b.engine.seen


@run_async
async def test_a_body_that_ends_early_reaches_nobody():
    async with bench() as b:
        client = await b.client()
        await client.send(b"POST /api/chat HTTP/1.1\r\nHost: g\r\nContent-Length: 1000\r\n\r\n" + BODY)
        client.writer.write_eof()
        await client.read_all()
        await until(lambda: not b.gateway.connections)
        assert not b.engine.seen


@run_async
async def test_an_upload_that_ends_early_is_never_a_complete_one_for_its_engine():
    async with bench() as b:
        b.comfy.answer()
        client = await b.client(b.comfy_port)
        await client.send(b"POST /upload/image HTTP/1.1\r\nHost: g\r\nContent-Length: 1000\r\n\r\nsome")
        await until(lambda: b.comfy.connections)
        client.close()
        await until(lambda: b.comfy.connections[0].closed.is_set(), 1)
        assert not b.comfy.seen


# ------------------------------------------------------------------------------------------------ HTTP/1.0


def old(keep_alive: bool) -> bytes:
    lines = [b"POST /api/chat HTTP/1.0", b"Content-Type: application/json", b"Content-Length: %d" % len(BODY)]
    return b"\r\n".join([*lines, *([b"Connection: keep-alive"] if keep_alive else []), b"", BODY])


@pytest.mark.parametrize("keep_alive", [False, True])
@run_async
async def test_an_http_1_0_client_gets_a_stream_without_chunks_that_ends_with_the_connection(keep_alive):
    async with bench() as b:
        go = asyncio.Event()

        async def stream(connection, seen):
            await connection.send(NDJSON + chunk(b'{"done":false}\n'))
            await go.wait()
            await connection.send(b"e;x\r\n" + b'{"done":true}\n\r\n' + b"0\r\nTrailer: t\r\n\r\n")

        b.engine.script(stream)
        client = await b.client()
        await client.send(old(keep_alive))
        head = await client.read_until(b'{"done":false}\n', 1)
        assert b"transfer-encoding" not in head.lower()
        assert b"content-length" not in head.lower()
        assert b"connection: close" in head.lower()
        assert head.endswith(b'\r\n\r\n{"done":false}\n')
        go.set()
        data, reset = await client.read_all()
        assert (data, reset) == (b'{"done":true}\n', False)
        assert b.engine.seen[0].raw.startswith(b"POST /api/chat HTTP/1.1\r\n")
        assert b.engine.seen[0].header("host") is not None


@pytest.mark.parametrize("keep_alive", [False, True])
@run_async
async def test_an_http_1_0_client_with_a_length_keeps_its_connection_if_it_asked_to(keep_alive):
    async with bench() as b:
        b.engine.answer()
        client = await b.client()
        for _ in range(2 if keep_alive else 1):
            await client.send(old(keep_alive))
            head = await client.read_until(b"\r\n\r\n{}")
            assert (b"connection: keep-alive" in head.lower()) == keep_alive
        if not keep_alive:
            assert await client.read() == b""


@run_async
async def test_a_stream_to_an_http_1_0_client_that_is_cut_ends_in_a_reset():
    """It has no other way to tell a cut answer from a whole one."""
    async with bench() as b:

        async def die(connection, seen):
            await connection.send(NDJSON + chunk(b'{"done":false}\n'))
            await asyncio.sleep(0.02)
            connection.reset()

        b.engine.script(die)
        client = await b.client()
        await client.send(old(False))
        data, reset = await client.read_all()
        assert reset or b'"error"' in data
        assert b'"done":true' not in data


@run_async
async def test_an_error_for_an_http_1_0_client_has_a_length_and_ends():
    async with bench() as b:
        client = await b.client()
        await client.send(old(False).replace(BODY, b"{" * len(BODY)))
        data, _ = await client.read_all()
        assert data.startswith(b"HTTP/1.1 400 ")
        assert llhttp_response(data).complete


@run_async
async def test_an_engine_of_http_1_0_is_understood():
    async with bench() as b:

        async def answer(connection, seen):
            await connection.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nold")
            connection.close()

        b.engine.script(answer)
        b.engine.answer(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nold")
        for _ in range(2):
            client = await b.client()
            await client.send(post("/api/chat", CHAT))
            assert (await client.read_until(b"old")).startswith(b"HTTP/1.1 200 OK\r\n")
