"""The control app on its private socket."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from gpu_turnstile.control.serve import ControlServer, serve_control
from tests.control.fakes import stage, until

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def run_on(loop: Any, work: Any) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(work, 15))


def client(server: ControlServer) -> httpx.AsyncClient:
    if server.url.startswith("unix:"):
        transport = httpx.AsyncHTTPTransport(uds=server.url.removeprefix("unix:"))
        return httpx.AsyncClient(transport=transport, base_url="http://gate")
    return httpx.AsyncClient(base_url=server.url, trust_env=False)


@LOOPS
def test_it_serves_on_a_socket_only_this_user_can_reach(tmp_path: Path, loop: Any) -> None:
    async def scenario() -> None:
        path = tmp_path / "private" / "c.sock"
        async with stage(tmp_path) as s:
            server = await serve_control(s.app, path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            async with client(server) as http:
                reply = await http.get("/healthz")
                assert reply.json()["state"] == "idle"
                assert reply.headers["server"].startswith("gpu-turnstile/")
            await server.stop()
            await server.stop()
            assert not path.exists()

    run_on(loop, scenario())


@LOOPS
def test_it_stops_within_a_second_and_open_streams_end_cleanly(tmp_path: Path, loop: Any) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            server = await serve_control(s.app, tmp_path / "c.sock")
            async with client(server) as http, http.stream("GET", "/events?since=0") as reply:
                assert reply.headers["content-type"].startswith("text/event-stream")
                lines = reply.aiter_lines()
                seen = [await anext(lines) for _ in range(5)]
                assert "event: started" in seen
                began = time.monotonic()
                stopping = asyncio.create_task(server.stop())
                rest = [line async for line in lines]  # a broken stream would raise
                await stopping
                assert time.monotonic() - began < 1.0
                assert ": the gate is shutting down" in rest

    run_on(loop, scenario())


def test_it_stops_within_a_second_whatever_hangs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:

            async def hangs() -> None:
                await asyncio.sleep(60)

            s.app.add_api_route("/hangs", hangs)
            server = await serve_control(s.app, tmp_path / "c.sock")
            async with client(server) as http:
                call = asyncio.create_task(http.get("/hangs"))
                idle = await asyncio.open_unix_connection(tmp_path / "c.sock")
                await until(lambda: server._server.server_state.tasks)
                began = time.monotonic()
                await server.stop()
                assert time.monotonic() - began < 1.3
                with pytest.raises(httpx.HTTPError):
                    (await call).raise_for_status()
                idle[1].close()

    run_on(asyncio.new_event_loop, scenario())


def test_a_subscriber_that_leaves_is_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            server = await serve_control(s.app, 0)
            feed = s.app.state.feed
            async with client(server) as http, http.stream("GET", "/events") as reply:
                await anext(reply.aiter_lines())
                await until(lambda: feed.subscribers == 1)
            await until(lambda: feed.subscribers == 0)
            await server.stop()

    run_on(asyncio.new_event_loop, scenario())


def test_a_socket_left_behind_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "c.sock"
        path.write_text("left behind")
        async with stage(tmp_path) as s:
            server = await serve_control(s.app, path)
            with pytest.raises(OSError, match="another gate is running there"):
                await serve_control(s.app, path)
            await server.stop()

    run_on(asyncio.new_event_loop, scenario())


def test_signal_handlers_stay_as_they_are(tmp_path: Path) -> None:
    import signal

    async def scenario() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        async with stage(tmp_path) as s:
            server = await serve_control(s.app, 0)
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
            await server.stop()

    run_on(asyncio.new_event_loop, scenario())
