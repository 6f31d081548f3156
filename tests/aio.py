"""Running coroutines in tests on the loop the gate runs on, and waiting for conditions instead of sleeping."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make an async test a test. It has 30 seconds."""

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await test(*args, **kwargs)

        uvloop.run(bounded())

    return wrapper


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> Any:
    """Return the condition's first true value; the loop runs in between."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not (value := condition()):
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not so within {seconds} s: {condition}")
        await asyncio.sleep(0.002)
    return value
