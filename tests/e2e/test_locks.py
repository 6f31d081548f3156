"""Locks over HTTP: every row of the swap document's table, through a whole gate."""

from __future__ import annotations

import asyncio

import pytest

from tests.aio import run_async, until
from tests.e2e.house import house, llama


async def call(h, path="/mode", client=None, **body):
    headers = {"X-Turnstile-Client": client} if client else {}
    return await h.http.post(f"{h.gate}{path}", json=body, headers=headers)


def both(tmp_path, **more):
    return house(tmp_path, [llama("a"), llama("b")], **more)


@run_async
async def test_an_uncontended_lock_is_a_200_with_owners_and_expiry(tmp_path):
    async with both(tmp_path) as h:
        answer = await call(h, lock="a", owner="me")
        assert answer.status_code == 200
        told = answer.json()
        assert (told["locked"], told["token"]) == ("a", 1)
        assert told["owners"]["me"]["expires_in"] == pytest.approx(900, abs=1)
        await call(h, "/unlock", owner="me")


@run_async
async def test_a_contended_lock_is_a_409_with_owners_and_queue_and_nothing_moves(tmp_path):
    async with both(tmp_path) as h:
        await h.chat("a")
        await call(h, lock="a", owner="me")
        answer = await call(h, lock="b", owner="you")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (409, "locked")
        assert list(answer.json()["owners"]) == ["me"]
        assert answer.json()["queue"] == []
        assert int(answer.headers["retry-after"]) >= 1
        assert h.view.residents == ("a",)
        await call(h, lock=False, owner="me")


@run_async
async def test_a_contended_lock_with_wait_is_a_202_with_the_position_and_the_winners_request_swaps(tmp_path):
    async with both(tmp_path) as h:
        await h.chat("a")
        await call(h, lock="a", owner="me")
        for position, owner in enumerate(("you", "they"), 1):
            answer = await call(h, lock="b", owner=owner, wait=True)
            assert answer.status_code == 202
            assert answer.json()["queued"] is True
            assert answer.json()["position"] == position
        assert (await h.chat("b")).status_code == 422
        await call(h, lock=False, owner="me")
        assert h.view.residents == ("a",)
        answer = await call(h, lock="b", owner="you")
        assert answer.status_code == 200
        assert (await h.chat("b")).status_code == 200
        assert (await h.chat("a")).status_code == 422
        assert (await h.chat("unknown")).status_code == 404
        await call(h, lock=False, force=True)


@run_async
async def test_lock_true_pins_the_resident_and_is_a_503_when_there_is_none(tmp_path):
    async with both(tmp_path) as h:
        assert (await call(h, lock=True, owner="me")).status_code == 503
        await h.chat("b")
        assert (await call(h, "/lock", owner="me")).json()["locked"] == "b"
        await call(h, "/unlock", owner="me")


@run_async
async def test_renew_is_for_holders_and_waiters_and_nobody_else(tmp_path):
    async with both(tmp_path) as h:
        await call(h, lock="a", owner="me", ttl=60)
        assert (await call(h, renew=True, owner="me", ttl=120)).json()["expires_in"] == 120
        await call(h, lock="b", owner="you", wait=True)
        assert (await call(h, renew=True, owner="you")).status_code == 202
        answer = await call(h, renew=True, owner="stranger")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (404, "not_held")
        await call(h, lock=False, owner="me")


@run_async
async def test_a_bare_unlock_by_a_stranger_needs_force(tmp_path):
    """2026-09-08: a bare unlock while a bench was running handed the card away."""
    async with both(tmp_path) as h:
        await call(h, lock="a", owner="bench", client="bench")
        answer = await call(h, client="somebody", lock=False)
        assert answer.status_code == 409
        assert '"force": true' in answer.json()["message"]
        assert (await call(h, client="somebody", lock=False, force=True)).json()["cut"] == ["bench"]
        await call(h, lock="a", owner="bench", client="bench")
        assert (await call(h, client="bench", lock=False)).status_code == 200


@run_async
async def test_with_open_unlock_anybody_may(tmp_path):
    async with both(tmp_path, llmc_open_unlock=True) as h:
        await call(h, lock="a", owner="bench", client="bench")
        assert (await call(h, client="somebody", lock=False)).status_code == 200


@run_async
async def test_a_stale_token_is_a_409_and_never_runs(tmp_path):
    async with both(tmp_path) as h:
        token = (await call(h, lock="a", owner="me")).json()["token"]
        assert (await chat_with(h, token)).status_code == 200
        await call(h, lock=False, owner="me")
        await call(h, lock="a", owner="you")
        answer = await chat_with(h, token)
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (409, "locked")
        assert (await chat_with(h, "no number")).status_code == 400
        await call(h, lock=False, owner="you")


async def chat_with(h, token):
    body = {"model": "a", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"X-Turnstile-Lock": str(token)}
    return await h.http.post(f"{h.gate}/v1/chat/completions", json=body, headers=headers)


BAD = [
    {"lock": "nobody", "owner": "me"},
    {"lock": "a"},
    {"lock": "a", "owner": ""},
    {"lock": "a", "owner": 5},
    {"lock": 5, "owner": "me"},
    {"lock": "a", "owner": "me", "ttl": 1e9},
    {"lock": "a", "owner": "me", "ttl": -1},
    {"lock": "a", "owner": "me", "ttl": "5"},
    {"lock": "a", "owner": "me", "wait": "yes"},
    {"lock": "a", "owner": "me", "token": "x"},
    {"lock": "a", "owner": "me", "colour": "red"},
]


@pytest.mark.parametrize("body", BAD, ids=str)
@run_async
async def test_what_cannot_be_understood_says_what_would_be_right_and_changes_nothing(tmp_path, body):
    async with both(tmp_path) as h:
        answer = await call(h, **body)
        assert answer.status_code in (400, 404)
        assert answer.json()["message"]
        assert h.view.locks.preset is None


@run_async
async def test_a_lock_and_its_queue_survive_a_restart(tmp_path):
    async with both(tmp_path) as h:
        await call(h, lock="a", owner="me", ttl=600)
        await call(h, lock="b", owner="you", wait=True)
        before = (await h.http.get(f"{h.gate}/status")).json()["locks"]
    async with both(tmp_path) as h:
        after = (await h.http.get(f"{h.gate}/status")).json()["locks"]
        assert after["owners"]["me"]["expires_in"] == pytest.approx(before["owners"]["me"]["expires_in"], abs=2)
        assert [w["owner"] for w in after["queue"]] == ["you"]
        assert (await h.chat("b")).status_code == 422
        await call(h, lock=False, force=True)


@run_async
async def test_a_lock_does_not_lapse_under_an_open_stream_and_lapses_after_it(tmp_path):
    """2026-08-19: a leg that made no requests found its lock silently lapsed."""
    async with both(tmp_path) as h:
        async with h.streaming("a", max_tokens=180) as lines:
            await call(h, lock="a", owner="me", ttl=1)
            await asyncio.sleep(1.2)
            assert h.view.locks.preset == "a"
            [line async for line in lines]
        assert h.view.locks.preset == "a"
        await until(lambda: h.view.locks.preset is None, 3)
        assert "lapsed" in h.kinds()
        told = (await call(h, lock="a", owner="me")).json()
        assert "lapsed" in told["ended"]
        await call(h, lock=False, owner="me")
