"""Swap wars: ordinary clients on different presets that take the card from each other for ever.

Each of them is right by itself, so nobody notices but by the bill (2026-09-19: thirteen minutes, a swap every 90 s).
A swap that brings back a tenant that had to leave a moment ago is a *return*. Several returns within WINDOW that cost
a noticeable part of the time are a war. It is told once, and again when other presets or clients are in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpu_turnstile.core import budget
from gpu_turnstile.core.model import Note, Tenant, War
from gpu_turnstile.core.policy import Order, Rules

WINDOW = 900.0  # seconds
RETURNS = 4  # A, B, and both twice again
WORTH = 0.08  # part of the time that has to be lost before it is worth a word
SHORTEST = 60.0  # seconds that a war must last
NAMES = 5  # clients of a preset that are named


@dataclass(frozen=True, slots=True)
class Made:
    """A swap that was made. `seconds` without, `refill` the seconds its clients need to read lost contexts again."""

    at: float
    target: str
    evicted: tuple[str, ...]
    clients: tuple[str, ...]
    seconds: float
    refill: float


class Wars:
    def __init__(self) -> None:
        self._left: dict[str, float] = {}  # tenant -> when it had to leave for somebody else
        self._returns: deque[Made] = deque()
        self._war: War | None = None

    def swapped(self, made: Made, tenants: Mapping[str, Tenant], rules: Rules) -> list[Note]:
        """Take a swap into account; what there is to tell."""
        if made.at - self._left.get(made.target, float("-inf")) <= WINDOW:
            self._returns.append(made)
        self._left = {n: at for n, at in self._left.items() if made.at - at <= WINDOW and n != made.target}
        self._left.update(dict.fromkeys(made.evicted, made.at))
        before, self._war = self.at(made.at), self._find(made.at, tenants, rules)
        war = self._war
        if war is None or (before is not None and _same(before, war)):
            return []
        fields = {
            "presets": list(war.presets),
            "clients": {preset: list(clients) for preset, clients in war.presets.items()},
            "swaps": war.swaps,
            "since": round(made.at - war.since, 1),
            "lost_s_per_hour": round(war.per_hour),
            "would_help": list(war.would_help),
        }
        return [Note("swap_war", fields)]

    def at(self, now: float) -> War | None:
        """The war that goes on now."""
        war = self._war
        return war if war is not None and now - war.last <= WINDOW else None

    def _find(self, now: float, tenants: Mapping[str, Tenant], rules: Rules) -> War | None:
        returns = self._returns
        while returns and now - returns[0].at > WINDOW:
            returns.popleft()
        if len(returns) < RETURNS:
            return None
        since = returns[0].at - returns[0].seconds
        span = now - since
        lost = sum(made.seconds + made.refill for made in returns)
        if span < SHORTEST or lost < WORTH * span:
            return None
        presets: dict[str, dict[str, None]] = {}
        for made in returns:
            presets.setdefault(made.target, {}).update(dict.fromkeys(made.clients))
        named = {preset: tuple(clients)[:NAMES] for preset, clients in sorted(presets.items())}
        refill = sum(made.refill for made in returns)
        return War(
            since=since,
            last=now,
            presets=named,
            swaps=len(returns),
            per_hour=lost / span * 3600.0,
            would_help=tuple(_advice(named, [tenants[n] for n in named if n in tenants], refill / lost, rules)),
        )


def _same(before: War, war: War) -> bool:
    """Nothing new for a person: nobody is in it who was not."""
    return all(preset in before.presets for preset in war.presets) and all(
        set(clients) <= set(before.presets[preset]) for preset, clients in war.presets.items()
    )


def _advice(
    presets: Mapping[str, tuple[str, ...]], tenants: list[Tenant], refilled: float, rules: Rules
) -> Iterator[str]:
    """What would end it, best first. `refilled`: which part of the loss is contexts that are read again."""
    names = " and ".join(presets)
    sizes = [tenant.footprint for tenant in tenants]
    if not rules.colocate and rules.capacity and all(sizes) and budget.fits(sizes, rules.capacity, 0.0):
        yield f"{names} fit the card together ({sum(sizes):g} of {rules.capacity:g} GB): TURNSTILE_COLOCATE=on"
    if all(not tenant.exclusive for tenant in tenants):
        yield "the clients use one preset: then nothing swaps"
    yield f"whoever must not be interrupted locks: turnstile run --preset {next(iter(presets))} -- COMMAND"
    if rules.order is Order.ARRIVAL:
        yield "turns that are worth their swap: TURNSTILE_POLICY=amortised"
    if refilled > 0.5:
        yield f"{refilled:.0%} of the loss is prompts that are read again: contexts that are saved around a swap"
