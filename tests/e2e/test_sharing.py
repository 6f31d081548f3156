"""How equal presets share the card, seen from outside: turns, and wars that are named. The engines are simulated."""

from __future__ import annotations

import asyncio

from typer.testing import CliRunner

from gpu_turnstile.cli.main import app as cli
from gpu_turnstile.core import wars
from gpu_turnstile.core.policy import Order
from tests.aio import run_async, until
from tests.e2e.house import House, house, llama

SLOW = ("--sim-load-s", "0.6")


def why(url: str) -> str:
    return CliRunner().invoke(cli, ["why", "--url", url], catch_exceptions=False).stdout


async def ask(h: House, model: str, client: str, **more) -> int:
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}], **more}
    headers = {"X-Turnstile-Client": client}
    return (await h.http.post(f"{h.gate}/v1/chat/completions", json=body, headers=headers)).status_code


@run_async
async def test_who_was_expensive_to_bring_in_serves_its_own_first_and_status_says_so(tmp_path):
    async with house(tmp_path, [llama("a", *SLOW), llama("b", *SLOW)]) as h:
        served: list[str] = []

        async def step(model: str, client: str) -> None:
            assert await ask(h, model, client, max_tokens=20) == 200
            served.append(model)

        first = asyncio.ensure_future(step("a", "loop"))
        await until(lambda: h.view.leases, 10)
        other = asyncio.ensure_future(step("b", "person"))
        await until(lambda: h.view.waiting)
        turn = (await h.http.get(f"{h.gate}/status")).json()["turn"]
        assert (turn["tenant"], turn["idle"]) == ("a", False)
        assert turn["cost_s"] > 0.5
        assert "a" in await asyncio.to_thread(why, h.gate)
        await asyncio.gather(first, step("a", "loop"))
        assert served == ["a", "a"]
        await other
        assert served == ["a", "a", "b"]


@run_async
async def test_in_the_plain_order_nobody_has_a_turn(tmp_path):
    async with house(tmp_path, [llama("a", *SLOW), llama("b", *SLOW)], turnstile_policy=Order.ARRIVAL) as h:
        async with h.streaming("a", max_tokens=30) as lines:
            other = asyncio.ensure_future(ask(h, "b", "person"))
            await until(lambda: h.view.waiting)
            status = (await h.http.get(f"{h.gate}/status")).json()
            assert (status["turn"], status["phase"]) == (None, "draining")
            assert [line async for line in lines]
        assert await other == 200


@run_async
async def test_a_war_of_two_clients_is_named_with_what_it_costs_and_what_would_help(tmp_path, monkeypatch):
    monkeypatch.setattr(wars, "SHORTEST", 0.5)  # seconds, instead of a minute
    async with house(tmp_path, [llama("a"), llama("b")]) as h:
        for _ in range(5):
            assert await ask(h, "a", "loop") == 200
            assert await ask(h, "b", "person") == 200
        await until(lambda: "swap_war" in h.kinds())
        war = (await h.http.get(f"{h.gate}/status")).json()["war"]
        assert war["presets"] == {"a": ["loop"], "b": ["person"]}
        assert war["lost_s_per_hour"] > 100
        assert any("TURNSTILE_COLOCATE" in advice for advice in war["would_help"])
        said = await asyncio.to_thread(why, h.gate)
        assert "loop" in said
        assert "person" in said
        told = await h.http.get(f"{h.gate}/events?follow=false")
        assert any("swap_war" in line for line in told.text.splitlines())
        assert h.kinds().count("swap_war") == 1
