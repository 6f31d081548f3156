"""Ending a container: ask, force, remove, and look each time whether it is still needed.

Level-triggered: every round looks first and then does what the state asks for, so that whatever happens meanwhile (a
daemon that restarts, somebody else who stops it, a removal already under way) is simply what the next look finds.
"""

from __future__ import annotations

import asyncio

from gpu_turnstile.runtimes.base import StopFailed
from gpu_turnstile.runtimes.docker_api import Container, DockerApi
from gpu_turnstile.runtimes.docker_errors import DockerAway, DockerError, DockerSlow

AWAY_WAIT = 10.0  # seconds a daemon that cannot be reached is waited for
KILL_WAIT = 10.0  # seconds a container may outlive SIGKILL (the driver frees its memory first)
REMOVE_WAIT = 10.0  # seconds a removal may take
POLL = 0.05  # seconds between two looks


async def end(api: DockerApi, id: str, name: str, grace: float) -> None:
    """Return when it is gone, or at least has no process and cannot be removed. Raises StopFailed."""
    ending = _Ending(api, id, grace)
    loop = asyncio.get_running_loop()
    deadline, reached = loop.time() + AWAY_WAIT, False
    while True:
        why = ""
        try:
            container = await api.inspect(id)
            if not reached:
                deadline, reached = loop.time() + grace + KILL_WAIT, True
            if container is None:
                return
            if not container.running:
                await _remove(api, id)
                return
            why = await ending.press(container)
        except (DockerAway, DockerError) as error:
            why = str(error)
        if loop.time() > deadline:
            raise StopFailed(f"the container {name} could not be ended and may still hold the card: {why}")
        if why:
            await asyncio.sleep(POLL)


class _Ending:
    def __init__(self, api: DockerApi, id: str, grace: float) -> None:
        self._api = api
        self._id = id
        self._grace = grace
        self._asked = False

    async def press(self, container: Container) -> str:
        """Ask once, then force. Returns why it did not work, or nothing."""
        try:
            if self._asked:
                await self._api.kill(self._id)
                return "it outlives SIGKILL"
            await self._api.stop(self._id, self._grace)
            self._asked = True
        except DockerSlow as error:
            self._asked = True
            return str(error)
        except DockerError as error:
            self._asked = True
            return str(error)
        return ""


async def _remove(api: DockerApi, id: str) -> None:
    """A container without a process holds nothing: one that cannot be removed now is met again at the next start."""
    deadline = asyncio.get_running_loop().time() + REMOVE_WAIT
    while asyncio.get_running_loop().time() < deadline:
        try:
            await api.remove(id)
        except DockerError as error:
            if error.status == 404:
                return
        except DockerAway:
            return
        if await _is_gone(api, id):
            return
        await asyncio.sleep(POLL)


async def _is_gone(api: DockerApi, id: str) -> bool:
    try:
        return await api.inspect(id) is None
    except (DockerAway, DockerError):
        return False
