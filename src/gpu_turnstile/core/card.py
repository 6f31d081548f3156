"""Who is on the card: residents with their leases, and the two ways in which they leave. State without decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpu_turnstile.core.model import Held, Tenant
from gpu_turnstile.core.policy import NO_TURN, Turn


@dataclass(slots=True)
class Resident:
    """A tenant on the card. `leases`: ticket -> (client, since, owner)."""

    tenant: Tenant
    since: float
    idle_since: float
    leases: dict[int, tuple[str, float, str | None]] = field(default_factory=dict)
    cohort: int = 0  # tickets up to this sequence number waited when it came in
    fresh: bool = False  # it has not served them yet
    begun: bool = False  # it has served somebody
    stale: bool = False  # its preset was changed or removed: it drains and leaves
    stuck: bool = False  # it may hold memory but cannot serve
    turn: Turn = NO_TURN
    batch_until: float = float("-inf")  # until when those it was brought in for are not split
    expects: float = float("-inf")  # until when a client that was just served is expected back

    @property
    def serves(self) -> bool:
        return not (self.stale or self.stuck)

    @property
    def admits(self) -> bool:
        """Whether it may be granted another lease before it is evicted."""
        return self.serves and not (self.tenant.single and self.begun)

    def in_turn(self, now: float) -> bool:
        return now < self.turn.until and self.admits

    def kept_until(self, now: float) -> float:
        """Until when it is not drained for an equal rank: the end of its turn, or of the wait for its clients."""
        if not self.in_turn(now):
            return now
        return self.turn.until if self.leases else min(self.turn.until, self.expects)


@dataclass(frozen=True, slots=True)
class Drain:
    """Leases of `victims` are running out. `since` is when the first of them was asked to."""

    since: float
    target: str | None
    victims: tuple[str, ...]

    def deadline(self, residents: Mapping[str, Resident]) -> float | None:
        """When the swap may cut the leases that still hold it off; None = never."""
        latest = self.since
        for name in self.victims:
            resident = residents.get(name)
            if resident is None or not resident.leases:
                continue
            if resident.tenant.drain_grace is None:
                return None
            latest = max(latest, self.since + resident.tenant.drain_grace)
        return latest


@dataclass(slots=True)
class Swap:
    """Victims are going, the target (None: nobody) is coming."""

    number: int
    target: Tenant | None
    victims: dict[str, Resident]
    since: float

    @property
    def name(self) -> str | None:
        return self.target.name if self.target else None


class Card:
    """The residents by name, the one that came first first; and every lease with its resident."""

    def __init__(self) -> None:
        self.residents: dict[str, Resident] = {}
        self.leases: dict[int, Resident] = {}

    def serving(self, wants: Iterable[str]) -> Resident | None:
        """Who may be granted a lease for one of these names."""
        for want in wants:
            resident = self.residents.get(want)
            if resident is not None and resident.admits:
                return resident
        return None

    def compatible(self, resident: Resident) -> bool:
        """Whether another lease of it may begin now: an exclusive one is alone on the card."""
        if resident.tenant.exclusive:
            return not self.leases
        return not any(r.leases and r.tenant.exclusive for r in self.residents.values())

    def lease(self, resident: Resident, ticket: int, client: str, owner: str | None, now: float) -> None:
        resident.begun = True
        if resident.tenant.exclusive:
            resident.fresh = False
        resident.leases[ticket] = (client, now, owner)
        self.leases[ticket] = resident

    def cut(self, residents: Iterable[Resident], now: float) -> tuple[int, ...]:
        """End all their leases; returns the tickets."""
        tickets: list[int] = []
        for resident in residents:
            tickets += resident.leases
            resident.leases.clear()
            resident.idle_since = now
        for ticket in tickets:
            del self.leases[ticket]
        return tuple(tickets)

    @property
    def first(self) -> Resident | None:
        """Whoever serves now; with several, the one that came first."""
        return next((r for r in self.residents.values() if r.serves), None)

    def held(self) -> Iterable[Held]:
        for resident in self.residents.values():
            for ticket, (client, since, owner) in resident.leases.items():
                yield Held(ticket, resident.tenant.name, client, since, owner)
