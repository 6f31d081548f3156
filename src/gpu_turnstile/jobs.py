"""Work that outlives the answer to the request that began it: ComfyUI's jobs.

A lease is held exactly as long as its job lives. The engine is asked, never its websocket; every end has a name.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import structlog

from gpu_turnstile.arbiter import Arbiter, Ticket
from gpu_turnstile.engines.base import JobEnd, JobPhase
from gpu_turnstile.engines.comfyui import ComfyUI

log = structlog.get_logger("jobs")


@dataclass(slots=True)
class Job:
    prompt_id: str
    tenant: str
    since: float
    phase: JobPhase = JobPhase.QUEUED


class JobBook:
    """The jobs that run now, and how many ended in which way."""

    def __init__(self, arbiter: Arbiter) -> None:
        self.ends: Counter[str] = Counter()
        self._arbiter = arbiter
        self._jobs: dict[int, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, ticket: Ticket, prompt_id: str) -> None:
        """Keep the lease until the job has ended."""
        tenant = ticket.tenant or ""
        seat = self._arbiter.seat(tenant)
        if seat is None or not isinstance(seat.engine, ComfyUI):
            self._arbiter.release(ticket)
            return
        job = Job(prompt_id, tenant, time.monotonic())
        self._jobs[ticket.number] = job
        task = asyncio.get_running_loop().create_task(self._track(seat.engine, ticket, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ticket.on_cut = lambda reason: _cancel(task)
        self._arbiter.tell("job", {"prompt_id": prompt_id, "tenant": tenant, "phase": "sent"})

    async def _track(self, engine: ComfyUI, ticket: Ticket, job: Job) -> None:
        end = JobEnd.LOST
        try:
            end = await engine.track(job.prompt_id, lambda phase: self._phase(job, phase))
        finally:
            del self._jobs[ticket.number]
            self.ends[str(end)] += 1
            seconds = round(time.monotonic() - job.since, 3)
            self._arbiter.tell("job_end", {"prompt_id": job.prompt_id, "end": str(end), "seconds": seconds})
            if end in (JobEnd.LOST, JobEnd.TIMEOUT):
                log.warning("job_end", prompt_id=job.prompt_id, end=str(end), seconds=seconds)
            self._arbiter.release(ticket)

    def _phase(self, job: Job, phase: JobPhase) -> None:
        job.phase = phase
        self._arbiter.tell("job", {"prompt_id": job.prompt_id, "tenant": job.tenant, "phase": str(phase)})

    def view(self) -> list[dict[str, Any]]:
        """`since` is on the arbiter's clock."""
        return [
            {"prompt_id": j.prompt_id, "tenant": j.tenant, "phase": str(j.phase), "since": j.since}
            for j in self._jobs.values()
        ]


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
