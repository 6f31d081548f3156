"""The eight invariants of the scheduler, after every step of generated runs. `make soak` runs a million steps."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.core.world import RULES, TENANTS, World

NAMES = [t.name for t in TENANTS]
OWNERS = ["me", "you"]
WAITS = [None, None, 0, 5.0, 90.0]

wants = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map(tuple)


class Generated(RuleBasedStateMachine):
    @initialize(rules=st.sampled_from(RULES), coming=st.sampled_from([None, *NAMES]))
    def begin(self, rules, coming):
        self.world = World(rules, coming)

    @rule(wants=wants, visit=st.integers(0, 9), wait=st.sampled_from(WAITS))
    def ask(self, wants, visit, wait):
        self.world.request(wants, in_place=len(wants) > 1, visit=visit == 0, wait=wait)

    @rule(tenant=st.sampled_from(NAMES))
    def ask_for_one(self, tenant):
        self.world.request((tenant,), in_place=False, visit=False, wait=None)

    @precondition(lambda self: self.world.leases)
    @rule(data=st.data())
    def release(self, data):
        self.world.release(data.draw(st.sampled_from(sorted(self.world.leases))))

    @rule(data=st.data())
    def cancel(self, data):
        self.world.cancel(data.draw(st.integers(1, self.world.tickets + 1)))

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 10.0, 61.0, 400.0]))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)

    @precondition(lambda self: self.world.swap)
    @rule(refill=st.sampled_from([0.0, 5.0, 500.0]))
    def swap_succeeds(self, refill):
        self.world.swap_ends(True, refill=refill)

    @precondition(lambda self: self.world.swap)
    @rule(truth=st.sampled_from(["empty", "back", "stuck"]))
    def swap_fails(self, truth):
        fail(self.world, truth)

    @rule(tenant=st.sampled_from(NAMES))
    def engine_lost(self, tenant):
        self.world.engine_lost(tenant)

    @rule(tenant=st.sampled_from(NAMES))
    def wedged(self, tenant):
        self.world.wedged(tenant)

    @rule(owner=st.sampled_from(OWNERS), tenant=st.sampled_from([None, *NAMES]), ttl=st.sampled_from([1.0, 50.0]))
    def lock(self, owner, tenant, ttl):
        self.world.lock(owner, tenant, ttl)

    @rule(owner=st.sampled_from([None, *OWNERS]))
    def unlock(self, owner):
        self.world.unlock(owner)

    @rule(owner=st.sampled_from(OWNERS))
    def renew(self, owner):
        self.world.renew(owner, 50.0)

    @rule(tenant=st.sampled_from(NAMES))
    def set_mode(self, tenant):
        self.world.set_mode(tenant)

    @rule()
    def unload(self):
        self.world.unload()

    @rule()
    def break_glass(self):
        self.world.break_glass()

    @rule(dropped=st.sampled_from([None, None, *NAMES]), changed=st.sampled_from([None, *NAMES]))
    def change_presets(self, dropped, changed):
        self.world.change_presets(dropped, changed)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.go_home()


def fail(world: World, truth: str) -> None:
    """A swap fails, and the truth is: nothing there, the victims still serve, or one of them hangs."""
    victims = world.swap.evict[:1]
    world.swap_ends(False, residents=victims if truth == "back" else (), stuck=victims if truth == "stuck" else ())


def test_the_invariants_hold_in_generated_runs():
    run_state_machine_as_test(
        Generated,
        settings=settings(
            max_examples=200,
            stateful_step_count=100,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=bool(os.environ.get("CI")),
        ),
    )


def stroll(seed: int, steps: int) -> int:
    """A random walk of `steps` events; faster than Hypothesis, and any failure is repeated by its seed."""
    rnd = random.Random(seed)
    world = World(RULES[seed % len(RULES)], rnd.choice([None, *NAMES]))
    while world.steps < steps:
        dice = rnd.random()
        if dice < 0.36:
            wants = tuple(rnd.sample(NAMES, rnd.choice([1, 1, 1, 2])))
            world.request(wants, len(wants) > 1, rnd.random() < 0.05, rnd.choice(WAITS))
        elif dice < 0.60 and world.leases:
            world.release(rnd.choice(list(world.leases)))
        elif dice < 0.66:
            world.cancel(rnd.randint(max(1, world.tickets - 20), world.tickets + 1))
        elif dice < 0.80:
            world.pass_time(rnd.choice([0.0, 0.1, 2.0, 7.0, 70.0]))
        elif dice < 0.93 and world.swap:
            if rnd.random() < 0.85:
                world.swap_ends(True, refill=rnd.choice([0.0, 5.0, 500.0]))
            else:
                fail(world, rnd.choice(["empty", "back", "stuck"]))
        elif dice < 0.94:
            world.engine_lost(rnd.choice(NAMES))
        elif dice < 0.95:
            world.wedged(rnd.choice(NAMES))
        elif dice < 0.96:
            world.lock(rnd.choice(OWNERS), rnd.choice([None, *NAMES]), rnd.choice([1.0, 50.0]))
        elif dice < 0.975:
            world.unlock(rnd.choice([None, *OWNERS]))
        elif dice < 0.985:
            world.set_mode(rnd.choice(NAMES))
        elif dice < 0.988:
            world.unload()
        elif dice < 0.99:
            world.break_glass()
        else:
            world.change_presets(rnd.choice([None, *NAMES]), rnd.choice([None, *NAMES]))
    world.go_home()
    return world.steps


@pytest.mark.timeout(1800)
def test_the_invariants_hold_on_long_random_walks():
    """TURNSTILE_SOAK_STEPS sets how many steps in all; `make soak` asks for a million."""
    wanted, seed = int(os.environ.get("TURNSTILE_SOAK_STEPS", "20000")), 0
    while wanted > 0:
        wanted -= stroll(seed, 1000)
        seed += 1
