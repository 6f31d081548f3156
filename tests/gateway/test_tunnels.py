"""Upgrades: negotiated by the engine itself, then a raw tunnel. Real websocket peers on both ends, and raw ones.

A tunnel is not work: it takes no lease and holds nobody off. And it is no way past the gate: until the engine has
agreed, nothing the client sends behind its request reaches the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus
from websockets.frames import CloseCode

from tests.aio import run_async, until
from tests.gateway.bench import OK, Bench, bench, get, post

CHAT = {"model": "m", "messages": []}
UPGRADE = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: YQ==")
AGREED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


@contextlib.asynccontextmanager
async def websocket(b: Bench, handler, client=None, **server) -> AsyncIterator[ClientConnection]:
    """A websocket through the gate to a real server that runs `handler`."""
    async with serve(handler, "127.0.0.1", 0, max_size=None, **server) as engine:
        b.comfy_engine.url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        address = f"ws://127.0.0.1:{b.comfy_port}/ws?clientId=a%20b"
        async with connect(address, max_size=None, proxy=None, **(client or {})) as ws:
            yield ws


async def echo(ws: ServerConnection) -> None:
    async for message in ws:
        await ws.send(message)


@contextlib.asynccontextmanager
async def raw_engine(b: Bench, serve_one) -> AsyncIterator[None]:
    """An engine in ComfyUI's and in Ollama's place that reads and writes bytes."""
    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    b.comfy_engine.url = b.ollama_engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield
    finally:
        server.close()


# --------------------------------------------------------------------------------------------- real peers


@pytest.mark.parametrize("compression", [None, "deflate"])
@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536, 6 << 20])
@run_async
async def test_messages_of_every_size_pass_whole_in_both_directions(size, compression):
    async with bench() as b, websocket(b, echo, {"compression": compression}, compression=compression) as ws:
        data = os.urandom(size)
        await ws.send(data)
        await ws.send("text ü 世界")
        assert await ws.recv() == data
        assert await ws.recv() == "text ü 世界"
        assert bool(ws.protocol.extensions) == (compression is not None)


@run_async
async def test_a_message_in_fragments_arrives_as_the_same_fragments():
    fragments: list[bytes] = []

    async def gather(ws: ServerConnection) -> None:
        async for part in ws.recv_streaming():
            fragments.append(part)
        await ws.send(iter(["a", "bc", "", "déf"]))
        await ws.wait_closed()

    async with bench() as b, websocket(b, gather, {"compression": None}, compression=None) as ws:
        await ws.send(iter([b"1", b"22" * 100_000, b"333"]))
        parts = [part async for part in ws.recv_streaming()]
        assert parts[:2] == ["a", "bc"]
        assert "".join(parts) == "abcdéf"
        assert b"".join(fragments) == b"1" + b"22" * 100_000 + b"333"
        assert fragments[0] == b"1"


@run_async
async def test_pings_with_a_payload_are_answered_by_the_other_end():
    answered = asyncio.Event()

    async def ping(ws: ServerConnection) -> None:
        await (await ws.ping(b"from the engine"))
        answered.set()
        await ws.wait_closed()

    options = {"ping_interval": None}
    async with bench() as b, websocket(b, ping, options, **options) as ws:
        async with asyncio.timeout(2):
            await (await ws.ping(b"from the client"))
            await answered.wait()


CODES = [(1000, ""), (1001, "going"), (1009, "too big"), (1011, "über"), (3000, "x"), (4001, "bye"), (4999, "y" * 123)]


@pytest.mark.parametrize(("code", "reason"), CODES)
@run_async
async def test_close_codes_and_reasons_pass_from_the_engine(code, reason):
    async def close(ws: ServerConnection) -> None:
        await ws.send("last")
        await ws.close(code, reason)

    async with bench() as b, websocket(b, close) as ws:
        assert await ws.recv() == "last"
        with pytest.raises(ConnectionClosed):
            await ws.recv()
        assert (ws.close_code, ws.close_reason) == (code, reason)


@pytest.mark.parametrize(("code", "reason"), CODES)
@run_async
async def test_close_codes_and_reasons_pass_from_the_client(code, reason):
    seen: asyncio.Future[tuple[int | None, str | None]] = asyncio.get_running_loop().create_future()

    async def watch(ws: ServerConnection) -> None:
        await ws.wait_closed()
        seen.set_result((ws.close_code, ws.close_reason))

    async with bench() as b, websocket(b, watch) as ws:
        await ws.close(code, reason)
        assert await asyncio.wait_for(seen, 2) == (code, reason)


@pytest.mark.parametrize(
    ("offered", "chosen"), [(["b", "a"], "a"), (["x"], None), (None, None)], ids=["common", "none in common", "none"]
)
@run_async
async def test_the_engine_chooses_the_subprotocol(offered, chosen):
    options = {"subprotocols": offered}
    async with bench() as b:
        if offered == ["x"]:
            with pytest.raises(InvalidStatus):
                async with websocket(b, echo, options, subprotocols=["a"]):
                    pass
        else:
            async with websocket(b, echo, options, subprotocols=["a"] if offered else None) as ws:
                assert ws.subprotocol == chosen


@pytest.mark.parametrize("status", [400, 401, 403, 404, 426, 503])
@run_async
async def test_a_refused_upgrade_arrives_as_the_engine_gave_it(status):
    def refuse(connection: ServerConnection, request):
        response = connection.respond(status, "not you\n")
        response.headers["X-Engine"] = "yes"
        return response

    async with bench() as b:
        with pytest.raises(InvalidStatus) as raised:
            async with websocket(b, echo, process_request=refuse):
                pass
        response = raised.value.response
        assert (response.status_code, response.body) == (status, b"not you\n")
        assert response.headers["X-Engine"] == "yes"
        assert "X-Turnstile-Error" not in response.headers


@pytest.mark.parametrize("how", ["reset", "close"])
@run_async
async def test_an_engine_that_vanishes_is_an_abnormal_end_for_the_client(how):
    async def vanish(ws: ServerConnection) -> None:
        await ws.send("hello")
        if how == "reset":
            ws.transport.abort()
        else:
            ws.transport.close()

    async with bench() as b, websocket(b, vanish) as ws:
        assert await ws.recv() == "hello"
        with pytest.raises(ConnectionClosedError):
            await asyncio.wait_for(ws.recv(), 1)
        assert ws.close_code == CloseCode.ABNORMAL_CLOSURE


@run_async
async def test_a_client_that_vanishes_is_an_abnormal_end_for_the_engine():
    ended = asyncio.Event()

    async def watch(ws: ServerConnection) -> None:
        await ws.send("hello")
        await ws.wait_closed()
        assert ws.close_code == CloseCode.ABNORMAL_CLOSURE
        ended.set()

    async with bench() as b, websocket(b, watch) as ws:
        await ws.recv()
        ws.transport.abort()
        await asyncio.wait_for(ended.wait(), 0.5)
        await until(lambda: not b.gateway.connections)


@run_async
async def test_an_idle_tunnel_is_not_in_flight_and_lives_on_while_others_have_the_card():
    async with bench() as b, websocket(b, echo) as ws:
        b.engine.answer()
        await ws.send("1")
        assert await ws.recv() == "1"
        assert not b.view.leases
        for _ in range(3):
            assert (await b.ask(post("/api/chat", CHAT)))[0] == 200
        await ws.send("2")
        assert await ws.recv() == "2"


@run_async
async def test_a_quiet_tunnel_is_not_idle_and_not_late():
    limits = {"head_timeout": 0.05, "idle_timeout": 0.05, "body_timeout": 0.05, "upstream_idle": 0.02}
    quiet = {"ping_interval": None}
    async with bench(**limits) as b, websocket(b, echo, quiet, **quiet) as ws:
        await ws.send("1")
        assert await ws.recv() == "1"
        await asyncio.sleep(0.4)  # eight times every limit
        await ws.send("2")
        assert await ws.recv() == "2"


@run_async
async def test_many_tunnels_carry_their_own_messages():
    async with bench() as b, serve(echo, "127.0.0.1", 0) as engine:
        b.comfy_engine.url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        address = f"ws://127.0.0.1:{b.comfy_port}/ws"
        sockets = [await connect(address, proxy=None) for _ in range(30)]
        for number, ws in enumerate(sockets):
            await ws.send(str(number))
        assert [await ws.recv() for ws in sockets] == [str(n) for n in range(30)]
        for ws in sockets:
            ws.transport.abort()
        await until(lambda: not b.gateway.connections)


# ----------------------------------------------------------------------------------------------- raw peers


@run_async
async def test_the_engine_sees_the_upgrade_as_it_was_asked_for():
    async with bench() as b:

        async def agree(connection, seen):
            await connection.send(AGREED)
            await connection.reader.read()

        b.comfy.script(agree)
        client = await b.client(b.comfy_port)
        await client.send(get("/api/ws?clientId=%2F", *UPGRADE, "Sec-WebSocket-Extensions: a; b=1, c", "Cookie: x=y"))
        assert await client.read_until(b"\r\n\r\n") == AGREED
        seen = b.comfy.seen[0]
        assert seen.target == "/api/ws?clientId=%2F"
        wanted = {
            "upgrade": "websocket",
            "connection": "Upgrade",
            "sec-websocket-key": "YQ==",
            "sec-websocket-version": "13",
            "sec-websocket-extensions": "a; b=1, c",
            "cookie": "x=y",
        }
        assert {name: seen.header(name) for name in wanted} == wanted


@run_async
async def test_bytes_right_behind_the_101_are_the_clients():
    async def agree(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(AGREED + b"\x81\x02hi" * 1000)
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async with bench() as b, raw_engine(b, agree):
        client = await b.client(b.comfy_port)
        await client.send(get("/ws", *UPGRADE))
        assert await client.reader.readexactly(len(AGREED) + 4000) == AGREED + b"\x81\x02hi" * 1000
        await client.send(b"and on")
        assert await client.read() == b"and on"


@pytest.mark.parametrize("when", ["in one packet", "before the engine answered"])
@run_async
async def test_bytes_right_behind_the_request_reach_the_engine_once_it_agreed(when):
    early = asyncio.Event()
    before: list[bytes] = []

    async def agree(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        early.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                before.append(await reader.read(100))
        writer.write(AGREED)
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async with bench() as b, raw_engine(b, agree):
        client = await b.client(b.comfy_port)
        if when == "in one packet":
            await client.send(get("/ws", *UPGRADE) + b"early" * 100)
        else:
            await client.send(get("/ws", *UPGRADE))
            await early.wait()
            await client.send(b"early" * 100)
        assert await client.read_until(b"\r\n\r\n" + b"early" * 100) == AGREED + b"early" * 100
        assert not before


REFUSALS = [
    OK,
    b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("when", ["in one packet", "before the engine answered"])
@pytest.mark.parametrize("path", ["/api/tags", "/ws"])
@run_async
async def test_a_refused_upgrade_is_no_way_past_the_gate(path, when, refusal):
    """Work sent behind a request for an upgrade must not reach the engine as a request the gate never saw."""
    early, seen = asyncio.Event(), []

    async def refuse(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            early.set()
            await asyncio.sleep(0.02)
            writer.write(refusal)
            while True:
                seen.append((await reader.readuntil(b"\r\n\r\n"), len(b.view.leases)))
                writer.write(OK)
        writer.close()

    work = post("/prompt" if path == "/ws" else "/api/generate", CHAT)
    async with bench() as b, raw_engine(b, refuse):
        client = await b.client(b.comfy_port if path == "/ws" else b.port)
        if when == "in one packet":
            await client.send(get(path, *UPGRADE) + work)
        else:
            await client.send(get(path, *UPGRADE))
            await early.wait()
            await client.send(work)
        assert refusal.split(b"\r\n")[0] in await client.read_until(b"\r\n\r\n")
        client.close()
        await until(lambda: not b.gateway.connections)
        assert all(leases for head, leases in seen), "work reached the engine without a lease"


@run_async
async def test_the_connection_goes_on_after_a_refused_upgrade():
    async with bench() as b:
        b.engine.answer(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno").answer()

        async def refuse(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        own, b.ollama_engine.url = b.ollama_engine.url, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = await b.client()
        await client.send(get("/api/nothing", *UPGRADE))
        assert (await client.response("GET"))[0] == 404
        b.ollama_engine.url = own
        b.engine._scripts.popleft()
        await client.send(post("/api/chat", CHAT))
        assert (await client.response())[0] == 200
        server.close()


H2C = [
    ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"),
    ("Upgrade: websocket, h2c", "Connection: Upgrade"),
    ("Upgrade: H2C, websocket", "Connection: upgrade"),
    ("Upgrade: websocket", "Upgrade: h2c", "Connection: Upgrade"),
    ("Upgrade: h2", "Connection: Upgrade"),
    ("Upgrade: TLS/1.0, HTTP/2.0", "Connection: Upgrade"),
]


@pytest.mark.parametrize("fields", H2C, ids=[" ".join(f[:2]) for f in H2C])
@run_async
async def test_an_upgrade_to_another_http_is_never_offered_to_the_engine(fields):
    """It would carry work past the gate. The request itself is answered as if nothing had been asked."""
    async with bench() as b:
        b.engine.answer()
        status, _, _ = await b.ask(get("/api/tags", *fields), method="GET")
        assert status in (200, 400)
        for seen in b.engine.seen:
            offered = (seen.header("upgrade") or "").lower()
            assert "h2" not in offered
            assert "http/2" not in offered
            assert seen.header("http2-settings") is None


@run_async
async def test_http_2_with_prior_knowledge_is_refused():
    async with bench() as b:
        client = await b.client()
        await client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        data, _ = await client.read_all()
        assert data.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 505 "))
        assert not b.engine.seen


NO_UPGRADE = [
    ("Upgrade: websocket",),
    ("Connection: Upgrade",),
    ("Upgrade: websocket", "Connection: keep-alive"),
    ("Upgrade: websocket", "Connection: xupgrade"),
]


@pytest.mark.parametrize("fields", NO_UPGRADE, ids=["; ".join(f) for f in NO_UPGRADE])
@run_async
async def test_half_an_upgrade_is_none(fields):
    async with bench() as b:
        b.engine.answer()
        client = await b.client()
        await client.send(get("/api/tags", *fields) + get("/api/version"))
        assert (await client.response("GET"))[0] == 200
        await until(lambda: len(b.engine.seen) == 2)
        assert b.engine.seen[0].header("upgrade") is None


@run_async
async def test_a_post_that_asks_for_an_upgrade_is_work_like_any_other():
    async with bench() as b:
        b.engine.answer()
        assert (await b.ask(post("/api/chat", CHAT, "Upgrade: websocket", "Connection: Upgrade")))[0] == 200
        assert b.engine.seen[0].header("upgrade") is None
        assert b.engine.seen[0].body


@run_async
async def test_each_side_of_a_tunnel_may_stop_sending_before_the_other():
    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(AGREED)
        said = await reader.read()  # until the client sends no more
        writer.write(said[::-1])
        writer.close()

    async with bench() as b, raw_engine(b, talk):
        client = await b.client(b.comfy_port)
        await client.send(get("/ws", *UPGRADE))
        await client.read_until(b"\r\n\r\n")
        await client.send(b"abc")
        client.writer.write_eof()
        assert await client.read_all() == (b"cba", False)


@pytest.mark.parametrize("end", ["client closes", "client resets", "engine stops sending", "client stops sending"])
@run_async
async def test_a_connection_that_was_a_tunnel_never_carries_a_request(end):
    requests: list[tuple[int, bytes]] = []
    number = 0

    async def engine(reader, writer):
        nonlocal number
        number += 1
        mine = number
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            requests.append((mine, head.split()[1]))
            if b"Upgrade: websocket" not in head:
                writer.write(OK)
                return
            writer.write(AGREED)
            if end == "engine stops sending":
                writer.write_eof()
            while data := await reader.read(65536):
                requests.append((mine, data))
            writer.close()

    async with bench(upstream_idle=30) as b, raw_engine(b, engine):
        client = await b.client(b.comfy_port)
        await client.send(get("/ws", *UPGRADE))
        await client.read_until(b"\r\n\r\n")
        match end:
            case "client resets":
                client.reset()
            case "client stops sending":
                client.writer.write_eof()
            case "client closes":
                client.close()
            case _:
                assert await client.read_all() == (b"", False)
                client.close()
        await until(lambda: not b.gateway.connections)
        status, _, _ = await b.ask(get("/queue"), port=b.comfy_port, method="GET")
        assert status == 200
        assert requests == [(1, b"/ws"), (2, b"/queue")]


@pytest.mark.parametrize("direction", ["down", "up"])
@run_async
async def test_a_side_that_does_not_read_pauses_the_other(direction):
    size, block = 64 << 20, b"z" * 65536
    sent: list[int] = []
    release = asyncio.Event()
    got = 0

    async def pump(writer):
        for _ in range(size // len(block)):
            writer.write(block)
            await writer.drain()
            sent.append(1)

    async def swallow(reader):
        nonlocal got
        while got < size:
            data = await reader.read(1 << 20)
            assert data
            got += len(data)

    async def engine(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(AGREED)
        if direction == "down":
            await pump(writer)
            await reader.read()
        else:
            writer.transport.pause_reading()
            await release.wait()
            writer.transport.resume_reading()
            await swallow(reader)
        writer.close()

    async with bench() as b, raw_engine(b, engine):
        client = await b.client(b.comfy_port)
        await client.send(get("/ws", *UPGRADE))
        await client.reader.readuntil(b"\r\n\r\n")
        pumping = None
        if direction == "up":
            pumping = asyncio.ensure_future(pump(client.writer))
        else:
            client.writer.transport.pause_reading()
        grown = -1
        while grown != len(sent):
            grown = len(sent)
            await asyncio.sleep(0.1)
        assert grown * len(block) < size / 2
        if direction == "down":
            client.writer.transport.resume_reading()
            await swallow(client.reader)
        else:
            release.set()
            await pumping
            await until(lambda: got == size)
