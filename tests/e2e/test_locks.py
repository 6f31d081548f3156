"""Locks over HTTP: every row of the swap document's table, through a whole gate."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import datetime

import pytest

from gpu_turnstile.journal import active
from gpu_turnstile.settings import ApiKey
from gpu_turnstile.sim import ComfySim, SimCard
from tests.aio import run_async, until
from tests.cli.terminal import piped
from tests.e2e.house import graph, house, llama


async def call(h, path="/mode", client=None, headers=None, **body):
    who = {"X-Turnstile-Client": client} if client else {}
    return await h.http.post(f"{h.gate}{path}", json=body, headers={**who, **(headers or {})})


def told(h, kind):
    """The fields of the events of a kind."""
    return [fields for name, fields in h.events if name == kind]


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
    {"lock": "a", "owner": "me", "renew": True},
    {"lock": "a", "owner": "me", "force": 1},
    {"lock": "a", "owner": "me", "reason": 5},
    {"lock": "a", "owner": None},
    {"lock": None, "owner": "me"},
    {"lock": "a", "owner": "x" * 201},
    {"lock": "a", "owner": "a\nb"},
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


@run_async
async def test_fields_that_say_nothing_are_as_if_they_were_not_there(tmp_path):
    """A client that writes every field sends null for those it has no value for."""
    async with both(tmp_path) as h:
        given = {"owner": "me", "wait": None, "token": None, "reason": None}
        assert (await call(h, lock="a", ttl=None, **given)).json()["ttl"] == 900
        assert (await call(h, renew=True, ttl=None, **given)).json()["expires_in"] == 900
        assert (await call(h, lock=False, **given)).json()["unlocked"] == ["me"]


@run_async
async def test_bad_fields_change_nothing_also_where_they_would_not_count(tmp_path):
    async with both(tmp_path) as h:
        await call(h, lock="a", owner="me")
        for path, body in (
            ("/unlock", {"owner": "me", "ttl": "x"}),
            ("/unlock", {"owner": "me", "renew": True}),
            ("/unlock", {"owner": 5}),
            ("/mode", {"renew": True, "owner": "me", "ttl": 0}),
            ("/mode", {"renew": True}),
        ):
            answer = await call(h, path, **body)
            assert (answer.status_code, answer.headers["x-turnstile-error"]) == (400, "bad_request"), body
        assert [o.owner for o in h.view.locks.owners] == ["me"]
        await call(h, "/unlock", owner="me")


@run_async
async def test_who_waits_for_another_preset_can_give_that_up_and_keep_its_lock(tmp_path):
    async with both(tmp_path) as h:
        await call(h, lock="a", owner="me")
        await call(h, lock="a", owner="you")
        assert (await call(h, lock="b", owner="me", wait=True)).status_code == 202
        answer = await call(h, "/unlock", owner="me", leave=True)
        assert (answer.status_code, answer.json()["unlocked"], answer.json()["left_queue"]) == (200, [], ["me"])
        assert list(answer.json()["owners"]) == ["me", "you"]
        assert (await call(h, "/unlock", leave=True)).status_code == 400
        await call(h, lock=False, force=True)


@run_async
async def test_taking_a_lock_away_is_told_with_who_from_where_whom_and_why(tmp_path):
    async with both(tmp_path) as h:
        await call(h, lock="a", owner="bench", client="bench")
        await call(h, "/unlock", owner="bench", client="ann", force=True, reason="it hangs")
        (fields,) = told(h, "unlocked")
        assert (fields["caller"], fields["cut"], fields["reason"]) == ("ann", ["bench"], "it hangs")
        assert fields["peer"].startswith("127.0.0.1 python-httpx")
        ended = (await call(h, renew=True, owner="bench")).json()["ended"]
        assert "it was taken away by ann (it hangs)" in ended
        await call(h, lock="a", owner="bench")
        await call(h, lock=False, force=True)  # says nothing of itself
        assert told(h, "unlocked")[1]["caller"] is None
        assert "taken away by 127.0.0.1 python-httpx" in (await call(h, renew=True, owner="bench")).json()["ended"]


@run_async
async def test_broken_glass_is_told_with_who_from_where_whom_and_why(tmp_path):
    async with both(tmp_path) as h:
        await call(h, lock="a", owner="bench")
        async with h.streaming("a", 1000):
            headers = {"X-Turnstile-Client": "ann"}
            await h.http.post(f"{h.gate}/gpu-turnstile/release", json={"reason": "it hangs"}, headers=headers)
        (fields,) = told(h, "released")
        assert (fields["client"], fields["reason"], fields["cut"]) == ("ann", "it hangs", 1)
        assert fields["owners"] == ["bench"]
        assert fields["clients"][0].startswith("127.0.0.1 python-httpx")
        assert fields["peer"].startswith("127.0.0.1 python-httpx")
        assert "broken by ann (it hangs)" in (await call(h, renew=True, owner="bench")).json()["ended"]
        (event,) = await h.app.history.events(0, 4e9, ["released"])
        assert (event.client, event.fields["peer"][:9]) == ("ann", "127.0.0.1")


@run_async
async def test_with_keys_a_caller_is_who_its_key_says_whatever_it_calls_itself(tmp_path):
    keys = (ApiKey("ann", "key-of-ann"), ApiKey("bob", "key-of-bob"))
    async with both(tmp_path, turnstile_api_keys=keys) as h:
        ann, bob = (
            {"Authorization": f"Bearer key-of-{name}", "X-Turnstile-Peer": "10.9.9.9"} for name in ("ann", "bob")
        )
        assert (await call(h, lock="a", owner="loop", client="whoever", headers=ann)).status_code == 200
        assert h.view.locks.owners[0].client == "ann"
        answer = await call(h, "/unlock", owner="loop", client="ann", headers=bob)
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (409, "locked")
        (denied,) = told(h, "lock_denied")
        assert (denied["caller"], denied["peer"][:9]) == ("bob", "127.0.0.1")
        assert (await call(h, "/unlock", owner="loop", headers=ann)).status_code == 200


@run_async
async def test_the_headers_for_requests_count_for_control_calls_too(tmp_path):
    """Fencing: a mode change or a renewal that comes late must not touch what somebody else has now."""
    async with both(tmp_path) as h:
        mine = {"X-Turnstile-Owner": "me"}
        first = (await call(h, lock="a", headers=mine)).json()
        assert (first["owner"], first["token"]) == ("me", 1)
        await call(h, "/unlock", headers=mine)
        await call(h, lock="a", owner="you")
        stale = {"X-Turnstile-Lock": "1"}
        for body in ({"mode": "llm", "model": "a"}, {"renew": True, "owner": "you"}, {"lock": False, "owner": "you"}):
            answer = await call(h, headers=stale, **body)
            assert (answer.status_code, answer.headers["x-turnstile-error"]) == (409, "locked"), body
        assert (await call(h, headers={"X-Turnstile-Lock": "x"}, renew=True, owner="you")).status_code == 400
        assert h.view.residents == ()
        assert (await call(h, headers={"X-Turnstile-Lock": "2"}, mode="llm", model="a")).status_code == 200
        assert h.view.residents == ("a",)
        await call(h, "/unlock", owner="you")


@run_async
async def test_a_waiter_that_polls_is_an_event_only_when_its_position_changes(tmp_path):
    async with both(tmp_path) as h:
        await call(h, lock="a", owner="me")
        for _ in range(5):
            for owner in ("x", "y"):
                await call(h, lock="b", owner=owner, wait=True)
        await call(h, "/unlock", owner="x")
        for _ in range(3):
            await call(h, renew=True, owner="y")
        queued = [(fields["owner"], fields["position"]) for fields in told(h, "lock_queued")]
        assert queued == [("x", 1), ("y", 2), ("y", 1)]
        await call(h, "/unlock", owner="y")
        await call(h, "/unlock", owner="me")


@run_async
async def test_a_lapse_is_told_with_the_time_on_the_wall(tmp_path):
    async with both(tmp_path) as h:
        await call(h, lock="a", owner="me", ttl=1)
        await until(lambda: told(h, "lapsed"), 3)
        ended = (await call(h, renew=True, owner="me")).json()["ended"]
        (at,) = re.findall(r"your lock on 'a' lapsed at (\S+), ", ended)
        assert abs(datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp() - time.time()) < 3


@run_async
async def test_a_lock_does_not_lapse_under_an_image_job(tmp_path):
    """A running job of an owner keeps its lock alive, also with no new request."""
    comfy = ComfySim(card=SimCard(tmp_path / "card.json"))
    async with house(tmp_path, [llama("a")], comfy=comfy) as h:
        await call(h, lock="comfyui", owner="artist", ttl=1)
        headers = {"X-Turnstile-Owner": "artist"}
        sent = await h.http.post(f"{h.comfy_gate}/prompt", json={"prompt": graph(2.2)}, headers=headers)
        assert sent.status_code == 200
        await asyncio.sleep(1.8)
        assert [o.owner for o in h.view.locks.owners] == ["artist"]
        assert (await h.chat("a")).status_code == 422
        await until(lambda: told(h, "lapsed"), 4)
        assert "job_end" in h.kinds()
        assert h.kinds().index("job_end") < h.kinds().index("lapsed")


@run_async
async def test_an_expiry_drains_and_never_kills(tmp_path):
    async with both(tmp_path) as h:
        await call(h, lock="a", owner="me", ttl=1)
        body = {"model": "a", "stream": True, "max_tokens": 250, "messages": [{"role": "user", "content": "x"}]}
        headers = {"X-Turnstile-Owner": "guest"}  # work of somebody who holds nothing keeps no lock alive
        url = f"{h.gate}/v1/chat/completions"
        async with h.http.stream("POST", url, json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await until(lambda: told(h, "lapsed"), 3)
            other = asyncio.create_task(h.chat("b"))
            await until(lambda: h.view.phase == "draining")
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert (await other).status_code == 200
        assert not told(h, "forced")


@run_async
async def test_a_lock_that_the_disk_does_not_take_is_given_and_says_so(tmp_path, monkeypatch):
    def full(*state):
        raise OSError(28, "No space left on device")

    async with both(tmp_path) as h:
        assert "warning" not in (await call(h, lock="a", owner="me")).json()
        monkeypatch.setattr(active, "save", full)
        answer = await call(h, lock="a", owner="you")
        assert (answer.status_code, answer.json()["owners"].keys()) == (200, {"me", "you"})
        assert "a restart of the gate will not know of this" in answer.json()["warning"]
        code, out, err = await piped("renew", "--owner", "you", TURNSTILE_URL=h.gate)
        assert (code, out[:9], "will not know of this" in err) == (0, "renewed a", True), "the file still does not"
        monkeypatch.undo()
        assert "warning" not in (await call(h, "/unlock", owner="you")).json()
        await call(h, "/unlock", owner="me")
