"""The simulated card: memory that engines in several processes share, as they would share a GPU.

One JSON file guarded by a lock (or, without a path, an object in this process). It may know the operating
system, and no engine. Invariant: every look first takes out what a driver would: the memory of dead processes
and what came back late. An engine that takes the card beside another raises an alarm; tests assert `alarms()`
is empty.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

from gpu_turnstile.gpu.base import Holder, Reading
from gpu_turnstile.sim.ledger import GB, MB, Alarm, CardEvent, Ledger, Piece
from gpu_turnstile.sim.processes import alive, started_at

ENV = "TURNSTILE_SIM_CARD"

__all__ = ["ENV", "GB", "MB", "Alarm", "CardEvent", "SimCard"]


class SimCard:
    """`path`: the shared file; None = in memory, for simulators inside one process.

    `total`, `allowance` in bytes and `lag_s` in seconds count when the file is new; after that the file's own
    values do. `allowance` is what each engine may keep beside another (a CUDA context).
    """

    kind: ClassVar[str] = "sim"

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        total: int = 24 * GB,
        allowance: int = 600 * MB,
        lag_s: float = 0.0,
    ) -> None:
        new = Ledger(total=total, allowance=allowance, lag_s=lag_s)
        self.name = "simulated card"
        self.path = Path(path) if path is not None else None
        self._store: _Store = _FileStore(self.path, new) if self.path else _MemoryStore(new)

    @classmethod
    def from_env(cls, path: str | Path | None = None, **settings: Any) -> SimCard:
        """The card at `path`, else at $TURNSTILE_SIM_CARD, else one in memory."""
        return cls(path or os.environ.get(ENV) or None, **settings)

    # ------------------------------------------------------------------------------------ engines

    def hold(self, name: str, size: int, *, part: str = "", pid: int | None = None) -> int:
        """`name` now holds `size` bytes (in place of what this `part` of it held); the bytes that did fit.

        `pid`: another process than this one; 0 = no process at all, which never dies.
        """
        who = os.getpid() if pid is None else pid
        with self._look() as ledger:
            now = time.time()
            return ledger.hold(Piece(name, part, who, started_at(who) or 0.0, size, now), now)

    def free(
        self,
        name: str,
        *,
        part: str | None = None,
        after: float = 0.0,
        leak: bool = False,
        pid: int | None = None,
    ) -> None:
        """Give back what `name` holds (one `part`, or all), in `after` seconds, or never (`leak`)."""
        who = os.getpid() if pid is None else pid
        with self._look() as ledger:
            ledger.free((name, who), part, time.time(), after, leak)

    def end(self, name: str) -> None:
        """This process as `name` is gone (a simulator that is stopped or restarted inside a test)."""
        with self._look() as ledger:
            ledger.end((name, os.getpid()), time.time())

    # ------------------------------------------------------------------------------------ readers

    def read(self) -> Reading:
        with self._look() as ledger:
            engines = sorted({piece.engine for piece in ledger.pieces})
            holders = tuple(Holder(pid, name, ledger.held_by((name, pid))) for name, pid in engines)
            return Reading(ledger.total, ledger.used, holders)

    def close(self) -> None:
        """Nothing is kept open."""

    def alarms(self) -> tuple[Alarm, ...]:
        with self._look() as ledger:
            return tuple(ledger.alarms)

    def events(self) -> tuple[CardEvent, ...]:
        """The last changes, oldest first: when memory was taken, given back, and came back."""
        with self._look() as ledger:
            return tuple(ledger.events)

    def snapshot(self) -> dict[str, Any]:
        """Everything, as plain data."""
        with self._look() as ledger:
            return ledger.to_json()

    def held_by(self, name: str) -> int:
        """Bytes held under this name, by whatever process."""
        with self._look() as ledger:
            return sum(piece.bytes for piece in ledger.pieces if piece.name == name)

    def reset(self) -> None:
        """Forget alarms; late and leaked memory comes back at once."""
        with self._look() as ledger:
            ledger.reset()

    @contextmanager
    def _look(self) -> Iterator[Ledger]:
        with self._store.open() as ledger:
            ledger.settle(time.time(), alive)
            yield ledger
            ledger.settle(time.time(), alive)


class _Store(Protocol):
    def open(self) -> AbstractContextManager[Ledger]: ...


class _MemoryStore:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.RLock()

    @contextmanager
    def open(self) -> Iterator[Ledger]:
        with self._lock:
            yield self._ledger


class _FileStore:
    """The book in a file. Replaced in one step, so that a process killed while writing leaves a whole one."""

    def __init__(self, path: Path, new: Ledger) -> None:
        self._path = path
        self._new = new
        self._guard = path.with_name(path.name + ".lock")
        path.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def open(self) -> Iterator[Ledger]:
        import fcntl  # POSIX only; a card in memory works everywhere

        with self._guard.open("a") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            before = self._read()
            ledger = Ledger.from_json(json.loads(before)) if before else Ledger.from_json(self._new.to_json())
            yield ledger
            after = json.dumps(ledger.to_json())
            if after != before:
                self._write(after)

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""

    def _write(self, text: str) -> None:
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        fresh.write_text(text)
        fresh.replace(self._path)
