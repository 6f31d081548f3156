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

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from gpu_turnstile.core.locks import paper
from gpu_turnstile.core.locks.state import Hold, Place, State
from gpu_turnstile.core.locks.words import (
    MAX_OWNERS,
    TTL,
    Cause,
    Denied,
    Ended,
    Granted,
    Missing,
    Policed,
    Queued,
    Refused,
    Stale,
    Unlocked,
    Why,
)

RETRY_CAP = 60.0  # seconds; nobody is told to stay away for longer
POLL = 10.0  # seconds a waiter may stay away at most, so that its place does not go stale


@dataclass(slots=True)
class LockBook(State):
    """See the module's docstring, and `State` for its fields."""

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
            if owner not in self.holds and len(self.holds) >= MAX_OWNERS:
                return self._refused(preset, owner, Why.FULL, now)
            return self._grant(preset, owner, ttl, now, client)
        place = self.queue.get(owner)
        if place is not None:
            self._heard(place, now, ttl if place.preset == preset else None)
        if not self.holds and (not self.queue or self._heads(owner, preset)):
            return self._grant(preset, owner, ttl, now, client)
        if not wait:
            return self._refused(preset, owner, self._why(owner), now)
        if place is None or place.preset != preset:
            if place is None and len(self.queue) >= MAX_OWNERS:
                return self._refused(preset, owner, Why.FULL, now)
            self.queue.pop(owner, None)  # another preset is another wish: to the end
            self.queue[owner] = place = Place(preset, ttl, 0.0, now, client)
            self.unsaved = True
            self._heard(place, now)
        if self.holds.keys() <= {owner} and self._heads(owner, preset):
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
        place, hold = self.queue.get(owner), self.holds.get(owner)
        if place is not None:
            self._heard(place, now, ttl)
            if self.entitled == owner:
                return self._grant(place.preset, owner, place.ttl, now, place.client)
        if hold is not None and self.preset is not None:
            return self._grant(self.preset, owner, hold.ttl if ttl is None else ttl, now, hold.client)
        if place is not None:
            return self._queued(owner, place, now)
        return Missing(owner, self.standing(now), self.endings.get(owner))

    def unlock(
        self,
        owner: str | None,
        now: float,
        *,
        caller: str | None = None,
        token: int | None = None,
        force: bool = False,
        open_unlock: bool = False,
        leave: bool = False,
        by: str = "",
    ) -> Unlocked | Denied | Stale:
        """Take `owner` off the lock and out of the queue; None takes everybody off the lock, the queue stays.

        `leave`: only out of the queue, so that an owner who waits for another preset can give that up and keep what it
        holds. `by`: who did it and why, for those who lose by it, where that is more than the `caller`'s name.

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
        owners = () if leave else tuple(name for name in self.holds if owner in (None, name))
        waiters = tuple(name for name in self.queue if name == owner)
        own = self._names(caller if caller is not None or force or owner is None else owner)
        gone = self.end(owners, waiters, Cause.TAKEN, now, by or caller or "")
        for name in own:
            self.endings.pop(name, None)
        return Unlocked(owners, waiters, tuple(ended for ended in gone if ended.owner not in own), self.standing(now))

    def unlock_all(self, now: float, **who: Any) -> Unlocked | Denied | Stale:
        """`unlock` without an owner."""
        return self.unlock(None, now, **who)

    def break_glass(self, now: float, by: str) -> Unlocked:
        """Everybody is off the lock, whoever asks. The queue stays: waiting cannot be stuck, its head is next."""
        owners = tuple(self.holds)
        return Unlocked(owners, (), self.end(owners, (), Cause.BROKEN, now, by), self.standing(now))

    def keep_presets(self, known: Collection[str], now: float) -> tuple[Ended, ...]:
        """Presets were removed: their lock and the places that wait for them end. Also after `recover`."""
        owners = tuple(self.holds) if self.preset not in known else ()
        waiters = tuple(o for o, place in self.queue.items() if place.preset not in known)
        return self.end(owners, waiters, Cause.PRESET_GONE, now)

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
            head = self.queue.get(owner) if owner is not None and owner == self.entitled else None
            if head is not None and owner is not None and head.preset in wants:
                return self._grant(head.preset, owner, head.ttl, now, head.client)
            return None
        return self.police(wants, now, owner)

    def allows(self, wants: Collection[str]) -> bool:
        """Whether a request for `wants` may run while this lock lives."""
        return self.preset is None or self.preset in wants

    def police(self, wants: tuple[str, ...], now: float, owner: str | None = None) -> Policed:
        """Why a request for `wants` may not run: who holds the lock, until when, and whether `owner` lost its own."""
        lost = None if owner is None else self.endings.get(owner)
        return Policed(wants, self._retry(now), self.standing(now), lost)

    def check(self, token: int, owner: str | None, now: float) -> Stale | None:
        """Fencing: None when `token` names a hold that lives (and is `owner`'s)."""
        return None if self._lives(token, owner) else self._stale(token, owner, now)

    def owner_of(self, token: int) -> str | None:
        return next((owner for owner, hold in self.holds.items() if hold.token == token), None)

    def touch(self, preset: str, owner: str | None, now: float) -> None:
        """Work on `preset` began or ended: traffic under the lock refreshes its TTL.

        Work that says whose it is refreshes that owner (also its place); work that does not, everybody who pins
        `preset`, because plain clients of an owner cannot say it.
        """
        if owner is not None and owner in self.queue:
            self._heard(self.queue[owner], now)
        if preset == self.preset:
            for name, hold in self.holds.items():
                if owner is None or owner == name:
                    hold.until = max(hold.until, now + hold.ttl)

    def busy(self, marks: Iterable[str | None]) -> frozenset[str]:
        """Who works. `marks`: the owner, or None, of every open request and running job on the pinned preset."""
        found = frozenset(marks)
        named = frozenset(name for name in found if name is not None)
        return named | frozenset(self.holds) if None in found else named

    # ---------------------------------------------------------------------------------------------- time

    def lapse(self, now: float, busy: Collection[str] = ()) -> tuple[Ended, ...]:
        """End what was silent for its TTL; who ended and when, in that order.

        An owner in `busy` is not silent, however long its work says nothing (a 30-minute think, an image job): its TTL
        counts from the end of the work, which `touch` tells.
        """
        if not any(entry.until <= now for _, entry in self.entries()):
            return ()
        for name in busy:
            if name in self.holds and self.holds[name].until <= now:
                self.holds[name].until = now + self.holds[name].ttl
            if name in self.queue and self.queue[name].until <= now:
                self._heard(self.queue[name], now)
        owners = tuple(name for name, hold in self.holds.items() if hold.until <= now)
        waiters = tuple(name for name, place in self.queue.items() if place.until <= now)
        return self.end(owners, waiters, Cause.SILENT)

    # ----------------------------------------------------------------------------------------- persistence

    def view(self, now: float, busy: Collection[str] = ()) -> dict[str, Any]:
        """The whole book as JSON-able values; who works has its whole TTL left (see `paper`)."""
        return paper.write(self, now, busy)

    def save(self, now: float, busy: Collection[str] = ()) -> dict[str, Any]:
        """`view`, for the state file: the book remembers what the file says (see `dirty`)."""
        view = self.view(now, busy)
        self.mark_saved(view, now)
        return view

    @classmethod
    def recover(cls, view: object, now: float, ttl: float = TTL) -> tuple[LockBook, tuple[str, ...]]:
        """The book that `view` tells of, and what in it made no sense and was left out."""
        book = cls(ttl)
        return book, paper.read_into(book, view, now)

    # ------------------------------------------------------------------------------------------ how it is done

    def _lives(self, token: int, owner: str | None) -> bool:
        holder = self.owner_of(token)
        return holder is not None and owner in (None, holder)

    def _heads(self, owner: str, preset: str) -> bool:
        head = next(iter(self.queue), None)
        return head == owner and self.queue[owner].preset == preset

    def _heard(self, place: Place, now: float, ttl: float | None = None) -> None:
        """A place is kept by polling, so it never outlives the default TTL, however long its lock shall be."""
        if ttl is not None:
            self.unsaved = self.unsaved or ttl != place.ttl
            place.ttl = ttl
        place.until = max(place.until if ttl is None else 0.0, now + min(place.ttl, self.ttl))

    def _why(self, owner: str) -> Why:
        if owner in self.holds:
            return Why.OWN_LOCK
        if self.holds:
            return Why.HELD
        return Why.OTHER_PRESET if self.entitled == owner else Why.NOT_YOUR_TURN

    def _retry(self, now: float) -> float:
        """Seconds until the lock may be free for all, from 1 to RETRY_CAP."""
        if self.holds:
            frees = max(hold.until for hold in self.holds.values())
        else:
            frees = max((place.until for place in self.queue.values()), default=now)
        return min(RETRY_CAP, max(1.0, frees - now))

    def _grant(self, preset: str, owner: str, ttl: float, now: float, client: str) -> Granted:
        """Refresh, join, take or move. The callers have made sure that it may."""
        moved_from = None
        if self.preset not in (None, preset):
            moved_from = self.preset
            del self.holds[owner]
        if owner in self.queue and self.queue[owner].preset == preset:
            del self.queue[owner]
        hold = self.holds.get(owner)
        fresh, joined = hold is None, bool(self.holds.keys() - {owner})
        self.unsaved = self.unsaved or hold is None or hold.ttl != ttl
        if hold is None:
            self.token += 1
            hold = self.holds[owner] = Hold(self.token, ttl, 0.0, now, client)
        hold.ttl, hold.until, hold.client = ttl, now + ttl, client or hold.client
        self.preset = preset
        ended = self.endings.pop(owner, None)
        return Granted(preset, owner, hold.token, ttl, ttl, fresh, joined, self.standing(now), moved_from, ended)

    def _queued(self, owner: str, place: Place, now: float) -> Queued:
        position = list(self.queue).index(owner) + 1
        poll = max(1.0, min(POLL, (place.until - now) / 3))
        news, place.told = place.told != position, position
        return Queued(place.preset, owner, position, poll, news, self.standing(now), self.endings.get(owner))

    def _refused(self, preset: str, owner: str, why: Why, now: float) -> Refused:
        return Refused(preset, owner, why, self._retry(now), self.standing(now), self.endings.get(owner))

    def _stale(self, token: int, owner: str | None, now: float) -> Stale:
        ended = next((e for e in self.endings.values() if e.token == token), None)
        if ended is None and owner is not None:
            ended = self.endings.get(owner)
        return Stale(token, owner, self.standing(now), ended)

    def _names(self, caller: str | None) -> set[str]:
        """The owners that `caller` speaks for: itself, and the names it locked or queued under."""
        if not caller:
            return set()
        return {caller, *(name for name, entry in self.entries() if entry.client == caller)}

    def _may_end(self, owner: str | None, caller: str | None) -> bool:
        if caller and any(caller in (name, hold.client) for name, hold in self.holds.items()):
            return True  # an owner may end them all
        if owner is None:
            return not self.holds
        clients = {entry.client for entry in (self.holds.get(owner), self.queue.get(owner)) if entry is not None}
        return caller is None or caller == owner or clients <= {"", caller}
