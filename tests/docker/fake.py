"""A Docker API that does what the test says, on a unix socket: for what a real one cannot be made to do.

It knows one container at a time and no more HTTP than is needed. `rules` come first: a function that is given the
method, the path without version, and the body, and returns an answer or None.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ID = "c0ffee" * 10


@dataclass
class Answer:
    status: int = 200
    body: Any = None
    lines: list[Any] | None = None  # chunks of a stream, as JSON lines
    hold: bool = False  # the stream, or the whole answer, stays open


def no(status: int, message: str) -> Answer:
    return Answer(status, {"message": message})


Rule = Callable[[str, str, dict[str, Any]], Answer | None]


@dataclass
class FakeDocker:
    socket: Path
    api: str = "1.47"
    oldest: str = "1.24"
    rules: list[Rule] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # method and path as they came, with their version
    container: dict[str, Any] | None = None
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self.socket)

    async def vanish(self) -> None:
        """As a daemon that is killed: connections break, and the socket's file goes."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        self.socket.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            while request := await _request(reader):
                await self._send(writer, self._answer(*request))
        self._open.discard(writer)
        writer.close()

    def _answer(self, method: str, target: str, body: dict[str, Any]) -> Answer:
        path, version = _split(target)
        self.calls.append(f"{method} {target}")
        if path == "/version":
            return Answer(body={"ApiVersion": self.api, "MinAPIVersion": self.oldest, "Version": "27.0"})
        if _numbers(version) > _numbers(self.api):
            return no(400, f"client version {version} is too new. Maximum supported API version is {self.api}")
        if _numbers(version) < _numbers(self.oldest):
            return no(400, f"client version {version} is too old. Minimum supported API version is {self.oldest}")
        for rule in self.rules:
            if (answer := rule(method, path, body)) is not None:
                return answer
        return self._usual(method, path, body)

    def _usual(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        match method, path.split("/")[1:]:
            case _, ["events"]:
                return Answer(lines=[], hold=True)
            case "GET", ["images", *_]:
                return Answer(body={})
            case "POST", ["containers", "create"]:
                if self.container is not None:
                    return no(409, "Conflict. The container name is already in use")
                self.container = made(body)
                return Answer(201, {"Id": ID})
            case _, ["containers", *_] if self.container is None:
                return no(404, "No such container")
            case "GET", ["containers", _, "json"]:
                return Answer(body=self.container)
            case "GET", ["containers", _, "logs"]:
                return Answer(lines=[])
            case "POST", ["containers", _, "start"]:
                self.container["State"].update(Status="running", Running=True)  # type: ignore[index]
            case "POST", ["containers", _, "stop" | "kill"]:
                self.container["State"].update(Status="exited", Running=False, ExitCode=137)  # type: ignore[index]
            case "DELETE", ["containers", _]:
                self.container = None
        return Answer(204)

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        if answer.lines is None:
            if answer.hold:
                await asyncio.Event().wait()
            body = b"" if answer.body is None else json.dumps(answer.body).encode()
            length = b"" if answer.status == 204 else b"Content-Length: %d\r\n" % len(body)
            writer.write(b"HTTP/1.1 %d X\r\n%s\r\n%s" % (answer.status, length, body))
        else:
            writer.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % answer.status)
            for line in answer.lines:
                data = json.dumps(line).encode() + b"\r\n"
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            if answer.hold:
                await asyncio.Event().wait()
            writer.write(b"0\r\n\r\n")
        await writer.drain()


def made(body: dict[str, Any], status: str = "created") -> dict[str, Any]:
    """What an inspection of a container shows."""
    return {
        "Id": ID,
        "Created": "2020-01-01T00:00:00.0Z",
        "State": {"Status": status, "Running": status == "running", "ExitCode": 0, "OOMKilled": False},
        "Config": {"Labels": body.get("Labels")},
        "HostConfig": body.get("HostConfig", {}),
    }


async def _request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, Any]] | None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, target, _ = first.split(" ")
    return method, target, json.loads(body) if body else {}


def _split(target: str) -> tuple[str, str]:
    path = target.split("?")[0]
    if path.startswith("/v1."):
        version, _, rest = path[2:].partition("/")
        return f"/{rest}", version
    return path, "1.24"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@asynccontextmanager
async def fake_docker(folder: Path, **fields: Any) -> AsyncIterator[FakeDocker]:
    docker = FakeDocker(folder / "docker.sock", **fields)
    await docker.serve()
    try:
        yield docker
    finally:
        await docker.vanish()
