"""The gate's listeners and its clients' connections.

A connection carries one exchange at a time; requests that come early wait in its buffer. `Gateway` is what all
connections share: the arbiter, the addresses of the engines, the options, and the counts.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

import structlog

from gpu_turnstile.arbiter import Arbiter, Ticket
from gpu_turnstile.core.model import Code, Mode
from gpu_turnstile.core.routes import Directory, Resolution, UnknownModel, resolve
from gpu_turnstile.gateway import courtesy, errors, wire
from gpu_turnstile.gateway.errors import Problem
from gpu_turnstile.gateway.exchange import Exchange
from gpu_turnstile.gateway.guard import Guard
from gpu_turnstile.gateway.paths import Dialect, Kind, Place, Site, classify
from gpu_turnstile.gateway.upstream import Upstream
from gpu_turnstile.gateway.wire import Malformed, RequestHead

log = structlog.get_logger("gateway")

PAUSED_LOOK = 0.05  # seconds between two looks at connections that are not read from
LINGER = 2.0  # seconds a connection is kept after a refusal, for the answer to arrive
EARLY = 64 * 1024  # bytes a client may send ahead while its request is being answered

_HELLO = frozenset(("/api/hello",))
_COUNT = "/v1/messages/count_tokens"
_SLOTS = "/slots/"
_ENDED = (7, 8)  # TCP_CLOSE, TCP_CLOSE_WAIT

_classify = lru_cache(maxsize=4096)(classify)


@dataclass(frozen=True, slots=True)
class Options:
    """Limits in bytes and seconds; the defaults are the settings' own."""

    body_limit: int = 256 << 20
    head_limit: int = 64 << 10
    max_headers: int = 256
    prompt_capture_limit: int = 65536
    llm_wait: float | None = 600.0
    busy_status: int = 503
    backoff_initial: float = 1.0
    backoff_max: float = 60.0
    upstream_idle: float = 0.5
    connect_timeout: float = 10.0
    head_timeout: float = 60.0
    idle_timeout: float = 300.0
    body_timeout: float = 120.0
    max_connections: int = 10_000
    keepalive_interval: float = 15.0
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    api_keys: Mapping[str, str] = field(default_factory=dict)  # key -> name of the client
    log_requests: bool = False

    def wait_limit(self, site: Site) -> float | None:
        """How long a request may wait for the card; an image job waits as long as its client does."""
        return self.llm_wait if site is Site.LLM else None


@dataclass(slots=True)
class Counts:
    connections: int = 0
    requests: int = 0
    died_midstream: int = 0
    unreachable: int = 0
    malformed: int = 0


@dataclass(slots=True)
class Table:
    """Which tenant serves which site. `external`: the Ollama somebody else runs.

    `served`: tenants whose engine answers to one model's name only, and that name.
    """

    directory: Directory = field(default_factory=Directory)
    external: str | None = None
    comfyui: str | None = None
    train: str | None = None
    listing_is_ours: bool = False
    served: Mapping[str, str] = field(default_factory=dict)


class Gateway:
    def __init__(
        self,
        arbiter: Arbiter,
        table: Table,
        control: Upstream,
        options: Options,
        follow: Callable[[Ticket, str | None], None],
    ) -> None:
        """`control` is the control API.

        `follow(ticket, job)` keeps a lease until the work behind an answer has ended; `job` None = nobody said which.
        """
        self.arbiter = arbiter
        self.table = table
        self.control = control
        self.options = options
        self.follow = follow
        self.counts = Counts()
        self.connections: set[ClientConnection] = set()
        self.away: set[str] = set()  # engines others run that did not take the last connection
        self._upstreams: dict[str, Upstream] = {}
        self._servers: list[asyncio.Server] = []
        self._guard = Guard(options.allowed_hosts, options.allowed_origins, options.api_keys)
        self._paused: set[ClientConnection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    # ----------------------------------------------------------------------------------------- addresses

    def upstream_of(self, tenant: str) -> Upstream | None:
        seat = self.arbiter.seat(tenant)
        if seat is None:
            return None
        upstream = self._upstreams.get(tenant)
        if upstream is None or upstream.url != seat.engine.url:
            if upstream is not None:
                upstream.close_idle()
            upstream = self._upstreams[tenant] = Upstream(
                tenant,
                seat.engine.url,
                idle_limit=self.options.upstream_idle,
                connect_timeout=self.options.connect_timeout,
            )
        return upstream

    def upstream_for(self, place: Place, path: str, bound: str | None = None) -> Upstream | Problem:
        """Where a request goes that does not need the card. `bound`: the tenant whose own listener it came in by."""
        if bound is not None and place.kind is not Kind.CONTROL:
            return (self.upstream_of(bound) if self._answers(bound) else None) or self.inactive(place.site)
        if path in _HELLO:
            return self.inactive(place.site)  # no engine knows it; the gate itself says hello
        if place.kind is Kind.RESIDENT and not self._llm_is_resident:
            message = "only an LLM engine that is on the card can answer this, and asking does not bring one in"
            return Problem(Code.SERVICE_INACTIVE, message, 404 if path == _COUNT else 0)
        if place.kind is Kind.RESIDENT and path.startswith(_SLOTS) and self._keeps_slots:
            return Problem("not_allowed", "the gate itself saves and restores this preset's slots (context_save)", 403)
        if place.kind is Kind.CONTROL or (place.kind is Kind.LISTING and self._lists_itself(place)):
            return self.control
        tenant = self._neutral_tenant(place)
        if tenant is None:
            return self.inactive(place.site)
        return self.upstream_of(tenant) or self.inactive(place.site)

    def _lists_itself(self, place: Place) -> bool:
        """Presets are listed by the gate; in Ollama's own terms only where there is no Ollama to do it."""
        native = place.dialect is Dialect.OLLAMA
        return self.table.listing_is_ours and not (native and self.table.external is not None)

    def _neutral_tenant(self, place: Place) -> str | None:
        if place.site is not Site.LLM:
            tenant = self.tenant_of(place.site)
            return tenant if tenant is not None and self._answers(tenant) else None
        resident = self.arbiter.resident
        if place.dialect is not Dialect.OLLAMA and resident is not None:
            seat = self.arbiter.seat(resident)
            if seat is not None and seat.tenant.mode is Mode.LLM:
                return resident
        return self.table.external

    @property
    def _llm_is_resident(self) -> bool:
        seat = self.arbiter.seat(self.arbiter.resident or "")
        return seat is not None and seat.tenant.mode is Mode.LLM

    @property
    def _keeps_slots(self) -> bool:
        """Whether the resident's slots are the gate's: another hand could fill the disk or mix conversations."""
        seat = self.arbiter.seat(self.arbiter.resident or "")
        return seat is not None and seat.keeper is not None

    def _answers(self, tenant: str) -> bool:
        """Whether an engine runs now: one of ours only while it is on the card."""
        seat = self.arbiter.seat(tenant)
        return seat is not None and (not seat.owned or self.arbiter.resident == tenant)

    def tenant_of(self, site: Site) -> str | None:
        return self.table.comfyui if site is Site.COMFYUI else self.table.train

    def is_external(self, tenant: str) -> bool:
        seat = self.arbiter.seat(tenant)
        return seat is not None and not seat.owned

    def inactive(self, site: Site) -> Problem:
        message = f"no {site.value} engine is on the card; reading does not bring one in, a request for work does"
        return Problem(Code.SERVICE_INACTIVE, message)

    def resolve(self, model: object, capability: str | None) -> Resolution:
        resident, directory = self.arbiter.nominal, self.table.directory
        locked = directory.unknown is UnknownModel.RESIDENT and self.arbiter.locked
        return resolve(directory, model, capability, (resident,) if resident else (), locked)

    def close_idle(self, tenant: str) -> None:
        """Nothing of ours may hold an engine's connections open while it is being stopped."""
        upstream = self._upstreams.get(tenant)
        if upstream is not None:
            upstream.close_idle()

    def quiet(self) -> dict[str, float]:
        """Seconds for which each tenant has sent nothing of the request it has sent nothing of for the longest."""
        found: dict[str, float] = {}
        for connection in self.connections:
            quiet = connection.exchange.quiet() if connection.exchange is not None else None
            if quiet is not None:
                found[quiet[0]] = max(quiet[1], found.get(quiet[0], 0.0))
        return found

    def refuses(self, head: RequestHead, place: Place) -> Problem | None:
        """Why this request may not come in at all; None = it may."""
        refusal = self._guard.refuses(head, place) if self._guard.active else None
        if refusal is None and place.kind is Kind.CLOSED:
            message = "this path steers the engine itself, and the gate does that; it was not passed on"
            return Problem("not_allowed", message, 403)
        return refusal

    def own_answer(self, head: RequestHead, place: Place) -> bytes | None:
        """What the gate says itself where no engine is there to say it: probes and browsers' pre-flights."""
        if place.kind is Kind.CONTROL:
            return None
        return courtesy.answer(head, place)

    # ------------------------------------------------------------------------------------------- trouble

    def unreachable(self, upstream: Upstream | None, why: str, pause: float) -> None:
        self.counts.unreachable += 1
        name = upstream.name if upstream else "?"
        log.warning("upstream_unreachable", engine=name, reason=why, retry_in=pause)

    def is_away(self, wants: tuple[str, ...]) -> bool:
        """Nobody else could serve the request, and its engine did not take the last connection."""
        return len(wants) == 1 and wants[0] in self.away and self.is_external(wants[0])

    def upstream_failed(self, upstream: Upstream | None, problem: Problem, *, midstream: bool) -> None:
        name = upstream.name if upstream else "?"
        if midstream:
            self.counts.died_midstream += 1
        log.warning("upstream_died_midstream" if midstream else "upstream_died", engine=name, reason=problem.message)

    def log_incoming(self, exchange: Exchange) -> None:
        head = exchange.head
        who = exchange.client.who(head) if exchange.client is not None else ""
        log.info("-->", method=head.method, path=head.path, client=who)

    def log_outgoing(self, exchange: Exchange, status: int | None, seconds: float) -> None:
        """`status` None: the answer did not end as one."""
        head = exchange.head
        log.info("<--", method=head.method, path=head.path, status=status or "cut off", seconds=round(seconds, 3))

    # ------------------------------------------------------------------------------------------ listening

    async def listen(self, site: Site, host: str, port: int, bound: str | None = None) -> int:
        """Open a listener; returns its port. `bound`: everything on it is for that tenant. Raises OSError."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: ClientConnection(self, site, bound), host or None, port, backlog=1024, reuse_address=True
        )
        self._servers.append(server)
        if self._sweeper is None:
            self._sweep()
        return int(server.sockets[0].getsockname()[1])

    def _sweep(self) -> None:
        """Close what has been slow or idle for too long."""
        options, now = self.options, time.monotonic()
        for connection in tuple(self.connections):
            connection.check(now)
        for upstream in (*self._upstreams.values(), self.control):
            upstream.sweep()
        period = min(options.head_timeout, options.idle_timeout, options.body_timeout, 4.0) / 4
        self._sweeper = asyncio.get_running_loop().call_later(period, self._sweep)

    def watch_paused(self, connection: ClientConnection) -> None:
        """Look now and then whether a client that is not read from is still there."""
        if not self._paused:
            asyncio.get_running_loop().call_later(PAUSED_LOOK, self._look_at_paused)
        self._paused.add(connection)

    def _look_at_paused(self) -> None:
        self._paused = {c for c in self._paused if c.is_paused and not c.transport.is_closing()}
        for connection in tuple(self._paused):
            connection.abort_if_left()
        if self._paused:
            asyncio.get_running_loop().call_later(PAUSED_LOOK, self._look_at_paused)

    def stop_listening(self) -> None:
        for server in self._servers:
            server.close()

    async def close(self) -> None:
        """Close every connection that is left."""
        self.stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in tuple(self.connections):
            connection.transport.abort()
        for upstream in (*self._upstreams.values(), self.control):
            upstream.close_idle()


class ClientConnection(asyncio.Protocol):
    __slots__ = (
        "_buffer",
        "_closing",
        "_pauses",
        "_since",
        "_who",
        "bound",
        "exchange",
        "gateway",
        "is_full",
        "keep_alive",
        "site",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, gateway: Gateway, site: Site, bound: str | None = None) -> None:
        self.gateway = gateway
        self.site = site
        self.bound = bound
        self.exchange: Exchange | None = None
        self.keep_alive = True
        self._buffer = b""
        self._pauses: set[str] | None = None
        self._closing = False
        self._who = ""
        self.is_full = False  # it reads more slowly than it is written to
        self._since = time.monotonic()  # when what the client owes us began, or last went on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        gateway = self.gateway
        gateway.counts.connections += 1
        gateway.connections.add(self)
        if len(gateway.connections) > gateway.options.max_connections:
            limit = gateway.options.max_connections
            self._reject(Problem(Code.BUSY, f"there are {limit} open connections, the most allowed", 503, 5))

    def connection_lost(self, exc: Exception | None) -> None:
        self.gateway.connections.discard(self)
        self._closing = True
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_lost()

    def eof_received(self) -> bool:
        """A client that sends no more has left; only inside a tunnel may the other side go on."""
        if self.exchange is not None:
            if self.exchange.client_eof():
                return True
            self.transport.abort()  # a close would first try to write what the client does not read any more
        return False

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is not None:
            if exchange.wants_body:
                self._since = time.monotonic()
                taken = exchange.feed(data)
                if taken == len(data):
                    return
                data = data[taken:]
            if self.exchange is not None:
                self._buffer += data
                if len(self._buffer) > EARLY:
                    self.pause("early")
                return
        if self._closing:
            return
        if self.is_full:  # it has not read the answers before: no more work until it has
            self._buffer += data
            self.pause("unread")
            return
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        else:
            self._since = time.monotonic()
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Begin the next exchange if its head is complete."""
        if data.startswith(b"\r\n"):
            data = data.lstrip(b"\r\n")
        end = data.find(wire.HEAD_END)
        limit = self.gateway.options.head_limit
        if end < 0 or end > limit:
            if len(data) > limit:
                self._malformed(Malformed(_too_long(data, limit), 431))
            else:
                self._buffer = data
            return
        end += 4
        try:
            head = wire.parse_request(data if end == len(data) else data[:end], self.gateway.options.max_headers)
        except Malformed as error:
            self._malformed(error)
            return
        self.gateway.counts.requests += 1
        self.keep_alive = head.keep_alive
        exchange = Exchange(self.gateway, self, head, _classify(self.site, head.method, head.path))
        self.exchange = exchange
        exchange.begin()
        if end < len(data):
            self.data_received(data[end:])

    def _malformed(self, error: Malformed) -> None:
        self.gateway.counts.malformed += 1
        log.info("malformed", client=self._address(), reason=error.reason)
        self._reject(Problem("bad_request", error.reason, error.status))

    def _reject(self, problem: Problem) -> None:
        """Answer on a connection that is then of no use any more."""
        self.transport.write(errors.response(problem, Dialect.PLAIN, keep_alive=False, cors=False))
        self._linger()

    def _linger(self) -> None:
        """Close so that what was written arrives: a close with unread bytes would make the answer vanish."""
        self._closing = True
        self._buffer = b""
        self._since = time.monotonic()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def check(self, now: float) -> None:
        """Close if the client has owed us something for too long."""
        options, waited = self.gateway.options, now - self._since
        if self._closing:
            if waited > LINGER:
                self.transport.abort()
        elif self.exchange is None:
            if not self._buffer:
                if waited > options.idle_timeout:
                    self.transport.close()
            elif waited > options.head_timeout:
                message = f"the head of the request did not arrive within {options.head_timeout:g} s"
                self._reject(Problem("timeout", message, 408))
        elif self.exchange.owes_body and not self._pauses and waited > options.body_timeout:
            self.exchange.body_overdue(options.body_timeout)

    # ----------------------------------------------------------------------- what an exchange does with it

    def who(self, head: RequestHead) -> str:
        """Who asks: its key's name, the name it gives itself, else its address and its program."""
        return head.client.decode("utf-8", "replace")[:100] if head.client else self.peer(head)

    def peer(self, head: RequestHead) -> str:
        """Where a request comes from: its address and its program."""
        if not self._who:
            self._who = f"{self._address()} {head.user_agent.decode('latin-1')[:60]}".strip()
        return self._who

    def _address(self) -> str:
        peer = self.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "local"

    def refuse(self, problem: Problem, dialect: Dialect, head: RequestHead) -> None:
        self.transport.write(
            errors.response(
                problem,
                dialect,
                keep_alive=self.keep_alive,
                head_only=head.method == "HEAD",
                cors=bool(head.origin),
            )
        )

    def exchange_done(self, linger: bool = False) -> None:
        """The answer is written; go on with the next request, or close. `linger`: the client is still sending."""
        self.exchange = None
        self._since = time.monotonic()
        if linger:
            self._linger()
            return
        if not self.keep_alive:
            self._closing = True
            self.transport.close()
            return
        if self._pauses:
            self.resume("early")
            self.resume("upload")
        if self._buffer:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self.exchange is None and self._buffer and not self._closing and not self.is_full:
            data, self._buffer = self._buffer, b""
            self._parse(data)

    def cut_off(self, last: bytes) -> None:
        """End the connection so that nobody can take the answer for complete: no last chunk, or a reset."""
        self.exchange = None
        self._closing = True
        if last:
            self.transport.write(last)
            self.transport.close()
            return
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def pause(self, reason: str) -> None:
        if self._pauses is None:
            self._pauses = set()
        if not self._pauses and not self.transport.is_closing():
            self.transport.pause_reading()
            self.gateway.watch_paused(self)
        self._pauses.add(reason)

    @property
    def is_paused(self) -> bool:
        return bool(self._pauses)

    def abort_if_left(self) -> None:
        """While nothing is read from a connection its end is not seen; the system knows it all the same."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and _has_ended(sock):
            self.transport.abort()

    def resume(self, reason: str) -> None:
        if self._pauses and reason in self._pauses:
            self._pauses.discard(reason)
            if not self._pauses and not self.transport.is_closing():
                self._since = time.monotonic()  # the client could not go on before
                self.transport.resume_reading()

    def take_early(self) -> bytes:
        """What the client sent behind the request that is being answered."""
        early, self._buffer = self._buffer, b""
        self.resume("early")
        return early

    def pause_writing(self) -> None:
        self.is_full = True
        if self.exchange is not None:
            self.exchange.client_full()

    def resume_writing(self) -> None:
        self.is_full = False
        if self.exchange is not None:
            self.exchange.client_drained()
        else:
            self.resume("unread")
            self._go_on()


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other side has closed or reset; False where the system does not say."""
    if not hasattr(socket, "TCP_INFO") or sock.family == socket.AF_UNIX:
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _ENDED
    except OSError:
        return True


def _too_long(data: bytes, limit: int) -> str:
    """Which field is to blame, so that a person can do something about it (cookies pile up on localhost)."""
    line = max(data[: limit + 1].split(b"\r\n"), key=len)
    name = line.partition(b":")[0] if b":" in line[:100] else b"the request line"
    what = name[:100].decode("latin-1")
    return f"the head of the request is larger than the {limit} bytes allowed; most of it is {what} ({len(line)} bytes)"
