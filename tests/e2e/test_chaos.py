"""A short run of the chaos that `python -m tests.e2e.chaos` plays for as long as one likes."""

from __future__ import annotations

import pytest

from tests.aio import run_async
from tests.e2e import chaos


@pytest.mark.parametrize("seed", [4, 7])
@run_async
async def test_after_every_round_of_random_clients_faults_and_restarts_nothing_is_left(tmp_path, seed):
    tally = await chaos.run(rounds=4, seed=seed)
    assert tally.total() >= 20
