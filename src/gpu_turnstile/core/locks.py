"""The lock book: who pins which preset, for how long, and who is next. Pure data; time is an argument.

What may live here: every rule about locks, their queue and their tokens. What may not: a clock, the card, a swap, HTTP.

The state is one pinned preset (or none), its *holds* (owner -> token, time to live) and the *queue* (owner -> place).
Contention is an answer, never an exception. What a caller of the book must do:

1. Before anything else at a moment: `lapse(now, busy)`. The other calls take nobody's lock for being overdue; a
   book that is never told the time keeps locks too long, which is the safe side.
2. After anything: if `dirty(now)`, `save` and make it durable, and only then tell the answer.
3. Ask for a wake-up at `next_moment`.

| the lock is             | `lock` of the pinned preset | of another, `wait=False`  | of another, `wait=True`  |
|-------------------------|-----------------------------|---------------------------|--------------------------|
| free, nobody queues     | –                           | granted                   | granted                  |
| free, the caller heads  | –                           | granted what it queued for| the same; else to the end|
| free, another one heads | –                           | refused                   | queued                   |
| held by others          | granted: joins              | refused                   | queued                   |
| held by the caller only | granted: refreshed          | refused                   | moves when it heads      |

Why a hold ends: its owner lets go, somebody is allowed to take it away, its preset is removed, or its owner was silent
for a TTL. The last is called a lapse. Whoever lost a hold by another's doing is told so with its next answer. A hold
that ends frees the book and nothing else: no work is cut for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeGuard

TTL = 900.0  # seconds; the default of LLMC_LOCK_TTL_S
MIN_TTL = 1.0
MAX_TTL = 7 * 86400.0
MAX_OWNERS = 256  # who hold, and who wait, at most: the book is written to disk as a whole
MAX_NAME = 200
REMEMBERED = 64  # ends that are kept until their owner has been told
RETRY_CAP = 60.0  # seconds; nobody is told to stay away for longer
POLL = 10.0  # seconds a waiter may stay away at most, so that its place does not go stale
SAVE_GRAIN = 30.0  # seconds by which a crash may prolong or shorten a hold; less for short TTLs (`_grain`)


def check_ttl(value: object, default: float = TTL) -> float:
    """A TTL as a person may give it, in seconds; None is `default`. Raises ValueError saying what would be right."""
    if value is None:
        return default
    if not _is_number(value) or not MIN_TTL <= value <= MAX_TTL:
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
        holders = ", ".join(f"{o.owner} (for {_span(o.expires_in)})" for o in self.owners)
        return f"held on {self.preset!r} by {holders}"


@dataclass(frozen=True, slots=True)
class Ended:
    """A hold (`token` > 0) or a place in the queue (`token` 0) that ended without its owner's doing.

    `at` is the moment it ended, also when it was noticed later. `by`: who took it away, or the reason given.
    """

    owner: str
    preset: str
    at: float
    cause: Cause
    token: int = 0
    by: str = ""

    def text(self, now: float) -> str:
        what = "lock on" if self.token else "place in the queue for"
        how = {
            Cause.SILENT: "lapsed: nothing was heard of you for its TTL",
            Cause.TAKEN: f"was taken away by {self.by or 'somebody'}",
            Cause.BROKEN: f"was broken: {self.by or 'no reason was given'}",
            Cause.PRESET_GONE: "ended: the preset was removed",
        }[self.cause]
        return f"your {what} {self.preset!r} {how}, {_span(now - self.at)} ago"


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
    """The owner waits at `position`. Ask again within `retry_after` seconds: asking is what keeps the place."""

    preset: str
    owner: str
    position: int
    retry_after: float
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
    """A request that may not run under the lock. `wants` as it asked for."""

    wants: tuple[str, ...]
    retry_after: float
    standing: Standing

    @property
    def message(self) -> str:
        return f"{self.wants[0]!r} cannot run now: the card's lock is {self.standing}"


# ---------------------------------------------------------------------------------------------------------- state


@dataclass(slots=True)
class _Hold:
    token: int
    ttl: float
    until: float
    since: float
    client: str


@dataclass(slots=True)
class _Place:
    preset: str
    ttl: float  # what the lock shall have
    until: float
    since: float
    client: str


@dataclass(slots=True)
class LockBook:
    """See the module's docstring. `ttl`: seconds, the default, and the longest a place in the queue lives unheard.

    `token` is the newest one ever given, also across restarts. A token names one unbroken hold of one owner: joining
    gives a new one, so an owner whose own hold lapsed is found out although others kept the preset pinned meanwhile.
    """

    ttl: float = TTL
    preset: str | None = None
    token: int = 0
    _holds: dict[str, _Hold] = field(default_factory=dict)
    _queue: dict[str, _Place] = field(default_factory=dict)  # in the order of arrival
    _ended: dict[str, Ended] = field(default_factory=dict)  # oldest first
    _unsaved: bool = False  # something changed that no later refresh will bring back
    _saved: list[float] = field(default_factory=list)  # seconds left of each of `_entries`, as the file says
    _saved_at: float = 0.0

    # ---------------------------------------------------------------------------------------------- the calls

    def lock(
        self,
        preset: str,
        owner: str,
        ttl: float,
        now: float,
        *,
        wait: bool = False,
        token: int | None = None,
        client: str = "",
    ) -> Granted | Queued | Refused | Stale:
        """Pin `preset` for `owner`, or join those who do; the table in the module's docstring is the whole of it.

        Never hijacks (2026-08-17: a lock for another preset took the card and killed a loop). Joining the pinned
        preset is never gated, also past the queue: it cannot evict anybody. Whoever asks with a `token` means "only
        if that hold of mine still lives".
        """
        if token is not None and not self._lives(token, owner):
            return self._stale(token, owner, now)
        if self.preset == preset:
            if owner not in self._holds and len(self._holds) >= MAX_OWNERS:
                return self._refused(preset, owner, Why.FULL, now)
            return self._grant(preset, owner, ttl, now, client)
        place = self._queue.get(owner)
        if place is not None:
            self._heard(place, now, ttl if place.preset == preset else None)
        if not self._holds and (not self._queue or self._heads(owner, preset)):
            return self._grant(preset, owner, ttl, now, client)
        if not wait:
            return self._refused(preset, owner, self._why(owner), now)
        if place is None or place.preset != preset:
            if place is None and len(self._queue) >= MAX_OWNERS:
                return self._refused(preset, owner, Why.FULL, now)
            self._queue.pop(owner, None)  # another preset is another wish: to the end
            self._queue[owner] = place = _Place(preset, ttl, 0.0, now, client)
            self._unsaved = True
            self._heard(place, now)
        if self._holds.keys() <= {owner} and self._heads(owner, preset):
            return self._grant(preset, owner, ttl, now, client)
        return self._queued(owner, place, now)

    def renew(
        self, owner: str, ttl: float | None, now: float, *, token: int | None = None
    ) -> Granted | Queued | Stale | Missing:
        """The heartbeat (2026-08-19: a leg that said nothing for 30 minutes had lost its lock and did not know).

        For a holder and for a waiter. None keeps the TTL it has. A waiter whose turn has come is granted with it.
        """
        if token is not None and not self._lives(token, owner):
            return self._stale(token, owner, now)
        place, hold = self._queue.get(owner), self._holds.get(owner)
        if place is not None:
            self._heard(place, now, ttl)
            if self.entitled == owner:
                return self._grant(place.preset, owner, place.ttl, now, place.client)
        if hold is not None and self.preset is not None:
            return self._grant(self.preset, owner, hold.ttl if ttl is None else ttl, now, hold.client)
        if place is not None:
            return self._queued(owner, place, now)
        return Missing(owner, self.standing(now), self._ended.get(owner))

    def unlock(
        self,
        owner: str | None,
        now: float,
        *,
        caller: str | None = None,
        token: int | None = None,
        force: bool = False,
        open_unlock: bool = False,
    ) -> Unlocked | Denied | Stale:
        """Take `owner` off the lock and out of the queue; None takes everybody off the lock, the queue stays.

        2026-09-08: a bare unlock handed the card away under a running bench. So whoever is no owner may not end
        others' holds, unless it uses `force`, or `open_unlock` allows it to all (the document's behaviour).
        `caller` is who asks, None = it does not say. Naming an owner without saying who one is means being that owner;
        saying so and naming one that another client took does not. A live `token` proves its owner.
        """
        if token is not None:
            if not self._lives(token, None):
                return self._stale(token, owner, now)
            caller = self.owner_of(token)
        if not (force or open_unlock or self._may_end(owner, caller)):
            return Denied(caller, owner, self.standing(now))
        owners = tuple(name for name in self._holds if owner in (None, name))
        waiters = tuple(name for name in self._queue if name == owner)
        own = self._names(caller if caller is not None or force or owner is None else owner)
        gone = self._end(owners, waiters, Cause.TAKEN, now, caller or "")
        for name in own:
            self._ended.pop(name, None)
        return Unlocked(owners, waiters, tuple(ended for ended in gone if ended.owner not in own), self.standing(now))

    def unlock_all(self, now: float, **who: Any) -> Unlocked | Denied | Stale:
        """`unlock` without an owner."""
        return self.unlock(None, now, **who)

    def break_glass(self, now: float, reason: str) -> Unlocked:
        """Everybody is off the lock, whoever asks. The queue stays: waiting cannot be stuck, its head is next."""
        owners = tuple(self._holds)
        return Unlocked(owners, (), self._end(owners, (), Cause.BROKEN, now, reason), self.standing(now))

    def keep_presets(self, known: Collection[str], now: float) -> tuple[Ended, ...]:
        """Presets were removed: their lock and the places that wait for them end. Also after `recover`."""
        owners = tuple(self._holds) if self.preset not in known else ()
        waiters = tuple(o for o, place in self._queue.items() if place.preset not in known)
        return self._end(owners, waiters, Cause.PRESET_GONE, now)

    # ------------------------------------------------------------------------------------- requests, traffic

    def admit(
        self, wants: tuple[str, ...], now: float, *, owner: str | None = None, token: int | None = None
    ) -> Granted | Stale | Policed | None:
        """May a request for one of `wants` go on? None = yes. Granted = yes, and its owner has the lock by it.

        The queue holds names, not swaps: the head takes the free lock with its first request for what it queued for.
        Until then the lock is free: requests of others run as without one, so a head that died keeps nobody from the
        card. Another preset than the pinned one is refused, also to the owner (2026-09-18: a stranger's requests during
        a measurement; 2026-09-19: two clients swapped the card for 13 minutes). A `token` that is stale is refused
        whatever it asks for.
        """
        if token is not None:
            if not self._lives(token, owner):
                return self._stale(token, owner, now)
            owner = self.owner_of(token)
        if self.allows(wants):
            head = self._queue.get(owner) if owner is not None and owner == self.entitled else None
            if head is not None and owner is not None and head.preset in wants:
                return self._grant(head.preset, owner, head.ttl, now, head.client)
            return None
        return self.police(wants, now)

    def allows(self, wants: Collection[str]) -> bool:
        """Whether a request for `wants` may run while this lock lives."""
        return self.preset is None or self.preset in wants

    def police(self, wants: tuple[str, ...], now: float) -> Policed:
        """Why a request for `wants` may not run: who holds the lock, and until when."""
        return Policed(wants, self._retry(now), self.standing(now))

    def check(self, token: int, owner: str | None, now: float) -> Stale | None:
        """Fencing: None when `token` names a hold that lives (and is `owner`'s)."""
        return None if self._lives(token, owner) else self._stale(token, owner, now)

    def owner_of(self, token: int) -> str | None:
        return next((owner for owner, hold in self._holds.items() if hold.token == token), None)

    def touch(self, preset: str, owner: str | None, now: float) -> None:
        """Work on `preset` began or ended: traffic under the lock refreshes its TTL.

        Work that says whose it is refreshes that owner (also its place); work that does not, everybody who pins
        `preset`, because plain clients of an owner cannot say it.
        """
        if owner is not None and owner in self._queue:
            self._heard(self._queue[owner], now)
        if preset == self.preset:
            for name, hold in self._holds.items():
                if owner is None or owner == name:
                    hold.until = max(hold.until, now + hold.ttl)

    def busy(self, marks: Iterable[str | None]) -> frozenset[str]:
        """Who works. `marks`: the owner, or None, of every open request and running job on the pinned preset."""
        found = frozenset(marks)
        named = frozenset(name for name in found if name is not None)
        return named | frozenset(self._holds) if None in found else named

    # ---------------------------------------------------------------------------------------------- time

    def lapse(self, now: float, busy: Collection[str] = ()) -> tuple[Ended, ...]:
        """End what was silent for its TTL; who ended and when, in that order.

        An owner in `busy` is not silent, however long its work says nothing (a 30-minute think, an image job): its TTL
        counts from the end of the work, which `touch` tells.
        """
        if not any(entry.until <= now for _, entry in self._entries()):
            return ()
        for name in busy:
            if name in self._holds and self._holds[name].until <= now:
                self._holds[name].until = now + self._holds[name].ttl
            if name in self._queue and self._queue[name].until <= now:
                self._heard(self._queue[name], now)
        owners = tuple(name for name, hold in self._holds.items() if hold.until <= now)
        waiters = tuple(name for name, place in self._queue.items() if place.until <= now)
        return self._end(owners, waiters, Cause.SILENT)

    @property
    def next_moment(self) -> float | None:
        """When something lapses, is pruned, or wants to be saved anew; None = never."""
        entries = self._entries()
        ends = [entry.until for _, entry in entries]
        if not self._unsaved:
            ends += [self._saved_at + _grain(entry) for _, entry in entries]
        return min(ends, default=None)

    def dirty(self, now: float) -> bool:
        """Whether a crash now would lose something, or prolong or shorten a hold by more than its grain.

        Refreshes by traffic are frequent and each is worth little: they are saved when they have added up.
        """
        if self._unsaved:
            return True
        return any(
            now >= self._saved_at + _grain(entry) or entry.until - now > left + _grain(entry)
            for (_, entry), left in zip(self._entries(), self._saved, strict=True)
        )

    # --------------------------------------------------------------------------------------------- reading

    @property
    def entitled(self) -> str | None:
        """The head of the queue, while the lock is free: only it may take it."""
        return next(iter(self._queue), None) if not self._holds else None

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(self._holds)

    def __bool__(self) -> bool:
        """Whether anybody holds or waits. False: no request needs to ask (unless it carries a token)."""
        return bool(self._holds or self._queue)

    def ended(self, owner: str) -> Ended | None:
        """What `owner` lost and was not told yet."""
        return self._ended.get(owner)

    def standing(self, now: float) -> Standing:
        owners = tuple(
            Owner(name, max(0.0, h.until - now), h.ttl, max(0.0, now - h.since), h.client)
            for name, h in self._holds.items()
        )
        queue = tuple(
            Waiter(name, p.preset, at, max(0.0, p.until - now), max(0.0, now - p.since), p.client)
            for at, (name, p) in enumerate(self._queue.items(), 1)
        )
        return Standing(now, self.preset, owners, queue, self.entitled)

    # ----------------------------------------------------------------------------------------- persistence

    def view(self, now: float, busy: Collection[str] = ()) -> dict[str, Any]:
        """JSON-able, with seconds that are left instead of points in time: no clock has to agree with another.

        Who works has its whole TTL left: work ends with the gate, and the TTL counts from there.
        """
        if not self.token and not self._queue and not self._ended:
            return {}
        return {
            "token": self.token,
            "preset": self.preset,
            "owners": {
                name: {
                    "token": h.token,
                    "left": round(h.ttl if name in busy else h.until - now, 3),
                    "ttl": h.ttl,
                    "held": round(now - h.since, 3),
                    "client": h.client,
                }
                for name, h in self._holds.items()
            },
            "queue": [
                {
                    "owner": name,
                    "preset": p.preset,
                    "left": round(p.until - now, 3),
                    "ttl": p.ttl,
                    "waited": round(now - p.since, 3),
                    "client": p.client,
                }
                for name, p in self._queue.items()
            ],
            "ended": [
                {
                    "owner": e.owner,
                    "preset": e.preset,
                    "ago": round(now - e.at, 3),
                    "cause": e.cause.value,
                    "token": e.token,
                    "by": e.by,
                }
                for e in self._ended.values()
            ],
        }

    def save(self, now: float, busy: Collection[str] = ()) -> dict[str, Any]:
        """`view`, for the state file: the book remembers what the file says (see `dirty`)."""
        view = self.view(now, busy)
        self._saved = [row["left"] for row in (*view.get("owners", {}).values(), *view.get("queue", []))]
        self._saved_at, self._unsaved = now, False
        return view

    @classmethod
    def recover(cls, view: object, now: float, ttl: float = TTL) -> tuple[LockBook, tuple[str, ...]]:
        """The book that `view` tells of, and what in it made no sense and was left out.

        The seconds left go on from where they were: neither the time the gate was away nor a step of the clock frees
        or prolongs a lock. Unknown keys are ignored, missing ones have their plain meaning.
        """
        return _Reader(now, ttl).read(view)

    # ------------------------------------------------------------------------------------------ how it is done

    def _lives(self, token: int, owner: str | None) -> bool:
        holder = self.owner_of(token)
        return holder is not None and owner in (None, holder)

    def _heads(self, owner: str, preset: str) -> bool:
        head = next(iter(self._queue), None)
        return head == owner and self._queue[owner].preset == preset

    def _heard(self, place: _Place, now: float, ttl: float | None = None) -> None:
        """A place is kept by polling, so it never outlives the default TTL, however long its lock shall be."""
        if ttl is not None:
            place.ttl = ttl
        place.until = max(place.until if ttl is None else 0.0, now + min(place.ttl, self.ttl))

    def _why(self, owner: str) -> Why:
        if owner in self._holds:
            return Why.OWN_LOCK
        if self._holds:
            return Why.HELD
        return Why.OTHER_PRESET if self.entitled == owner else Why.NOT_YOUR_TURN

    def _retry(self, now: float) -> float:
        """Seconds until the lock may be free for all, from 1 to RETRY_CAP."""
        if self._holds:
            frees = max(hold.until for hold in self._holds.values())
        else:
            frees = max((place.until for place in self._queue.values()), default=now)
        return min(RETRY_CAP, max(1.0, frees - now))

    def _grant(self, preset: str, owner: str, ttl: float, now: float, client: str) -> Granted:
        """Refresh, join, take or move. The callers have made sure that it may."""
        moved_from = None
        if self.preset not in (None, preset):
            moved_from = self.preset
            del self._holds[owner]
        if owner in self._queue and self._queue[owner].preset == preset:
            del self._queue[owner]
        hold = self._holds.get(owner)
        fresh, joined = hold is None, bool(self._holds.keys() - {owner})
        self._unsaved = self._unsaved or hold is None or hold.ttl != ttl
        if hold is None:
            self.token += 1
            hold = self._holds[owner] = _Hold(self.token, ttl, 0.0, now, client)
        hold.ttl, hold.until, hold.client = ttl, now + ttl, client or hold.client
        self.preset = preset
        ended = self._ended.pop(owner, None)
        return Granted(preset, owner, hold.token, ttl, ttl, fresh, joined, self.standing(now), moved_from, ended)

    def _queued(self, owner: str, place: _Place, now: float) -> Queued:
        position = list(self._queue).index(owner) + 1
        poll = max(1.0, min(POLL, (place.until - now) / 3))
        return Queued(place.preset, owner, position, poll, self.standing(now), self._ended.get(owner))

    def _refused(self, preset: str, owner: str, why: Why, now: float) -> Refused:
        return Refused(preset, owner, why, self._retry(now), self.standing(now), self._ended.get(owner))

    def _stale(self, token: int, owner: str | None, now: float) -> Stale:
        ended = next((e for e in self._ended.values() if e.token == token), None)
        if ended is None and owner is not None:
            ended = self._ended.get(owner)
        return Stale(token, owner, self.standing(now), ended)

    def _names(self, caller: str | None) -> set[str]:
        """The owners that `caller` speaks for: itself, and the names it locked or queued under."""
        if not caller:
            return set()
        return {caller, *(name for name, entry in self._entries() if entry.client == caller)}

    def _may_end(self, owner: str | None, caller: str | None) -> bool:
        if caller and any(caller in (name, hold.client) for name, hold in self._holds.items()):
            return True  # an owner may end them all
        if owner is None:
            return not self._holds
        clients = {entry.client for entry in (self._holds.get(owner), self._queue.get(owner)) if entry is not None}
        return caller is None or caller == owner or clients <= {"", caller}

    def _entries(self) -> list[tuple[str, _Hold | _Place]]:
        return [*self._holds.items(), *self._queue.items()]

    def _end(
        self, owners: Collection[str], waiters: Collection[str], cause: Cause, at: float | None = None, by: str = ""
    ) -> tuple[Ended, ...]:
        """Off the lock and out of the queue, in the order of time; without `at` when their time was over."""
        gone: list[Ended] = []
        by = by[:MAX_NAME]
        for name in waiters:
            place = self._queue.pop(name)
            gone.append(Ended(name, place.preset, place.until if at is None else at, cause, 0, by))
        for name in owners:
            hold = self._holds.pop(name)
            gone.append(Ended(name, self.preset or "", hold.until if at is None else at, cause, hold.token, by))
        if not self._holds:
            self.preset = None
        gone.sort(key=lambda ended: ended.at)
        self._remember(gone)
        return tuple(gone)

    def _remember(self, gone: Iterable[Ended]) -> None:
        for ended in gone:
            self._unsaved = True
            before = self._ended.get(ended.owner)
            if before is None or ended.token or not before.token:  # a lost lock matters more than a lost place
                self._ended.pop(ended.owner, None)
                self._ended[ended.owner] = ended
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]


class _Reader:
    """Reads a view that may have been written by another version, or by a hand. Never raises."""

    def __init__(self, now: float, ttl: float) -> None:
        self._now = now
        self._book = LockBook(ttl)
        self._odd: list[str] = []

    def read(self, view: object) -> tuple[LockBook, tuple[str, ...]]:
        if not isinstance(view, Mapping):
            return self._book, ("the lock's state is not an object",)
        self._read_owners(view)
        for row in self._rows(view, "queue"):
            self._read_place(row)
        for row in self._rows(view, "ended"):
            self._read_ended(row)
        self._read_token(view.get("token", 0))
        self._book.save(self._now)
        self._book._unsaved = bool(self._odd)
        return self._book, tuple(self._odd)

    def _read_owners(self, view: Mapping[str, Any]) -> None:
        owners, preset = view.get("owners", {}), view.get("preset")
        if not isinstance(owners, Mapping):
            return self._odd.append("the lock's owners are not an object")
        if owners and not _is_name(preset):
            return self._odd.append("the lock has owners and no preset")
        for name, row in owners.items():
            token = row.get("token") if isinstance(row, Mapping) else None
            if (
                not _is_name(name)
                or not isinstance(row, Mapping)
                or not _is_token(token)
                or self._book.owner_of(token) is not None
                or not self._is_timed(row, "held")
            ):
                self._odd.append(f"the lock's owner {str(name)[:MAX_NAME]!r} makes no sense")
                continue
            ttl = float(row["ttl"])
            until = self._now + min(float(row["left"]), ttl)
            since = self._now - float(row.get("held", 0.0))
            self._book._holds[name] = _Hold(token, ttl, until, since, _client(row))
            self._book.preset = preset
        return None

    def _read_place(self, row: Mapping[str, Any]) -> None:
        owner, preset = row.get("owner"), row.get("preset")
        if (
            not _is_name(owner)
            or not _is_name(preset)
            or owner in self._book._queue
            or not self._is_timed(row, "waited")
        ):
            self._odd.append(f"the waiter {str(owner)[:MAX_NAME]!r} makes no sense")
            return
        ttl = float(row["ttl"])
        until = self._now + min(float(row["left"]), ttl, self._book.ttl)
        since = self._now - float(row.get("waited", 0.0))
        self._book._queue[owner] = _Place(preset, ttl, until, since, _client(row))

    def _read_ended(self, row: Mapping[str, Any]) -> None:
        owner, preset, ago, token = row.get("owner"), row.get("preset"), row.get("ago"), row.get("token", 0)
        known = row.get("cause") in [cause.value for cause in Cause]
        if not _is_name(owner) or not _is_name(preset) or not _is_number(ago) or not known:
            self._odd.append(f"the end of the lock of {str(owner)[:MAX_NAME]!r} makes no sense")
            return
        by = row.get("by", "")
        self._book._remember(
            [
                Ended(
                    owner,
                    preset,
                    self._now - ago,
                    Cause(row["cause"]),
                    token if _is_token(token) else 0,
                    by if isinstance(by, str) else "",
                )
            ]
        )

    def _read_token(self, token: object) -> None:
        """Whatever the file says, no token that was ever seen is given again."""
        if token != 0 and not _is_token(token):
            self._odd.append("the lock's token is not a whole number")
        seen = [hold.token for hold in self._book._holds.values()] + [e.token for e in self._book._ended.values()]
        self._book.token = max([*seen, token if _is_token(token) else 0])

    def _rows(self, view: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        rows = view.get(key, [])
        if not isinstance(rows, list):
            self._odd.append(f"the lock's {key} is not a list")
            return []
        self._odd += [f"an entry of the lock's {key} is not an object" for row in rows if not isinstance(row, Mapping)]
        return [row for row in rows if isinstance(row, Mapping)]

    @staticmethod
    def _is_timed(row: Mapping[str, Any], age: str) -> bool:
        ttl = row.get("ttl")
        return _is_number(row.get("left")) and _is_number(row.get(age, 0.0)) and _is_number(ttl) and 0 < ttl <= MAX_TTL


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -1e12 < value < 1e12  # neither infinite nor not a number


def _is_token(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_name(value: object) -> TypeGuard[str]:
    try:
        check_owner(value)
    except ValueError:
        return False
    return True


def _grain(entry: _Hold | _Place) -> float:
    return min(SAVE_GRAIN, max(1.0, entry.ttl / 4))


def _client(row: Mapping[str, Any]) -> str:
    client = row.get("client", "")
    return client if isinstance(client, str) else ""


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
