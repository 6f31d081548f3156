"""What servers with OpenAI's API share: one model, a health path, a list; off the card when they are stopped."""

from __future__ import annotations

import time
from typing import ClassVar

import msgspec

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Loaded, Probe, Release
from gpu_turnstile.engines.command import NO_UNLOAD
from gpu_turnstile.engines.http import probe_of
from gpu_turnstile.engines.keyed import KeyedEngine


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


Step = tuple[str, str, object | None]  # method, path, body


class OpenAIServer(KeyedEngine):
    mode: ClassVar[Mode] = Mode.LLM

    async def in_turn(self, steps: tuple[Step, ...], limit: float) -> str | None:
        """One call after the other, all within `limit` seconds; the first that goes wrong ends it and is told."""
        deadline = time.monotonic() + limit
        for method, path, body in steps:
            reply = await self.ask(method, path, body, max(0.001, deadline - time.monotonic()))
            if not reply.ok:
                return f"{path}: {reply.reason}"
        return None

    async def probe(self) -> Probe:
        return probe_of(await self.get("/health"))

    async def loaded(self) -> tuple[Loaded, ...] | None:
        """The names it serves its one model under; where there is no answer, nothing is known."""
        listed = (await self.get("/v1/models")).read(_Models)
        return None if listed is None else tuple(Loaded(model.id) for model in listed.data)

    async def busy(self) -> bool | None:
        return None

    async def release(self) -> Release:
        return NO_UNLOAD
