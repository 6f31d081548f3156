"""What all containers of one gate share: the client, one stream of events, and the names' locks.

Events only say where to look: whoever watches a container inspects it when it is named, and when the stream has been
opened again, for what happened unseen meanwhile. The stream is opened first and looked at afterwards, so that nothing
falls between the two.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

from gpu_turnstile.runtimes.docker_api import DockerApi
from gpu_turnstile.runtimes.docker_config import GATE, GRACE, PRESET
from gpu_turnstile.runtimes.docker_end import end
from gpu_turnstile.runtimes.docker_errors import DockerAway, DockerError

DEFAULT_SOCKET = Path("/var/run/docker.sock")
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5  # seconds between two attempts to open the stream
OVERLAP = 1.0  # seconds of the past the stream begins with: it is announced before it listens
NAME_PREFIX = "turnstile-"


def socket_path(environ: Mapping[str, str]) -> Path:
    """The socket DOCKER_HOST names, or the usual one. Raises ValueError for an address that is no local socket."""
    address = environ.get("DOCKER_HOST", "")
    if not address:
        return DEFAULT_SOCKET
    scheme, _, path = address.partition("://")
    if scheme != "unix" or not path.startswith("/"):
        raise ValueError(f'DOCKER_HOST: "{address}" must be unix:///path/to/docker.sock')
    return Path(path)


def gate_id(state_dir: Path) -> str:
    """Tells the containers of one gate from those of another on the same machine, also after a restart."""
    return hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:12]


class DockerHost:
    def __init__(self, socket: Path, gate: str) -> None:
        self.api = DockerApi(socket)
        self.gate = gate
        self._names: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._watchers: dict[str, Callable[[], None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Containers stay as they are."""
        self._watchers.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.api.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with this host at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def name_lock(self, name: str) -> asyncio.Lock:
        """One start at a time for each name."""
        return self._names[name]

    # ------------------------------------------------------------------------------------ what an earlier gate left

    async def ports(self) -> dict[str, int]:
        """The port each preset's container is published at: with it, its configuration is the same as before.

        Raises DockerAway, DockerError.
        """
        found = {}
        for preset, id in await self._ours():
            container = await self.api.inspect(id)
            bindings = {} if container is None else container.config.get("PortBindings") or {}
            for port in (binding["HostPort"] for bound in bindings.values() for binding in bound):
                found[preset] = int(port)
        return found

    async def sweep(self, keep: Collection[str]) -> list[str]:
        """End the containers of presets that are no more; their names. Raises DockerAway, DockerError, StopFailed."""
        swept = [(preset, id) for preset, id in await self._ours() if preset not in keep]
        for preset, id in swept:
            await end(self.api, id, NAME_PREFIX + preset, GRACE)
        return [preset for preset, _ in swept]

    async def _ours(self) -> list[tuple[str, str]]:
        found = await self.api.containers(f"{GATE}={self.gate}")
        return [(container["Labels"].get(PRESET, ""), container["Id"]) for container in found]

    # ------------------------------------------------------------------------------------------------- events

    def watch(self, id: str, look: Callable[[], None]) -> None:
        """`look` is called when something may have happened to the container."""
        self._watchers[id] = look
        if self._events is None:
            self._events = self.spawn(self._follow())

    def unwatch(self, id: str) -> None:
        self._watchers.pop(id, None)

    async def _follow(self) -> None:
        filters = {"type": ["container"], "label": [f"{GATE}={self.gate}"], "event": ["die", "destroy"]}
        pause = FIRST_PAUSE
        while True:
            try:
                async with self.api.events(filters, time.time() - OVERLAP) as events:
                    for look in list(self._watchers.values()):
                        look()
                    pause = FIRST_PAUSE
                    async for event in events:
                        if look_at := self._watchers.get(event.get("Actor", {}).get("ID", "")):
                            look_at()
            except (DockerAway, DockerError, ValueError):  # ValueError: a line that was cut
                pass
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
