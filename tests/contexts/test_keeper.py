"""Save before evict, restore after ready, and everything that can go wrong in between."""

from __future__ import annotations

import asyncio
import os

import pytest

from gpu_turnstile.engines.base import Moved, Prefill
from tests.aio import run_async
from tests.contexts.bench import bench


@run_async
async def test_what_an_engine_held_is_given_back_to_it(tmp_path):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held = {0: 500, 1: 900}
        await b.go()
        await b.come()
        assert sorted(b.engine.held.values()) == [500, 900]
        assert b.kinds() == ["context_saved", "context_restored"]
        assert b.keeper.refill_s == 0


@run_async
async def test_the_largest_is_saved_first_busy_slots_last_and_short_ones_not_at_all(tmp_path):
    async with bench(tmp_path) as b:
        b.engine.count = 4
        await b.come()
        b.engine.held, b.engine.busy = {0: 200, 1: 900, 2: 50, 3: 5000}, {3}
        await b.keeper.save()
        assert b.engine.asked == ["save 1", "save 0", "save 3"]


@run_async
async def test_fifty_alternations_leave_one_file_a_slot(tmp_path):
    async with bench(tmp_path) as b:
        for turn in range(50):
            await b.come()
            b.engine.held = {0: 500 + turn, 1: 900 + turn}
            await b.go()
            assert len(b.files) == 2
        assert len(b.shelf.index.entries) == 2


@run_async
async def test_a_conversation_nobody_came_back_to_is_kept_for_the_next_time(tmp_path):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held = {0: 500, 1: 900}
        await b.go()
        await b.come()
        b.engine.held = {0: 950}  # the larger one went into slot 0; slot 1 was not used and tells nothing
        await b.go()
        await b.come()
        assert sorted(b.engine.held.values()) == [500, 950]


@pytest.mark.parametrize(
    ("deal", "kind"),
    [
        (Moved(problem="answered 500: no"), "save"),
        (Moved(problem="no answer", late=True), "save_late"),
        (Moved(problem="gone", lost=True), "save"),
        (Moved(problem="answered 501", unable=True), "save"),
        (Moved(0, 36), None),  # an empty slot: 200, and nothing in it
        (Moved(500, 10**6), "corrupt"),  # it says that it wrote more than there is
    ],
)
@run_async
async def test_a_save_that_goes_wrong_leaves_no_file_and_is_counted(tmp_path, deal, kind):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held, b.engine.deals = {0: 500}, {"save": deal}
        await b.go()
        assert not b.files
        assert b.book.counts.failures == ({} if kind is None else {kind: 1})
        b.engine.deals = {}
        await b.come()
        assert not b.engine.held


@run_async
async def test_after_a_late_save_no_further_slot_is_tried(tmp_path):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held, b.engine.deals = {0: 500, 1: 900}, {"save": Moved(problem="no answer", late=True)}
        await b.go()
        assert b.book.counts.failures == {"save_late": 1}


@pytest.mark.parametrize("what", ["slots", "save", "restore"])
@run_async
async def test_nothing_takes_longer_than_the_budget(tmp_path, what):
    async with bench(tmp_path, budget=0.2) as b:
        await b.come()
        b.engine.held = {0: 500}
        if what == "restore":
            await b.go()

        async def hang(limit):
            await asyncio.Event().wait()

        b.engine.deals = {what: hang}
        began = asyncio.get_running_loop().time()
        await (b.come() if what == "restore" else b.go())
        assert asyncio.get_running_loop().time() - began < 1.0
        assert sum(b.book.counts.failures.values()) == 1


@pytest.mark.parametrize("what", ["slots", "save", "restore"])
@run_async
async def test_an_error_nobody_thought_of_does_not_reach_whoever_swaps(tmp_path, what):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held = {0: 500}
        if what == "restore":
            await b.go()

        async def fail(limit):
            raise ZeroDivisionError

        b.engine.deals = {what: fail}
        await (b.come() if what == "restore" else b.go())
        assert sum(b.book.counts.failures.values()) == 1


@pytest.mark.parametrize("spoil", [lambda f: os.truncate(f, 5), lambda f: f.write_bytes(b"x" * f.stat().st_size)])
@run_async
async def test_a_file_that_is_not_what_was_saved_is_not_offered(tmp_path, spoil):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held = {0: 500}
        await b.go()
        spoil(b.files[0])
        await b.come()
        assert not b.engine.asked
        assert not b.files
        assert b.book.counts.failures == {"corrupt": 1}


@pytest.mark.parametrize("change", ["facts", "build"])
@run_async
async def test_what_another_engine_saved_is_not_offered_and_said_by_name(tmp_path, change):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held = {0: 500}
        await b.go()
        if change == "facts":
            b.facts["KV type K"] = "q8_0"
        else:
            b.engine.name = "b2"
        await b.come()
        assert not b.engine.asked
        assert not b.files
        assert b.book.counts.failures == {"stale": 1}
        assert ("KV type K" if change == "facts" else "engine") in b.told[-1][1]["reason"]


@pytest.mark.parametrize(
    ("deal", "kind", "kept"),
    [
        (Moved(problem="answered 400: no"), "restore", 0),
        (Moved(problem="the connection broke", lost=True), "restore", 1),
        (Moved(problem="no answer", late=True), "restore_late", 2),
        (Moved(3, 600), "restore", 0),  # fewer tokens than were saved
    ],
)
@run_async
async def test_a_file_that_was_refused_is_not_tried_twice_but_one_that_was_late_is(tmp_path, deal, kind, kept):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held = {0: 500, 1: 900}
        await b.go()
        b.engine.deals = {"restore": deal}
        await b.come()
        assert b.book.counts.failures == {kind: 2 - kept or 1}
        assert len(b.files) == kept


@run_async
async def test_a_connection_that_broke_over_a_restore_is_told_to_whoever_admits(tmp_path):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held = {0: 500, 1: 900}
        await b.go()
        b.engine.deals = {"restore": Moved(problem="the connection broke", lost=True)}
        await b.keeper.starting()
        assert not await b.keeper.ready()
        assert await b.keeper.ready(restore=False)
        assert not b.book.awaited


@run_async
async def test_an_engine_that_was_never_ready_is_not_asked_for_anything(tmp_path):
    async with bench(tmp_path) as b:
        await b.keeper.starting()
        await b.go()
        assert not b.engine.asked
        assert not b.book.counts.failures


@run_async
async def test_an_engine_with_nothing_worth_saving_is_asked_one_question(tmp_path):
    async with bench(tmp_path) as b:
        questions = []

        async def count(limit):
            questions.append(limit)

        b.engine.build = None
        b.engine.prefill = None
        b.engine.deals = {"slots": count}
        await b.come()
        b.engine.held = {0: 50}
        await b.go()
        assert len(questions) == 1
        assert not b.book.counts.failures


@run_async
async def test_a_gate_that_was_started_again_saves_the_engine_it_found(tmp_path):
    async with bench(tmp_path) as b:
        await b.come()
    async with bench(tmp_path) as b:
        await b.keeper.adopted()
        b.engine.held = {0: 500}
        await b.go()
        await b.come()
        assert b.engine.held == {0: 500}


@run_async
async def test_an_adopted_engine_of_which_nothing_was_noted_is_left_alone(tmp_path):
    async with bench(tmp_path) as b:
        await b.keeper.adopted()
        b.engine.held = {0: 500}
        await b.go()
        assert not b.files


@run_async
async def test_the_first_answer_proves_the_restore_and_what_it_saved(tmp_path):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held, b.engine.told = {0: 1000}, Prefill(1000, 10.0, 0)
        await b.go()
        await b.come()
        b.engine.told = Prefill(20, 0.2, 990)
        b.book.answered("p")
        await b.idle()
        kind, fields = b.told[-1]
        assert kind == "context_reused"
        assert fields["tokens"] == 990
        assert fields["seconds_saved"] == pytest.approx(9.9, abs=0.2)
        assert b.book.counts.tokens_reused == 990
        assert not b.book.awaited


@run_async
async def test_a_preset_whose_restores_do_nothing_stops_trying_and_says_so(tmp_path):
    async with bench(tmp_path) as b:
        for _ in range(4):
            await b.come()
            b.engine.held, b.engine.told = {0: 1000}, Prefill(1000, 10.0, 0)
            b.book.answered("p")
            await b.idle()
            await b.go()
        assert b.kinds().count("context_useless") == 1
        assert not b.files
        saved = b.kinds().count("context_saved")
        await b.come()
        b.engine.held = {0: 1000}
        await b.go()
        assert b.kinds().count("context_saved") == saved
        b.facts["SWA"] = "swa-full"  # another setting is another chance
        await b.come()
        b.engine.held = {0: 1000}
        await b.go()
        assert b.kinds()[-1] == "context_saved"


@run_async
async def test_a_short_prompt_of_its_own_is_no_proof_against_a_restore(tmp_path):
    async with bench(tmp_path) as b:
        for _ in range(5):
            await b.come()
            b.engine.held, b.engine.told = {0: 1000}, Prefill(300, 3.0, 5)
            b.book.answered("p")
            await b.idle()
            await b.go()
        assert "context_useless" not in b.kinds()


@run_async
async def test_what_was_lost_is_a_number_of_seconds_for_the_scheduler(tmp_path):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held, b.engine.told = {0: 1000}, Prefill(1000, 10.0, 0)
        b.engine.deals = {"save": Moved(problem="answered 500")}
        await b.go()
        await b.come()
        assert b.keeper.refill_s == pytest.approx(10.0)
        assert b.kinds() == ["context_lost"]


@run_async
async def test_no_room_is_said_and_nothing_is_written(tmp_path, monkeypatch):
    async with bench(tmp_path) as b:
        await b.come()
        b.engine.held = {0: 500}
        monkeypatch.setattr(b.book.store, "has_room", lambda size: False)
        await b.go()
        assert not b.files
        assert b.book.counts.failures == {"save": 1}


@run_async
async def test_files_that_clients_had_the_engine_write_do_not_stay(tmp_path):
    async with bench(tmp_path) as b:
        await b.come()
        (b.shelf.folder / "mine.bin").write_bytes(b"x")
        await b.go()
        assert not (b.shelf.folder / "mine.bin").exists()
