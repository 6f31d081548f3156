"""Something that is looked at again and again, as long as the gate runs. A look that fails is a line in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger("rounds")


class Rounds:
    """`look` is called at once, then `pause` seconds after each look; 0 = never. `what` names it in the log."""

    def __init__(self, what: str, look: Callable[[], Awaitable[None]], pause: float) -> None:
        self._what = what
        self._look = look
        self._pause = pause
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._pause > 0:
            self._task = asyncio.get_running_loop().create_task(self._go())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _go(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                log.exception(f"{self._what} failed")
            await asyncio.sleep(self._pause)
