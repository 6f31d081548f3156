"""Bytes of an answer arrive as they were flushed, when they were flushed; and whoever is slow slows only himself.

Most tests run in step: the engine flushes a piece only after the client has every byte of the pieces before it. A gate
that holds anything back, for whatever reason, stops such a test for good; no clock is needed to see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import itertools
import socket
import time
import zlib
from collections.abc import Iterable

import pytest

from tests.aio import run_async, until
from tests.gateway import soak
from tests.gateway.bench import NDJSON, OK, SSE, bench, chunk, get, post

CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"

KINDS = {
    "openai": ("/v1/chat/completions", SSE, b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n'),
    "anthropic": ("/v1/messages", SSE, b'event: content_block_delta\ndata: {"delta":{"text":"%s"}}\n\n'),
    "ollama": ("/api/chat", NDJSON, b'{"message":{"content":"%s"},"done":false}\n'),
    "plain": ("/completion", PLAIN, b"%s"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
STREAM_KINDS = ("openai", "anthropic", "ollama")


def events(kind: str, words: Iterable[str]) -> list[bytes]:
    form = KINDS[kind][2]
    return [form % word.encode() for word in words]


def cut(data: bytes, *places: int) -> list[bytes]:
    bounds = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds) if a != b]


def inside_characters(data: bytes) -> list[bytes]:
    """Cut before every byte that continues a UTF-8 character."""
    return cut(data, *(n for n, byte in enumerate(data) if byte & 0xC0 == 0x80))


def between_line_ends(data: bytes) -> list[bytes]:
    return cut(data, *(n + 1 for n in range(len(data) - 1) if data[n] in b"\r\n" and data[n + 1] in b"\r\n"))


def inside_size_lines(data: bytes) -> list[bytes]:
    """Cut `1a\\r\\n` into single bytes, wherever a chunk begins."""
    places, position = [], 0
    while position < len(data):
        end = data.index(b"\r\n", position) + 2
        places += range(position, end + 1)
        size = int(data[position : end - 2].split(b";")[0], 16)
        position = end + size + 2
    return cut(data, *(p for p in places if 0 < p < len(data)))


async def in_step(kind: str, pieces: list[bytes], head: bytes | None = None) -> bytes:
    """Flush `pieces` one by one, each after the client has the one before; returns the head the client got."""
    path, own_head, _ = KINDS[kind]
    async with bench() as b:
        got = asyncio.Event()
        got.set()

        async def stream(connection, seen):
            for piece in (head or own_head, *pieces):
                await got.wait()
                got.clear()
                await connection.send(piece)

        b.engine.script(stream)
        client = await b.client()
        await client.send(post(path, CHAT))
        head_seen = await client.reader.readuntil(b"\r\n\r\n")
        for number, piece in enumerate(pieces):
            got.set()
            try:
                async with asyncio.timeout(3):
                    assert await client.reader.readexactly(len(piece)) == piece
            except TimeoutError:
                raise AssertionError(f"flush {number} was held back: {piece[:60]!r}") from None
        return head_seen


def fields(head: bytes) -> list[tuple[bytes, bytes]]:
    lines = head.strip().split(b"\r\n")[1:]
    return [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]


# ---------------------------------------------------------------------------------------------- unbuffered


@every_kind
@run_async
async def test_each_of_twenty_events_arrives_within_50_ms_of_its_flush(kind):
    path, head, _ = KINDS[kind]
    flushes = [chunk(event) for event in events(kind, [f"wörd {n} 世界" for n in range(20)])]
    sent: list[float] = []
    async with bench() as b:

        async def stream(connection, seen):
            await connection.send(head)
            for flush in flushes:
                sent.append(time.monotonic())
                await connection.send(flush)
                await asyncio.sleep(0.01)  # the interval between two tokens
            await connection.send(LAST)

        b.engine.script(stream)
        client = await b.client()
        await client.send(post(path, CHAT))
        await client.reader.readuntil(b"\r\n\r\n")
        delays = []
        for number, flush in enumerate(flushes):
            assert await client.reader.readexactly(len(flush)) == flush
            delays.append(time.monotonic() - sent[number])
        assert await client.reader.readexactly(5) == LAST
    assert max(delays) <= 0.05, delays


CUTS = {
    "event by event": lambda wire: [wire],
    "byte by byte": lambda wire: cut(wire, *range(1, len(wire))),
    "inside UTF-8 characters": inside_characters,
    "between two line ends": between_line_ends,
    "inside the chunks' size lines": inside_size_lines,
}


@every_kind
@pytest.mark.parametrize("place", CUTS)
@run_async
async def test_a_flush_that_ends_anywhere_is_passed_on_at_once(kind, place):
    pieces = []
    for event in events(kind, ("Grüße 世界 🚪", "", "b")):
        pieces += CUTS[place](chunk(event or b"\n"))
    await in_step(kind, [*pieces, LAST])


@run_async
async def test_chunk_extensions_and_trailers_are_passed_on_piece_by_piece():
    wire = b'3;x="y"\r\nabc\r\n0\r\nX-Checksum: 1\r\n\r\n'
    await in_step("openai", cut(wire, *range(1, len(wire))))


@every_kind
@run_async
async def test_a_line_of_a_megabyte_is_passed_on_while_it_grows(kind):
    line = events(kind, ["x" * 1_000_000 + "é"])[0]
    wire = chunk(line)
    await in_step(kind, [*cut(wire, *range(50_000, len(wire), 50_000)), chunk(line), LAST])


@every_kind
@run_async
async def test_many_chunks_that_come_in_one_packet_keep_their_order_and_their_number(kind):
    chunks = b"".join(chunk(event) for event in events(kind, [str(n) for n in range(500)]))
    await in_step(kind, [chunks, chunks + LAST])


@run_async
async def test_a_compressed_stream_arrives_flush_by_flush_and_stays_compressed():
    squeeze = zlib.compressobj(wbits=31)
    pieces = [squeeze.compress(b"data: %d\n\n" % n) + squeeze.flush(zlib.Z_SYNC_FLUSH) for n in range(5)]
    pieces.append(squeeze.flush())
    head = SSE[:-2] + b"Content-Encoding: gzip\r\n\r\n"
    await in_step("openai", [chunk(piece) for piece in pieces] + [LAST], head)
    assert gzip.decompress(b"".join(pieces)).count(b"data:") == 5


@pytest.mark.parametrize("kind", STREAM_KINDS)
@run_async
async def test_a_stream_with_a_known_length_is_not_held_back_until_it_is_whole(kind):
    body = b"".join(events(kind, ("a", "b", "c")))
    head = KINDS[kind][1].replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(body))
    await in_step(kind, cut(body, *range(1, len(body))), head)


@every_kind
@run_async
async def test_a_stream_that_ends_with_its_connection_is_passed_on_at_once_and_closes(kind):
    pieces = events(kind, ("a", "é", "c"))
    async with bench() as b:
        got = asyncio.Event()

        async def stream(connection, seen):
            await connection.send(KINDS[kind][1].replace(b"Transfer-Encoding: chunked\r\n", b""))
            for piece in pieces:
                await got.wait()
                got.clear()
                await connection.send(piece)
            connection.close()

        b.engine.script(stream)
        client = await b.client()
        await client.send(post(KINDS[kind][0], CHAT))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert (b"connection", b"close") in fields(head)
        assert b"content-length" not in dict(fields(head))
        assert b"transfer-encoding" not in dict(fields(head))
        for piece in pieces:
            got.set()
            assert await client.reader.readexactly(len(piece)) == piece
        assert await client.read_all() == (b"", False)


@every_kind
@run_async
async def test_an_http_1_0_client_gets_the_stream_without_chunks_and_at_once(kind):
    pieces = events(kind, ("a", "é", "c"))
    async with bench() as b:
        got = asyncio.Event()

        async def stream(connection, seen):
            await connection.send(KINDS[kind][1])
            for piece in pieces:
                for part in inside_size_lines(chunk(piece)):
                    await connection.send(part)
                await got.wait()
                got.clear()
            await connection.send(LAST)

        b.engine.script(stream)
        client = await b.client()
        payload = b'{"model": "m", "stream": true}'
        head = b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (KINDS[kind][0].encode(), len(payload))
        await client.send(head + payload)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding" not in dict(fields(head))
        for piece in pieces:
            async with asyncio.timeout(3):
                assert await client.reader.readexactly(len(piece)) == piece
            got.set()
        assert await client.read_all() == (b"", False)


# ------------------------------------------------------------------------------------------------- headers


@every_kind
@run_async
async def test_no_length_is_invented_for_a_stream(kind):
    head = await in_step(kind, [chunk(b"x"), LAST])
    names = [name for name, _ in fields(head)]
    assert b"content-length" not in names
    assert names.count(b"transfer-encoding") == 1


STREAM_TYPES = (
    b"text/event-stream",
    b"text/event-stream; charset=utf-8",
    b"text/event-stream;charset=UTF-8",
    b"Text/Event-Stream",
    b"application/x-ndjson",
    b"application/x-ndjson; charset=utf-8",
    b"Application/X-NDJSON",
)


@pytest.mark.parametrize("content_type", STREAM_TYPES)
@run_async
async def test_a_stream_tells_proxies_in_front_not_to_buffer_it(content_type):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % content_type
    seen = fields(await in_step("openai", [chunk(b"data: 1\n\n"), LAST], head))
    assert [value for name, value in seen if name == b"x-accel-buffering"] == [b"no"]


@pytest.mark.parametrize("value", [b"no", b"yes"])
@run_async
async def test_an_engine_that_speaks_of_buffering_itself_is_not_contradicted(value):
    head = SSE[:-2] + b"x-accel-buffering: " + value + b"\r\n\r\n"
    seen = fields(await in_step("openai", [chunk(b"data: 1\n\n"), LAST], head))
    assert [v for name, v in seen if name == b"x-accel-buffering"] == [value]


@pytest.mark.parametrize("head", [PLAIN, JSON], ids=["plain", "json"])
@run_async
async def test_an_answer_that_is_no_event_stream_gets_no_field_it_did_not_have(head):
    assert await in_step("plain", [chunk(b"{}"), LAST], head) == head


# -------------------------------------------------------------------------------------------- slow clients

BLOCK = 64 * 1024
HELD = 2 << 20  # bytes the gate may hold for one client that does not read
FULL = 64 * 1024  # above this a transport says that its client is slow


async def stalled(progress: list[int], seconds: float = 0.15) -> int:
    """Wait until `progress` has grown no more for a while; returns its length."""
    last, since = -1, time.monotonic()
    while time.monotonic() - since < seconds:
        if len(progress) != last:
            last, since = len(progress), time.monotonic()
        await asyncio.sleep(0.005)
    return last


def held_by(b) -> int:
    """Bytes of answers that wait in the gate for clients to read them."""
    return sum(c.transport.get_write_buffer_size() for c in b.gateway.connections)


@run_async
async def test_a_client_that_does_not_read_pauses_its_engine_and_nobody_else():
    blocks = 1024
    async with bench() as b:
        sent: list[int] = []
        digest = hashlib.sha256()

        async def flood(connection, seen):
            await connection.send(PLAIN)
            for n in range(blocks):
                data = chunk(n.to_bytes(4, "big") * (BLOCK // 4))
                digest.update(data)
                await connection.send(data)
                sent.append(n)
            await connection.send(LAST)
            digest.update(LAST)

        async def tick(connection, seen):
            await connection.send(SSE)
            for n in range(50):
                await connection.send(chunk(b"data: %d\n\n" % n))
                await asyncio.sleep(0)
            await connection.send(LAST)

        b.engine.script(flood).script(tick)
        slow = await b.client()
        slow.writer.transport.pause_reading()
        await slow.send(post("/completion", CHAT))
        stuck = await stalled(sent)
        assert stuck < blocks - 100
        assert held_by(b) <= HELD
        assert (await b.ask(post("/v1/chat/completions", CHAT)))[2].count(b"data:") == 50
        assert len(sent) == stuck
        slow.writer.transport.resume_reading()
        await slow.reader.readuntil(b"\r\n\r\n")
        got, size = hashlib.sha256(), 0
        while size < blocks * (BLOCK + 9) + len(LAST):
            data = await slow.reader.read(1 << 20)
            assert data
            got.update(data)
            size += len(data)
        assert got.digest() == digest.digest()


@run_async
async def test_a_client_that_asks_on_and_on_without_reading_fills_nothing():
    """Each answer by itself is small: what counts is what waits for the client in all."""
    body = b"x" * 100_000
    async with bench(quiet=False) as b:
        worst = 0

        async def small(connection, seen):
            nonlocal worst
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            worst = max(worst, held_by(b))

        b.engine.script(small)
        slow = await b.client()
        slow.writer.transport.pause_reading()
        asked = 400
        sending = asyncio.ensure_future(slow.send(get("/api/tags") * asked))
        await stalled(b.engine.seen)
        assert worst <= HELD, f"{worst} bytes wait in the gate after {len(b.engine.seen)} answers"
        slow.writer.transport.resume_reading()
        for _ in range(asked):
            await slow.reader.readuntil(b"\r\n\r\n")
            assert len(await slow.reader.readexactly(len(body))) == len(body)
        await sending


@run_async
async def test_a_stream_to_a_client_that_has_not_read_the_answers_before_pauses_its_engine():
    small, blocks = b"x" * 60_000, 512
    async with bench(quiet=False) as b:
        sent: list[int] = []

        async def answer(connection, seen):
            if seen.target == "/api/tags":
                await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(small) + small)
                return
            await connection.send(PLAIN)
            for n in range(blocks):
                await connection.send(chunk(b"y" * BLOCK))
                sent.append(n)
            await connection.send(LAST)

        b.engine.script(answer)
        slow = await b.client()
        sock = slow.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.writer.transport.pause_reading()
        while held_by(b) <= FULL:
            seen = len(b.engine.seen)
            await slow.send(get("/api/tags"))
            with contextlib.suppress(AssertionError):
                await until(lambda before=seen: len(b.engine.seen) > before, 0.5)
            if len(b.engine.seen) == seen:
                break  # the gate reads nothing more of this client
        await slow.send(post("/completion", CHAT))
        await stalled(sent)
        assert held_by(b) <= HELD
        assert len(sent) < blocks


@run_async
async def test_an_engine_that_takes_an_upload_slowly_pauses_its_client_and_nobody_else():
    size = 48 << 20
    async with bench() as b:
        go = asyncio.Event()
        got = hashlib.sha256()

        async def engine(reader, writer):
            writer.transport.pause_reading()
            await go.wait()
            writer.transport.resume_reading()
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"/upload/image" in head
            left = size
            while left:
                data = await reader.read(1 << 20)
                got.update(data)
                left -= len(data)
            writer.write(OK)

        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        b.comfy_engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        b.engine.answer()
        client = await b.client(b.comfy_port)
        await client.send(b"POST /upload/image HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % size)
        expected, sent = hashlib.sha256(), []

        async def upload():
            for n in range(size // BLOCK):
                data = n.to_bytes(4, "big") * (BLOCK // 4)
                expected.update(data)
                await client.send(data)
                sent.append(n)

        uploading = asyncio.ensure_future(upload())
        stuck = await stalled(sent)
        assert stuck < size // BLOCK // 2
        assert (await b.ask(post("/api/chat", CHAT)))[0] == 200
        assert len(sent) == stuck
        go.set()
        await uploading
        assert (await client.response())[0] == 200
        assert got.digest() == expected.digest()
        server.close()


@run_async
async def test_an_upload_waits_at_the_client_while_its_engine_is_being_connected():
    async with bench(backoff_initial=0.05) as b:
        await b.comfy.stop()
        b.comfy.answer()
        size = 24 << 20
        client = await b.client(b.comfy_port)
        sent: list[int] = []

        async def upload():
            await client.send(b"POST /upload/image HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % size)
            for n in range(size // BLOCK):
                await client.send(b"z" * BLOCK)
                sent.append(n)

        uploading = asyncio.ensure_future(upload())
        assert await stalled(sent) < size // BLOCK - 100
        await b.comfy.start()
        await uploading
        assert (await client.response(seconds=15))[0] == 200
        assert b.comfy.seen[0].body == b"z" * size


# -------------------------------------------------------------------------------------------------- load


@pytest.mark.timeout(60)
def test_two_hundred_streams_with_leaving_clients_lose_no_byte_and_leave_nothing_behind():
    result = soak.run(soak.Plan(streams=200, seconds=8, rate=20, drop=0.05))
    assert not result.problems, result.table()
