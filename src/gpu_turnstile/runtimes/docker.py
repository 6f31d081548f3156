"""An engine as a container, through the Docker Engine API.

The container's name is the lock: there is one for each preset, and who has it has the engine. Its labels tell whose it
is and from which configuration it was made; what is found under the name is adopted if it runs and is what is wanted,
ended if it is ours and is not, and left alone if it is somebody else's.

Kept true here: a start that fails leaves no container behind; after `stop` has returned there is no container of ours
under the name, whoever started it; what Docker did is looked up, never remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import ClassVar

from gpu_turnstile.runtimes.base import StartFailed, StopFailed
from gpu_turnstile.runtimes.docker_api import Container, Json
from gpu_turnstile.runtimes.docker_config import CONFIG, GATE, GRACE, labelled, same_devices
from gpu_turnstile.runtimes.docker_end import AWAY_WAIT, end
from gpu_turnstile.runtimes.docker_errors import DockerAway, DockerError, start_text
from gpu_turnstile.runtimes.docker_host import NAME_PREFIX, DockerHost
from gpu_turnstile.runtimes.docker_pull import ensure_image
from gpu_turnstile.runtimes.docker_run import Run, last_words
from gpu_turnstile.runtimes.pids import LIMIT, of_container

NAME_WAIT = 15.0  # seconds a name may stay taken by a container that is being removed
NAME_POLL = 0.05  # seconds between two looks
YOUNG = 3.0  # seconds within which a container that was made and not started may be somebody's start under way


class DockerRuntime:
    kind: ClassVar[str] = "docker"
    owned: ClassVar[bool] = True

    def __init__(
        self,
        host: DockerHost,
        preset: str,
        config: Json,
        *,
        grace: float = GRACE,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        """`config` is the create body (`container_config`); `on_progress` gets lines while an image is pulled."""
        self.name = NAME_PREFIX + preset
        self.on_exit: Callable[[str], None] | None = None
        self._host = host
        self._config = labelled(config, host.gate)
        self._grace = grace
        self._on_progress = on_progress or (lambda line: None)
        self._run: Run | None = None
        self._output: tuple[str, ...] = ()  # of the run before
        self._unsure = False  # whether something may be there that could not be looked at
        self._pull: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """A caller that gives up leaves a container `stop` can find."""
        await asyncio.shield(asyncio.ensure_future(self._start()))

    async def stop(self) -> None:
        """Calls made meanwhile join this one. A caller that gives up does not interrupt it."""
        if self._pull is not None:
            self._pull.cancel()
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
            self._stopping.add_done_callback(self._stopped)
        await asyncio.shield(self._stopping)

    async def adopt(self) -> bool:
        """Take over what an earlier gate left running with this very configuration; end what it left of another one.

        Raises StopFailed, also when Docker cannot tell whether there is one.
        """
        async with self._changing, self._host.name_lock(self.name):
            if await self.alive():
                return True
            try:
                found = await self._host.api.inspect(self.name)
                return found is not None and self._is_ours(found) and await self._take(found)
            except (DockerAway, DockerError) as error:
                self._unsure = True
                raise StopFailed(f"the container {self.name} may still hold the card: {error}") from None

    async def alive(self) -> bool:
        """While Docker is away, what was last seen: an engine does not need it to go on."""
        if self._run is None or self._run.ended:
            return False
        try:
            container = await self._host.api.inspect(self._run.id)
        except (DockerAway, DockerError):
            return True
        return container is not None and container.running

    async def pids(self) -> tuple[int, ...]:
        """While Docker is away, what it said last: an engine does not need it to go on."""
        run = self._run
        if run is None or run.ended:
            return ()
        with contextlib.suppress(DockerAway):
            run.pids = await self._processes(run.id)
        return await asyncio.to_thread(of_container, run.pids, run.id)

    async def _processes(self, id: str) -> tuple[int, ...]:
        """All of them, or the first where Docker cannot list them."""
        try:
            return await self._host.api.processes(id, LIMIT)
        except (DockerError, ValueError, KeyError, TypeError):
            with contextlib.suppress(DockerError):
                found = await self._host.api.inspect(id)
                return (found.pid,) if found is not None else ()
        return ()

    def output(self) -> tuple[str, ...]:
        return self._output if self._run is None else self._run.ring.lines()

    # -------------------------------------------------------------------------------------------------- coming

    async def _start(self) -> None:
        async with self._changing, self._host.name_lock(self.name):
            try:
                await self._forget_ended()
                await self._claim()
            except DockerAway as error:
                raise StartFailed(str(error)) from None
            except DockerError as error:
                raise StartFailed(start_text(error)) from None
            except StopFailed as error:
                raise StartFailed(str(error)) from None

    async def _forget_ended(self) -> None:
        if self._run is not None and not self._run.ended:
            found = await self._host.api.inspect(self._run.id)
            if found is not None and found.running:
                raise StartFailed(f"the container {self.name} is already running")
        await self._forget()
        self._output = ()

    async def _claim(self) -> None:
        """Get the name, by making the container or by taking over the one that has it."""
        deadline = asyncio.get_running_loop().time() + NAME_WAIT
        while True:
            found = await self._host.api.inspect(self.name)
            if found is None:
                if await self._make():
                    return
            elif not self._is_ours(found):
                raise StartFailed(self._foreign(found))
            elif not self._is_under_way(found) and await self._take(found):
                return
            if asyncio.get_running_loop().time() > deadline:
                raise StartFailed(
                    f"the name {self.name} is still taken after {NAME_WAIT:g} s by a container going away"
                )
            await asyncio.sleep(NAME_POLL)

    async def _make(self) -> bool:
        """False: somebody else has the name now."""
        await self._have_image()
        self._unsure = True
        try:
            id = await self._host.api.create(self.name, self._config)
        except DockerError as error:
            self._unsure = False
            if error.status == 409:
                return False
            raise
        try:
            await self._check(id)
            await self._host.api.start(id)
        except (DockerAway, DockerError, StartFailed) as error:
            await self._clean_up(id, error)
        self._begin(id)
        return True

    async def _have_image(self) -> None:
        """`stop` may interrupt a pull, and nothing else of a start."""
        self._pull = asyncio.ensure_future(ensure_image(self._host.api, self._config["Image"], self._on_progress))
        try:
            await asyncio.wait([self._pull])
            if self._pull.cancelled():
                raise StartFailed(f"{self.name} was stopped while its image was pulled")
            self._pull.result()
        finally:
            self._pull = None

    async def _check(self, id: str) -> None:
        made = await self._host.api.inspect(id)
        asked = self._config.get("HostConfig", {}).get("DeviceRequests")
        if made is not None and not same_devices(asked, made.config.get("DeviceRequests")):
            raise StartFailed(f"{self.name} would have no GPU: this Docker drops requests for devices (Podman does)")

    async def _clean_up(self, id: str, error: DockerAway | DockerError | StartFailed) -> None:
        """Nothing is left of a start that failed. Always raises StartFailed."""
        words = await last_words(self._host, id)
        reason = start_text(error) if isinstance(error, DockerError) else str(error)
        self._output = words.lines() if words else ()
        try:
            await end(self._host.api, id, self.name, 0.0)
            self._unsure = False
        except StopFailed as left:
            reason = f"{reason}; {left}"
        raise StartFailed(reason, self._output)

    # ------------------------------------------------------------------------------------------ what has the name

    def _is_ours(self, found: Container) -> bool:
        return found.labels.get(GATE) == self._host.gate

    def _is_under_way(self, found: Container) -> bool:
        """Somebody is about to start or to remove it."""
        return found.status == "removing" or (found.status == "created" and _age(found) < YOUNG)

    async def _take(self, found: Container) -> bool:
        """Adopt one of ours, or end it."""
        if found.status == "running" and found.labels.get(CONFIG) == self._config["Labels"][CONFIG]:
            self._begin(found.id)
            return True
        self._unsure = True
        await end(self._host.api, found.id, self.name, self._grace)
        self._unsure = False
        return False

    def _foreign(self, found: Container) -> str:
        whose = "of another gate" if GATE in found.labels else "that is not ours"
        return (
            f"there is a container {self.name} {whose} ({found.id[:12]}, {found.status}); "
            f"remove or rename it (docker rm -f {self.name}) or give the preset another name"
        )

    def _begin(self, id: str) -> None:
        self._unsure = False
        self._run = run = Run(self._host, id, lambda reason: self._ended(run, reason))
        run.begin()

    def _ended(self, run: Run, reason: str) -> None:
        if run is self._run and self._stopping is None and self.on_exit is not None:
            self.on_exit(reason)

    # --------------------------------------------------------------------------------------------------- going

    async def _stop(self) -> None:
        async with self._changing, self._host.name_lock(self.name):
            id = None if self._run is None else self._run.id
            if id is None:
                id = await self._find()
            if id is not None:
                await end(self._host.api, id, self.name, self._grace)
            await self._forget()
            self._unsure = False

    async def _find(self) -> str | None:
        """The container of ours under the name. One that can be neither seen nor denied makes the stop fail."""
        deadline = asyncio.get_running_loop().time() + (AWAY_WAIT if self._unsure else 0.0)
        while True:
            try:
                found = await self._host.api.inspect(self.name)
                return found.id if found is not None and self._is_ours(found) else None
            except (DockerAway, DockerError) as error:
                if not self._unsure:
                    return None
                if asyncio.get_running_loop().time() > deadline:
                    raise StopFailed(f"the container {self.name} may still hold the card: {error}") from None
            await asyncio.sleep(NAME_POLL)

    async def _forget(self) -> None:
        if self._run is not None:
            await self._run.close()
            self._output = self._run.ring.lines()
            self._run = None

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping = None
        if not task.cancelled():
            task.exception()  # callers have it through their own await; one that gave up does not want it


def _age(container: Container) -> float:
    """Seconds since it was made; a time that cannot be read is long ago."""
    try:
        made = datetime.fromisoformat(container.created[:19]).replace(tzinfo=UTC)
    except ValueError:
        return float("inf")
    return (datetime.now(UTC) - made).total_seconds()
