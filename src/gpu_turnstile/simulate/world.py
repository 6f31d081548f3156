"""A card, engines and clients in simulated time around a scheduler: the real one, or one of the baselines.

Deterministic: the same workload and the same order give the same outcome. The world keeps to the scheduler's contract
(events in, effects out) and adds what an engine does: a swap takes its time, a client whose context was lost makes its
engine read it again, and a cut answer is asked for once more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gpu_turnstile.core.model import (
    Cut,
    Effect,
    Event,
    Grant,
    Refuse,
    Release,
    Request,
    SetTimer,
    StartSwap,
    StartUnload,
    SwapSucceeded,
    Tick,
)
from gpu_turnstile.simulate.outcome import Outcome, Served, Span
from gpu_turnstile.simulate.workload import Client, Job, Workload

LOST, KEPT = "lost", "kept"  # what becomes of contexts in a swap
UNLOAD = 1.0  # seconds an unload takes


class Gate(Protocol):
    """What decides: `core.scheduler.Scheduler`, or something that stands in for it."""

    def handle(self, event: Event, now: float) -> list[Effect]: ...


@dataclass(slots=True)
class _Asked:
    """A ticket: who asked for what, and when. `since`: when it became a lease; `prefill`: what is read again first."""

    client: Client
    job: Job
    at: float
    since: float | None = None
    prefill: float = 0.0


class World:
    def __init__(self, workload: Workload, gate: Gate, policy: str, context: str = LOST) -> None:
        self.workload = workload
        self._gate = gate
        self._context = context
        loops = tuple(client.name for client in workload.clients if client.is_loop)
        self.outcome = Outcome(policy, context, workload.seconds, loops)
        self._presets = {preset.name: preset for preset in workload.presets}
        self._now = 0.0
        self._order = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets: dict[int, _Asked] = {}
        self._number = 0
        self._timer = 0  # the newest alarm; older ones are void
        self._away: dict[str, set[str]] = {}  # preset -> clients whose context is not in its engine
        self._known: dict[str, set[str]] = {preset: set() for preset in self._presets}  # … and whose is
        self._plays: dict[str, Iterator[Job]] = {}
        self._after: dict[str, Job] = {}  # client -> what it asks for after its next answer

    def run(self) -> Outcome:
        for client in self.workload.clients:
            self.outcome.clients[client.name] = Served(client.preset)
            self._plays[client.name] = client.play(self.workload.seed, self.workload.seconds)
            self._next(client)
        while self._agenda and self._agenda[0][0] <= self.workload.seconds:
            self._now, _, act = heapq.heappop(self._agenda)
            act()
        self._now = self.workload.seconds
        for asked in self._tickets.values():
            if asked.since is None:  # who still waits has waited so long at least
                self._waited(asked)
        return self.outcome

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (moment, self._order, act))

    # -------------------------------------------------------------------------------------------- clients

    def _next(self, client: Client) -> None:
        """Its next job: asked for at its time, or some time after the answer that is still to come."""
        job = next(self._plays[client.name], None)
        if job is None:
            return
        if job.at is None:
            self._after[client.name] = job
        else:
            self._at(max(self._now, job.at), lambda: self._come(client, job))

    def _come(self, client: Client, job: Job) -> None:
        self._ask(client, job, self._now)
        self._next(client)

    def _ask(self, client: Client, job: Job, at: float) -> None:
        self._number += 1
        self._tickets[self._number] = _Asked(client, job, at)
        self._feed(Request(self._number, (client.preset,), client=client.name))

    def _granted(self, ticket: int) -> None:
        asked = self._tickets[ticket]
        client, preset = asked.client, self._presets[asked.client.preset]
        asked.since = self._now
        self._waited(asked)
        if client.name in self._away.get(preset.name, ()):
            self._away[preset.name].discard(client.name)
            asked.prefill = min(client.context, preset.restore) if self._context == KEPT else client.context
        self._known[preset.name].add(client.name)
        self._at(self._now + asked.prefill + asked.job.work, lambda: self._done(ticket))

    def _waited(self, asked: _Asked) -> None:
        self.outcome.clients[asked.client.name].waits.append(self._now - asked.at)
        if self._now > asked.at:
            self.outcome.spans.append(Span("wait", asked.client.name, asked.at, self._now))

    def _done(self, ticket: int) -> None:
        asked = self._tickets.pop(ticket, None)
        if asked is None:  # it was cut
            return
        self._used(asked)
        self.outcome.clients[asked.client.name].done += 1
        self.outcome.asked.append((asked.client.name, asked.at, asked.job.work))
        self._feed(Release(ticket))
        client, job = asked.client, self._after.pop(asked.client.name, None)
        if job is not None:
            self._at(self._now + job.pause, lambda: self._come(client, job))

    def _used(self, asked: _Asked) -> None:
        since = self._now if asked.since is None else asked.since
        read = min(self._now, since + asked.prefill)
        self.outcome.clients[asked.client.name].prefill += read - since
        for what, begin, end in (("prefill", since, read), ("work", read, self._now)):
            if end > begin:
                self.outcome.spans.append(Span(what, asked.client.name, begin, end))

    def _cut(self, tickets: tuple[int, ...]) -> None:
        for ticket in tickets:
            asked = self._tickets.pop(ticket)
            self._used(asked)
            self.outcome.clients[asked.client.name].cut += 1
            self._ask(asked.client, asked.job, self._now)

    # --------------------------------------------------------------------------------------- the scheduler

    def _feed(self, event: Event) -> None:
        for effect in self._gate.handle(event, self._now):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Grant(ticket):
                self._granted(ticket)
            case StartSwap(swap, target, evict, cut):
                self._swap_begins(evict, cut)
                self._at(self._now + self._presets[target].swap, lambda: self._swapped(swap, target, self._now))
                since, until = self._now, self._now + self._presets[target].swap
                self.outcome.swaps += 1
                self.outcome.swapping += max(0.0, min(until, self.workload.seconds) - since)
                self.outcome.spans.append(Span("swap", target, since, until))
            case StartUnload(swap, evict, cut):
                self._swap_begins(evict, cut)
                self.outcome.unloads += 1
                self._at(self._now + UNLOAD, lambda: self._feed(SwapSucceeded(swap)))
            case Cut(tickets):
                self._cut(tickets)
            case SetTimer(at):
                self._timer += 1
                if at is not None:
                    number = self._timer
                    self._at(max(at, self._now), lambda: self._tick(number))
            case Refuse(ticket, _, _, retry_after):
                self._refused(ticket, retry_after)
            case _:
                pass

    def _tick(self, number: int) -> None:
        if number == self._timer:
            self._feed(Tick())

    def _refused(self, ticket: int, retry_after: float | None) -> None:
        asked = self._tickets.pop(ticket)
        self.outcome.clients[asked.client.name].refused += 1
        self._at(self._now + (retry_after or 0.0), lambda: self._ask(asked.client, asked.job, asked.at))

    def _swap_begins(self, evict: tuple[str, ...], cut: tuple[int, ...]) -> None:
        """Contexts go with their engine; whoever is cut asks again once the scheduler has been told everything."""
        for name in evict:
            self._away.setdefault(name, set()).update(self._known[name])
            self._known[name].clear()
        if cut:
            self._at(self._now, lambda: self._cut(cut))

    def _swapped(self, swap: int, target: str, now: float) -> None:
        self._feed(SwapSucceeded(swap, self._refill(target)))

    def _refill(self, target: str) -> float:
        """What the gate can know: whose context this engine had and lost, and what reading it again takes."""
        clients = [c for c in self.workload.clients if c.name in self._away.get(target, ())]
        if self._context == KEPT:
            return 0.0
        return sum(client.context for client in clients)
