"""`active.toml`: the little that must survive a restart (mode, model, lock). Never who holds the card: that is asked.

The file is old or new, never mixed: written beside, synced, renamed. Reading it never stops a start: a file that
makes no sense is put aside as `active.toml.broken` and the gate begins with nothing. Writing never holds the gate up:
a thread writes the newest state, and a disk that fails is said once, not every time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import structlog
import tomli_w

log = structlog.get_logger("journal")

FILE_NAME = "active.toml"
_HEAD = "# Written by gpu-turnstile, read at its next start. Times to live are in seconds.\n"


def load(state_dir: Path) -> dict[str, Any]:
    """What was saved last; {} when there is nothing usable. Never raises. Called by the one gate of the folder."""
    _sweep(state_dir)
    file = state_dir / FILE_NAME
    try:
        state = tomllib.loads(file.read_text(encoding="utf-8"))
        _check(state)
    except FileNotFoundError:
        return {}
    except OSError as problem:
        log.warning("state_unreadable", file=str(file), reason=problem.strerror, consequence="starting without it")
        return {}
    except (ValueError, RecursionError) as problem:  # not UTF-8, not TOML, not ours
        _put_aside(file, str(problem))
        return {}
    return state


def _sweep(state_dir: Path) -> None:
    """Remove what a gate that was killed had only half written."""
    for half in state_dir.glob(f".{FILE_NAME}.*"):
        with contextlib.suppress(OSError):
            half.unlink()


def _check(state: dict[str, Any]) -> None:
    """Raise ValueError unless it is what the gate writes; the lock book itself judges what its table says."""
    if not isinstance(state.get("mode", ""), str) or not isinstance(state.get("model", ""), str):
        raise ValueError("mode and model must be texts")
    if not isinstance(state.get("lock", {}), dict):
        raise ValueError("lock must be a table")


def _put_aside(file: Path, reason: str) -> None:
    kept = file.with_name(file.name + ".broken")
    try:
        os.replace(file, kept)
        where = str(kept)
    except OSError as problem:
        where = f"nowhere: {problem.strerror}"
    log.warning("state_broken", file=str(file), reason=reason, kept_as=where, consequence="starting without it")


def save(state_dir: Path, state: dict[str, Any]) -> None:
    """Replace the file, durably. Raises OSError; then the old one is still there."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = state_dir / FILE_NAME
    data = _HEAD.encode() + tomli_w.dumps(_without_none(state)).encode()
    handle, temporary = tempfile.mkstemp(prefix=f".{FILE_NAME}.", dir=state_dir)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(state_dir)


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, where folders can be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: what is None is left out."""
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in value.items() if v is not None}


class Journal:
    """Saves the newest of the states it is given, in a thread of its own."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self._condition = threading.Condition()
        self._next: dict[str, Any] | None = None
        self._writing = False
        self._closed = False
        self._failing = False
        self._thread: threading.Thread | None = None

    def remember(self, state: dict[str, Any]) -> None:
        """Returns at once. `state` must not be changed afterwards."""
        with self._condition:
            if self._closed:
                return
            self._next = state
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything remembered is written (or has failed); False when `timeout` seconds were not enough."""
        deadline = time.monotonic() + timeout
        with self._condition:
            while self._next is not None or self._writing:
                left = deadline - time.monotonic()
                if left <= 0 or not self._condition.wait(left):
                    return False
        return not self._failing

    def close(self, timeout: float = 5.0) -> bool:
        """Flush and end the thread."""
        done = self.flush(timeout)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        return done

    def _run(self) -> None:
        while True:
            with self._condition:
                while self._next is None and not self._closed:
                    self._condition.wait()
                if self._next is None:
                    return
                state, self._next = self._next, None
                self._writing = True
            self._write(state)
            with self._condition:
                self._writing = False
                self._condition.notify_all()

    def _write(self, state: dict[str, Any]) -> None:
        try:
            save(self.state_dir, state)
        except Exception as problem:  # a full disk, or a state that is no TOML: the gate works on
            if not self._failing:
                log.warning(
                    "state_not_saved",
                    folder=str(self.state_dir),
                    reason=str(problem),
                    consequence="the gate goes on; a restart will not know mode, model and lock",
                )
            self._failing = True
        else:
            if self._failing:
                log.warning("state_saved_again", folder=str(self.state_dir))
            self._failing = False
