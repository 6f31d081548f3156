"""The client for threads. Calls are safe from several threads; the heartbeat is a thread of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, cast

import httpx

from gpu_turnstile.client import wire
from gpu_turnstile.client.errors import TurnstileError, Unreachable
from gpu_turnstile.client.keeper import FAREWELL, Held, Keeper, Steps, T
from gpu_turnstile.client.shapes import Event, Granted, Queued, Unlocked


class Turnstile:
    """A gate. `url`: else TURNSTILE_URL, else this machine. `key`: else TURNSTILE_API_KEY.

    `owner`: who holds locks, `user@host:pid` unless said; `client`: who calls, `user@host` unless said. Every call
    raises TurnstileError; nothing is sent before the first.
    """

    def __init__(
        self, url: str | None = None, key: str | None = None, owner: str | None = None, *, client: str | None = None
    ) -> None:
        self.url = wire.url(url)
        self.owner = owner or f"{wire.who()}:{os.getpid()}"
        self._http = httpx.Client(**wire.options(key, client))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Turnstile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------- looking

    def status(self) -> dict[str, Any]:
        """`GET /status`."""
        return self._object(wire.Call("GET", "/status"))

    def mode(self, mode: str | None = None, model: str | None = None) -> dict[str, Any]:
        """What holds the card; with a `mode` bring it in (`idle`: empty the card) and wait until it is there."""
        return self._object(wire.mode(mode, model))

    def unload(self) -> dict[str, Any]:
        """Empty the card, after the requests in flight."""
        return self._object(wire.unload())

    def models(self) -> list[dict[str, Any]]:
        """What a request can name."""
        return list(self._object(wire.Call("GET", "/v1/models"))["data"])

    def contexts(self) -> dict[str, Any]:
        """Saved conversations: `GET /v1/contexts`."""
        return self._object(wire.Call("GET", "/v1/contexts"))

    def drop_contexts(self, preset: str | None = None) -> dict[str, Any]:
        """Remove them, of one preset or of all; how many files and bytes that were."""
        return self._object(wire.drop_contexts(preset))

    def contention(
        self, since: str, until: str | None = None, query: Mapping[str, Iterable[str]] | None = None
    ) -> dict[str, Any]:
        """Whether a measurement was alone on the card: `GET /contention`. `query`: owner, client, pid, allow."""
        return self._object(wire.contention(since, until, query or {}))

    def metrics(self) -> str:
        """Prometheus text."""
        return wire.text(self._send(wire.Call("GET", "/metrics")))

    def events(self, since: int | None = None, follow: bool = True) -> Iterator[Event]:
        """What happens, after a replay of what came after `since`. Ends when the gate shuts down."""
        limits = httpx.Timeout(wire.QUIET, connect=wire.CONNECT)
        query = wire.events_query(since, follow)
        try:
            with self._http.stream("GET", self.url + "/events", params=query, timeout=limits) as reply:
                if not reply.is_success:
                    reply.read()
                    wire.read(wire.Call("GET", "/events"), reply)
                wire.check_identity(reply)
                lines = wire.EventLines()
                for line in reply.iter_lines():
                    yield from lines.feed(line)
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            raise wire.absent(self.url, problem) from problem

    # --------------------------------------------------------------------------------------------------- locks

    def lock(
        self,
        preset: str | None = None,
        owner: str | None = None,
        ttl: float | None = None,
        wait: bool | float = False,
        token: int | None = None,
        *,
        requeue: bool = False,
        on_wait: Callable[[Lock], None] | None = None,
        on_lost: Callable[[Lock], None] | None = None,
    ) -> Lock:
        """Take the lock on `preset` (None = what is on the card). In a `with` block it is kept, and let go at its end.

        `wait`: False raises Locked at once; True queues; a number queues so many seconds, then raises Locked.
        `requeue`: after a loss queue again. `on_wait` is called after every answer while queued, `on_lost` by the
        heartbeat. Whatever ends the waiting, the place in the queue ends with it.
        """
        lock = Lock(self, Keeper(preset, owner or self.owner, ttl, wait, token, requeue), on_wait, on_lost)
        lock._take()
        return lock

    def renew(self, owner: str | None = None, ttl: float | None = None, token: int | None = None) -> Granted | Queued:
        """One heartbeat by hand, also for a waiter. Raises NotHeld, StaleLock."""
        call = wire.renew(owner or self.owner, ttl, token)
        return wire.read_lock(call, self._send(call))

    def unlock(
        self,
        owner: str | None = None,
        token: int | None = None,
        *,
        force: bool = False,
        everybody: bool = False,
        leave: bool = False,
        reason: str | None = None,
    ) -> Unlocked:
        """End `owner`'s lock and place (yours unless said), or with `everybody` all locks. Raises Locked if denied.

        `leave`: only the place in the queue. `reason` is told to those who lose by it.
        """
        call = wire.unlock(None if everybody else owner or self.owner, token, force, leave, reason)
        return wire.read_unlock(call, self._send(call))

    def release(self, reason: str) -> list[dict[str, Any]]:
        """Break the glass: end every lock and cut all work on the card. What was cut."""
        return list(self._object(wire.release(reason))["released"])

    # --------------------------------------------------------------------------------------------------- doing

    def _object(self, call: wire.Call) -> dict[str, Any]:
        return wire.read(call, self._send(call))

    def _send(self, call: wire.Call) -> httpx.Response:
        if self._http.is_closed:
            raise Unreachable("this client was closed")
        try:
            return self._http.request(call.method, self.url + call.path, json=call.body, timeout=call.timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            raise wire.absent(self.url, problem) from problem

    def _try(self, call: wire.Call) -> wire.Outcome:
        """The outcome of a call about locks, as a value."""
        try:
            return wire.answer(call, self._send(call))
        except TurnstileError as problem:
            return problem


class Lock(Held):
    """A lock that is held. In a `with` block a thread sends the heartbeat; outside of one nobody does.

    `lost` is set while the lock is not held although it should be: it lapsed, or somebody took it away.
    """

    def __init__(
        self,
        gate: Turnstile,
        keeper: Keeper,
        on_wait: Callable[[Lock], None] | None,
        on_lost: Callable[[Lock], None] | None,
    ) -> None:
        self.lost = threading.Event()
        self._gate = gate
        self._keeper = keeper
        self._on_wait, self._on_lost = on_wait, on_lost
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False

    def __enter__(self) -> Lock:
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="turnstile-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self, limit: float = FAREWELL) -> bool:
        """End it; whether the gate knows. A gate that does not answer is asked for `limit` seconds, then the TTL
        does it. Never raises; once it is ended it does nothing."""
        if self._ended:
            return True
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._ended = bool(self._follow(self._keeper.leaving(limit), time.sleep))
        return self._ended

    # --------------------------------------------------------------------------------------------------- doing

    def _take(self) -> None:
        try:
            self._follow(self._keeper.taking(self._waits), time.sleep)
        except BaseException as problem:
            if not self._keeper.nothing_left(problem):
                self._follow(self._keeper.leaving(0.0), time.sleep)
            raise

    def _beat(self) -> None:
        self._follow(self._keeper.keeping(self._tell), self._stop.wait)

    def _follow(self, steps: Steps[T], sleep: Callable[[float], bool | None]) -> T | None:
        """Carry out what the keeper says; None when `sleep` says that it is to stop."""
        answer: wire.Outcome | None = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return cast(T, end.value)
            answer = None
            if isinstance(step, wire.Call):
                answer = self._gate._try(step)
            elif sleep(step):
                return None
