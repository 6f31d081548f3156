"""What must be known of an engine's process to find it again after the gate was killed: one small file per engine.

A pid alone is worth nothing: it is given away again. A record holds for one process only: the pid, the moment it
began (in the kernel's own count, which no change of the clock moves) and the boot it lived in. The token is in the
environment of everything that came from it. The file is old or new, never mixed, and only its owner reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

LIMIT = 65536  # bytes; ours are a few hundred
LEAST_PID = 2  # 1 is never ours to end


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`pid` is also the number of its session and of its process group."""

    pid: int
    born: str
    boot: str
    token: str
    command: str  # see `fingerprint`
    port: int | None = None

    @property
    def is_of_this_boot(self) -> bool:
        return self.boot == boot_id()

    @property
    def is_there(self) -> bool:
        """Whether its pid is still its own, be it as a zombie's."""
        return self.is_of_this_boot and birth(self.pid) == self.born

    @property
    def lives(self) -> bool:
        """Whether this very process runs."""
        return self.is_of_this_boot and running(self.pid) == self.born


def load(file: Path) -> Record | None:
    """None: there is none, or none that makes sense."""
    try:
        with file.open("rb") as stream:
            record = msgspec.json.decode(stream.read(LIMIT), type=Record)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return record if record.pid >= LEAST_PID and record.token else None


def save(file: Path, record: Record) -> None:
    """Raises OSError; then the old one is still there. Not synced: a record does not outlive its boot."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(msgspec.json.encode(record))
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def forget(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)


def living_port(file: Path) -> int | None:
    """The port of the engine of that record, if it lives: whoever wants to adopt it must ask for the same one."""
    record = load(file)
    return record.port if record is not None and record.lives else None


def fingerprint(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> str:
    """Of what a preset makes of a process; the environment that the gate happens to have is no part of it."""
    what = json.dumps([list(argv), sorted(env.items()), None if cwd is None else str(cwd)])
    return hashlib.sha256(what.encode()).hexdigest()


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return str(int(psutil.boot_time()))


def birth(pid: int) -> str | None:
    """When the process began, also a zombie; None: there is none."""
    return _look(pid)[0]


def running(pid: int) -> str | None:
    """When the process began; None: there is none, or only a zombie."""
    born, runs = _look(pid)
    return born if runs else None


def _look(pid: int) -> tuple[str | None, bool]:
    """When the process began, and whether it runs (a zombie does not)."""
    if sys.platform != "linux":
        return _look_elsewhere(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return None, False
    return (fields[19].decode(), fields[0] not in (b"Z", b"X")) if len(fields) > 19 else (None, False)


def _look_elsewhere(pid: int) -> tuple[str | None, bool]:
    try:
        process = psutil.Process(pid)
        return repr(process.create_time()), process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return None, False
