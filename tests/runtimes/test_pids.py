"""Which processes an engine is: what is believed, what is not, and that asking costs nobody anything."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import psutil
import pytest

from gpu_turnstile.runtimes import pids as module
from gpu_turnstile.runtimes.external import ExternalRuntime
from gpu_turnstile.runtimes.pids import Listener, of_container, of_group, pids_of

SERVE = "import socket, sys; s = socket.create_server((sys.argv[1], 0)); print(s.getsockname()[1], flush=True); input()"


class Runtime:
    def __init__(self, answer):
        self.answer = answer

    async def pids(self):
        return await self.answer()


def test_what_hangs_or_fails_costs_the_others_nothing_and_number_1_is_nobodys():
    async def told():
        return (1, 4711)

    async def broken():
        raise OSError("no such thing")

    async def hangs():
        await asyncio.sleep(60)

    async def main():
        began = time.monotonic()
        found = await pids_of([Runtime(told), Runtime(broken), Runtime(hangs)], 0.1)
        return found, time.monotonic() - began

    found, seconds = asyncio.run(main())
    assert found == {4711}
    assert seconds < 1
    assert asyncio.run(pids_of([])) == frozenset()


def test_a_containers_number_counts_where_the_kernel_agrees_or_cannot_know(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PROC", tmp_path)
    for pid, group in ((10, "0::/system.slice/docker-c0ffee.scope"), (11, "0::/user.slice")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(group + "\n")
    assert of_container([10, 11, 12], "c0ffee") == (10, 12)


@pytest.mark.parametrize("root", [".", "systemd"])
def test_a_control_group_is_read_in_both_of_its_places(tmp_path, monkeypatch, root):
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    (tmp_path / root / "a.slice" / "llm.service").mkdir(parents=True)
    (tmp_path / root / "a.slice" / "llm.service" / "cgroup.procs").write_text("7\n8\n")
    assert of_group("/a.slice/llm.service") == (7, 8)
    assert of_group("/gone.service") == of_group("") == of_group("/") == ()


def listener(host="127.0.0.1"):
    process = subprocess.Popen([sys.executable, "-c", SERVE, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return process, int(process.stdout.readline())


def end(process):
    process.communicate(b"\n")


def test_whoever_listens_at_the_address_is_the_engine_that_others_run():
    process, port = listener()
    other, elsewhere = listener()
    assert asyncio.run(ExternalRuntime(f"http://127.0.0.1:{port}").pids()) == (process.pid,)
    assert Listener(f"http://localhost:{elsewhere}").pids() == (other.pid,)
    end(process)
    end(other)


@pytest.mark.parametrize(
    ("bound", "named", "found"), [("0.0.0.0", "127.0.0.1", True), ("127.0.0.2", "127.0.0.1", False)]
)
def test_another_address_is_another_engine(bound, named, found):
    process, port = listener(bound)
    assert Listener(f"http://{named}:{port}").pids() == ((process.pid,) if found else ())
    end(process)


@pytest.mark.parametrize("url", ["http://ollama:11434", "http://192.0.2.1:11434", "", "http://[::1]:1"])
def test_what_is_not_here_is_nobody(url):
    assert Listener(url).pids() == ()


def test_it_is_searched_for_once_and_again_only_when_it_is_exchanged(monkeypatch):
    process, port = listener()
    watched, searches = Listener(f"http://127.0.0.1:{port}"), []
    search = psutil.net_connections
    monkeypatch.setattr(psutil, "net_connections", lambda kind: searches.append(kind) or search(kind))
    assert [watched.pids() for _ in range(3)] == [(process.pid,)] * 3
    assert len(searches) == 1
    end(process)
    assert watched.pids() == ()
    assert os.getpid() not in watched.pids()
