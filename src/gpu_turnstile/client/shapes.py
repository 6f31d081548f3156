"""What the gate answers to lock calls, as values. Times are seconds, counted from the moment of the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Owner:
    """Somebody who holds the lock. `expires_in`: seconds of silence it has left."""

    owner: str
    expires_in: float
    ttl: float
    held: float


@dataclass(frozen=True, slots=True)
class Waiter:
    """Somebody in the lock's queue; `position` 1 is next."""

    owner: str
    preset: str
    position: int
    expires_in: float
    waited: float


@dataclass(frozen=True, slots=True)
class Granted:
    """`owner` holds `preset`. `ended`: what it lost before and was not told yet. `raw`: the answer as it came."""

    preset: str
    owner: str
    token: int
    ttl: float
    expires_in: float
    joined: bool
    owners: tuple[Owner, ...]
    queue: tuple[Waiter, ...]
    ended: str | None
    raw: dict[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Queued:
    """`owner` waits at `position`; asking again within `retry_after` seconds keeps the place."""

    preset: str
    owner: str
    position: int
    retry_after: float
    owners: tuple[Owner, ...]
    queue: tuple[Waiter, ...]
    ended: str | None
    raw: dict[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Unlocked:
    """`owners` hold no more, `waiters` left the queue; `cut` are those who did not ask for it."""

    owners: tuple[str, ...]
    waiters: tuple[str, ...]
    cut: tuple[str, ...]
    raw: dict[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `kind` is `lost`, and `id` None, where the gate was faster than its reader."""

    id: int | None
    time: str
    kind: str
    fields: dict[str, Any]

    @classmethod
    def read(cls, kind: str, found: dict[str, Any]) -> Event:
        if "kind" not in found:
            return cls(None, "", kind, found)
        return cls(found["id"], found["time"], found["kind"], found["fields"])


def owners(body: dict[str, Any]) -> tuple[Owner, ...]:
    return tuple(
        Owner(name, float(o["expires_in"]), float(o["ttl"]), float(o["held"]))
        for name, o in (body.get("owners") or {}).items()
    )


def queue(body: dict[str, Any]) -> tuple[Waiter, ...]:
    return tuple(
        Waiter(w["owner"], w["preset"], int(w["position"]), float(w["expires_in"]), float(w["waited"]))
        for w in body.get("queue") or ()
    )
