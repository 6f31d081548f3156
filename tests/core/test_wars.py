"""Swap wars are noticed, told once, and forgotten when they are over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_turnstile.core.model import Mode, Release, SwapSucceeded, Tenant
from gpu_turnstile.core.policy import Order, Rules
from gpu_turnstile.core.wars import NAMES, WINDOW
from tests.core.playbook import A, B, C, Playbook, req


def fight(p: Playbook, rounds: int, *, every: float = 45.0, seconds: float = 8.0, refill: float = 0.0, start: int = 1):
    """Ann wants A and bob wants B, by turns; a swap begins every `every` seconds."""
    began = p.now
    for n in range(start, start + rounds):
        want, who = ("a", "ann") if n % 2 else ("b", "bob")
        p.at(began + (n - start) * every).do(req(n, want, client=who)).take()
        p.at(p.now + seconds).do(SwapSucceeded(p.scheduler._swaps, refill)).take()
        p.at(p.now + 1).do(Release(n)).see()
    return p


def war_notes(p: Playbook) -> list[dict]:
    return [note.fields for note in p.notes if note.kind == "swap_war"]


def test_two_clients_that_take_the_card_from_each_other_are_noticed_and_told_once():
    p = fight(Playbook(A, B), 12)
    (note,) = war_notes(p)
    assert note["presets"] == ["a", "b"]
    assert note["clients"] == {"a": ["ann"], "b": ["bob"]}
    assert note["would_help"]
    war = p.view.war
    assert (war.presets, war.swaps) == ({"a": ("ann",), "b": ("bob",)}, 10)
    assert war.per_hour == pytest.approx(3600 * 8 / 45, rel=0.2)


def test_what_clients_read_again_counts():
    p = fight(Playbook(A, B), 12, every=180.0, refill=60.0)
    assert p.view.war.per_hour == pytest.approx(3600 * 68 / 180, rel=0.25)
    assert "prompts that are read again" in p.view.war.would_help[-1]


def test_it_is_told_again_when_another_preset_or_client_joins():
    p = fight(Playbook(A, B, C), 8)
    for n in range(100, 104):
        p.at(p.now + 30).do(req(n, "c" if n % 2 else "a", client="cleo")).take()
        p.at(p.now + 8).do(SwapSucceeded(p.scheduler._swaps)).take()
        p.do(Release(n)).see()
    told = war_notes(p)
    assert [note["presets"] for note in told] == [["a", "b"], ["a", "b"], ["a", "b", "c"]]
    assert told[1]["clients"]["a"] == ["ann", "cleo"]


def test_images_now_and_then_are_no_war():
    p = fight(Playbook(A, B), 20, every=300.0)
    assert war_notes(p) == []


def test_a_tour_through_many_presets_is_no_war():
    tenants = [Tenant(f"t{n}", Mode.LLM) for n in range(30)]
    p = Playbook(*tenants)
    for n, tenant in enumerate(tenants, 1):
        p.do(req(n, tenant.name)).take()
        p.at(p.now + 20).do(SwapSucceeded(n)).take()
        p.do(Release(n)).see()
    assert war_notes(p) == []


def test_a_war_that_is_over_is_not_shown_any_more():
    p = fight(Playbook(A, B), 12)
    p.at(p.now + WINDOW + 1)
    assert p.view.war is None
    fight(p, 12, start=101)
    assert len(war_notes(p)) == 2


def test_the_advice_fits_the_settings():
    small = (replace(A, footprint=8.0), replace(B, footprint=9.0))
    p = fight(Playbook(*small, rules=Rules(order=Order.ARRIVAL, capacity=24.0)), 12)
    advice = " / ".join(p.view.war.would_help)
    assert "a and b fit the card together (17 of 24 GB): TURNSTILE_COLOCATE=on" in advice
    assert "TURNSTILE_POLICY=amortised" in advice
    p = fight(Playbook(A, B, rules=Rules(capacity=24.0)), 12)
    advice = " / ".join(p.view.war.would_help)
    assert "COLOCATE" not in advice
    assert "TURNSTILE_POLICY" not in advice
    assert "turnstile run --preset a" in advice


def test_a_war_of_many_clients_names_a_few_of_them():
    p = Playbook(A, B)
    for n in range(1, 41):
        p.do(req(n, "a" if n % 2 else "b", client=f"client {n}")).take()
        p.at(p.now + 8).do(SwapSucceeded(n)).take()
        p.at(p.now + 5).do(Release(n)).see()
    assert all(len(clients) == NAMES for clients in p.view.war.presets.values())


def test_a_swap_is_for_everybody_who_waits_for_it():
    p = Playbook(A, B)
    for n in range(0, 80, 4):
        want = "a" if n % 8 else "b"
        p.do(req(n + 1, want, client=f"{want} one")).take()
        p.do(req(n + 2, want, client=f"{want} two")).take()
        p.at(p.now + 10).do(SwapSucceeded(n // 4 + 1)).take()
        p.do(Release(n + 1)).see().do(Release(n + 2)).see()
    assert p.view.war.presets == {"a": ("a one", "a two"), "b": ("b one", "b two")}
