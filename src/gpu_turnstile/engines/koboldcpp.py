"""koboldcpp, run with `--admin --admindir`: a model goes and comes by a restart of its worker.

`reload_config` with `unload_model` restarts it empty, with `initial_model` (or a file of its admin folder) loaded. For
a while then nobody listens: that is no error. It answers `success: false`, not an error status, when admin mode is off
or the password is wrong. Whether it works on something it tells, and a restart would cut that: so it must be idle
first.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health, Loaded, Probe, Release, Released
from gpu_turnstile.engines.http import Failure, Reply, probe_of
from gpu_turnstile.engines.keyed import KeyedEngine
from gpu_turnstile.engines.polling import Look, Told, Wait, deadline_of, told, until_empty

MODEL = "/api/v1/model"
VERSION = "/api/extra/version"
PERF = "/api/extra/perf"
RELOAD = "/api/admin/reload_config"
NO_MODEL = "inactive"
HIDDEN = "koboldcpp/protected-model"  # it has a password of its own, which is not the admin's
NO_ADMIN = "it answered that it will not: admin mode is off, or the admin password is wrong"
IDLE = Wait(PERF, still="it still has", done="it is idle")
UNLOADED = Wait(MODEL, done="it has no model", restarts=True)


class _Model(msgspec.Struct):
    result: str


class _Version(msgspec.Struct):
    """What it serves; a kind that a version does not name is taken as absent, but `llm` as unknown."""

    version: str
    llm: bool | None = None
    txt2img: bool = False
    transcribe: bool = False
    tts: bool = False
    embeddings: bool = False


class _Perf(msgspec.Struct):
    idle: int
    queue: int


class _Done(msgspec.Struct):
    success: bool


class KoboldCpp(KeyedEngine):
    """`api_key`: the admin password. `config`: what `admit` loads, a file of its admin folder or `initial_model`."""

    kind: ClassVar[str] = "koboldcpp"
    mode: ClassVar[Mode] = Mode.LLM
    config: str = "initial_model"

    async def probe(self) -> Probe:
        reply = await self.get(VERSION)
        version = reply.read(_Version)
        if version is not None:
            return Probe(Health.READY, f"koboldcpp {version.version}")
        return Probe(Health.BROKEN, f"{VERSION} did not answer as this server does") if reply.ok else probe_of(reply)

    async def loaded(self) -> tuple[Loaded, ...] | None:
        held = (await self._look(self.timing.call_timeout)).held
        return None if held is None else tuple(Loaded(name) for name in held)

    async def busy(self) -> bool | None:
        work = _work(await self.get(PERF))
        return None if work is None else bool(work)

    async def release(self) -> Release:
        deadline = deadline_of(self.timing)
        idle = await until_empty(IDLE, self._look_at_work, None, self.timing, deadline)
        if idle.outcome is not Released.EMPTY:
            return idle
        return await until_empty(UNLOADED, self._look, self._unload, self.timing, deadline)

    async def admit(self) -> Probe:
        look = await self._look(self.timing.call_timeout)
        if look.held is None:
            return probe_of(look.reply)
        if look.held:
            return Probe(Health.READY)
        refused = await self._reload(self.config, self.timing.call_timeout)
        return Probe(Health.BROKEN, refused.refusal) if refused.refusal else await self._until_loaded()

    async def _until_loaded(self) -> Probe:
        """The worker restarts and loads: a refused connection and an empty server are looks like any other."""
        try:
            async with asyncio.timeout(self.timing.warm_timeout):
                while True:
                    if (await self._look(self.timing.call_timeout)).held:
                        return Probe(Health.READY)
                    await asyncio.sleep(self.timing.unload_poll)
        except TimeoutError:
            return Probe(Health.LOADING, f"{self.config} was not loaded within {self.timing.warm_timeout:g} s")

    async def _look(self, limit: float) -> Look:
        named, serves = await asyncio.gather(self.get(MODEL, limit), self.get(VERSION, limit))
        model, version = named.read(_Model), serves.read(_Version)
        if model is None or version is None:
            return Look(named if model is None else serves, None)
        return Look(named, _held(model.result, version))

    async def _look_at_work(self, limit: float) -> Look:
        reply = await self.get(PERF, limit)
        return Look(reply, _work(reply))

    async def _unload(self, name: str, limit: float) -> Told:
        """It has one call for all of them; a second name's finds it restarting."""
        return await self._reload("unload_model", limit)

    async def _reload(self, config: str, limit: float) -> Told:
        reply = await self.post(RELOAD, {"filename": config}, limit)
        done = reply.read(_Done)
        if reply.failure in (Failure.UNREACHABLE, Failure.BROKEN):
            return Told()  # it restarts before it answers, or restarts already
        if done is not None and not done.success:
            return Told(NO_ADMIN, final=True)
        return Told(f"{RELOAD} is missing: it is too old", final=True) if reply.status == 404 else told(reply)


def _held(model: str, version: _Version) -> tuple[str, ...] | None:
    if model == HIDDEN and version.llm is None:
        return None
    text = version.llm if model == HIDDEN else model != NO_MODEL
    kinds = {
        model: text,
        "image model": version.txt2img,
        "speech recognition": version.transcribe,
        "speech": version.tts,
        "embeddings": version.embeddings,
    }
    return tuple(name for name, there in kinds.items() if there)


def _work(reply: Reply) -> tuple[str, ...] | None:
    perf = reply.read(_Perf)
    if perf is None:
        return None
    running = ("a running job",) if not perf.idle else ()
    return running + ((f"{perf.queue} waiting",) if perf.queue else ())
