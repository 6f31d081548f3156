"""Read the next model's files into the page cache while the engine before it drains: a cold start becomes a warm one.

Polite: a thread of low priority (idle for the disk, where the disk's scheduler honours that) that rests between two
pieces, reads no more than most of the memory that could be had without swapping, skips what is in the cache, and
stops within a tenth of a second. It helps or does nothing: whatever goes wrong ends it and disturbs nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

log = structlog.get_logger("prefetch")

PIECE = 8 << 20  # bytes announced to the kernel at a time …
STEP = 1 << 20  # … and read in steps of this, between which it can be stopped
SHARE = 0.8  # of the available memory
REST = 0.1  # of the time a piece took: a pause for others
PROBES = 4  # places of a piece at which it is looked whether it is cached
PROBE = 4096  # bytes

NICE = 10
IDLE = 3 << 13  # the idle class of ioprio_set(2), which glibc has no function for
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


@dataclass(slots=True)
class Progress:
    """Bytes. `read` came from the disk, `cached` were there already, `left` did not fit or were not wanted any more."""

    read: int = 0
    cached: int = 0
    left: int = 0
    done: bool = False


def available_memory() -> int:
    """Bytes that can be had without swapping, the page cache included."""
    return int(psutil.virtual_memory().available)


class Prefetcher:
    """One reading at a time: a new `begin` ends the one before. Both calls return at once, from any thread."""

    def __init__(self, available: Callable[[], int] = available_memory) -> None:
        self.progress = Progress(done=True)
        self._available = available
        self._reading: _Reading | None = None

    def begin(self, paths: Iterable[Path]) -> None:
        """Files that cannot be read are passed over."""
        self.cancel()
        self.progress = Progress(done=not hasattr(os, "preadv"))
        if self.progress.done:  # this system cannot
            return
        self._reading = _Reading(tuple(paths), self.progress, self._available)
        self._reading.start()

    def cancel(self) -> None:
        if self._reading is not None:
            self._reading.stop.set()
            self._reading = None

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the reading has ended within `timeout` seconds. It blocks: for tests and the end of the program."""
        if self._reading is not None:
            self._reading.join(timeout)
        return self.progress.done


class _Reading(threading.Thread):
    def __init__(self, paths: tuple[Path, ...], progress: Progress, available: Callable[[], int]) -> None:
        super().__init__(name="prefetch", daemon=True)
        self.stop = threading.Event()
        self._paths = paths
        self._progress = progress
        self._available = available
        self._buffer = bytearray(STEP)

    def run(self) -> None:
        _be_polite()
        try:
            budget = int(self._available() * SHARE)
            for path in self._paths:
                with contextlib.suppress(OSError):
                    budget -= self._read_file(path, budget)
        finally:
            self._progress.done = True
            progress = self._progress
            log.debug("prefetched", read=progress.read, cached=progress.cached, left=progress.left)

    def _read_file(self, path: Path, budget: int) -> int:
        """How many bytes of the budget it took. The beginning counts most: that is what an engine reads first."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            size = os.fstat(file).st_size
            wanted = min(size, budget)
            for offset in range(0, wanted, PIECE):
                count = min(PIECE, wanted - offset)
                if self.stop.is_set() or self._is_tight(count):
                    wanted = offset
                    break
                self._read_piece(file, offset, count)
            self._progress.left += size - wanted
            return wanted
        finally:
            os.close(file)

    def _is_tight(self, count: int) -> bool:
        """Memory may have been taken by others since the beginning."""
        return self._available() * SHARE < count

    def _read_piece(self, file: int, offset: int, count: int) -> None:
        if _is_cached(file, offset, count):
            self._progress.cached += count
            return
        began = time.monotonic()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, offset, count, os.POSIX_FADV_WILLNEED)
        view = memoryview(self._buffer)
        for step in range(offset, offset + count, STEP):
            if self.stop.is_set():
                return
            self._progress.read += os.preadv(file, [view[: min(STEP, offset + count - step)]], step)
        self.stop.wait((time.monotonic() - began) * REST)


def _is_cached(file: int, offset: int, count: int) -> bool:
    """Whether some places of it can be read without waiting for the disk; False where that cannot be asked.

    Not by mincore(2): the kernel calls every page of a file that is not the caller's own resident.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    buffer = bytearray(PROBE)
    last = max(0, count - PROBE)
    try:
        return all(
            os.preadv(file, [buffer], offset + last * place // (PROBES - 1), os.RWF_NOWAIT) for place in range(PROBES)
        )
    except OSError:  # EAGAIN: it would have to wait; EOPNOTSUPP: this file system does not say
        return False


def _be_polite() -> None:
    """For this thread alone. What the system does not offer is left out."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, IDLE)  # of the calling thread
