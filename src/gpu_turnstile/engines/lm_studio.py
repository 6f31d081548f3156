"""LM Studio 0.4 or newer: every loaded instance of every model is listed, and unloaded by its id.

It loads on demand, so nothing has to be made ready again. It does not tell whether an instance works on something, and
an unload is said to interrupt what runs: a release belongs after the drain. It gives no figures of video memory.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health, Loaded, Probe, Release
from gpu_turnstile.engines.http import Reply, probe_of
from gpu_turnstile.engines.keyed import KeyedEngine
from gpu_turnstile.engines.polling import Look, Told, Wait, deadline_of, told, until_empty

MODELS = "/api/v1/models"
UNLOAD = "/api/v1/models/unload"


class _Config(msgspec.Struct):
    context_length: int | None = None


class _Instance(msgspec.Struct):
    id: str
    config: _Config | None = None


class _Model(msgspec.Struct):
    loaded_instances: list[_Instance]
    key: str = ""


class _Models(msgspec.Struct):
    models: list[_Model]


class LMStudio(KeyedEngine):
    kind: ClassVar[str] = "lm-studio"
    mode: ClassVar[Mode] = Mode.LLM

    async def probe(self) -> Probe:
        reply = await self.get(MODELS)
        if reply.status == 404:
            return Probe(Health.BROKEN, f"it has no {MODELS}: it is older than 0.4")
        if reply.ok and _instances(reply) is None:
            return Probe(Health.BROKEN, f"{MODELS} did not answer with a list")
        return probe_of(reply)

    async def loaded(self) -> tuple[Loaded, ...] | None:
        return _instances(await self.get(MODELS))

    async def busy(self) -> bool | None:
        """Nothing loaded is nothing to do; whether an instance works, it does not say."""
        loaded = await self.loaded()
        return None if loaded is None or loaded else False

    async def release(self) -> Release:
        deadline = deadline_of(self.timing)
        return await until_empty(Wait(MODELS), self._look, self._unload, self.timing, deadline)

    async def _look(self, limit: float) -> Look:
        reply = await self.get(MODELS, limit)
        instances = _instances(reply)
        return Look(reply, None if instances is None else tuple(instance.name for instance in instances))

    async def _unload(self, instance: str, limit: float) -> Told:
        return told(await self.post(UNLOAD, {"instance_id": instance}, limit))


def _instances(reply: Reply) -> tuple[Loaded, ...] | None:
    listing = reply.read(_Models)
    if listing is None:
        return None
    found = ((model, instance) for model in listing.models for instance in model.loaded_instances)
    return tuple(Loaded(instance.id, detail=_detail(model, instance)) for model, instance in found)


def _detail(model: _Model, instance: _Instance) -> dict[str, object]:
    length = instance.config.context_length if instance.config else None
    known = {"model": model.key or None, "context_length": length}
    return {key: value for key, value in known.items() if value is not None}
