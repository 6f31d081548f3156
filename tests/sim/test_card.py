"""The simulated card: the book with a driven clock, then the file that processes share."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_turnstile.sim import GB, SimCard
from gpu_turnstile.sim.ledger import MB, Ledger, Piece
from gpu_turnstile.sim.processes import alive, started_at

HOLDER = """
import sys
from gpu_turnstile.sim.card import GB, SimCard
SimCard(sys.argv[1]).hold(sys.argv[2], 10 * GB)
print("holding", flush=True)
sys.stdin.read()
"""


def everybody(pid: int, started: float) -> bool:
    return True


def nobody(pid: int, started: float) -> bool:
    return False


def piece(name: str, size: int, *, pid: int = 1, part: str = "") -> Piece:
    return Piece(name, part, pid, 1.0, size, 0.0)


@pytest.fixture
def hold(tmp_path: Path) -> Callable[[str], subprocess.Popen[str]]:
    running: list[subprocess.Popen[str]] = []

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "card.json"), name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


# ---------------------------------------------------------------------------------------------- the book


def test_one_engine_may_hold_and_grow_without_alarm() -> None:
    ledger = Ledger(total=24 * GB)
    assert ledger.hold(piece("ollama", 8 * GB), 1.0) == 8 * GB
    assert ledger.hold(piece("ollama", 12 * GB), 2.0) == 12 * GB
    assert ledger.used == 12 * GB
    assert ledger.alarms == []


def test_parts_of_one_engine_add_up_without_alarm() -> None:
    ledger = Ledger(total=24 * GB)
    ledger.hold(piece("ollama", 8 * GB, part="a"), 1.0)
    ledger.hold(piece("ollama", 6 * GB, part="b"), 2.0)
    assert ledger.used == 14 * GB
    assert ledger.alarms == []


def test_two_engines_on_the_card_raise_an_alarm_that_names_both() -> None:
    ledger = Ledger(total=24 * GB)
    ledger.hold(piece("ollama", 8 * GB, pid=1), 1.0)
    ledger.hold(piece("comfyui", 10 * GB, pid=2), 2.0)
    (alarm,) = ledger.alarms
    assert (alarm.kind, alarm.time, set(alarm.names)) == ("two_engines", 2.0, {"ollama", "comfyui"})


def test_two_processes_of_one_name_are_two_engines() -> None:
    ledger = Ledger(total=24 * GB)
    ledger.hold(piece("llama", 8 * GB, pid=1), 1.0)
    ledger.hold(piece("llama", 8 * GB, pid=2), 2.0)
    assert [alarm.kind for alarm in ledger.alarms] == ["two_engines"]


def test_a_residual_beside_another_engine_is_tolerated() -> None:
    ledger = Ledger(total=24 * GB)
    ledger.hold(piece("comfyui", 500 * MB, pid=1), 1.0)
    ledger.hold(piece("ollama", 8 * GB, pid=2), 2.0)
    assert ledger.alarms == []


def test_giving_back_beside_another_engine_raises_no_second_alarm() -> None:
    ledger = Ledger(total=24 * GB)
    ledger.hold(piece("ollama", 8 * GB, pid=1), 1.0)
    ledger.hold(piece("comfyui", 10 * GB, pid=2), 2.0)
    ledger.hold(piece("comfyui", 5 * GB, pid=2), 3.0)
    assert len(ledger.alarms) == 1


def test_more_than_the_card_has_is_not_granted_and_raises_an_alarm() -> None:
    ledger = Ledger(total=24 * GB)
    assert ledger.hold(piece("llama", 30 * GB), 1.0) == 24 * GB
    assert [alarm.kind for alarm in ledger.alarms] == ["over_total"]
    assert ledger.used == ledger.total


def test_memory_given_back_late_counts_until_it_is_back() -> None:
    ledger = Ledger(total=24 * GB)
    ledger.hold(piece("ollama", 8 * GB), 1.0)
    ledger.free(("ollama", 1), None, 2.0, after=3.0, leak=False)
    ledger.settle(4.9, everybody)
    assert ledger.used == 8 * GB
    ledger.settle(5.0, everybody)
    assert ledger.used == 0
    assert [(event.what, event.time) for event in ledger.events] == [("hold", 1.0), ("free", 2.0), ("back", 5.0)]


def test_an_engine_that_starts_on_late_memory_raises_an_alarm() -> None:
    ledger = Ledger(total=24 * GB)
    ledger.hold(piece("ollama", 8 * GB, pid=1), 1.0)
    ledger.free(("ollama", 1), None, 2.0, after=3.0, leak=False)
    ledger.hold(piece("comfyui", 10 * GB, pid=2), 4.0)
    assert [alarm.kind for alarm in ledger.alarms] == ["two_engines"]


def test_leaked_memory_stays_until_the_reset() -> None:
    ledger = Ledger(total=24 * GB)
    ledger.hold(piece("ollama", 8 * GB), 1.0)
    ledger.free(("ollama", 1), None, 2.0, after=0.0, leak=True)
    ledger.settle(1e9, everybody)
    assert ledger.used == 8 * GB
    ledger.reset()
    assert ledger.used == 0


def test_a_dead_process_gives_everything_back_even_what_it_leaked() -> None:
    ledger = Ledger(total=24 * GB)
    ledger.hold(piece("ollama", 8 * GB), 1.0)
    ledger.free(("ollama", 1), None, 2.0, after=0.0, leak=True)
    ledger.settle(3.0, nobody)
    assert ledger.used == 0


def test_an_engine_that_ends_gives_everything_back_after_the_drivers_lag() -> None:
    ledger = Ledger(total=24 * GB, lag_s=2.0)
    ledger.hold(piece("ollama", 8 * GB, part="a"), 1.0)
    ledger.hold(piece("ollama", 6 * GB, part="b"), 1.0)
    ledger.free(("ollama", 1), "a", 2.0, after=0.0, leak=True)
    ledger.free(("ollama", 1), "b", 2.0, after=60.0, leak=False)
    ledger.end(("ollama", 1), 3.0)
    ledger.settle(4.9, everybody)
    assert ledger.used == 14 * GB
    ledger.settle(5.0, everybody)
    assert ledger.used == 0


def test_a_slow_driver_gives_back_a_dead_process_only_after_its_lag() -> None:
    ledger = Ledger(total=24 * GB, lag_s=2.0)
    ledger.hold(piece("llama", 8 * GB), 1.0)
    ledger.settle(3.0, nobody)
    ledger.settle(4.9, nobody)
    assert ledger.used == 8 * GB
    ledger.settle(5.0, nobody)
    assert ledger.used == 0


def test_a_holder_without_a_process_never_dies() -> None:
    ledger = Ledger(total=24 * GB)
    ledger.hold(piece("a game", 4 * GB, pid=0), 1.0)
    ledger.settle(1e9, nobody)
    assert ledger.used == 4 * GB


def test_the_book_survives_being_written_down() -> None:
    ledger = Ledger(total=24 * GB, lag_s=0.5)
    ledger.hold(piece("ollama", 8 * GB, pid=1), 1.0)
    ledger.hold(piece("comfyui", 10 * GB, pid=2), 2.0)
    assert Ledger.from_json(ledger.to_json()) == ledger


# ---------------------------------------------------------------------------------------------- the card


def test_the_card_reads_as_the_gate_expects_it() -> None:
    card = SimCard(total=16 * GB)
    card.hold("ollama", 4 * GB)
    reading = card.read()
    assert (reading.total, reading.used, reading.free) == (16 * GB, 4 * GB, 12 * GB)
    assert reading.holders is not None
    assert [(holder.name, holder.used) for holder in reading.holders] == [("ollama", 4 * GB)]
    card.free("ollama")
    assert card.read().holders == ()


def test_two_processes_share_a_card_in_a_file(tmp_path: Path, hold: Callable[[str], subprocess.Popen[str]]) -> None:
    card = SimCard(tmp_path / "card.json")
    hold("llama-a")
    assert card.held_by("llama-a") == 10 * GB
    assert card.alarms() == ()
    hold("llama-b")
    (alarm,) = card.alarms()
    assert set(alarm.names) == {"llama-a", "llama-b"}


def test_what_a_killed_process_held_is_back_at_the_next_look(
    tmp_path: Path, hold: Callable[[str], subprocess.Popen[str]]
) -> None:
    card = SimCard(tmp_path / "card.json")
    process = hold("llama-a")
    assert card.read().used == 10 * GB
    process.kill()
    deadline = time.monotonic() + 5
    while card.read().used and time.monotonic() < deadline:
        pass  # until the kernel has ended it; nobody has to reap it
    assert card.read().used == 0
    hold("llama-b")
    assert card.alarms() == ()


def test_a_pid_that_was_given_out_again_is_not_the_same_process() -> None:
    here = started_at(1)
    assert here is not None
    assert alive(1, here)
    assert not alive(1, here + 1)
    assert started_at(2**22 + 1) is None


def test_a_file_that_was_left_half_written_is_never_seen(tmp_path: Path) -> None:
    card = SimCard(tmp_path / "card.json")
    card.hold("ollama", 1 * GB)
    (tmp_path / "card.json.12345.new").write_text('{"total": 1')
    assert SimCard(tmp_path / "card.json").held_by("ollama") == 1 * GB


def test_the_environment_names_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTILE_SIM_CARD", str(tmp_path / "card.json"))
    SimCard.from_env().hold("ollama", 1 * GB)
    assert SimCard(tmp_path / "card.json").held_by("ollama") == 1 * GB
