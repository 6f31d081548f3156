"""kill -9 under lock traffic: the state file is old or new, never mixed, and no answered lock is lost.

TURNSTILE_KILLS says how often (`make kill-locks`: 200). A failure is repeated by its seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import tomllib

import httpx
import pytest

from tests.e2e.gate import Gate
from tests.e2e.house import llama, write
from tests.e2e.lock_traffic import GRAIN, Hold, Owner, Place, traffic

KILLS = int(os.environ.get("TURNSTILE_KILLS", "6"))
SEED = int(os.environ.get("TURNSTILE_SEED", "1"))


def read(gate):
    """What the file says. It is there, whole, and in itself true."""
    lock = tomllib.loads((gate.folder / "state" / "active.toml").read_text())["lock"]
    owners, tokens = lock["owners"], [row["token"] for row in lock["owners"].values()]
    assert bool(owners) == ("preset" in lock)
    assert len(set(tokens)) == len(tokens)
    assert max(tokens, default=0) <= lock["token"]
    names = [row["owner"] for row in lock["queue"]]
    assert len(set(names)) == len(names)
    return lock


def check_file(lock, owners, newest):
    """Every owner is known as it was told, or as its one open call may have left it; nobody else is."""
    places = {row["owner"]: Place(row["preset"], row["ttl"]) for row in lock["queue"]}
    assert {*lock["owners"], *places} <= {owner.name for owner in owners}
    for owner in owners:
        row = lock["owners"].get(owner.name)
        hold = Hold(lock["preset"], row["token"], row["ttl"]) if row else None
        found = (hold, places.get(owner.name))
        assert owner.possible(found, newest), f"{owner} is {found} in {lock}"
        if row and owner.pending is None:
            assert row["ttl"] >= row["left"] >= row["ttl"] - (time.monotonic() - owner.heard_at) - GRAIN
        if found[1] and (owner.place is None or owner.place.preset != found[1].preset):
            owner.entered = (owner.asked_at, time.monotonic())
        owner.hold, owner.place, owner.pending = *found, None
    waiting = {owner.name: owner for owner in owners}
    line = [waiting[row["owner"]] for row in lock["queue"]]
    for at, first in enumerate(line):
        for later in line[at + 1 :]:
            assert later.entered[1] > first.entered[0], f"{later.name} was told of its place before {first.name} asked"


def check_gate(gate, lock, owners):
    """The gate that came up knows what the file said, and every token still opens its lock."""
    found = httpx.get(f"{gate.url}/status", trust_env=False).json()["locks"]
    assert (found["preset"], list(found["owners"])) == (lock.get("preset"), list(lock["owners"]))
    assert [row["owner"] for row in found["queue"]] == [row["owner"] for row in lock["queue"]]
    for name, row in lock["owners"].items():
        assert found["owners"][name]["expires_in"] == pytest.approx(row["left"], abs=5)
    for owner in owners:
        if owner.hold is not None and not any(row["owner"] == owner.name for row in lock["queue"]):
            body = {"renew": True, "owner": owner.name, "token": owner.hold.token}
            answer = httpx.post(f"{gate.url}/lock", json=body, trust_env=False)
            assert (answer.status_code, answer.json()["token"]) == (200, owner.hold.token)
            owner.heard_at = time.monotonic()


@pytest.mark.timeout(max(120, KILLS * 6))
def test_a_gate_that_is_killed_at_any_moment_loses_no_answered_lock(tmp_path):
    write(tmp_path, [llama("a"), llama("b"), llama("c")])
    gate, rnd = Gate(tmp_path), random.Random(SEED)
    owners = [Owner(f"o{number}", random.Random(SEED * 100 + number)) for number in range(6)]
    newest = 0
    gate.start()
    try:
        for kill in range(KILLS):
            asyncio.run(traffic(owners, gate.url, rnd.uniform(0.0, 0.25), gate.kill))
            lock = read(gate) if (tmp_path / "state" / "active.toml").exists() else None
            if lock is None:
                assert all(owner.state == (None, None) for owner in owners)
                lock = {"token": 0, "owners": {}, "queue": []}
            newest = max(newest, *(owner.hold.token for owner in owners if owner.hold), 0, 0)
            assert lock["token"] >= newest, "a token that was given is never given again"
            try:
                check_file(lock, owners, newest)
                gate.start()
                check_gate(gate, lock, owners)
            except AssertionError as problem:
                raise AssertionError(f"seed {SEED}, kill {kill}") from problem
    finally:
        gate.stop()
    answered = sum(owner.answered for owner in owners)
    print(f"{KILLS} kills, {answered} answered calls")
    assert answered > 10 * KILLS
    assert [file.name for file in (tmp_path / "state").glob(".active.toml.*")] == [], "what a kill left half-written"
