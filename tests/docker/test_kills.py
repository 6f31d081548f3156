"""The gate is killed at random moments of its swaps between two containers (`make kill-swaps`: a hundred times)."""

from __future__ import annotations

import pytest

from tests.docker.test_gate import gate
from tests.e2e.kills import LIMIT, Kills

pytestmark = pytest.mark.timeout(LIMIT)
__all__ = ["gate"]


def test_a_gate_killed_in_its_swaps_never_leaves_two_containers_nor_one_it_does_not_know(gate, daemon):
    def running() -> list[str]:
        found = daemon.call("GET", "/containers/json").json()
        return sorted(container["Names"][0].removeprefix("/turnstile-") for container in found)

    Kills(gate, running, span=0.6, served=501).run()
    assert daemon.names() == set()
