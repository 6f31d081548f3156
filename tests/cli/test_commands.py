"""The commands: in this process where that is enough, as real processes where it is not."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gpu_turnstile.cli import gate as gate_module
from gpu_turnstile.cli import places
from gpu_turnstile.cli.main import app
from gpu_turnstile.control.serve import serve_control
from gpu_turnstile.settings import SettingsError
from tests.control.fakes import presets, stage


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TURNSTILE_URL", "TURNSTILE_API_KEY", "LISTEN_OLLAMA", "GPU_TURNSTILE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> Result:
    return CliRunner().invoke(app, args, catch_exceptions=False)


def process(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpu_turnstile", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=cwd, check=False)


# ------------------------------------------------------------------------------------------- without a gate


def test_help_lists_the_commands_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from gpu_turnstile.cli.main import app; app(['--help'], standalone_mode=False);"
        "heavy = {'fastapi', 'uvicorn', 'httpx', 'pydantic', 'rich', 'structlog', 'gpu_turnstile.sim.app'};"
        "sys.exit(f'loaded: {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("serve", "status", "presets", "mode", "unload", "events", "settings", "version", "sim"):
        assert f"\n  {command} " in done.stdout


def test_python_dash_m_is_the_same_program(tmp_path: Path) -> None:
    done = process("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()[0]) == (0, "gpu-turnstile")


def test_a_gate_that_is_not_running_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    done = process("status", "--url", "http://127.0.0.1:9", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no gate answers at http://127.0.0.1:9" in done.stderr


def test_a_bad_setting_stops_serve_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "gate.env").write_text("# mine\nUNLOAD_TIMEOUT=soon\n")
    done = process("serve", "--config", "gate.env", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith('turnstile: gate.env:2: UNLOAD_TIMEOUT: "soon"')


def test_the_simulators_are_there_but_only_on_demand(tmp_path: Path) -> None:
    done = process("sim", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "ollama" in done.stdout


@pytest.mark.parametrize(
    "command", [("status",), ("mode",), ("mode", "llm"), ("unload",), ("events",), ("events", "-f")]
)
def test_every_command_that_needs_a_gate_says_so_in_the_same_way(command: tuple[str, ...]) -> None:
    result = run(*command, "--url", "127.0.0.1:9")
    assert result.exit_code == 3
    assert "no gate answers at http://127.0.0.1:9" in result.stderr
    assert result.stdout == ""


def test_something_else_on_the_port_is_not_taken_for_the_gate() -> None:
    class Ollama(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Ollama)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for command in ("status", "events"):
        result = run(command, "--url", f"http://127.0.0.1:{server.server_port}")
        assert (result.exit_code, "is no gpu-turnstile" in result.stderr) == (3, True)
    server.shutdown()
    server.server_close()


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "authorization" not in gate_module.Gate("x").client._http.headers
    monkeypatch.setenv("TURNSTILE_API_KEY", "secret")
    assert gate_module.Gate("x").client._http.headers["authorization"] == "Bearer secret"


def test_the_gates_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert places.gate_url(None) == "http://127.0.0.1:11434"
    assert places.gate_url("host:1/") == "http://host:1"
    assert places.gate_url("https://host/gate/") == "https://host/gate"
    for listen, url in {
        ":9000": "http://127.0.0.1:9000",
        "[::]:9000": "http://127.0.0.1:9000",
        "[::1]:9000": "http://[::1]:9000",
        "10.0.0.1:9000": "http://10.0.0.1:9000",
        "off": "http://127.0.0.1:11434",
        "nonsense": "http://127.0.0.1:11434",
    }.items():
        monkeypatch.setenv("LISTEN_OLLAMA", listen)
        assert places.gate_url(None) == url


def test_folders_when_nobody_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "conf"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if sys.platform == "linux":
        assert places.presets_dir(None) == tmp_path / "conf" / "gpu-turnstile" / "presets"
        assert places.state_dir(None) == tmp_path / "state" / "gpu-turnstile"
    (tmp_path / "presets").mkdir()
    assert places.presets_dir(None) == Path("presets")
    assert places.presets_dir(Path("x")) == places.state_dir(Path("x")) == Path("x")


# -------------------------------------------------------------------------------------------------- serve


class Composition:
    """Stands in for `gpu_turnstile.app.run`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import gpu_turnstile.app

        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        monkeypatch.setattr(gpu_turnstile.app, "run", self)

    def __call__(self, *args: Any) -> int:
        self.calls.append(args)
        if self.error is not None:
            raise self.error
        return 7


def test_serve_hands_settings_and_folders_to_the_composition_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Composition(monkeypatch)
    (tmp_path / "p").mkdir()
    result = run("serve", "--presets", "p", "--state-dir", "s", "--log-level", "debug")
    assert result.exit_code == 7
    ((settings, presets_dir, state_dir),) = root.calls
    assert (presets_dir, state_dir) == (Path("p"), Path("s"))
    assert (settings.loglevel, settings.source("LOGLEVEL")) == ("debug", "--log-level")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SettingsError("LOG_FILE: cannot be opened"), "turnstile: LOG_FILE: cannot be opened\n"),
        (OSError(errno.EADDRINUSE, "address already in use"), "another program listens there"),
        (PermissionError(errno.EACCES, "Permission denied", "/state"), "turnstile: /state: Permission denied\n"),
    ],
)
def test_what_is_wrong_at_start_is_one_line_and_exit_code_2(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Composition(monkeypatch).error = error
    result = run("serve")
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_error_nobody_expected_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    Composition(monkeypatch).error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        run("serve")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--log-level", "loud"), "is not one of debug, info, warn, error"),
        (("--presets", "nowhere"), "is no folder"),
        (("--config", "nowhere.env"), "--config: nowhere.env: no such file"),
    ],
)
def test_wrong_options_of_serve_are_exit_code_2(args: tuple[str, ...], said: str) -> None:
    result = run("serve", *args)
    assert (result.exit_code, said in result.stderr, result.stderr.count("\n")) == (2, True, 1)


def test_only_a_file_that_was_typed_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turnstile document: a missing file is fine. A path that somebody types is a slip if it is not there."""
    root = Composition(monkeypatch)
    monkeypatch.setenv("GPU_TURNSTILE_CONFIG", "nowhere.env")
    assert (run("serve").exit_code, len(root.calls)) == (7, 1)
    shown = run("settings", "--config", "nowhere.env")
    assert (shown.exit_code, shown.stderr) == (2, "turnstile: --config: nowhere.env: no such file\n")


# ------------------------------------------------------------------------------------- presets and settings


def test_presets_check_tells_every_files_first_error(tmp_path: Path) -> None:
    folder = presets(tmp_path / "presets")
    good = run("presets", "check")
    assert (good.exit_code, good.stdout) == (0, "presets: 3 presets, all good\n")
    (folder / "a.toml").write_text("engin = 1\n")
    (folder / "b.toml").write_text("x\n")
    bad = run("presets", "check", "presets")
    assert bad.exit_code == 2
    assert [line.split(":")[0] for line in bad.stderr.splitlines()] == ["presets/a.toml", "presets/b.toml"]
    assert 'did you mean "engine"?' in bad.stderr
    told = run("presets", "check", "presets", "--json")
    found = json.loads(told.stdout)
    assert (told.exit_code, told.stderr, found["presets"], len(found["errors"])) == (2, "", 0, 2)
    (folder / "a.toml").unlink()
    (folder / "b.toml").unlink()
    told = run("presets", "check", "--json")
    assert (told.exit_code, json.loads(told.stdout)["presets"], json.loads(told.stdout)["errors"]) == (0, 3, [])


def test_presets_check_finds_what_two_files_both_claim(tmp_path: Path) -> None:
    folder = presets(tmp_path / "presets")
    (folder / "other.toml").write_text((folder / "one.toml").read_text())
    bad = run("presets", "check")
    assert bad.exit_code == 2
    assert "is already the" in bad.stderr


def test_presets_check_without_a_folder_says_which() -> None:
    bad = run("presets", "check", "nowhere")
    assert (bad.exit_code, bad.stderr) == (2, "turnstile: nowhere: no such folder\n")


def test_presets_list(tmp_path: Path) -> None:
    presets(tmp_path / "presets")
    text = run("presets", "list").stdout
    assert [line.split()[0] for line in text.splitlines()] == ["NAME", "one", "pictures", "two"]
    assert "gpt-4o" in text
    found = json.loads(run("presets", "list", "--json").stdout)
    assert [(p["name"], p["mode"]) for p in found] == [("one", "llm"), ("pictures", "comfyui"), ("two", "llm")]


def test_settings_lists_every_setting_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNLOAD_TIMEOUT", "5s")
    found = {row["name"]: row for row in json.loads(run("settings", "--json").stdout)}
    assert (found["UNLOAD_TIMEOUT"]["value"], found["UNLOAD_TIMEOUT"]["source"]) == ("5s", "environment")
    text = run("settings").stdout
    assert all(name in text for name in found)
    monkeypatch.setenv("UNLOAD_TIMEOUT", "soon")
    assert run("settings").exit_code == 2


# --------------------------------------------------------------------------------------------- with a gate


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[str]:
    """A control app with fake engines behind it, in a thread; its URL."""
    url: list[str] = []
    ready, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with stage(tmp_path) as s:
            server = await serve_control(s.app, 0)
            url.append(server.url)
            ready.set()
            await asyncio.to_thread(ended.wait)
            await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield url[0]
    ended.set()
    thread.join()


def test_a_session_with_a_gate(gate: str) -> None:
    shown = run("status", "--url", gate)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "engines" in shown.stdout

    assert run("mode", "--url", gate).stdout == "idle: nobody (idle)\n"
    assert run("mode", "llm", "two", "--url", gate).stdout == "llm: two (serving)\n"
    assert json.loads(run("status", "--json", "--url", gate).stdout)["residents"] == ["two"]

    unknown = run("mode", "llm", "twoo", "--url", gate)
    assert unknown.exit_code == 1
    assert "two" in unknown.stderr
    assert unknown.stderr.count("\n") == 1

    assert run("unload", "--url", gate).stdout == "idle: nobody (idle)\n"

    lines = run("events", "--url", gate).stdout.splitlines()
    assert lines[0].split()[1] == "started"
    assert lines[-1].split()[1:3] == ["swapped", "target=-"]
    (last,) = run("events", "-n", "1", "--json", "--url", gate).stdout.splitlines()
    assert json.loads(last)["kind"] == "swapped"
    assert json.loads(last)["id"] == len(lines)
    assert run("events", "--since", str(len(lines)), "--url", gate).stdout == ""


def test_following_events_gets_what_comes_without_gap(gate: str) -> None:
    events = gate_module.Gate(gate).events(0, follow=True)
    assert next(events)["kind"] == "started"
    run("mode", "llm", "one", "--url", gate)
    seen = [next(events)]
    while seen[-1]["kind"] != "swapped":
        seen.append(next(events))
    assert [event["id"] for event in seen] == list(range(2, 2 + len(seen)))
    events.close()
