"""Connections to engines. One `Upstream` is one address with its idle connections; one exchange uses one at a time.

Kept true here: an idle connection is used again only within `idle_limit` seconds of its last answer, because engines
close theirs without notice and a POST that may have reached one must not be sent twice; a connection on which anything
unasked arrives is closed.

Some engines close at once after answers of one kind and do not say so (llama.cpp, after streams). The next request
would be in that connection before its end is seen, so nothing is taken for granted: after an answer of each kind the
first connections are left alone until they have stayed open for `PROOF`; where one is closed instead, connections are
not used again after such answers, for `DISTRUST`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Protocol, cast
from urllib.parse import urlsplit

# Of Linux's struct tcp_info: milliseconds since the last data was sent, an acknowledgement, the last data received.
_TCP_INFO = struct.Struct("=44xIII")

PROOF = 0.1  # seconds
PROBES = 4  # connections that are left alone at a time to see that
DISTRUST = 60.0  # seconds


class Receiver(Protocol):
    """What an exchange is to its upstream connection."""

    def upstream_data(self, data: bytes) -> None: ...
    def upstream_lost(self, error: Exception | None) -> None: ...
    def upstream_eof(self) -> None: ...
    def upstream_full(self) -> None: ...
    def upstream_drained(self) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    __slots__ = ("answered", "idle_since", "receiver", "reused", "transport", "upstream")

    transport: asyncio.Transport

    def __init__(self, upstream: Upstream) -> None:
        self.transport = None  # type: ignore[assignment]  # until connection_made, before which nobody has it
        self.upstream = upstream
        self.receiver: Receiver | None = None
        self.reused = False
        self.idle_since = 0.0
        self.answered: type | None = None  # the framing of its last answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.upstream.open += 1

    def data_received(self, data: bytes) -> None:
        if self.receiver is not None:
            self.receiver.upstream_data(data)
        else:
            self.transport.abort()

    def eof_received(self) -> bool:
        if self.receiver is not None:
            self.receiver.upstream_eof()
            return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.open -= 1
        self.upstream.forget(self)
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.upstream_lost(exc)

    def pause_writing(self) -> None:
        if self.receiver is not None:
            self.receiver.upstream_full()

    def resume_writing(self) -> None:
        if self.receiver is not None:
            self.receiver.upstream_drained()

    def quiet(self) -> float:
        """Seconds since bytes went either way, by the system's own books; 0 where it does not say."""
        sock = self.transport.get_extra_info("socket")
        if sock is None or sys.platform != "linux" or sock.family == socket.AF_UNIX:
            return 0.0
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:
            return 0.0
        if len(info) < _TCP_INFO.size:
            return 0.0
        sent, _, received = _TCP_INFO.unpack(info)
        return float(min(sent, received)) / 1000

    def drop(self) -> None:
        """Close at once; the exchange that used it hears nothing more."""
        self.receiver = None
        self.transport.abort()


class Upstream:
    """`url` is http://host[:port] or unix:/path. Times in seconds."""

    def __init__(self, name: str, url: str, *, idle_limit: float = 0.5, connect_timeout: float = 10.0) -> None:
        self.name = name
        self.url = url
        self.idle_limit = idle_limit
        self.connect_timeout = connect_timeout
        self.open = 0
        self._keeps: set[type] = set()  # kinds of answers after which connections were seen to stay open …
        self._closes: dict[type, float] = {}  # … or to be closed, and until when that is believed
        self._idle: list[UpstreamConnection] = []
        if url.startswith("unix:"):
            self._path: str | None = url[5:]
        else:
            self._path = None
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80

    def take(self) -> UpstreamConnection | None:
        """An idle connection that can be trusted, if there is one: the one that was used last."""
        now = time.monotonic()
        for at in range(len(self._idle) - 1, -1, -1):
            connection = self._idle[at]
            age = now - connection.idle_since
            if age > self.idle_limit or connection.transport.is_closing():
                del self._idle[at]
                connection.drop()
            elif connection.answered in self._keeps or self._has_proved(connection, age):
                del self._idle[at]
                connection.reused = True
                return connection
        return None

    def _has_proved(self, connection: UpstreamConnection, age: float) -> bool:
        if age < min(PROOF, self.idle_limit / 2) or connection.answered is None:
            return False
        self._keeps.add(connection.answered)
        return True

    def give_back(self, connection: UpstreamConnection, answered: type) -> None:
        """Its answer is complete; `answered`: how that was framed."""
        connection.receiver = None
        connection.answered = answered
        connection.idle_since = time.monotonic()
        if answered in self._keeps or self._is_to_be_proved(answered, connection.idle_since):
            self._idle.append(connection)
        else:
            connection.transport.abort()

    def _is_to_be_proved(self, answered: type, now: float) -> bool:
        if self._closes.get(answered, 0.0) > now:
            return False
        return sum(connection.answered is answered for connection in self._idle) < PROBES

    def forget(self, connection: UpstreamConnection) -> None:
        """It has ended, and if it was idle, by the engine's will."""
        if connection in self._idle:
            self._idle.remove(connection)
            self.distrust(connection)

    def distrust(self, connection: UpstreamConnection) -> None:
        """The engine closed it though it should have stayed open."""
        if connection.answered is not None:
            self._keeps.discard(connection.answered)
            self._closes[connection.answered] = time.monotonic() + DISTRUST

    def connect(self, done: Callable[[UpstreamConnection | None, Exception | None], None]) -> None:
        """Open a new connection; `done` gets it, or the error, within `connect_timeout`."""
        task = asyncio.get_running_loop().create_task(self._connect())

        def finished(task: asyncio.Task[UpstreamConnection]) -> None:
            if task.cancelled():
                return
            error = task.exception()
            if error is None:
                done(task.result(), None)
            else:
                done(None, error if isinstance(error, Exception) else ConnectionError(str(error)))

        task.add_done_callback(finished)

    async def _connect(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(self)
        try:
            async with asyncio.timeout(self.connect_timeout):
                if self._path is not None:
                    await loop.create_unix_connection(lambda: connection, self._path)
                else:
                    await loop.create_connection(lambda: connection, self._host, self._port)
        except BaseException:
            if connection.transport is not None:  # given up in the very moment it was made
                connection.drop()
            raise
        return connection

    def close_idle(self) -> None:
        """Close what nobody uses: an engine that is to stop must not wait for it."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.drop()

    def sweep(self) -> None:
        """Close idle connections that are too old to be trusted."""
        limit = time.monotonic() - self.idle_limit
        for connection in [c for c in self._idle if c.idle_since < limit]:
            self._idle.remove(connection)
            connection.drop()
