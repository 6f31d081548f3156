"""One request and its answer: from the head the client sent to the last byte it gets.

    receive the body ── work ──> read the model, ask the arbiter ──> granted ─┐
                     └─ neutral, control ─────────────────────────────────────┴─> connect, send, relay, finish

Kept true here, whoever leaves or dies at whatever moment:
- the ticket is released or left exactly once, and the connection to the engine is given back or closed;
- bytes of the answer are passed on as they came, when they came; a client that reads slowly pauses its own engine;
- an answer that was cut never looks complete;
- a request that may have reached an engine is never sent again;
- whoever waits for an engine that does not take connections keeps nobody from the card meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gpu_turnstile.arbiter import Ticket
from gpu_turnstile.core.model import Code
from gpu_turnstile.core.routes import BadModel, Missing, Resolved, Unresolved
from gpu_turnstile.gateway import courtesy, errors, intake, memory, signs, wire
from gpu_turnstile.gateway.errors import Problem
from gpu_turnstile.gateway.intake import BadBody
from gpu_turnstile.gateway.paths import Kind, Place, Site
from gpu_turnstile.gateway.rename import renamed
from gpu_turnstile.gateway.upstream import Upstream, UpstreamConnection
from gpu_turnstile.gateway.wire import Chunked, Malformed, RequestHead, ResponseHead, UntilClose

if TYPE_CHECKING:
    from gpu_turnstile.gateway.server import ClientConnection, Gateway

T = TypeVar("T")

HOLD_BACK = 256 * 1024  # bytes of a streamed body kept while the engine's connection is being opened
READ_TRIES = 3  # how often a read that was answered with 5xx is tried again
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JOB_SITES = frozenset((Site.INVOKEAI,))  # whose answers come before the work, besides ComfyUI's
_READ_KINDS = (Kind.NEUTRAL, Kind.LISTING)
_NO_TUNNEL = frozenset((b"h2", b"h2c", b"h3", b"http", b"tls"))
_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))


class _Prompt(msgspec.Struct):
    """The one field of ComfyUI's request and answer that matters here."""

    prompt_id: Any = None


_read_prompt = msgspec.json.Decoder(_Prompt).decode


def _prompt_id(body: bytes) -> str | None:
    try:
        found = _read_prompt(body).prompt_id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return found if isinstance(found, str) and found else None


class Exchange:
    __slots__ = (
        "_began",
        "_buffer",
        "_buffered",
        "_captured",
        "_connection",
        "_dead",
        "_early",
        "_extra",
        "_finished_sides",
        "_framing",
        "_pause",
        "_pieces",
        "_plain",
        "_prompt",
        "_reader",
        "_received",
        "_reply",
        "_request",
        "_retry",
        "_sent",
        "_sign",
        "_streamed",
        "_tail",
        "_ticket",
        "_tries",
        "_tunnel",
        "_upstream",
        "_wants",
        "_wrap",
        "client",
        "gateway",
        "head",
        "place",
    )

    def __init__(self, gateway: Gateway, client: ClientConnection, head: RequestHead, place: Place) -> None:
        self.gateway = gateway
        self.client: ClientConnection | None = client
        self.head = head
        self.place = place
        self._ticket: Ticket | None = None
        self._wants: tuple[tuple[str, ...], bool, bool] | None = None  # what the card was asked for, for the next time
        self._upstream: Upstream | None = None
        self._connection: UpstreamConnection | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._tries = 0
        self._pieces: list[bytes] = []
        self._received = 0
        self._buffered = False  # work: the whole body is here before it goes on
        self._reader: intake.Reader | None = None  # reads a large body while it comes
        self._streamed = False
        self._sent = False  # the request's head is on its way to an engine
        self._tunnel = False
        self._reply: ResponseHead | None = None
        self._buffer = b""
        self._captured: list[bytes] | None = None
        self._prompt: str | None = None  # the prompt_id the client chose itself
        self._began = time.monotonic()
        self._extra = False
        self._plain = False  # the rest of the answer goes to the client as it comes
        self._pause = False
        self._dead = False
        self._finished_sides = 0  # of a tunnel: how many said that they send no more
        self._request: wire.Framing = wire.NO_BODY
        self._framing: wire.Framing = wire.NO_BODY
        self._sign: asyncio.TimerHandle | None = None  # the next sign of life to a client that waits
        self._tail = b""  # the last bytes of an answer that is put into chunks
        self._wrap = False  # the engine's answer is put into chunks, because it was begun in them
        self._early = b""  # the content type of an answer that was begun while it waited

    # ------------------------------------------------------------------------------------------ the request

    def begin(self) -> None:
        """Decide what the request is and start receiving its body."""
        head, place = self.head, self.place
        self._request = wire.request_framing(head)
        if self.gateway.options.log_requests:
            self.gateway.log_incoming(self)
        refusal = self.gateway.refuses(head, place)
        if refusal is not None:
            self._fail(refusal)
            return
        if head.expect and head.expect != b"100-continue":
            self._fail(Problem("bad_request", f"the expectation {head.expect.decode('latin-1')!r} is not known", 417))
            return
        self._tunnel = self._wants_tunnel()
        if place.kind is Kind.WORK and not self._tunnel:
            limit = self.gateway.options.body_limit
            if head.length is not None and head.length > limit:
                self._fail(_too_large(limit))
                return
            self._buffered = True
            if isinstance(self._request, Chunked):
                self._request.payload = self._pieces
            if self._request.done:
                self._body_complete()
                return
            if place.site is Site.LLM and not head.encoding and (head.length is None or head.length > intake.WHOLE):
                self._reader = self._read(lambda: intake.reader_for(head, limit))
                if self._reader is None:
                    return
        else:
            upstream = self.gateway.upstream_for(place, head.path, self.client.bound if self.client else None)
            if isinstance(upstream, Problem):
                self._without_engine(upstream)
                return
            self._streamed = True
            self._upstream = upstream
            if upstream is self.gateway.control:
                wire.introduce(head, self.client.peer(head) if self.client is not None else "")
            self._open()
        if head.expect and head.http11 and not self._dead and not self._request.done and self.client is not None:
            self.client.transport.write(CONTINUE)

    def _without_engine(self, problem: Problem) -> None:
        """No engine is there to be asked: say it, unless it is something the gate can answer in its place."""
        if self.head.has_body and not self._request.done:
            self.head.keep_alive = False
        answer = self.gateway.own_answer(self.head, self.place)
        client = self.client
        if answer is None or client is None:
            self._fail(problem)
            return
        self.client = None
        self._stop()
        client.keep_alive = self.head.keep_alive
        client.transport.write(answer)
        client.exchange_done(linger=not self._request.done)

    def _wants_tunnel(self) -> bool:
        """An upgrade that the engine may answer. Another HTTP is not among them: it would carry work past the gate."""
        head = self.head
        if not head.upgrade or head.method != "GET" or head.has_body:
            return False
        if b"upgrade" not in wire.tokens(head.connection):
            return False
        return not any(token.partition(b"/")[0] in _NO_TUNNEL for token in wire.tokens(head.upgrade))

    @property
    def wants_body(self) -> bool:
        return not self._dead and (self._agreed or not self._request.done)

    @property
    def _agreed(self) -> bool:
        """The engine has switched to another protocol: bytes go both ways unread."""
        return self._tunnel and self._reply is not None

    @property
    def owes_body(self) -> bool:
        """The client has not sent all of its request yet."""
        return not self._dead and not self._tunnel and not self._request.done

    def body_overdue(self, limit: float) -> None:
        if self._reply is None:
            self._fail(Problem("timeout", f"the request body stood still for {limit:g} s", 408))
        else:
            self._break(Problem("timeout", f"the request body stood still for {limit:g} s"))

    def feed(self, data: bytes) -> int:
        """Take what belongs to this request out of `data`; returns how many bytes that were."""
        if self._agreed:
            self._send(data)
            return len(data)
        known = len(self._pieces)
        try:
            taken = self._request.take(data)
        except Malformed as error:
            self._fail(Problem("bad_request", error.reason, error.status))
            return len(data)
        own = data if taken == len(data) else data[:taken]
        if self._streamed:
            self._send(own)
            return taken
        if not self.head.chunked:  # else the framing has put the decoded bytes there
            self._pieces.append(own)
        self._received += taken
        if self._received > self.gateway.options.body_limit:
            self._fail(_too_large(self.gateway.options.body_limit))
        elif self._look_into(known) and self._request.done:
            self._body_complete()
        return taken if self._request.done or not self._dead else len(data)

    def _look_into(self, known: int) -> bool:
        """Let the reader see what has come since; False when it cannot be read."""
        reader = self._reader
        if reader is None:
            return True

        def look() -> bool:
            for piece in self._pieces[known:]:
                reader.feed(piece)
            return True

        return self._read(look) is not None

    def _read(self, look: Callable[[], T]) -> T | None:
        """What `look` finds in the body; None when the body is bad, and then the client has been told."""
        try:
            return look()
        except BadBody as error:
            code = "too_large" if error.status == 413 else "bad_request"
            self._fail(Problem(code, error.message, error.status))
            return None

    def _send(self, data: bytes) -> None:
        """Pass a piece of a streamed body on; hold it back while there is no connection yet."""
        if self._connection is not None and self._sent:
            self._connection.transport.write(data)
            return
        self._pieces.append(data)
        self._received += len(data)
        if self._received > HOLD_BACK and self.client is not None:
            self.client.pause("upload")

    def _body_complete(self) -> None:
        site = self.place.site
        bound = self.client.bound if self.client is not None else None
        if site is not Site.LLM or bound is not None:
            tenant = bound or self.gateway.tenant_of(site)
            if site is Site.COMFYUI:
                self._prompt = _prompt_id(b"".join(self._pieces))
            if tenant is None:
                self._fail(self.gateway.inactive(site))
            else:
                self._acquire((tenant,), in_place=False, stay=False)
        elif self._reader is not None:
            self._wished(self._read(self._reader.finish))
        elif self.head.encoding:
            self._read_aside()
        else:
            if len(self._pieces) > 1:
                self._pieces = [b"".join(self._pieces)]
            body = self._pieces[0] if self._pieces else b""
            self._wished(self._read(lambda: intake.read_wish(self.head, body, self.gateway.options.body_limit)))

    def _read_aside(self) -> None:
        """Inflate a compressed body in a thread: a small one may become large, and the loop must not wait for it."""
        body, limit = b"".join(self._pieces), self.gateway.options.body_limit
        reading = asyncio.get_running_loop().run_in_executor(None, intake.read_wish, self.head, body, limit)

        def done(reading: asyncio.Future[intake.Wish]) -> None:
            if not self._dead and not reading.cancelled():
                self._wished(self._read(reading.result))

        reading.add_done_callback(done)

    def _wished(self, wish: intake.Wish | None) -> None:
        """It is known what the request asks for: find out who serves it, and ask for the card."""
        if wish is None:
            return
        self._begin_signs(signs.kind(self.place.dialect, self.head.path, wish.stream), str(wish.model))
        match self.gateway.resolve(wish.model, self.head.capability.decode("latin-1") or None):
            case Resolved(wants, in_place, _, stay):
                self._acquire(wants, in_place, stay)
            case Unresolved(code, message):
                self._fail(Problem(code, message, field="model"))
            case Missing(message) | BadModel(message):
                self._fail(Problem("bad_request", message, field="model"))

    # ----------------------------------------------------------------------------------- while it waits

    def _begin_signs(self, kind: signs.Sign | None, model: str) -> None:
        interval = self.gateway.options.keepalive_interval
        if kind is not None and interval > 0:
            loop = asyncio.get_running_loop()
            self._sign = loop.call_later(interval, self._give_sign, kind, model)

    def _give_sign(self, kind: signs.Sign, model: str) -> None:
        """Tell a streaming client that waits that it is not forgotten, in a way its protocol calls harmless."""
        client = self.client
        if client is None or self._sent or self._dead:
            return
        position = self.gateway.arbiter.position(self._ticket.number) if self._ticket is not None else None
        text = signs.text(kind, model, position)
        out = wire.chunk(text) if self.head.http11 else text
        if not self._early:
            client.keep_alive = client.keep_alive and self.head.http11
            out = signs.head(kind, self.head.http11, client.keep_alive) + out
            self._early = kind.content_type
        client.transport.write(out)
        loop = asyncio.get_running_loop()
        self._sign = loop.call_later(self.gateway.options.keepalive_interval, self._give_sign, kind, model)

    def _end_signs(self) -> None:
        if self._sign is not None:
            self._sign.cancel()
            self._sign = None

    # ------------------------------------------------------------------------------------------- the card

    def _acquire(self, wants: tuple[str, ...], in_place: bool, stay: bool) -> None:
        gateway, head = self.gateway, self.head
        if head.lock_token and not head.lock_token.isdigit():
            self._fail(Problem("bad_request", "X-Turnstile-Lock must be the number that the lock was given with"))
            return
        self._wants = (wants, in_place, stay)
        if gateway.away and gateway.is_away(wants):  # nobody has to leave for an engine that may still be off
            self._upstream = gateway.upstream_of(wants[0])
            self._open()
            return
        ticket = gateway.arbiter.acquire(
            wants,
            in_place=in_place,
            wait=0 if stay else gateway.options.wait_limit(self.place.site),
            client=self.client.who(head) if self.client is not None else "",
            owner=_owner(head),
            token=int(head.lock_token[:18]) if head.lock_token else None,
            on_answer=self._answered,
            on_cut=self._cut,
        )
        self._ticket = ticket
        if ticket.tenant is not None or ticket.refusal is not None:
            self._answered(ticket)

    def _answered(self, ticket: Ticket) -> None:
        self._ticket = ticket
        if ticket.tenant is not None:
            self._upstream = self.gateway.upstream_of(ticket.tenant)
            self._open()
            return
        self._ticket = None
        refusal = ticket.refusal
        if refusal is not None:
            status = self.gateway.options.busy_status if refusal.code is Code.BUSY else 0
            self._fail(Problem(refusal.code, refusal.message, status, refusal.retry_after))

    def _cut(self, reason: str) -> None:
        """The lease was taken away: the engine is gone or has to go."""
        self._ticket = None
        self._break(Problem(Code.SWAP_FAILED if self._reply is None else "upstream_died", reason))

    # ------------------------------------------------------------------------------------------ the engine

    def _open(self) -> None:
        """Get a connection to the engine and send the request on it."""
        upstream = self._upstream
        if upstream is None:
            self._fail(Problem("upstream_unreachable", "the engine has no address"))
            return
        connection = None if self._tunnel else upstream.take()
        if connection is not None:
            self._reached(connection)
        else:
            upstream.connect(self._connected)

    def _connected(self, connection: UpstreamConnection | None, error: Exception | None) -> None:
        if self._dead:  # the client left meanwhile; a connection that is being made is better dropped when it is there
            if connection is not None:
                connection.drop()
        elif connection is None:
            self._unreachable(error)
        else:
            self._reached(connection)

    def _reached(self, connection: UpstreamConnection) -> None:
        """Use the connection; or, of an engine that was off and is there again, ask for the card now."""
        if self.gateway.away:
            self.gateway.away.discard(connection.upstream.name)
        if self._wants is None or self._ticket is not None:
            self._use(connection)
        else:
            connection.drop()
            self._acquire(*self._wants)

    def _unreachable(self, error: Exception | None) -> None:
        """The request certainly did not reach the engine: try again, longer and longer, until the client leaves.

        Without the card: it is asked for again when the engine is there.
        """
        why = str(error) or type(error).__name__
        if self._ticket is not None and self._ticket.tenant is not None:
            seat = self.gateway.arbiter.seat(self._ticket.tenant)
            if seat is not None and seat.owned:
                self.gateway.arbiter.lost(seat.tenant.name, f"does not take connections any more ({why})")
                return
        if self.place.kind is Kind.CONTROL:
            self._fail(Problem("upstream_unreachable", f"the control API does not answer: {why}"))
            return
        if self.place.kind is Kind.NEUTRAL and courtesy.answer(self.head, self.place) is not None:
            self._without_engine(Problem("upstream_unreachable", why))
            return
        self._go_without()
        self._later(why)

    def _go_without(self) -> None:
        """Nobody has to wait for the card behind an engine that does not take connections."""
        if self._upstream is not None and self.gateway.is_external(self._upstream.name):
            self.gateway.away.add(self._upstream.name)
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.on_cut = None
            self.gateway.arbiter.release(ticket)

    def _use(self, connection: UpstreamConnection) -> None:
        head = self.head
        self._connection = connection
        connection.receiver = self
        if self.client is not None and self.client.is_full:
            self.client_full()
        target = head.target
        if self._early:  # what was begun in plain text cannot go on compressed
            head.headers = [(n, v) for n, v in head.headers if n.lower() != b"accept-encoding"]
        if self.place.strip:
            target = target[self.place.strip :]
            if not target.startswith(b"/"):
                target = b"/" + target
        if self._tunnel:
            request = wire.upgrade_bytes(head, target)
        elif self._buffered:
            if self.gateway.table.served:
                self._rename()
            length = sum(map(len, self._pieces)) if head.has_body else head.length
            request = wire.request_bytes(head, target, length, False)
        else:
            request = wire.request_bytes(head, target, head.length, head.chunked)
        pieces, self._pieces = self._pieces, []
        if len(pieces) == 1 and len(pieces[0]) < HOLD_BACK:
            request += pieces[0]
            pieces = []
        self._sent = True
        self._end_signs()
        connection.transport.write(request)
        if pieces:
            connection.transport.writelines(pieces)
        if self._streamed and self.client is not None:
            self.client.resume("upload")

    def _rename(self) -> None:
        """Some engines refuse every model's name but their own."""
        name = self.gateway.table.served.get(self._upstream.name) if self._upstream is not None else None
        if name is not None and self._pieces:
            self._pieces = [renamed(self.head, b"".join(self._pieces), name)]

    # ------------------------------------------------------------------------------------------ the answer

    def upstream_data(self, data: bytes) -> None:
        if self._reply is None:
            self._reply_head(data)
            return
        if self._tunnel:
            if self.client is not None:
                self.client.transport.write(data)
            return
        framing = self._framing
        try:
            taken = framing.take(data)
        except Malformed as error:
            self._break(Problem("upstream_died", error.reason), between=False)
            return
        if taken != len(data):
            data, self._extra = data[:taken], True
        if self._plain and self.client is not None:
            self.client.transport.write(data)
        else:
            self._pass_on(data)
        if framing.done:
            self._finish()

    def _reply_head(self, data: bytes) -> None:
        """Gather the answer's head; go over interim answers."""
        data = self._buffer + data if self._buffer else data
        while True:
            end = data.find(wire.HEAD_END)
            if end < 0:
                self._buffer = data
                if len(data) > self.gateway.options.head_limit:
                    self._break(Problem("upstream_died", "the head of the engine's answer is too large"))
                return
            end += 4
            try:
                reply = wire.parse_response(data[:end])
            except Malformed as error:
                self._break(Problem("upstream_died", error.reason))
                return
            data = data[end:]
            if reply.status >= 200 or reply.status == 101:
                self._buffer = b""
                self._begin_reply(reply, data)
                return
            if reply.status != 100 and self.head.http11 and self.client is not None:
                self.client.transport.write(wire.switching_bytes(reply))

    def _begin_reply(self, reply: ResponseHead, rest: bytes) -> None:
        self._reply = reply
        client, head = self.client, self.head
        if reply.status == 101:
            self._begin_tunnel(reply, rest)
            return
        self._tunnel = False
        if reply.status >= 500 and not head.upgrade and self._ask_again(reply):
            return
        framing = wire.response_framing(reply, head.method)
        if isinstance(framing, Chunked) and not head.http11:
            framing.payload = []
        self._framing = framing
        if self.place.site is Site.COMFYUI and self._ticket is not None and reply.status == 200:
            self._captured = []
        self._plain = self._captured is None and not self._early and (head.http11 or not reply.chunked)
        until_close = isinstance(framing, UntilClose) or (isinstance(framing, Chunked) and not head.http11)
        keep = head.keep_alive and not until_close and self._request.done
        if self._early:
            self._go_on_early(reply, rest)
            return
        if client is not None:
            client.keep_alive = keep
        out = wire.response_bytes(reply, head.http11, keep, reply.chunked and head.http11, reply.length)
        if client is not None and (framing.done or not rest):
            client.transport.write(out)
            out = b""
        if framing.done:
            self._extra = bool(rest)
            self._finish()
        elif rest:
            self._first_bytes(out, rest)

    def _ask_again(self, reply: ResponseHead) -> bool:
        """A read that an engine somebody else runs answered with 5xx is tried again, a few times (turnstile document).

        After that the engine's own answer is passed on: hiding it for ever would help nobody.
        """
        upstream = self._upstream
        if self.head.method not in ("GET", "HEAD") or self.head.has_body or self.place.kind not in _READ_KINDS:
            return False
        if upstream is None or self._tries >= READ_TRIES or not self.gateway.is_external(upstream.name):
            return False
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()
        self._reply, self._sent, self._buffer = None, False, b""
        self._later(f"answered {reply.status}")
        return True

    def _later(self, why: str) -> None:
        """Try again after a pause that doubles from try to try."""
        options = self.gateway.options
        pause = min(options.backoff_initial * 2**self._tries, options.backoff_max)
        self._tries = min(self._tries + 1, 30)
        self.gateway.unreachable(self._upstream, why, pause)
        self._retry = asyncio.get_running_loop().call_later(pause, self._open)

    def _go_on_early(self, reply: ResponseHead, rest: bytes) -> None:
        """The answer was begun before the engine's: its body goes on in the stream that is open already."""
        if reply.status != 200 or not reply.content_type.startswith(self._early):
            problem = Problem("upstream_refused", f"the engine answered with status {reply.status}")
            self.gateway.upstream_failed(self._upstream, problem, midstream=True)
            self._fail(problem)
            return
        if self.head.http11 and not isinstance(self._framing, Chunked):
            self._wrap = True
        if self._framing.done:
            self._extra = bool(rest)
            self._end_wrapped()
            self._finish()
        elif rest:
            self._first_bytes(b"", rest)

    def _end_wrapped(self) -> None:
        if self._wrap and self.client is not None:
            self.client.transport.write(wire.LAST_CHUNK)

    def _first_bytes(self, out: bytes, rest: bytes) -> None:
        """The head and the first part of the body arrived together and leave together."""
        framing = self._framing
        try:
            taken = framing.take(rest)
        except Malformed as error:
            self._break(Problem("upstream_died", error.reason), between=False)
            return
        if taken != len(rest):
            rest, self._extra = rest[:taken], True
        self._pass_on(rest, out)
        if framing.done:
            self._finish()

    def _pass_on(self, data: bytes, before: bytes = b"") -> None:
        if self._captured is not None:
            self._capture(data)
        framing = self._framing
        if isinstance(framing, Chunked) and framing.payload is not None:
            data = b"".join(framing.payload)
            framing.payload.clear()
        if self._wrap:
            self._tail = (self._tail + data[-4:])[-4:]
            data = wire.chunk(data) if data else b""
            if framing.done:
                data += wire.LAST_CHUNK
        if self.client is not None:
            self.client.transport.write(before + data if before else data)

    def _capture(self, data: bytes) -> None:
        if self._captured is not None and sum(map(len, self._captured)) < self.gateway.options.prompt_capture_limit:
            self._captured.append(data)

    def _begin_tunnel(self, reply: ResponseHead, rest: bytes) -> None:
        """The engine agreed to another protocol: from here on bytes go both ways unread."""
        if not self._tunnel:
            self._reply = None
            self._break(Problem("upstream_died", "the engine switched protocols without being asked"))
            return
        if self.client is None or self._connection is None:
            return
        self.client.keep_alive = False
        self.client.transport.write(wire.switching_bytes(reply) + rest)
        early = self.client.take_early()
        if early:
            self._connection.transport.write(early)

    # ---------------------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """The answer is complete."""
        connection, self._connection = self._connection, None
        reply = self._reply
        self._dead = True
        if connection is not None:
            clean = reply is not None and reply.keep_alive and not self._extra and self._request.done
            clean = clean and not isinstance(self._framing, UntilClose)
            if clean and not self._tunnel and not self._pause:
                connection.upstream.give_back(connection, type(self._framing))
            else:
                connection.drop()
        self._release()
        self._log_end(reply.status if reply is not None else None)
        if self._received > memory.LARGE:
            memory.give_back_soon()
        client, self.client = self.client, None
        if client is not None:
            client.exchange_done()

    def _release(self) -> None:
        """The answer is complete. The work may go on: an image job lives until its engine says otherwise."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        ticket.on_cut = None
        if self._may_go_on():
            self.gateway.follow(ticket, self._job())
        else:
            self.gateway.arbiter.release(ticket)

    def _may_go_on(self) -> bool:
        """Whether there may be a job behind the answer. A refusal (4xx) of ComfyUI's has queued nothing."""
        reply = self._reply
        if self.place.site is Site.COMFYUI:
            return reply is None or reply.status == 200 or reply.status >= 500
        return self.place.site in JOB_SITES

    def _job(self) -> str | None:
        """The prompt_id in the answer to ComfyUI's /prompt, else the one the client chose; None = nobody said."""
        if self._captured is None or self._reply is None:
            return self._prompt
        raw = b"".join(self._captured)
        if self._reply.chunked:
            payload: list[bytes] = []
            Chunked(payload).take(raw)
            raw = b"".join(payload)
        return _prompt_id(raw) or self._prompt

    def upstream_eof(self) -> None:
        if self._agreed and self.client is not None:
            self._one_side_finished(self.client.transport)
        elif self._connection is not None:
            connection = self._connection
            self.upstream_lost(None)
            connection.drop()

    def upstream_lost(self, error: Exception | None) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.reused and self._reply is None:
            connection.upstream.distrust(connection)
        if self._dead:
            return
        if self._agreed:
            self._finish()
        elif self._reply is not None and isinstance(self._framing, UntilClose) and error is None:
            self._framing.done = True
            self._end_wrapped()
            self._finish()
        elif self._reply is None and not self._buffer and self._may_repeat(connection):
            self._sent = False
            self._open()
        else:
            what = "in the middle of its answer" if self._reply is not None else "before it answered"
            self._break(Problem("upstream_died", f"the engine closed the connection {what}"))

    def _may_repeat(self, connection: UpstreamConnection | None) -> bool:
        """A request without effect, on a connection that may have been closed long before."""
        reused = connection is None or connection.reused
        return reused and self.head.method in _SAFE_METHODS and not self.head.has_body and self._tries < 3

    def upstream_full(self) -> None:
        if self.client is not None:
            self.client.pause("upload")

    def upstream_drained(self) -> None:
        if self.client is not None:
            self.client.resume("upload")

    def client_full(self) -> None:
        self._pause = True
        if self._connection is not None:
            self._connection.transport.pause_reading()

    def client_drained(self) -> None:
        self._pause = False
        if self._connection is not None:
            self._connection.transport.resume_reading()

    def quiet(self) -> tuple[str, float] | None:
        """(tenant, seconds) since its engine sent anything of it; None where it is not the engine's turn."""
        ticket, connection = self._ticket, self._connection
        if ticket is None or ticket.tenant is None or connection is None or not self._sent or self._pause:
            return None
        return ticket.tenant, connection.quiet()

    def client_eof(self) -> bool:
        """The client sends no more. Inside a tunnel the other side may go on; else it has left."""
        if self._agreed and self._connection is not None:
            self._one_side_finished(self._connection.transport)
            return True
        return False

    def _one_side_finished(self, other: asyncio.Transport) -> None:
        """One side of a tunnel sends no more: tell the other one; when both are done, so is the tunnel."""
        self._finished_sides += 1
        if self._finished_sides == 2:
            self._finish()
        elif other.can_write_eof():
            other.write_eof()

    def client_lost(self) -> None:
        """The client has gone: out of every queue and count, and its engine's request is cancelled.

        An image job that was sent is not: ComfyUI runs it all the same, so its lease lives until it ends.
        """
        self.client = None
        if self._dead:
            return
        if self._sent and self.place.site is Site.COMFYUI and self._ticket is not None:
            return
        self._stop()
        self._log_end(None)

    def _log_end(self, status: int | None) -> None:
        if self.gateway.options.log_requests:
            self.gateway.log_outgoing(self, status, time.monotonic() - self._began)

    def _stop(self) -> None:
        """Give up everything this exchange holds."""
        self._dead = True
        self._pieces = []
        self._reader = None
        self._end_signs()
        if self._received > memory.LARGE:
            memory.give_back_soon()
        if self._retry is not None:
            self._retry.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        if self._sent and ticket.tenant is not None and self.place.site is Site.COMFYUI and self._may_go_on():
            ticket.on_cut = None  # it was sent and its answer was lost: ComfyUI may run it all the same
            self.gateway.follow(ticket, self._prompt)
        else:
            self.gateway.arbiter.leave(ticket)

    def _fail(self, problem: Problem) -> None:
        """Answer in the gate's own name. Nothing of an answer has been sent yet."""
        client, complete = self.client, self._request.done or not self.head.has_body
        self.client = None
        self._stop()
        self._log_end(problem.http_status if client is not None else None)
        if client is None:
            return
        if self._early:
            text = errors.in_band(problem, self.place.dialect, self._early, b"")
            client.cut_off(wire.chunk(text) if self.head.http11 else text)
            return
        client.keep_alive = self.head.keep_alive and complete
        client.refuse(problem, self.place.dialect, self.head)
        client.exchange_done(linger=not complete)

    def _break(self, problem: Problem, *, between: bool = True) -> None:
        """The engine failed. Before the answer began that is an error; in the middle of one, a visible break.

        `between`: everything that was received has been passed on, so that an error of ours may follow it.
        """
        reply = self._reply
        self.gateway.upstream_failed(self._upstream, problem, midstream=reply is not None)
        if reply is None:
            self._fail(problem)
            return
        client, self.client = self.client, None
        last = self._last_word(problem, reply) if between else b""
        self._stop()
        self._log_end(None)
        if client is not None:
            client.cut_off(last)

    def _last_word(self, problem: Problem, reply: ResponseHead) -> bytes:
        """An error in the stream's own terms, as a chunk; empty where it would end up inside something else."""
        framing = self._framing
        if self._wrap:
            tail = self._tail
        elif isinstance(framing, Chunked) and framing.boundary and framing.payload is None:
            tail = framing.tail
        else:
            return b""
        if any(name.lower() == b"content-encoding" for name, _ in reply.headers):
            return b""
        text = errors.in_band(problem, self.place.dialect, self._early or reply.content_type, tail)
        return wire.chunk(text) if text else b""


def _owner(head: RequestHead) -> str | None:
    """Whom a request says it belongs to, for locks; the name its client gives itself will do."""
    said = head.lock_owner or head.client
    return said.decode("utf-8", "replace")[:200] if said else None


def _too_large(limit: int) -> Problem:
    return Problem("too_large", f"the request body is larger than the {limit} bytes allowed (TURNSTILE_BODY_LIMIT)")
