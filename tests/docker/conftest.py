"""A Docker Engine for these tests, started once; without one they are skipped, and the reason is printed.

`TURNSTILE_DOCKER=1` makes a missing one an error.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest

from tests.docker.daemon import Daemon, NoDaemon


@pytest.fixture(scope="session")
def started() -> Iterator[Daemon]:
    try:
        daemon = Daemon()
    except NoDaemon as reason:
        if os.environ.get("TURNSTILE_DOCKER") == "1":
            pytest.fail(f"TURNSTILE_DOCKER=1, and there is no Docker: {reason}")
        warnings.warn(f"the tests with a real Docker are skipped: {reason}", stacklevel=1)
        pytest.skip(f"no Docker: {reason}")
    yield daemon
    daemon.close()


@pytest.fixture
def daemon(started: Daemon) -> Iterator[Daemon]:
    """Up, and without containers, at the beginning of each test."""
    yield started
    if not started.is_up:
        started.start()
    started.remove_all()
