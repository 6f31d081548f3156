"""The gate is killed at random moments of its swaps between two processes (`make kill-swaps`: a hundred times)."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.gate import Gate
from tests.e2e.house import PresetText, engine_pids, write
from tests.e2e.kills import LIMIT, PRESETS, Kills

STANDIN = Path(__file__).resolve().parents[2] / "bench" / "standin.py"
LOAD = {"a": 0.25, "b": 1.0}  # seconds: a restarted gate finds b loading as well as serving
STOP = 0.1

pytestmark = pytest.mark.timeout(LIMIT)


def engine(folder: Path, name: str) -> PresetText:
    """The last argument is for our eyes: what tells its process from all others."""
    command = [sys.executable, "-I", "-S", str(STANDIN), "{port}", str(LOAD[name]), str(STOP), str(folder / name)]
    return PresetText(name, f'engine = "command"\n[runtime]\nkind = "process"\ncommand = {json.dumps(command)}\n')


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    write(tmp_path, [engine(tmp_path, name) for name in PRESETS])
    gate = Gate(tmp_path, TURNSTILE_GPU="none")
    yield gate
    gate.stop()
    for name in PRESETS:
        for pid in engine_pids(str(tmp_path / name)):
            os.kill(pid, signal.SIGKILL)


def test_a_gate_killed_in_its_swaps_never_leaves_two_engines_nor_one_it_does_not_know(gate, tmp_path):
    def running() -> list[str]:
        return [name for name in PRESETS for _ in engine_pids(str(tmp_path / name))]

    Kills(gate, running, span=max(LOAD.values()), served=200).run()
