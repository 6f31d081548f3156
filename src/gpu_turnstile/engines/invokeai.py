"""InvokeAI: a queue that can really be paused, and a model cache that can be emptied.

Its cache statistics are those of the last job, not of now, so they are no list. What tells is the emptying itself: it
answers how many models it dropped, and twice none means that none was left (those in use are kept: so the queue must
be idle first). Versions that answer `null` can only be believed. A release leaves the processor paused, so that work
sent past the gate waits in its queue; `admit` resumes it.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health, Loaded, Probe, Release, Released
from gpu_turnstile.engines.http import Reply, probe_of
from gpu_turnstile.engines.keyed import KeyedEngine
from gpu_turnstile.engines.polling import Look, Wait, deadline_of, outcome_of, until_empty

QUEUE = "/api/v1/queue/default"
STATUS = f"{QUEUE}/status"
PAUSE = f"{QUEUE}/processor/pause"
RESUME = f"{QUEUE}/processor/resume"
EMPTY_CACHE = "/api/v2/models/empty_model_cache"
IDLE = Wait(STATUS, still="its queue still has", done="its queue is empty")
DROPPED = Wait(EMPTY_CACHE, still="it still drops", done="its model cache is empty")


class _Version(msgspec.Struct):
    version: str


class _Queue(msgspec.Struct):
    pending: int
    in_progress: int


class _Status(msgspec.Struct):
    queue: _Queue


class _Cleared(msgspec.Struct):
    models_cleared: int


class InvokeAI(KeyedEngine):
    kind: ClassVar[str] = "invokeai"
    mode: ClassVar[Mode] = Mode.COMFYUI

    async def probe(self) -> Probe:
        reply = await self.get("/api/v1/app/version")
        version = reply.read(_Version)
        if version is not None:
            return Probe(Health.READY, f"InvokeAI {version.version}")
        if reply.ok:
            return Probe(Health.BROKEN, "/api/v1/app/version did not answer as this server does")
        return probe_of(reply)

    async def loaded(self) -> tuple[Loaded, ...] | None:
        """Nothing as long as it has loaded no model since its start; later it does not say."""
        reply = await self.get("/api/v2/models/stats")
        return () if reply.ok and reply.body.strip() == b"null" else None

    async def busy(self) -> bool | None:
        """Something runs or waits in its queue, also while the processor is paused."""
        items = _items(await self.get(STATUS))
        return None if items is None else bool(items)

    async def release(self) -> Release:
        deadline = deadline_of(self.timing)
        idle = await until_empty(IDLE, self._look_at_queue, None, self.timing, deadline)
        if idle.outcome is not Released.EMPTY:
            return idle
        paused = await self.put(PAUSE)
        if not paused.ok:
            return outcome_of(paused, PAUSE)
        release = await self._release_paused(deadline)
        if release.outcome not in (Released.EMPTY, Released.ACCEPTED):
            await self.put(RESUME)  # it keeps the card: its users are not to wait for nothing
        return release

    async def _release_paused(self, deadline: float) -> Release:
        """Nothing new begins now; what slipped in before the pause ends first, what waits goes on waiting."""
        idle = await until_empty(IDLE, self._look_for_running, None, self.timing, deadline)
        if idle.outcome is not Released.EMPTY:
            return idle
        first = await self.post(EMPTY_CACHE, {})
        if first.ok and first.body.strip() == b"null":
            return outcome_of(first, EMPTY_CACHE)
        return await until_empty(DROPPED, self._drop, None, self.timing, deadline)

    async def admit(self) -> Probe:
        """Let the processor go on. Changes nothing in one that is not paused."""
        return probe_of(await self.put(RESUME))

    async def _look_at_queue(self, limit: float) -> Look:
        reply = await self.get(STATUS, limit)
        return Look(reply, _items(reply))

    async def _look_for_running(self, limit: float) -> Look:
        reply = await self.get(STATUS, limit)
        items = _items(reply)
        return Look(reply, None if items is None else tuple(item for item in items if item.endswith("in progress")))

    async def _drop(self, limit: float) -> Look:
        reply = await self.post(EMPTY_CACHE, {}, limit)
        cleared = reply.read(_Cleared)
        if cleared is None:
            return Look(reply, None)
        number = cleared.models_cleared
        return Look(reply, (f"{number} model{'s' * (number > 1)}",) if number else ())


def _items(reply: Reply) -> tuple[str, ...] | None:
    status = reply.read(_Status)
    if status is None:
        return None
    counts = ((status.queue.in_progress, "in progress"), (status.queue.pending, "pending"))
    return tuple(f"{number} {what}" for number, what in counts if number)
