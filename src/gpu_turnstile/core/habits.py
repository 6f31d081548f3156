"""What clients do while others wait for the card: how soon they come back, and how much of it they had.

Learned only where it matters, when somebody waits at the end of a lease; a card that nobody waits for costs nothing
here. Bounded: of more than LIMIT clients the one that was silent longest is forgotten. It decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

LIMIT = 512  # clients, and pairs of a client and a tenant
LONGEST = 60.0  # seconds; whoever stays away longer has gone, and how long does not matter
HALF_LIFE = 600.0  # seconds after which use of the card counts half

K = TypeVar("K")
V = TypeVar("V")


class Habits:
    def __init__(self) -> None:
        self.away: OrderedDict[tuple[str, str], float] = OrderedDict()  # client and tenant -> since when
        self._gaps: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()  # mean and mean deviation
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()  # seconds, as of when

    def left(self, client: str, tenant: str, since: float, now: float) -> float | None:
        """A lease of the client has ended while others wait.

        Returns the seconds in which it usually comes back, None = not known.
        """
        _keep(self._used, client, (self.used(client, now) + now - since, now))
        _keep(self.away, (client, tenant), now)
        known = self._gaps.get((client, tenant))
        return None if known is None else known[0] + 2 * known[1]

    def came(self, client: str, wants: tuple[str, ...], now: float) -> None:
        """A client asks, whether it is served at once or not."""
        for tenant in wants:
            left = self.away.pop((client, tenant), None)
            if left is not None:
                self._learn((client, tenant), now - left)
        while self.away and now - next(iter(self.away.values())) > LONGEST:
            gone, _ = self.away.popitem(last=False)
            self._learn(gone, LONGEST)

    def _learn(self, who: tuple[str, str], gap: float) -> None:
        """Recent gaps count more than old ones."""
        known = self._gaps.get(who)
        if known is None:
            _keep(self._gaps, who, (gap, gap / 2))
        else:
            mean, spread = known
            _keep(self._gaps, who, (mean + (gap - mean) / 4, spread + (abs(gap - mean) - spread) / 4))

    def used(self, client: str, now: float) -> float:
        """Seconds of the card it had lately while others waited; older ones count less."""
        known = self._used.get(client)
        if known is None:
            return 0.0
        seconds, at = known
        return float(seconds * 0.5 ** ((now - at) / HALF_LIFE))


def _keep(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > LIMIT:
        table.popitem(last=False)
