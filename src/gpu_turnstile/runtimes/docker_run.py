"""One container that runs for us: its output as it comes, and its end when it comes.

The end is always derived from an inspection, whatever gave the hint. It is told once, and not at all when it was asked
for. While Docker is away nothing is concluded: the engine may well go on serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from gpu_turnstile.runtimes.docker_api import Container
from gpu_turnstile.runtimes.docker_errors import DockerAway, DockerError
from gpu_turnstile.runtimes.docker_host import DockerHost
from gpu_turnstile.runtimes.ring import LINES, OutputRing

LAST_WORDS = 0.2  # seconds its output may still take to come in when it has ended
SIGNALLED = 128  # an exit code above it is a signal's number more


class Run:
    def __init__(self, host: DockerHost, id: str, on_end: Callable[[str], None]) -> None:
        """`on_end` gets one line of reason."""
        self.id = id
        self.ended = False
        self.pids: tuple[int, ...] = ()  # its processes, as Docker said last
        self.ring = OutputRing()
        self._host = host
        self._on_end = on_end
        self._looking: asyncio.Task[None] | None = None
        self._look_again = False
        self._follower: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """It has been started. Also looks at once: it may have ended already."""
        self._host.watch(self.id, self._look)
        self._look()

    async def close(self) -> None:
        """Nothing is told from now on."""
        self._host.unwatch(self.id)
        if self._follower is not None:
            await asyncio.wait([self._follower], timeout=LAST_WORDS)
        for task in (self._looking, self._follower):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def _look(self) -> None:
        self._look_again = True
        if self._looking is None or self._looking.done():
            self._looking = self._host.spawn(self._look_until_seen())

    async def _look_until_seen(self) -> None:
        while self._look_again and not self.ended:
            self._look_again = False
            try:
                container = await self._host.api.inspect(self.id)
            except (DockerAway, DockerError):
                return  # the stream of events is down as well, and says when it is up
            if container is None or not container.running:
                await self._end(container)
            elif self._follower is None or self._follower.done():
                self._follower = self._host.spawn(self._follow())

    async def _end(self, container: Container | None) -> None:
        self.ended = True
        self._host.unwatch(self.id)
        if self._follower is not None:
            self._follower.cancel()
        if container is not None:
            self.ring = await last_words(self._host, self.id) or self.ring
        last = self.ring.last()
        self._on_end(f"{how_it_ended(container)}; its last line: {last}" if last else how_it_ended(container))

    async def _follow(self) -> None:
        ring = OutputRing()
        try:
            async with self._host.api.follow_logs(self.id, LINES) as pieces:
                self.ring = ring
                async for piece in pieces:
                    ring.feed(piece)
        except (DockerAway, DockerError):
            pass  # begun anew when Docker is back


async def last_words(host: DockerHost, id: str) -> OutputRing | None:
    """What it printed last, while Docker has it; else nothing."""
    ring = OutputRing()
    try:
        ring.feed(await host.api.logs(id, LINES))
    except (DockerAway, DockerError):
        return None
    return ring


def how_it_ended(container: Container | None) -> str:
    if container is None:
        return "was removed by somebody else"
    code = container.exit_code
    if container.oom_killed and code == SIGNALLED + 9:
        return f"ran out of main memory and was killed (exit code {code})"
    return f"{_signal_text(code - SIGNALLED)} (exit code {code})" if code > SIGNALLED else f"exited with code {code}"


def _signal_text(number: int) -> str:
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return "ended"
