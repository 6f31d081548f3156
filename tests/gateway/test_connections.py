"""Connections to engines: reused only while that is safe, tried again only while nothing can have happened."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time

import pytest

from gpu_turnstile.gateway.paths import Site
from tests.aio import run_async, until
from tests.gateway.bench import OK, SSE, Bench, RawClient, bench, chunk, get, post, proved

CHAT = {"model": "m", "messages": []}


def ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not ipv6(), reason="this machine has no IPv6 loopback")


def localhost() -> list[str]:
    """What `localhost` resolves to here, in order."""
    return [info[4][0] for info in socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)]


def numbered(number: int) -> dict[str, object]:
    return {**CHAT, "number": number}


def numbers(b: Bench) -> list[int]:
    """The numbers of the requests that the engine has seen."""
    return [json.loads(s.body)["number"] for s in b.engine.seen]


@contextlib.asynccontextmanager
async def engine_at(b: Bench, serve, host: str = "127.0.0.1", name: str | None = None):
    """Put an engine of the test's own making in the place of Ollama; yields its port."""
    server = await asyncio.start_server(serve, host, 0)
    port = server.sockets[0].getsockname()[1]
    shown = name or (f"[{host}]" if ":" in host else host)
    b.ollama_engine.url = f"http://{shown}:{port}"
    try:
        yield port
    finally:
        server.close()


async def one_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve every request of a connection with OK."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.split(b":")[1]))
            writer.write(OK)


# ---------------------------------------------------------------------------------------- stale keep-alive


@run_async
async def test_posts_after_the_engines_idle_limit_are_each_answered_and_served_once():
    """The engine resets, without an answer, a connection on which a request comes too long after the last one."""
    limit = 0.05
    async with bench(upstream_idle=limit / 2) as b:
        last: dict[int, float] = {}

        async def strict(connection, seen):
            if time.monotonic() - last.get(connection.number, time.monotonic()) > limit:
                b.engine.seen.pop()
                connection.reset()
                return
            await connection.send(OK)
            last[connection.number] = time.monotonic()

        b.engine.script(strict)
        client = await b.client()
        for number in range(30):
            await client.send(post("/api/chat", numbered(number)))
            assert (await client.response())[0] == 200
            await asyncio.sleep(limit * random.Random(number).choice([0.2, 0.4, 1.2]))
        assert numbers(b) == list(range(30))


@pytest.mark.parametrize("late", [0.0, 0.001, 0.01])
@run_async
async def test_an_engine_that_closes_behind_each_stream_without_saying_so_loses_no_request(late):
    """As llama.cpp does; the next request of the same client is on its way before the end can be seen."""
    async with bench() as b:

        async def stream_and_close(connection, seen):
            await connection.send(SSE + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await asyncio.sleep(late)
            connection.writer.close()

        b.engine.script(stream_and_close)
        client = await b.client()
        for number in range(40):
            await client.send(post("/api/chat", numbered(number)))
            assert (await client.response())[0] == 200
        assert numbers(b) == list(range(40))


@run_async
async def test_an_engine_that_keeps_its_connections_is_asked_on_few_of_them():
    async with bench() as b:
        b.engine.answer()
        client = await b.client()
        began = time.monotonic()
        while time.monotonic() - began < 0.4:
            await client.send(post("/api/chat", numbered(1)))
            assert (await client.response())[0] == 200
        proving = {seen.connection for seen in b.engine.seen}
        at = len(b.engine.seen)
        for _ in range(50):
            await client.send(post("/api/chat", numbered(1)))
            assert (await client.response())[0] == 200
        assert len({seen.connection for seen in b.engine.seen[at:]} - proving) == 0
        assert len({seen.connection for seen in b.engine.seen[at:]}) == 1


@pytest.mark.parametrize("method", ["close", "reset"])
@run_async
async def test_a_connection_closed_behind_its_answer_is_not_used_again(method):
    async with bench() as b:

        async def answer(connection, seen):
            await connection.send(OK)
            if method == "reset":
                await asyncio.sleep(0.002)  # a reset in the same packet may take the answer with it
            getattr(connection, method)()

        b.engine.script(answer)
        client = await b.client()
        for number in range(50):
            await client.send(post("/api/chat", numbered(number)))
            assert (await client.response())[0] == 200
            await until(lambda n=number: b.engine.connections[n].closed.is_set())
        assert numbers(b) == list(range(50))


async def die_on_the_second(b: Bench, how: str) -> RawClient:
    """A client whose next request meets an engine that closes the connection at that very moment."""

    async def second(connection, seen):
        if sum(s.connection == connection.number for s in b.engine.seen) > 1:
            getattr(connection, how)()
        else:
            await connection.send(OK)

    b.engine.script(second)
    client = await b.client()
    await client.send(get("/api/tags"))
    assert (await client.response())[0] == 200
    await proved()
    return client


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
@run_async
async def test_a_read_that_meets_a_closing_connection_is_asked_again(how, method):
    async with bench() as b:
        client = await die_on_the_second(b, how)
        await client.send(get("/api/version", method=method))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert [s.target for s in b.engine.seen] == ["/api/tags", "/api/version", "/api/version"]


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("path", ["/api/chat", "/api/show", "/v1/chat/completions"])
@run_async
async def test_a_post_that_may_have_reached_the_engine_is_never_sent_again(how, path):
    async with bench() as b:
        client = await die_on_the_second(b, how)
        await client.send(post(path, CHAT))
        status, headers, _ = await client.response()
        assert (status, headers["x-turnstile-error"]) == (502, "upstream_died")
        assert [s.target for s in b.engine.seen] == ["/api/tags", path]
        await client.send(get("/api/tags"))
        assert (await client.response("GET"))[0] == 200


@run_async
async def test_a_read_with_a_body_is_not_asked_again():
    async with bench() as b:
        client = await die_on_the_second(b, "reset")
        await client.send(b"GET /api/version HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}")
        assert (await client.response("GET"))[0] == 502
        assert len(b.engine.seen) == 2


@run_async
async def test_a_read_is_not_asked_again_for_ever():
    """Every connection of this engine dies on its request, reused or not."""
    async with bench() as b:
        b.engine.script(_reset)
        status, _, _ = await b.ask(get("/api/tags"), method="GET")
        assert status == 502
        assert len(b.engine.seen) <= 4


async def _reset(connection, seen):
    connection.reset()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("read", [0, 1, 100, 1000])
@run_async
async def test_a_post_the_engine_read_a_part_of_is_not_sent_again(read, how):
    served: list[int] = []

    async def half(reader, writer):
        served.append(1)
        if read:
            await reader.readexactly(read)
        if how == "reset":
            writer.transport.abort()
        writer.close()

    async with bench(backoff_initial=0.01) as b, engine_at(b, half):
        status, _, _ = await b.ask(post("/api/chat", {**CHAT, "pad": "x" * 2000}))
        assert status == 502
        assert len(served) == 1


@run_async
async def test_an_engine_restart_on_the_same_port_is_not_noticed_by_clients():
    async with bench(backoff_initial=0.01) as b:
        b.engine.answer()
        client = await b.client()
        for number in range(6):
            await client.send(post("/api/chat", numbered(number)))
            assert (await client.response())[0] == 200
            await b.engine.stop()
            await until(lambda: all(c.closed.is_set() for c in b.engine.connections))
            await b.engine.start()
        assert numbers(b) == list(range(6))


# ------------------------------------------------------------------------------------------------- refused


@run_async
async def test_tries_are_further_and_further_apart_up_to_the_limit():
    async with bench(backoff_initial=0.01, backoff_max=0.04, quiet=False) as b:
        pauses: list[float] = []
        tell = b.gateway.unreachable
        b.gateway.unreachable = lambda up, why, pause: (pauses.append(pause), tell(up, why, pause))
        await b.engine.stop()
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        await until(lambda: len(pauses) >= 6)
        assert pauses[:6] == [0.01, 0.02, 0.04, 0.04, 0.04, 0.04]
        client.reset()
        await until(lambda: not b.view.leases)


@pytest.mark.parametrize("ask", [post("/api/chat", CHAT), post("/api/show", {"model": "m"}), get("/api/tags")])
@run_async
async def test_a_request_that_reached_nobody_is_tried_until_the_engine_is_back_and_served_once(ask):
    async with bench(backoff_initial=0.01) as b:
        await b.engine.stop()
        b.engine.answer()
        client = await b.client()
        await client.send(ask)
        await until(lambda: b.gateway.counts.unreachable >= 3)
        await b.engine.start()
        assert (await client.response(ask[:4].decode().strip()))[0] == 200
        assert len(b.engine.seen) == 1
        assert b.engine.seen[0].raw == ask


@run_async
async def test_a_connection_that_does_not_come_about_is_tried_again():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        async with bench(connect_timeout=0.05, backoff_initial=0.01) as b:
            b.engine.answer()
            b.ollama_engine.url = f"http://127.0.0.1:{full.getsockname()[1]}"
            client = await b.client()
            await client.send(post("/api/chat", CHAT))
            await until(lambda: b.gateway.counts.unreachable >= 2)
            client.reset()
            await until(lambda: not b.view.leases)
        for filler in fillers:
            filler.close()


# --------------------------------------------------------------------------------------- engines of all kinds


@pytest.mark.parametrize("behaviour", ["closes", "resets", "speaks", "answers"])
@run_async
async def test_an_engine_that_acts_before_it_is_asked_hangs_nobody(behaviour):
    async def rude(reader, writer):
        if behaviour == "speaks":
            writer.write(b"220 mail.example ESMTP\r\n")
        elif behaviour == "answers":
            writer.write(OK)
        elif behaviour == "resets":
            writer.transport.abort()
        else:
            writer.close()

    async with bench(backoff_initial=0.02, backoff_max=0.02, quiet=False) as b, engine_at(b, rude):
        for _ in range(10):
            client = await b.client()
            await client.send(post("/api/chat", CHAT))
            status, _, _ = await client.response(seconds=2)
            assert status == 502
        await until(lambda: not b.view.leases)


@pytest.mark.parametrize(
    "unsolicited", [b"\r\n", b"x", OK, b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"]
)
@run_async
async def test_bytes_nobody_asked_for_end_an_idle_connection_and_answer_nobody(unsolicited):
    async with bench(upstream_idle=5) as b:

        async def answer(connection, seen):
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % len(b.engine.seen))

        b.engine.script(answer)
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        assert (await client.response())[2] == b"1"
        await b.engine.connections[0].send(unsolicited)
        await until(lambda: b.engine.connections[0].closed.is_set() or b.engine.open == 0)
        await client.send(post("/api/chat", CHAT))
        assert (await client.response())[2] == b"2"
        assert len(b.engine.connections) == 2


OLD = {
    "close-delimited": (b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nhello", True),
    "with a length": (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", False),
    "kept alive": (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\nhello", False),
    "1.1 and closing": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello", False),
    "1.1, closing, chunked": (SSE[:-2] + b"Connection: close\r\n\r\n5\r\nhello\r\n0\r\n\r\n", False),
    "1.1, no length": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello", True),
    "keep-alive fields": (b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5\r\nContent-Length: 5\r\n\r\nhello", False),
}


@pytest.mark.parametrize("case", OLD)
@run_async
async def test_old_and_closing_engines_are_understood(case):
    answer, ends_client = OLD[case]
    async with bench() as b:

        async def say(connection, seen):
            await connection.send(answer)
            if b"keep-alive" not in answer.lower():
                connection.close()

        b.engine.script(say)
        client = await b.client()
        for number in range(3):
            await client.send(post("/api/chat", numbered(number)))
            status, headers, body = await client.response()
            assert (status, body) == (200, b"hello")
            assert "keep-alive" not in headers
            assert headers.get("connection") == ("close" if ends_client else None)
            if ends_client:
                assert await client.read() == b""
                client = await b.client()
        assert numbers(b) == [0, 1, 2]
        assert b.gateway.counts.died_midstream == 0


@run_async
async def test_interim_answers_are_no_answers():
    async with bench() as b:
        b.engine.answer(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        )
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        got = await client.read_until(b"\r\n\r\nok")
        assert b"103 Early Hints" in got
        assert got.count(b"HTTP/1.1 100") == 0
        await client.send(b"POST /api/chat HTTP/1.0\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
        data, _ = await client.read_all()
        assert data.startswith(b"HTTP/1.1 200 ")


@run_async
async def test_an_engine_that_moves_to_another_port_is_followed():
    async with bench() as b, engine_at(b, one_answer):
        assert (await b.ask(post("/api/chat", CHAT)))[0] == 200
        async with engine_at(b, one_answer):
            assert (await b.ask(post("/api/chat", CHAT)))[0] == 200


# -------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@run_async
async def test_localhost_reaches_an_engine_that_listens_on_one_family_only(host):
    if host not in localhost():
        pytest.skip(f"localhost does not resolve to {host} here: {localhost()}")
    async with bench(upstream_idle=0) as b, engine_at(b, one_answer, host, "localhost"):
        await b.ask(post("/api/chat", CHAT))
        began = time.monotonic()
        for _ in range(5):
            assert (await b.ask(post("/api/chat", CHAT)))[0] == 200
        assert (time.monotonic() - began) / 5 < 0.05
        assert b.gateway.counts.unreachable == 0


@needs_ipv6
@run_async
async def test_an_engine_may_have_an_ipv6_address():
    async with bench() as b, engine_at(b, one_answer, "::1"):
        assert (await b.ask(post("/api/chat", CHAT)))[0] == 200


async def ask_at(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(post("/api/chat", CHAT))
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return head


@needs_ipv6
@run_async
async def test_the_gate_may_listen_on_ipv6():
    async with bench() as b:
        b.engine.answer()
        port = await b.gateway.listen(Site.LLM, "::1", 0)
        assert (await ask_at("::1", port)).startswith(b"HTTP/1.1 200 ")


@needs_ipv6
@run_async
async def test_a_listener_without_a_host_is_reachable_on_both_loopbacks():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    async with bench() as b:
        b.engine.answer()
        assert await b.gateway.listen(Site.LLM, "", free) == free
        for host in ("127.0.0.1", "::1"):
            assert (await ask_at(host, free)).startswith(b"HTTP/1.1 200 ")


@run_async
async def test_a_running_answer_is_complete_before_the_card_goes_to_somebody_else():
    """Whatever comes meanwhile: work for the other engine, more work for this one, an idle websocket."""
    async with bench() as b:
        go = asyncio.Event()
        released_at_end: list[int] = []

        async def stream(connection, seen):
            await connection.send(SSE)
            for n in range(20):
                await connection.send(chunk(b"data: %d\n\n" % n))
            await go.wait()
            await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            released_at_end.append(b.ollama_engine.released)

        b.engine.script(stream).answer()
        b.comfy.answer()
        chatter = await b.client()
        await chatter.send(post("/v1/chat/completions", CHAT))
        await until(lambda: b.engine.seen)
        artist = await b.client(b.comfy_port)
        await artist.send(post("/prompt", {"prompt": {}}))
        late = await b.client()
        await late.send(post("/api/chat", CHAT))
        await until(lambda: len(b.view.waiting) == 2)
        assert not b.comfy.seen
        go.set()
        assert (await chatter.response())[2].endswith(b"data: [DONE]\n\n")
        assert released_at_end == [0]
        assert (await artist.response())[0] == 200
        assert (await late.response())[0] == 200
