"""AUTOMATIC1111's web UI and Forge (`--api`): one checkpoint, moved off the card and back by two calls.

`unload-checkpoint` does not wait for the job that runs and would break it: so it is sent only when `/progress` is
idle. It names no model, but `/memory` tells what torch holds: that is its list. After an unload the server keeps the
checkpoint in main memory and is stuck with it (its issue 12971) until `reload-checkpoint`: `admit` sends that.
"""

from __future__ import annotations

import base64
from typing import ClassVar

import msgspec

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health, Loaded, Probe, Release, Released
from gpu_turnstile.engines.http import Reply, probe_of
from gpu_turnstile.engines.keyed import KeyedEngine
from gpu_turnstile.engines.polling import Look, Told, Wait, deadline_of, outcome_of, told, until_empty

CHECKPOINT = "checkpoint"  # its name is nowhere to be read for sure: the options name the chosen one
RESIDUE = 512 << 20  # bytes torch keeps beside a model (workspaces); the smallest checkpoint is several times that
PROGRESS = "/sdapi/v1/progress"
MEMORY = "/sdapi/v1/memory"
UNLOAD = "/sdapi/v1/unload-checkpoint"
RELOAD = "/sdapi/v1/reload-checkpoint"
IDLE = Wait(PROGRESS, still="it still works on", done="it is idle")
OFF_THE_CARD = Wait(MEMORY, still="torch still holds the", done="torch holds no checkpoint")


class _State(msgspec.Struct):
    job_count: int
    job: str | None = None


class _Progress(msgspec.Struct):
    state: _State


class _Figure(msgspec.Struct):
    current: int


class _Cuda(msgspec.Struct):
    reserved: _Figure | None = None


class _Memory(msgspec.Struct):
    cuda: _Cuda


class A1111(KeyedEngine):
    """`api_key`: "user:password", as in its `--api-auth`."""

    kind: ClassVar[str] = "a1111"
    mode: ClassVar[Mode] = Mode.COMFYUI

    def headers(self) -> dict[str, str]:
        if not self.api_key:
            return {}
        return {"Authorization": f"Basic {base64.b64encode(self.api_key.encode()).decode()}"}

    async def probe(self) -> Probe:
        reply = await self._progress(self.timing.call_timeout)
        if reply.status == 404:
            return Probe(Health.BROKEN, "it has no /sdapi: it was started without --api")
        if reply.ok and reply.read(_Progress) is None:
            return Probe(Health.BROKEN, f"{PROGRESS} did not answer as this server does")
        return probe_of(reply)

    async def loaded(self) -> tuple[Loaded, ...] | None:
        held = _held(await self.get(MEMORY))
        if held is None:
            return None
        return (Loaded(CHECKPOINT, held),) if held > RESIDUE else ()

    async def busy(self) -> bool | None:
        """A job runs. One that waits behind it is not shown by the server."""
        job = _job(await self._progress(self.timing.call_timeout))
        return None if job is None else bool(job)

    async def release(self) -> Release:
        deadline = deadline_of(self.timing)
        idle = await until_empty(IDLE, self._look_for_job, None, self.timing, deadline)
        if idle.outcome is not Released.EMPTY:
            return idle
        memory = (await self.get(MEMORY)).read(_Memory)
        if memory is not None and memory.cuda.reserved is None:  # no CUDA: nothing to look at
            return outcome_of(await self.post(UNLOAD, {}), UNLOAD)
        return await until_empty(OFF_THE_CARD, self._look_at_memory, self._unload, self.timing, deadline)

    async def admit(self) -> Probe:
        """Bring the checkpoint back. Changes nothing when it is there; Forge loads with the next job anyway."""
        reply = await self.post(RELOAD, {}, self.timing.warm_timeout)
        return Probe(Health.READY) if reply.status == 404 else probe_of(reply)

    async def _progress(self, limit: float) -> Reply:
        return await self.get(f"{PROGRESS}?skip_current_image=true", limit)

    async def _look_for_job(self, limit: float) -> Look:
        reply = await self._progress(limit)
        return Look(reply, _job(reply))

    async def _look_at_memory(self, limit: float) -> Look:
        reply = await self.get(MEMORY, limit)
        held = _held(reply)
        return Look(reply, None if held is None else (CHECKPOINT,) * (held > RESIDUE))

    async def _unload(self, name: str, limit: float) -> Told:
        return told(await self.post(UNLOAD, {}, limit))


def _job(reply: Reply) -> tuple[str, ...] | None:
    """The job it works on; `job_count` is -1 between a job's begin and its first step, 0 when idle."""
    progress = reply.read(_Progress)
    if progress is None:
        return None
    state = progress.state
    return (state.job or "a job",) if state.job or state.job_count != 0 else ()


def _held(reply: Reply) -> int | None:
    """Bytes torch has taken from the card; None = it does not say (no CUDA)."""
    memory = reply.read(_Memory)
    return None if memory is None or memory.cuda.reserved is None else memory.cuda.reserved.current
