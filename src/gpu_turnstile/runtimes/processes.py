"""Who lives on this machine: of every process that is no zombie, its parent, its session, its group and its birth.

A swap takes several such looks and a machine has hundreds of processes, so a look must be cheap: on Linux it is one
small file for each process and no object. Reading /proc belongs in a thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Entry:
    """`born` counts in whatever unit this system has: it is only good for comparing."""

    pid: int
    parent: int
    session: int
    group: int
    born: float


def living() -> dict[int, Entry]:
    """By pid. Whoever ends during the look may be in it or not."""
    return _on_linux() if sys.platform == "linux" else _elsewhere()


def birth(pid: int) -> float:
    """When a process began, also a zombie; infinitely long ago if there is none, so that nobody is older."""
    if sys.platform == "linux":
        fields = _stat(str(pid))
        return float(fields[19]) if fields else float("-inf")
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return float("-inf")


def _on_linux() -> dict[int, Entry]:
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = _stat(name)
        if fields and fields[0] not in (b"Z", b"X"):
            pid = int(name)
            found[pid] = Entry(pid, int(fields[1]), int(fields[3]), int(fields[2]), float(fields[19]))
    return found


def _stat(name: str) -> list[bytes]:
    """From the state on; nothing if there is no such process. See proc(5)."""
    try:
        with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
            return file.read(4096).rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return []


def _elsewhere() -> dict[int, Entry]:
    found = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[pid] = Entry(pid, process.ppid(), os.getsid(pid), os.getpgid(pid), process.create_time())
    return found
