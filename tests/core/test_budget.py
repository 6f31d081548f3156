"""The arithmetic of the card's memory."""

from __future__ import annotations

from itertools import combinations
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_turnstile.core.budget import capacity, fits, plan_eviction

SIZES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 20).map(float), max_size=8)


@pytest.mark.parametrize(
    ("footprints", "fit"),
    [
        ([], True),
        ([26], True),
        ([26.1], False),
        ([10, 16], True),
        ([10, 16.5], False),
        ([8.7, 8.7, 8.6], True),
        ([0], True),
        ([0, 1], False),
    ],
)
def test_a_preset_must_fit_the_card_less_the_reserve(footprints: list[float], fit: bool) -> None:
    assert fits(footprints, 32, 6) is fit


def test_a_reserve_larger_than_the_card_leaves_nothing() -> None:
    assert capacity(4, 6) == 0
    assert not fits([0.1], 4, 6)


CASES = {
    "without_colocation_everybody_goes": ({"a": 1.0, "b": 2.0}, 1.0, 26.0, False, ("a", "b")),
    "an_empty_card_needs_no_eviction": ({}, 5.0, 26.0, True, ()),
    "who_fits_beside_the_others_evicts_nobody": ({"a": 10.0, "b": 6.0}, 10.0, 26.0, True, ()),
    "the_cheapest_resident_that_makes_room_goes": ({"a": 12.0, "b": 6.0, "c": 8.0}, 6.0, 26.0, True, ("b",)),
    "two_small_ones_may_be_cheaper_than_one_big_one": ({"a": 16.0, "b": 4.0, "c": 4.0}, 9.0, 26.0, True, ("b", "c")),
    "of_equally_cheap_sets_the_smaller_goes": ({"a": 4.0, "b": 8.0, "c": 4.0}, 18.0, 26.0, True, ("b",)),
    "an_unknown_target_shares_with_nobody": ({"a": 1.0, "b": 1.0}, 0.0, 26.0, True, ("a", "b")),
    "an_unknown_resident_shares_with_nobody": ({"a": 0.0, "b": 5.0}, 5.0, 26.0, True, ("a",)),
    "a_target_larger_than_the_card_empties_it": ({"a": 1.0}, 40.0, 26.0, True, ("a",)),
    "an_exact_fit_fits": ({"a": 17.3}, 8.7, 26.0, True, ()),
}


@pytest.mark.parametrize(("residents", "target", "room", "colocate", "evicted"), CASES.values(), ids=CASES)
def test_who_must_go(
    residents: dict[str, float], target: float, room: float, colocate: bool, evicted: tuple[str, ...]
) -> None:
    assert plan_eviction(residents, target, room, colocate) == evicted


def test_a_resident_that_is_dear_to_bring_back_stays_although_it_is_small() -> None:
    residents = {"small": 8.0, "big": 16.0}
    assert plan_eviction(residents, 10, 26, True, costs={"small": 90, "big": 10}) == ("big",)


@given(SIZES, st.integers(1, 20).map(float))
def test_the_plan_makes_room_and_no_cheaper_one_does(residents: dict[str, float], target: float) -> None:
    room = 24.0
    plan = plan_eviction(residents, target, room, True)
    stays = sum(residents.values()) - sum(residents[name] for name in plan)
    assert stays + target <= room
    price = sum(residents[name] for name in plan)
    for count in range(len(residents) + 1):
        for group in combinations(residents, count):
            freed = sum(residents[name] for name in group)
            assert freed >= price or sum(residents.values()) - freed + target > room


@settings(max_examples=30)
@given(st.lists(st.floats(0.1, 3), min_size=13, max_size=60), st.floats(0.1, 24))
def test_a_crowded_card_is_planned_quickly_and_nobody_goes_needlessly(sizes: list[float], target: float) -> None:
    residents = {f"r{number}": size for number, size in enumerate(sizes)}
    room, start = max(24.0, target), perf_counter()
    plan = plan_eviction(residents, target, room, True)
    assert perf_counter() - start < 0.5  # trying every set of 60 would take years
    stays = sum(residents.values()) - sum(residents[name] for name in plan)
    assert stays + target <= room + 1e-3
    assert all(stays + residents[name] + target > room for name in plan)
