"""One run of an engine's process: our own child, or one that an earlier gate started.

Both tell once, by `on_end`, that they have ended, and both know the group that came from them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import cast

from gpu_turnstile.runtimes.group import ProcessGroup
from gpu_turnstile.runtimes.records import Record
from gpu_turnstile.runtimes.ring import OutputRing

LAST_WORDS = 0.1  # seconds an exit is held back for output still in the pipe
LOOK = 0.05  # seconds between two looks at a process whose end makes no event for us

STDIN = 0


class Run:
    group: ProcessGroup

    def __init__(self, on_end: Callable[[Run], None]) -> None:
        self.exited = asyncio.Event()
        self.asked_to_stop = False
        self._on_end: Callable[[Run], None] | None = on_end

    def how_it_ended(self) -> str:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)


class Child(Run, asyncio.SubprocessProtocol):
    """`ring` is fed from its output pipe; None = it has none. `token`: see `ProcessGroup`."""

    def __init__(self, on_end: Callable[[Run], None], ring: OutputRing | None, token: str = "") -> None:
        super().__init__(on_end)
        self._ring = ring
        self._token = token
        self._drained = ring is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self.group = ProcessGroup(self._transport.get_pid(), self._token)

    def release(self) -> None:
        """Let a child go on that waits for a line on its standard input."""
        pipe = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(STDIN))
        pipe.write(b"\n")
        pipe.close()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if self._ring is not None:
            self._ring.feed(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == STDIN:
            return
        self._drained = True
        if self.exited.is_set():
            self._end()

    def process_exited(self) -> None:
        self.exited.set()
        if self._drained:
            self._end()
        else:
            asyncio.get_running_loop().call_later(LAST_WORDS, self._end)

    def how_it_ended(self) -> str:
        return exit_text(self._transport.get_returncode())

    def close(self) -> None:
        self._transport.close()


class Adopted(Run):
    """The process of a record. It is not our child: how it ended, its own parent was told."""

    def __init__(self, on_end: Callable[[Run], None], record: Record) -> None:
        super().__init__(on_end)
        self.group = (ProcessGroup if record.is_there else ProcessGroup.of_leftovers)(record.pid, record.token)
        self._record = record
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def how_it_ended(self) -> str:
        return "has ended (started by an earlier gate, so its exit code is not known)"

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._record.lives:
            self._timer = asyncio.get_running_loop().call_later(LOOK, self._look)
        else:
            self.exited.set()
            self._end()


def exit_text(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
