"""A tiny HTTP server whose every answer is a test's own function: raw sockets, a log of what was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx

HANG = object()  # accept the request, never answer
CUT = object()  # close the connection instead of answering

Answer = Any  # a JSON value (200), (status, JSON value or text), HANG or CUT
Handler = Callable[[str, str, Any], Answer]


class FakeServer:
    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.asked: list[tuple[str, str, Any]] = []
        self.headers: dict[str, str] = {}
        self.keep_alive = True
        self.port = 0
        self._news = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def asked_for(self, path: str, times: int = 1) -> None:
        """Return when `path` has been asked for that often."""
        while sum(asked == path for _, asked, _ in self.asked) < times:
            self._news.clear()
            await self._news.wait()

    def paths(self) -> list[str]:
        return [f"{method} {path}" for method, path, _ in self.asked]

    def bodies(self, path: str) -> list[Any]:
        return [body for _, asked, body in self.asked if asked == path]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As if its process had died: nothing listens, open connections are cut."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        self._connections.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        length = next((int(x.split(":")[1]) for x in head.lower().split("\r\n") if x.startswith("content-length")), 0)
        raw = await reader.readexactly(length)
        body = json.loads(raw) if raw else None
        self.asked.append((method, path, body))
        self._news.set()
        answer = self.handler(method, path, body)
        if answer is HANG:
            await reader.read()  # until the other side gives up
            return False
        if answer is CUT:
            return False
        status, value = answer if isinstance(answer, tuple) else (200, answer)
        payload = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        headers = {"Content-Length": str(len(payload)), **self.headers}
        if not self.keep_alive:
            headers["Connection"] = "close"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + payload)
        await writer.drain()
        return self.keep_alive


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[FakeServer, httpx.AsyncClient]]:
    server = FakeServer(handler)
    await server.start()
    async with httpx.AsyncClient(trust_env=False) as http:
        try:
            yield server, http
        finally:
            await server.stop()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Every test ends: what should take milliseconds may take ten seconds on a busy machine, and no more."""

    async def bounded() -> Any:
        return await asyncio.wait_for(main, 10)

    return asyncio.run(bounded())
