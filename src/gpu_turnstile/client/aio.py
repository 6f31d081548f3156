"""The client for asyncio: the calls of `sync`, to await. The heartbeat is a task.

`ts.lock(…)` is a promise: `await` it for a lock without a heartbeat, or `async with` it for one that is kept.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, cast

import httpx

from gpu_turnstile.client import wire
from gpu_turnstile.client.errors import TurnstileError, Unreachable
from gpu_turnstile.client.keeper import FAREWELL, Held, Keeper, Steps, T
from gpu_turnstile.client.shapes import Event, Granted, Queued, Unlocked


class AsyncTurnstile:
    """A gate; see `Turnstile`, whose arguments and errors these are."""

    def __init__(
        self, url: str | None = None, key: str | None = None, owner: str | None = None, *, client: str | None = None
    ) -> None:
        self.url = wire.url(url)
        self.owner = owner or f"{wire.who()}:{os.getpid()}"
        self._http = httpx.AsyncClient(**wire.options(key, client))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncTurnstile:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------------- looking

    async def status(self) -> dict[str, Any]:
        return await self._object(wire.Call("GET", "/status"))

    async def mode(self, mode: str | None = None, model: str | None = None) -> dict[str, Any]:
        return await self._object(wire.mode(mode, model))

    async def unload(self) -> dict[str, Any]:
        return await self._object(wire.unload())

    async def models(self) -> list[dict[str, Any]]:
        return list((await self._object(wire.Call("GET", "/v1/models")))["data"])

    async def contexts(self) -> dict[str, Any]:
        """Saved conversations: `GET /v1/contexts`."""
        return await self._object(wire.Call("GET", "/v1/contexts"))

    async def drop_contexts(self, preset: str | None = None) -> dict[str, Any]:
        """Remove them, of one preset or of all; how many files and bytes that were."""
        return await self._object(wire.drop_contexts(preset))

    async def contention(
        self, since: str, until: str | None = None, query: Mapping[str, Iterable[str]] | None = None
    ) -> dict[str, Any]:
        return await self._object(wire.contention(since, until, query or {}))

    async def metrics(self) -> str:
        return wire.text(await self._send(wire.Call("GET", "/metrics")))

    async def events(self, since: int | None = None, follow: bool = True) -> AsyncIterator[Event]:
        limits = httpx.Timeout(wire.QUIET, connect=wire.CONNECT)
        query = wire.events_query(since, follow)
        try:
            async with self._http.stream("GET", self.url + "/events", params=query, timeout=limits) as reply:
                if not reply.is_success:
                    await reply.aread()
                    wire.read(wire.Call("GET", "/events"), reply)
                wire.check_identity(reply)
                lines = wire.EventLines()
                async for line in reply.aiter_lines():
                    for event in lines.feed(line):
                        yield event
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
        on_wait: Callable[[AsyncLock], None] | None = None,
        on_lost: Callable[[AsyncLock], None] | None = None,
    ) -> AsyncLock:
        """Take the lock, when it is awaited or entered; see `Turnstile.lock`."""
        return AsyncLock(self, Keeper(preset, owner or self.owner, ttl, wait, token, requeue), on_wait, on_lost)

    async def renew(
        self, owner: str | None = None, ttl: float | None = None, token: int | None = None
    ) -> Granted | Queued:
        call = wire.renew(owner or self.owner, ttl, token)
        return wire.read_lock(call, await self._send(call))

    async def unlock(
        self,
        owner: str | None = None,
        token: int | None = None,
        *,
        force: bool = False,
        everybody: bool = False,
        leave: bool = False,
        reason: str | None = None,
    ) -> Unlocked:
        call = wire.unlock(None if everybody else owner or self.owner, token, force, leave, reason)
        return wire.read_unlock(call, await self._send(call))

    async def release(self, reason: str) -> list[dict[str, Any]]:
        return list((await self._object(wire.release(reason)))["released"])

    # --------------------------------------------------------------------------------------------------- doing

    async def _object(self, call: wire.Call) -> dict[str, Any]:
        return wire.read(call, await self._send(call))

    async def _send(self, call: wire.Call) -> httpx.Response:
        if self._http.is_closed:
            raise Unreachable("this client was closed")
        try:
            return await self._http.request(call.method, self.url + call.path, json=call.body, timeout=call.timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            raise wire.absent(self.url, problem) from problem

    async def _try(self, call: wire.Call) -> wire.Outcome:
        """The outcome of a call about locks, as a value."""
        try:
            return wire.answer(call, await self._send(call))
        except TurnstileError as problem:
            return problem


class AsyncLock(Held):
    """A lock; see `Lock`. `lost` is an asyncio.Event."""

    def __init__(
        self,
        gate: AsyncTurnstile,
        keeper: Keeper,
        on_wait: Callable[[AsyncLock], None] | None,
        on_lost: Callable[[AsyncLock], None] | None,
    ) -> None:
        self.lost = asyncio.Event()
        self._gate = gate
        self._keeper = keeper
        self._on_wait, self._on_lost = on_wait, on_lost
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    def __await__(self) -> Generator[Any, None, AsyncLock]:
        return self._take().__await__()

    async def __aenter__(self) -> AsyncLock:
        if self._keeper.granted is None:
            await self._take()
        self._task = asyncio.create_task(self._follow(self._keeper.keeping(self._tell)), name="turnstile-heartbeat")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    async def release(self, limit: float = FAREWELL) -> bool:
        """End it; see `Lock.release`."""
        if self._ended:
            return True
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._ended = await self._follow(self._keeper.leaving(limit))
        return self._ended

    # --------------------------------------------------------------------------------------------------- doing

    async def _take(self) -> AsyncLock:
        try:
            await self._follow(self._keeper.taking(self._waits))
        except BaseException as problem:
            if not self._keeper.nothing_left(problem):
                await self._follow(self._keeper.leaving(0.0))
            raise
        return self

    async def _follow(self, steps: Steps[T]) -> T:
        """Carry out what the keeper says."""
        answer: wire.Outcome | None = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return cast(T, end.value)
            answer = None
            if isinstance(step, wire.Call):
                answer = await self._gate._try(step)
            else:
                await asyncio.sleep(step)
