"""What a card says about its memory. A reading is the truth of one moment or it is None: never a guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class Holder:
    """A process on the card. `used` in bytes; None = the driver does not say (WSL, containers)."""

    pid: int
    name: str
    used: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes. `holders` is None where processes cannot be told apart."""

    total: int
    used: int
    holders: tuple[Holder, ...] | None = None

    @property
    def free(self) -> int:
        return self.total - self.used


class Card(Protocol):
    kind: ClassVar[str]
    name: str

    def read(self) -> Reading | None:
        """Blocking but short (< 50 ms); None = unknown now."""
        ...

    def close(self) -> None: ...
