"""The Docker Engine API over its unix socket: the calls the gate needs, each as one short method.

Nothing is remembered but the API version, and that only while the connection holds: a daemon that went away may come
back as another one. The version is the newest both sides know, because a fixed one is too new for old daemons and too
old for new ones. Every call has a time limit; a stream has one until it opens. The path of the socket is looked up at
each connect, so that a daemon which made it anew is found again.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from gpu_turnstile.runtimes.docker_errors import DockerAway, DockerError, away

NEWEST = (1, 51)  # the newest version of the API this was tried with
CALL = 15.0  # seconds a call may take
START = 120.0  # seconds until a container has started: a cold GPU driver takes its time
OPEN = 15.0  # seconds until a stream begins
STOP_MARGIN = 10.0  # seconds on top of the grace
FRAME_HEAD = 8  # bytes before each piece of a container's log: the stream's number, three zeros, the length

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Container:
    """What an inspection tells."""

    id: str
    labels: dict[str, str]
    status: str  # created, running, paused, restarting, removing, exited, dead
    running: bool  # it has a process, also a paused one
    exit_code: int
    oom_killed: bool
    created: str  # when, in RFC 3339
    config: Json = field(repr=False)  # its HostConfig as Docker keeps it
    pid: int = 0  # of its first process, as Docker's machine numbers it; 0: it does not run

    @classmethod
    def of(cls, data: Json) -> Self:
        state = data["State"]
        return cls(
            id=data["Id"],
            labels=data["Config"].get("Labels") or {},
            status=state["Status"],
            running=bool(state["Running"]),
            exit_code=int(state.get("ExitCode") or 0),
            oom_killed=bool(state.get("OOMKilled")),
            created=data.get("Created") or "",
            config=data.get("HostConfig") or {},
            pid=int(state.get("Pid") or 0),
        )


class DockerApi:
    """Every method raises DockerAway (cannot be reached) or DockerError (said no), unless it says otherwise."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=limits), base_url="http://docker"
        )
        self._version: str | None = None

    async def close(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------------------------------------------- calls

    async def version(self) -> str:
        """The version to speak; asked for after each loss of the connection."""
        if self._version is None:
            response = await self._send("GET", "/version", CALL)
            _raise_for(response)
            self._version = common_version(response.json())
        return self._version

    async def inspect(self, ref: str) -> Container | None:
        """None if there is no such container."""
        try:
            return Container.of((await self._call("GET", f"/containers/{ref}/json")).json())
        except DockerError as error:
            if error.status == 404:
                return None
            raise

    async def processes(self, id: str, limit: float) -> tuple[int, ...]:
        """Of a container that runs, as Docker's machine numbers them. 409: it does not run; 500: no `ps` there."""
        told = (await self._call("GET", f"/containers/{id}/top", params={"ps_args": "-eo pid"}, limit=limit)).json()
        column = [title.upper() for title in told["Titles"]].index("PID")
        return tuple(int(row[column]) for row in told["Processes"] or ())

    async def containers(self, label: str) -> list[Json]:
        """All that carry it, running or not, in Docker's short form."""
        params = {"all": "1", "filters": json.dumps({"label": [label]})}
        found: list[Json] = (await self._call("GET", "/containers/json", params=params)).json()
        return found

    async def create(self, name: str, body: Json) -> str:
        """The id. 409: the name is taken; 404: the image is missing."""
        id: str = (await self._call("POST", "/containers/create", params={"name": name}, body=body)).json()["Id"]
        return id

    async def start(self, id: str) -> None:
        """Nothing happens to one that runs."""
        await self._call("POST", f"/containers/{id}/start", limit=START)

    async def stop(self, id: str, grace: float) -> None:
        """Returns when it has ended: by itself, or killed after `grace` seconds (whole ones: rounded up)."""
        seconds = math.ceil(grace)
        await self._call("POST", f"/containers/{id}/stop", params={"t": str(seconds)}, limit=seconds + STOP_MARGIN)

    async def kill(self, id: str) -> None:
        """409: it does not run."""
        await self._call("POST", f"/containers/{id}/kill")

    async def remove(self, id: str) -> None:
        """With the volumes nobody named. 409: somebody already does."""
        await self._call("DELETE", f"/containers/{id}", params={"force": "1", "v": "1"})

    async def has_image(self, image: str) -> bool:
        try:
            await self._call("GET", f"/images/{image}/json")
        except DockerError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def logs(self, id: str, tail: int) -> bytes:
        """The last lines, out of their frames."""
        params = {"stdout": "1", "stderr": "1", "tail": str(tail)}
        frames = Frames()
        return b"".join(frames.feed((await self._call("GET", f"/containers/{id}/logs", params=params)).content))

    # ----------------------------------------------------------------------------------------------- streams

    @asynccontextmanager
    async def follow_logs(self, id: str, tail: int) -> AsyncIterator[AsyncIterator[bytes]]:
        """The last lines and what comes; ends when the container has ended."""
        params = {"stdout": "1", "stderr": "1", "follow": "1", "tail": str(tail)}
        async with self._stream("GET", f"/containers/{id}/logs", params) as response:
            yield self._pieces(response)

    @asynccontextmanager
    async def events(self, filters: dict[str, list[str]], since: float) -> AsyncIterator[AsyncIterator[Json]]:
        """Open once Docker has answered; `since` (seconds of the epoch) covers the moment until it listens."""
        params = {"filters": json.dumps(filters), "since": f"{since:.3f}"}
        async with self._stream("GET", "/events", params) as response:
            yield self._objects(response)

    @asynccontextmanager
    async def pull(self, image: str, tag: str) -> AsyncIterator[AsyncIterator[Json]]:
        """Docker's progress lines; one of them may be an error."""
        async with self._stream("POST", "/images/create", {"fromImage": image, "tag": tag}) as response:
            yield self._objects(response)

    # --------------------------------------------------------------------------------------------- underneath

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | None = None,
        body: Json | None = None,
        limit: float = CALL,
    ) -> httpx.Response:
        for last in (False, True):
            path_now = f"/v{await self.version()}{path}"
            try:
                response = await self._send(method, path_now, limit, params, body)
            except _Broken as broken:
                if last:
                    raise broken.away from None
                continue  # an idle connection had died with an earlier daemon; all calls bear being repeated
            if last or not self._is_other_version(response):
                break
        _raise_for(response)
        return response

    async def _send(
        self, method: str, path: str, limit: float, params: dict[str, str] | None = None, body: Json | None = None
    ) -> httpx.Response:
        try:
            return await self._http.request(method, path, params=params, json=body, timeout=limit)
        except httpx.TransportError as error:
            self._version = None
            reason = away(self.socket, error, limit)
            if isinstance(error, httpx.TimeoutException | httpx.ConnectError):
                raise reason from None
            raise _Broken(reason) from None

    def _is_other_version(self, response: httpx.Response) -> bool:
        """Whether the daemon was exchanged for one that does not speak the version agreed on."""
        if response.status_code != 400 or "client version" not in _message(response):
            return False
        self._version = None
        return True

    @asynccontextmanager
    async def _stream(self, method: str, path: str, params: dict[str, str]) -> AsyncIterator[httpx.Response]:
        request = self._http.build_request(
            method, f"/v{await self.version()}{path}", params=params, timeout=httpx.Timeout(OPEN, read=None)
        )
        try:
            async with asyncio.timeout(OPEN):
                response = await self._http.send(request, stream=True)
        except (httpx.TransportError, TimeoutError) as error:
            self._version = None
            raise away(self.socket, error, OPEN) from None
        try:
            if response.status_code >= 400:
                await response.aread()
                _raise_for(response)
            yield response
        except httpx.TransportError as error:
            self._version = None
            raise away(self.socket, error, OPEN) from None
        finally:
            await response.aclose()

    @staticmethod
    async def _pieces(response: httpx.Response) -> AsyncIterator[bytes]:
        frames = Frames()
        async for data in response.aiter_raw():
            for piece in frames.feed(data):
                yield piece

    @staticmethod
    async def _objects(response: httpx.Response) -> AsyncIterator[Json]:
        async for line in response.aiter_lines():
            if line.strip():
                yield json.loads(line)


class _Broken(DockerAway):
    """A connection that was open broke: worth a second try."""

    def __init__(self, reason: DockerAway) -> None:
        super().__init__(str(reason))
        self.away = reason


class Frames:
    """A container's log without the frames that tell its output from its errors. Fed in any pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data
        pieces, at = [], 0
        while len(data) - at >= FRAME_HEAD:
            end = at + FRAME_HEAD + int.from_bytes(data[at + 4 : at + FRAME_HEAD], "big")
            if end > len(data):
                break
            pieces.append(data[at + FRAME_HEAD : end])
            at = end
        self._rest = data[at:]
        return pieces


def common_version(told: Json) -> str:
    """The newest version of the API both sides know, from what `GET /version` told. Raises DockerAway if none."""
    newest, oldest = _numbers(told["ApiVersion"]), _numbers(told.get("MinAPIVersion") or "1.0")
    if oldest > NEWEST:
        speaks, ours = told["MinAPIVersion"], ".".join(map(str, NEWEST))
        raise DockerAway(
            f"Docker {told.get('Version', '')} is too new: its API begins at version {speaks}, the gate's knowledge "
            f"of it ends at {ours}; update the gate"
        )
    return ".".join(map(str, min(newest, NEWEST)))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _raise_for(response: httpx.Response) -> None:
    if response.status_code >= 400:
        raise DockerError(response.status_code, _message(response))


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return response.text.strip() or response.reason_phrase
