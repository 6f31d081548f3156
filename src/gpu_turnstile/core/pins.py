"""What the lock does to those who work and wait: who is let in, who is sent away, what is told and kept.

The book has the rules (`locks/`); here they meet the card and the line. Nobody's work is ever cut for a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpu_turnstile.core.card import Card, Resident
from gpu_turnstile.core.line import Line
from gpu_turnstile.core.locks import Denied, Ended, Granted, LockBook, Policed, Queued, Refused, Stale, Unlocked
from gpu_turnstile.core.model import Code, Effect, Note, Refuse, Request


class Pins:
    """`persist` appends the effect that makes all durable: what changes in the book is kept before it is told."""

    def __init__(self, book: LockBook, line: Line, card: Card, persist: Callable[[float, list[Effect]], None]) -> None:
        self._book = book
        self._line = line
        self._card = card
        self._persist = persist

    # ------------------------------------------------------------------------------------------ at the door

    def admit(self, event: Request, wants: tuple[str, ...], now: float, out: list[Effect]) -> bool:
        """Whether the lock lets a request in. The queue's head takes the free lock with its first one."""
        verdict = self._book.admit(wants, now, owner=event.owner, token=event.token)
        match verdict:
            case Stale():
                out.append(Refuse(event.ticket, Code.LOCKED, verdict.message))
                return False
            case Policed():
                out.append(Refuse(event.ticket, Code.MODEL_UNAVAILABLE, verdict.message, verdict.retry_after))
                return False
            case Granted():
                out.append(Note("locked", {"owner": verdict.owner, "preset": verdict.preset, "token": verdict.token}))
                self._refuse_policed(now, out)
                self._persist(now, out)
        return True

    def touch(self, tenant: str, owner: str | None, now: float, out: list[Effect]) -> None:
        """Traffic under the lock refreshes it."""
        self._book.touch(tenant, owner, now)
        self._keep(now, out)

    def work_ended(self, residents: Iterable[Resident], now: float) -> None:
        """Leases are about to be cut: that is the end of their work, from which their owners' time counts."""
        for resident in residents:
            for _, _, owner in resident.leases.values():
                self._book.touch(resident.tenant.name, owner, now)

    def busy(self) -> frozenset[str]:
        """Whose work runs, or waits for the pinned preset: no silence of theirs counts.

        Work that names nobody may be anybody's who pins its preset.
        """
        pinned = self._book.preset
        marks: list[str | None] = []
        for name, resident in self._card.residents.items():
            owners = [owner for _, _, owner in resident.leases.values()]
            marks += owners if name == pinned else [owner for owner in owners if owner is not None]
        for queue in self._line.queues():
            if pinned in queue.wants:
                marks += queue.owners
        return self._book.busy(marks)

    # ------------------------------------------------------------------------------------ what has changed

    def answered(self, answer: object, now: float, out: list[Effect], **who: Any) -> None:
        """Tell what the book's answer to a call means for others, and keep it."""
        match answer:
            case Granted(preset=preset, owner=owner, fresh=fresh, moved_from=moved_from):
                kind = "locked" if fresh or moved_from else "renewed"
                out.append(Note(kind, {"owner": owner, "preset": preset, "token": answer.token, "ttl": answer.ttl}))
                self._refuse_policed(now, out)
            case Queued(owner=owner, preset=preset, position=position) if answer.news:
                out.append(Note("lock_queued", {"owner": owner, "preset": preset, "position": position}))
            case Unlocked(owners=owners, waiters=waiters) if owners or waiters:
                fields = {"owners": list(owners), "waiters": list(waiters), "cut": [e.owner for e in answer.cut]}
                out.append(Note("unlocked", fields | who))
            case Refused(owner=owner, preset=preset, why=why):
                out.append(Note("lock_refused", {"owner": owner, "preset": preset, "why": str(why)}))
            case Denied(owner=owner):
                out.append(Note("lock_denied", {"owner": owner} | who))
        self._refuse_stale(now, out)
        self._keep(now, out)

    def ended(self, ended: tuple[Ended, ...], now: float, out: list[Effect]) -> None:
        """Holds and places that ended without their owners' doing: everybody may see it."""
        for end in ended:
            kind = "lapsed" if end.token else "left_queue"
            fields = {
                "owner": end.owner,
                "preset": end.preset,
                "cause": str(end.cause),
                "token": end.token,
                "by": end.by,
            }
            out.append(Note(kind, fields | {"ago": round(now - end.at, 3)}))
        if ended:
            self._refuse_stale(now, out)
            self._persist(now, out)

    def lapse(self, now: float, out: list[Effect]) -> None:
        """Let lapse what is overdue, before anything is decided by it."""
        moment = self._book.next_moment
        if moment is not None and moment <= now:
            self.ended(self._book.lapse(now, self.busy()), now, out)
            self._keep(now, out)

    def _keep(self, now: float, out: list[Effect]) -> None:
        if self._book.dirty(now):
            self._persist(now, out)

    def _refuse_policed(self, now: float, out: list[Effect]) -> None:
        """Whoever waits for another preset than the one that is pinned now."""
        for ticket in self._line.tickets(lambda queue: not self._book.allows(queue.wants)):
            wants = self._line.queue_of(ticket).wants
            self._line.leave(ticket)
            policed = self._book.police(wants, now)
            out.append(Refuse(ticket, Code.MODEL_UNAVAILABLE, policed.message, policed.retry_after))

    def _refuse_stale(self, now: float, out: list[Effect]) -> None:
        """Whoever waits with a token whose hold has ended meanwhile."""
        for entry in self._line.with_token():
            stale = None if entry.token is None else self._book.check(entry.token, entry.owner, now)
            if stale is not None:
                self._line.leave(entry.number)
                out.append(Refuse(entry.number, Code.LOCKED, stale.message))
