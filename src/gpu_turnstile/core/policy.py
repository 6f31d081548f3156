"""Who goes next. Pure functions over what the scheduler shows them; the scheduler owns the state.

The order, first rule that tells two tickets apart:
1. A completed swap serves the waiters it was made for before anybody else is looked at (else three tenants livelock).
2. A ticket for another tenant that has waited longer than `patience` ends the resident's batch, oldest first; where
   the resident is in its turn, it takes `max_wait` instead. So no stream of requests for the resident, and no long
   batch of image jobs, keeps another tenant out.
3. A higher rank goes before a lower one (image before LLM, in the turnstile setting).
4. Waiters the resident was brought in for (a batch of image jobs is not split), and whoever comes in its turn,
   before others.
5. Arrival; but of several tenants that could be brought in next, the one whose client had less of the card lately.

The turn (`amortised`; `arrival` knows none): who was expensive to bring in serves its own next requests for a time in
proportion to that cost. Meanwhile it does not drain for an equal rank, and it is kept, with nothing to do, for a
client that has shown that it comes back soon. Order within one tenant is always arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

FAIR_STEP = 60.0  # seconds of the card; two clients whose share differs by less are equal


class Order(StrEnum):
    """How equal tenants share the card."""

    AMORTISED = "amortised"  # in turns that are worth their swap
    ARRIVAL = "arrival"  # whoever waits longest


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of the scheduler.

    `order`: how equal tenants share the card. The turn of one that took `cost` seconds to bring in is `share` * cost
    (and what its clients need to read lost contexts again); it is kept idle for `linger` * cost at most.
    `max_wait`: seconds after which a waiting ticket ends another tenant's turn, the swap for it counted in.
    `patience`: seconds after which a waiting ticket ends another tenant's batch; None = never.
    `colocate`: tenants that fit together may share the card; `capacity`: GB they may use in all.
    `retry_after`: seconds a refused client is told to stay away.
    `rollback`: after a failed swap the tenant that had to leave for it comes back.
    `hold_back_after`: so many failed swaps in a row, and a tenant is not tried again for `hold_back` seconds, which
    double with every further failure up to `hold_back_max`: a broken preset must not evict a good one each time.
    `home`: the tenant that is brought back when the card has had nothing to do for `home_after` seconds; None = nobody.
    """

    order: Order = Order.AMORTISED
    share: float = 2.0
    linger: float = 1.0
    max_wait: float = 180.0
    patience: float | None = 60.0
    colocate: bool = False
    capacity: float = 0.0
    retry_after: float = 30.0
    rollback: bool = False
    hold_back_after: int = 3
    hold_back: float = 30.0
    hold_back_max: float = 900.0
    home: str | None = None
    home_after: float = 120.0


@dataclass(frozen=True, slots=True)
class Turn:
    """The time a tenant has the card for itself. Until `floor` nobody of its rank drains it, whatever they waited:
    its clients read again what the swap has cost them. `cost`: seconds it took to bring in, those included.
    """

    floor: float
    until: float
    cost: float


NO_TURN = Turn(float("-inf"), float("-inf"), 0.0)


def turn(settled: float, swap: float, refill: float, rules: Rules) -> Turn:
    """Of a tenant that is ready since `settled`, after a swap of so many seconds; `refill`: contexts to be read again.

    The floor is bounded like a wait: what is told to be lost is not always read again.
    """
    if rules.order is not Order.AMORTISED:
        return NO_TURN
    cost, floor = swap + refill, settled + min(refill, rules.max_wait)
    return Turn(floor, floor + rules.share * cost, cost)


def lingers(gap: float | None, turn: Turn, rules: Rules) -> float:
    """Seconds the card is kept for a client that usually comes back within `gap`; None = nobody knows."""
    longest = rules.linger * turn.cost
    return gap if gap is not None and gap <= longest else 0.0


class Head(NamedTuple):
    """The oldest ticket of one queue, with what the policy may know about it."""

    seq: int
    rank: int
    served: bool = False  # a resident can serve it
    cohort: bool = False  # it waited already when that resident came in
    fresh: bool = False  # that resident has not served anybody yet
    turn: bool = False  # that resident is in its turn
    ends: float | None = None  # when its wait ends the turns and batches in its way; None = never
    used: float = 0.0  # seconds of the card its client had lately


def batch_until(settled: float, cost: float, rules: Rules) -> float:
    """Until when a batch is not split for an equal, whatever he waited: the swap was made for it.

    `cost`: seconds to bring this tenant in again, and before it whoever had to leave; that is what a split costs.
    """
    least = rules.patience or 0.0
    if rules.order is not Order.AMORTISED:
        return settled + least
    return settled + max(least, min(rules.share * cost, rules.max_wait))


def impatient_at(since: float, floor: float, swap: float | None, rules: Rules) -> float | None:
    """When a waiting ticket ends what is in its way; None = never. `floor`: not before.

    `swap`: where a turn is in its way, the seconds it takes to bring its tenant in; else None.
    """
    if swap is not None:
        return max(since + max(0.0, rules.max_wait - swap), floor)
    return None if rules.patience is None else max(since + rules.patience, floor)


def order(head: Head, now: float) -> tuple[int, int, int, int]:
    """The sort key of a head; the smallest goes next."""
    if head.cohort and head.fresh:
        return (0, -head.rank, 0, head.seq)
    if not head.served and head.ends is not None and now >= head.ends:
        return (1, 0, 0, head.seq)
    return (2, -head.rank, 0 if head.cohort or head.turn else 1, head.seq)


def ranked(heads: Sequence[Head], now: float) -> list[int]:
    """The places of the heads, whoever must be served next first.

    Fair between clients where that costs nobody his place behind a resident: only among those for whom somebody has
    to be brought in anyway, of one rank, and while none of them has waited too long.
    """
    places = sorted(range(len(heads)), key=lambda place: order(heads[place], now))
    first = heads[places[0]] if places else None
    if first is None or first.served or order(first, now)[0] != 2:
        return places
    peers = [p for p in places if not heads[p].served and heads[p].rank == first.rank]
    fairest = min(peers, key=lambda p: (heads[p].used // FAIR_STEP, heads[p].seq))
    places.remove(fairest)
    return [fairest, *places]


def held_back_for(failures: int, rules: Rules) -> float:
    """Seconds a tenant is not tried after so many failed swaps in a row; 0 = it may be tried at once."""
    beyond = failures - rules.hold_back_after
    return 0.0 if beyond < 0 else min(rules.hold_back * 2.0**beyond, rules.hold_back_max)
