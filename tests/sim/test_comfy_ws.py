"""The websocket of the simulated ComfyUI: who hears what."""

from __future__ import annotations

import json
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from gpu_turnstile.sim import ComfySim

from .comfy_desk import ended, graph, running, started, submit
from .helpers import eventually, in_loop, within


async def heard(ws: ClientConnection, last: str) -> list[dict[str, Any]]:
    """The messages up to the last one of this kind."""
    messages = []
    while not messages or messages[-1]["type"] != last:
        messages.append(json.loads(await within(5, ws.recv())))
    return messages


def ws_url(sim: ComfySim, client: str | None = None, prefix: str = "") -> str:
    url = sim.url.replace("http", "ws") + prefix + "/ws"
    return f"{url}?clientId={client}" if client else url


@in_loop
async def test_the_events_of_a_job_go_to_its_client_and_the_status_to_everybody() -> None:
    async with started() as (sim, http), connect(ws_url(sim, "A")) as a, connect(ws_url(sim, "B", "/api")) as b:
        first = json.loads(await a.recv())
        assert first == {
            "type": "status",
            "data": {"status": {"exec_info": {"queue_remaining": 0}}, "sid": "A"},
        }
        await submit(http, graph(0.05), client_id="A")
        messages = await heard(a, "executed") + await heard(a, "executing")
        kinds = [m["type"] for m in messages if m["type"] != "progress_state"]
        assert kinds == [
            *["status", "status", "execution_start", "execution_cached", "executing", "executing"],
            *["progress"] * 4,
            *["executing", "executed", "execution_success", "status", "executing"],
        ]
        assert messages[-1]["data"]["node"] is None
        told = [json.loads(await within(5, b.recv())) for _ in range(4)]
        assert {message["type"] for message in told} == {"status"}
        assert told[0]["data"]["sid"] == "B"


@in_loop
async def test_without_a_client_id_only_status_and_progress_are_broadcast() -> None:
    async with started() as (sim, http), connect(ws_url(sim)) as ws:
        first = json.loads(await ws.recv())
        assert len(first["data"]["sid"]) == 32
        await ended(http, await submit(http, graph(0.02)))
        await ended(http, await submit(http, graph(0.02, seed=2)))
        kinds = set()
        while ws.protocol.state.name == "OPEN":
            try:
                kinds.add(json.loads(await within(0.1, ws.recv()))["type"])
            except TimeoutError:
                break
        assert kinds == {"status", "progress_state", "progress"}


@in_loop
async def test_one_that_joins_late_hears_the_running_node_and_the_rest() -> None:
    async with started() as (sim, http):
        await running(http, await submit(http, graph(0.2), client_id="C"))
        await eventually(lambda: sim.queue.node == "2")
        async with connect(ws_url(sim, "C")) as ws:
            assert json.loads(await ws.recv())["type"] == "status"
            assert json.loads(await ws.recv()) == {"type": "executing", "data": {"node": "2"}}
            assert (await heard(ws, "execution_success"))[-1]["data"]["prompt_id"]


@in_loop
async def test_of_two_sockets_with_one_client_id_the_earlier_is_deaf() -> None:
    async with started() as (sim, http), connect(ws_url(sim, "A")) as early, connect(ws_url(sim, "A")) as late:
        await early.recv()
        await late.recv()
        await submit(http, graph(), client_id="A")
        await heard(late, "execution_success")
        with pytest.raises(TimeoutError):
            await within(0.05, early.recv())


@in_loop
async def test_feature_flags_are_answered() -> None:
    async with started() as (sim, _), connect(ws_url(sim, "A")) as ws:
        await ws.recv()
        await ws.send(json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}}))
        assert json.loads(await ws.recv())["type"] == "feature_flags"


@in_loop
async def test_a_restart_closes_the_sockets() -> None:
    async with started() as (sim, _), connect(ws_url(sim, "A")) as ws:
        await ws.recv()
        sim.restart()
        await within(5, ws.wait_closed())
