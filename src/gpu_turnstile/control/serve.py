"""The control app on a private socket: to the gateway it is one more upstream, to the network it does not exist.

A unix socket of mode 0600 in a folder of mode 0700, or a loopback port where there are no unix sockets. Signals and
logs are the composition root's business, not uvicorn's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Generator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from gpu_turnstile import __version__

LAST_ANSWERS = 0.4  # seconds that answers under way may take at shutdown
_TICK = 0.005


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class ControlServer:
    """A running control app. `url` is what `gateway.upstream.Upstream` takes."""

    def __init__(self, app: FastAPI, server: _Server, task: asyncio.Task[None], url: str, path: Path | None) -> None:
        self.url = url
        self._app = app
        self._server = server
        self._task = task
        self._path = path

    async def stop(self) -> None:
        """Return when it has ended, within a second, whatever is still connected. Idempotent."""
        self._app.state.feed.close()
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._task], timeout=2 * LAST_ANSWERS)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=LAST_ANSWERS)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


async def serve_control(app: FastAPI, place: Path | int) -> ControlServer:
    """Serve `app` in this loop, at a socket path, or at a loopback port (0 = any). Raises OSError."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http="httptools",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        headers=[("Server", f"gpu-turnstile/{__version__}")],
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    if isinstance(place, Path):
        listener, url = _unix(place), f"unix:{place}"
    else:
        listener = socket.create_server(("127.0.0.1", place), backlog=128)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            listener.close()
            task.result()
            raise OSError(f"the control API did not start on {place}")
        await asyncio.sleep(_TICK)
    return ControlServer(app, server, task, url, place if isinstance(place, Path) else None)


def _unix(path: Path) -> socket.socket:
    """A listening socket only this user can reach. A socket file nobody listens on any more is replaced."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(path.parent, 0o700)
    if _somebody_listens(path):
        raise OSError(errno.EADDRINUSE, "another gate is running there", str(path))
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
