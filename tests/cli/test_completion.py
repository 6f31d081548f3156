"""Completion as it is lived with: installed by the command itself, tried with TABs in each shell's own terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys

import pytest

from tests.aio import run_async
from tests.cli.terminal import in_terminal, piped
from tests.e2e.house import house, llama

TAB, HOME, ENTER = b"\t", b"\x01", b"\r"
BIN = os.path.dirname(sys.executable)
LINES = (
    (b"turnstile cert", "turnstile certify"),
    (b"turnstile presets ch", "turnstile presets check"),
    (b"turnstile lock --res", "turnstile lock --resident"),
    (b"turnstile lock cod", "turnstile lock coder-large"),
    (b"turnstile run --preset wri", "turnstile run --preset writer"),
)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@run_async
async def test_a_shell_completes_commands_options_and_presets_from_the_first_tab_on(tmp_path, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here; Debian: apt-get install {shell}")
    (tmp_path / "home").mkdir()
    async with house(tmp_path, [llama("coder-large"), llama("writer")]) as h:
        env = {"HOME": str(tmp_path / "home"), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PS1": "$ "}
        async with in_terminal(shell, "-i", TURNSTILE_URL=h.gate, columns=200, **env) as t:
            t.press(b"turnstile --install-completion" + ENTER)
            await t.says("completion installed", 15)
            t.press(f"echo @again; exec {shell} -i".encode() + ENTER)
            await t.says("[\n\r]@again")
            for typed, completed in LINES:
                await completes(t, typed, completed)


async def completes(t, typed, completed):
    """The shell itself says what has become of the line: it is made an `echo`."""
    t.press(typed + TAB + HOME + b"echo @ " + ENTER)
    await t.says(f"[\n\r]@ {re.escape(completed)} ?[\n\r]", 20)


@run_async
async def test_names_come_from_the_gate_else_from_the_folder_and_a_tab_never_fails(tmp_path):
    async with house(tmp_path, [llama("coder"), llama("writer")]) as h:
        assert await offered("turnstile lock c", TURNSTILE_URL=h.gate) == ["coder"]
        assert await offered("turnstile lock ", TURNSTILE_URL=h.gate) == ["coder", "writer"]
    config = tmp_path / "config" / "gpu-turnstile"
    (config / "presets").mkdir(parents=True)
    (config / "presets" / "at-home.toml").touch()
    away = {"TURNSTILE_URL": "http://127.0.0.1:9", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert await offered("turnstile lock ", **away) == ["at-home"]
    assert await offered("turnstile lock ", **{**away, "XDG_CONFIG_HOME": "/nowhere"}) == []
    assert await offered("turnstile re") == ["renew", "release"]


async def offered(line: str, **env: str) -> list[str]:
    words = line.split(" ")
    given = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    code, out, err = await piped(_TURNSTILE_COMPLETE="complete_bash", **given, **env)
    assert (code, err) == (0, "")
    return re.split(r"\s+", out.strip()) if out.strip() else []
