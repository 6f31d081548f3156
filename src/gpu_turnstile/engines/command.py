"""Any HTTP server with a health path. It has no list, no queue and no unload: it leaves the card by being stopped."""

from __future__ import annotations

from typing import ClassVar

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Loaded, Probe, Release, Released
from gpu_turnstile.engines.http import HttpEngine, probe_of

NO_UNLOAD = Release(Released.UNSUPPORTED, "it has no call to unload: it gives the memory back when it is stopped")


class Command(HttpEngine):
    """`health_path` is the preset's: any 2xx there means ready."""

    kind: ClassVar[str] = "command"
    mode: ClassVar[Mode] = Mode.LLM
    health_path: str = "/health"

    async def probe(self) -> Probe:
        return probe_of(await self.get(self.health_path))

    async def loaded(self) -> tuple[Loaded, ...] | None:
        return None

    async def busy(self) -> bool | None:
        return None

    async def release(self) -> Release:
        return NO_UNLOAD


class Train(Command):
    """A training service: the same plain server, of the mode `train`."""

    kind: ClassVar[str] = "train"
    mode: ClassVar[Mode] = Mode.TRAIN
