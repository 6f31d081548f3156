"""Whether a process still runs, and that it is the same one. A zombie counts as dead: its memory is gone.

Reads /proc where there is one, psutil elsewhere; keeps no state.
"""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc/self/stat").exists()


def started_at(pid: int) -> float | None:
    """A number that two processes with the same pid do not share; None = no such process (or a zombie)."""
    if pid <= 0:
        return None
    return _from_proc(pid) if _PROC else _from_psutil(pid)


def alive(pid: int, started: float) -> bool:
    return started_at(pid) == started


def _from_proc(pid: int) -> float | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command, in brackets, may hold spaces
    return None if fields[0] in "ZX" else float(fields[19])


def _from_psutil(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
