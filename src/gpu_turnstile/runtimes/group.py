"""The processes that came from one leader: its session, the descendants that left it, and who carries its token.

POSIX only. A zombie is not a member: it holds no memory and cannot be killed. Signals go to the process group in one
call, so that no child forked meanwhile is missed; strays (children that began a group of their own) get theirs by a
handle that psutil checks against reuse of the pid. Nothing here waits; scanning reads /proc and belongs in a thread.

A token is a variable in the environment of a recorded run (see records.py). It finds strays whose parents are gone,
and where nobody has watched the leader end it tells our leftovers from strangers: the number of a session whose
leader is gone may have been given to another meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

import psutil

TOKEN = "GPU_TURNSTILE_RUN"  # the variable's name


@dataclass(frozen=True, slots=True)
class _Entry:
    process: psutil.Process
    parent: int
    in_session: bool
    in_group: bool


class ProcessGroup:
    """Made while the leader lives or is not yet reaped, it is safe to use long after: a reused pid is not the leader.

    Made after the leader's end (leftovers of an earlier gate), it needs the token.
    """

    def __init__(self, leader: int, token: str = "") -> None:
        self.leader = leader
        self._token = token
        self._late = False
        self._process = _find(leader)
        self._strays: set[psutil.Process] = set()

    @classmethod
    def of_leftovers(cls, leader: int, token: str) -> ProcessGroup:
        """The leader is gone: whoever has its pid now is another."""
        group = cls(leader, token)
        group._late, group._process = True, None
        return group

    def members(self) -> list[psutil.Process]:
        """Who lives of it now, leader included. A child forked during the scan may be missed."""
        entries = _living(self.leader)
        session_is_ours = not self._is_another() and (not self._late or None)
        known = {pid for pid, entry in entries.items() if self._is_ours(entry, session_is_ours)}
        while found := {pid for pid, entry in entries.items() if entry.parent in known} - known:
            known |= found
        self._strays |= {entries[pid].process for pid in known if self._late or not entries[pid].in_group}
        return [entries[pid].process for pid in sorted(known)]

    def is_empty(self) -> bool:
        """The kernel's answer for the group misses nobody but counts zombies; then it takes a second scan."""
        return not self.members() and (not self._kill_group(0) or not self.members())

    def signal(self, number: signal.Signals) -> None:
        self.members()  # who strayed is known by its parents: look before they go
        self._kill_group(number)
        for stray in self._strays:
            with contextlib.suppress(psutil.Error):
                stray.send_signal(number)

    def reap(self) -> None:
        """Collect orphans that became our own children: we may be PID 1 of a container."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.leader, os.WNOHANG) != (0, 0):
                pass
        for stray in self._strays:
            with contextlib.suppress(ChildProcessError):
                if stray.is_running():
                    os.waitpid(stray.pid, os.WNOHANG)

    def _is_ours(self, entry: _Entry, session_is_ours: bool | None) -> bool:
        """`session_is_ours` None: only the token can tell, or that there is none to be read."""
        if entry.process in self._strays or (entry.in_session and session_is_ours):
            return True
        carried = _carried_token(entry.process) if self._token else ""
        if carried is None:
            return entry.in_session and session_is_ours is None
        return bool(self._token) and carried == self._token

    def _kill_group(self, number: int) -> bool:
        """Whether there is such a group. The kernel gives its number to nobody else as long as it has a process."""
        if self._late or self._is_another():
            return False
        try:
            os.killpg(self.leader, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True  # there, and out of our hands
        return True

    def _is_another(self) -> bool:
        found = _find(self.leader)
        return found is not None and found != self._process


def _find(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)  # equal to another by its pid and the time it began
    except psutil.Error:
        return None


def _carried_token(process: psutil.Process) -> str | None:
    """The token in its environment, "" if there is none; None: it cannot be read, or has been written over."""
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return None
    return environment.get(TOKEN, "" if "PATH" in environment else None)


def _living(leader: int) -> dict[int, _Entry]:
    entries = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() != psutil.STATUS_ZOMBIE:
                    session, group = os.getsid(pid) == leader, os.getpgid(pid) == leader
                    entries[pid] = _Entry(process, process.ppid(), session, group)
    return entries
