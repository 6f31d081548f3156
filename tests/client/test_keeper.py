"""The keeper's decisions, call by call, with the time as an argument."""

from __future__ import annotations

import pytest

from gpu_turnstile.client import (
    BadRequest,
    Granted,
    Locked,
    NotHeld,
    Owner,
    Queued,
    StaleLock,
    Unavailable,
    Unreachable,
    wire,
)
from gpu_turnstile.client.keeper import HEAD_POLL, RETRY, Keeper

DOWN = Unreachable("no gate")


def granted(token: int = 1, ttl: float = 30.0) -> Granted:
    return Granted("a", "me", token, ttl, ttl, False, (), (), None, {})


def queued(position: int = 2, retry: float = 10.0, *holders: str) -> Queued:
    owners = tuple(Owner(name, 9.0, 9.0, 1.0) for name in holders)
    return Queued("a", "me", position, retry, owners, (), None, {"preset": "b"})


def held(**more) -> Keeper:
    keeper = Keeper("a", "me", **more)
    keeper.ask(0.0)
    assert keeper.asked(granted(), 0.0, 0.1) is None
    return keeper


def test_a_waiter_asks_again_as_the_gate_says_and_the_head_sooner():
    keeper = Keeper("a", "me", wait=True)
    assert keeper.ask(0.0).body == {"lock": "a", "owner": "me", "wait": True}
    assert keeper.asked(queued(2), 0.0, 0.0) == 10.0
    assert keeper.asked(queued(1), 10.0, 10.0) == HEAD_POLL
    assert keeper.asked(granted(), 12.0, 12.0) is None
    assert keeper.queued is None


def test_a_gate_that_restarts_keeps_nobody_from_waiting_on():
    keeper = Keeper("a", "me", wait=True)
    keeper.ask(0.0)
    keeper.asked(queued(), 0.0, 0.0)
    for outage in (DOWN, Unavailable("shutting down", status=503)):
        assert keeper.asked(outage, 1.0, 1.0) == RETRY
        assert keeper.trouble is outage


def test_a_gate_that_was_never_there_is_told_at_once():
    keeper = Keeper("a", "me", wait=True)
    keeper.ask(0.0)
    with pytest.raises(Unreachable):
        keeper.asked(DOWN, 0.0, 0.0)
    assert keeper.nothing_left(DOWN)


def test_waiting_ends_when_its_seconds_are_over_with_who_holds_it():
    keeper = Keeper("a", "me", wait=5.0)
    keeper.ask(0.0)
    assert keeper.asked(queued(2, 10.0, "you"), 0.0, 0.0) == 5.0
    with pytest.raises(Locked, match=r"not free within 5 s.*position 2") as told:
        keeper.asked(queued(2, 10.0, "you"), 5.0, 5.0)
    assert [o.owner for o in told.value.owners] == ["you"]
    assert keeper.farewell().body == {"lock": False, "owner": "me"}


def test_the_heartbeat_is_a_third_of_the_ttl_and_names_its_token():
    keeper = held()
    assert keeper.beat_every == 10.0
    assert keeper.beat().body == {"renew": True, "owner": "me", "token": 1}
    assert keeper.beaten(granted(), 10.0, 10.1) == 10.0
    assert keeper.expires_in(20.0) == 20.0


def test_silence_of_the_gate_never_makes_a_lock_lost():
    keeper = held()
    for moment in (10.0, 100.0, 10_000.0):
        assert keeper.beaten(DOWN, moment, moment) == RETRY
    assert keeper.lost is None
    assert keeper.beaten(granted(), 10_001.0, 10_001.0) == 10.0


@pytest.mark.parametrize("word", [StaleLock("gone"), NotHeld("gone")], ids=str)
def test_the_gates_word_does(word):
    keeper = held()
    assert keeper.beaten(word, 10.0, 10.0) is None
    assert keeper.lost is word
    assert keeper.expires_in(10.0) == 0.0
    assert keeper.farewell() is None


def test_a_gate_that_refuses_renewals_for_a_whole_ttl_has_taken_it():
    keeper = held()
    no = BadRequest("the key is wrong", status=401)
    assert keeper.beaten(no, 10.0, 10.0) == RETRY
    assert keeper.beaten(no, 30.0, 30.0) is None
    assert keeper.lost is no


def test_after_a_loss_it_queues_again_if_asked():
    keeper = held(requeue=True)
    assert keeper.beaten(StaleLock("gone"), 10.0, 10.0) == 0.0
    assert keeper.beat().body == {"lock": "a", "owner": "me", "wait": True}
    assert keeper.beaten(queued(3), 10.0, 10.0) == 10.0
    assert keeper.farewell().body == {"lock": False, "owner": "me"}
    assert keeper.beaten(granted(7), 20.0, 20.0) == 10.0
    assert (keeper.lost, keeper.token) == (None, 7)
    assert keeper.farewell().body == {"lock": False, "owner": "me", "token": 7}


def test_leaving_the_queue_does_not_end_another_hold_of_the_same_owner():
    keeper = Keeper("a", "me", wait=True)
    keeper.ask(0.0)
    keeper.asked(queued(1, 10.0, "me"), 0.0, 0.0)
    assert keeper.farewell().body == {"lock": False, "owner": "me", "leave": True}


def test_a_call_whose_answer_never_came_is_taken_back():
    keeper = Keeper("a", "me")
    keeper.ask(0.0)
    broken = Unreachable("broke off")
    broken.sent = True
    assert not keeper.nothing_left(broken)
    assert not keeper.nothing_left(KeyboardInterrupt())
    assert keeper.nothing_left(Locked("no"))
    assert keeper.farewell().body == {"lock": False, "owner": "me"}


def test_a_name_that_no_header_can_carry_is_made_one_that_it_can():
    assert wire.label("größe\n" + "x" * 200) == "gr??e?" + "x" * 94
