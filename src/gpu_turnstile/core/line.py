"""The line: tickets that wait, in one queue per set of wanted tenants, each in order of arrival.

Bookkeeping only; who goes next is the policy's business. Every operation but `resort` costs time in proportion to the
number of *queues*, never of tickets: ten thousand waiters must not make an event slow.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from gpu_turnstile.core.model import Request, Waiting

SPARE = 1000  # deadlines of answered tickets that are kept until somebody cleans up


@dataclass(slots=True)
class Entry:
    number: int
    seq: int
    since: float
    deadline: float | None
    visit: bool
    client: str
    owner: str | None
    token: int | None


@dataclass(slots=True)
class Queue:
    """Tickets that want the same. Never empty while it is in the line."""

    wants: tuple[str, ...]
    in_place: bool
    rank: int
    entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    owners: Counter[str | None] = field(default_factory=Counter)  # for how many of them somebody waits

    @property
    def head(self) -> Entry:
        return next(iter(self.entries.values()))

    def add(self, entry: Entry) -> None:
        self.entries[entry.number] = entry
        self.owners[entry.owner] += 1

    def take(self, ticket: int) -> Entry:
        entry = self.entries.pop(ticket)
        self.owners[entry.owner] -= 1
        if not self.owners[entry.owner]:
            del self.owners[entry.owner]
        return entry


class Line:
    def __init__(self) -> None:
        self.seq = 0  # of the newest ticket
        self._queues: dict[tuple[tuple[str, ...], bool], Queue] = {}
        self._of: dict[int, Queue] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._tokens: dict[int, int] = {}  # of the tickets that have one

    def __bool__(self) -> bool:
        return bool(self._of)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._of

    def queues(self) -> tuple[Queue, ...]:
        return tuple(self._queues.values())

    def queue_of(self, ticket: int) -> Queue:
        return self._of[ticket]

    def with_token(self) -> list[Entry]:
        """Whoever waits with a token."""
        return [self._of[ticket].entries[ticket] for ticket in self._tokens]

    def tickets(self, which: Callable[[Queue], bool] = lambda queue: True) -> list[int]:
        return [number for queue in self._queues.values() if which(queue) for number in queue.entries]

    def join(self, request: Request, wants: tuple[str, ...], rank: int, now: float, owner: str | None = None) -> None:
        key = (wants, request.in_place)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = Queue(wants, request.in_place, rank)
        self.seq += 1
        deadline = now + request.wait if request.wait else None
        ticket, token = request.ticket, request.token
        queue.add(Entry(ticket, self.seq, now, deadline, request.visit, request.client, owner, token))
        self._of[ticket] = queue
        if token is not None:
            self._tokens[ticket] = token
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, ticket))
            self._forget_answered()

    def leave(self, ticket: int) -> Entry:
        queue = self._of.pop(ticket)
        entry = queue.take(ticket)
        self._tokens.pop(ticket, None)
        if not queue.entries:
            del self._queues[queue.wants, queue.in_place]
        return entry

    def resort(self, known: Callable[[str], int | None]) -> list[int]:
        """Sort everybody anew after the tenants changed. `known` gives a tenant's rank, None if it is no more.

        Returns the tickets that nothing can serve any more; they stay until they `leave`.
        """
        lost: list[int] = []
        entries = sorted(
            ((entry, queue) for queue in self._queues.values() for entry in queue.entries.values()),
            key=lambda pair: pair[0].seq,
        )
        self._queues.clear()
        for entry, old in entries:
            wants = tuple(want for want in old.wants if known(want) is not None)
            if not wants:
                lost.append(entry.number)
                wants = old.wants
            key = (wants, old.in_place)
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = Queue(wants, old.in_place, known(wants[0]) or 0)
            queue.add(entry)
            self._of[entry.number] = queue
        return lost

    def expired(self, now: float) -> Iterable[Entry]:
        """Take out and return whoever has waited as long as it may."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, ticket = heapq.heappop(self._deadlines)
            if ticket in self._of:
                yield self.leave(ticket)

    def _forget_answered(self) -> None:
        """The deadlines of tickets that were answered long before; now and then, so that it costs next to nothing."""
        if len(self._deadlines) > 2 * len(self._of) + SPARE:
            self._deadlines = [pair for pair in self._deadlines if pair[1] in self._of]
            heapq.heapify(self._deadlines)

    @property
    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._of:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def view(self, target: str | None) -> Iterator[Waiting]:
        """Everybody, in the order they would be served if nothing else happened."""
        line = sorted(
            (target not in q.wants, -q.rank, e.seq, e.number, q.wants, e.client, e.since)
            for q in self._queues.values()
            for e in q.entries.values()
        )
        for position, (_, _, _, number, wants, client, since) in enumerate(line, 1):
            yield Waiting(number, wants, client, since, position)
