"""The lock book by hand: every row of the document's table, every rule, every incident that changed the lock."""

from __future__ import annotations

import json

import pytest

from gpu_turnstile.core import locks
from gpu_turnstile.core.locks import (
    Cause,
    Denied,
    Granted,
    LockBook,
    Missing,
    Policed,
    Queued,
    Refused,
    Stale,
    Unlocked,
    Why,
)

TTL = 900.0
MINUTE = 60.0


@pytest.fixture
def book() -> LockBook:
    return LockBook()


def held(book: LockBook, *owners: str, preset: str = "a", now: float = 0.0) -> LockBook:
    for owner in owners:
        assert isinstance(book.lock(preset, owner, TTL, now), Granted)
    return book


def names(rows) -> list[str]:
    return [row.owner for row in rows]


# -------------------------------------------------------------------------------------- the document's table


def test_an_uncontended_lock_is_granted_with_owners_and_expiry(book):
    said = book.lock("a", "me", TTL, 0.0)
    assert isinstance(said, Granted)
    assert (said.preset, said.owner, said.token, said.expires_in, said.fresh, said.joined) == (
        ("a", "me", 1, TTL, True, False)
    )
    assert [(o.owner, o.expires_in) for o in said.standing.owners] == [("me", TTL)]


def test_a_contended_lock_is_refused_with_owners_and_queue(book):
    held(book, "me")
    book.lock("b", "third", TTL, 0.0, wait=True)
    said = book.lock("b", "you", TTL, 840.0)
    assert isinstance(said, Refused)
    assert (said.why, said.retry_after) == (Why.HELD, 60.0)
    assert (names(said.standing.owners), names(said.standing.queue)) == (["me"], ["third"])
    assert "held on 'a' by me (for 60 s)" in said.message
    assert book.preset == "a"


def test_a_contended_lock_that_waits_is_queued_with_its_position(book):
    held(book, "me")
    first = book.lock("b", "you", TTL, 0.0, wait=True)
    second = book.lock("c", "third", TTL, 0.0, wait=True)
    assert isinstance(first, Queued)
    assert isinstance(second, Queued)
    assert (first.position, second.position) == (1, 2)


def test_renew_extends_a_holder_and_a_waiter(book):
    held(book, "me")
    book.lock("b", "you", TTL, 0.0, wait=True)
    mine, yours = book.renew("me", None, 800.0), book.renew("you", None, 800.0)
    assert isinstance(mine, Granted)
    assert (mine.fresh, mine.expires_in, mine.token) == (False, TTL, 1)
    assert isinstance(yours, Queued)
    assert book.lapse(1699.0) == ()
    assert [e.owner for e in book.lapse(1700.0)] == ["you", "me"]


def test_renew_of_somebody_unknown_says_so(book):
    assert isinstance(book.renew("me", None, 0.0), Missing)


def test_unlock_of_one_owner_releases_it_and_drops_its_queue_entry(book):
    held(book, "me", "you")
    book.lock("b", "me", TTL, 0.0, wait=True)
    said = book.unlock("me", 1.0)
    assert isinstance(said, Unlocked)
    assert (said.owners, said.waiters, said.cut) == (("me",), ("me",), ())
    assert (book.preset, book.owners) == ("a", ("you",))


def test_unlock_all_clears_every_owner_and_leaves_the_queue(book):
    held(book, "me", "you")
    book.lock("b", "third", TTL, 0.0, wait=True)
    said = book.unlock_all(1.0, caller="me")
    assert isinstance(said, Unlocked)
    assert (said.owners, names(said.cut)) == (("me", "you"), ["you"])
    assert (book.preset, book.entitled) == (None, "third")


def test_unlocking_what_nobody_holds_is_no_error(book):
    assert isinstance(book.unlock(None, 0.0), Unlocked)
    assert isinstance(book.unlock("me", 0.0), Unlocked)


# ------------------------------------------------------------------------------------------------- the rules


@pytest.mark.parametrize("wait", [False, True])
def test_2026_08_17_a_lock_for_another_preset_never_takes_the_card(book, wait):
    held(book, "loop")
    said = book.lock("b", "intruder", TTL, 10.0, wait=wait)
    assert isinstance(said, Queued if wait else Refused)
    assert (book.preset, book.owners) == ("a", ("loop",))
    assert book.admit(("a",), 10.0, owner="loop", token=1) is None


def test_only_the_head_takes_a_free_lock_and_the_others_are_told_whose_turn_it_is(book):
    held(book, "me")
    book.lock("b", "first", TTL, 0.0, wait=True)
    book.lock("b", "second", TTL, 0.0, wait=True)
    book.unlock("me", 1.0)
    stranger, second = book.lock("c", "stranger", TTL, 2.0), book.lock("b", "second", TTL, 2.0, wait=True)
    assert isinstance(stranger, Refused)
    assert (stranger.why, stranger.standing.entitled) == (Why.NOT_YOUR_TURN, "first")
    assert isinstance(second, Queued)
    assert second.position == 2
    assert isinstance(book.lock("b", "first", TTL, 3.0), Granted)
    assert isinstance(book.lock("b", "second", TTL, 4.0, wait=True), Granted), "joining what is held now is free"
    assert not book.standing(4.0).queue


def test_the_head_takes_only_the_preset_it_queued_for(book):
    held(book, "me")
    book.lock("b", "first", TTL, 0.0, wait=True)
    book.lock("b", "second", TTL, 0.0, wait=True)
    book.unlock("me", 1.0)
    said = book.lock("c", "first", TTL, 2.0)
    assert isinstance(said, Refused)
    assert said.why is Why.OTHER_PRESET
    said = book.lock("c", "first", TTL, 2.0, wait=True)
    assert isinstance(said, Queued)
    assert said.position == 2, "another wish goes to the end"
    assert book.entitled == "second"


def test_joining_a_held_preset_is_never_gated_not_even_by_a_queue(book):
    held(book, "me")
    book.lock("b", "waiter", TTL, 0.0, wait=True)
    said = book.lock("a", "late", TTL, 1.0)
    assert isinstance(said, Granted)
    assert said.joined
    assert names(said.standing.owners) == ["me", "late"]


def test_a_waiter_that_asks_again_keeps_its_place_and_has_only_one(book):
    held(book, "me")
    for owner in ("x", "y", "x", "x"):
        book.lock("b", owner, TTL, 0.0, wait=True)
    assert names(book.standing(0.0).queue) == ["x", "y"]


def test_a_waiter_that_asks_for_another_preset_without_waiting_keeps_its_place(book):
    held(book, "me")
    book.lock("b", "x", TTL, 0.0, wait=True)
    assert isinstance(book.lock("c", "x", TTL, 0.0), Refused)
    assert [(w.owner, w.preset) for w in book.standing(0.0).queue] == [("x", "b")]


def test_a_waiter_that_went_silent_is_pruned_and_the_next_is_head(book):
    held(book, "me")
    book.lock("b", "dead", TTL, 0.0, wait=True)
    book.lock("c", "alive", TTL, 500.0, wait=True)
    book.renew("me", None, 500.0)
    [gone] = book.lapse(900.0)
    assert (gone.owner, gone.token, gone.cause) == ("dead", 0, Cause.SILENT)
    book.unlock("me", 901.0)
    assert isinstance(book.lock("c", "alive", TTL, 902.0), Granted)


def test_a_place_never_lives_longer_than_the_default_ttl_but_its_lock_does(book):
    held(book, "me")
    book.lock("b", "x", locks.MAX_TTL, 0.0, wait=True)
    [waiter] = book.standing(0.0).queue
    assert waiter.expires_in == TTL
    book.unlock("me", 1.0)
    said = book.renew("x", None, 2.0)
    assert isinstance(said, Granted), "a heartbeat is a call, too: the head takes its turn with it"
    assert said.ttl == locks.MAX_TTL


def test_the_swap_is_lazy_the_heads_first_request_takes_the_lock(book):
    held(book, "me")
    book.lock("b", "head", TTL, 0.0, wait=True)
    book.unlock("me", 1.0)
    assert book.admit(("c",), 2.0) is None, "the lock is free: requests of others run as without one"
    assert book.admit(("b",), 2.0) is None, "nobody said that this is the head's"
    assert book.admit(("c",), 2.0, owner="head") is None
    said = book.admit(("b",), 3.0, owner="head")
    assert isinstance(said, Granted)
    assert (said.token, book.preset) == (2, "b")
    assert isinstance(book.admit(("c",), 4.0), Policed)


def test_requests_for_other_presets_are_refused_with_owners_and_expiry(book):
    held(book, "me", "you")
    said = book.admit(("b", "c"), 840.0)
    assert isinstance(said, Policed)
    assert said.message == "'b' cannot run now: the card's lock is held on 'a' by me (for 60 s), you (for 60 s)"
    assert said.retry_after == 60.0
    assert book.admit(("b", "a"), 840.0) is None, "an alias that the pinned preset serves as well"
    assert isinstance(book.admit(("b",), 840.0, owner="me", token=1), Policed), "also to an owner"


def test_a_free_book_polices_nobody(book):
    assert not book
    assert book.admit(("b",), 0.0) is None
    assert book.next_moment is None


def test_an_owner_may_queue_for_another_preset_and_changes_over_when_it_is_alone(book):
    held(book, "me", "you")
    refused = book.lock("b", "me", TTL, 0.0)
    assert isinstance(refused, Refused)
    assert refused.why is Why.OWN_LOCK
    assert isinstance(book.lock("b", "me", TTL, 0.0, wait=True), Queued), "never over another owner's head"
    book.unlock("you", 1.0)
    said = book.lock("b", "me", TTL, 2.0, wait=True)
    assert isinstance(said, Granted)
    assert (said.moved_from, said.token, book.owners) == ("a", 3, ("me",))
    assert isinstance(book.check(1, "me", 2.0), Stale)


def test_asking_for_another_preset_does_not_keep_the_own_lock_alive(book):
    held(book, "me", "you")
    book.lock("b", "me", TTL, 800.0, wait=True)
    book.renew("you", None, 800.0)
    assert [e.owner for e in book.lapse(900.0)] == ["me"]


def test_an_owner_does_not_jump_the_queue_by_changing_over(book):
    held(book, "me")
    book.lock("c", "first", TTL, 0.0, wait=True)
    said = book.lock("b", "me", TTL, 0.0, wait=True)
    assert isinstance(said, Queued)
    assert said.position == 2
    assert book.preset == "a"


def test_nothing_is_without_a_bound(book):
    held(book, *(f"a{number}" for number in range(locks.MAX_OWNERS)))
    said = book.lock("a", "c", TTL, 0.0)
    assert isinstance(said, Refused)
    assert said.why is Why.FULL
    for number in range(locks.MAX_OWNERS):
        assert isinstance(book.lock("p", f"x{number}", TTL, 0.0, wait=True), Queued)
    said = book.lock("p", "z", TTL, 0.0, wait=True)
    assert isinstance(said, Refused)
    assert said.why is Why.FULL
    for number in range(locks.MAX_OWNERS):
        book.unlock(f"x{number}", 0.0)
    for number in range(200):
        book.break_glass(float(number), "again" * 1000)
        held(book, f"o{number}", now=float(number))
    assert len(book.view(200.0)["ended"]) == locks.REMEMBERED
    assert len(json.dumps(book.view(200.0))) < 64_000


# ------------------------------------------------------------------------------------------ time and silence


def test_2026_08_19_a_silent_leg_loses_its_lock_but_not_without_being_told(book):
    held(book, "leg")
    [lapsed] = book.lapse(30 * MINUTE)
    assert (lapsed.owner, lapsed.preset, lapsed.token, lapsed.cause) == ("leg", "a", 1, Cause.SILENT)
    assert lapsed.at == 15 * MINUTE, "when it ended, not when it was noticed"
    assert book.preset is None
    for said in (book.renew("leg", None, 31 * MINUTE), book.check(1, "leg", 31 * MINUTE)):
        assert isinstance(said, Missing | Stale)
        assert said.ended == lapsed
        assert "your lock on 'a' lapsed 16 min ago: nothing was heard of you for its TTL" in said.message
    again = book.lock("a", "leg", TTL, 32 * MINUTE)
    assert isinstance(again, Granted)
    assert (again.ended, again.token) == (lapsed, 2)
    assert book.ended("leg") is None, "told once with the lock it got back"


def test_2026_08_19_a_heartbeat_keeps_a_silent_leg_alive(book):
    held(book, "leg")
    for minute in range(10, 61, 10):
        assert book.lapse(minute * MINUTE) == ()
        assert isinstance(book.renew("leg", None, minute * MINUTE), Granted)
    assert book.preset == "a"


def test_2026_08_19_a_thirty_minute_think_with_an_open_stream_is_no_silence(book):
    held(book, "leg")
    book.touch("a", "leg", 0.0)  # the request begins
    for minute in (15, 25, 30):
        assert book.lapse(minute * MINUTE, book.busy(["leg"])) == ()
    book.touch("a", "leg", 30 * MINUTE)  # and ends: from here the TTL counts
    assert book.lapse(44 * MINUTE) == ()
    assert names(book.lapse(45 * MINUTE)) == ["leg"]


def test_work_that_does_not_say_whose_it_is_keeps_every_owner(book):
    held(book, "me", "you")
    assert book.busy([None]) == {"me", "you"}
    assert book.busy(["me"]) == {"me"}
    assert book.lapse(1000.0, book.busy(["me"]))[0].owner == "you"


def test_traffic_under_the_lock_refreshes_it(book):
    held(book, "me", "you")
    book.touch("a", None, 600.0)
    assert [o.expires_in for o in book.standing(600.0).owners] == [TTL, TTL]
    book.touch("a", "me", 800.0)
    assert [o.expires_in for o in book.standing(800.0).owners] == [TTL, 700.0]
    book.touch("a", "stranger", 900.0)
    book.touch("b", None, 900.0)
    assert [o.expires_in for o in book.standing(900.0).owners] == [800.0, 600.0]


def test_traffic_of_a_waiter_keeps_its_place(book):
    held(book, "me")
    book.lock("b", "x", TTL, 0.0, wait=True)
    book.touch("a", "x", 600.0)
    assert names(book.lapse(900.0)) == ["me"]
    assert book.entitled == "x"


def test_a_lapse_lets_the_next_one_in_and_nobody_else(book):
    held(book, "me")
    book.lock("b", "next", TTL, 500.0, wait=True)
    book.lapse(900.0)
    assert isinstance(book.lock("c", "other", TTL, 900.0), Refused)
    assert isinstance(book.lock("b", "next", TTL, 900.0), Granted)


def test_a_short_ttl_is_never_lost_while_it_is_renewed_and_free_right_after(book):
    book.lock("a", "step", 2.0, 0.0)
    for second in range(1, 11):
        assert book.lapse(float(second)) == ()
        book.renew("step", None, float(second))
    assert book.next_moment is not None
    assert book.next_moment <= 12.0
    assert [(e.owner, e.at) for e in book.lapse(12.0)] == [("step", 12.0)]


def test_the_book_says_when_something_happens_next(book):
    book.lock("a", "me", 100.0, 0.0)
    book.lock("b", "x", 50.0, 0.0, wait=True)
    assert book.next_moment == 50.0
    book.save(0.0)
    assert book.next_moment == 12.5, "the file wants to be written anew"


def test_a_longer_ttl_given_to_renew_stays_and_a_shorter_one_shortens(book):
    held(book, "me")
    book.renew("me", 3600.0, 0.0)
    book.touch("a", "me", 100.0)
    assert book.standing(100.0).owners[0].expires_in == 3600.0
    book.renew("me", 10.0, 100.0)
    assert names(book.lapse(110.0)) == ["me"]


@pytest.mark.parametrize(
    "silly",
    [1e9, -1, 0, 0.5, float("nan"), float("inf"), 10**400, "5", True, [], {}],
    ids=lambda value: str(value)[:8],
)
def test_silly_ttls_are_told_what_would_be_right(silly):
    with pytest.raises(ValueError, match="from 1 to 604800"):
        locks.check_ttl(silly)


def test_sensible_ttls_pass():
    assert [locks.check_ttl(v, 5.0) for v in (None, 1, 604800, 2.5)] == [5.0, 1.0, 604800.0, 2.5]


@pytest.mark.parametrize("silly", [None, "", "  ", 5, "x" * 201, "a\nb", "\x1b[31m"])
def test_an_owner_is_a_readable_name(silly):
    with pytest.raises(ValueError, match="printable"):
        locks.check_owner(silly)


# ------------------------------------------------------------------------------------------------- fencing


def test_every_new_hold_has_a_token_that_is_one_more(book):
    tokens = []
    for owner in ("a", "b"):
        held(book, owner)
        tokens.append(book.token)
    assert tokens == [1, 2], "joining is a new hold: who lapsed is found out although others hold on"
    book.unlock("a", 1.0)
    assert book.lock("a", "b", TTL, 1.0).token == 2, "refreshing is not"
    assert book.lock("a", "a", TTL, 1.0).token == 3


def test_a_stale_token_changes_nothing_and_the_new_holder_is_not_touched(book):
    held(book, "old")
    book.lapse(900.0)
    held(book, "new", preset="b", now=901.0)
    before = book.view(950.0)
    for said in (
        book.renew("old", None, 950.0, token=1),
        book.unlock("old", 950.0, token=1),
        book.unlock(None, 950.0, token=1),
        book.unlock("new", 950.0, token=1),
        book.lock("a", "old", TTL, 950.0, token=1),
        book.admit(("a",), 950.0, token=1),
        book.admit(("b",), 950.0, owner="old", token=1),
        book.check(1, None, 950.0),
    ):
        assert isinstance(said, Stale)
        assert said.standing.preset == "b"
    assert book.view(950.0) == before


def test_a_token_lapses_with_its_owner_although_others_hold_the_preset(book):
    held(book, "me", "you")
    book.renew("you", None, 500.0)
    book.lapse(900.0)
    assert isinstance(book.admit(("a",), 901.0, token=1), Stale)
    assert book.admit(("a",), 901.0, token=2) is None


def test_another_owners_token_is_no_good(book):
    held(book, "me", "you")
    assert isinstance(book.check(2, "me", 0.0), Stale)
    assert book.check(2, "you", 0.0) is None
    assert book.owner_of(2) == "you"


# ------------------------------------------------------------------------------------- taking locks away


def test_2026_09_08_a_bare_unlock_by_somebody_else_does_not_hand_the_card_away(book):
    held(book, "bench")
    for said in (book.unlock(None, 1.0), book.unlock(None, 1.0, caller="stranger")):
        assert isinstance(said, Denied)
        assert '"force": true' in said.message
    assert book.owners == ("bench",)


@pytest.mark.parametrize("how", [{"force": True}, {"open_unlock": True}])
def test_2026_09_08_what_is_taken_by_force_is_told_to_whom_it_was_taken_from(book, how):
    held(book, "bench")
    said = book.unlock(None, 1.0, caller="stranger", **how)
    assert isinstance(said, Unlocked)
    assert [(e.owner, e.cause, e.by) for e in said.cut] == [("bench", Cause.TAKEN, "stranger")]
    told = book.renew("bench", None, 61.0)
    assert isinstance(told, Missing)
    assert "your lock on 'a' ended 60 s ago: it was taken away by stranger" in told.message


def test_a_place_can_be_given_up_and_the_lock_kept(book):
    held(book, "me", "you")
    book.lock("b", "me", TTL, 0.0, wait=True)
    book.lock("b", "x", TTL, 0.0, wait=True)
    said = book.unlock("me", 1.0, leave=True)
    assert isinstance(said, Unlocked)
    assert (said.owners, said.waiters, said.cut) == ((), ("me",), ())
    assert (book.owners, [w.owner for w in book.standing(1.0).queue]) == (("me", "you"), ["x"])
    assert isinstance(book.unlock("x", 1.0, caller="stranger", leave=True), Unlocked), "nobody is known to be x"
    assert book.owners == ("me", "you")


def test_a_waiter_hears_its_position_as_news_only_when_it_is(book):
    held(book, "me")
    said = [book.lock("b", owner, TTL, 0.0, wait=True) for owner in "xyxy"]
    assert [(s.position, s.news) for s in said] == [(1, True), (2, True), (1, False), (2, False)]
    book.unlock("x", 1.0)
    said = [book.renew("y", None, now) for now in (2.0, 3.0)]
    assert [(s.position, s.news) for s in said] == [(1, True), (1, False)]


def test_a_refusal_under_the_lock_also_says_that_ones_own_has_lapsed(book):
    held(book, "me")
    book.lapse(TTL)
    book.lock("b", "you", TTL, TTL + 1)
    said = book.admit(("a",), TTL + 2, owner="me")
    assert isinstance(said, Policed)
    assert "your lock on 'a' lapsed 2 s ago" in said.message
    assert "your lock" not in book.admit(("a",), TTL + 2, owner="stranger").message


def test_an_owner_may_end_all_and_so_may_its_client_and_its_token(book):
    for who in ({"caller": "me"}, {"caller": "key"}, {"token": None}):
        book.lock("a", "me", TTL, 0.0, client="key")
        held(book, "you")
        if "token" in who:
            who["token"] = book.token
        assert isinstance(book.unlock(None, 1.0, **who), Unlocked)
        assert book.preset is None


def test_naming_an_owner_is_being_it_unless_the_caller_is_known_to_be_another(book):
    book.lock("a", "me", TTL, 0.0, client="key-1")
    assert isinstance(book.unlock("me", 1.0, caller="key-2"), Denied)
    assert isinstance(book.unlock("me", 1.0, caller="key-1"), Unlocked)
    book.lock("a", "me", TTL, 0.0, client="key-1")
    assert isinstance(book.unlock("me", 1.0), Unlocked), "the document's row, with plain curl"
    held(book, "me")
    assert isinstance(book.unlock("me", 1.0, caller="key-2"), Unlocked), "nobody knows who took it"


def test_who_only_waits_is_no_owner(book):
    held(book, "me")
    book.lock("b", "x", TTL, 0.0, wait=True, client="key")
    assert isinstance(book.unlock(None, 1.0, caller="x"), Denied)
    assert isinstance(book.unlock(None, 1.0, caller="key"), Denied)


def test_broken_glass_ends_every_hold_with_its_reason_and_leaves_the_queue(book):
    held(book, "me", "you")
    book.lock("b", "x", TTL, 0.0, wait=True)
    said = book.break_glass(1.0, "ann (the card is stuck)")
    assert names(said.cut) == ["me", "you"]
    assert book.entitled == "x"
    told = book.check(1, "me", 2.0)
    assert told is not None
    assert "was broken by ann (the card is stuck)" in told.message


def test_a_removed_preset_ends_its_lock_and_its_places(book):
    held(book, "me")
    book.lock("b", "x", TTL, 0.0, wait=True)
    book.lock("c", "y", TTL, 0.0, wait=True)
    assert {e.owner for e in book.keep_presets(["c"], 1.0)} == {"me", "x"}
    assert (book.preset, book.entitled) == (None, "y")


# ---------------------------------------------------------------------------------------------- swap wars


def test_2026_09_18_a_probe_that_holds_the_lock_is_not_disturbed_by_a_strangers_requests(book):
    held(book, "probe")
    for second in range(600):
        assert book.lapse(float(second)) == ()
        assert isinstance(book.admit(("b",), float(second), owner="stranger"), Policed)
        assert book.admit(("a",), float(second), owner="probe", token=1) is None
        book.touch("a", "probe", float(second))
    assert book.owners == ("probe",)


def test_2026_09_19_a_loop_and_a_session_on_different_presets_change_the_card_once(book):
    """13 minutes in which both ask every few seconds: one holds it, the other has it afterwards."""
    held(book, "loop")
    card, changes = "a", 0
    for second in range(0, 13 * 60, 5):
        now = float(second)
        book.lapse(now)
        if second == 600:
            book.unlock("loop", now)
        book.lock("b", "session", TTL, now, wait=True)
        for owner, want in (("loop", "a"), ("session", "b")):
            if book and book.allows((want,)) and book.admit((want,), now, owner=owner) is None:
                changes += card != want
                card = want
                book.touch(want, owner, now)
    assert (card, changes) == ("b", 1)


# --------------------------------------------------------------------------------------------- restarts


def busy_book() -> LockBook:
    book = held(LockBook(), "me", "you")
    book.lock("b", "x", 60.0, 10.0, wait=True, client="key")
    book.lock("c", "y", TTL, 10.0, wait=True)
    book.lock("a", "gone", 5.0, 10.0)
    book.lapse(20.0)
    return book


@pytest.mark.parametrize("clock", [0.0, 20.0, 1e6])
def test_a_restart_or_another_clock_neither_frees_nor_prolongs_a_lock(clock):
    book = busy_book()
    again, odd = LockBook.recover(json.loads(json.dumps(book.view(20.0))), clock)
    assert odd == ()
    there, here = again.standing(clock), book.standing(20.0)
    assert (there.preset, there.owners, there.queue) == (here.preset, here.owners, here.queue)
    assert again.view(clock) == book.view(20.0)
    assert again.lock("a", "new", TTL, clock).token == book.token + 1
    assert [e.owner for e in again.lapse(clock + 50.0)] == ["x"]


def test_a_token_is_never_given_again_also_after_a_restart_with_no_lock():
    book = held(LockBook(), "me")
    book.unlock("me", 1.0)
    again, _ = LockBook.recover(book.view(1.0), 0.0)
    assert held(again, "you").token == 2


def test_who_lost_its_lock_is_told_also_after_a_restart():
    again, _ = LockBook.recover(busy_book().view(20.0), 1000.0)
    told = again.check(3, "gone", 1000.0)
    assert told is not None
    assert told.ended is not None
    assert (told.ended.token, told.ended.at) == (3, 995.0)


def test_who_worked_when_the_gate_went_has_its_whole_ttl():
    book = held(LockBook(), "me")
    again, _ = LockBook.recover(book.view(890.0, busy={"me"}), 0.0)
    assert again.standing(0.0).owners[0].expires_in == TTL


def test_a_refresh_by_traffic_is_saved_when_it_would_be_missed(book):
    held(book, "me")
    assert book.dirty(0.0)
    book.save(0.0)
    book.touch("a", None, 20.0)
    assert not book.dirty(20.0)
    assert book.dirty(30.0), "the file must not prolong it"
    book.save(880.0)
    book.touch("a", None, 880.0)
    assert book.dirty(880.0), "the file must not free it"


def row(**changed):
    return {"token": 1, "left": 5.0, "ttl": 9.0, "held": 0.0, "client": "", **changed}


def place(**changed):
    return {"owner": "x", "preset": "b", "left": 5.0, "ttl": 9.0, "waited": 0.0, "client": "", **changed}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        5.0,
        row(token="1"),
        row(token=True),
        row(token=0),
        row(left="5"),
        row(left=float("nan")),
        row(left=10**400),
        row(ttl=-1),
        row(ttl=1e9),
        row(ttl=None),
        row(held="x"),
    ],
    ids=str,
)
def test_a_broken_owner_is_left_out_and_reported(entry):
    view = {"token": 7, "preset": "a", "owners": {"bad": entry, "good": row(token=2)}}
    book, odd = LockBook.recover(view, 0.0)
    assert book.owners == ("good",)
    assert odd == ("the lock's owner 'bad' makes no sense",)
    assert (book.token, book.dirty(0.0)) == (7, True)


@pytest.mark.parametrize("entry", [place(owner=5), place(preset=None), place(left=None), place(owner="y")], ids=str)
def test_a_broken_or_doubled_place_is_left_out_and_reported(entry):
    book, odd = LockBook.recover({"queue": [place(owner="y"), entry, place(owner="z")]}, 0.0)
    assert names(book.standing(0.0).queue) == ["y", "z"]
    assert len(odd) == 1


@pytest.mark.parametrize(
    "view",
    [
        None,
        [],
        "x",
        {"owners": []},
        {"owners": {"me": row()}},
        {"preset": 5, "owners": {"me": row()}},
        {"queue": {}},
        {"queue": [1]},
        {"ended": [{"owner": "x", "preset": "a", "ago": 1, "cause": []}]},
        {"token": "9"},
        {"token": -1},
    ],
    ids=str,
)
def test_a_file_that_makes_no_sense_is_reported_and_not_fatal(view):
    book, odd = LockBook.recover(view, 0.0)
    assert len(odd) == 1
    assert not book


def test_unknown_and_missing_keys_do_no_harm():
    view = {"preset": "a", "owners": {"me": {"token": 4, "left": 5, "ttl": 9, "colour": "red"}}, "later": 1}
    book, odd = LockBook.recover(view, 0.0)
    assert (odd, book.owners, book.token) == ((), ("me",), 4)
    assert LockBook.recover({}, 0.0) == (LockBook(), ())
    assert LockBook().view(0.0) == {}


def test_two_owners_with_one_token_are_not_both_believed():
    book, odd = LockBook.recover({"preset": "a", "owners": {"x": row(), "y": row()}}, 0.0)
    assert (book.owners, len(odd)) == (("x",), 1)


def test_a_hand_that_wrote_more_time_than_the_ttl_gets_the_ttl():
    book, _ = LockBook.recover({"preset": "a", "owners": {"x": row(left=1e6)}, "queue": [place(left=1e6)]}, 0.0)
    assert [o.expires_in for o in book.standing(0.0).owners] == [9.0]
    assert [w.expires_in for w in book.standing(0.0).queue] == [9.0]


# ---------------------------------------------------------------------------------------- when to come back


@pytest.mark.parametrize(("left", "retry"), [(0.2, 1.0), (30.0, 30.0), (800.0, 60.0)])
def test_the_time_to_come_back_follows_the_lock_and_is_capped(book, left, retry):
    held(book, "me")
    said = book.lock("b", "you", TTL, TTL - left)
    assert said.retry_after == pytest.approx(retry)
    assert book.police(("b",), TTL - left).retry_after == pytest.approx(retry)


def test_a_waiter_is_told_to_ask_before_its_place_goes_stale(book):
    held(book, "me")
    assert book.lock("b", "slow", TTL, 0.0, wait=True).retry_after == 10.0
    assert book.lock("b", "fast", 6.0, 0.0, wait=True).retry_after == 2.0
