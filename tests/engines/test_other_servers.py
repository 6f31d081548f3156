"""Servers that somebody else runs: each lets go verifiably, or it is said what is left. On simulators only."""

from __future__ import annotations

import asyncio

import pytest

from gpu_turnstile.engines.base import Health, Released, Timing
from gpu_turnstile.sim import InvokeAISim, LocalAISim, ServerFaults
from tests.aio import until
from tests.engines.fake import CUT, HANG
from tests.engines.servers import CASES, SHORT, each, readied, with_fake, with_sim


@each
def test_with_nothing_loaded_it_is_ready_idle_and_empty(case):
    async def story(engine, sim, http):
        assert (await engine.probe()).health is Health.READY
        assert await engine.loaded() == ()
        assert await engine.busy() is False
        assert (await engine.release()).outcome is Released.EMPTY
        assert sim.counters["unloads"] == 0 or case.sim is InvokeAISim

    with_sim(case, story, loaded=0)


@each
def test_what_is_loaded_is_named(case):
    async def story(engine, sim, http):
        loaded = await engine.loaded()
        return None if loaded is None else tuple(model.name for model in loaded)

    assert with_sim(case, story) == case.held


@each
@pytest.mark.parametrize("late", [0.0, 0.1])
def test_an_unload_is_believed_when_it_is_verified(case, late):
    async def story(engine, sim, http):
        release = await engine.release()
        return release, sim.card.held_by(sim.name)

    release, left = with_sim(case, story, faults=ServerFaults(unload_late_s=late))
    assert (release.outcome, release.left, left) == (Released.EMPTY, (), 0)


@each
def test_an_unload_that_is_ignored_ends_at_the_limit_and_says_what_is_left(case):
    release = with_sim(case, lambda engine, *_: engine.release(), faults=ServerFaults(unload_ignored=True))
    assert (release.outcome, release.left) == (Released.TIMEOUT, case.left)
    assert case.left[0] in release.detail


@each
def test_work_is_seen_as_far_as_it_tells_and_ends(case):
    async def story(engine, sim, http):
        asking = asyncio.create_task(http.post(case.work[0], json=case.work[1]))
        await until(lambda: sim.in_flight == 1)
        assert await engine.busy() is case.busy
        assert (await asking).is_success
        await until(lambda: sim.in_flight == 0)
        assert await engine.busy() is (False if case.busy else None)

    with_sim(case, story, work_s=0.2)


@pytest.mark.parametrize("case", [c for c in CASES if c.waits], ids=lambda c: c.sim.kind)
def test_running_work_is_not_cut_by_a_release(case):
    async def story(engine, sim, http):
        asking = asyncio.create_task(http.post(case.work[0], json=case.work[1]))
        await until(lambda: sim.in_flight == 1)
        release = await engine.release()
        assert (release.outcome, sim.counters["unloads"]) == (Released.TIMEOUT, 0)
        assert len(release.left) == 1
        assert (await asking).is_success
        await until(lambda: sim.in_flight == 0)
        assert (await engine.release()).outcome is Released.EMPTY

    with_sim(case, story, work_s=0.6)


@each
def test_a_server_that_is_off_is_unreachable_and_unknown(case):
    async def story(engine, server):
        await server.stop()
        assert (await engine.probe()).health is Health.DOWN
        assert (await engine.loaded(), await engine.busy()) == (None, None)
        assert (await engine.release()).outcome is Released.UNREACHABLE

    with_fake(case, lambda *_: {}, story)


@each
@pytest.mark.parametrize(("fault", "health"), [("down", Health.DOWN), ("server_error", Health.BROKEN)])
def test_a_server_in_trouble_is_seen_and_its_release_uncertain(case, fault, health):
    async def story(engine, sim, http):
        assert (await engine.probe()).health is health
        assert (await engine.loaded(), await engine.busy()) == (None, None)
        return await engine.release()

    faults = ServerFaults(**{fault: True})
    assert with_sim(case, story, timing=SHORT, faults=faults).outcome is Released.TIMEOUT


@each
def test_a_wrong_key_is_refused_at_once_and_the_right_one_is_sent(case):
    async def story(engine, sim, http):
        engine.api_key = "wrong"
        release = await engine.release()
        assert (release.outcome, sim.counters["unloads"]) == (Released.REFUSED, 0)
        assert sim.card.held_by(sim.name) > 0
        engine.api_key = case.key
        assert (await engine.release()).outcome is Released.EMPTY

    with_sim(case, story, api_key=case.key)


@each
@pytest.mark.parametrize("answer", [{}, [], None, 5, {"models": 1}, "<html>", (200, ""), (500, "no"), CUT, HANG])
def test_answers_of_another_shape_are_unknown_and_never_empty(case, answer):
    async def story(engine, server):
        if answer is HANG:
            engine.timing = Timing(unload_timeout=0.2, call_timeout=0.1)
        assert await engine.busy() is None
        assert await engine.loaded() is None or (answer, case.sim) == (None, InvokeAISim)
        assert (await engine.probe()).health is not Health.READY or case.sim is LocalAISim
        return await engine.release()

    answered = answer if isinstance(answer, tuple) or answer in (CUT, HANG) else (200, answer)
    assert with_fake(case, lambda *_: answered, story).outcome is Released.TIMEOUT


@each
def test_a_server_without_these_paths_is_unsupported(case):
    release = with_fake(case, lambda *_: (404, "Not Found"), lambda engine, _: engine.release())
    assert release.outcome is Released.UNSUPPORTED


@readied
def test_after_a_release_admit_makes_it_work_again_and_changes_nothing_when_it_does(case):
    async def story(engine, sim, http):
        assert (await engine.admit()).health is Health.READY
        assert sim.counters["loads"] == 1
        assert (await engine.release()).outcome is Released.EMPTY
        assert (await engine.admit()).health is Health.READY
        assert (await http.post(case.work[0], json=case.work[1])).is_success
        await until(lambda: sim.card.held_by(sim.name) > 0)

    with_sim(case, story)


@readied
def test_admit_of_a_server_that_is_off_is_bounded_and_says_so(case):
    async def story(engine, server):
        await server.stop()
        return (await engine.admit()).health

    assert with_fake(case, lambda *_: {}, story) is Health.DOWN
