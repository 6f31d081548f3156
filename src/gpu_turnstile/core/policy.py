"""Who goes next. Pure functions over what the scheduler shows them; the scheduler owns the state.

The order, first rule that tells two tickets apart:
1. A completed swap serves the waiters it was made for before anybody else is looked at (else three tenants livelock).
2. A ticket for another tenant that has waited longer than `patience` ends the resident's turn, oldest first.
   So no stream of requests for the resident, and no long batch of image jobs, keeps another tenant out.
3. A higher rank goes before a lower one (image before LLM, in the turnstile setting).
4. Waiters the resident was brought in for, before others (a batch of image jobs is not split).
5. Arrival.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of the scheduler.

    `patience`: seconds after which a waiting ticket ends another tenant's turn; None = never.
    `colocate`: tenants that fit together may share the card; `capacity`: GB they may use in all.
    `retry_after`: seconds a refused client is told to stay away.
    `rollback`: after a failed swap the tenant that had to leave for it comes back.
    `hold_back_after`: so many failed swaps in a row, and a tenant is not tried again for `hold_back` seconds, which
    double with every further failure up to `hold_back_max`: a broken preset must not evict a good one each time.
    `home`: the tenant that is brought back when the card has had nothing to do for `home_after` seconds; None = nobody.
    """

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
class Head:
    """The oldest ticket of one queue, with what the policy may know about it."""

    seq: int
    rank: int
    since: float
    served: bool  # a resident can serve it
    cohort: bool  # it waited already when that resident came in
    fresh: bool  # that resident has not served anybody yet


def order(head: Head, now: float, rules: Rules) -> tuple[int, int, int, int]:
    """The sort key of a head; the smallest goes next."""
    if head.cohort and head.fresh:
        return (0, -head.rank, 0, head.seq)
    if not head.served and rules.patience is not None and now - head.since > rules.patience:
        return (1, 0, 0, head.seq)
    return (2, -head.rank, 0 if head.cohort else 1, head.seq)


def next_head(heads: Iterable[Head], now: float, rules: Rules) -> Head | None:
    """The head that must be served next, or None when nobody waits."""
    return min(heads, key=lambda h: order(h, now, rules), default=None)


def held_back_for(failures: int, rules: Rules) -> float:
    """Seconds a tenant is not tried after so many failed swaps in a row; 0 = it may be tried at once."""
    beyond = failures - rules.hold_back_after
    return 0.0 if beyond < 0 else min(rules.hold_back * 2.0**beyond, rules.hold_back_max)
