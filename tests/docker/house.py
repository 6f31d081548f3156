"""A gate's Docker host for a test, and runtimes made from real presets."""

from __future__ import annotations

import asyncio
import functools
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpu_turnstile.presets.schema import Preset, parse_preset
from gpu_turnstile.runtimes.base import StartFailed
from gpu_turnstile.runtimes.docker import DockerRuntime
from gpu_turnstile.runtimes.docker_config import container_config
from gpu_turnstile.runtimes.docker_host import DockerHost
from tests.aio import run_async, until
from tests.docker.daemon import IMAGE, Daemon

GATE = "gate-of-the-test"
SERVE = "echo up; exec httpd -f -p 8080 -h /www"
DEAF = "trap '' TERM; echo deaf; while :; do sleep 0.1; done"


def preset(name: str, script: str, keys: str = "gpus = []", image: str = IMAGE) -> Preset:
    text = f"""
engine = "command"
[runtime]
kind = "docker"
image = "{image}"
command = ["sh", "-c", {script!r}]
{keys}
"""
    return parse_preset(name, text, tomllib.loads(text), f"{name}.toml")


class House:
    """One gate on one Docker."""

    def __init__(self, socket: Path, gate: str = GATE) -> None:
        self.host = DockerHost(socket, gate)
        self.exits: list[str] = []

    def runtime(
        self,
        script: str = "echo up; exec sleep 600",
        keys: str = "gpus = []",
        *,
        name: str = "engine",
        port: int = 0,
        image: str = IMAGE,
        grace: float = 1.0,
        memory: int = 0,
        progress: Callable[[str], None] | None = None,
    ) -> DockerRuntime:
        """`port` 0: any free one; Docker chooses."""
        config = container_config(preset(name, script, keys, image), port)
        config["HostConfig"]["Memory"] = memory
        runtime = DockerRuntime(self.host, name, config, grace=grace, on_progress=progress)
        runtime.on_exit = self.exits.append
        return runtime


@asynccontextmanager
async def house(socket: Path, gate: str = GATE) -> AsyncIterator[House]:
    opened = House(socket, gate)
    try:
        yield opened
    finally:
        await opened.host.close()


def with_house(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An async test that is given a House and the daemon."""

    async def opened(daemon: Daemon) -> None:
        async with house(daemon.socket) as gate:
            await test(gate, daemon)

    opened.__name__ = test.__name__

    @functools.wraps(opened)
    def wrapper(daemon: Daemon) -> None:
        run_async(opened)(daemon)

    wrapper.__doc__ = test.__doc__
    return wrapper


async def printed(runtime: DockerRuntime, text: str) -> None:
    await until(lambda: any(text in line for line in runtime.output()))


async def failure(runtime: DockerRuntime) -> StartFailed:
    with pytest.raises(StartFailed) as failed:
        await runtime.start()
    return failed.value


async def timed(awaitable: Awaitable[Any]) -> float:
    began = time.monotonic()
    await awaitable
    return time.monotonic() - began


async def answer(port: int) -> bytes:
    """What a server on the loopback says first, or nothing."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        line = await reader.readline()
        writer.close()
        return line
    except OSError:
        return b""
