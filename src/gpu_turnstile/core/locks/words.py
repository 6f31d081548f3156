"""The words of the lock book: what people see of it, and what it answers. Frozen values with a sentence of their own.

Contention is an answer, never an exception; only what a person typed wrong is one (`check_ttl`, `check_owner`). Every
answer carries the standing it was given on, so a caller never has to ask twice. Times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeGuard

TTL = 900.0  # seconds; the default of LLMC_LOCK_TTL_S
MIN_TTL = 1.0
MAX_TTL = 7 * 86400.0
MAX_OWNERS = 256  # who hold, and who wait, at most: the book is written to disk as a whole
MAX_NAME = 200


def check_ttl(value: object, default: float = TTL) -> float:
    """A TTL as a person may give it, in seconds; None is `default`. Raises ValueError saying what would be right."""
    if value is None:
        return default
    if not is_number(value) or not MIN_TTL <= value <= MAX_TTL:
        raise ValueError(f"a TTL is a number of seconds from {MIN_TTL:g} to {MAX_TTL:g} (seven days)")
    return float(value)


def check_owner(value: object) -> str:
    """An owner's name as a person may give it. Raises ValueError saying what would be right."""
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_NAME or not value.isprintable():
        raise ValueError(f"an owner is a text of 1 to {MAX_NAME} printable characters, like a session's id")
    return value


class Why(StrEnum):
    """Why a lock was not given."""

    HELD = "held"  # others pin another preset
    NOT_YOUR_TURN = "not_your_turn"  # it is free, but somebody else is the queue's head
    OTHER_PRESET = "other_preset"  # the caller is the head, for another preset than it asks for now
    OWN_LOCK = "own_lock"  # the caller itself pins another preset, and did not say that it would wait
    FULL = "full"  # there are too many owners or waiters


class Cause(StrEnum):
    """Why a hold or a place ended without its owner's doing."""

    SILENT = "silent"  # nothing was heard of the owner for a TTL
    TAKEN = "taken"  # somebody else unlocked it
    BROKEN = "broken"  # somebody broke the glass
    PRESET_GONE = "preset_gone"  # the preset was removed


# --------------------------------------------------------------------------------------------- what people see


@dataclass(frozen=True, slots=True)
class Owner:
    """A holder as people see it. `expires_in`: seconds of silence it has left."""

    owner: str
    expires_in: float
    ttl: float
    held: float  # seconds since it took the lock
    client: str


@dataclass(frozen=True, slots=True)
class Waiter:
    """A waiter as people see it. `position` counts from 1."""

    owner: str
    preset: str
    position: int
    expires_in: float
    waited: float
    client: str


@dataclass(frozen=True, slots=True)
class Standing:
    """The whole book as people see it. `entitled`: the head, while the lock is free: nobody else may take it."""

    now: float
    preset: str | None
    owners: tuple[Owner, ...]
    queue: tuple[Waiter, ...]
    entitled: str | None

    def __str__(self) -> str:
        if self.preset is None:
            return f"free, and {self.entitled} is next" if self.entitled else "free"
        holders = ", ".join(f"{o.owner} (for {span(o.expires_in)})" for o in self.owners)
        return f"held on {self.preset!r} by {holders}"


@dataclass(frozen=True, slots=True)
class Ended:
    """A hold (`token` > 0) or a place in the queue (`token` 0) that ended without its owner's doing.

    `at` is the moment it ended, also when it was noticed later. `by`: who took it away, and why.
    """

    owner: str
    preset: str
    at: float
    cause: Cause
    token: int = 0
    by: str = ""

    def text(self, now: float, clock: str = "") -> str:
        """`clock`: when it was, as a wall clock says it, where the caller has one."""
        what = "lock on" if self.token else "place in the queue for"
        how = {
            Cause.SILENT: "nothing was heard of you for its TTL",
            Cause.TAKEN: f"it was taken away by {self.by or 'somebody'}",
            Cause.BROKEN: f"it was broken by {self.by or 'somebody'}",
            Cause.PRESET_GONE: "the preset was removed",
        }[self.cause]
        ended = "lapsed" if self.cause is Cause.SILENT else "ended"
        ago = f"{span(now - self.at)} ago"
        return f"your {what} {self.preset!r} {ended} {f'at {clock}, {ago}' if clock else ago}: {how}"


# ------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class Granted:
    """The owner holds `preset`. `fresh`: a new hold, with a new token; `joined`: others hold it as well.

    `moved_from`: the preset that the owner gave up for it. `ended`: what it lost before and was not told yet.
    """

    preset: str
    owner: str
    token: int
    ttl: float
    expires_in: float
    fresh: bool
    joined: bool
    standing: Standing
    moved_from: str | None = None
    ended: Ended | None = None


@dataclass(frozen=True, slots=True)
class Queued:
    """The owner waits at `position`. Ask again within `retry_after` seconds: asking is what keeps the place.

    `news`: it was not told that position before.
    """

    preset: str
    owner: str
    position: int
    retry_after: float
    news: bool
    standing: Standing
    ended: Ended | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The lock is not given and nothing changed. `retry_after`: seconds until it may be free by itself, capped."""

    preset: str
    owner: str
    why: Why
    retry_after: float
    standing: Standing
    ended: Ended | None = None

    @property
    def message(self) -> str:
        what = {
            Why.HELD: "a lock is never taken over. Ask again later, or with wait to queue",
            Why.NOT_YOUR_TURN: "only the head of the queue may take it. Ask with wait to queue",
            Why.OTHER_PRESET: "you queued for another preset. Ask for that one, or with wait to queue anew",
            Why.OWN_LOCK: "you hold that lock yourself. Unlock it first, or ask with wait to change over in your turn",
            Why.FULL: f"there is room for {MAX_OWNERS} owners and as many waiters",
        }[self.why]
        return f"{self.preset!r} was not locked: the lock is {self.standing}; {what}"


@dataclass(frozen=True, slots=True)
class Stale:
    """The token names no hold that lives (or one of another owner). Nothing was changed."""

    token: int
    owner: str | None
    standing: Standing
    ended: Ended | None = None

    @property
    def message(self) -> str:
        lost = f": {self.ended.text(self.standing.now)}" if self.ended else ""
        return f"the lock token {self.token} is stale{lost}. The lock is {self.standing}. Lock again before you go on"


@dataclass(frozen=True, slots=True)
class Missing:
    """Nothing to renew: the owner neither holds nor waits."""

    owner: str
    standing: Standing
    ended: Ended | None = None

    @property
    def message(self) -> str:
        lost = f": {self.ended.text(self.standing.now)}" if self.ended else ""
        return f"{self.owner} holds no lock and is not in the queue{lost}. The lock is {self.standing}"


@dataclass(frozen=True, slots=True)
class Unlocked:
    """`owners` hold no more and `waiters` left the queue; both may be empty. `cut`: those who did not ask for it."""

    owners: tuple[str, ...]
    waiters: tuple[str, ...]
    cut: tuple[Ended, ...]
    standing: Standing


@dataclass(frozen=True, slots=True)
class Denied:
    """The caller may not take others' locks away. Nothing was changed."""

    caller: str | None
    owner: str | None
    standing: Standing

    @property
    def message(self) -> str:
        who = self.caller or "whoever does not say who it is"
        return (
            f"{who} owns no lock here, so it may not end others': the lock is {self.standing}. Name your own owner, "
            'or say "force": true if you mean it'
        )


@dataclass(frozen=True, slots=True)
class Policed:
    """A request that may not run under the lock. `wants` as it asked for; `ended`: what its owner lost, untold yet."""

    wants: tuple[str, ...]
    retry_after: float
    standing: Standing
    ended: Ended | None = None

    @property
    def message(self) -> str:
        lost = f"; {self.ended.text(self.standing.now)}" if self.ended else ""
        return f"{self.wants[0]!r} cannot run now: the card's lock is {self.standing}{lost}"


def is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -1e12 < value < 1e12  # neither infinite nor not a number


def span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
