"""For all tests: a full garbage collection never has much to look through while a test runs.

A run holds half a million objects, and to look through them stops a gate that runs in the test's own loop for 0.3 s
and more. So what is there when a file's tests begin is left alone from then on. `turnstile serve` does the same for
itself when it starts.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

_file: list[Path] = []  # whose tests run


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _file != [item.path]:
        _file[:] = [item.path]
        gc.collect()
        gc.freeze()
