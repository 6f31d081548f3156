"""The scheduler in simulated time: what the war costs under each order, and that nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from gpu_turnstile.core.policy import Order, Rules
from gpu_turnstile.presets.errors import PresetError
from gpu_turnstile.simulate import bound, file
from gpu_turnstile.simulate.compare import LLAMA_SWAP, POLICIES, compare, run
from gpu_turnstile.simulate.outcome import quantile
from gpu_turnstile.simulate.plot import timeline
from gpu_turnstile.simulate.workload import Client, Job, Preset, Workload
from gpu_turnstile.simulate.world import KEPT, LOST

SEEDS = (1, 2, 3)


def p95(outcome):
    return quantile(outcome.waits, 0.95)


# -------------------------------------------------------------------------------------------------- the war


@pytest.mark.parametrize("seed", SEEDS)
def test_turns_that_are_worth_their_swap_double_the_steps_of_the_war_and_nobody_waits_longer(seed):
    war = replace(file.war(), seed=seed)
    arrival, llama_swap, amortised = compare(war, POLICIES, (LOST,))
    assert amortised.steps > 2 * arrival.steps
    assert amortised.steps > 2 * llama_swap.steps
    assert p95(amortised) <= p95(arrival)
    assert amortised.swapping + amortised.prefill < 0.75 * (arrival.swapping + arrival.prefill)


@pytest.mark.parametrize("seed", SEEDS)
def test_contexts_that_survive_are_worth_more_than_any_order(seed):
    war = replace(file.war(), seed=seed)
    lost, kept = (run(war, "arrival", context) for context in (LOST, KEPT))
    both = run(war, "amortised", KEPT)
    assert kept.steps > 2 * lost.steps
    assert p95(kept) < p95(lost)
    assert both.steps > kept.steps
    assert p95(both) < 1.15 * p95(kept)


def test_the_gates_default_drain_grace_does_not_cut_agents_that_read_long_prompts():
    """With 60 s of grace and 60 s of prefill the plain order cuts nearly every step: the incident of 2026-09-19."""
    war = file.war()
    war = replace(war, presets=tuple(replace(preset, drain_grace=60.0) for preset in war.presets))
    assert run(war, "arrival", LOST).steps < 20
    amortised = run(war, "amortised", LOST)
    assert amortised.steps > 500
    assert amortised.cut == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_run(policy):
    first, again = (run(file.war(), policy, LOST) for _ in range(2))
    assert first == again
    assert run(replace(file.war(), seed=9), policy, LOST) != first


@pytest.mark.parametrize("policy", POLICIES)
def test_the_work_of_a_client_is_the_same_whatever_the_order(policy):
    found = dict.fromkeys(run(file.war(), policy, LOST).clients["person"].waits)
    assert found
    work = [work for name, _, work in run(file.war(), policy, LOST).asked if name == "agent-1"]
    assert work[:50] == [work for name, _, work in run(file.war(), "arrival", LOST).asked if name == "agent-1"][:50]


# ------------------------------------------------------------------------------------------ bounded waiting


def crowd(tenants: int, context: float) -> Workload:
    """Loops that never pause, one for each preset: the worst for everybody else."""
    presets = tuple(Preset(f"p{n}", swap=8.0) for n in range(tenants))
    clients = tuple(
        Client(f"c{n}", f"p{n}", work=(10.0, 10.0), think=(0.0, 2.0), context=context) for n in range(tenants)
    )
    return Workload("crowd", presets, clients, 6 * 3600.0)


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("tenants", [3, 4, 7])
@pytest.mark.parametrize("context", [0.0, 40.0])
def test_nobody_waits_longer_than_a_bound_among_three_and_more_tenants(order, tenants, context):
    """Whoever waited `max_wait` is served after those that waited longer: a swap, a prefill and an answer each."""
    rules = Rules(order=order, max_wait=120.0)
    outcome = run(crowd(tenants, context), order.value, LOST, rules)
    each = 8.0 + context + 10.0
    longest = (rules.max_wait if order is Order.AMORTISED else 0.0) + tenants * each
    assert max(outcome.waits) <= longest
    assert all(client.done > 10 for client in outcome.clients.values())
    assert outcome.swaps <= outcome.done + 1  # every swap serves somebody


def test_llama_swaps_order_has_no_such_bound():
    """What is there is used at once, whoever waits: a few clients on one preset keep another one out."""
    crowd = tuple(Client(f"c{n}", "p0", work=(8.0, 13.0), think=(0.5, 3.0)) for n in range(4))
    clients = (*crowd, Client("out", "p1", work=(10.0, 10.0), think=(1.0, 1.0)))
    workload = Workload("crowd", (Preset("p0"), Preset("p1")), clients, 3600.0)
    assert max(run(workload, LLAMA_SWAP, LOST).clients["out"].waits) > 300
    for order in Order:
        assert max(run(workload, order.value, LOST, Rules(max_wait=120.0)).waits) < 160


# ------------------------------------------------------------------------------------------------ the bound


def short(*jobs: tuple[str, float, float], context: float = 0.0, exclusive: bool = False) -> Workload:
    clients: dict[str, list[Job]] = {}
    for preset, at, work in jobs:
        clients.setdefault(preset, []).append(Job(work, at=at))
    presets = tuple(Preset(name, swap=8.0, exclusive=exclusive, drain_grace=None) for name in clients)
    made = tuple(Client(f"on {name}", name, jobs=tuple(todo), context=context) for name, todo in clients.items())
    return Workload("short", presets, made, 3600.0)


def test_the_best_order_is_found():
    """A is asked for twice with B in between: bringing B in first, or A twice, costs more."""
    workload = short(("a", 0.0, 10.0), ("b", 1.0, 10.0), ("a", 2.0, 10.0))
    outcome = run(workload, "arrival", LOST)
    least = bound.least_wait(workload, bound.trace(workload, outcome))
    assert least == pytest.approx(8.0 + 6.0 + (18.0 + 8.0 - 1.0))
    assert sum(outcome.waits) == pytest.approx(least)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_no_order_beats_the_bound(policy, exclusive, seed):
    from random import Random

    rnd = Random(seed)
    jobs = [(rnd.choice("abc"), rnd.uniform(0, 90), rnd.uniform(2, 20)) for _ in range(7)]
    workload = short(*sorted(jobs, key=lambda job: job[1]), context=20.0, exclusive=exclusive)
    outcome = run(workload, policy, LOST)
    assert outcome.done == 7
    assert bound.least_wait(workload, bound.trace(workload, outcome)) <= sum(outcome.waits) + 1e-6


def test_a_long_trace_is_refused():
    with pytest.raises(bound.TooLong, match="14 at most"):
        bound.trace(file.war(), run(file.war(), "arrival", LOST))


# -------------------------------------------------------------------------------------------------- the file


def write(tmp_path, text: str):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


GOOD = """
hours = 1
[preset.a]
swap_s = 4
[client.x]
preset = "a"
work_s = [1, 2]
think_s = 3
"""


def test_a_workload_file_is_read(tmp_path):
    workload = file.load(write(tmp_path, GOOD))
    assert (workload.name, workload.seconds) == ("mine", 3600.0)
    assert workload.clients == (Client("x", "a", work=(1.0, 2.0), think=(3.0, 3.0)),)
    assert workload.presets[0].swap == 4.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("think_s", "thinks_s"), ':8: unknown key "client.x.thinks_s"; did you mean "think_s"?'),
        (('"a"', '"b"'), ":6: client.x.preset: there is no [preset.b] in this file"),
        (("[1, 2]", "[2, 1]"), ":7: client.x.work_s: must not be negative, and the first of two is the smaller one"),
        (("[1, 2]", '"soon"'), ":7: client.x.work_s: must be a number, or two in [ ]"),
        (("think_s = 3", "burst = 3"), 'the client needs either "think_s" (a loop) or "every_s" (visits)'),
        (("[1, 2]\nthink_s = 3", "0\nthink_s = 0"), "a loop that takes no time never ends"),
        (("swap_s = 4", "swap_s = -4"), ":4: preset.a.swap_s: must be greater than or equal to 0"),
        (("hours = 1", "hours = 1e9"), ":2: hours: must be less than or equal to 744"),
    ],
)
def test_a_mistake_in_it_is_told_with_its_line(tmp_path, change, message):
    with pytest.raises(PresetError) as told:
        file.load(write(tmp_path, GOOD.replace(*change)))
    assert message in str(told.value)


# ----------------------------------------------------------------------------------------------- the picture


def test_the_timeline_is_a_picture_with_a_lane_for_everybody():
    workload = replace(file.war(), seconds=1800.0)
    drawn = timeline(compare(workload, POLICIES, (LOST,)))
    root = ElementTree.fromstring(drawn)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("agent-1") == 3
    assert sum("swaps" in text for text in texts) == 3
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) > 100


def test_names_cannot_become_part_of_the_picture():
    workload = Workload("x", (Preset("p<"),), (Client('<script x="', "p<", think=(1.0, 1.0)),), 60.0)
    root = ElementTree.fromstring(timeline([run(workload, "arrival", LOST)]))
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
