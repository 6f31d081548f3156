"""A look at the card that is under way: whoever waits for it can always be told to stop."""

from __future__ import annotations

import asyncio

import pytest

from gpu_turnstile.gpu.base import Reading
from gpu_turnstile.gpu.gauge import Gauge
from tests.aio import run_async


class Card:
    kind, name = "test", "a card"

    def read(self) -> Reading:
        return Reading(24 << 30, 0, ())

    def close(self) -> None:
        pass


@run_async
async def test_being_cancelled_in_the_moment_the_reading_comes_is_not_overheard():
    """A swap that was told to stop would go on otherwise."""
    gauge = Gauge(Card())
    for _ in range(200):
        reader = asyncio.create_task(gauge.read())
        await asyncio.sleep(0)
        assert gauge._under_way is not None
        gauge._under_way.add_done_callback(lambda _, reader=reader: reader.cancel())
        with pytest.raises(asyncio.CancelledError):
            await reader
