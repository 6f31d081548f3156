"""A gate that was killed with `kill -9`: the next one finds the engines where they are."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.gate import Gate
from tests.e2e.house import engine_pids, llama, started, write


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    write(tmp_path, [llama("a", path=str(tmp_path / "a.gguf")), llama("b", path=str(tmp_path / "b.gguf"))])
    gate = Gate(tmp_path)
    yield gate
    gate.stop()
    for pid in engines(gate):
        os.kill(pid, signal.SIGKILL)


def engines(gate: Gate) -> list[int]:
    return engine_pids(str(gate.folder / "a.gguf")) + engine_pids(str(gate.folder / "b.gguf"))


def test_an_engine_outlives_a_killed_gate_and_serves_the_next_one_at_once(gate):
    gate.start()
    assert gate.chat("a").status_code == 200
    (pid,) = engines(gate)
    for _ in range(3):
        gate.kill()
        assert engines(gate) == [pid]
        gate.start()
        assert gate.chat("a").status_code == 200
        assert engines(gate) == [pid]
    assert gate.chat("b").status_code == 200  # an adopted one leaves as any other
    assert len(engines(gate)) == 1
    assert pid not in engines(gate)
    gate.stop()
    assert engines(gate) == []


def test_an_engine_whose_preset_has_gone_or_changed_meanwhile_is_ended(gate):
    gate.start()
    assert gate.chat("a").status_code == 200
    gate.kill()
    (gate.folder / "presets" / "a.toml").unlink()
    gate.start()
    assert engines(gate) == []
    assert gate.chat("b").status_code == 200
    (pid,) = engines(gate)
    gate.kill()
    write(gate.folder, [llama("b", "--sim-load-s", "0.2", path=str(gate.folder / "b.gguf"))])
    gate.start()
    assert pid not in engines(gate)
    assert gate.chat("b").status_code == 200
    assert len(engines(gate)) == 1


def test_a_gate_killed_while_an_engine_loads_leaves_no_second_one_on_the_card(gate):
    write(gate.folder, [llama("a", "--sim-load-s", "2", path=str(gate.folder / "a.gguf"))])
    gate.start()
    gate.begin_and_kill("a", lambda: started(engines(gate)))
    gate.start()
    assert gate.chat("b").status_code == 200
    assert len(engines(gate)) == 1
    assert engine_pids(str(gate.folder / "b.gguf")) == engines(gate)


def test_an_engine_that_was_loading_when_the_gate_was_killed_is_waited_for_and_not_started_again(gate):
    write(gate.folder, [llama("a", "--sim-load-s", "4", path=str(gate.folder / "a.gguf"))])
    gate.start()
    (pid,) = gate.begin_and_kill("a", lambda: started(engines(gate)))
    gate.start()
    gate.kill()
    gate.start()
    status = httpx.get(f"{gate.url}/status", trust_env=False).json()
    assert (status["phase"], status["target"]) == ("swapping", "a")
    assert gate.chat("a").status_code == 200
    assert engines(gate) == [pid]


def test_one_that_ends_while_it_is_waited_for_is_started_by_the_next_request(gate):
    write(gate.folder, [llama("a", "--sim-load-s", "3", path=str(gate.folder / "a.gguf"))])
    gate.start()
    (pid,) = gate.begin_and_kill("a", lambda: started(engines(gate)))
    gate.start()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(gate.chat, "a")
        os.kill(pid, signal.SIGKILL)
        refused = waiting.result(10)
    assert refused.status_code == 503
    assert "ended" in refused.text or "killed" in refused.text, refused.text
    write(gate.folder, [llama("a", path=str(gate.folder / "a.gguf"))])
    assert gate.chat("a").status_code == 200
    assert pid not in engines(gate)


def test_one_that_hangs_is_not_waited_for(gate):
    gate.start()
    assert gate.chat("a").status_code == 200
    (pid,) = engines(gate)
    gate.kill()
    os.kill(pid, signal.SIGSTOP)
    gate.start()
    assert gate.chat("a").status_code == 200
    assert pid not in engines(gate)


def test_an_adopted_engine_that_holds_nothing_of_the_card_leaves_at_once(gate):
    write(gate.folder, [llama("a", "--sim-vram-gb", "0", path=str(gate.folder / "a.gguf"))])
    gate.start()
    assert gate.chat("a").status_code == 200
    gate.kill()
    gate.start()
    began = time.monotonic()
    assert gate.chat("b").status_code == 200
    assert time.monotonic() - began < 5  # not the ten seconds after which nothing more is expected to fall


def test_a_second_gate_with_the_same_state_folder_says_so_and_touches_nothing(gate):
    gate.start()
    assert gate.chat("a").status_code == 200
    before = engines(gate)
    second = subprocess.run(gate.command(), env=gate.environment(), capture_output=True, text=True, timeout=20)
    assert second.returncode == 2
    assert "another gate is running with the state folder" in second.stderr
    assert "Traceback" not in second.stderr
    assert engines(gate) == before
    assert gate.chat("a").status_code == 200
