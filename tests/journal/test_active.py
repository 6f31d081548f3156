"""`active.toml`: old or new, never mixed; never the reason that a gate does not start or does not serve."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpu_turnstile.journal import active
from gpu_turnstile.journal.active import FILE_NAME, Journal, load, save

STATE = {"mode": "llm", "model": "one", "lock": {"preset": "one", "owners": {"me @ host": 12.5, "you": 900}}}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "new" / "folder", STATE)
    assert load(tmp_path / "new" / "folder") == STATE


def test_none_is_left_out_because_toml_has_no_null(tmp_path: Path) -> None:
    save(tmp_path, {"mode": "idle", "model": None, "lock": {}})
    assert load(tmp_path) == {"mode": "idle", "lock": {}}


def test_the_file_and_its_folder_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    save(folder, STATE)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / FILE_NAME).stat().st_mode) == 0o600
    assert os.listdir(folder) == [FILE_NAME]


def test_nothing_there_is_an_empty_state_and_no_warning(tmp_path: Path) -> None:
    with capture_logs() as lines:
        assert load(tmp_path / "nowhere") == {}
    assert lines == []


@pytest.mark.parametrize(
    "content",
    [
        b"mode = ",
        b"\xff\xfe\x00",
        b"mode = 5",
        b'model = ["one"]',
        b"lock = true",
        b"a = " + b"[" * 5000,
    ],
)
def test_a_file_that_makes_no_sense_is_put_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with capture_logs() as lines:
        assert load(tmp_path) == {}
    assert (tmp_path / "active.toml.broken").read_bytes() == content
    assert not (tmp_path / FILE_NAME).exists()
    assert [line["event"] for line in lines] == ["state_broken"]
    save(tmp_path, STATE)
    assert load(tmp_path) == STATE


def test_a_file_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with capture_logs() as lines:
        assert load(tmp_path) == {}
    assert [line["event"] for line in lines] == ["state_unreadable"]


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, STATE)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, {"mode": "idle"})
    assert load(tmp_path) == STATE
    assert os.listdir(tmp_path) == [FILE_NAME]


class Disk:
    """Stands in for `save`: counts, holds up, fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.busy = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        monkeypatch.setattr(active, "save", self)

    def __call__(self, folder: Path, state: dict[str, Any]) -> None:
        self.busy.set()
        assert self.go_on.wait(5)
        if self.error is not None:
            raise self.error
        self.written.append(state)


def test_remembering_never_waits_and_only_the_newest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    disk.go_on.clear()
    journal = Journal(tmp_path)
    journal.remember({"n": 0})
    assert disk.busy.wait(5)
    for n in range(1, 100):
        journal.remember({"n": n})
    assert journal.flush(0.01) is False
    disk.go_on.set()
    assert journal.close()
    assert disk.written == [{"n": 0}, {"n": 99}]


def test_a_failing_disk_is_told_once_and_again_when_it_is_cured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    disk.error = OSError(28, "No space left on device")
    journal = Journal(tmp_path)
    with capture_logs() as lines:
        for n in range(3):
            journal.remember({"n": n})
            assert journal.flush() is False
        disk.error = None
        journal.remember({"n": 3})
        assert journal.flush()
    assert [line["event"] for line in lines] == ["state_not_saved", "state_saved_again"]
    assert disk.written == [{"n": 3}]
    journal.close()


def test_flush_means_it_is_on_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.flush()  # nothing to do, no thread needed
    journal.remember(STATE)
    assert journal.flush()
    assert load(tmp_path) == STATE
    assert journal.close()
    journal.remember({"mode": "idle"})  # after the end: ignored
    assert load(tmp_path) == STATE


def test_what_a_killed_gate_had_half_written_is_removed(tmp_path: Path) -> None:
    save(tmp_path, {"mode": "llm"})
    (tmp_path / ".active.toml.x7f3").write_text('mode = "ll')
    (tmp_path / ".other").touch()
    assert load(tmp_path) == {"mode": "llm"}
    assert sorted(file.name for file in tmp_path.iterdir()) == [".other", "active.toml"]
