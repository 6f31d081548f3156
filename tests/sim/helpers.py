"""What the simulators' tests share: an event loop per test, and waiting for a condition instead of for time."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

TEST_LIMIT_S = 20.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine as a test."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TEST_LIMIT_S))

    return run


async def eventually(condition: Callable[[], Any], limit_s: float = 5.0) -> Any:
    """What `condition` returns once it is true; it may be a coroutine function."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert asyncio.get_running_loop().time() < deadline, "this never became true"
        await asyncio.sleep(0.005)


async def within(limit_s: float, work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, limit_s)


def browser(url: str = "") -> httpx.AsyncClient:
    """A client without TLS: loading certificates would take longer than most of these tests."""
    return httpx.AsyncClient(base_url=url, timeout=10, verify=False, trust_env=False)


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of each `data:` line of an SSE body, without the [DONE]."""
    return [json.loads(line) for line in re.findall(r"^data: (\{.*)$", text, re.M)]


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@contextmanager
def standalone(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A simulator as a process: (process, base URL). Killed at the end if it still runs."""
    command = [sys.executable, "-m", "gpu_turnstile.sim", *args]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"listening on (http://\S+)", line):
                yield process, found[1]
                return
        raise AssertionError(f"{args} ended with {process.wait()} before it listened")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
