"""Every runtime works on both loops."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def run(request):
    """Run a coroutine on either loop; every test ends in ten seconds."""

    def run(main):
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(asyncio.wait_for(main, 10))

    return run
