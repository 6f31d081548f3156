"""What the lock book keeps: the pinned preset, its holds, the queue, the ends nobody was told of yet.

No rule about who may have what lives here; only how a hold or a place ends, and how far the file on disk is behind.
A refresh by traffic is frequent and worth little: it makes the state due to be saved only when it has added up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from gpu_turnstile.core.locks.words import MAX_NAME, TTL, Cause, Ended, Owner, Standing, Waiter

REMEMBERED = 64  # ends that are kept until their owner has been told
SAVE_GRAIN = 30.0  # seconds by which a crash may prolong or shorten a hold; less for short TTLs (`grain`)


@dataclass(slots=True)
class Hold:
    token: int
    ttl: float
    until: float
    since: float
    client: str


@dataclass(slots=True)
class Place:
    preset: str
    ttl: float  # what the lock shall have
    until: float
    since: float
    client: str
    told: int = 0  # the position its owner was told last


@dataclass(slots=True)
class State:
    """`ttl`: seconds, the default, and the longest a place in the queue lives unheard.

    `token` is the newest one ever given, also across restarts. A token names one unbroken hold of one owner: joining
    gives a new one, so an owner whose own hold lapsed is found out although others kept the preset pinned meanwhile.
    """

    ttl: float = TTL
    preset: str | None = None
    token: int = 0
    holds: dict[str, Hold] = field(default_factory=dict)
    queue: dict[str, Place] = field(default_factory=dict)  # in the order of arrival
    endings: dict[str, Ended] = field(default_factory=dict)  # oldest first
    unsaved: bool = False  # something changed that no later refresh will bring back
    saved: list[float] = field(default_factory=list)  # seconds left of each of `entries`, as the file says
    saved_at: float = 0.0

    def entries(self) -> list[tuple[str, Hold | Place]]:
        return [*self.holds.items(), *self.queue.items()]

    def end(
        self, owners: Collection[str], waiters: Collection[str], cause: Cause, at: float | None = None, by: str = ""
    ) -> tuple[Ended, ...]:
        """Off the lock and out of the queue, in the order of time; without `at` when their time was over."""
        gone: list[Ended] = []
        by = by[:MAX_NAME]
        for name in waiters:
            place = self.queue.pop(name)
            gone.append(Ended(name, place.preset, place.until if at is None else at, cause, 0, by))
        for name in owners:
            hold = self.holds.pop(name)
            gone.append(Ended(name, self.preset or "", hold.until if at is None else at, cause, hold.token, by))
        if not self.holds:
            self.preset = None
        gone.sort(key=lambda ended: ended.at)
        self.remember(gone)
        return tuple(gone)

    def remember(self, gone: Iterable[Ended]) -> None:
        for ended in gone:
            self.unsaved = True
            before = self.endings.get(ended.owner)
            if before is None or ended.token or not before.token:  # a lost lock matters more than a lost place
                self.endings.pop(ended.owner, None)
                self.endings[ended.owner] = ended
        while len(self.endings) > REMEMBERED:
            del self.endings[next(iter(self.endings))]

    # --------------------------------------------------------------------------------------------- reading

    @property
    def entitled(self) -> str | None:
        """The head of the queue, while the lock is free: only it may take it."""
        return next(iter(self.queue), None) if not self.holds else None

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(self.holds)

    def __bool__(self) -> bool:
        """Whether anybody holds or waits. False: no request needs to ask (unless it carries a token)."""
        return bool(self.holds or self.queue)

    def ended(self, owner: str) -> Ended | None:
        """What `owner` lost and was not told yet."""
        return self.endings.get(owner)

    def standing(self, now: float) -> Standing:
        owners = tuple(
            Owner(name, max(0.0, h.until - now), h.ttl, max(0.0, now - h.since), h.client)
            for name, h in self.holds.items()
        )
        queue = tuple(
            Waiter(name, p.preset, at, max(0.0, p.until - now), max(0.0, now - p.since), p.client)
            for at, (name, p) in enumerate(self.queue.items(), 1)
        )
        return Standing(now, self.preset, owners, queue, self.entitled)

    # ---------------------------------------------------------------------------------------- what the file knows

    @property
    def next_moment(self) -> float | None:
        """When something lapses, is pruned, or wants to be saved anew; None = never."""
        entries = self.entries()
        ends = [entry.until for _, entry in entries]
        if not self.unsaved:
            ends += [self.saved_at + grain(entry) for _, entry in entries]
        return min(ends, default=None)

    def dirty(self, now: float) -> bool:
        """Whether a crash now would lose something, or prolong or shorten a hold by more than its grain.

        Refreshes by traffic are frequent and each is worth little: they are saved when they have added up.
        """
        if self.unsaved:
            return True
        return any(
            now >= self.saved_at + grain(entry) or entry.until - now > left + grain(entry)
            for (_, entry), left in zip(self.entries(), self.saved, strict=True)
        )

    def mark_saved(self, view: dict[str, Any], now: float) -> None:
        """`view` is what the file will say."""
        self.saved = [row["left"] for row in (*view.get("owners", {}).values(), *view.get("queue", []))]
        self.saved_at, self.unsaved = now, False


def grain(entry: Hold | Place) -> float:
    return min(SAVE_GRAIN, max(1.0, entry.ttl / 4))
