"""The history: what happened on the card, kept in `history.sqlite` so that a measurement can be judged afterwards.

The loop only ever appends to a bounded queue; a thread writes it down twice a second. A disk that is slow, full,
locked or broken costs history, never service: it is said once, the oldest of what waits is dropped and counted, and
when the disk works again the gap itself is written down. A file that is no history is put aside as `.broken`.

Kept true here: between `began` and `seen` of a span nothing is missing from the file. Items are written in the order
in which they came, and only a beat, which brings the leases that are open, moves `seen`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from gpu_turnstile.journal import schema
from gpu_turnstile.journal.schema import FILE_NAME, Event, Lease, Record

log = structlog.get_logger("history")
T = TypeVar("T")

DAY = 86400.0
MAX_AGE = 30 * DAY
MAX_BYTES = 200_000_000
QUEUE = 100_000  # items that wait for the disk
EVERY = 0.5  # seconds between two writings
CROWD = 200  # leases in one writing, beyond which they are bundled …
CLOSE = 0.05  # … if no more seconds lie between them
AGAIN = 5.0  # seconds until a disk that failed is tried again
PRUNE_EVERY = 60.0
PRUNE_ROWS = 50_000  # … or after so many rows
BEAT = 10.0  # seconds between two looks at what nobody tells
GAP = 3 * BEAT  # seconds without a beat after which the gate was not watching
CLOCK_STEP = 2.0  # seconds
READ_TIMEOUT = 10.0
TEXT_LIMIT = 200  # characters of a name
FIELDS_LIMIT = 32_000  # characters of a note's fields
LOST = "history_lost"

LeaseRow = tuple[int, str, str, str | None, float, float, str]
"""ticket, tenant, client, owner, since, until, how it ended; both times on `time.monotonic`."""


class HistoryError(Exception):
    """The history cannot be read. The text is for a person."""


@dataclass(slots=True)
class _Batch:
    """One writing: what is to be stored, in wall time."""

    events: list[Event] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    beats: list[tuple[float, float, list[Lease]]] = field(default_factory=list)  # monotonic, wall, open leases

    def __len__(self) -> int:
        return len(self.events) + len(self.leases)


@dataclass(frozen=True, slots=True)
class _Beat:
    at: float
    leases: tuple[LeaseRow, ...]


@dataclass(slots=True)
class _Span:
    """The span that is being written, as the file has it."""

    id: int
    at: float  # monotonic
    seen: float  # wall
    closed: bool = False  # something after it was lost


class History:
    """Begins with `start`; `take` is a watcher of the arbiter, `lease` is called for every lease that has ended."""

    def __init__(
        self,
        state_dir: Path,
        *,
        max_age: float = MAX_AGE,
        max_bytes: int = MAX_BYTES,
        queue: int = QUEUE,
        open_file: Callable[[Path], sqlite3.Connection] = schema.open_file,
    ) -> None:
        """`max_age` in seconds; `queue`: how many items may wait for the disk; `open_file`: for tests of bad disks."""
        self.file = state_dir / FILE_NAME
        self._max_age = max_age
        self._max_bytes = max_bytes
        self._limit = queue
        self._open_file = open_file
        self._queue: deque[Any] = deque()
        self._dropped = 0
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._reading = asyncio.Semaphore(2)
        # from here on: the thread's own
        self._connection: sqlite3.Connection | None = None
        self._span: _Span | None = None
        self._run = 0  # the first span of this run in this file
        self._pending = _Batch()
        self._open: set[int] = set()  # tickets that are stored as open leases, and have not ended since
        self._forgotten = 0
        self._told = 0  # of `lost`, as the file knows it
        self._written_at = time.time()
        self._failing = False
        self._again_at = 0.0
        self._renewed_at = float("-inf")
        self._pruned_at = float("-inf")
        self._rows = 0

    @property
    def lost(self) -> int:
        """Items that were dropped since the start, because the disk did not keep up."""
        return self._dropped + self._forgotten

    # ------------------------------------------------------------------------------------- the loop's side

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="history", daemon=True)
        self._thread.start()
        self.beat(())

    def lease(self, row: LeaseRow) -> None:
        """A lease has ended. The hot path: one append."""
        if len(self._queue) >= self._limit:
            self._drop()
        self._queue.append(row)

    def take(self, kind: str, fields: dict[str, Any]) -> None:
        """One note of the arbiter. `fields` must not be changed afterwards."""
        if len(self._queue) >= self._limit:
            self._drop()
        self._queue.append((kind, time.monotonic(), fields))

    def beat(self, leases: Iterable[LeaseRow]) -> None:
        """The gate watches, and these leases are open: `until` is now, and they end as OPEN."""
        if len(self._queue) >= self._limit:
            self._drop()
        self._queue.append(_Beat(time.monotonic(), tuple(leases)))

    def _drop(self) -> None:
        with contextlib.suppress(IndexError):  # the thread was quicker
            dropped = self._queue.popleft()
            if isinstance(dropped, threading.Event):
                dropped.set()
            else:
                self._dropped += 1

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits, for `timeout` seconds at most, and end the thread."""
        if self._thread is None:
            return
        self.beat(())
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)

    # --------------------------------------------------------------------------------------------- reading

    async def events(self, since: float, until: float, kinds: Sequence[str] | None = None) -> tuple[Event, ...]:
        """What happened, oldest first. Wall times. Raises HistoryError."""
        return await self._read(lambda file: schema.select_events(file, since, until, kinds))

    async def leases(self, since: float, until: float) -> tuple[Lease, ...]:
        """Who used the card at any time in the window. Raises HistoryError."""
        return await self._read(lambda file: schema.select_leases(file, since, until))

    async def record(self, since: float, until: float, mine: Iterable[str] = ()) -> Record:
        """Everything that a certificate needs; leases of `mine` come as one for each tenant. Raises HistoryError."""
        names = tuple(mine)
        return await self._read(lambda file: schema.select_record(file, since, until, names))

    async def _read(self, query: Callable[[sqlite3.Connection], T], timeout: float = READ_TIMEOUT) -> T:
        async with self._reading:
            return await asyncio.to_thread(self._read_now, query, time.monotonic() + timeout, timeout)

    def _read_now(self, query: Callable[[sqlite3.Connection], T], deadline: float, timeout: float) -> T:
        """After everything that was taken before is written, or could not be."""
        self._flush(min(2.0, timeout))
        try:
            with contextlib.closing(schema.open_to_read(self.file)) as connection:
                connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
                return query(connection)
        except sqlite3.Error as problem:
            if time.monotonic() > deadline:
                raise HistoryError(f"the history took longer than {timeout:g} s; ask for a shorter window") from None
            raise HistoryError(f"the history cannot be read: {problem}") from None

    def _flush(self, timeout: float) -> None:
        if self._thread is None or not self._thread.is_alive() or self._failing:
            return
        written = threading.Event()
        self._queue.append(written)
        self._wake.set()
        written.wait(timeout)

    # ------------------------------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            self._wake.wait(EVERY)
            self._wake.clear()
            closing = self._closing
            try:
                self._round(time.monotonic())
            except Exception:  # a bug costs history, not the thread
                log.exception("the history failed in a way nobody expected")
                self._forget_pending()
            if closing:
                self._shut()
                return

    def _round(self, now: float) -> None:
        marks = [] if self._failing else self._drain()
        if now >= self._again_at or self._closing:
            try:
                self._write(now)
            except (OSError, sqlite3.Error, schema.Broken) as problem:
                self._failed(problem, now)
            else:
                self._worked()
        for written in marks:
            written.set()

    def _drain(self) -> list[threading.Event]:
        """Queue → batch. Monotonic times become wall times here, where it costs the loop nothing."""
        offset = time.time() - time.monotonic()
        batch, marks, queue = self._pending, [], self._queue
        leases: list[LeaseRow] = []
        while len(batch) + len(leases) < self._limit:
            try:
                item = queue.popleft()
            except IndexError:
                break
            if isinstance(item, threading.Event):
                marks.append(item)
            elif isinstance(item, _Beat):
                self._open = {row[0] for row in item.leases} | (self._open & {row[0] for row in leases})
                batch.beats.append((item.at, item.at + offset, [_lease(row, offset) for row in item.leases]))
            elif len(item) == 3:
                kind, at, fields = item
                batch.events.append(_event(kind, at + offset, fields))
            else:
                leases.append(item)
        batch.leases += bundled(leases, offset, self._open)
        return marks

    def _write(self, now: float) -> None:
        batch, lost, wall = self._pending, self.lost, time.time()
        due = now >= self._pruned_at + PRUNE_EVERY or self._rows >= PRUNE_ROWS
        if not (batch or batch.beats or lost > self._told or due or self._failing):
            return
        connection = self._connection
        if connection is None:
            connection = self._connection = self._open_file(self.file)
        connection.execute("BEGIN IMMEDIATE")
        try:
            span, run = self._extend(connection, batch.beats, now, wall, hole=lost > self._told)
            if lost > self._told:
                fields = {"count": lost - self._told, "since": self._written_at - 1.0, "until": wall}
                schema.add_events(connection, [Event(wall, LOST, fields)])
            schema.add_events(connection, batch.events)
            for _, _, leases in batch.beats:
                schema.add_leases(connection, run, leases)
            schema.add_leases(connection, run, batch.leases)
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        self._span, self._run, self._told, self._written_at = span, run, lost, wall
        self._rows += len(batch)
        self._pending = _Batch()
        if due:
            schema.prune(connection, wall, self._max_age, self._max_bytes)
            self._pruned_at, self._rows = now, 0

    def _extend(
        self,
        connection: sqlite3.Connection,
        beats: list[tuple[float, float, list[Lease]]],
        now: float,
        wall: float,
        *,
        hole: bool = False,
    ) -> tuple[_Span, int]:
        """Move `seen` to the last beat; a silence, or a clock that was set, begins another span.

        With a `hole` somewhere before, in or after this batch no span reaches across any part of it.
        """
        span, run = self._span, self._run
        if span is None:
            at, seen = (beats[0][0], beats[0][1]) if beats else (now, wall)
            span = _Span(schema.begin_span(connection, seen, seen), at, seen)
            run = run or span.id
        for at, seen, _ in beats:
            quiet, drift = at - span.at, (seen - span.seen) - (at - span.at)
            goes_on = not (hole or span.closed) and quiet <= GAP and abs(drift) <= CLOCK_STEP
            goes_on = goes_on and schema.extend_span(connection, span.id, seen)
            number = span.id if goes_on else schema.begin_span(connection, seen, seen)
            span = _Span(number, at, seen)
        return (_Span(span.id, span.at, span.seen, closed=True) if hole else span), run

    def _failed(self, problem: Exception, now: float) -> None:
        self._shut()
        if schema.is_broken(problem) and now >= self._renewed_at + PRUNE_EVERY and self._renew(problem):
            self._renewed_at = now
            return
        if not self._failing:
            log.warning(
                "history_not_written",
                file=str(self.file),
                reason=str(problem),
                consequence="the gate goes on; measurements of this time cannot be certified",
            )
        self._failing, self._again_at = True, now + AGAIN

    def _renew(self, problem: Exception) -> bool:
        """Put a broken file aside; the next round begins another, with all that waits."""
        try:
            kept = schema.put_aside(self.file)
        except OSError:
            return False
        log.warning(
            "history_broken",
            file=str(self.file),
            reason=str(problem),
            kept_as=str(kept),
            consequence="a new one begins",
        )
        self._span, self._run = None, 0
        return True

    def _worked(self) -> None:
        if self._failing:
            log.warning("history_written_again", file=str(self.file), lost=self.lost)
        self._failing, self._again_at = False, 0.0

    def _forget_pending(self) -> None:
        self._forgotten += len(self._pending)
        self._pending = _Batch()

    def _shut(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _event(kind: str, at: float, fields: dict[str, Any]) -> Event:
    tenant = fields.get("tenant") or fields.get("target") or fields.get("preset")
    client = fields.get("client") or fields.get("caller") or fields.get("peer") or fields.get("owner")
    length = len(str(fields))
    kept = fields if length <= FIELDS_LIMIT else {"too_long": length}
    return Event(at, kind, kept, 0, short(tenant) if tenant else None, short(client) if client else None)


def short(value: object) -> str:
    """A name as it is stored."""
    return str(value)[:TEXT_LIMIT].encode("utf-8", "replace").decode()


def bundled(rows: list[LeaseRow], offset: float, apart: set[int]) -> list[Lease]:
    """Leases as they are stored. In a crowd, those of one client that follow each other closely become one row.

    Else a client that asks ten thousand times a second would cost more to write down than to serve. `apart`: tickets
    that are stored already, as open; each gets its own end, and is taken out.
    """
    known = {row[0] for row in rows} & apart if apart else ()
    alone = rows if len(rows) <= CROWD else [row for row in rows if row[0] in known]
    apart.difference_update(known)
    stored = [_lease(row, offset) for row in alone]
    if alone is rows:
        return stored
    found: list[list[Any]] = []  # rows that can still grow, and how many requests each is
    newest: dict[tuple[Any, ...], list[Any]] = {}
    for ticket, tenant, client, owner, since, until, end in rows:
        if ticket in known:
            continue
        key = (tenant, client, owner, end)
        last = newest.get(key)
        if last is not None and since <= last[2] + CLOSE:
            last[1] = min(last[1], since)
            last[2] = max(last[2], until)
            last[3] += 1
        else:
            newest[key] = last = [ticket, since, until, 1, key]
            found.append(last)
    return stored + [
        replace(_lease((ticket, *key[:3], since, until, key[3]), offset), requests=count)
        for ticket, since, until, count, key in found
    ]


def _lease(row: LeaseRow, offset: float) -> Lease:
    ticket, tenant, client, owner, since, until, end = row
    named = None if owner is None else short(owner)
    return Lease(ticket, short(tenant), short(client), named, since + offset, until + offset, end)
