"""Whose turn it is: the waiting tickets as the policy must see them, and what a swap gives its target.

`policy.py` has the rules as functions of numbers; here are the numbers: what swaps have cost, how soon clients come
back, how much of the card they had. It grants nothing and starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from gpu_turnstile.core import policy
from gpu_turnstile.core.card import Card, Resident, Swap
from gpu_turnstile.core.habits import Habits
from gpu_turnstile.core.line import Line, Queue
from gpu_turnstile.core.locks import LockBook
from gpu_turnstile.core.model import Effect, Kept, Tenant, War
from gpu_turnstile.core.policy import Order, Rules
from gpu_turnstile.core.wars import Made, Wars

MANY = 20  # tickets of one queue whose clients are named
NEVER = float("-inf")


class Turns:
    """`held`: when whoever waits for the end of a turn is looked at again; None = nobody does."""

    def __init__(self, rules: Rules, line: Line, card: Card, book: LockBook) -> None:
        self.held: float | None = None
        self._rules = rules
        self._line = line
        self._card = card
        self._book = book
        self._habits = Habits()
        self._wars = Wars()
        self._costs: dict[str, float] = {}  # tenant -> seconds its last swap took

    def came(self, client: str, wants: tuple[str, ...], now: float) -> None:
        """A client asks, whether it is served at once or not."""
        if self._habits.away:
            self._habits.came(client, wants, now)

    def left(self, resident: Resident, client: str, since: float, now: float) -> None:
        """A lease has ended. Where others wait, the card may be kept for that client's next request."""
        if self._line and self._rules.order is Order.AMORTISED:
            gap = self._habits.left(client, resident.tenant.name, since, now)
            resident.expects = max(resident.expects, now + policy.lingers(gap, resident.turn, self._rules))

    # ------------------------------------------------------------------------------------------ who is next

    def wanted(self, queue: Queue) -> str:
        """Whom to bring in for a queue: its first choice, or the locked preset, which is one of its choices then."""
        return self._book.preset or queue.wants[0]

    def heads(self, now: float) -> Iterator[tuple[Queue, Resident | None, policy.Head]]:
        """Every queue with the resident that can serve its head, if any; whoever must be served next first."""
        queues = self._line.queues()
        residents = [self._card.serving(queue.wants) for queue in queues]
        floors = self._floors(queues, residents, now)
        heads = [self._head(queue, resident, floors, now) for queue, resident in zip(queues, residents, strict=True)]
        for place in policy.ranked(heads, now):
            yield queues[place], residents[place], heads[place]

    def _floors(
        self, queues: tuple[Queue, ...], residents: list[Resident | None], now: float
    ) -> dict[int, tuple[float, bool]]:
        """By rank: until when no equal may end what the residents do, and whether one of them is in its turn."""
        waited_for = [r for q, r in zip(queues, residents, strict=True) if r is not None and q.head.seq <= r.cohort]
        floors: dict[int, tuple[float, bool]] = {}
        for resident in self._card.residents.values():
            floor = resident.batch_until if any(r is resident for r in waited_for) else NEVER
            in_turn = resident.in_turn(now)
            if in_turn:
                floor = max(floor, resident.turn.floor)
            before, turns = floors.get(resident.tenant.rank, (floor, False))
            floors[resident.tenant.rank] = (max(before, floor), turns or in_turn)
        return floors

    def _head(
        self, queue: Queue, resident: Resident | None, floors: dict[int, tuple[float, bool]], now: float
    ) -> policy.Head:
        ticket = queue.head
        if resident is not None:
            cohort = ticket.seq <= resident.cohort
            return policy.Head(ticket.seq, queue.rank, True, cohort, resident.fresh, resident.in_turn(now))
        floor, in_turn = floors.get(queue.rank, (NEVER, False))
        swap = self._costs.get(self.wanted(queue), 0.0)
        ends = policy.impatient_at(ticket.since, floor, swap if in_turn else None, self._rules)
        return policy.Head(ticket.seq, queue.rank, ends=ends, used=self._habits.used(ticket.client, now))

    def must_wait(self, head: policy.Head, victims: Iterable[Resident], now: float) -> bool:
        """Whether somebody who would have to leave for this head is in its turn, and the head may still wait.

        Nobody has a turn under a lock: whoever waits then waits for the pinned preset.
        """
        if self._book.preset is not None:
            return False
        kept = max((r.kept_until(now) for r in victims if r.tenant.rank == head.rank), default=now)
        if head.ends is not None:
            kept = min(kept, head.ends)
        if kept <= now:
            return False
        self.held = kept if self.held is None else min(self.held, kept)
        return True

    # ---------------------------------------------------------------------------------------- what swaps cost

    def swapped(
        self, swap: Swap, target: Tenant, refill: float, tenants: Mapping[str, Tenant], now: float
    ) -> Iterable[Effect]:
        """What it has cost to bring the target in, and what it may do for that. Returns what there is to tell."""
        seconds = now - swap.since
        self._costs[target.name] = seconds
        resident = self._card.residents[target.name]
        resident.turn = policy.turn(now, seconds, refill, self._rules)
        round_trip = seconds + refill + sum(victim.turn.cost for victim in swap.victims.values())
        resident.batch_until = policy.batch_until(now, round_trip, self._rules)
        evicted = tuple(name for name in swap.victims if name != target.name)
        made = Made(now, target.name, evicted, self._clients(target), seconds, refill)
        return self._wars.swapped(made, tenants, self._rules)

    def _clients(self, target: Tenant) -> tuple[str, ...]:
        """For whom it was brought in; of a long line the first."""
        queues = [queue for queue in self._line.queues() if self.wanted(queue) == target.name]
        firsts = (entry for queue in queues for entry in islice(queue.entries.values(), MANY))
        return tuple(dict.fromkeys(entry.client for entry in firsts))

    def war(self, now: float) -> War | None:
        """The swap war that goes on."""
        return self._wars.at(now)

    def kept(self, now: float) -> Kept | None:
        """Whom the card is kept for while somebody waits for the end of that turn."""
        if self.held is None:
            return None
        resident = max(self._card.residents.values(), key=lambda r: r.kept_until(now), default=None)
        if resident is None or resident.kept_until(now) <= now:
            return None
        return Kept(resident.tenant.name, self.held, resident.turn.cost, not resident.leases)
