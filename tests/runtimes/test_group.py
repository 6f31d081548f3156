"""A group is found and ended whole, and a pid that was given to somebody else is left alone."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil

from gpu_turnstile.runtimes.group import ProcessGroup


def started(script):
    child = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True)
    return child, ProcessGroup(child.pid)


def test_a_zombie_is_no_member():
    child, group = started("exit 0")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    assert group.is_empty()
    child.wait()
    assert group.is_empty()


def test_a_child_that_a_scan_missed_still_gets_the_signal(monkeypatch):
    child, group = started("sleep 60 & echo up; exit 0")
    child.stdout.readline()
    child.wait()
    with monkeypatch.context() as patched:
        patched.setattr(ProcessGroup, "members", lambda self: [])
        group.signal(signal.SIGKILL)
    assert child.stdout.read() == ""  # its end closed the pipe


def test_one_scan_that_misses_a_child_does_not_make_the_group_empty(monkeypatch):
    child, group = started("exec sleep 60")
    scans = [[], [psutil.Process(child.pid)]]
    with monkeypatch.context() as patched:
        patched.setattr(ProcessGroup, "members", lambda self: scans.pop(0))
        assert not group.is_empty()
    group.signal(signal.SIGKILL)
    child.wait()


def test_a_process_that_was_given_the_leaders_pid_is_left_alone():
    other, group = started("exec sleep 60")
    group._process = psutil.Process()  # as it would compare: the pid is there, and it is not the one we started
    assert group.members() == []
    assert group.is_empty()
    group.signal(signal.SIGKILL)
    group.reap()
    assert other.poll() is None
    other.kill()
    other.wait()
