"""Docker goes away and comes back, and the gate's one client, opened before, goes on with it."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from gpu_turnstile.runtimes import docker, docker_end
from gpu_turnstile.runtimes.base import StopFailed
from gpu_turnstile.runtimes.docker_host import LONGEST_PAUSE
from tests.aio import until
from tests.docker.daemon import Daemon
from tests.docker.house import House, failure, printed, with_house

SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)


@SIGNALS
def test_with_live_restore_the_engine_goes_on_and_is_watched_again(daemon, number):
    daemon.restart(signal.SIGTERM, live_restore=True)

    @with_house
    async def test(gate: House, daemon: Daemon) -> None:
        runtime = gate.runtime("echo up; while :; do sleep 0.2; echo on; done")
        await runtime.start()
        await printed(runtime, "on")
        pid = daemon.inspect("turnstile-engine")["State"]["Pid"]
        await asyncio.to_thread(daemon.end, number)
        assert await runtime.alive()
        assert "Docker is not running" in (await failure(gate.runtime(name="other"))).reason
        await asyncio.to_thread(daemon.start)
        assert daemon.inspect("turnstile-engine")["State"]["Pid"] == pid
        await asyncio.sleep(LONGEST_PAUSE)
        heard = len(runtime.output())
        await until(lambda: len(runtime.output()) > heard)
        assert gate.exits == []
        began = time.monotonic()
        await asyncio.to_thread(daemon.call, "POST", "/containers/turnstile-engine/kill")
        await until(lambda: gate.exits)
        assert time.monotonic() - began < 1
        await runtime.start()
        await runtime.stop()
        assert daemon.names() == set()

    test(daemon)


@SIGNALS
def test_without_live_restore_the_end_is_told_and_the_next_start_works(daemon, number):
    daemon.restart(signal.SIGTERM, live_restore=False)

    @with_house
    async def test(gate: House, daemon: Daemon) -> None:
        runtime = gate.runtime()
        await runtime.start()
        await printed(runtime, "up")
        await asyncio.to_thread(daemon.end, number)
        await asyncio.to_thread(daemon.start)
        await until(lambda: gate.exits, 1)
        assert len(gate.exits) == 1
        assert not await runtime.alive()
        await runtime.start()
        assert await runtime.alive()
        await runtime.stop()
        assert daemon.names() == set()

    test(daemon)


def test_a_stop_while_docker_is_away_waits_for_it(daemon):
    daemon.restart(signal.SIGTERM, live_restore=True)

    @with_house
    async def test(gate: House, daemon: Daemon) -> None:
        runtime = gate.runtime()
        await runtime.start()
        await asyncio.to_thread(daemon.end, signal.SIGKILL)
        stopping = asyncio.create_task(runtime.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done()
        await asyncio.to_thread(daemon.start)
        await stopping
        assert daemon.names() == set()

    test(daemon)


def test_a_stop_gives_up_on_a_docker_that_stays_away_and_can_be_tried_again(daemon, monkeypatch):
    daemon.restart(signal.SIGTERM, live_restore=True)
    monkeypatch.setattr(docker_end, "AWAY_WAIT", 0.3)
    monkeypatch.setattr(docker, "AWAY_WAIT", 0.3)

    @with_house
    async def test(gate: House, daemon: Daemon) -> None:
        runtime = gate.runtime()
        await runtime.start()
        await asyncio.to_thread(daemon.end, signal.SIGTERM)
        with pytest.raises(StopFailed, match="may still hold the card: Docker is not running: there is no"):
            await runtime.stop()
        with pytest.raises(StopFailed, match="may still hold the card"):
            await gate.runtime().adopt()
        await asyncio.to_thread(daemon.start)
        assert await runtime.alive()
        await runtime.stop()
        assert daemon.names() == set()

    test(daemon)


def test_with_docker_away_a_start_says_so_and_there_is_nothing_to_stop(daemon):
    @with_house
    async def test(gate: House, daemon: Daemon) -> None:
        await asyncio.to_thread(daemon.end, signal.SIGTERM)
        runtime = gate.runtime()
        assert "Docker is not running" in (await failure(runtime)).reason
        await runtime.stop()

    test(daemon)
