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
    """

    patience: float | None = 60.0
    colocate: bool = False
    capacity: float = 0.0
    retry_after: float = 30.0


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
