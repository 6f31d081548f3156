"""LocalAI: every loaded model is a backend process of its own, listed by `/system` and ended by its name.

`/backend/shutdown` waits for the model's running requests (half a minute, then it refuses) and answers when the process
has ended. It loads on demand, so nothing has to be made ready again. Its memory figures are those of main memory.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar
from urllib.parse import quote

import msgspec

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Loaded, Probe, Release
from gpu_turnstile.engines.http import Reply, probe_of
from gpu_turnstile.engines.keyed import KeyedEngine
from gpu_turnstile.engines.polling import Look, Told, Wait, deadline_of, told, until_empty

SYSTEM = "/system"
MONITOR = "/backend/monitor"
SHUTDOWN = "/backend/shutdown"
BUSY = 1  # of its backends' states: 0 not begun (left out), 1 busy, 2 ready, -1 error


class _Model(msgspec.Struct):
    id: str


class _System(msgspec.Struct):
    loaded_models: list[_Model] | None


class _Status(msgspec.Struct):
    state: int = 0


class LocalAI(KeyedEngine):
    kind: ClassVar[str] = "localai"
    mode: ClassVar[Mode] = Mode.LLM

    async def probe(self) -> Probe:
        return probe_of(await self.get("/readyz"))

    async def loaded(self) -> tuple[Loaded, ...] | None:
        names = _names(await self.get(SYSTEM))
        return None if names is None else tuple(Loaded(name) for name in names)

    async def busy(self) -> bool | None:
        """Whether a backend says so; one that does not say makes it unknown, unless another is busy."""
        names = _names(await self.get(SYSTEM))
        if names is None:
            return None
        states = await asyncio.gather(*(self._state(name) for name in names))
        if BUSY in states:
            return True
        return None if None in states else False

    async def release(self) -> Release:
        deadline = deadline_of(self.timing)
        return await until_empty(Wait(SYSTEM), self._look, self._shut_down, self.timing, deadline)

    async def _state(self, name: str) -> int | None:
        status = (await self.get(f"{MONITOR}?model={quote(name, safe='')}")).read(_Status)
        return None if status is None else status.state

    async def _look(self, limit: float) -> Look:
        reply = await self.get(SYSTEM, limit)
        return Look(reply, _names(reply))

    async def _shut_down(self, name: str, limit: float) -> Told:
        return told(await self.post(SHUTDOWN, {"model": name}, limit))


def _names(reply: Reply) -> tuple[str, ...] | None:
    system = reply.read(_System)
    return None if system is None else tuple(model.id for model in system.loaded_models or ())
