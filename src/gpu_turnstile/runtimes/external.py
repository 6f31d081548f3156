"""An engine somebody else runs. It is never started or stopped from here; whether it serves, its probe tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from gpu_turnstile.runtimes.pids import Listener


class ExternalRuntime:
    kind: ClassVar[str] = "external"
    owned: ClassVar[bool] = False

    def __init__(self, url: str = "") -> None:
        """`url`: where it serves."""
        self.on_exit: Callable[[str], None] | None = None
        self._listener = Listener(url)

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""

    async def alive(self) -> bool:
        return True

    async def adopt(self) -> bool:
        """Nothing to take over: whoever runs it has it."""
        return True

    async def pids(self) -> tuple[int, ...]:
        """Whoever listens at its address, if that is on this machine and may be seen."""
        return await asyncio.to_thread(self._listener.pids)

    def output(self) -> tuple[str, ...]:
        return ()
