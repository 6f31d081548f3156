"""A systemd unit as an engine, against a stand-in for systemctl that runs real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import pytest

from gpu_turnstile.runtimes import pids
from gpu_turnstile.runtimes import systemd as systemd_module
from gpu_turnstile.runtimes.base import StartFailed, StopFailed
from gpu_turnstile.runtimes.systemd import SystemdRuntime
from gpu_turnstile.runtimes.units import unit_name
from tests.runtimes.children import lives
from tests.runtimes.systemctl import FakeSystemd

UNIT = "llm@qwen.service"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    fake = FakeSystemd(tmp_path, monkeypatch)
    fake.unit(UNIT)
    monkeypatch.setattr(systemd_module, "POLL", 0.05)
    yield fake
    pid = state(fake)["pid"]
    if pid and lives(pid):
        os.kill(pid, signal.SIGKILL)


def state(fake):
    return json.loads((fake.folder / UNIT).read_text())


def test_a_unit_is_started_and_stopped(run, fake):
    async def main():
        runtime = SystemdRuntime("llm@qwen", user=True)
        assert not await runtime.alive()
        assert not await runtime.adopt()
        await runtime.start()
        pid = state(fake)["pid"]
        assert lives(pid)
        assert await runtime.alive()
        await runtime.start()  # it runs already: nothing changes
        assert state(fake)["pid"] == pid
        await runtime.stop()
        await runtime.stop()
        assert not lives(pid)
        assert not await runtime.alive()
        assert runtime.output() == ("loading", "out of memory")
        assert all(call.split()[1] == "--user" for call in fake.calls)

    run(main())


def test_an_end_nobody_asked_for_is_told_at_once_and_a_stop_is_none(run, fake, monkeypatch):
    monkeypatch.undo()
    fake.__init__(fake.folder, monkeypatch)  # with the pauses of real life

    async def main():
        runtime = SystemdRuntime(UNIT)
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        await runtime.start()
        await runtime.stop()
        assert not told.done()
        await runtime.start()
        os.kill(state(fake)["pid"], signal.SIGKILL)
        began = time.monotonic()
        assert await told == f"{UNIT} failed (exit-code); its last line: out of memory"
        assert time.monotonic() - began < 1  # two programs are started meanwhile
        assert not await runtime.alive()

    run(main())


def test_a_unit_that_runs_is_taken_over_and_its_end_told(run, fake):
    async def main():
        await SystemdRuntime(UNIT).start()
        runtime = SystemdRuntime(UNIT)
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        assert await runtime.adopt()
        os.kill(state(fake)["pid"], signal.SIGKILL)
        assert "failed" in await told

    run(main())


def test_a_unit_that_systemd_starts_anew_is_stopped_and_told(run, fake, monkeypatch):
    monkeypatch.setattr(systemd_module, "ASK", 0.0)

    async def main():
        runtime = SystemdRuntime(UNIT)
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        await runtime.start()
        old = state(fake)["pid"]
        other = await asyncio.create_subprocess_exec("sleep", "60")
        (fake.folder / UNIT).write_text(json.dumps({**state(fake), "pid": other.pid}))
        assert "started anew" in await told
        assert await other.wait() == -signal.SIGTERM
        os.kill(old, signal.SIGKILL)

    run(main())


def test_it_knows_its_main_process_and_who_is_in_its_control_group(run, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(pids, "_CGROUP", tmp_path / "cgroup")
    group = tmp_path / "cgroup" / "system.slice" / UNIT
    group.mkdir(parents=True)

    async def main():
        runtime = SystemdRuntime(UNIT)
        assert await runtime.pids() == ()
        await runtime.start()
        main = state(fake)["pid"]
        assert await runtime.pids() == (main,)
        (group / "cgroup.procs").write_text(f"{main}\n4711\n")
        assert await runtime.pids() == (main, main, 4711)
        await runtime.stop()
        assert await runtime.pids() == ()

    run(main())


def test_a_unit_that_fails_says_why_with_its_last_lines(run, fake):
    async def main():
        fake.unit(UNIT, '"fails": 1')
        with pytest.raises(StartFailed, match=r"llm@qwen.service failed \(exit-code\)") as failure:
            await SystemdRuntime(UNIT).start()
        assert failure.value.output == ("loading", "out of memory")
        with pytest.raises(StartFailed, match=r"does not start none.service: Unit none.service not found"):
            await SystemdRuntime("none").start()

    run(main())


def test_a_unit_that_ignores_its_stop_is_killed(run, fake):
    async def main():
        fake.unit(UNIT, '"deaf": 1')
        runtime = SystemdRuntime(UNIT, grace=0.3)
        await runtime.start()
        await asyncio.sleep(0.3)  # until it has made itself deaf
        pid = state(fake)["pid"]
        await runtime.stop()
        assert not lives(pid)
        assert any("kill --signal=SIGKILL" in call for call in fake.calls)

    run(main())


def test_a_systemd_that_hangs_or_is_not_there_is_bounded(run, fake, monkeypatch):
    monkeypatch.setattr(systemd_module, "CALL", 0.3)
    monkeypatch.setattr(systemd_module, "KILL_WAIT", 0.1)

    async def main():
        fake.unit(UNIT, '"hangs": 1')
        runtime = SystemdRuntime(UNIT, grace=0.1)
        with pytest.raises(StartFailed, match="did not answer within"):
            await runtime.start()
        with pytest.raises(StopFailed, match="cannot be asked"):
            await runtime.stop()
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(StartFailed, match="cannot run systemctl"):
            await runtime.start()
        assert not await runtime.alive()

    run(main())


@pytest.mark.parametrize("name", ["", "-H evil", "--host=x", "a b", "a*", "a;b", "x/../y", "a\nb", "é", "a" * 300])
def test_a_name_that_could_be_an_option_or_a_pattern_is_none(name):
    with pytest.raises(ValueError, match="cannot be the name"):
        SystemdRuntime(name)


def test_a_name_may_leave_out_its_kind():
    assert unit_name("llm") == unit_name("llm.service") == "llm.service"
    assert unit_name("a-b@c:d_e\\x2d") == "a-b@c:d_e\\x2d.service"
