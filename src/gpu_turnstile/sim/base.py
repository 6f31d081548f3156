"""What every simulated engine has: an ASGI application, a request log, counters, faults, a place on the card.

It knows no dialect. Invariant: `in_flight` is the number of requests that are being worked on now, and it goes
down however one ends (answered, client gone, cut, server closed).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from gpu_turnstile.sim.card import SimCard
from gpu_turnstile.sim.faults import F, FaultError

CONTROL = "/__sim__"
LOGGED_BODY = 4096  # bytes of a request body that are kept
LOGGED_REQUESTS = 2000


@dataclass(slots=True)
class Logged:
    """One request as it arrived. `time`: wall clock; `body`: its first bytes."""

    time: float
    method: str
    path: str
    query: str = ""
    body: str = ""


class Cut(Exception):
    """Raised by a handler or a stream: end the connection now, without a word."""


class Answer(Exception):
    """Raised before the first byte of a stream: answer this instead."""

    def __init__(self, response: Response) -> None:
        self.response = response


class Sim(Generic[F]):
    """One simulated engine. `name` is its name on the card; `card` defaults to one of its own, in memory."""

    kind: ClassVar[str]

    def __init__(self, name: str, card: SimCard | None, faults: F) -> None:
        self.name = name
        self.card = card or SimCard()
        self._faults = faults
        self.url = ""  # set by the runner
        self.in_flight = 0
        self.counters: Counter[str] = Counter()
        self.log: deque[Logged] = deque(maxlen=LOGGED_REQUESTS)
        self.closing = False  # it ends soon, and takes no new request
        self.exit_code: int | None = None
        self.leaving = asyncio.Event()  # the engine wants to end
        self.exited = asyncio.Event()  # it has ended: port closed, memory back
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[Callable[[], None]] = set()
        self._app = Starlette(
            routes=[*self.routes(), *self._control_routes()],
            exception_handlers={404: self.not_found, 405: self.not_found, Cut: _cut, Answer: _answer},
        )

    @property
    def faults(self) -> F:
        """Its switches, to be set one by one; the object stays the same for good."""
        return self._faults

    # ------------------------------------------------------------------------------------ what an engine fills in

    def routes(self) -> Sequence[BaseRoute]:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """The engine's inside, for tests and people (`GET /__sim__`)."""
        return {}

    def begin(self) -> None:
        """The process starts (an event loop runs)."""

    def wipe(self) -> None:
        """Everything the engine kept in memory is gone."""

    def not_found(self, request: Request, exc: Exception) -> Response:
        return PlainTextResponse("404 page not found", 404)

    def server_error(self) -> Response:
        return JSONResponse({"error": "simulated server error"}, 500)

    def terminate(self) -> None:
        """SIGTERM. The default: exit at once."""
        self.exit(0)

    # ------------------------------------------------------------------------------------ life

    def start(self) -> None:
        """A fresh process that has its port, on which nobody listens yet."""
        self.exit_code = None
        self.leaving.clear()
        self.exited.clear()
        self.begin()

    async def before_listening(self) -> None:
        """What it does before it takes connections; a process that ends meanwhile never takes any."""

    def exit(self, code: int) -> None:
        """The process ends: the runner closes the port (and a standalone process really exits)."""
        if self.exit_code is None:
            self.exit_code = code
            self.leaving.set()

    def end(self) -> None:
        """The process is gone: its tasks stop, its memory returns to the card."""
        for task in list(self._tasks):
            task.cancel()
        self.wipe()
        self.card.end(self.name)

    def restart(self) -> None:
        """As if the process had been replaced by a fresh one on the same port: open answers are cut."""
        for abort in list(self._open):
            abort()
        self.end()
        self.counters["restarts"] += 1
        self.begin()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextmanager
    def working(self) -> Iterator[None]:
        self.in_flight += 1
        self.counters["peak_in_flight"] = max(self.counters["peak_in_flight"], self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1

    # ------------------------------------------------------------------------------------ the door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["sim.abort"] = _aborter(send)
        if scope["path"].startswith(CONTROL):
            await self._app(scope, receive, send)
            return
        entry = Logged(time.time(), scope.get("method", "WS"), scope["path"], scope["query_string"].decode())
        self.log.append(entry)
        self.counters["requests"] += 1
        heard = _listener(receive, entry)
        self._open.add(scope["sim.abort"])
        try:
            await self._answer(scope, heard, send)
        finally:
            self._open.discard(scope["sim.abort"])

    async def _answer(self, scope: Scope, heard: Receive, send: Send) -> None:
        if self.faults.down or self.closing:
            await cut(scope, heard)
        elif self.faults.hang:
            await gone(heard)
        elif self.faults.server_error and scope["type"] == "http":
            await self.server_error()(scope, heard, send)
        else:
            await self._app(scope, heard, send)

    # ------------------------------------------------------------------------------------ /__sim__

    def _control_routes(self) -> list[Route]:
        return [
            Route(CONTROL, self._get_state, methods=["GET"]),
            Route(CONTROL + "/faults", self._post_faults, methods=["POST"]),
            Route(CONTROL + "/reset", self._post_reset, methods=["POST"]),
            Route(CONTROL + "/restart", self._post_restart, methods=["POST"]),
        ]

    async def _get_state(self, request: Request) -> Response:
        return JSONResponse(
            {
                "kind": self.kind,
                "name": self.name,
                "in_flight": self.in_flight,
                "counters": dict(self.counters),
                "faults": self.faults.as_dict(),
                "state": self.state(),
                "card": self.card.snapshot(),
                "log": [asdict(entry) for entry in self.log],
            }
        )

    async def _post_faults(self, request: Request) -> Response:
        try:
            self.faults.update(await request.json())
        except (FaultError, ValueError, AttributeError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse(self.faults.as_dict())

    async def _post_reset(self, request: Request) -> Response:
        """Faults off, log and counters empty, the card's alarms forgotten. What is loaded stays."""
        self.faults.heal()
        self.log.clear()
        self.counters.clear()
        self.card.reset()
        return JSONResponse({})

    async def _post_restart(self, request: Request) -> Response:
        self.restart()
        return JSONResponse({})


class Work(Response):
    """An answer that takes the engine's time: chunks of a stream, or one response to wait for.

    Stops when the client leaves (unless the engine is told to ignore that). The head is sent with the first
    chunk, so an `Answer` raised before it can still be another status.
    """

    def __init__(
        self,
        sim: Sim[Any],
        work: AsyncGenerator[bytes, None] | Callable[[], Awaitable[Response]],
        media_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._sim = sim
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._sim.working():
            job = asyncio.ensure_future(self._produce(scope, receive, send))
            left = asyncio.ensure_future(gone(receive))
            try:
                await asyncio.wait({job, left}, return_when=asyncio.FIRST_COMPLETED)
                if not job.done():
                    self._sim.counters["clients_gone"] += 1
                    if getattr(self._sim.faults, "ignore_disconnect", False):
                        await asyncio.wait({job})
            finally:
                job.cancel()
                left.cancel()
                results = await asyncio.gather(job, left, return_exceptions=True)
            if isinstance(results[0], Cut):
                await cut(scope, receive)
            elif isinstance(results[0], Exception):
                raise results[0]

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if callable(self._work):
                await (await self._work())(scope, receive, send)
            else:
                await self._stream(self._work, send)
        except Answer as answer:
            await answer.response(scope, receive, send)

    async def _stream(self, chunks: AsyncGenerator[bytes, None], send: Send) -> None:
        started = False
        async with aclosing(chunks):
            async for chunk in chunks:
                if not started:
                    started = True
                    head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                    await send(head)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def gone(receive: Receive) -> None:
    """Return when the client has left (or the answer is complete)."""
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass


async def cut(scope: Scope, receive: Receive) -> None:
    """End the connection without another byte."""
    scope["sim.abort"]()
    await gone(receive)


async def until(condition: Callable[[], bool], poll_s: float = 0.01) -> None:
    """Wait for something that only looking can tell, such as a fault being switched off."""
    while not condition():  # noqa: ASYNC110 - switches are plain attributes, set from anywhere
        await asyncio.sleep(poll_s)


async def pause(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


def _cut(request: Request, exc: Exception) -> Response:
    return _CutResponse()


def _answer(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Answer)
    return exc.response


class _CutResponse(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await cut(scope, receive)


def _aborter(send: Send) -> Callable[[], None]:
    """uvicorn gives `send` as a method of the object that has the connection's transport."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    return transport.abort if transport is not None else lambda: None


def _listener(receive: Receive, entry: Logged) -> Receive:
    async def heard() -> Message:
        message = await receive()
        if message["type"] == "http.request" and len(entry.body) < LOGGED_BODY:
            entry.body += message["body"][: LOGGED_BODY - len(entry.body)].decode(errors="replace")
        return message

    return heard
