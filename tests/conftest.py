"""For all tests: what was imported and collected is never looked through again by the garbage collector.

A test run holds half a million objects, and a full collection of them stops a gate that runs in the test's own loop
for 0.3 s and more; `turnstile serve` does the same for itself once it listens.
"""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
