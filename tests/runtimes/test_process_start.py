"""A start that cannot be says why; one that can be runs where, and with what, its preset says."""

from __future__ import annotations

import pytest

from gpu_turnstile.runtimes.base import StartFailed
from gpu_turnstile.runtimes.launch import child_environment
from gpu_turnstile.runtimes.process import ProcessRuntime
from tests.runtimes.children import printed, sh


def test_a_second_start_is_refused_while_it_runs(run):
    async def main():
        runtime = sh("exec sleep 60")
        await runtime.start()
        with pytest.raises(StartFailed, match="already running"):
            await runtime.start()
        assert await runtime.alive()
        await runtime.stop()

    run(main())


@pytest.mark.parametrize(
    ("argv", "settings", "reason"),
    [
        (["no-such-engine"], {}, "command not found: no-such-engine"),
        (["/no/such/engine"], {}, "command not found: /no/such/engine"),
        (["/etc/passwd"], {}, "not executable: /etc/passwd"),
        (["/etc"], {}, "not executable: /etc"),
        (["/bin/sh"], {"cwd": "/no/such/place"}, "working directory /no/such/place does not exist"),
        (["/bin/sh", "a\0b"], {}, "cannot run /bin/sh: an argument or a variable has a NUL"),
        ([], {}, "there is no command"),
    ],
)
def test_a_start_that_cannot_be_says_why_in_one_line(run, argv, settings, reason):
    async def main():
        with pytest.raises(StartFailed, match=reason) as failure:
            await ProcessRuntime(argv, **settings).start()
        assert "\n" not in failure.value.reason

    run(main())


def test_a_script_without_its_interpreter_says_that_it_cannot_run(run, tmp_path):
    script = tmp_path / "engine"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)

    async def main():
        with pytest.raises(StartFailed, match="cannot run"):
            await ProcessRuntime([str(script)]).start()

    run(main())


def test_the_command_runs_where_and_with_what_its_preset_says(run, tmp_path):
    (tmp_path / "engine").write_text("#!/bin/sh\necho $PRESET $GGML_NO_BACKTRACE $PWD\n")
    (tmp_path / "engine").chmod(0o755)

    async def main():
        runtime = ProcessRuntime(["./engine"], env={"PRESET": "set"}, cwd=tmp_path)
        await runtime.start()
        await printed(runtime, f"set 1 {tmp_path}")
        await runtime.stop()

    run(main())


def test_the_gates_keys_do_not_go_down_to_the_engine():
    parent = {
        "PATH": "/bin",
        "HF_TOKEN": "t",
        "TURNSTILE_API_KEYS": "k",
        "LLMC_ADMIN_TOKEN": "k",
        "TURNSTILE_SIM_CARD": "c",
    }
    assert child_environment(parent, {"HF_TOKEN": "own"}) == {
        "PATH": "/bin",
        "HF_TOKEN": "own",
        "TURNSTILE_SIM_CARD": "c",
        "GGML_NO_BACKTRACE": "1",
    }
