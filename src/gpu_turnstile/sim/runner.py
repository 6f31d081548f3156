"""Run a simulated engine: in the loop of a test (`serve`) or as a process of its own (`run`).

uvicorn parses the HTTP; opening and closing are done here, because a simulator must come and go in
milliseconds, die like a killed process, and leave the signals of its host alone. Invariant: when `serve` ends,
its port is closed, its connections are cut, its memory is back on the card.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from gpu_turnstile.sim.base import Sim


@asynccontextmanager
async def serve(sim: Sim[Any], *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve `sim` in the running loop and give its base URL. Raises OSError where the port is taken."""
    listener = _bind(host, port)
    sim.url = f"http://{host}:{listener.getsockname()[1]}"
    door = _Door(sim)
    sim.start()
    await sim.before_listening()
    await door.open(listener)
    watch = asyncio.ensure_future(_close_when_exited(sim, door))
    try:
        yield sim.url
    finally:
        watch.cancel()
        await door.close()
        sim.end()


def run(make: Callable[[], Sim[Any]], *, host: str, port: int) -> None:
    """Serve as a process: SIGTERM and SIGINT are the engine's own affair, its exit code is the process's.

    A port that is taken ends with 1 and one line, as with the real servers.
    """
    try:
        listener = _bind(host, port)
    except OSError as error:
        sys.exit(f"cannot listen on {host}:{port}: {error.strerror or error}")
    asyncio.run(_run(make, host, listener))


async def _run(make: Callable[[], Sim[Any]], host: str, listener: socket.socket) -> None:
    sim = make()
    port = listener.getsockname()[1]
    sim.url = f"http://{host}:{port}"
    door = _Door(sim)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, sim.terminate)
    sim.start()
    await sim.before_listening()
    if not sim.leaving.is_set():
        await door.open(listener)
        print(f"simulated {sim.kind} listening on {sim.url} (pid {os.getpid()})", file=sys.stderr, flush=True)
    await sim.leaving.wait()
    sim.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(sim.exit_code or 0)  # as abruptly as the engine says; nothing is left to tidy up


async def _close_when_exited(sim: Sim[Any], door: _Door) -> None:
    await sim.leaving.wait()
    await door.close()
    sim.end()
    sim.exited.set()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only on sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


class _Door(uvicorn.Server):
    """uvicorn without its own signal handling, logging and polite shutdown."""

    def __init__(self, sim: Sim[Any]) -> None:
        super().__init__(
            uvicorn.Config(
                sim,
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=True,
                timeout_keep_alive=75,
                ws="auto",
                ws_max_size=64 * 1024 * 1024,
            )
        )

    async def open(self, listener: socket.socket) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=[listener])
        await self.on_tick(0)

    async def close(self) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
