"""Work that outlives the answer to the request that began it: jobs of image servers.

A lease is held exactly as long as its job lives. The engine is asked, never its websocket; every end has a name. Where
nobody said which job it is (the answer was lost, or made no sense), the engine's queue is the truth: what is in it and
is not ours is followed, and if nothing is, there was no job.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from gpu_turnstile.arbiter import Arbiter, Ticket
from gpu_turnstile.engines.base import Engine, JobEnd, JobPhase, Timing
from gpu_turnstile.engines.comfyui import ComfyUI

log = structlog.get_logger("jobs")

AGREEING_LOOKS = 2


@dataclass(slots=True, eq=False)
class Job:
    """`since` is on the arbiter's clock."""

    prompt_id: str
    tenant: str
    since: float
    phase: JobPhase = JobPhase.QUEUED


class JobBook:
    """The jobs that run now, and how many ended in which way."""

    def __init__(self, arbiter: Arbiter, timing: Timing) -> None:
        self.ends: Counter[str] = Counter()
        self._arbiter = arbiter
        self._timing = timing
        self._jobs: set[Job] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def known(self) -> set[str]:
        """The ids of the jobs that are followed now."""
        return {job.prompt_id for job in self._jobs}

    def view(self) -> list[dict[str, Any]]:
        return [
            {"prompt_id": j.prompt_id, "tenant": j.tenant, "phase": str(j.phase), "since": j.since} for j in self._jobs
        ]

    def follow(self, ticket: Ticket, prompt_id: str | None) -> None:
        """Keep the lease until the job behind it has ended; None = find out whether there is one."""
        self.follow_all(ticket, None if prompt_id is None else (prompt_id,))

    def follow_all(self, ticket: Ticket, prompt_ids: Iterable[str] | None) -> None:
        """The same for several jobs under one lease."""
        tenant = ticket.tenant or ""
        seat = self._arbiter.seat(tenant)
        if seat is None:
            self._arbiter.release(ticket)
            return
        engine = seat.engine
        if not isinstance(engine, ComfyUI):
            work = self._until_idle(engine)
        elif prompt_ids is None:
            work = self._find_and_follow(engine, tenant)
        else:
            work = self._follow(engine, tenant, tuple(prompt_ids))
        task = asyncio.get_running_loop().create_task(self._hold(ticket, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ticket.on_cut = lambda reason: _cancel(task)

    async def _hold(self, ticket: Ticket, work: Any) -> None:
        try:
            await work
        except Exception:
            log.exception("a job could not be followed")
        finally:
            self._arbiter.release(ticket)

    async def _follow(self, engine: ComfyUI, tenant: str, prompt_ids: tuple[str, ...]) -> None:
        await asyncio.gather(*(self._track(engine, tenant, prompt_id) for prompt_id in prompt_ids))

    async def _find_and_follow(self, engine: ComfyUI, tenant: str) -> None:
        """The truth is in the queue: what is there and nobody follows may be ours."""
        found = await self._find(engine)
        if found:
            await self._follow(engine, tenant, found)
        else:
            reason = "its queue could not be read" if found is None else "nothing of it is in the queue"
            self._arbiter.tell("no_job", {"tenant": tenant, "reason": reason})

    async def _find(self, engine: ComfyUI) -> tuple[str, ...] | None:
        """What nobody follows, empty only if two looks agree; None = it could not be asked in the time of one job."""
        looks = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.job_timeout):
                while True:
                    found = await engine.find_unknown(self.known)
                    looks = looks + 1 if found is not None else 0
                    if found or looks == AGREEING_LOOKS:
                        return found
                    await asyncio.sleep(self._timing.history_poll)
        return None

    async def _until_idle(self, engine: Engine) -> None:
        """Of an engine that knows no job ids: until it says twice that it works on nothing."""
        looks = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timing.job_timeout):
                while looks < AGREEING_LOOKS:
                    looks = looks + 1 if await engine.busy() is False else 0
                    if looks < AGREEING_LOOKS:
                        await asyncio.sleep(self._timing.history_poll)

    async def _track(self, engine: ComfyUI, tenant: str, prompt_id: str) -> None:
        job = Job(prompt_id, tenant, time.monotonic())
        self._jobs.add(job)
        self._say(job)
        end: JobEnd | None = None
        try:
            end = await engine.track(prompt_id, lambda phase: self._phase(job, phase))
        finally:
            self._jobs.discard(job)
            self._ended(job, end)

    def _phase(self, job: Job, phase: JobPhase) -> None:
        job.phase = phase
        self._say(job)

    def _say(self, job: Job) -> None:
        self._arbiter.tell("job", {"prompt_id": job.prompt_id, "tenant": job.tenant, "phase": str(job.phase)})

    def _ended(self, job: Job, end: JobEnd | None) -> None:
        """`end` None: its lease was taken away, and nobody looks at it any more."""
        word = "abandoned" if end is None else str(end)
        self.ends[word] += 1
        seconds = round(time.monotonic() - job.since, 3)
        fields = {"prompt_id": job.prompt_id, "tenant": job.tenant, "end": word, "seconds": seconds}
        self._arbiter.tell("job_end", fields)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
