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

import psutil

from gpu_turnstile.runtimes import processes
from gpu_turnstile.runtimes.processes import Entry

TOKEN = "GPU_TURNSTILE_RUN"  # the variable's name


class ProcessGroup:
    """Made while the leader lives or is not yet reaped, it is safe to use long after: a reused pid is not the leader.

    Made after the leader's end (leftovers of an earlier gate), it needs the token.
    """

    def __init__(self, leader: int, token: str = "") -> None:
        self.leader = leader
        self._token = token
        self._late = False
        self._process = _find(leader)
        self._born = processes.birth(leader)  # nobody who came from it is older
        self._strays: set[psutil.Process] = set()

    @classmethod
    def of_leftovers(cls, leader: int, token: str) -> ProcessGroup:
        """The leader is gone: whoever has its pid now is another."""
        group = cls(leader, token)
        group._late, group._process, group._born = True, None, float("-inf")
        return group

    def members(self) -> list[psutil.Process]:
        """Who lives of it now, leader included. A child forked during the scan may be missed."""
        entries = {pid: entry for pid, entry in processes.living().items() if entry.born >= self._born}
        session_is_ours = not self._is_another() and (not self._late or None)
        old = {stray.pid for stray in self._strays if stray.is_running()}
        known = {pid for pid, entry in entries.items() if pid in old or self._is_ours(entry, session_is_ours)}
        while found := {pid for pid, entry in entries.items() if entry.parent in known} - known:
            known |= found
        members = {pid: process for pid in sorted(known) if (process := _same(entries[pid]))}
        self._strays |= {p for pid, p in members.items() if self._late or entries[pid].group != self.leader}
        return list(members.values())

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

    def _is_ours(self, entry: Entry, session_is_ours: bool | None) -> bool:
        """`session_is_ours` None: only the token can tell, or that there is none to be read."""
        in_session = entry.session == self.leader
        if in_session and session_is_ours:
            return True
        carried = _carried_token(entry.pid) if self._token else ""
        if carried is None:
            return in_session and session_is_ours is None
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


def _same(entry: Entry) -> psutil.Process | None:
    """A handle on the process of that entry; None if it has ended meanwhile."""
    process = _find(entry.pid)
    return process if process is not None and processes.birth(entry.pid) == entry.born else None


def _carried_token(pid: int) -> str | None:
    """The token in its environment, "" if there is none; None: it cannot be read, or has been written over."""
    try:
        environment = psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return None
    return environment.get(TOKEN, "" if "PATH" in environment else None)
