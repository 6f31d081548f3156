"""The log, configured for real; loggers are made after `configure`, so other tests' loggers stay as they are."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from gpu_turnstile import logs
from gpu_turnstile.settings import Given, Settings, SettingsError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.getLogger("uvicorn.error").setLevel(logging.NOTSET)  # a simulated engine in this process made it silent
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_is_one_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "text", None, color=True)
    structlog.get_logger("gateway").info("upstream_died", engine="one", reason="it is gone", took=0.123456789, n=None)
    line = capsys.readouterr().err
    assert line.endswith(' info  gateway upstream_died engine=one reason="it is gone" took=0.123457 n=None\n')
    assert line[:4].isdigit()
    assert "\x1b" not in line  # stderr is no terminal here


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", None, color=True)
    structlog.get_logger("gateway").warning("a\nb", path=Path("/x"), says="ü\x1b[31m")
    found = json.loads(capsys.readouterr().err)
    assert list(found)[:3] == ["time", "level", "logger"]
    assert (found["level"], found["logger"], found["event"]) == ("warn", "gateway", "a\nb")
    assert found["path"] == "/x"
    assert found["says"] == "ü\x1b[31m"


@pytest.mark.parametrize(
    ("level", "seen"),
    [("debug", 4), ("info", 3), ("warn", 2), ("error", 1)],
)
def test_levels_filter(level: str, seen: int, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(level, "text", None, color=False)
    log = structlog.get_logger("x")
    log.debug("a"), log.info("b"), log.warning("c"), log.error("d")
    assert len(capsys.readouterr().err.splitlines()) == seen


def test_nothing_from_outside_breaks_the_line_or_colours_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "text", None, color=False)
    structlog.get_logger("x").info("evil\n\x1b[2J", client="a\nb\x1b[31m c", list=["x\ny"])
    out = capsys.readouterr().err
    assert out.count("\n") == 1
    assert "\x1b" not in out


def test_libraries_speak_from_warning_on_through_the_same_log(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "json", None, color=False)
    logging.getLogger("uvicorn.error").info("Started")
    logging.getLogger("httpx").warning("odd %s", "thing")
    try:
        raise ValueError("inside")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["logger"], first["level"], first["event"]) == ("httpx", "warn", "odd thing")
    assert (second["level"], "ValueError: inside" in second["exception"]) == ("error", True)


def test_a_moved_file_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOOK_EVERY", 0.0)
    file = tmp_path / "gate.log"
    logs.configure("info", "text", file, color=True)
    log = structlog.get_logger("x")
    log.info("before")
    file.rename(tmp_path / "gate.log.1")
    log.info("after")
    assert "before" in (tmp_path / "gate.log.1").read_text()
    assert "after" in file.read_text()
    file.unlink()
    log.info("again")
    assert "again" in file.read_text()


def test_lines_are_appended(tmp_path: Path) -> None:
    file = tmp_path / "gate.log"
    file.write_text("old\n")
    logs.configure("info", "text", file, color=True)
    structlog.get_logger("x").info("new")
    assert file.read_text().startswith("old\n")


def test_a_file_that_cannot_be_opened_stops_the_start_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"LOG_FILE: .*nowhere.*cannot be opened: No such file"):
        logs.configure("info", "text", tmp_path / "nowhere" / "gate.log", color=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_once_and_disturbs_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "text", "/dev/full", color=True)
    log = structlog.get_logger("x")
    log.info("one")
    log.info("two")
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_a_closed_stderr_disturbs_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream = (tmp_path / "closed").open("w")
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure("info", "text", None, color=True)
    stream.close()
    structlog.get_logger("x").info("nobody hears it")


def test_colours_follow_level_and_status() -> None:
    text = logs._Text(colours=True)
    logger = logs._Line(logs.Sink(None), "gateway")

    def line(event: str, **fields: object) -> str:
        return text(logger, "info", {"time": "t", "level": "info", "logger": "gateway", "event": event, **fields})

    assert "\x1b[36m--> POST" in line("--> POST")
    assert "\x1b[32m<-- 200" in line("<-- 200", status=200)
    assert "\x1b[33m<-- 404" in line("<-- 404", status=404)
    assert "\x1b[31m<-- 503" in line("<-- 503", status=503)


def test_the_start_names_the_version_and_every_setting_even_at_error_level(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logs.configure("error", "text", None, color=False)
    given = {"LOGLEVEL": Given("error", "environment")}
    settings = Settings(loglevel="error", given=given, warnings=("something looks odd",))
    logs.announce(settings, tmp_path / "presets", tmp_path / "state")
    out = capsys.readouterr().err
    assert "starting version=" in out
    assert "setting name=LOGLEVEL value=error source=environment" in out
    assert "something looks odd" in out
    for row in settings.explain():
        assert row.name in out


def test_the_arbiters_notes_become_lines_and_losses_are_loud(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warn", "text", None, color=False)
    logs.narrate("drain", {"target": "two"})
    logs.narrate("swap_failed", {"target": "two", "reason": "no file", "event": "odd"})
    assert "swap_failed target=two" in (out := capsys.readouterr().err)
    assert len(out.splitlines()) == 1
    for end in ("success", "interrupted", "lost", "timeout"):
        logs.narrate("job_end", {"prompt_id": "x", "tenant": "comfyui", "end": end, "seconds": 1.0})
    assert [line.rsplit("end=")[1].split()[0] for line in capsys.readouterr().err.splitlines()] == ["lost", "timeout"]
