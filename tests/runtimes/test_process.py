"""A child process of ours: its exit is noticed, its output read, and after a stop nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from gpu_turnstile.runtimes import process as process_module
from gpu_turnstile.runtimes.base import StopFailed
from gpu_turnstile.runtimes.external import ExternalRuntime
from gpu_turnstile.runtimes.group import ProcessGroup
from gpu_turnstile.runtimes.process import ProcessRuntime
from gpu_turnstile.runtimes.runs import LAST_WORDS
from tests.runtimes.children import lives, pids_printed, printed, sh

IGNORES_TERM = "trap '' TERM; echo up; while :; do sleep 0.05; done"


def test_it_starts_in_a_session_of_its_own_and_stops_at_sigterm(run):
    async def main():
        runtime = sh("echo up; exec sleep 60")
        await runtime.start()
        await printed(runtime, "up")
        pid = runtime.pid
        assert os.getsid(pid) == pid
        assert await runtime.alive()
        began = time.monotonic()
        await runtime.stop()
        assert time.monotonic() - began < 2
        assert not await runtime.alive()
        assert not psutil.pid_exists(pid)
        assert runtime.pid is None

    run(main())


def test_what_ignores_sigterm_is_killed_when_its_grace_is_over(run):
    async def main():
        runtime = sh(IGNORES_TERM, grace=0.2)
        await runtime.start()
        await printed(runtime, "up")
        pid = runtime.pid
        began = time.monotonic()
        await runtime.stop()
        assert 0.2 <= time.monotonic() - began < 3
        assert not lives(pid)

    run(main())


def test_a_process_that_needs_its_grace_gets_it(run):
    async def main():
        runtime = sh("trap 'sleep 0.3; echo saved; exit 0' TERM; echo up; while :; do sleep 0.02; done", grace=8)
        await runtime.start()
        await printed(runtime, "up")
        await runtime.stop()
        assert runtime.output()[-1] == "saved"

    run(main())


def test_children_of_the_group_go_with_it(run):
    async def main():
        runtime = sh("sleep 60 & echo $!; sleep 60 & echo $!; wait")
        await runtime.start()
        children = await pids_printed(runtime, 2)
        await runtime.stop()
        assert not any(lives(pid) for pid in children)

    run(main())


def test_a_child_that_ignores_sigterm_and_outlives_its_leader_is_killed(run):
    async def main():
        runtime = sh(f'/bin/sh -c "{IGNORES_TERM.replace("echo up", "echo $$")}" & wait', grace=0.3)
        await runtime.start()
        [child] = await pids_printed(runtime, 1)
        await runtime.stop()
        assert not lives(child)

    run(main())


def test_a_child_gets_the_grace_though_its_leader_died_at_once(run):
    async def main():
        saving = "trap 'sleep 0.3; echo saved >&2; exit 0' TERM; echo up; while :; do sleep 0.02; done"
        runtime = ProcessRuntime(["/bin/sh", "-c", '/bin/sh -c "$SAVING" & wait'], env={"SAVING": saving}, grace=8)
        await runtime.start()
        await printed(runtime, "up")
        await runtime.stop()
        assert runtime.output()[-1] == "saved"

    run(main())


def test_a_grandchild_in_a_session_of_its_own_is_found_and_ended(run):
    async def main():
        code = (
            "import subprocess, sys, time\n"
            "p = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
            "print(p.pid, flush=True)\n"
            "time.sleep(60)"
        )
        runtime = ProcessRuntime([sys.executable, "-c", code])
        await runtime.start()
        [stray] = await pids_printed(runtime, 1)
        await runtime.stop()
        assert not lives(stray)

    run(main())


def test_a_crash_is_told_at_once_with_its_code_and_last_line(run):
    async def main():
        runtime = sh("echo loading; echo CUDA out of memory >&2; exit 3")
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        await runtime.start()
        began = time.monotonic()
        assert await told == "sh exited with code 3; its last line: CUDA out of memory"
        assert time.monotonic() - began < 0.5
        assert not await runtime.alive()
        await runtime.stop()
        assert runtime.output() == ("loading", "CUDA out of memory")

    run(main())


def test_a_process_killed_from_outside_is_told_by_the_signals_name(run):
    async def main():
        runtime = sh("exec sleep 60")
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        await runtime.start()
        os.kill(runtime.pid, signal.SIGKILL)
        began = time.monotonic()
        assert await told == "sh was killed by SIGKILL"
        assert time.monotonic() - began < 0.5
        await runtime.stop()

    run(main())


def test_a_crash_is_told_though_a_child_still_holds_the_output_and_the_child_goes_with_the_stop(run):
    async def main():
        runtime = sh("sleep 60 & echo $!; exit 1")
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        await runtime.start()
        assert (await told).startswith("sh exited with code 1")
        [child] = await pids_printed(runtime, 1)
        assert lives(child)
        await runtime.stop()
        assert not lives(child)

    run(main())


def test_a_start_ends_what_a_crashed_run_left_behind(run):
    async def main():
        runtime = sh("sleep 60 & echo $!; exit 1")
        told = asyncio.Event()
        runtime.on_exit = lambda _: told.set()
        await runtime.start()
        await told.wait()
        [child] = await pids_printed(runtime, 1)
        await runtime.start()
        assert not lives(child)
        await runtime.stop()

    run(main())


def test_a_stop_is_no_crash(run):
    async def main():
        told = []
        runtime = sh("exec sleep 60")
        runtime.on_exit = told.append
        await runtime.start()
        await runtime.stop()
        await asyncio.sleep(LAST_WORDS * 2)  # a report would have come by now
        assert told == []

    run(main())


def test_stopping_twice_or_before_a_start_does_nothing(run):
    async def main():
        runtime = sh("exec sleep 60")
        await runtime.stop()
        await runtime.start()
        await runtime.stop()
        await runtime.stop()
        await runtime.start()
        assert await runtime.alive()
        await runtime.stop()

    run(main())


def test_stops_at_the_same_time_are_one_and_a_cancelled_one_does_not_spoil_it(run):
    async def main():
        runtime = sh(IGNORES_TERM, grace=0.3)
        await runtime.start()
        await printed(runtime, "up")
        pid = runtime.pid
        stops = [asyncio.create_task(runtime.stop()) for _ in range(3)]
        await asyncio.sleep(0)
        stops[0].cancel()
        await asyncio.gather(*stops[1:])
        assert not lives(pid)
        assert stops[0].cancelled()

    run(main())


def test_a_stop_during_a_start_leaves_nothing(run):
    async def main():
        runtime = sh("exec sleep 60")
        starting = asyncio.create_task(runtime.start())
        await asyncio.sleep(0)
        starting.cancel()
        await runtime.stop()
        assert not await runtime.alive()
        assert not [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]

    run(main())


def test_what_survives_even_sigkill_is_told_and_can_be_tried_again(run, monkeypatch):
    async def main():
        runtime = sh("exec sleep 60", grace=0.05)
        await runtime.start()
        survivor = psutil.Process()
        monkeypatch.setattr(process_module, "KILL_WAIT", 0.1)
        with monkeypatch.context() as patched:
            patched.setattr(ProcessGroup, "members", lambda self: [survivor])
            with pytest.raises(StopFailed, match=f"process {survivor.pid} outlived SIGKILL"):
                await runtime.stop()
        await runtime.stop()
        assert runtime.pid is None

    run(main())


def test_a_flood_of_output_does_not_block_the_child_and_is_bounded(run):
    async def main():
        code = "import sys; sys.stdout.write(('y' * 99 + chr(10)) * 100_000 + 'done'); sys.stdout.flush(); input()"
        runtime = ProcessRuntime([sys.executable, "-c", code])
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        await runtime.start()
        assert "EOFError" in await told  # its standard input is empty
        assert len(runtime.output()) == 200
        await runtime.stop()

    run(main())


def test_no_zombie_is_left(run):
    async def main():
        for script in ("exit 0", "exec sleep 60", "sleep 60 & exit 1"):
            runtime = sh(script)
            await runtime.start()
            await runtime.stop()
        assert psutil.Process().children(recursive=True) == []

    run(main())


ORPHANS = """
import asyncio, ctypes, psutil
from gpu_turnstile.runtimes.process import ProcessRuntime
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become ours, as in a container's PID 1
async def main():
    runtime = ProcessRuntime(["/bin/sh", "-c", "sleep 60 & sleep 60 & echo up; wait"])
    await runtime.start()
    while "up" not in runtime.output():
        await asyncio.sleep(0.01)
    await runtime.stop()
    print(psutil.Process().children(recursive=True))
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
def test_orphans_that_become_ours_are_reaped():
    async def main():
        runtime = ProcessRuntime([sys.executable, "-c", ORPHANS])
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        await runtime.start()
        assert await told == f"{Path(sys.executable).name} exited with code 0; its last line: []"
        await runtime.stop()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_an_external_engine_is_left_alone():
    async def main():
        runtime = ExternalRuntime()
        await runtime.start()
        await runtime.stop()
        return await runtime.alive(), runtime.owned, runtime.output()

    assert asyncio.run(main()) == (True, False, ())
