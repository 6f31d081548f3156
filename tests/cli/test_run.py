"""`turnstile run` as people use it: a process in a terminal, a real gate, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import pytest

from gpu_turnstile.presets.values import Address
from tests.aio import run_async, until
from tests.cli.terminal import CTRL_C, Terminal, piped, terminal
from tests.e2e.house import house, llama

WAITS = "trap 'echo got TERM; exit 7' TERM; trap 'echo got INT; exit 8' INT; trap 'echo got HUP; exit 9' HUP; "
WAITS += "echo ready; while :; do sleep 0.05; done"


def gate(tmp_path, **more):
    return house(tmp_path, [llama("a"), llama("b")], **more)


def run(h, *args, **more) -> contextlib.AbstractAsyncContextManager[Terminal]:
    return terminal("run", *args, TURNSTILE_URL=h.gate, **more)


def holders(h):
    return [o.owner for o in h.view.locks.owners]


def waiters(h):
    return [w.owner for w in h.view.locks.queue]


async def call(h, path, **body):
    return await h.http.post(f"{h.gate}{path}", json=body)


@run_async
async def test_the_command_runs_under_the_lock_and_its_exit_code_is_ours(tmp_path):
    async with gate(tmp_path) as h:
        script = 'echo "lock $TURNSTILE_LOCK of $TURNSTILE_OWNER"; read line; echo "read $line"; exit 5'
        async with run(h, "-p", "a", "--owner", "me", "--", "sh", "-c", script) as t:
            await t.says("lock 1 of me")
            assert holders(h) == ["me"]
            t.press(b"hello\n")
            await t.says("read hello")
            assert await t.ends() == 5
        assert holders(h) == []


@run_async
async def test_the_owner_is_user_host_and_pid_unless_said(tmp_path):
    async with gate(tmp_path) as h, run(h, "-p", "a", "--", "sh", "-c", WAITS, TURNSTILE_OWNER="the outer one") as t:
        await t.says("ready")
        (owner,) = holders(h)
        assert owner.endswith(f":{t.pid}")
        assert "@" in owner
        t.press(CTRL_C)
        await t.ends()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 7), (signal.SIGINT, 8), (signal.SIGHUP, 9)], ids=["TERM", "INT", "HUP"]
)
@run_async
async def test_signals_reach_the_command_which_decides(tmp_path, number, code):
    async with gate(tmp_path) as h:
        async with run(h, "-p", "a", "--", "sh", "-c", WAITS) as t:
            await t.says("ready")
            os.kill(t.pid, number)
            assert await t.ends() == code
            assert t.text.count("got ") == 1
        assert holders(h) == []


@run_async
async def test_ctrl_c_reaches_the_command_once_and_not_twice(tmp_path):
    count = "import signal, time\nn = []\nsignal.signal(2, lambda *_: n.append(1))\nprint('ready', flush=True)\n"
    count += "while not n: time.sleep(0.05)\ntime.sleep(0.5)\nprint('times', len(n))"
    async with gate(tmp_path) as h:
        async with run(h, "-p", "a", "--", sys.executable, "-c", count) as t:
            await t.says("ready")
            t.press(CTRL_C)
            assert await t.ends() == 0
            assert "times 1" in t.text
        assert holders(h) == []


@run_async
async def test_a_command_that_is_killed_gives_128_and_the_signal_and_the_lock_is_free(tmp_path):
    async with gate(tmp_path) as h:
        async with run(h, "-p", "a", "--", "sh", "-c", "echo pid $$.; exec sleep 60") as t:
            await t.says(r"pid \d+\.")
            os.kill(int(t.text.split("pid ")[1].split(".")[0]), signal.SIGKILL)
            assert await t.ends() == 128 + 9
        assert holders(h) == []


@run_async
async def test_in_the_queue_the_position_is_shown_and_ctrl_c_leaves_it(tmp_path):
    async with gate(tmp_path) as h:
        await call(h, "/lock", lock="a", owner="first")
        async with run(h, "-p", "b", "--", "true") as t:
            await t.says(r"waiting for b, position 1 of 1; a is locked by first")
            t.press(CTRL_C)
            assert await t.ends() == 128 + 2
            assert "Traceback" not in t.text
        assert waiters(h) == []
        assert holders(h) == ["first"]
        await call(h, "/unlock", owner="first")


@run_async
async def test_in_the_queue_sigterm_leaves_it_too(tmp_path):
    async with gate(tmp_path) as h:
        await call(h, "/lock", lock="a", owner="first")
        async with run(h, "-p", "b", "--", "true") as t:
            await t.says("position 1")
            os.kill(t.pid, signal.SIGTERM)
            assert await t.ends() == 128 + 15
        assert waiters(h) == []
        await call(h, "/unlock", owner="first")


@run_async
async def test_its_turn_comes(tmp_path):
    async with gate(tmp_path) as h:
        await call(h, "/lock", lock="a", owner="first")
        async with run(h, "-p", "b", "--", "sh", "-c", "echo mine now") as t:
            await t.says("position 1")
            await call(h, "/unlock", owner="first")
            assert await t.ends() == 0
            assert "turnstile: b is locked, after" in t.text
            assert "mine now" in t.text
        assert holders(h) == []


@run_async
async def test_a_lost_lock_is_a_warning_and_the_command_runs_on(tmp_path):
    async with gate(tmp_path) as h, run(h, "-p", "a", "--ttl", "1", "--", "sh", "-c", WAITS) as t:
        await t.says("ready")
        await call(h, "/unlock", force=True)
        await t.says(r"warning: the lock is lost: .*\n?.*runs on without it")
        assert t.process.poll() is None
        t.press(CTRL_C)
        assert await t.ends() == 8


@run_async
async def test_with_on_lost_kill_the_command_is_ended(tmp_path):
    args = ("-p", "a", "--ttl", "1", "--on-lost", "kill", "--", "sh", "-c", WAITS)
    async with gate(tmp_path) as h, run(h, *args) as t:
        await t.says("ready")
        await call(h, "/unlock", force=True)
        assert await t.ends() == 7
        assert "the command is ended" in " ".join(t.text.split())


@run_async
async def test_the_heartbeat_holds_it_longer_than_the_ttl(tmp_path):
    async with gate(tmp_path) as h, run(h, "-p", "a", "--ttl", "1", "--", "sh", "-c", "sleep 2; echo done") as t:
        assert await t.ends() == 0
        assert "done" in t.text
        assert "lost" not in t.text
        assert "lapsed" not in h.kinds()


@run_async
async def test_a_gate_that_restarts_meanwhile_gets_the_lock_back_at_the_end(tmp_path):
    async with gate(tmp_path) as h:
        port = h.app.port("llm")
        context = run(h, "-p", "a", "--ttl", "3", "--owner", "me", "--", "sh", "-c", WAITS)
        t = await context.__aenter__()
        await t.says("ready")
    await t.says("the gate does not answer")
    t.press(CTRL_C)
    await t.says("trying to give the lock back")
    async with gate(tmp_path, listen_ollama=Address("127.0.0.1", port)) as h:
        assert await t.ends() == 8
        assert holders(h) == []
    await context.__aexit__(None, None, None)


@run_async
async def test_what_never_ran_has_codes_of_its_own(tmp_path):
    async with gate(tmp_path) as h:
        await call(h, "/lock", lock="a", owner="first")
        (tmp_path / "broken").write_bytes(b"\x7fELF no program")
        (tmp_path / "broken").chmod(0o755)
        tries = (
            ("-p", "b", "--no-wait", "--", "true"),
            ("-p", "b", "--timeout", "0.2", "--", "true"),
            ("-p", "a", "--", "no-such-command"),
            ("-p", "a", "--", str(tmp_path)),
            ("-p", "a", "--", str(tmp_path / "broken")),
            ("-p", "a", "--url", "127.0.0.1:9", "--", "true"),
            ("--on-lost", "maybe", "--", "true"),
        )
        answers = await asyncio.gather(*(piped("run", *args, TURNSTILE_URL=h.gate) for args in tries))
        assert [code for code, _, _ in answers] == [125, 125, 127, 126, 126, 125, 2]
        said = [" ".join(err.split()) for _, _, err in answers]
        assert "first" in said[0]
        assert "given up" in said[1]
        assert said[2] == "turnstile: no-such-command: no such command"
        assert "cannot be executed" in said[3]
        assert "Exec format error" in said[4]
        assert "no gate answers" in said[5]
        assert all(err.count("\n") == 1 for _, _, err in answers[2:-1])
        assert (holders(h), waiters(h)) == (["first"], [])
        await call(h, "/unlock", owner="first")


@run_async
async def test_a_pipeline_gets_the_commands_output_and_nothing_else(tmp_path):
    async with gate(tmp_path) as h:
        await h.chat("a")
        code, out, err = await piped("run", "--", "sh", "-c", "echo out; echo err >&2", TURNSTILE_URL=h.gate)
        assert (code, out, err) == (0, "out\n", "err\n")
        await until(lambda: not holders(h))


@run_async
async def test_two_runs_take_turns(tmp_path):
    async with gate(tmp_path) as h:
        log = tmp_path / "log"
        script = f"echo in >> {log}; sleep 0.3; echo out >> {log}"
        both = [piped("run", "-p", name, "--", "sh", "-c", script, TURNSTILE_URL=h.gate) for name in ("a", "b")]
        assert [code for code, _, _ in await asyncio.gather(*both)] == [0, 0]
        assert log.read_text().split() == ["in", "out", "in", "out"]
