"""The book of the simulated card: who holds which bytes, what is on its way back, and every alarm.

It may know time only as an argument and processes only through the `alive` it is given; it does no I/O.
Invariants: the bytes held never exceed the total (what does not fit is not granted); an alarm, once raised,
stays until `reset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GB = 1024**3
MB = 1024**2
EVENTS_KEPT = 200
ALARMS_KEPT = 1000

Alive = Callable[[int, float], bool]


@dataclass(slots=True)
class Piece:
    """One allocation. `back_at`: given back, but the driver returns it only then (wall clock, seconds)."""

    name: str
    part: str
    pid: int
    started: float  # the process's start time: a pid that was given out again is not the same process
    bytes: int
    since: float
    back_at: float | None = None
    leaked: bool = False

    @property
    def engine(self) -> tuple[str, int]:
        return (self.name, self.pid)


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that would have crashed a real card. `kind`: `two_engines` or `over_total`."""

    time: float
    kind: str
    names: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class CardEvent:
    """A change of the book. `what`: `hold`, `free` (given back, perhaps late), `back`, `leak`, `dead`."""

    time: float
    what: str
    name: str
    pid: int
    bytes: int


@dataclass(slots=True)
class Ledger:
    """`allowance`: bytes an engine may hold beside another without alarm (its context). `lag_s`: seconds the
    driver takes to return memory, also that of a dead process."""

    total: int = 24 * GB
    allowance: int = 600 * MB
    lag_s: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    events: list[CardEvent] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    def held_by(self, engine: tuple[str, int]) -> int:
        return sum(piece.bytes for piece in self.pieces if piece.engine == engine)

    # ------------------------------------------------------------------------------------ what happens by itself

    def settle(self, now: float, alive: Alive) -> bool:
        """Take out what came back and what dead processes held. True = the book changed."""
        before = len(self.pieces), len(self.events)
        for piece in self.pieces:
            if piece.back_at is None and piece.pid > 0 and not alive(piece.pid, piece.started):
                self._end(piece, now)
        for piece in [p for p in self.pieces if p.back_at is not None and p.back_at <= now]:
            self.pieces.remove(piece)
            self._note(piece.back_at or now, "back", piece)
        return before != (len(self.pieces), len(self.events))

    # ------------------------------------------------------------------------------------ what engines do

    def hold(self, owner: Piece, now: float) -> int:
        """Let `owner` hold its bytes instead of what this part held so far; the bytes that did fit."""
        mine = [p for p in self.pieces if p.engine == owner.engine and p.part == owner.part and _held(p)]
        before = sum(p.bytes for p in mine)
        for piece in mine:
            self.pieces.remove(piece)
        wanted, free = owner.bytes, self.total - self.used
        if wanted > before:
            self._check_alone(owner, now)
            self._check_fits(owner, wanted - free, now)
        owner.bytes = min(wanted, free)
        if owner.bytes > 0:
            self.pieces.append(owner)
        self._note(now, "hold", owner)
        return owner.bytes

    def free(self, owner: tuple[str, int], part: str | None, now: float, after: float, leak: bool) -> None:
        """Give back one part (None = all of them), after `after` seconds, or never."""
        for piece in [p for p in self.pieces if p.engine == owner and part in (None, p.part) and _held(p)]:
            if leak:
                piece.leaked = True
                self._note(now, "leak", piece)
            else:
                piece.back_at = now + max(after, self.lag_s)
                self._note(now, "free", piece)

    def end(self, owner: tuple[str, int], now: float) -> None:
        """The engine's process is gone: everything comes back, also what leaked or was late."""
        for piece in self.pieces:
            if piece.engine == owner:
                self._end(piece, now)

    def _end(self, piece: Piece, now: float) -> None:
        self._note(now, "dead", piece)
        piece.leaked = False
        piece.back_at = min(now + self.lag_s, piece.back_at or float("inf"))

    def reset(self) -> None:
        """Forget alarms and events; late and leaked memory comes back at once. Living holders stay."""
        self.pieces = [piece for piece in self.pieces if _held(piece)]
        self.alarms.clear()
        self.events.clear()

    # ------------------------------------------------------------------------------------ alarms

    def _check_alone(self, owner: Piece, now: float) -> None:
        mine = self.held_by(owner.engine) + owner.bytes
        if mine <= self.allowance:
            return
        for other in sorted({p.engine for p in self.pieces if p.engine != owner.engine}):
            theirs = self.held_by(other)
            if theirs > self.allowance:
                detail = f"{_who(owner.engine)} takes {_gb(mine)} while {_who(other)} holds {_gb(theirs)}"
                self._alarm(Alarm(now, "two_engines", (owner.name, other[0]), detail))

    def _check_fits(self, owner: Piece, missing: int, now: float) -> None:
        if missing <= 0:
            return
        names = (owner.name, *sorted({p.name for p in self.pieces if p.engine != owner.engine}))
        detail = f"{_who(owner.engine)} wants {_gb(owner.bytes)}, {_gb(missing)} more than is free"
        self._alarm(Alarm(now, "over_total", names, detail))

    def _alarm(self, alarm: Alarm) -> None:
        if len(self.alarms) < ALARMS_KEPT:
            self.alarms.append(alarm)

    def _note(self, now: float, what: str, piece: Piece) -> None:
        self.events.append(CardEvent(now, what, piece.name, piece.pid, piece.bytes))
        del self.events[:-EVENTS_KEPT]

    # ------------------------------------------------------------------------------------ as plain data

    def to_json(self) -> dict[str, Any]:
        book = _plain(self)
        for rows in ("pieces", "alarms", "events"):
            book[rows] = [_plain(row) for row in book[rows]]
        return book

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Ledger:
        return cls(
            total=data["total"],
            allowance=data["allowance"],
            lag_s=data["lag_s"],
            pieces=[Piece(**piece) for piece in data["pieces"]],
            alarms=[Alarm(**{**alarm, "names": tuple(alarm["names"])}) for alarm in data["alarms"]],
            events=[CardEvent(**event) for event in data["events"]],
        )


def _held(piece: Piece) -> bool:
    return piece.back_at is None and not piece.leaked


def _plain(row: Ledger | Piece | Alarm | CardEvent) -> dict[str, Any]:
    """`dataclasses.asdict` without its deep copies, which would cost more than the file."""
    return {name: getattr(row, name) for name in row.__slots__}


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB"


def _who(engine: tuple[str, int]) -> str:
    return f"{engine[0]} (pid {engine[1]})"
