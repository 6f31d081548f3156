"""A card as the loop may read it: never blocking, whatever the driver does.

One reading is under way at most. It runs in a daemon thread of its own: one that hangs for ever costs one thread, holds
no worker that others need, and does not keep the program from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

from gpu_turnstile.gpu.base import Card, Reading

READ_TIMEOUT = 1.0  # seconds


class Gauge:
    def __init__(self, card: Card) -> None:
        self.card = card
        self._under_way: asyncio.Future[Reading | None] | None = None

    @property
    def blind(self) -> bool:
        """Nothing will ever be read."""
        return self.card.kind == "none"

    async def read(self, timeout: float = READ_TIMEOUT) -> Reading | None:
        """None when the card does not say, or not within `timeout` seconds. Never raises."""
        if self.blind:
            return None
        if self._under_way is None or self._under_way.done():
            self._under_way = self._begin()
        try:
            async with asyncio.timeout(timeout):  # not wait_for: before Python 3.12 that can swallow a cancellation
                return await asyncio.shield(self._under_way)
        except TimeoutError:
            return None

    def _begin(self) -> asyncio.Future[Reading | None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reading | None] = loop.create_future()
        threading.Thread(target=self._run, args=(loop, future), name="card-reading", daemon=True).start()
        return future

    def _run(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Reading | None]) -> None:
        try:
            reading = self.card.read()
        except Exception:  # a reader that breaks its promise makes an unknown reading, not a dead gate
            reading = None
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(_settle, future, reading)


def _settle(future: asyncio.Future[Reading | None], reading: Reading | None) -> None:
    if not future.done():
        future.set_result(reading)
