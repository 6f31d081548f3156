"""The lock book: a pin held by owners on one preset, each with a time to live.

It decides whom a lock keeps out and when it lapses; it never looks at a clock. Contended locks are refused, never
taken over (the incident of 2026-08-17). The queue of waiting owners is not built yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class LockBook:
    """`owners` maps an owner to the time its hold lapses. No owners, no lock."""

    tenant: str | None = None
    owners: dict[str, float] = field(default_factory=dict)

    def allows(self, wants: tuple[str, ...]) -> bool:
        """Whether a request for `wants` may run while this lock lives."""
        return self.tenant is None or self.tenant in wants

    def take(self, tenant: str, owner: str, until: float) -> bool:
        """Join or open the lock; False when another preset is pinned."""
        if self.tenant not in (None, tenant):
            return False
        self.tenant = tenant
        self.owners[owner] = until
        return True

    def renew(self, owner: str, until: float) -> bool:
        if owner not in self.owners:
            return False
        self.owners[owner] = until
        return True

    def drop(self, owner: str | None) -> tuple[str, ...]:
        """Let `owner` (None = all) go; returns who went."""
        gone = tuple(self.owners) if owner is None else tuple(o for o in (owner,) if o in self.owners)
        for name in gone:
            del self.owners[name]
        if not self.owners:
            self.tenant = None
        return gone

    def lapse(self, now: float) -> tuple[str, ...]:
        """Let everybody go whose time is over; returns who went."""
        gone = tuple(owner for owner, until in self.owners.items() if until <= now)
        for owner in gone:
            self.drop(owner)
        return gone

    @property
    def next_lapse(self) -> float | None:
        return min(self.owners.values(), default=None)

    def view(self, now: float) -> dict[str, Any]:
        """JSON-able: remaining seconds instead of points in time, so that it survives a change of clock."""
        if self.tenant is None:
            return {}
        return {
            "preset": self.tenant,
            "owners": {owner: round(until - now, 3) for owner, until in self.owners.items()},
        }

    @classmethod
    def restore(cls, view: dict[str, Any], now: float) -> LockBook:
        if not view:
            return cls()
        return cls(view["preset"], {owner: now + left for owner, left in view["owners"].items()})
