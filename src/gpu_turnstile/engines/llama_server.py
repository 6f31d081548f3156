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
from gpu_turnstile.engines.http import probe_of
from gpu_turnstile.engines.llama_slots import LlamaSlots

SLOTS_SPACING = 2.0  # seconds
HOLDS_MEMORY = frozenset({"", "loaded", "loading"})  # router states; a plain server names none


class _NextToken(msgspec.Struct):
    n_decoded: int = 0


class _Slot(msgspec.Struct):
    is_processing: bool
    id_task: int = -1
    n_prompt_tokens: int = 0
    n_prompt_tokens_processed: int = 0
    next_token: list[_NextToken] | _NextToken | None = None

    @property
    def pulse(self) -> str:
        """Grows with every batch of the prompt and with every token."""
        token = self.next_token[0] if isinstance(self.next_token, list) and self.next_token else self.next_token
        made = token.n_decoded if isinstance(token, _NextToken) else 0
        return f"{self.id_task}:{self.n_prompt_tokens}:{self.n_prompt_tokens_processed}:{made}"


class _Props(msgspec.Struct):
    is_sleeping: bool = False


class _Status(msgspec.Struct):
    value: str = ""


class _Model(msgspec.Struct):
    id: str
    status: _Status | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class LlamaServer(LlamaSlots):
    kind: ClassVar[str] = "llama-server"
    mode: ClassVar[Mode] = Mode.LLM

    def __init__(self, url: str, http: httpx.AsyncClient, timing: Timing) -> None:
        super().__init__(url, http, timing)
        self._asking = asyncio.Lock()
        self._asked_at: float | None = None
        self._slots: list[_Slot] | None = []  # as of then; None = it did not say

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
        slots = await self._look()
        return None if slots is None else any(slot.is_processing for slot in slots)

    async def pulse(self) -> str | None:
        slots = await self._look()
        return None if slots is None else " ".join(slot.pulse for slot in slots if slot.is_processing)

    async def release(self) -> Release:
        return NO_UNLOAD

    async def _look(self) -> list[_Slot] | None:
        """Its slots, none while it sleeps; None = it does not say."""
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if self._asked_at is None or now - self._asked_at >= SLOTS_SPACING:
                self._slots = [] if await self._sleeping() else (await self.get("/slots")).read(list[_Slot])
                self._asked_at = asyncio.get_running_loop().time()
            return self._slots

    async def _sleeping(self) -> bool:
        props = (await self.get("/props")).read(_Props)
        return props is not None and props.is_sleeping


def _state(model: _Model) -> str:
    return model.status.value if model.status else ""
