"""A gate that was killed hard leaves an engine; the next gate takes it over, or ends it with all that came from it."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import time

import psutil
import pytest

from gpu_turnstile.runtimes import process as process_module
from gpu_turnstile.runtimes import records
from gpu_turnstile.runtimes.base import StartFailed
from gpu_turnstile.runtimes.external import ExternalRuntime
from gpu_turnstile.runtimes.group import TOKEN, ProcessGroup
from gpu_turnstile.runtimes.process import ProcessRuntime, end_forgotten
from tests.runtimes.children import lives, until
from tests.runtimes.gate import killed_gate

TALKS = ["/bin/sh", "-c", "echo up; while :; do echo tick; sleep 0.02; done"]


@pytest.fixture
def record(tmp_path):
    """Whatever a failed test leaves, is ended."""
    file = tmp_path / "engines" / "p.json"
    yield file
    found = records.load(file)
    if found is not None and found.lives:
        os.killpg(found.pid, signal.SIGKILL)


def marked(token):
    """The pids of those that came from a recorded run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            pass
    return found


def test_an_engine_outlives_a_killed_gate_prints_on_and_is_taken_over(run, record):
    async def main():
        await killed_gate(TALKS, record, port=4711)
        left = records.load(record)
        assert left.lives
        assert left.port == records.living_port(record) == 4711
        runtime = ProcessRuntime(TALKS, record=record, port=4711)
        assert await runtime.adopt()
        assert await runtime.adopt()  # again: nothing changes
        assert runtime.pid == left.pid
        assert await runtime.alive()
        before = len(runtime.output())
        await until(lambda: len(runtime.output()) > before + 2)  # it was not ended by SIGPIPE
        with pytest.raises(StartFailed, match="already running"):
            await runtime.start()
        began = time.monotonic()
        await runtime.stop()
        assert time.monotonic() - began < 2
        assert not lives(left.pid)
        assert not record.exists()
        assert not await runtime.alive()

    run(main())


def test_the_end_of_an_adopted_engine_is_told_within_half_a_second(run, record):
    async def main():
        await killed_gate(TALKS, record)
        runtime = ProcessRuntime(TALKS, record=record)
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        assert await runtime.adopt()
        os.kill(runtime.pid, signal.SIGKILL)
        began = time.monotonic()
        assert (await told).startswith("sh has ended (started by an earlier gate")
        assert time.monotonic() - began < 0.5
        assert not await runtime.alive()
        await runtime.stop()
        assert not record.exists()

    run(main())


def test_an_adopted_engine_is_stopped_with_children_grandchildren_and_strays(run, record):
    async def main():
        stray = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
        script = f'"{sys.executable}" -c "{stray}"; sleep 60 & (sleep 60 & wait) & echo up; wait'
        command = ["/bin/sh", "-c", script]
        await killed_gate(command, record)
        token = records.load(record).token
        assert len(marked(token)) >= 4  # the stray's parent is gone: only its token tells
        runtime = ProcessRuntime(command, record=record)
        told = []
        runtime.on_exit = told.append
        assert await runtime.adopt()
        await runtime.stop()
        assert marked(token) == []
        assert told == []  # a stop is no crash

    run(main())


def test_an_engine_of_another_command_is_ended_and_not_taken_over(run, record):
    async def main():
        await killed_gate([*TALKS[:2], "sleep 60 & " + TALKS[2]], record)
        left = records.load(record)
        runtime = ProcessRuntime(TALKS, record=record)
        assert not await runtime.adopt()
        assert marked(left.token) == []
        assert not record.exists()
        await runtime.start()
        assert await runtime.alive()
        await runtime.stop()

    run(main())


def test_a_start_or_a_stop_without_an_adoption_ends_what_was_left(run, record):
    async def main():
        for act in ("start", "stop"):
            await killed_gate(TALKS, record)
            left = records.load(record)
            runtime = ProcessRuntime(TALKS, record=record)
            await getattr(runtime, act)()
            assert not lives(left.pid)
            await runtime.stop()

    run(main())


def test_children_of_an_engine_that_died_with_the_gate_are_ended(run, record):
    async def main():
        await killed_gate(["/bin/sh", "-c", "sleep 60 & echo up; exec sleep 60"], record)
        left = records.load(record)
        os.kill(left.pid, signal.SIGKILL)
        await until(lambda: not left.lives)
        assert len(marked(left.token)) == 1
        assert not await ProcessRuntime(TALKS, record=record).adopt()
        assert marked(left.token) == []
        assert not record.exists()

    run(main())


def test_a_child_that_overwrote_its_environment_is_known_by_its_session(run, record):
    async def main():
        # As programs do that set their title: what stands in /proc is no environment any more.
        code = "import os, sys; print('up', flush=True) if os.fork() else os.execve('/bin/sleep', ['sleep', '60'], {})"
        command = [sys.executable, "-c", code + "; import time; time.sleep(60)"]
        await killed_gate(command, record)
        left = records.load(record)
        [child] = [p.pid for p in psutil.Process(left.pid).children()]
        os.kill(left.pid, signal.SIGKILL)
        await until(lambda: not left.lives)
        assert not await ProcessRuntime(command, record=record).adopt()
        assert not lives(child)

    run(main())


def test_strangers_in_a_session_with_our_number_are_left_alone():
    """Our leader is gone and its number went to another, who is gone too: no token, an environment that tells so."""
    script = "sleep 60 & echo $!"
    with psutil.Popen(["/bin/sh", "-c", script], start_new_session=True, stdout=-1, text=True) as leader:
        stranger = int(leader.stdout.readline())
        leader.wait()
        group = ProcessGroup.of_leftovers(leader.pid, "ours")
        assert group.members() == []
        assert group.is_empty()
        group.signal(signal.SIGKILL)
        assert lives(stranger)
        os.kill(stranger, signal.SIGKILL)


def test_a_pid_that_was_given_to_another_is_left_alone(run, record):
    async def main():
        with psutil.Popen(["sleep", "60"], start_new_session=True) as other:
            saved = records.Record(other.pid, "1", records.boot_id(), "t", "c")
            records.save(record, saved)
            assert not await ProcessRuntime(TALKS, record=record).adopt()
            assert lives(other.pid)
            assert not record.exists()
            records.save(record, records.Record(other.pid, records.birth(other.pid), "another boot", "t", "c"))
            assert not await ProcessRuntime(TALKS, record=record).adopt()
            assert lives(other.pid)
            other.kill()

    run(main())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"pid": 1}', b'{"pid": "x"}', b"\xff" * 100_000])
def test_a_record_that_makes_no_sense_is_none(run, record, text):
    record.parent.mkdir()
    record.write_bytes(text)
    assert not asyncio.run(ProcessRuntime(TALKS, record=record).adopt())
    assert not record.exists()


def test_a_record_never_names_the_first_process(record):
    records.save(record, records.Record(1, records.birth(1) or "", records.boot_id(), "t", "c"))
    assert records.load(record) is None


def test_a_gate_killed_before_the_record_is_written_leaves_no_engine(run, record):
    async def main():
        ran = record.parent / "ran"
        await killed_gate(["/bin/sh", "-c", f"touch {ran}; sleep 60"], record, dies_before_the_record=True)
        await until(lambda: not any(str(ran) in " ".join(p.info["cmdline"] or ()) for p in processes()))
        assert not ran.exists()

    def processes():
        return psutil.process_iter(["cmdline"])

    run(main())


def test_a_record_and_a_log_are_for_their_owner_only_and_the_record_goes_with_the_engine(run, record):
    async def main():
        runtime = ProcessRuntime(TALKS, env={"API_KEY": "secret-1"}, record=record)
        await runtime.start()
        for file in (record, record.with_suffix(".log")):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "secret" not in record.read_text()
        await runtime.stop()
        assert not record.exists()

    run(main())


def test_a_disk_that_takes_no_record_does_not_stop_the_engine(run, record, monkeypatch):
    def full(file, saved):
        raise OSError(28, "No space left on device")

    async def main():
        monkeypatch.setattr(records, "save", full)
        runtime = ProcessRuntime(TALKS, record=record)
        await runtime.start()
        await until(lambda: "tick" in runtime.output())
        await runtime.stop()

    run(main())


def test_a_crash_of_a_recorded_engine_is_told_with_its_code_and_last_line(run, record):
    async def main():
        runtime = ProcessRuntime(["/bin/sh", "-c", "echo loading; echo out of memory >&2; exit 3"], record=record)
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        await runtime.start()
        assert await told == "sh exited with code 3; its last line: out of memory"
        await runtime.stop()
        assert runtime.output() == ("loading", "out of memory")

    run(main())


def test_a_recorded_engine_gets_its_own_arguments_directory_and_no_input(run, record, tmp_path):
    async def main():
        (tmp_path / "engine").write_text('#!/bin/sh\necho "$# $2 $PRESET $PWD"; read -r x || echo no input\n')
        (tmp_path / "engine").chmod(0o755)
        command = ["./engine", "a b", "$HOME 'x'"]
        runtime = ProcessRuntime(command, env={"PRESET": "set"}, cwd=tmp_path, record=record)
        await runtime.start()
        await until(lambda: len(runtime.output()) == 2)
        assert runtime.output() == (f"2 $HOME 'x' set {tmp_path}", "no input")
        await runtime.stop()

    run(main())


def test_a_flood_of_output_is_cut_while_it_runs_and_the_last_lines_are_whole(run, record, monkeypatch):
    monkeypatch.setattr(process_module, "TRIM", 0.01)

    async def main():
        code = "import sys\nfor n in range(400_000): print('y' * 40, n)\nprint('done', flush=True); input()"
        runtime = ProcessRuntime([sys.executable, "-c", code], record=record)
        sizes = []
        told = asyncio.get_running_loop().create_future()
        runtime.on_exit = told.set_result
        await runtime.start()
        while not told.done():
            sizes.append(record.with_suffix(".log").stat().st_size)
            await asyncio.sleep(0.005)
        assert "EOFError" in told.result()
        assert max(sizes) < 12 << 20  # 18 MB were printed
        assert len(runtime.output()) == 200
        await runtime.stop()

    run(main())


def test_engines_whose_presets_are_gone_are_ended_and_others_kept(run, tmp_path):
    async def main():
        kept, gone = tmp_path / "kept.json", tmp_path / "gone.json"
        for file in (kept, gone):
            await killed_gate(TALKS, file)
        left = {file: records.load(file) for file in (kept, gone)}
        await end_forgotten(tmp_path, {kept})
        assert left[kept].lives
        assert not lives(left[gone].pid)
        assert not gone.exists()
        await end_forgotten(tmp_path, ())
        assert not lives(left[kept].pid)
        await end_forgotten(tmp_path / "none", ())

    run(main())


def test_a_runtime_without_a_record_has_nothing_to_take_over(run):
    async def main():
        assert not await ProcessRuntime(TALKS).adopt()
        assert await ExternalRuntime().adopt()

    run(main())
