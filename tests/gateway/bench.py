"""A gateway between raw sockets: engines that send exactly the bytes a test tells them, clients that see every byte.

    async with bench() as b:
        b.engine.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        c = await b.client()
        await c.send(post("/api/chat", {"model": "m"}))
        assert await c.response() == ...

`Bench.quiet()` is what must be true after every test: nothing in flight, nobody waiting, nothing left open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import h11

from gpu_turnstile.arbiter import Arbiter, Ticket
from gpu_turnstile.core.model import Mode, Tenant
from gpu_turnstile.core.policy import Rules
from gpu_turnstile.core.routes import Directory
from gpu_turnstile.engines.base import Health, Loaded, Probe, Release, Released
from gpu_turnstile.gateway.paths import Site
from gpu_turnstile.gateway.server import Gateway, Options, Table
from gpu_turnstile.gateway.upstream import PROOF, Upstream
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.gpu.none import NoCard
from gpu_turnstile.runtimes.external import ExternalRuntime
from gpu_turnstile.seats import Limits, Seat
from tests.aio import until

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
NDJSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"


def post(path: str, body: Any = None, *headers: str, raw: bytes | None = None) -> bytes:
    """A POST as a well-behaved client sends it."""
    payload = raw if raw is not None else json.dumps(body if body is not None else {}).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: gate", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(payload)}", "", ""]).encode() + payload


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: gate", *headers, "", ""]).encode()


async def proved() -> None:
    """Time for the gate to see that the engine keeps its connections: the next request comes on the last one's."""
    await asyncio.sleep(PROOF * 1.2)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass
class Seen:
    """A request as the engine saw it. `raw` is every byte of it."""

    raw: bytes
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int

    def header(self, name: str) -> str | None:
        return next((v for n, v in self.headers if n.lower() == name.lower()), None)


@dataclass
class EngineConnection:
    """The engine's end of one connection."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # the gate closed it

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Die without a word (RST)."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


Script = Callable[[EngineConnection, Seen], Awaitable[None]]


class RawEngine:
    """Reads requests strictly (h11) and answers each with the next script, or the last one for ever."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.connections: list[EngineConnection] = []
        self.open = 0
        self._scripts: deque[Script] = deque()
        self._server: asyncio.Server | None = None
        self.port = 0

    def script(self, script: Script) -> RawEngine:
        self._scripts.append(script)
        return self

    def answer(self, data: bytes = OK) -> RawEngine:
        async def say(connection: EngineConnection, seen: Seen) -> None:
            await connection.send(data)

        return self.script(say)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port or self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            connection.writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = EngineConnection(len(self.connections), reader, writer)
        self.connections.append(connection)
        self.open += 1
        try:
            await self._requests(connection)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            connection.closed.set()
            writer.close()

    async def _requests(self, connection: EngineConnection) -> None:
        parser, raw = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20), b""
        head: h11.Request | None = None
        body: list[bytes] = []
        running: asyncio.Task[None] | None = None
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                data = await connection.reader.read(1 << 20)
                if not data:
                    connection.closed.set()
                    if running is not None:
                        running.cancel()
                    return
                raw += data
                parser.receive_data(data)
            elif isinstance(event, h11.Request):
                head, body = event, []
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                headers = [(n.decode(), v.decode("latin-1")) for n, v in head.headers.raw_items()]
                seen = Seen(raw, head.method.decode(), head.target.decode(), headers, b"".join(body), connection.number)
                self.seen.append(seen)
                raw = b""
                script = self._scripts.popleft() if len(self._scripts) > 1 else self._scripts[0]
                upgrade = any(n.lower() == "upgrade" for n, _ in headers)
                if upgrade:
                    await script(connection, seen)
                    return
                running = asyncio.ensure_future(script(connection, seen))
                await self._alongside(running, connection)
                parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)

    @staticmethod
    async def _alongside(script: asyncio.Task[None], connection: EngineConnection) -> None:
        """Run the script, and notice meanwhile that the gate went away (`closed`)."""
        while not script.done():
            await asyncio.wait([script], timeout=0.01)
            if connection.reader.at_eof() or connection.writer.transport.is_closing():
                connection.closed.set()
        script.result()


class FakeEngine:
    """The engine adapter of a raw engine: it is ready, holds nothing and lets go at once."""

    kind: ClassVar[str] = "fake"
    mode: ClassVar[Mode] = Mode.LLM

    def __init__(self, url: str) -> None:
        self.url = url
        self.released = 0
        self.release_gate: asyncio.Event | None = None

    async def probe(self) -> Probe:
        return Probe(Health.READY)

    async def loaded(self) -> tuple[Loaded, ...] | None:
        return ()

    async def busy(self) -> bool | None:
        return False

    async def release(self) -> Release:
        self.released += 1
        if self.release_gate is not None:
            await self.release_gate.wait()
        return Release(Released.EMPTY)


class RawClient:
    """A client that sees every byte with the time it came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.received = b""

    async def send(self, data: bytes) -> RawClient:
        self.writer.write(data)
        await self.writer.drain()
        return self

    async def read(self, seconds: float = 5.0) -> bytes:
        """The next bytes, whatever they are; empty at the end."""
        async with asyncio.timeout(seconds):
            data = await self.reader.read(1 << 20)
        self.received += data
        return data

    async def read_until(self, mark: bytes, seconds: float = 5.0) -> bytes:
        """Everything up to and including `mark`."""
        got = b""
        async with asyncio.timeout(seconds):
            while mark not in got:
                data = await self.reader.read(1 << 20)
                if not data:
                    raise AssertionError(f"the connection ended before {mark!r}: {got!r}")
                got += data
        self.received += got
        return got

    async def read_all(self, seconds: float = 10.0) -> tuple[bytes, bool]:
        """Everything until the connection ends, and whether it ended by a reset."""
        got = b""
        async with asyncio.timeout(seconds):
            try:
                while data := await self.reader.read(1 << 20):
                    got += data
            except ConnectionError:
                return got, True
        return got, False

    async def response(self, method: str = "POST", seconds: float = 5.0) -> tuple[int, dict[str, str], bytes]:
        """One whole response, read by h11: (status, headers with lower-case names, body)."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x"), ("content-length", "0")]))
        parser.send(h11.EndOfMessage())
        status, headers, body = 0, {}, b""
        async with asyncio.timeout(seconds):
            while True:
                event = parser.next_event()
                if event is h11.NEED_DATA:
                    try:
                        data = await self.reader.read(1 << 16)
                    except ConnectionError:
                        data = b""
                    parser.receive_data(data)
                elif isinstance(event, h11.Response):
                    status = event.status_code
                    headers = {n.decode(): v.decode("latin-1") for n, v in event.headers}
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return status, headers, body

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Bench:
    """`engine` is an external Ollama, `comfy` an external ComfyUI, `control` the control API; all raw."""

    def __init__(self, options: Options, rules: Rules) -> None:
        self.engine, self.comfy, self.control = RawEngine(), RawEngine(), RawEngine()
        self.options = options
        self.rules = rules
        self.followed: list[tuple[Ticket, str]] = []
        self._clients: list[RawClient] = []

    async def start(self) -> None:
        for engine in (self.engine, self.comfy, self.control):
            await engine.start()
        gauge = Gauge(NoCard())
        self.ollama_engine, self.comfy_engine = FakeEngine(self.engine.url), FakeEngine(self.comfy.url)
        ollama = Tenant("ollama", Mode.LLM, drain_grace=None)
        comfyui = Tenant("comfyui", Mode.COMFYUI, exclusive=True, rank=1, drain_grace=None, linger=0.0)
        seats = [
            Seat(ollama, self.ollama_engine, ExternalRuntime(), gauge, Limits()),
            Seat(comfyui, self.comfy_engine, ExternalRuntime(), gauge, Limits()),
        ]
        self.arbiter = Arbiter(seats, self.rules)
        table = Table(directory=Directory(external="ollama"), external="ollama", comfyui="comfyui")
        control = Upstream("control", self.control.url)
        self.gateway = Gateway(self.arbiter, table, control, self.options, self._follow)
        await self.arbiter.start()
        self.port = await self.gateway.listen(Site.LLM, "127.0.0.1", 0)
        self.comfy_port = await self.gateway.listen(Site.COMFYUI, "127.0.0.1", 0)

    def _follow(self, ticket: Ticket, job: str | None) -> None:
        """A job that has a name is a test's to end; where nobody said which, there is none."""
        if job is None:
            self.arbiter.release(ticket)
        else:
            self.followed.append((ticket, job))

    async def client(self, port: int | None = None) -> RawClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.port, limit=1 << 22)
        client = RawClient(reader, writer)
        self._clients.append(client)
        return client

    async def ask(
        self, request: bytes, port: int | None = None, method: str = "POST"
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own."""
        client = await self.client(port)
        await client.send(request)
        answer = await client.response(method)
        client.close()
        return answer

    @property
    def view(self) -> Any:
        return self.arbiter.snapshot()

    async def quiet(self) -> None:
        """Nothing in flight, nobody waiting, no connection to an engine in use."""
        for client in self._clients:
            client.close()
        await until(lambda: not self.view.leases and not self.view.waiting)
        await until(lambda: not self.gateway.connections)
        for upstream in self.gateway._upstreams.values():
            upstream.close_idle()
            await until(lambda up=upstream: up.open == 0)

    async def stop(self) -> None:
        for engine in (self.engine, self.comfy, self.control):
            await engine.stop()
        await self.gateway.close()


@contextlib.asynccontextmanager
async def bench(*, quiet: bool = True, rules: Rules | None = None, **options: Any) -> AsyncIterator[Bench]:
    b = Bench(Options(**options), rules or Rules())
    await b.start()
    try:
        yield b
        if quiet:
            await b.quiet()
    finally:
        await b.stop()


def now() -> float:
    return time.monotonic()
