"""What went wrong elsewhere with locks, tried here: probes under a lock, useless Retry-After, two who take it at once,
TTLs that are too short or endless, and holders that come back from the dead."""

from __future__ import annotations

import asyncio
import time

import pytest

from gpu_turnstile.core.routes import UnknownModel
from tests.aio import run_async, until
from tests.e2e.house import PresetText, house, llama

SOON = 0.5  # seconds; a probe takes milliseconds, and a swap half a second at least
TRAIN = PresetText(
    "lora",
    """
engine = "train"
[runtime]
kind = "process"
command = ["python", "-m", "http.server", "{port}"]
""",
)


def scene(tmp_path, *more, **settings):
    return house(tmp_path, [llama("a"), llama("b"), *more], **settings)


async def lock(h, preset, owner, **more):
    return await h.http.post(f"{h.gate}/lock", json={"lock": preset, "owner": owner, **more})


async def unlock(h, owner, **more):
    return await h.http.post(f"{h.gate}/unlock", json={"owner": owner, **more})


MESSAGES = {"model": "b", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
ANTHROPIC = {"anthropic-version": "2023-06-01", "x-api-key": "any", "anthropic-beta": "x"}


@run_async
async def test_probes_are_answered_while_training_is_locked_and_wake_nothing(tmp_path):
    async with scene(tmp_path, TRAIN) as h:
        await lock(h, "lora", "training")
        for method, path in (
            ("HEAD", "/"),
            ("HEAD", "/api/hello"),
            ("GET", "/"),
            ("GET", "/api/version"),
            ("GET", "/v1/models"),
            ("GET", "/healthz"),
        ):
            began = time.monotonic()
            answer = await h.http.request(method, h.gate + path)
            assert (answer.status_code // 100, time.monotonic() - began < SOON) == (2, True), path
            assert method != "HEAD" or answer.content == b""
        counted = await h.http.post(f"{h.gate}/v1/messages/count_tokens?beta=true", json=MESSAGES, headers=ANTHROPIC)
        assert counted.status_code in (404, 501)
        assert counted.json()["type"] == "error"
        real = await h.http.post(f"{h.gate}/v1/messages?beta=true", json=MESSAGES, headers=ANTHROPIC)
        assert (real.status_code, real.json()["type"]) == (422, "error")
        assert int(real.headers["retry-after"]) >= 1
        assert "admitting" not in h.kinds()
        await unlock(h, "training")


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
STYLES = {
    "/v1/chat/completions": ({"model": "b", **CHAT}, lambda body: body["error"]["message"]),
    "/v1/messages": (MESSAGES, lambda body: body["error"]["message"]),
    "/v1/completions": ({"model": "b", "prompt": "hi", "max_tokens": 4}, lambda body: body["error"]["message"]),
}


@run_async
async def test_a_refusal_under_the_lock_says_when_to_come_back_in_the_callers_own_terms(tmp_path):
    async with scene(tmp_path) as h:
        await h.chat("a")
        await lock(h, "a", "loop", ttl=2)

        async def honest(path):
            """Asks again when it was told to; how often it asked."""
            body, message = STYLES[path]
            for asked in range(1, 10):
                answer = await h.http.post(h.gate + path, json=body)
                if answer.status_code == 200:
                    return asked
                assert (answer.status_code, answer.headers["x-turnstile-error"]) == (422, "model_unavailable")
                assert "held on 'a' by loop" in message(answer.json())
                assert 1 <= int(answer.headers["retry-after"]) <= 2
                await asyncio.sleep(int(answer.headers["retry-after"]))
            raise AssertionError("never")

        async def impatient():
            while h.view.locks.preset == "a":
                assert (await h.chat("b")).status_code in (422, 200)

        asked = await asyncio.gather(*map(honest, STYLES), *map(honest, STYLES), impatient())
        assert max(asked[:-1]) == 2
        assert not h.view.waiting
        assert [f["tenant"] for kind, f in h.events if kind == "admitted"] == ["a", "b"]


@run_async
async def test_of_two_that_take_the_lock_at_once_exactly_one_has_it(tmp_path):
    async with scene(tmp_path) as h:
        for number in range(60):
            wait = number % 2 == 1
            answers = await asyncio.gather(lock(h, "a", "x", wait=wait), lock(h, "b", "y", wait=wait))
            assert sorted(answer.status_code for answer in answers) == [200, 202 if wait else 409]
            owners = [owner.owner for owner in h.view.locks.owners]
            assert len(owners) == 1
            for owner in ("x", "y"):
                await unlock(h, owner)
        granted = [fields["token"] for kind, fields in h.events if kind == "locked"]
        assert granted == list(range(1, 61)), "each lock has its token, and none was given twice"


@run_async
async def test_a_lock_is_not_lost_while_it_is_renewed_and_free_soon_after(tmp_path):
    async with scene(tmp_path) as h:
        token = (await lock(h, "a", "x", ttl=1)).json()["token"]
        end = time.monotonic() + 3
        while time.monotonic() < end:
            answer = await h.http.post(f"{h.gate}/lock", json={"renew": True, "owner": "x", "token": token})
            renewed = time.monotonic()
            assert answer.json()["token"] == token
            await asyncio.sleep(0.3)
        await until(lambda: h.view.locks.preset is None, 3)
        assert time.monotonic() - renewed < 1.5
        other = (await lock(h, "b", "y")).json()
        assert other["token"] == token + 1
        for body in ({"renew": True, "owner": "x", "token": token}, {"lock": "b", "owner": "x", "token": token}):
            late = await h.http.post(f"{h.gate}/lock", json=body)
            assert (late.status_code, late.headers["x-turnstile-error"]) == (409, "locked")
        assert (await unlock(h, "x", token=token)).status_code == 409
        assert [(o.owner, o.held > 0) for o in h.view.locks.owners] == [("y", True)]
        await unlock(h, "y")


@pytest.mark.parametrize("ttl", ["1e9", "-1", "0", "0.5", "NaN", "Infinity", '"5"', "true", "[]", "604801"])
@run_async
async def test_a_silly_ttl_is_refused_with_what_would_be_right(tmp_path, ttl):
    async with scene(tmp_path) as h:
        await lock(h, "a", "x", ttl=60)
        for what in ('"lock": "a"', '"renew": true'):
            answer = await h.http.post(f"{h.gate}/lock", content=f'{{{what}, "owner": "x", "ttl": {ttl}}}')
            assert answer.status_code == 400
            assert "from 1 to 604800" in answer.json()["message"]
        assert h.view.locks.owners[0].ttl == 60
        await unlock(h, "x")


@run_async
async def test_after_a_lapse_nobody_is_put_on_top_of_what_is_still_on_the_card(tmp_path):
    """The house itself proves it at the end: the card was never held by two engines."""
    async with scene(tmp_path) as h:
        await h.chat("a")
        await lock(h, "a", "x", ttl=1)
        async with h.streaming("a", 150) as lines:
            await until(lambda: not h.view.leases or h.view.locks.preset, 1)
            other = asyncio.create_task(h.chat("b"))
            assert (await other).status_code == 422, "open work keeps the lock"
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        await until(lambda: h.view.locks.preset is None, 3)
        assert h.view.residents == ("a",)
        assert (await h.chat("b")).status_code == 200
        kinds = h.kinds()
        assert kinds.index("lapsed") < kinds.index("evicting") < kinds.index("evicted")


@run_async
async def test_an_unknown_name_never_runs_on_the_locked_preset(tmp_path):
    """Also where unknown names go to the resident otherwise."""
    async with scene(tmp_path, llmc_unknown_model=UnknownModel.RESIDENT) as h:
        await h.chat("a")
        assert (await h.chat("gpt-9")).status_code == 200
        await lock(h, "a", "x")
        answer = await h.chat("gpt-9")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (404, "unknown_model")
        assert (await h.chat("a")).status_code == 200
        await unlock(h, "x")
        assert (await h.chat("gpt-9")).status_code == 200
