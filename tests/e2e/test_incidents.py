"""The document's lock incidents, played again: two unattended loops and a person on one card, through a whole gate.

Each test is one row of "Incidents the notes record" and ends as "What changed" says, or better. The loops use the
Python client as its documentation shows it; engines load, generate and unload in real time.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

import httpx
import pytest

from gpu_turnstile.client import AsyncTurnstile, Locked, StaleLock, Turnstile
from gpu_turnstile.contention import from_json
from tests.aio import run_async, until
from tests.e2e.house import house, llama


class Loop:
    """An unattended loop: holds the lock on its preset and makes one generation after the other that names it."""

    def __init__(self, h, name, preset, ttl=2.0):
        self.h, self.preset, self.ttl = h, preset, ttl
        self.ts = AsyncTurnstile(h.gate, owner=name, client=name)
        self.whole = 0  # generations that came to their end
        self.broken = []  # how the others ended
        self.positions = []  # in the queue, as it was told
        self.lock = None
        self.took = []  # the tokens of its locks

    async def run(self, generations, tokens=20, think=0.0):
        async with self.ts, self.ts.lock(self.preset, ttl=self.ttl, wait=True, on_wait=self.waits) as self.lock:
            self.took.append(self.lock.token)
            for _ in range(generations):
                await self.generate(tokens)
                await asyncio.sleep(think)

    def waits(self, lock):
        self.positions.append(lock.queued.position)

    async def generate(self, tokens):
        """Returns tokens per second of one answer; what is not whole is noted."""
        body = {"model": self.preset, "stream": True, "max_tokens": tokens, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": "go on"}]
        began, last = None, ""
        url = f"{self.h.gate}/v1/chat/completions"
        try:
            async with self.h.http.stream("POST", url, json=body, headers=self.lock.headers) as answer:
                async for line in answer.aiter_lines():
                    began = began or time.monotonic()
                    last = line or last
        except httpx.HTTPError as problem:
            last = repr(problem)
        if last != "data: [DONE]":
            self.broken.append(last)
            return 0.0
        self.whole += 1
        return tokens / (time.monotonic() - began)


async def person(h, model, **more):
    """Somebody at a keyboard, who knows nothing of locks."""
    headers = {"X-Turnstile-Client": "person"}
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **more}
    return await h.http.post(f"{h.gate}/v1/chat/completions", json=body, headers=headers)


def scene(tmp_path, **more):
    return house(tmp_path, [llama("a"), llama("b")], **more)


def loaded(h):
    """The presets that were brought onto the card, in order: each costs a reload and every client its context."""
    return [fields["tenant"] for kind, fields in h.events if kind == "admitted"]


def told(h, kind):
    return [fields for name, fields in h.events if name == kind]


async def begin(h):
    """The gate's own time, for a measurement that begins now."""
    return (await h.http.get(f"{h.gate}/contention?since=-1s")).json()["until"]


async def certificate(h, since, owner):
    found = await h.http.get(f"{h.gate}/contention", params={"since": since, "owner": owner})
    return from_json(found.json())


@contextlib.contextmanager
def at_the_keyboard(h):
    with Turnstile(h.gate, owner="person", client="person") as ts:
        yield ts


async def calmly(call, *args, **more):
    """A blocking call of the person's, beside the gate's own loop."""
    return await asyncio.to_thread(call, *args, **more)


@run_async
async def test_2026_08_17_a_lock_for_another_preset_kills_no_loop_it_is_refused_or_queues(tmp_path):
    async with scene(tmp_path) as h:
        first, second = Loop(h, "loop-1", "a"), Loop(h, "loop-2", "b")
        one = asyncio.create_task(first.run(4, tokens=60))
        await until(lambda: h.view.leases)
        two = asyncio.create_task(second.run(2))
        await until(lambda: second.positions)
        with at_the_keyboard(h) as ts:
            for _ in range(3):
                with pytest.raises(Locked, match="never taken over") as refused:
                    await calmly(ts.lock, "b")
                assert [o.owner for o in refused.value.owners] == ["loop-1"]
                assert [w.owner for w in refused.value.queue] == ["loop-2"]
                assert (await person(h, "b")).status_code == 422
                assert h.view.residents == ("a",)
        await one
        await two
        assert (first.whole, first.broken) == (4, []), "no iteration was killed"
        assert (second.whole, second.broken) == (2, [])
        assert loaded(h) == ["a", "b"]
        assert told(h, "forced") == []


@run_async
async def test_2026_08_19_a_silent_leg_keeps_its_lock_by_its_heartbeat_and_without_one_is_told(tmp_path):
    async with scene(tmp_path) as h:
        silent = Loop(h, "loop-1", "a", ttl=1.0)
        leg = asyncio.create_task(silent.run(2, think=2.0))
        await until(lambda: silent.whole == 1)
        with at_the_keyboard(h) as ts:
            until_then = time.monotonic() + 1.8  # nearly twice its TTL, in which it asks for nothing
            while time.monotonic() < until_then:
                with pytest.raises(Locked):
                    await calmly(ts.lock, "b")
        await leg
        assert (silent.whole, len(silent.took), told(h, "lapsed")) == (2, 1, [])

        async with AsyncTurnstile(h.gate, owner="loop-1", client="loop-1") as ts:
            forgetful = await ts.lock("a", ttl=1.0)  # nobody renews this one
            second = Loop(h, "loop-2", "b")
            two = asyncio.create_task(second.run(1))
            await until(lambda: told(h, "lapsed"), 4)
            (lapse,) = told(h, "lapsed")
            assert (lapse["owner"], lapse["preset"], lapse["cause"]) == ("loop-1", "a", "silent")
            assert "lapsed" in [event.kind async for event in ts.events(since=0, follow=False)]
            late = await h.http.post(f"{h.gate}/v1/chat/completions", json={"model": "a"}, headers=forgetful.headers)
            assert (late.status_code, late.headers["x-turnstile-error"]) == (409, "locked")
            assert "your lock on 'a' lapsed" in late.json()["error"]["message"]
            with pytest.raises(StaleLock, match="lapsed"):
                await ts.renew(token=forgetful.token)
            await two
            again = await ts.lock("a", wait=True)
            assert re.search(r"your lock on 'a' lapsed at \d{4}-", again.granted.ended)
            await again.release()
        assert (second.whole, second.broken) == (1, [])


@run_async
async def test_2026_08_19_a_leg_that_generates_for_longer_than_its_ttl_is_not_silent(tmp_path):
    async with scene(tmp_path) as h:
        loop, second = Loop(h, "loop-1", "a", ttl=1.0), Loop(h, "loop-2", "b")
        async with loop.ts:
            loop.lock = await loop.ts.lock("a", ttl=1.0)  # without a heartbeat
            one = asyncio.create_task(loop.generate(220))
            await until(lambda: h.view.leases)
            two = asyncio.create_task(second.run(1))
            await one
            assert (loop.whole, told(h, "lapsed")) == (1, [])
            await loop.lock.release()
            await two
        assert loaded(h) == ["a", "b"]


@run_async
async def test_2026_09_08_a_bare_unlock_under_a_running_bench_is_denied_and_by_force_it_is_no_result(tmp_path):
    async with scene(tmp_path) as h:
        await person(h, "a")
        bench, waiting = Loop(h, "bench", "a", ttl=1.5), Loop(h, "loop-2", "b")
        async with bench.ts:
            async with bench.ts.lock("a", ttl=1.5) as bench.lock:
                queued = asyncio.create_task(waiting.run(1))
                await until(lambda: waiting.positions)
                began = await begin(h)
                measuring = asyncio.create_task(bench.generate(60))
                with at_the_keyboard(h) as ts:
                    with pytest.raises(Locked, match='"force": true'):
                        await calmly(ts.unlock, everybody=True)
                    bare = await h.http.post(f"{h.gate}/unlock", json={"lock": False})
                    assert bare.status_code == 409
                await measuring
                assert bench.whole == 1
                assert (await certificate(h, began, "bench")).clean
                assert loaded(h) == ["a"]

                began = await begin(h)
                with at_the_keyboard(h) as ts:
                    taken = await calmly(ts.unlock, everybody=True, force=True, reason="I need it")
                assert taken.cut == ("bench",)
                await until(bench.lock.lost.is_set)
                assert "taken away by person (I need it)" in str(bench.lock.why_lost)
                assert await bench.generate(5) == 0.0, "a result on a card that was handed away is none"
                assert "lapse" in {f.kind for f in (await certificate(h, began, "bench")).findings}
            await queued
        assert waiting.whole == 1
        (fields,) = [note for note in told(h, "unlocked") if note["cut"]]
        assert (fields["caller"], fields["force"]) == ("person", True)


@run_async
async def test_2026_09_18_a_speed_probe_under_the_lock_measures_its_engine_and_not_its_neighbours(tmp_path):
    async with scene(tmp_path) as h:
        await person(h, "a")
        probe = Loop(h, "probe", "a")
        async with probe.ts:
            began = await begin(h)
            probe.lock = Unlocked()
            measuring = asyncio.create_task(probe.generate(60))
            await until(lambda: h.view.leases)
            other = asyncio.create_task(person(h, "b"))  # the client that POSTed during the measurement
            await measuring
            await other
            findings = {str(f.kind) for f in (await certificate(h, began, "probe")).findings}
            assert {"drain", "swap", "lease"} <= findings, "an unlocked number is not to be trusted, and says so"

            await person(h, "a")
            before = loaded(h)
            async with probe.ts.lock("a", ttl=2.0) as probe.lock:
                alone = await probe.generate(60)
                began = await begin(h)
                measuring = asyncio.create_task(probe.generate(60))
                while not measuring.done():
                    answer = await person(h, "b")
                    assert (answer.status_code, answer.headers["x-turnstile-error"]) == (422, "model_unavailable")
                    assert "held on 'a' by probe" in answer.json()["error"]["message"]
                    await asyncio.sleep(0.02)
                assert measuring.result() > alone / 2, "the neighbour's requests cost the measurement nothing"
                found = await certificate(h, began, "probe")
                assert found.clean, found.findings
        assert loaded(h) == before


class Unlocked:
    """A probe that takes no lock, only says whose it is."""

    headers = {"X-Turnstile-Owner": "probe"}  # noqa: RUF012


@run_async
async def test_2026_09_19_of_two_on_different_presets_one_wins_and_the_card_changes_once(tmp_path):
    async with scene(tmp_path) as h:
        first, second = Loop(h, "loop-1", "a"), Loop(h, "loop-2", "a")
        loops = asyncio.gather(first.run(6, think=0.1), second.run(6, think=0.1))  # two loops share a preset
        await until(lambda: first.whole and second.whole)
        assert {o.owner for o in h.view.locks.owners} == {"loop-1", "loop-2"}
        refused = 0
        while not loops.done():
            answer = await person(h, "b")
            if answer.status_code == 200:  # they have just come to their end
                break
            assert (answer.status_code, int(answer.headers["retry-after"]) >= 1) == (422, True)
            refused += 1
            await asyncio.sleep(0.05)
        await loops
        assert refused >= 5
        assert (first.whole, second.whole, first.broken + second.broken) == (6, 6, [])
        assert (await person(h, "b")).status_code == 200
        assert loaded(h) == ["a", "b"], "in 13 minutes the container was rebuilt every 90 s"
        assert told(h, "forced") == []


@run_async
async def test_2026_09_19_who_shares_the_loops_preset_costs_no_swap_at_all(tmp_path):
    async with scene(tmp_path) as h:
        loop = Loop(h, "loop-1", "a")
        working = asyncio.create_task(loop.run(5, think=0.05))
        await until(lambda: loop.whole)
        while not working.done():
            assert (await person(h, "a")).status_code == 200
        await working
        assert (loop.whole, loop.broken, loaded(h)) == (5, [], ["a"])


@run_async
async def test_2026_09_19_without_any_lock_every_load_serves_somebody_and_no_generation_dies(tmp_path):
    """The swap war itself. Nobody locked, so it swaps; but each swap pays for something, and nothing is lost."""
    async with scene(tmp_path) as h:
        loop = Loop(h, "loop-1", "a")
        loop.lock = Unlocked()

        async def unattended():
            for _ in range(3):
                await loop.generate(10)

        working, chats = asyncio.create_task(unattended()), 0
        while not working.done():
            assert (await person(h, "b")).status_code == 200
            chats += 1
        await working
        assert (loop.whole, loop.broken) == (3, [])
        assert told(h, "forced") == []
        assert len(loaded(h)) <= loop.whole + chats
