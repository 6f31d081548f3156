"""What came of a run: who was served how often, how long everybody waited, and what the card lost. Seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Served:
    """One client. `waits`: of every answered or still open ticket, from the question to the card."""

    preset: str
    done: int = 0
    cut: int = 0  # answers that died at the end of the drain grace; asked again
    refused: int = 0
    prefill: float = 0.0  # reading lost contexts again
    waits: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Span:
    """Something in time, for a picture. `what`: `swap`, `prefill`, `work`, `wait`."""

    what: str
    who: str
    since: float
    until: float


@dataclass(slots=True)
class Outcome:
    """One run. `loops`: the clients that ask again after an answer; their answers are steps."""

    policy: str
    context: str
    seconds: float
    loops: tuple[str, ...] = ()
    clients: dict[str, Served] = field(default_factory=dict)
    swaps: int = 0
    unloads: int = 0
    swapping: float = 0.0
    spans: list[Span] = field(default_factory=list)
    asked: list[tuple[str, float, float]] = field(default_factory=list)  # client, when, what it took by itself

    @property
    def done(self) -> int:
        return sum(client.done for client in self.clients.values())

    @property
    def steps(self) -> int:
        return sum(self.clients[name].done for name in self.loops)

    @property
    def prefill(self) -> float:
        return sum(client.prefill for client in self.clients.values())

    @property
    def cut(self) -> int:
        return sum(client.cut for client in self.clients.values())

    @property
    def waits(self) -> list[float]:
        return [wait for client in self.clients.values() for wait in client.waits]


def quantile(values: Sequence[float], part: float) -> float:
    """The value that `part` of them do not exceed (nearest rank); 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(part * len(ordered) + 0.5) - 1))]
