"""What an engine prints, in a file that outlives the gate: a pipe dies with its reader, and the engine with the pipe.

The engine appends to the file by itself. The gate only looks at its end, and cuts its beginning off when it has grown
too long: what is printed in that very moment may be lost or stand before older lines, and the engine never waits.
While there is no gate, nobody cuts.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gpu_turnstile.runtimes.ring import OutputRing

LIMIT = 4 << 20  # bytes; a longer file is cut …
KEPT = 1 << 20  # … to this
LOOK = 256 << 10  # bytes at the end that are read for the last lines
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | os.O_CLOEXEC


class LogFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self) -> int:
        """An empty file, as a descriptor to give to the engine. Raises OSError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self.path, FLAGS | os.O_TRUNC, 0o600)

    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first; none if the file cannot be read."""
        ring = OutputRing()
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            ring.feed(_end(file.fileno(), LOOK))
        return ring.lines()

    def last(self) -> str:
        """The last line that says something, or nothing."""
        return next((line for line in reversed(self.lines()) if line.strip()), "").strip()

    def trim(self) -> None:
        """Cut it if it is too long. A disk that fails is no reason to disturb the engine."""
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_size <= LIMIT:
                return
            descriptor = os.open(self.path, FLAGS)
            try:
                kept = _end(descriptor, KEPT)
                os.ftruncate(descriptor, 0)
                os.write(descriptor, kept)
            finally:
                os.close(descriptor)


def _end(descriptor: int, count: int) -> bytes:
    """The last whole lines in `count` bytes."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, count, max(0, size - count))
    return data if size <= count else data.partition(b"\n")[2] or data
