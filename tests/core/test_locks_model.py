"""The lock book beside its model (`lock_model.py`), step by step over random operations.

Time jumps, the gate restarts on another clock, and it crashes: between two calls, and in the middle of one that was
not answered. TURNSTILE_SOAK_LOCKS sets how many operations in all. A failure is repeated by its seed.
"""

from __future__ import annotations

import copy
import json
import os
import random

import pytest

from gpu_turnstile.core.locks import Denied, Granted, LockBook, Missing, Policed, Queued, Refused, Stale, Unlocked
from tests.core.lock_model import Model

OWNERS = ["ann", "bob", "cid", "dee"]
PRESETS = ["a", "b", "c"]
TTLS = [1.0, 4.0, 60.0, 200.0, 900.0]
JUMPS = [0.0, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0, 3.0, 3.0, 20.0, 20.0, 70.0, 300.0]
PLACE_TTL = 120.0


def copied(model: Model) -> Model:
    return Model(model.place_ttl, model.token, [*map(copy.copy, model.holds)], [*map(copy.copy, model.line)])


def plain(answer: object) -> tuple:
    match answer:
        case Granted():
            return ("granted", answer.preset, answer.token, answer.fresh, answer.joined)
        case Queued():
            return ("queued", answer.position)
        case Unlocked():
            return ("unlocked", list(answer.owners), list(answer.waiters))
    kinds = {Refused: "refused", Stale: "stale", Missing: "missing", Denied: "denied", Policed: "policed"}
    return (kinds[type(answer)],)


class Walk:
    """A book and a model that are told the same. `file` is what a restart would find, `paper` the model's copy."""

    def __init__(self, seed: int) -> None:
        self.rnd = random.Random(seed)
        self.now = 0.0
        self.book, self.model = LockBook(PLACE_TTL), Model(PLACE_TTL)
        self.busy: frozenset[str] = frozenset()
        self.file, self.paper = self.book.save(0.0), copied(self.model)

    def pass_time(self, seconds: float) -> None:
        """Wakes up whenever the book wants to, as the scheduler does."""
        until = self.now + seconds
        while (moment := self.book.next_moment) is not None and moment < until:
            assert moment > self.now, "the book asks for a moment that is over"
            self.go(moment)
        self.go(until)

    def go(self, moment: float) -> None:
        gone = self.model.pass_time(moment - self.now, self.busy)
        self.now = moment
        ended = self.book.lapse(moment, self.busy)
        assert {(e.owner, e.token > 0, moment - e.at) for e in ended} == gone
        self.settle()

    def settle(self) -> None:
        """What follows every event: the file is written if it must be."""
        if self.book.dirty(self.now):
            self.file = self.book.save(self.now, self.busy)
            self.paper = copied(self.model)
            for row in self.paper.holds:
                row.left = row.ttl if row.owner in self.busy else row.left
            assert not self.book.dirty(self.now)

    def operate(self) -> None:
        """One call, made to both; they must answer the same."""
        rnd, book, model, now = self.rnd, self.book, self.model, self.now
        owner, preset, dice = rnd.choice(OWNERS), rnd.choice(PRESETS), rnd.random()
        token = rnd.choice([None, None, None, book.token, max(0, book.token - 1)])
        if dice < 0.40:
            ttl, wait, client = rnd.choice(TTLS), rnd.random() < 0.6, rnd.choice(["", "", "bob", "key-7"])
            token = token if rnd.random() < 0.3 else None
            said = plain(book.lock(preset, owner, ttl, now, wait=wait, token=token, client=client))
            assert said == model.lock(preset, owner, ttl, wait, token, client)
        elif dice < 0.60:
            ttl = rnd.choice([None, None, *TTLS])
            assert plain(book.renew(owner, ttl, now, token=token)) == model.renew(owner, ttl, token)
        elif dice < 0.75:
            name, caller = rnd.choice([None, owner, owner]), rnd.choice([None, None, *OWNERS, "key-7"])
            force, leave = rnd.random() < 0.2, rnd.random() < 0.2
            said = plain(book.unlock(name, now, caller=caller, token=token, force=force, leave=leave))
            assert said == model.unlock(name, caller, token, force, leave)
        elif dice < 0.98:
            marked = rnd.choice([None, owner])
            answer = book.admit((preset,), now, owner=marked, token=token)
            said = ("runs",) if answer is None else plain(answer)
            assert said == model.request(preset, marked, token)
            if said[0] in ("runs", "granted"):
                book.touch(preset, marked if token is None else book.owner_of(token), now)
        elif dice < 0.99:
            book.break_glass(now, "stuck")
            model.holds = []
        else:
            self.work(frozenset(rnd.sample(OWNERS, rnd.choice([0, 0, 1, 2]))))

    def work(self, busy: frozenset[str]) -> None:
        """Work begins for some and ends for others; both are traffic."""
        for owner in sorted(self.busy ^ busy):
            self.book.touch(self.book.preset or "", owner, self.now)
            for row in self.model.holds + self.model.line:
                if row.owner == owner:
                    self.model.hear(row)
        self.busy = busy

    def restart(self, *, orderly: bool) -> None:
        """The gate comes up again with another clock. An orderly end has saved once more."""
        if orderly:
            self.file, self.paper = self.book.save(self.now), copied(self.model)
        self.check_file()
        self.now, self.busy = self.rnd.choice([0.0, 5e5, 1e6]), frozenset()
        self.book, odd = LockBook.recover(json.loads(json.dumps(self.file)), self.now, PLACE_TTL)
        self.model = copied(self.paper)
        assert odd == ()
        assert not self.book.dirty(self.now)

    def check_file(self) -> None:
        """No answered lock is lost, none is freed or prolonged by more than its grain."""
        paper = {(r.owner, r.token): r for r in self.paper.holds}
        assert paper.keys() == {(r.owner, r.token) for r in self.model.holds}
        for row in self.model.holds:
            grain, there = min(30.0, max(1.0, row.ttl / 4)), paper[row.owner, row.token].left
            assert there >= row.left - grain
            assert there <= (row.ttl if row.owner in self.busy else row.left + grain)

    def compare(self) -> None:
        there = self.book.standing(self.now)
        model = self.model
        assert [(o.owner, o.ttl, o.expires_in) for o in there.owners] == [(r.owner, r.ttl, r.left) for r in model.holds]
        assert [(w.owner, w.preset, w.expires_in) for w in there.queue] == [
            (r.owner, r.preset, r.left) for r in model.line
        ]
        assert there.preset == (model.holds[0].preset if model.holds else None)
        assert self.book.token == model.token

    def step(self) -> None:
        dice = self.rnd.random()
        if dice < 0.004:
            self.restart(orderly=dice < 0.002)
        elif dice < 0.006:
            self.operate()  # and dies before it could answer
            self.model = copied(self.paper)
            self.restart_unanswered()
        elif dice < 0.3:
            self.pass_time(self.rnd.choice(JUMPS))
        else:
            self.operate()
            self.settle()
        self.compare()

    def restart_unanswered(self) -> None:
        self.now, self.busy = self.now + 1000.0, frozenset()
        self.book, odd = LockBook.recover(json.loads(json.dumps(self.file)), self.now, PLACE_TTL)
        assert odd == ()


@pytest.mark.timeout(1800)
def test_the_book_does_what_its_model_does():
    wanted, seed = int(os.environ.get("TURNSTILE_SOAK_LOCKS", "100000")), 0
    while wanted > 0:
        walk = Walk(seed)
        for step in range(min(wanted, 2000)):
            try:
                walk.step()
            except AssertionError as problem:
                raise AssertionError(f"seed {seed}, step {step}") from problem
        wanted, seed = wanted - 2000, seed + 1
