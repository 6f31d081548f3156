"""Both clients against a real gate: the sync one in a thread beside the gate's loop, the async one in it."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from gpu_turnstile.client import (
    AsyncTurnstile,
    BadRequest,
    Locked,
    NotHeld,
    StaleLock,
    Turnstile,
    Unavailable,
    Unreachable,
)
from gpu_turnstile.presets.values import Address, ApiKey
from tests.aio import run_async, until
from tests.e2e.house import house, llama


@contextlib.asynccontextmanager
async def both(tmp_path, **more):
    """A gate with two presets, and a sync client of it."""
    async with house(tmp_path, [llama("a"), llama("b")], **more) as h:
        with Turnstile(h.gate, owner="me", client="tests") as ts:
            yield h, ts


def holders(h):
    return [o.owner for o in h.view.locks.owners]


def waiters(h):
    return [w.owner for w in h.view.locks.queue]


def in_thread(call, *args, **more):
    return asyncio.create_task(asyncio.to_thread(call, *args, **more))


@run_async
async def test_the_gate_can_be_looked_at_and_changed(tmp_path):
    async with both(tmp_path) as (_, ts):

        def script():
            assert ts.mode()["mode"] == "idle"
            assert ts.mode("llm", "a")["residents"] == ["a"]
            assert ts.status()["residents"] == ["a"]
            assert [m["id"] for m in ts.models()] == ["a", "b"]
            assert "gpu_turnstile_swap_seconds" in ts.metrics()
            kinds = [event.kind for event in ts.events(since=0, follow=False)]
            assert "swapped" in kinds
            assert ts.unload()["residents"] == []
            with pytest.raises(BadRequest, match="unknown"):
                ts.mode("llm", "unknown")

        await asyncio.to_thread(script)


@run_async
async def test_a_with_block_holds_the_lock_and_lets_it_go_also_when_it_fails(tmp_path):
    async with both(tmp_path) as (h, ts):

        def script():
            with ts.lock("a") as lock:
                assert holders(h) == ["me"]
                assert (lock.token, lock.preset, lock.owner) == (1, "a", "me")
                assert lock.headers == {"X-Turnstile-Lock": "1", "X-Turnstile-Client": "me"}
                assert lock.expires_in == pytest.approx(900, abs=2)
                body = {"model": "a", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
                url = f"{ts.url}/v1/chat/completions"
                assert httpx.post(url, json=body, headers=lock.headers, timeout=20, trust_env=False).status_code == 200
            assert holders(h) == []
            with pytest.raises(ZeroDivisionError), ts.lock("a"):
                1 / 0  # noqa: B018
            assert holders(h) == []

        await asyncio.to_thread(script)


@run_async
async def test_the_heartbeat_outlives_the_ttl_and_without_one_the_lock_lapses(tmp_path):
    async with both(tmp_path) as (h, ts):
        lock = await asyncio.to_thread(ts.lock, "a", ttl=1)
        with lock:
            await asyncio.sleep(1.5)
            assert holders(h) == ["me"]
            await asyncio.to_thread(lock.release)
        bare = await asyncio.to_thread(ts.lock, "a", ttl=1)
        await until(lambda: not holders(h), 3)
        assert not bare.lost.is_set()
        with pytest.raises(NotHeld, match="lapsed"):
            await asyncio.to_thread(ts.renew)


@run_async
async def test_a_refusal_says_who_holds_it_who_waits_and_when_to_come_back(tmp_path):
    async with both(tmp_path) as (h, ts):

        def script():
            with ts.lock("a", owner="you"):
                with pytest.raises(Locked, match="never taken over") as told:
                    ts.lock("b")
                assert [o.owner for o in told.value.owners] == ["you"]
                assert (told.value.queue, told.value.preset) == ((), "a")
                assert told.value.retry_after >= 1
            assert holders(h) == []

        await asyncio.to_thread(script)


@run_async
async def test_waiting_in_the_queue_ends_with_the_lock(tmp_path):
    async with both(tmp_path) as (h, ts):
        seen = []
        holder = await asyncio.to_thread(ts.lock, "a", owner="you")
        task = in_thread(ts.lock, "b", wait=True, on_wait=lambda lock: seen.append(lock.queued.position))
        await until(lambda: waiters(h) == ["me"])
        await asyncio.to_thread(holder.release)
        lock = await task
        assert (holders(h), seen[0]) == (["me"], 1)
        await asyncio.to_thread(lock.release)


@run_async
async def test_who_gives_up_waiting_leaves_the_queue(tmp_path):
    async with both(tmp_path) as (h, ts):
        holder = await asyncio.to_thread(ts.lock, "a", owner="you")
        with pytest.raises(Locked, match=r"within 0\.3 s"):
            await asyncio.to_thread(ts.lock, "b", wait=0.3)
        assert waiters(h) == []

        def stop(lock):
            raise KeyboardInterrupt

        def interrupted():
            with pytest.raises(KeyboardInterrupt):
                ts.lock("b", wait=True, on_wait=stop)

        await asyncio.to_thread(interrupted)
        assert waiters(h) == []
        mine = await asyncio.to_thread(ts.lock, "a")  # giving up another preset does not cost what one has
        with pytest.raises(Locked):
            await asyncio.to_thread(ts.lock, "b", wait=0.1)
        assert (holders(h), waiters(h)) == (["you", "me"], [])
        await asyncio.to_thread(mine.release)
        await asyncio.to_thread(holder.release)


@run_async
async def test_a_lock_that_was_taken_away_is_told_at_the_next_heartbeat(tmp_path):
    async with both(tmp_path) as (_, ts):
        told = []
        lock = await asyncio.to_thread(ts.lock, "a", ttl=1, on_lost=told.append)
        with lock:
            await asyncio.to_thread(ts.unlock, force=True, everybody=True)
            await until(lock.lost.is_set)
            assert told == [lock]
            assert isinstance(lock.why_lost, StaleLock)
            assert lock.expires_in == 0


@run_async
async def test_a_lost_lock_is_queued_for_again_if_asked(tmp_path):
    async with both(tmp_path) as (h, ts):
        lock = await asyncio.to_thread(ts.lock, "a", ttl=1, requeue=True)
        with lock:
            await asyncio.to_thread(ts.unlock, owner="me")
            other = await asyncio.to_thread(ts.lock, "b", owner="you")
            await until(lambda: waiters(h) == ["me"])
            assert lock.lost.is_set()
            await asyncio.to_thread(other.release)
            await until(lambda: not lock.lost.is_set())
            assert (holders(h), lock.token) == (["me"], 3)
            await asyncio.to_thread(lock.release)
        assert holders(h) == []


@run_async
async def test_an_exit_never_ends_a_later_hold_of_the_same_name(tmp_path):
    async with both(tmp_path) as (h, ts):
        first = await asyncio.to_thread(ts.lock, "a")
        await asyncio.to_thread(ts.unlock)
        second = await asyncio.to_thread(ts.lock, "a")
        assert await asyncio.to_thread(first.release)
        assert holders(h) == ["me"]
        await asyncio.to_thread(second.release)


@run_async
async def test_a_lock_lives_through_a_restart_of_the_gate(tmp_path):
    async with both(tmp_path) as (h, _):
        port = h.app.port("llm")
        ts = Turnstile(h.gate, owner="me")
        lock = await asyncio.to_thread(ts.lock, "a", ttl=1.5)
        lock.__enter__()
    await until(lambda: isinstance(lock.trouble, Unreachable))
    async with both(tmp_path, listen_ollama=Address("127.0.0.1", port)) as (h, _):
        await until(lambda: lock.trouble is None)
        assert not lock.lost.is_set()
        assert holders(h) == ["me"]
        assert await asyncio.to_thread(lock.release)
        assert holders(h) == []
    ts.close()
    with pytest.raises(Unreachable, match="closed"):
        ts.status()


@run_async
async def test_wrong_calls_and_absent_gates_have_types_of_their_own(tmp_path):
    async with both(tmp_path) as (h, ts):

        def script():
            for wrong in ({"preset": "unknown"}, {"preset": "a", "ttl": 1e9}, {"preset": "a", "owner": "\n"}):
                with pytest.raises(BadRequest):
                    ts.lock(**wrong)
            with pytest.raises(Unavailable):
                ts.lock()
            with pytest.raises(StaleLock):
                ts.lock("a", token=99)
            with pytest.raises(StaleLock):
                ts.renew(token=99)
            with pytest.raises(NotHeld):
                ts.renew()
            with Turnstile("127.0.0.1:9") as nobody, pytest.raises(Unreachable, match="no gate answers"):
                nobody.lock("a", wait=True)
            with pytest.raises(Unreachable):
                list(Turnstile("127.0.0.1:9").events())

        await asyncio.to_thread(script)
        assert holders(h) == []


@run_async
async def test_taking_others_locks_away_needs_force(tmp_path):
    async with both(tmp_path) as (_, ts):

        def script():
            with ts.lock("a", ttl=60), Turnstile(ts.url, owner="you", client="somebody") as other:
                with pytest.raises(Locked, match="force"):
                    other.unlock(everybody=True)
                with pytest.raises(Locked, match="force"):
                    other.unlock(owner="me")
                assert other.unlock(owner="me", force=True).cut == ("me",)
                ts.lock("a")
                assert other.release("a test") == []
            assert ts.status()["locks"]["owners"] == {}

        await asyncio.to_thread(script)


@run_async
async def test_a_key_is_sent_and_a_wrong_one_is_a_bad_request(tmp_path, monkeypatch):
    async with house(tmp_path, [llama("a")], turnstile_api_keys=(ApiKey("me", "secret"),)) as h:
        async with AsyncTurnstile(h.gate, key="secret") as ts, ts.lock("a"):
            assert holders(h) == [ts.owner]
        async with AsyncTurnstile(h.gate) as ts:
            with pytest.raises(BadRequest):
                await ts.status()
        monkeypatch.setenv("TURNSTILE_API_KEY", "secret")
        async with AsyncTurnstile(h.gate) as ts:
            assert (await ts.status())["mode"] == "idle"


# -------------------------------------------------------------------------------------------------- the async one


@contextlib.asynccontextmanager
async def loop(tmp_path, **more):
    async with house(tmp_path, [llama("a"), llama("b")], **more) as h, AsyncTurnstile(h.gate, owner="me") as ts:
        yield h, ts


@run_async
async def test_async_the_gate_can_be_looked_at_and_changed(tmp_path):
    async with loop(tmp_path) as (_, ts):
        assert (await ts.mode("llm", "a"))["residents"] == ["a"]
        assert (await ts.mode())["mode"] == "llm"
        assert [m["id"] for m in await ts.models()] == ["a", "b"]
        assert "gpu_turnstile_info" in await ts.metrics()
        assert "swapped" in [event.kind async for event in ts.events(since=0, follow=False)]
        assert (await ts.unload())["residents"] == []


@run_async
async def test_async_a_block_holds_beats_and_lets_go_and_a_bare_await_only_holds(tmp_path):
    async with loop(tmp_path) as (h, ts):
        async with ts.lock("a", ttl=1) as lock:
            await asyncio.sleep(1.5)
            assert holders(h) == ["me"]
            assert lock.headers["X-Turnstile-Lock"] == "1"
        assert holders(h) == []
        bare = await ts.lock("a", ttl=60)
        assert holders(h) == ["me"]
        assert (await ts.renew(ttl=30)).ttl == 30
        assert await bare.release()
        assert holders(h) == []


@run_async
async def test_async_cancelling_a_waiter_takes_it_out_of_the_queue(tmp_path):
    async with loop(tmp_path) as (h, ts), ts.lock("a", owner="you"):
        with pytest.raises(Locked):
            await ts.lock("b")
        task = asyncio.ensure_future(ts.lock("b", wait=True))
        await until(lambda: waiters(h) == ["me"])
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert waiters(h) == []


@run_async
async def test_async_a_loss_is_told_and_made_good(tmp_path):
    async with loop(tmp_path) as (h, ts):
        told = []
        async with ts.lock("a", ttl=1, requeue=True, on_lost=told.append) as lock:
            assert (await ts.unlock(everybody=True, force=True)).owners == ("me",)
            await asyncio.wait_for(lock.lost.wait(), 3)
            await until(lambda: not lock.lost.is_set())
            assert (told, lock.token, holders(h)) == ([lock], 2, ["me"])
        assert holders(h) == []


@run_async
async def test_async_a_cancelled_block_lets_go(tmp_path):
    async with loop(tmp_path) as (h, ts):

        async def work():
            async with ts.lock("a"):
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await until(lambda: holders(h) == ["me"])
        task.cancel()
        await asyncio.wait([task])
        assert holders(h) == []


@run_async
async def test_async_events_come_as_they_happen(tmp_path):
    async with loop(tmp_path) as (_, ts):
        events = ts.events(since=0)
        assert (await anext(events)).kind == "started"
        async with ts.lock("a"):
            while (event := await anext(events)).kind != "locked":
                pass
            assert (event.fields["owner"], event.fields["preset"]) == ("me", "a")
        await events.aclose()
