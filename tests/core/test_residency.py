"""Turns that are worth their swap: one script for each rule. Times in seconds; a swap here takes 8 and a refill 60."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_turnstile.core.habits import LIMIT, LONGEST, Habits
from gpu_turnstile.core.locks import Granted
from gpu_turnstile.core.model import (
    Cancel,
    Code,
    Grant,
    Lock,
    Mode,
    Phase,
    PresetsChanged,
    Refuse,
    Release,
    SetMode,
    StartSwap,
    StartUnload,
    SwapSucceeded,
    Tenant,
)
from gpu_turnstile.core.policy import Order, Rules
from tests.core.playbook import COMFY, OLLAMA, A, B, C, Playbook, req

RULES = Rules(share=1.0, linger=0.25, max_wait=150.0)


def brought(*others, rules=RULES, refill=60.0, **more) -> Playbook:
    """A came in within 8 s and serves ticket 1; its turn is 60 s of reading again and 68 s of work: until 136."""
    p = Playbook(A, *others, rules=rules, **more)
    p.do(req(1, "a", client="ann")).see(StartSwap(1, "a"))
    p.at(8).do(SwapSucceeded(1, refill)).see(Grant(1, "a"))
    return p


# --------------------------------------------------------------------------------------------------- turns


def test_who_was_expensive_to_bring_in_serves_its_own_while_another_waits_and_drains_when_its_turn_is_over():
    p = brought(B)
    p.at(20).do(req(2, "b")).see()
    assert p.view.phase is Phase.SERVING
    p.at(70).do(req(3, "a")).see(Grant(3, "a"))
    p.at(135.9).do(req(4, "a")).see(Grant(4, "a"))
    p.at(136).see().note("drain", target="b")
    p.do(req(5, "a")).see()
    p.do(Release(1)).see().do(Release(3)).see()
    p.do(Release(4)).see(StartSwap(2, "b", ("a",)))


def test_people_see_for_whom_the_card_is_kept_and_until_when():
    p = brought(B)
    assert p.view.kept is None
    p.at(20).do(req(2, "b")).see()
    kept = p.view.kept
    assert (kept.tenant, kept.until, kept.cost, kept.idle) == ("a", 136.0, 68.0, False)


def test_a_cheap_swap_buys_a_short_turn():
    p = brought(B, refill=0.0)
    p.at(10).do(req(2, "b")).see()
    p.at(16).see().note("drain", target="b")


def test_a_turn_with_nothing_to_do_is_over():
    p = brought(B)
    p.at(20).do(req(2, "b")).see()
    p.at(30).do(Release(1)).see(StartSwap(2, "b", ("a",)))


def test_arrival_knows_no_turns():
    p = brought(B, rules=replace(RULES, order=Order.ARRIVAL))
    p.at(20).do(req(2, "b")).see().note("drain", target="b")
    p.do(req(3, "a")).see()
    p.do(Release(1)).see(StartSwap(2, "b", ("a",)))


def test_whoever_waited_as_long_as_allowed_ends_the_turn_with_the_time_of_the_swap_counted_in():
    """B was there before: bringing it in took 5 s, so its turn to come begins 5 s before the bound."""
    p = Playbook(A, B, rules=replace(RULES, share=10.0))
    p.do(req(1, "b")).see(StartSwap(1, "b"))
    p.at(5).do(SwapSucceeded(1)).see(Grant(1, "b")).do(Release(1)).see()
    p.do(req(2, "a")).see(StartSwap(2, "a", ("b",)))
    p.at(13).do(SwapSucceeded(2, 60.0)).see(Grant(2, "a"))
    p.at(20).do(req(3, "b")).see()
    p.at(164.9).do(req(4, "a")).see(Grant(4, "a"))
    p.at(165).see().note("drain", target="b")


def test_nobody_drains_a_newcomer_before_it_has_read_its_contexts_again_whatever_they_waited():
    """Else two agents with long prompts and a short drain grace cut each other for ever."""
    p = brought(B, C, rules=replace(RULES, max_wait=100.0))
    p.at(10).do(req(2, "b")).see()
    p.at(110).see().note("drain", target="b")
    p.at(110).do(req(3, "a")).see().do(req(4, "c")).see()
    p.do(Release(1)).see(StartSwap(2, "b", ("a",)))
    p.at(300).do(SwapSucceeded(2, 60.0)).see(Grant(2, "b"))
    p.at(359.9).see()
    assert p.view.phase is Phase.SERVING
    p.at(360).see()
    assert (p.view.phase, p.view.target) == (Phase.DRAINING, "a")


def test_what_is_told_to_be_lost_holds_nobody_up_for_longer_than_a_wait():
    p = brought(B, refill=1_000_000.0)
    p.at(9).do(req(2, "b")).see()
    p.at(159).see().note("drain", target="b")


def test_a_client_that_leaves_ends_the_wait_for_the_turn():
    p = brought(B)
    p.at(20).do(req(2, "b")).see().do(Cancel(2)).see()
    assert p.view.kept is None
    p.at(500).see()


def test_in_reject_mode_whoever_would_wait_for_a_turn_is_refused_at_once():
    p = brought(B)
    p.at(20).do(req(2, "b", wait=0)).see(Refuse(2, Code.BUSY, "the card is in use", 30.0))


def test_a_mode_change_waits_for_the_turn_like_a_request():
    p = brought(B)
    p.at(20).do(SetMode(2, "b")).see()
    p.at(136).see().do(Release(1)).see(StartSwap(2, "b", ("a",)))


def test_the_lock_does_not_wait_for_a_turn():
    p = brought(B)
    p.at(20).do(Lock(2, "me", "b", 600.0)).answered(Granted)
    p.do(req(3, "b", owner="me")).see().note("drain", target="b")


def test_a_resident_whose_preset_was_changed_has_no_turn():
    p = brought(B)
    p.at(20).do(PresetsChanged((replace(A, revision="2"), B))).see().note("drain", victims=["a"])
    p.do(req(2, "b")).see()
    assert (p.view.phase, p.view.target) == (Phase.DRAINING, "b")


# --------------------------------------------------------------------------------------------------- ranks


def test_an_image_job_does_not_wait_for_the_turn_of_an_llm():
    p = Playbook(OLLAMA, COMFY, rules=RULES)
    p.do(req(1, "ollama")).see(StartSwap(1, "ollama"))
    p.at(8).do(SwapSucceeded(1, 60.0)).see(Grant(1, "ollama"))
    p.at(20).do(req(2, "comfyui")).see().note("drain", target="comfyui")
    p.do(req(3, "ollama")).see()


def test_a_turn_of_images_does_not_outlast_the_patience_of_an_llm_request():
    p = Playbook(OLLAMA, COMFY, rules=RULES)
    p.do(req(1, "comfyui")).see(StartSwap(1, "comfyui"))
    for n in range(2, 9):
        p.do(req(n, "comfyui")).see()
    p.do(req(9, "ollama")).see()
    p.at(50).do(SwapSucceeded(1, 60.0)).see(Grant(1, "comfyui"))
    p.at(59).do(Release(1)).see(Grant(2, "comfyui"))
    p.at(70).do(Release(2)).see(StartSwap(2, "ollama", ("comfyui",)))


# ------------------------------------------------------------------------------------------------- batches

IMAGES = Tenant("images", Mode.COMFYUI, exclusive=True)


@pytest.mark.parametrize("order", list(Order))
def test_a_swap_serves_the_batch_it_was_made_for_even_if_others_have_waited_too_long(order):
    p = Playbook(A, IMAGES, rules=Rules(order=order, patience=60.0))
    p.do(req(1, "a")).see(StartSwap(1, "a")).do(SwapSucceeded(1)).see(Grant(1, "a"))
    for n in range(2, 6):
        p.do(req(n, "images")).see()
    p.do(req(6, "a")).see()
    p.at(55).do(Release(1)).see(StartSwap(2, "images", ("a",)))
    p.at(100).do(SwapSucceeded(2)).see(Grant(2, "images"))
    for n in range(2, 5):
        p.at(100 + 15 * n - 15).do(Release(n)).see(Grant(n + 1, "images"))
    p.do(Release(5)).see(StartSwap(3, "a", ("images",)))


@pytest.mark.parametrize("order", list(Order))
def test_a_batch_without_end_is_split(order):
    p = Playbook(A, IMAGES, rules=Rules(order=order, patience=60.0, max_wait=60.0))
    for n in range(1, 100):
        p.do(req(n, "images")).see(*[StartSwap(1, "images")] * (n == 1))
    p.do(req(100, "a")).see()
    p.at(8).do(SwapSucceeded(1)).see(Grant(1, "images"))
    p.at(40).do(Release(1)).see(Grant(2, "images"))
    p.at(67.9).do(Release(2)).see(Grant(3, "images"))
    p.at(90).do(Release(3)).see(StartSwap(2, "a", ("images",)))


# ---------------------------------------------------------------------------------------------- linger


def agents() -> Playbook:
    """Ann on A comes back 2 s after each answer, twice; bob waits for B since 30."""
    p = brought(B)
    p.at(30).do(req(50, "b", client="bob")).see()
    p.at(70).do(Release(1)).see(StartSwap(2, "b", ("a",)))  # nobody knows ann yet
    p.at(72).do(req(2, "a", client="ann")).see()
    p.at(78).do(SwapSucceeded(2)).see(Grant(50, "b"))
    p.at(90).do(Release(50)).see(StartSwap(3, "a", ("b",)))
    p.at(98).do(SwapSucceeded(3, 60.0)).see(Grant(2, "a"))  # in its turn until 226
    p.at(99).do(req(51, "b", client="bob")).see()
    return p


def test_the_card_is_kept_for_a_client_that_is_between_two_steps():
    p = agents()
    p.at(170).do(Release(2)).see()
    assert p.view.kept.idle
    p.at(172).do(req(3, "a", client="ann")).see(Grant(3, "a"))
    p.at(180).do(Release(3)).see()


def test_it_is_not_kept_longer_than_the_client_usually_needs():
    p = agents()
    p.at(170).do(Release(2)).see()
    p.at(173.9).see()
    p.at(174).see(StartSwap(4, "b", ("a",)))


def test_it_is_not_kept_for_a_client_that_usually_takes_too_long():
    """A quarter of 68 s is the most that waiting may cost here."""
    p = brought(B)
    p.at(30).do(req(50, "b", client="bob")).see()
    p.at(70).do(Release(1)).see(StartSwap(2, "b", ("a",)))
    p.at(110).do(req(2, "a", client="ann")).see()
    p.do(SwapSucceeded(2)).see(Grant(50, "b"))
    p.at(120).do(Release(50)).see(StartSwap(3, "a", ("b",)))
    p.at(128).do(SwapSucceeded(3, 60.0)).see(Grant(2, "a"))
    p.do(req(51, "b", client="bob")).see()
    p.at(200).do(Release(2)).see(StartSwap(4, "b", ("a",)))


def test_an_engine_that_leaves_at_once_is_not_kept():
    p = Playbook(replace(A, linger=0.0), B, rules=RULES)
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    p.at(8).do(SwapSucceeded(1, 60.0)).see(Grant(1, "a"))
    p.at(70).do(Release(1)).see(StartUnload(2, ("a",)))


# ------------------------------------------------------------------------------------------- fairness


def test_of_two_that_wait_the_one_whose_client_had_less_of_the_card_is_brought_in_first():
    p = Playbook(A, B, C, rules=replace(RULES, patience=10_000.0), residents=["a"])
    p.do(req(1, "a", client="greedy")).see(Grant(1, "a"))
    p.do(req(2, "b", client="greedy")).see()
    p.at(50).do(req(3, "c", client="modest")).see()
    p.at(59).do(Release(1)).see(StartSwap(1, "b", ("a",)))  # less than a minute is no difference
    p.do(SwapSucceeded(1)).see(Grant(2, "b"))
    p.do(req(4, "a", client="greedy")).see()
    p.at(90).do(Release(2)).see(StartSwap(2, "c", ("b",)))
    p.do(SwapSucceeded(2)).see(Grant(3, "c"))
    p.do(req(5, "b", client="modest")).see()
    p.at(91).do(Release(3)).see(StartSwap(3, "b", ("c",)))


def test_fairness_never_goes_past_somebody_who_waited_too_long():
    a = replace(A, drain_grace=None)
    p = Playbook(a, B, C, rules=replace(RULES, patience=60.0), residents=["a"])
    p.do(req(1, "a", client="greedy")).see(Grant(1, "a"))
    p.do(req(2, "b", client="greedy")).see()
    p.at(100).do(req(3, "c", client="modest")).see()
    p.do(Release(1)).see(StartSwap(1, "b", ("a",)))


def test_within_one_model_the_order_is_arrival_whoever_asks():
    p = Playbook(IMAGES, B, rules=RULES)
    for n, who in enumerate(("x", "x", "x", "y"), 1):
        p.do(req(n, "images", client=who)).see(*[StartSwap(1, "images")] * (n == 1))
    p.do(SwapSucceeded(1)).see(Grant(1, "images"))
    for n in range(1, 4):
        p.at(100 * n).do(Release(n)).see(Grant(n + 1, "images"))


def test_habits_are_learned_forgotten_and_bounded():
    habits = Habits()
    assert habits.left("x", "a", 0.0, 30.0) is None
    habits.came("x", ("b", "a"), 34.0)
    assert habits.left("x", "a", 34.0, 40.0) == 4.0 + 2 * 2.0
    assert habits.used("x", 40.0) == pytest.approx(36.0, abs=0.5)
    assert habits.used("x", 640.0) == pytest.approx(18.0, abs=0.5)
    habits.came("other", ("a",), 41.0 + LONGEST)
    assert not habits.away
    assert habits.left("x", "a", 200.0, 200.0) > 20.0  # once it did not come back
    for n in range(2 * LIMIT):
        habits.left(f"c{n}", "a", 0.0, 300.0)
        assert len(habits.away) <= LIMIT


# ----------------------------------------------------------------------------------------- three tenants


@pytest.mark.parametrize("order", list(Order))
def test_three_tenants_whose_waiters_are_all_overdue_still_make_progress(order):
    """A policy that only looks at the oldest waiter drains each newcomer before it has served anybody, for ever."""
    p = Playbook(A, B, C, rules=Rules(order=order, patience=0.0, max_wait=0.0))
    tenants, swaps, served = {1: "a", 2: "b", 3: "c"}, 0, 0
    for n, want in tenants.items():
        p.do(req(n, want))
        swaps += len(p.take())
    number = 3
    for _ in range(200):
        p.at(p.now + 10).do(SwapSucceeded(swaps))
        (grant,) = [e for e in p.take() if isinstance(e, Grant)]
        served += 1
        number += 1
        p.do(req(number, grant.tenant))  # the client asks again before its answer is over
        found = p.take()
        p.at(p.now + 1).do(Release(grant.ticket))
        found += p.take()
        while not any(isinstance(e, StartSwap) for e in found):
            (again,) = [e for e in found if isinstance(e, Grant)]
            served += 1
            number += 1
            p.do(req(number, grant.tenant)).do(Release(again.ticket))
            found = p.take()
        swaps += 1
    assert served >= 200
