"""Real engines leave the machine to others too: llama.cpp's threads spin while they wait for each other."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a test that measures times beside this one, on two cores, is kept waiting for half a second."""
    monkeypatch.setenv("LLAMA_ARG_THREADS", "1")
    monkeypatch.setenv("LLAMA_ARG_THREADS_BATCH", "1")
