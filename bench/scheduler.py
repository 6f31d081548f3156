"""What one event costs the scheduler while ten thousand requests wait: it decides on the loop that relays the bytes.

    python bench/scheduler.py            # 10,000 waiters, 8 presets
    python bench/scheduler.py --check    # exit code 1 if a mean is above LIMIT_US

The scheduler is a pure state machine, so this is a script that feeds it: a line of waiters with deadlines for eight
presets is set up, and then each kind of event is timed with the line as long as that. An event that answers many
tickets at once (a swap that ends grants everybody who waited for it) is counted once for each of them.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gpu_turnstile.core.model import (
    Cancel,
    Effect,
    Event,
    Grant,
    Lock,
    Mode,
    Refuse,
    Release,
    Renew,
    Request,
    StartSwap,
    SwapSucceeded,
    Tenant,
    Tick,
)
from gpu_turnstile.core.policy import Rules
from gpu_turnstile.core.scheduler import Scheduler

LIMIT_US = 50.0  # mean per event
PRESETS = 8
ROUNDS = 2000
WAIT = 600.0  # seconds a request may wait: every waiter has a deadline


@dataclass
class Line:
    """A scheduler with so many waiters, none of whom can be served: the resident's one lease does not end."""

    waiters: int
    pinned: bool = False  # all wait for the resident, one of a hundred owners each, instead of for the seven others
    now: float = 0.0
    number: int = 0
    swap: int = 0
    waiting: list[int] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.names = [f"preset-{n}" for n in range(PRESETS)]
        tenants = [Tenant(name, Mode.LLM, drain_grace=None, exclusive=self.pinned) for name in self.names]
        self.scheduler = Scheduler(tenants, Rules(), residents=self.names[:1])
        self.feed(Tick())
        self.ask(self.names[0])
        for n in range(self.waiters):
            self.ask(self.names[0 if self.pinned else 1 + n % (PRESETS - 1)])

    def feed(self, event: Event) -> list[Effect]:
        self.now += 1e-4
        effects = self.scheduler.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, Grant):
                self.leases.append(effect.ticket)
            elif isinstance(effect, StartSwap):
                self.swap = effect.swap
        return effects

    def request(self, tenant: str) -> Request:
        self.number += 1
        owner = f"owner-{self.number % 100}" if self.pinned else None
        return Request(self.number, (tenant,), False, False, WAIT, "somebody", owner, None)

    def ask(self, tenant: str) -> None:
        effects = self.feed(self.request(tenant))
        if not any(isinstance(effect, Grant) for effect in effects):
            self.waiting.append(self.number)

    def pick(self) -> int:
        """A waiter somewhere in the line, taken out of our own list."""
        place = self.dice.randrange(len(self.waiting))
        self.waiting[place], self.waiting[-1] = self.waiting[-1], self.waiting[place]
        return self.waiting.pop()


@dataclass(frozen=True)
class Cost:
    what: str
    micros: list[float]

    def row(self) -> str:
        ordered = sorted(self.micros)
        numbers = (statistics.fmean(ordered), ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))])
        return f"{self.what:34} {len(ordered):6} " + " ".join(f"{number:8.1f}" for number in (*numbers, ordered[-1]))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.micros)


def timed(line: Line, event: Event) -> float:
    """Microseconds of CPU for one event, or for each ticket that it answered."""
    line.now += 1e-4
    began = time.thread_time_ns()
    effects = line.scheduler.handle(event, line.now)
    spent = (time.thread_time_ns() - began) / 1000
    answered = [effect for effect in effects if isinstance(effect, Grant | Refuse)]
    line.leases += [effect.ticket for effect in answered if isinstance(effect, Grant)]
    line.swap = next((effect.swap for effect in effects if isinstance(effect, StartSwap)), line.swap)
    return spent / max(1, len(answered))


def requests(line: Line) -> Iterator[float]:
    for _ in range(ROUNDS):
        yield timed(line, line.request(line.dice.choice(line.names)))
        line.feed(Cancel(line.number))


def cancels(line: Line) -> Iterator[float]:
    for _ in range(ROUNDS):
        yield timed(line, Cancel(line.pick()))
        line.ask(line.dice.choice(line.names[1:]))


def ticks(line: Line) -> Iterator[float]:
    for _ in range(ROUNDS):
        yield timed(line, Tick())


def releases(line: Line) -> Iterator[float]:
    """Each ends the last lease but one: the drain goes on."""
    line.feed(Release(line.leases.pop()))
    line.feed(SwapSucceeded(line.swap))
    for _ in range(min(ROUNDS, len(line.leases) - 1)):
        yield timed(line, Release(line.leases.pop()))


def swaps(line: Line) -> Iterator[float]:
    """The last lease of each preset in turn, then the end of the swap that this starts; new ones wait meanwhile."""
    for _ in range(3 * PRESETS):
        while len(line.leases) > 1:
            line.feed(Release(line.leases.pop()))
        yield timed(line, Release(line.leases.pop()))
        yield timed(line, SwapSucceeded(line.swap))
        while sum(1 for _ in line.scheduler.snapshot(line.now).waiting) < line.waiters:
            for _ in range(500):
                line.ask(line.dice.choice(line.names))


def pinned(line: Line) -> Iterator[float]:
    """An owner pins the resident, which has one request at a time; all others wait for it, and for its owners."""
    for n in range(ROUNDS // 4):
        line.number += 1
        yield timed(line, Lock(line.number, f"owner-{n % 3}", line.names[0], 900.0, False, None, ""))
        line.number += 1
        yield timed(line, Renew(line.number, f"owner-{n % 3}", 900.0, None))
        yield timed(line, line.request(line.names[0]))
        yield timed(line, Release(line.leases.pop()))


def measure(what: str, run: Callable[[Line], Iterable[float]], waiters: int, *, pinned: bool = False) -> Cost:
    line = Line(waiters, pinned)
    gc.collect()
    return Cost(what, list(run(line)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiters", type=int, default=10_000)
    parser.add_argument("--check", action="store_true", help=f"fail if a mean is above {LIMIT_US:g} µs")
    given = parser.parse_args()
    costs = [
        measure("a request joins the line", requests, given.waiters),
        measure("a client leaves the line", cancels, given.waiters),
        measure("a timer", ticks, given.waiters),
        measure("a lease ends while others drain", releases, given.waiters),
        measure("a swap starts, and ends: per grant", swaps, given.waiters),
        measure("locks, and work under a lock", pinned, given.waiters, pinned=True),
    ]
    title = f"µs, {given.waiters:,} waiters"
    print(f"{title:34} {'count':>6} {'mean':>8} {'p50':>8} {'p99':>8} {'max':>8}")
    print("\n".join(cost.row() for cost in costs))
    missed = [cost for cost in costs if cost.mean > LIMIT_US]
    for cost in missed:
        print(f"{cost.what}: {cost.mean:.1f} µs, {LIMIT_US:g} µs are allowed", file=sys.stderr)
    return int(given.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
