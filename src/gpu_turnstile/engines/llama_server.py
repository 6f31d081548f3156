"""llama.cpp's server: one process, one model, off the card when it is stopped.

What it must be spared: `/slots` asked more often than once a second switches off its check for clients that have
gone (dropped requests then run to their end), and wakes a server that sleeps. So `/slots` is asked at most every two
seconds, the answer kept meanwhile, and never while `/props` says that it sleeps. `/health` and `/props` are harmless.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import httpx
import msgspec

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Loaded, Probe, Release, Timing
from gpu_turnstile.engines.command import NO_UNLOAD
from gpu_turnstile.engines.http import HttpEngine, probe_of

SLOTS_SPACING = 2.0  # seconds
HOLDS_MEMORY = frozenset({"", "loaded", "loading"})  # router states; a plain server names none


class _Slot(msgspec.Struct):
    is_processing: bool


class _Props(msgspec.Struct):
    is_sleeping: bool = False


class _Status(msgspec.Struct):
    value: str = ""


class _Model(msgspec.Struct):
    id: str
    status: _Status | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class LlamaServer(HttpEngine):
    kind: ClassVar[str] = "llama-server"
    mode: ClassVar[Mode] = Mode.LLM

    def __init__(self, url: str, http: httpx.AsyncClient, timing: Timing) -> None:
        super().__init__(url, http, timing)
        self._asking = asyncio.Lock()
        self._asked_at: float | None = None
        self._busy: bool | None = None

    async def probe(self) -> Probe:
        return probe_of(await self.get("/health"))

    async def loaded(self) -> tuple[Loaded, ...] | None:
        listed = (await self.get("/v1/models")).read(_Models)
        if listed is None:
            return None
        if await self._sleeping():
            return ()
        return tuple(Loaded(model.id) for model in listed.data if _state(model) in HOLDS_MEMORY)

    async def busy(self) -> bool | None:
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if self._asked_at is None or now - self._asked_at >= SLOTS_SPACING:
                self._busy = False if await self._sleeping() else await self._working()
                self._asked_at = asyncio.get_running_loop().time()
            return self._busy

    async def release(self) -> Release:
        return NO_UNLOAD

    async def _working(self) -> bool | None:
        slots = (await self.get("/slots")).read(list[_Slot])
        return None if slots is None else any(slot.is_processing for slot in slots)

    async def _sleeping(self) -> bool:
        props = (await self.get("/props")).read(_Props)
        return props is not None and props.is_sleeping


def _state(model: _Model) -> str:
    return model.status.value if model.status else ""
