"""A client that leaves, in whatever way and at whatever moment, is out of every queue and count at once.

Its engine's request is cancelled, nothing of it reaches an engine afterwards, and the next request is served. A client
that only closes its sending side (half-close) has left as well: that is documented. The one exception is an image job
that was sent: ComfyUI runs it all the same, so its lease lives until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from tests.aio import run_async, until
from tests.gateway.bench import OK, SSE, Bench, RawClient, bench, chunk, post

CHAT = {"model": "m", "messages": []}
PROMPT = {"prompt": {}}
AT_ONCE = 0.1  # seconds


def leave_by_reset(client: RawClient) -> None:
    client.reset()


def leave_by_close(client: RawClient) -> None:
    client.close()


def leave_by_half_close(client: RawClient) -> None:
    client.writer.write_eof()


WAYS = {"reset": leave_by_reset, "close": leave_by_close, "half-close": leave_by_half_close}
every_way = pytest.mark.parametrize("way", WAYS)


async def at_once(condition: Callable[[], object]) -> None:
    """`condition` must come true within 100 ms. A pause of the whole test process does not count as the gate's."""
    left = AT_ONCE
    clock = asyncio.get_running_loop().time
    while not condition():
        assert left > 0, "not at once"
        before = clock()
        await asyncio.sleep(0.002)
        left -= min(clock() - before, 0.01)


async def gone(b: Bench) -> None:
    """Nobody waits, nothing is in flight, and the gate holds no connection for anybody."""
    await at_once(lambda: not b.view.waiting and not b.view.leases)
    await at_once(lambda: not b.gateway.connections)


async def serves(b: Bench) -> None:
    """A plain fresh request is answered."""
    b.engine._scripts.clear()
    b.engine.answer()
    assert (await b.ask(post("/api/chat", CHAT)))[0] == 200


@contextlib.asynccontextmanager
async def rendering(b: Bench) -> AsyncIterator[Callable[[], None]]:
    """An image job holds the card; calling what is yielded ends it."""
    go = asyncio.Event()

    async def render(connection, seen):
        await go.wait()
        await connection.send(OK)

    b.comfy.script(render)
    artist = await b.client(b.comfy_port)
    await artist.send(post("/prompt", PROMPT))
    await until(lambda: b.view.leases and b.comfy.seen)
    yield go.set
    go.set()
    assert (await artist.response())[0] == 200
    artist.close()


# --------------------------------------------------------------------------------------- moment by moment


@every_way
@pytest.mark.parametrize("part", [b"", b"P", b"POST /api/chat HTTP/1.1\r\nHost: g\r\nContent-Le"])
@run_async
async def test_leaving_in_the_head_leaves_nothing(way, part):
    async with bench() as b:
        client = await b.client()
        await client.send(part)
        await until(lambda: b.gateway.connections)
        WAYS[way](client)
        await gone(b)
        assert not b.engine.connections
        await serves(b)


@every_way
@run_async
async def test_leaving_in_the_middle_of_a_body_asks_for_nothing(way):
    async with bench() as b:
        client = await b.client()
        await client.send(post("/api/chat", raw=b"{" * 1_000_000)[:10_000])
        await until(lambda: b.gateway.connections)
        WAYS[way](client)
        await gone(b)
        assert not b.engine.connections
        await serves(b)


@every_way
@run_async
async def test_leaving_in_the_middle_of_an_upload_ends_it_at_the_engine(way):
    async with bench() as b:
        b.comfy.answer()
        client = await b.client(b.comfy_port)
        await client.send(b"POST /upload/image HTTP/1.1\r\nHost: g\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 10_000)
        await until(lambda: b.comfy.connections)
        WAYS[way](client)
        await at_once(lambda: b.comfy.connections[0].closed.is_set())
        await gone(b)
        assert not b.comfy.seen
        await serves(b)


@pytest.mark.parametrize("way", ["reset"])  # a plain end is not sent before the bytes in front of it
@run_async
async def test_leaving_while_the_engine_holds_the_upload_up_ends_it(way):
    async with bench() as b:

        async def deaf(reader, writer):
            writer.transport.pause_reading()
            heard.append(writer)
            await asyncio.sleep(60)

        heard: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(deaf, "127.0.0.1", 0)
        b.comfy_engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = await b.client(b.comfy_port)
        sending = asyncio.ensure_future(
            client.send(
                b"POST /upload/image HTTP/1.1\r\nHost: g\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 40_000_000
            )
        )
        await until(lambda: heard)
        await asyncio.sleep(0.1)  # until every buffer is full
        WAYS[way](client)
        await gone(b)
        sending.cancel()
        server.close()
        heard[0].transport.abort()


@every_way
@run_async
async def test_leaving_the_queue_behind_an_image_job_is_never_sent(way):
    async with bench() as b:
        async with rendering(b):
            client = await b.client()
            await client.send(post("/api/chat", CHAT))
            await until(lambda: b.view.waiting)
            WAYS[way](client)
            await at_once(lambda: not b.view.waiting)
        await serves(b)
        assert len(b.engine.seen) == 1


@every_way
@run_async
async def test_leaving_while_the_engine_is_being_brought_in_is_never_sent(way):
    """The swap ends for nobody; whoever comes next finds the gate working."""
    async with bench() as b:
        await serves(b)
        b.ollama_engine.release_gate = asyncio.Event()
        b.comfy.answer()
        image = await b.client(b.comfy_port)
        await image.send(post("/prompt", PROMPT))
        await until(lambda: b.ollama_engine.released)
        WAYS[way](image)
        await at_once(lambda: not b.view.waiting)
        b.ollama_engine.release_gate.set()
        await serves(b)
        assert not b.comfy.seen


@contextlib.contextmanager
def full_listener():
    """A port where connecting neither succeeds nor fails: its backlog is full."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener


@every_way
@run_async
async def test_leaving_while_the_engine_is_being_connected_ends_that(way):
    async with bench() as b:
        with full_listener() as listener:
            b.ollama_engine.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            client = await b.client()
            await client.send(post("/api/chat", CHAT))
            await until(lambda: b.view.leases)
            await asyncio.sleep(0.02)
            assert b.view.leases
            WAYS[way](client)
            await gone(b)
        b.ollama_engine.url = b.engine.url
        await serves(b)


@every_way
@run_async
async def test_leaving_between_two_tries_ends_them(way):
    async with bench(backoff_initial=0.02, backoff_max=0.02) as b:
        await b.engine.stop()
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        await until(lambda: b.gateway.counts.unreachable >= 2)
        WAYS[way](client)
        await gone(b)
        tried = b.gateway.counts.unreachable
        await b.engine.start()
        await serves(b)
        assert b.gateway.counts.unreachable == tried
        assert len(b.engine.seen) == 1


@every_way
@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_leaving_in_prefill_cancels_the_engines_request(way, stream):
    async with bench() as b:

        async def prefill(connection, seen):
            await connection.closed.wait()

        b.engine.script(prefill)
        client = await b.client()
        await client.send(post("/v1/chat/completions", {**CHAT, "stream": stream}))
        await until(lambda: b.engine.seen)
        WAYS[way](client)
        await at_once(lambda: b.engine.connections[0].closed.is_set())
        await gone(b)
        await serves(b)
        assert b.gateway.counts.died_midstream == 0


@every_way
@run_async
async def test_leaving_in_prefill_after_sending_much_ahead_cancels_all_of_it(way):
    """A client that pipelines has its connection paused; its leaving must be seen all the same."""
    async with bench() as b:

        async def prefill(connection, seen):
            await connection.closed.wait()

        b.engine.script(prefill)
        client = await b.client()
        await client.send(post("/v1/chat/completions", CHAT))
        await until(lambda: b.engine.seen)
        await client.send(post("/v1/chat/completions", {**CHAT, "x": "y" * 200_000}))
        await asyncio.sleep(0.02)  # the gate takes what it takes
        WAYS[way](client)
        await at_once(lambda: b.engine.connections[0].closed.is_set())
        await gone(b)
        assert len(b.engine.seen) == 1
        await serves(b)


@every_way
@run_async
async def test_leaving_a_stream_cancels_the_engines_request(way):
    async with bench() as b:

        async def endless(connection, seen):
            await connection.send(SSE)
            while not connection.closed.is_set():
                await connection.send(chunk(b"data: 1\n\n"))
                await asyncio.sleep(0.005)

        b.engine.script(endless)
        client = await b.client()
        await client.send(post("/v1/chat/completions", CHAT))
        await client.read_until(b"data: 1")
        WAYS[way](client)
        await at_once(lambda: b.engine.connections[0].closed.is_set())
        await gone(b)
        await serves(b)
        assert b.gateway.counts.died_midstream == 0


@every_way
@run_async
async def test_leaving_a_stream_that_was_not_read_cancels_the_engines_request(way):
    """With its buffers full the gate has bytes for the client that it can never write."""
    async with bench() as b:

        async def flood(connection, seen):
            await connection.send(SSE)
            while not connection.closed.is_set():
                await connection.send(chunk(b"data: " + b"x" * 65536 + b"\n\n"))

        b.engine.script(flood)
        client = await b.client()
        client.writer.transport.pause_reading()
        await client.send(post("/v1/chat/completions", CHAT))
        await until(lambda: any(c.transport.get_write_buffer_size() for c in b.gateway.connections))
        WAYS[way](client)
        await at_once(lambda: not b.view.leases)
        await at_once(lambda: b.engine.connections[0].closed.is_set())
        await serves(b)


@every_way
@run_async
async def test_leaving_at_the_moment_of_the_grant_leaks_no_lease(way):
    async with bench() as b:
        for _ in range(20):
            async with rendering(b) as end:
                client = await b.client()
                await client.send(post("/api/chat", CHAT))
                await until(lambda: b.view.waiting)
                end()
                WAYS[way](client)
            await until(lambda: not b.view.leases and not b.view.waiting)
            b.comfy._scripts.clear()
            b.comfy.seen.clear()
        await serves(b)


@every_way
@run_async
async def test_leaving_with_a_pipelined_request_behind_cancels_both(way):
    async with bench() as b:

        async def prefill(connection, seen):
            await connection.closed.wait()

        b.engine.script(prefill)
        client = await b.client()
        await client.send(post("/api/chat", CHAT) + post("/api/chat", CHAT))
        await until(lambda: b.engine.seen)
        WAYS[way](client)
        await at_once(lambda: b.engine.connections[0].closed.is_set())
        await gone(b)
        assert len(b.engine.seen) == 1
        await serves(b)


@run_async
async def test_a_half_closed_client_gets_no_answer_and_a_plain_end():
    async with bench() as b:

        async def late(connection, seen):
            await connection.closed.wait()

        b.engine.script(late)
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        await until(lambda: b.engine.seen)
        client.writer.write_eof()
        assert await client.read_all(1) == (b"", False)


# ------------------------------------------------------------------------------------------- many at once


@run_async
async def test_of_fifty_one_waiting_chats_fifty_leave_and_one_is_served():
    async with bench() as b:
        b.engine.answer()
        async with rendering(b) as end:
            clients = [await b.client() for _ in range(51)]
            for number, client in enumerate(clients):
                whole = post("/api/chat", {**CHAT, "pad": "x" * 1_000_000})
                if 40 <= number < 50:
                    await client.send(whole[:10_000])
                else:
                    await client.send(post("/api/chat", {**CHAT, "number": number}))
            await until(lambda: len(b.view.waiting) == 41)
            for number, client in enumerate(clients[:50]):
                WAYS[("reset", "close", "half-close")[number % 3]](client)
            await at_once(lambda: len(b.view.waiting) == 1)
            end()
            assert (await clients[50].response())[0] == 200
        assert [b'"number": 50' in s.body for s in b.engine.seen] == [True]
        assert not b.view.waiting
        await serves(b)


@run_async
async def test_of_fifty_one_waiting_image_jobs_fifty_leave_and_one_is_run():
    async with bench() as b:
        go = asyncio.Event()

        async def slow(connection, seen):
            await go.wait()
            await connection.send(OK)

        b.engine.script(slow)
        b.comfy.answer()
        chatter = await b.client()
        await chatter.send(post("/api/chat", CHAT))
        await until(lambda: b.engine.seen)
        clients = [await b.client(b.comfy_port) for _ in range(51)]
        for number, client in enumerate(clients):
            await client.send(post("/prompt", {**PROMPT, "number": number}))
        await until(lambda: len(b.view.waiting) == 51)
        for number, client in enumerate(clients[:50]):
            WAYS[("reset", "close", "half-close")[number % 3]](client)
        await at_once(lambda: len(b.view.waiting) == 1)
        go.set()
        assert (await chatter.response())[0] == 200
        assert (await clients[50].response())[0] == 200
        assert [b'"number": 50' in s.body for s in b.comfy.seen] == [True]


@run_async
async def test_quick_retries_of_a_client_that_gives_up_leave_one_request_each_and_none_behind():
    async with bench() as b:

        async def prefill(connection, seen):
            await connection.closed.wait()

        b.engine.script(prefill)
        for number in range(100):
            client = await b.client()
            await client.send(post("/api/chat", CHAT))
            await until(lambda n=number: len(b.engine.seen) == n + 1)
            client.reset()
        await gone(b)
        await at_once(lambda: all(c.closed.is_set() for c in b.engine.connections))
        await serves(b)


# --------------------------------------------------------------------------------------------- image jobs


@every_way
@run_async
async def test_an_image_job_that_was_sent_is_not_cancelled_and_keeps_the_card_until_it_ends(way):
    async with bench() as b:
        go = asyncio.Event()
        reply = b'{"prompt_id": "p-1", "number": 0, "node_errors": {}}'

        async def queue(connection, seen):
            await go.wait()
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(reply), reply))

        b.comfy.script(queue)
        client = await b.client(b.comfy_port)
        await client.send(post("/prompt", PROMPT))
        await until(lambda: b.comfy.seen)
        WAYS[way](client)
        await at_once(lambda: not b.gateway.connections)
        assert not b.comfy.connections[0].closed.is_set()
        assert len(b.view.leases) == 1
        go.set()
        await until(lambda: b.followed)
        ticket, job = b.followed[0]
        assert job == "p-1"
        assert len(b.view.leases) == 1
        b.arbiter.release(ticket)
        await serves(b)


@pytest.mark.parametrize("end", ["refused", "reset", "close"])
@run_async
async def test_an_image_job_that_comes_to_nothing_after_its_client_left_gives_the_card_back(end):
    async with bench() as b:
        go = asyncio.Event()

        async def fail(connection, seen):
            await go.wait()
            if end == "refused":
                await connection.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}")
            else:
                getattr(connection, end)()

        b.comfy.script(fail)
        client = await b.client(b.comfy_port)
        await client.send(post("/prompt", PROMPT))
        await until(lambda: b.comfy.seen)
        client.reset()
        await at_once(lambda: not b.gateway.connections)
        go.set()
        await until(lambda: not b.view.leases)
        assert not b.followed
        await serves(b)


# ------------------------------------------------------------------------------- what the engine still does


@run_async
async def test_an_image_job_waits_until_the_engine_the_chatter_left_has_let_go_of_its_model():
    """The engine may compute on after its client went: the card is free only once it says so."""
    async with bench() as b:

        async def prefill(connection, seen):
            await connection.closed.wait()

        b.engine.script(prefill)
        b.comfy.answer()
        chatter = await b.client()
        await chatter.send(post("/api/chat", CHAT))
        await until(lambda: b.engine.seen)
        b.ollama_engine.release_gate = asyncio.Event()
        artist = await b.client(b.comfy_port)
        await artist.send(post("/prompt", PROMPT))
        await until(lambda: b.view.waiting)
        chatter.reset()
        await at_once(lambda: b.engine.connections[0].closed.is_set())
        await until(lambda: b.ollama_engine.released)
        assert not b.comfy.seen
        b.ollama_engine.release_gate.set()
        assert (await artist.response())[0] == 200


@run_async
async def test_reading_and_uploading_pass_at_once_while_somebody_else_has_the_card():
    async with bench() as b:
        b.engine.answer()
        async with rendering(b):
            b.comfy._scripts.clear()
            b.comfy.answer()
            chatter = await b.client()
            await chatter.send(post("/api/chat", CHAT))
            await until(lambda: b.view.waiting)
            for path in ("/api/tags", "/v1/models", "/api/ps"):
                assert (await b.ask(f"GET {path} HTTP/1.1\r\nHost: g\r\n\r\n".encode(), method="GET"))[0] == 200
            for path in ("/queue", "/history/x", "/api/queue"):
                ask = f"GET {path} HTTP/1.1\r\nHost: g\r\n\r\n".encode()
                assert (await b.ask(ask, port=b.comfy_port, method="GET"))[0] == 200
            upload = b"POST /upload/image HTTP/1.1\r\nHost: g\r\nContent-Length: 3\r\n\r\nabc"
            assert (await b.ask(upload, port=b.comfy_port))[0] == 200
            assert not [s for s in b.engine.seen if s.method == "POST"]
        assert (await chatter.response())[0] == 200
