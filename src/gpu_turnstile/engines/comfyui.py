"""ComfyUI: a queue of jobs whose ends must be found out by asking, and a `/free` that is a wish.

`/free` sets a flag that the worker acts on after its current job: so it is sent only when the queue is empty, once
per release, and its 200 is no proof. Jobs are followed by `/queue` first and `/history/<id>` second (in the other
order one can fall between them), never by websocket: events may be lost, and a second socket under a client's id
would deafen the first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import quote

import httpx
import msgspec

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health, JobEnd, JobPhase, Loaded, Probe, Release, Released, Timing
from gpu_turnstile.engines.comfyui_job import CONNECTIONS_KEPT, HistoryEntry, JobWatch, Sighting, Where, end_of
from gpu_turnstile.engines.http import LOADING_STATUS, Failure, HttpEngine, Reply, probe_of

GIVEN_UP_KEPT = 100

PHASES = {
    Where.QUEUED: JobPhase.QUEUED,
    Where.RUNNING: JobPhase.RUNNING,
    Where.SILENT: JobPhase.UNREACHABLE,
    Where.CUT: JobPhase.UNREACHABLE,
    Where.REFUSED: JobPhase.UNREACHABLE,
}


class _System(msgspec.Struct):
    comfyui_version: str = "of unknown version"


class _Stats(msgspec.Struct):
    system: _System


class _Queue(msgspec.Struct):
    queue_running: list[list[msgspec.Raw]]
    queue_pending: list[list[msgspec.Raw]]


@dataclass(frozen=True, slots=True)
class Queue:
    """The ids of the prompts in `/queue`. Pending is in the server's heap order, not the order of running."""

    running: tuple[str, ...]
    pending: tuple[str, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        return self.running + self.pending


class ComfyUI(HttpEngine):
    kind: ClassVar[str] = "comfyui"
    mode: ClassVar[Mode] = Mode.COMFYUI

    def __init__(self, url: str, http: httpx.AsyncClient, timing: Timing) -> None:
        super().__init__(url, http, timing)
        self._connections: deque[str] = deque(maxlen=CONNECTIONS_KEPT)  # that answered, for whatever reason asked
        self._given_up: deque[str] = deque(maxlen=GIVEN_UP_KEPT)  # jobs that had their time and are there for ever

    async def get(self, path: str, timeout: float | None = None) -> Reply:
        reply = await super().get(path, timeout)
        if reply.connection is not None and reply.connection not in self._connections:
            self._connections.append(reply.connection)
        return reply

    async def probe(self) -> Probe:
        reply = await self.get("/system_stats")
        stats = reply.read(_Stats)
        return Probe(Health.READY, f"ComfyUI {stats.system.comfyui_version}") if stats else probe_of(reply)

    async def loaded(self) -> tuple[Loaded, ...] | None:
        return None

    async def queue(self) -> Queue | None:
        return _queue(await self.get("/queue"))

    async def busy(self) -> bool | None:
        queue = await self.queue()
        return None if queue is None else bool(queue.ids)

    async def find_unknown(self, known: set[str]) -> tuple[str, ...] | None:
        """Prompts in the queue that are not `known`: somebody went past the gate. None = it could not be asked.

        Those that were followed for as long as a job may take are not among them: a worker that has died leaves its
        job in the queue for ever (seen: 0.3.64), and nobody must wait for that again and again.
        """
        queue = await self.queue()
        if queue is None:
            return None
        return tuple(job for job in queue.ids if job not in known and job not in self._given_up)

    async def release(self) -> Release:
        """Wait for the empty queue (`timing.unload_timeout`), then `/free` (`timing.free_timeout`)."""
        refusal = await self._until_idle()
        if refusal is not None:
            return refusal
        wish = {"unload_models": True, "free_memory": True}
        return _freed(await self.post("/free", wish, self.timing.free_timeout))

    async def track(self, job: str, on_phase: Callable[[JobPhase], None] | None = None) -> JobEnd:
        """Follow a job to its end (at most `timing.job_timeout`); a server that is gone keeps it `unload_timeout`."""
        try:
            async with asyncio.timeout(self.timing.job_timeout):
                return await self._follow(job, on_phase)
        except TimeoutError:
            self._given_up.append(job)
            return JobEnd.TIMEOUT

    async def _follow(self, job: str, on_phase: Callable[[JobPhase], None] | None) -> JobEnd:
        watch, told, loop = JobWatch(self.timing.unload_timeout), None, asyncio.get_running_loop()
        while True:
            sighting = await self._look_for(job)
            end = watch.see(sighting, loop.time())
            if end is not None:
                return end
            phase = PHASES.get(sighting.where, told)
            if on_phase is not None and phase is not None and phase is not told:
                on_phase(phase)
            told = phase
            await asyncio.sleep(self.timing.history_poll)

    async def _until_idle(self) -> Release | None:
        """None when the queue is empty, else why the release ends here.

        Work that is known to be there is waited for as long as a job may take; a queue that cannot be read is not.
        """
        loop = asyncio.get_running_loop()
        began, patience = loop.time(), self.timing.idle_timeout or self.timing.unload_timeout
        limit = self.timing.unload_timeout
        found = Release(Released.TIMEOUT, "its queue could not be read in time")
        while (left := began + limit - loop.time()) > 0:
            reply = await self.get("/queue", min(self.timing.call_timeout, left))
            if reply.failure is Failure.UNREACHABLE:
                return Release(Released.UNREACHABLE, reply.reason)
            if found.left and reply.was_cut_short(self.timing.call_timeout, left):
                break
            queue = _queue(reply)
            if queue is not None and not queue.ids:
                return None
            if queue is not None:
                limit = patience
            found = _still_busy(queue, reply)
            await asyncio.sleep(min(self.timing.unload_poll, max(0.0, began + limit - loop.time())))
        return found

    async def _look_for(self, job: str) -> Sighting:
        listed = await self.get("/queue")
        queue = _queue(listed)
        if queue is None:
            return Sighting(_trouble(listed))
        if job in queue.ids:
            where = Where.RUNNING if job in queue.running else Where.QUEUED
            return Sighting(where, connections=_connections(listed), others=frozenset(self._connections))
        return await self._look_in_history(job, listed)

    async def _look_in_history(self, job: str, listed: Reply) -> Sighting:
        reply = await self.get(f"/history/{quote(job, safe='')}")
        history = reply.read(dict[str, HistoryEntry])
        if history is None:
            return Sighting(_trouble(reply))
        if job not in history:
            return Sighting(Where.GONE, connections=_connections(listed, reply))
        end = end_of(history[job])
        return Sighting(Where.SILENT) if end is None else Sighting(Where.ENDED, end)


def _queue(reply: Reply) -> Queue | None:
    shape = reply.read(_Queue)
    if shape is None:
        return None
    return Queue(_ids(shape.queue_running), _ids(shape.queue_pending))


def _ids(items: list[list[msgspec.Raw]]) -> tuple[str, ...]:
    return tuple(str(msgspec.json.decode(item[1])) for item in items if len(item) > 1)


def _connections(*replies: Reply) -> frozenset[str]:
    return frozenset(reply.connection for reply in replies if reply.connection is not None)


def _trouble(reply: Reply) -> Where:
    """A connection refused or broken, or a 502 of what stands in front, may mean a restart; a slow answer does not."""
    if reply.refused:
        return Where.REFUSED
    cut = reply.failure in (Failure.UNREACHABLE, Failure.BROKEN) or reply.status in LOADING_STATUS
    return Where.CUT if cut else Where.SILENT


def _still_busy(queue: Queue | None, reply: Reply) -> Release:
    if queue is None:
        said = reply.reason if not reply.ok else "/queue did not answer with a queue"
        return Release(Released.TIMEOUT, f"its queue could not be read: {said}")
    detail = f"it is still working: {len(queue.running)} running, {len(queue.pending)} pending"
    return Release(Released.TIMEOUT, detail, queue.ids)


def _freed(reply: Reply) -> Release:
    if reply.ok:
        return Release(Released.ACCEPTED, "/free was accepted")
    if reply.status in (404, 405):
        return Release(Released.UNSUPPORTED, "it has no /free: it gives the memory back when it is stopped")
    if reply.status is not None:
        return Release(Released.REFUSED, f"/free {reply.reason}")
    outcome = Released.UNREACHABLE if reply.failure is Failure.UNREACHABLE else Released.TIMEOUT
    return Release(outcome, f"/free: {reply.reason}")
