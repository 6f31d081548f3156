"""The rules of the scheduler, one script each."""

from __future__ import annotations

from dataclasses import replace

from gpu_turnstile.core.locks import Granted, Queued, Refused, Unlocked
from gpu_turnstile.core.model import (
    Break,
    Cancel,
    Code,
    Cut,
    EngineLost,
    Grant,
    Lock,
    Mode,
    Phase,
    PresetsChanged,
    Refuse,
    Release,
    SetMode,
    Shutdown,
    StartSwap,
    StartUnload,
    SwapFailed,
    SwapSucceeded,
    Tenant,
    Tick,
    Unload,
    Unlock,
    Wedged,
)
from gpu_turnstile.core.policy import Rules
from tests.core.playbook import COMFY, OLLAMA, A, B, C, Playbook, req


def holding_a(*others, **more) -> Playbook:
    """A is on the card and serves ticket 1."""
    p = Playbook(A, *others, **more)
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    p.do(SwapSucceeded(1)).see(Grant(1, "a"))
    return p


# ------------------------------------------------------------------------------------------- one tenant


def test_an_empty_card_is_given_to_the_first_who_asks():
    p = Playbook(A)
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    p.at(8).do(SwapSucceeded(1)).see(Grant(1, "a")).note("swapped", target="a", seconds=8.0)
    assert p.view.phase is Phase.SERVING
    assert p.view.mode is Mode.LLM


def test_a_request_for_the_resident_is_granted_at_once_and_beside_others():
    p = holding_a()
    p.do(req(2, "a")).see(Grant(2, "a"))
    p.do(req(3, "a")).see(Grant(3, "a"))
    assert [lease.ticket for lease in p.view.leases] == [1, 2, 3]


def test_twenty_first_requests_start_one_swap():
    p = Playbook(A)
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    for n in range(2, 21):
        p.do(req(n, "a")).see()
    p.do(SwapSucceeded(1)).see(*(Grant(n, "a") for n in range(1, 21)))


def test_a_name_nobody_knows_is_refused_and_starts_nothing():
    p = holding_a()
    p.do(req(2, "x")).see(Refuse(2, Code.UNKNOWN_MODEL, "no preset is called 'x'"))


def test_a_release_that_nobody_knows_is_ignored():
    holding_a().do(Release(99)).see()


# --------------------------------------------------------------------------------------------- draining


def test_another_tenant_waits_until_the_resident_has_drained():
    p = holding_a(B)
    p.do(req(2, "b")).see().note("drain", target="b", inflight=1)
    assert p.view.phase is Phase.DRAINING
    assert p.view.target == "b"
    p.do(Release(1)).see(StartSwap(2, "b", ("a",)))
    p.do(SwapSucceeded(2)).see(Grant(2, "b"))


def test_while_draining_requests_for_the_target_join_and_requests_for_the_resident_wait():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    p.do(req(3, "a")).see()
    p.do(req(4, "b")).see()
    assert [(w.ticket, w.position) for w in p.view.waiting] == [(2, 1), (4, 2), (3, 3)]
    p.do(Release(1)).see(StartSwap(2, "b", ("a",)))
    p.do(SwapSucceeded(2)).see(Grant(2, "b"), Grant(4, "b"))
    p.do(Release(2)).see()
    p.do(Release(4)).see(StartSwap(3, "a", ("b",)))


def test_an_alias_that_the_resident_satisfies_is_served_in_place_while_it_drains():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    p.do(req(3, "a", "b", in_place=True)).see(Grant(3, "a"))
    p.do(req(4, "a")).see()
    p.do(Release(1)).see()
    p.do(Release(3)).see(StartSwap(2, "b", ("a",)))


def test_nothing_is_served_in_place_on_a_resident_whose_drain_is_unbounded():
    p = Playbook(OLLAMA, B, residents=["ollama"])
    p.do(req(1, "ollama")).see(Grant(1, "ollama"))
    p.do(req(2, "b")).see()
    p.do(req(3, "ollama", "b", in_place=True)).see()
    p.do(Release(1)).see(StartSwap(1, "b", ("ollama",)))
    p.do(SwapSucceeded(1)).see(Grant(2, "b"), Grant(3, "b"))


def test_the_swap_is_forced_when_the_grace_ends_and_says_whom_it_cut():
    p = holding_a(B)
    p.at(1).do(req(2, "b")).see()
    assert p.view.drain_deadline == 61
    p.at(60.9).see()
    p.at(61).see(StartSwap(2, "b", ("a",), cut=(1,))).note("forced", cut=1)
    p.do(Release(1)).see()
    p.do(SwapSucceeded(2)).see(Grant(2, "b"))


def test_an_external_engine_is_never_cut():
    p = Playbook(OLLAMA, B, residents=["ollama"])
    p.do(req(1, "ollama")).see(Grant(1, "ollama"))
    p.do(req(2, "b")).see()
    p.at(100_000).see()
    p.do(Release(1)).see(StartSwap(1, "b", ("ollama",)))


def test_a_drain_ends_when_the_only_one_it_was_for_has_left():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    p.do(req(3, "a")).see()
    p.do(Cancel(2)).see(Grant(3, "a"))
    assert p.view.phase is Phase.SERVING
    p.at(100).do(Release(1)).see()


def test_a_drain_keeps_its_clock_when_its_target_changes():
    p = holding_a(B, C)
    p.do(req(2, "b")).see()
    p.at(30).do(req(3, "c")).see()
    p.at(40).do(Cancel(2)).see()
    p.at(60).see(StartSwap(2, "c", ("a",), cut=(1,)))


# -------------------------------------------------------------------------------------------- the order


def test_a_mixed_queue_costs_one_swap_per_tenant_and_keeps_the_order_within_it():
    """A B A A C A B C within a second: four loads at most."""
    p = Playbook(A, B, C)
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    for n, want in enumerate("baacabc", 2):
        p.do(req(n, want)).see()
    p.do(SwapSucceeded(1)).see(*(Grant(n, "a") for n in (1, 3, 4, 6)))
    for n in (1, 3, 4):
        p.do(Release(n)).see()
    p.do(Release(6)).see(StartSwap(2, "b", ("a",)))
    p.do(SwapSucceeded(2)).see(Grant(2, "b"), Grant(7, "b"))
    p.do(Release(2)).see()
    p.do(Release(7)).see(StartSwap(3, "c", ("b",)))
    p.do(SwapSucceeded(3)).see(Grant(5, "c"), Grant(8, "c"))


def test_a_stream_of_requests_for_the_resident_does_not_keep_another_out():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    for n in range(3, 50):
        p.do(req(n, "a")).see()
    p.do(Release(1)).see(StartSwap(2, "b", ("a",)))


def test_a_completed_swap_serves_its_waiters_before_a_third_tenant_may_drain_it():
    p = Playbook(A, B, C)
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    p.do(req(2, "b")).see()
    p.do(req(3, "c")).see()
    p.at(500).do(SwapSucceeded(1)).see(Grant(1, "a"))
    p.do(Release(1)).see(StartSwap(2, "b", ("a",)))


# ----------------------------------------------------------------------------------- the two-mode lock


def turnstile(**more) -> Playbook:
    return Playbook(OLLAMA, COMFY, **more)


def test_llm_requests_share_and_an_image_job_is_alone():
    p = turnstile(residents=["ollama"])
    p.do(req(1, "ollama")).see(Grant(1, "ollama"))
    p.do(req(2, "ollama")).see(Grant(2, "ollama"))
    p.do(req(3, "comfyui")).see()
    p.do(Release(1)).see()
    p.do(Release(2)).see(StartSwap(1, "comfyui", ("ollama",)))
    p.do(SwapSucceeded(1)).see(Grant(3, "comfyui"))
    p.do(req(4, "comfyui")).see()


def test_a_waiting_image_job_stops_new_llm_requests():
    p = turnstile(residents=["ollama"])
    p.do(req(1, "ollama")).see(Grant(1, "ollama"))
    p.do(req(2, "comfyui")).see()
    p.do(req(3, "ollama")).see()
    p.do(Release(1)).see(StartSwap(1, "comfyui", ("ollama",)))


def test_image_jobs_run_in_order_back_to_back_before_an_llm_request_that_came_earlier():
    p = turnstile()
    p.do(req(1, "comfyui")).see(StartSwap(1, "comfyui"))
    p.do(req(2, "ollama")).see()
    p.do(req(3, "comfyui")).see()
    p.do(SwapSucceeded(1)).see(Grant(1, "comfyui"))
    p.do(Release(1)).see(Grant(3, "comfyui"))
    p.do(Release(3)).see(StartSwap(2, "ollama", ("comfyui",)))
    p.do(SwapSucceeded(2)).see(Grant(2, "ollama"))


def test_a_long_batch_of_image_jobs_is_interrupted_for_an_llm_request_that_lost_patience():
    p = turnstile(rules=Rules(patience=60))
    p.do(req(1, "comfyui")).see(StartSwap(1, "comfyui"))
    for n in range(2, 21):
        p.do(req(n, "comfyui")).see()
    p.do(req(99, "ollama")).see()
    p.do(SwapSucceeded(1)).see(Grant(1, "comfyui"))
    p.at(30).do(Release(1)).see(Grant(2, "comfyui"))
    p.at(59).do(Release(2)).see(Grant(3, "comfyui"))
    p.at(90).do(Release(3)).see(StartSwap(2, "ollama", ("comfyui",)))
    p.do(SwapSucceeded(2)).see(Grant(99, "ollama"))
    p.do(Release(99)).see(StartSwap(3, "comfyui", ("ollama",)))


def test_the_image_engine_leaves_the_card_as_soon_as_nobody_wants_it():
    p = turnstile()
    p.do(req(1, "comfyui")).see(StartSwap(1, "comfyui"))
    p.do(SwapSucceeded(1)).see(Grant(1, "comfyui"))
    p.do(Release(1)).see(StartUnload(2, ("comfyui",)))
    p.do(req(2, "ollama")).see()
    p.do(SwapSucceeded(2)).see(StartSwap(3, "ollama"))
    p.do(SwapSucceeded(3)).see(Grant(2, "ollama"))


def test_a_client_that_leaves_the_queue_of_image_jobs_lets_the_llm_requests_go_on():
    p = turnstile(residents=["ollama"])
    p.do(req(1, "ollama")).see(Grant(1, "ollama"))
    p.do(req(2, "comfyui")).see()
    p.do(req(3, "ollama")).see()
    p.do(Cancel(2)).see(Grant(3, "ollama"))


def test_in_reject_mode_a_blocked_request_is_refused_at_once():
    p = turnstile(residents=["ollama"])
    p.do(req(1, "ollama")).see(Grant(1, "ollama"))
    p.do(req(2, "comfyui")).see()
    p.do(req(3, "ollama", wait=0)).see(Refuse(3, Code.BUSY, "the card is in use", 30.0))
    p.do(Release(1)).see(StartSwap(1, "comfyui", ("ollama",)))


def test_in_reject_mode_a_request_for_an_idle_card_is_served():
    p = turnstile()
    p.do(req(1, "ollama", wait=0)).see(StartSwap(1, "ollama"))
    p.do(SwapSucceeded(1)).see(Grant(1, "ollama"))


# ---------------------------------------------------------------------------------------------- waiting


def test_a_wait_ends_when_it_was_as_long_as_allowed():
    p = holding_a(B)
    p.do(req(2, "b", wait=10)).see()
    p.at(9.9).see()
    p.at(10).see(Refuse(2, Code.BUSY, "waited 10 s for the card, the longest allowed", 30.0))
    assert p.view.phase is Phase.SERVING


def test_a_wait_may_also_end_during_a_swap():
    p = Playbook(A)
    p.do(req(1, "a", wait=10)).see(StartSwap(1, "a"))
    p.at(10).see(Refuse(1, Code.BUSY, "waited 10 s for the card, the longest allowed", 30.0))
    p.do(SwapSucceeded(1)).see()
    assert p.view.residents == ("a",)


def test_a_client_may_leave_during_the_swap_made_for_it():
    p = Playbook(A)
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    p.do(Cancel(1)).see()
    p.do(SwapSucceeded(1)).see()


def test_leaving_twice_or_after_the_answer_changes_nothing():
    p = holding_a()
    p.do(Cancel(1)).see()
    p.do(Cancel(7)).see()
    assert len(p.view.leases) == 1


def test_a_single_tenant_is_evicted_after_each_of_its_leases():
    """The letter of the turnstile document: /free after every image job, also when the next one waits."""
    p = Playbook(OLLAMA, replace(COMFY, single=True), rules=Rules(patience=None))
    p.do(req(1, "comfyui")).see(StartSwap(1, "comfyui"))
    p.do(req(2, "comfyui")).see()
    p.do(req(3, "ollama")).see()
    p.do(SwapSucceeded(1)).see(Grant(1, "comfyui"))
    assert p.view.residents == ("comfyui",)
    p.do(Release(1)).see(StartSwap(2, "comfyui", ("comfyui",)))
    p.do(SwapSucceeded(2)).see(Grant(2, "comfyui"))
    p.do(Release(2)).see(StartSwap(3, "ollama", ("comfyui",)))


def test_breaking_the_glass_cuts_every_lease_and_lets_the_next_in():
    p = turnstile(residents=["ollama"])
    p.do(req(1, "ollama")).see(Grant(1, "ollama"))
    p.do(req(2, "comfyui")).see()
    p.do(Break("stuck")).see(Cut((1,), "stuck"), StartSwap(1, "comfyui", ("ollama",))).note("released", cut=1)
    p.do(Release(1)).see()


# -------------------------------------------------------------------------------------------- failures


def test_a_failed_swap_refuses_its_waiters_and_the_next_request_tries_again():
    p = Playbook(A)
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    p.do(SwapFailed(1, "out of memory")).see(Refuse(1, Code.SWAP_FAILED, "out of memory", 30.0))
    assert p.view.phase is Phase.IDLE
    p.do(req(2, "a")).see(StartSwap(2, "a"))


def test_what_was_found_loading_is_waited_for_and_not_started_again():
    p = Playbook(A, B, coming="a")
    p.do(Tick()).see(StartSwap(1, "a", coming=True))
    assert p.scheduler.snapshot(0.0).phase is Phase.SWAPPING
    p.do(req(1, "a")).do(req(2, "b")).see()
    p.at(5).do(SwapSucceeded(1)).see(Grant(1, "a"))
    p.do(Release(1)).see(StartSwap(2, "b", ("a",)))


def test_what_was_found_loading_and_does_not_come_up_is_a_failed_swap():
    p = Playbook(A, B, coming="a")
    p.do(Tick()).see(StartSwap(1, "a", coming=True))
    p.do(req(1, "a")).do(req(2, "b")).see()
    p.do(SwapFailed(1, "it ended", stuck=("a",))).see(
        Refuse(1, Code.SWAP_FAILED, "it ended", 30.0), StartSwap(2, "b", ("a",))
    )


def test_what_was_found_loading_and_has_no_preset_any_more_is_nobodys():
    Playbook(B, coming="a").do(Tick()).see().do(req(1, "b")).see(StartSwap(1, "b"))


def test_after_a_failed_swap_the_truth_is_what_was_found_and_others_go_on():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    p.do(req(3, "a")).see()
    p.do(Release(1)).see(StartSwap(2, "b", ("a",)))
    p.do(SwapFailed(2, "no image", residents=("a",))).see(Refuse(2, Code.SWAP_FAILED, "no image", 30.0), Grant(3, "a"))


def test_an_engine_that_may_still_hold_memory_is_evicted_again_before_anybody_comes():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    p.do(Release(1)).see(StartSwap(2, "b", ("a",)))
    p.do(SwapFailed(2, "a does not die", stuck=("a",))).see(Refuse(2, Code.SWAP_FAILED, "a does not die", 30.0))
    assert p.view.stuck == ("a",)
    p.do(req(3, "a")).see(StartSwap(3, "a", ("a",)))


def test_a_lost_engine_cuts_its_leases_keeps_its_name_and_comes_back_on_the_next_request():
    p = holding_a()
    p.do(EngineLost("a", "killed by SIGKILL")).see(Cut((1,), "killed by SIGKILL"))
    assert (p.view.phase, p.view.name, p.view.leases) == (Phase.IDLE, "a", ())
    p.do(Release(1)).see()
    p.do(req(2, "a")).see(StartSwap(2, "a"))


def test_an_engine_lost_while_it_drains_lets_the_swap_start():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    p.do(EngineLost("a", "gone")).see(Cut((1,), "gone"), StartSwap(2, "b"))


def test_after_a_failed_swap_the_one_that_had_to_leave_comes_back_when_told_to():
    p = holding_a(B, rules=Rules(rollback=True))
    p.do(Release(1)).see()
    p.do(req(2, "b")).see(StartSwap(2, "b", ("a",)))
    p.do(SwapFailed(2, "oom")).see(Refuse(2, Code.SWAP_FAILED, "oom", 30.0), StartSwap(3, "a"))
    p.do(SwapSucceeded(3)).see()
    assert p.view.residents == ("a",)


def test_nobody_comes_back_in_front_of_somebody_who_waits():
    p = holding_a(B, C, rules=Rules(rollback=True))
    p.do(Release(1)).see()
    p.do(req(2, "b")).see(StartSwap(2, "b", ("a",)))
    p.do(req(3, "c")).see()
    p.do(SwapFailed(2, "oom")).see(Refuse(2, Code.SWAP_FAILED, "oom", 30.0), StartSwap(3, "c"))


def test_a_comeback_that_fails_too_is_not_tried_again():
    p = holding_a(B, rules=Rules(rollback=True))
    p.do(Release(1)).see()
    p.do(req(2, "b")).see(StartSwap(2, "b", ("a",)))
    p.do(SwapFailed(2, "oom")).see(Refuse(2, Code.SWAP_FAILED, "oom", 30.0), StartSwap(3, "a"))
    p.do(SwapFailed(3, "gone")).see()
    assert p.view.phase is Phase.IDLE


def test_a_preset_that_fails_three_times_in_a_row_is_held_back_with_growing_pauses():
    p = holding_a(B)
    p.do(Release(1)).see()
    for n in range(2, 5):
        p.do(req(n, "b")).see(StartSwap(n, "b", ("a",) if n == 2 else ()))
        p.do(SwapFailed(n, "broken")).see(Refuse(n, Code.SWAP_FAILED, "broken", 30.0))
    message = "'b' has failed to start 3 times in a row and is not tried before 30 s; broken"
    p.do(req(5, "b")).see(Refuse(5, Code.SWAP_FAILED, message, 30.0))
    p.do(req(6, "b", "a", in_place=True)).see(StartSwap(5, "a"))
    p.do(SwapSucceeded(5)).see(Grant(6, "a"))
    p.do(Release(6)).see()
    p.at(31).do(req(7, "b")).see(StartSwap(6, "b", ("a",)))
    p.do(SwapFailed(6, "broken")).see(Refuse(7, Code.SWAP_FAILED, "broken", 30.0))
    p.at(80).do(req(8, "b")).see(Refuse(8, Code.SWAP_FAILED, message.replace("3 t", "4 t").replace("30", "11"), 11.0))
    p.do(PresetsChanged((A, replace(B, revision="mended")))).see()
    p.do(req(9, "b")).see(StartSwap(7, "b"))
    p.do(SwapSucceeded(7)).see(Grant(9, "b"))


def test_a_swap_that_was_refused_for_another_reason_does_not_count_as_a_failure():
    p = Playbook(A)
    for n in range(1, 6):
        p.do(req(n, "a")).see(StartSwap(n, "a"))
        p.do(SwapFailed(n, "too big now", code=Code.MODEL_UNAVAILABLE)).see(
            Refuse(n, Code.MODEL_UNAVAILABLE, "too big now", 30.0)
        )


def test_news_of_a_swap_that_is_over_is_ignored():
    p = holding_a()
    p.do(SwapSucceeded(1)).see()
    p.do(SwapFailed(7, "old")).see()


# ------------------------------------------------------------------------------------- people's wishes


def test_an_unload_drains_empties_the_card_and_serves_the_waiters_after_it():
    p = holding_a()
    p.do(Unload()).see()
    p.do(req(2, "a")).see()
    p.do(Release(1)).see(StartUnload(2, ("a",)))
    p.do(SwapSucceeded(2)).see(StartSwap(3, "a"))


def test_an_unload_of_an_empty_card_is_done_at_once():
    p = Playbook(A)
    p.do(Unload()).see()
    p.do(req(1, "a")).see(StartSwap(1, "a"))


def test_a_tenant_that_may_linger_leaves_when_it_was_idle_for_so_long():
    p = Playbook(replace(A, linger=30.0), residents=["a"])
    p.at(5).do(req(1, "a")).see(Grant(1, "a"))
    p.at(100).do(Release(1)).see()
    p.at(129.9).see()
    p.at(130).see(StartUnload(1, ("a",)))
    assert p.view.name == "a"


def test_an_engine_that_is_stuck_loses_its_leases_and_leaves_and_its_name_is_kept():
    p = holding_a(B)
    p.do(Wedged("a", "it gets nowhere")).see(Cut((1,), "it gets nowhere"), StartUnload(2, ("a",)))
    p.note("wedged", tenant="a", cut=1).do(SwapSucceeded(2)).see()
    assert p.view.name == "a"
    p.do(req(2, "a")).see(StartSwap(3, "a")).do(SwapSucceeded(3)).see(Grant(2, "a"))


def test_whoever_waits_for_an_engine_that_is_stuck_gets_it_anew():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    p.do(req(3, "a")).see()
    p.do(Wedged("a", "stuck")).see(Cut((1,), "stuck"), StartSwap(2, "b", ("a",)))
    p.do(SwapSucceeded(2)).see(Grant(2, "b")).do(Release(2)).see(StartSwap(3, "a", ("b",)))


def test_a_stuck_engine_that_is_wanted_again_is_evicted_before_it_comes_back():
    p = Playbook(A, replace(COMFY, linger=None), residents=["comfyui"])
    p.do(req(1, "comfyui")).see(Grant(1, "comfyui")).do(req(2, "comfyui")).see()
    p.do(Wedged("comfyui", "stuck")).see(Cut((1,), "stuck"), StartSwap(1, "comfyui", ("comfyui",)))
    p.do(SwapSucceeded(1)).see(Grant(2, "comfyui"))


def test_what_is_not_on_the_card_cannot_be_stuck():
    p = holding_a(B)
    p.do(Wedged("b", "stuck")).see()
    p.do(req(2, "b")).see().do(Release(1)).see(StartSwap(2, "b", ("a",)))
    p.do(Wedged("a", "stuck")).see().do(Wedged("b", "stuck")).see()
    p.do(SwapSucceeded(2)).see(Grant(2, "b"))


def at_home(*others, **more):
    return Playbook(A, B, *others, rules=Rules(home="a", home_after=100.0), **more)


def test_the_tenant_at_home_comes_back_when_another_had_nothing_to_do_for_so_long():
    p = at_home(residents=["b"])
    p.at(5).do(req(1, "b")).see(Grant(1, "b"))
    p.at(50).do(Release(1)).see()
    p.at(149.9).see()
    p.at(150).see(StartSwap(1, "a", ("b",)))
    p.note("restore", target="a").do(SwapSucceeded(1)).see()
    p.at(1000).see()
    assert p.view.residents == ("a",)


def test_it_also_comes_to_a_card_that_is_empty_from_the_start():
    p = at_home()
    p.do(Tick()).see()
    p.at(100).see(StartSwap(1, "a"))


def test_nobody_comes_home_to_a_card_somebody_emptied_until_somebody_else_was_there():
    p = at_home(residents=["b"])
    p.do(Unload()).see(StartUnload(1, ("b",))).do(SwapSucceeded(1)).see()
    p.at(1000).see()
    p.do(req(1, "b")).see(StartSwap(2, "b")).do(SwapSucceeded(2)).see(Grant(1, "b"))
    p.do(Release(1)).see()
    p.at(1100).see(StartSwap(3, "a", ("b",)))


def test_who_left_home_because_nobody_wanted_it_is_not_brought_back():
    p = Playbook(replace(A, linger=30.0), B, rules=Rules(home="a", home_after=100.0), residents=["a"])
    p.do(req(1, "a")).see(Grant(1, "a")).do(Release(1)).see()
    p.at(30).see(StartUnload(1, ("a",))).do(SwapSucceeded(1)).see()
    p.at(10_000).see()


def test_training_is_not_ended_to_bring_somebody_home():
    training = Tenant("t", Mode.TRAIN)
    p = at_home(training, residents=["t"])
    p.do(req(1, "t")).see(Grant(1, "t")).do(Release(1)).see()
    p.at(10_000).see()


def test_nobody_comes_home_past_a_lock():
    p = at_home(residents=["b"])
    p.do(Lock(1, "me", "b", 500.0)).answered(Granted)
    p.at(499).see()
    p.at(500).see(StartSwap(1, "a", ("b",)))


def test_whoever_cannot_come_home_is_tried_again_after_the_same_time():
    p = at_home()
    p.do(Tick()).see()
    p.at(100).see(StartSwap(1, "a"))
    p.at(110).do(SwapFailed(1, "no room", code=Code.MODEL_UNAVAILABLE)).see()
    p.at(209.9).see()
    p.at(210).see(StartSwap(2, "a"))


def test_a_new_request_resets_the_time_a_tenant_may_linger():
    p = Playbook(replace(A, linger=30.0), residents=["a"])
    p.do(req(1, "a")).see(Grant(1, "a"))
    p.do(Release(1)).see()
    p.at(29).do(req(2, "a")).see(Grant(2, "a"))
    p.at(50).do(Release(2)).see()
    p.at(79).see()
    p.at(80).see(StartUnload(1, ("a",)))


def test_a_mode_switch_brings_the_tenant_in_and_takes_no_lease():
    p = holding_a(B)
    p.do(Release(1)).see()
    p.do(SetMode(2, "b")).see(StartSwap(2, "b", ("a",)))
    p.do(SwapSucceeded(2)).see(Grant(2, "b"))
    assert p.view.leases == ()


def test_shutdown_refuses_who_waits_and_who_comes_and_lets_the_leases_run_out():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    p.do(Shutdown()).see(Refuse(2, Code.SHUTTING_DOWN, "the gate is shutting down"))
    p.do(req(3, "a")).see(Refuse(3, Code.SHUTTING_DOWN, "the gate is shutting down"))
    p.do(Release(1)).see()
    assert p.view.leases == ()


# ---------------------------------------------------------------------------------------------- presets


def test_presets_that_did_not_change_are_not_touched():
    p = holding_a(B)
    p.do(PresetsChanged((A, B, C))).see()
    p.do(req(2, "a")).see(Grant(2, "a"))


def test_a_resident_whose_preset_was_removed_drains_and_leaves():
    p = holding_a(B)
    p.do(PresetsChanged((B,))).see()
    p.do(req(2, "a")).see(Refuse(2, Code.UNKNOWN_MODEL, "no preset is called 'a'"))
    p.do(Release(1)).see(StartUnload(2, ("a",)))


def test_a_removed_resident_that_does_not_drain_is_cut_at_the_end_of_its_grace():
    p = holding_a(B)
    p.do(PresetsChanged((B,))).see()
    p.at(30).do(Release(99)).see()
    p.at(60).see(StartUnload(2, ("a",), cut=(1,)))


def test_a_resident_whose_preset_changed_is_replaced_by_its_new_self():
    p = holding_a()
    p.do(PresetsChanged((replace(A, revision="2"),))).see()
    p.do(req(2, "a")).see()
    p.do(Release(1)).see(StartSwap(2, "a", ("a",)))
    p.do(SwapSucceeded(2)).see(Grant(2, "a"))


def test_a_preset_that_changes_while_it_is_being_loaded_is_replaced_after_its_swap():
    p = Playbook(A)
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    p.do(PresetsChanged((replace(A, revision="2"),))).see()
    p.do(SwapSucceeded(1)).see(StartSwap(2, "a", ("a",)))
    p.do(SwapSucceeded(2)).see(Grant(1, "a"))


def test_whoever_waits_for_a_removed_preset_is_told_so():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    p.do(PresetsChanged((A,))).see(Refuse(2, Code.UNKNOWN_MODEL, "the preset 'b' was removed"))


# ------------------------------------------------------------------------------------------------ locks


def test_a_lock_refuses_requests_for_other_presets_and_lapses():
    p = holding_a(B)
    p.do(Release(1)).see()
    p.do(Lock(2, "me", None, 60)).answered(Granted, preset="a", owner="me", token=1)
    message = "'b' cannot run now: the card's lock is held on 'a' by me (for 60 s)"
    p.do(req(3, "b")).see(Refuse(3, Code.MODEL_UNAVAILABLE, message, 60.0))
    p.at(60).see().note("lapsed", owner="me")
    p.do(req(5, "b")).see(StartSwap(2, "b", ("a",)))


def test_a_lock_does_not_lapse_while_its_owners_work_runs():
    """2026-08-19, and more: a 30-minute think with an open stream is traffic."""
    p = holding_a(B)
    p.do(Lock(2, "me", None, 60)).answered(Granted)
    p.at(1800).see()
    p.do(req(3, "b")).see(
        Refuse(3, Code.MODEL_UNAVAILABLE, "'b' cannot run now: the card's lock is held on 'a' by me (for 60 s)", 60.0)
    )
    p.do(Release(1)).see()
    p.at(1859).see()
    p.at(1860).see().note("lapsed", owner="me")


def test_a_contended_lock_does_not_hijack():
    """2026-08-17: a lock for another preset took the card and killed a loop."""
    p = holding_a(B)
    p.do(Lock(2, "me", "a", 60)).answered(Granted)
    p.do(Lock(3, "you", "b", 60)).answered(Refused)
    p.do(Lock(4, "you", "b", 60, wait=True)).answered(Queued, position=1)
    p.do(Unlock(5, "me")).answered(Unlocked, owners=("me",))
    assert p.view.locks.preset is None
    p.do(req(6, "a")).see(Grant(6, "a"))


def test_the_heads_first_request_takes_the_free_lock_and_brings_its_preset_in():
    p = holding_a(B)
    p.do(Lock(2, "me", "a", 60)).answered(Granted)
    p.do(Lock(3, "you", "b", 60, wait=True)).answered(Queued)
    p.do(Unlock(4, "me")).answered(Unlocked)
    p.do(req(5, "b", owner="you")).see().note("locked", owner="you", preset="b")
    p.do(req(6, "a"))
    p.see(
        Refuse(6, Code.MODEL_UNAVAILABLE, "'a' cannot run now: the card's lock is held on 'b' by you (for 60 s)", 60.0)
    )
    p.do(Release(1)).see(StartSwap(2, "b", ("a",)))


def test_a_stale_token_is_refused_instead_of_running_on_somebody_elses_card():
    p = holding_a(B)
    p.do(Release(1)).see()
    p.do(Lock(2, "me", "a", 60)).answered(Granted, token=1)
    p.do(req(3, "a", token=1)).see(Grant(3, "a"))
    p.do(Release(3)).see()
    p.at(60).see()
    p.do(Lock(4, "you", "a", 60)).answered(Granted, token=2)
    p.do(req(5, "a", token=1))
    (effect,) = p.take()
    assert (effect.ticket, effect.code) == (5, Code.LOCKED)
    assert "lapsed" in effect.message


def test_whoever_waits_for_another_preset_is_refused_when_a_lock_comes():
    p = holding_a(B)
    p.do(req(2, "b")).see()
    p.do(Lock(3, "me", "a", 60))
    p.see_refusal(2, Code.MODEL_UNAVAILABLE)
    p.answered(Granted)


def test_a_lock_does_not_lapse_while_its_owners_request_waits_for_the_load():
    p = Playbook(A, B)
    p.do(Lock(1, "me", "a", 60)).answered(Granted)
    p.do(req(2, "a", owner="me")).see(StartSwap(1, "a"))
    p.at(800).see()
    p.do(SwapSucceeded(1)).see(Grant(2, "a"))
    assert p.view.locks.preset == "a"


def test_work_that_is_cut_ended_then_and_its_owners_time_counts_from_there():
    p = holding_a(B)
    p.do(Lock(2, "me", "a", 60)).answered(Granted)
    p.at(3000).do(EngineLost("a", "killed")).see(Cut((1,), "killed"))
    p.at(3059).see()
    assert p.view.locks.preset == "a"
    p.at(3060).see().note("lapsed", owner="me")


def test_an_overdue_lock_polices_nobody():
    p = holding_a(B)
    p.do(Release(1)).see()
    p.do(Lock(2, "me", "a", 60)).answered(Granted)
    p.now = 61.0  # the timer is late
    p.do(req(3, "b")).see(StartSwap(2, "b", ("a",)))


def test_a_token_that_goes_stale_while_its_ticket_waits_is_refused():
    p = Playbook(A, B)
    p.do(Lock(1, "me", "a", 60)).answered(Granted, token=1)
    p.do(req(2, "a", token=1)).see(StartSwap(1, "a"))
    p.do(Unlock(3, "me"))
    p.see_refusal(2, Code.LOCKED).answered(Unlocked)


def test_a_mode_change_by_the_head_takes_the_lock():
    p = holding_a(B)
    p.do(Release(1)).see()
    p.do(Lock(2, "me", "a", 60)).answered(Granted)
    p.do(Lock(3, "you", "b", 60, wait=True)).answered(Queued)
    p.do(Unlock(4, "me")).answered(Unlocked)
    p.do(SetMode(5, "b", owner="you")).see(StartSwap(2, "b", ("a",))).note("locked", owner="you")


def test_the_lock_book_survives_a_restart():
    p = holding_a(B)
    p.do(Lock(2, "me", "a", 60)).answered(Granted)
    again = Playbook(A, B, locks=p.state["lock"], name=p.state["model"], now=1000.0)
    again.now = 1000.0
    assert again.scheduler.lock_view(again.now) == p.state["lock"]
    assert again.view.name == "a"


# --------------------------------------------------------------------------------------- sharing the card


def test_a_preset_that_can_never_fit_is_refused_before_anybody_is_evicted():
    p = Playbook(A, replace(B, footprint=30.0), rules=Rules(capacity=26.0), residents=["a"])
    message = (
        "'b' needs 30 GB (declared) of the card, and presets may use 26 GB "
        "(LLMC_VRAM_LIMIT_GB less LLMC_VRAM_RESERVE_GB)"
    )
    p.do(req(1, "b")).see(Refuse(1, Code.MODEL_UNAVAILABLE, message))
    p.do(req(2, "b", "a", in_place=True)).see(Grant(2, "a"))


def test_tenants_that_fit_together_stay_together_when_they_may():
    small, big = replace(A, footprint=6.0), replace(B, footprint=14.0)
    p = Playbook(small, big, replace(C, footprint=8.0), rules=Rules(colocate=True, capacity=24.0))
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    p.do(SwapSucceeded(1)).see(Grant(1, "a"))
    p.do(req(2, "b")).see(StartSwap(2, "b"))
    p.do(SwapSucceeded(2)).see(Grant(2, "b"))
    assert p.view.residents == ("a", "b")
    p.do(req(3, "c")).see()
    p.do(Release(1)).see(StartSwap(3, "c", ("a",)))
