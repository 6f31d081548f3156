"""The file behind the history: what a row is, how the file is opened, read and kept small.

Everything blocks; whoever calls does so in a thread. Times are wall time, seconds since the epoch. The file is
SQLite in WAL mode: after a kill, what was committed is there, and nothing else.

    events   what the arbiter told, and who else held memory of the card (kind `holders`)
    leases   who used the card, from when to when; one that still runs is there as far as it was seen (`end` is `open`)
    spans    when the gate watched: between `began` and `seen` nothing is missing from the other two tables

The spans are what makes silence mean something: no row outside of one proves that nothing happened.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_NAME = "history.sqlite"
VERSION = 1  # of the tables
HOLDERS = "holders"  # the kind of event that is a sample of the card
OPEN = "open"  # the end of a lease that has not ended

CHUNK = 20_000  # rows that one transaction deletes
ROWS = 50_000  # rows of one kind that one reading gives at most
LOOK_BACK = 6 * 3600.0  # seconds before a window in which a swap that reaches into it may have begun
BUSY = 2.0  # seconds to wait for somebody else's lock on the file
WAL_LIMIT = 4 << 20  # bytes

_BROKEN = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_SCHEMA))
_TABLES = f"""
CREATE TABLE events (id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, tenant TEXT, client TEXT,
                     fields TEXT NOT NULL);
CREATE INDEX events_at ON events (at);
CREATE TABLE leases (id INTEGER PRIMARY KEY, run INTEGER NOT NULL, ticket INTEGER NOT NULL, tenant TEXT NOT NULL,
                     client TEXT NOT NULL, owner TEXT, since REAL NOT NULL, until REAL NOT NULL, end TEXT NOT NULL,
                     requests INTEGER NOT NULL DEFAULT 1, UNIQUE (run, ticket));
CREATE INDEX leases_until ON leases (until);
CREATE TABLE spans (id INTEGER PRIMARY KEY, began REAL NOT NULL, seen REAL NOT NULL);
PRAGMA user_version = {VERSION};
"""


@dataclass(frozen=True, slots=True)
class Event:
    """`id` grows with every event, whatever the clock does. `client`: who it came from, where the note says it."""

    at: float
    kind: str
    fields: dict[str, Any]
    id: int = 0
    tenant: str | None = None
    client: str | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """`end`: how it ended (`released`, `cut` …), or OPEN: then `until` is how far it was seen.

    `requests`: how many it stands for; in a crowd, those of one client that follow each other closely are one.
    """

    ticket: int
    tenant: str
    client: str
    owner: str | None
    since: float
    until: float
    end: str = "released"
    requests: int = 1


@dataclass(frozen=True, slots=True)
class Holder:
    """A process on the card that is no engine of the gate. `used` in bytes, None = the driver does not say.

    `lineage`: its own pid and those of its ancestors, nearest first.
    """

    pid: int
    name: str
    used: int | None
    lineage: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """Who else was on the card from `at` until the next sample; None = it could not be seen."""

    at: float
    holders: tuple[Holder, ...] | None


@dataclass(frozen=True, slots=True)
class Span:
    """The gate watched, and wrote down all there was."""

    began: float
    seen: float


@dataclass(frozen=True, slots=True)
class Record:
    """What is known about a window; events reach back before it, so that a swap under way at its start is whole."""

    events: tuple[Event, ...] = ()
    leases: tuple[Lease, ...] = ()
    samples: tuple[Sample, ...] = ()
    spans: tuple[Span, ...] = field(default=())


class Broken(Exception):
    """The file is not, or no longer, a history of ours."""


# ------------------------------------------------------------------------------------------------- opening


def is_broken(problem: Exception) -> bool:
    """Whether the file itself is at fault, so that a new one helps."""
    code = getattr(problem, "sqlite_errorcode", None)
    return isinstance(problem, Broken) or (isinstance(code, int) and code & 0xFF in _BROKEN)


def open_file(file: Path) -> sqlite3.Connection:
    """For writing; created (0600, in a folder 0700) where there is none. Raises OSError, sqlite3.Error, Broken."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite's other two files take its permissions
    os.chmod(file, 0o600)
    connection = sqlite3.connect(file, timeout=BUSY, isolation_level=None)
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only counts before the first table
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT}")
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise Broken(str(found))
    version = _number(connection, "PRAGMA user_version")
    if version == 0 and not _number(connection, "SELECT count(*) FROM sqlite_master"):
        connection.executescript("BEGIN;" + _TABLES + "COMMIT;")
    elif version != VERSION:
        raise Broken(f"it has version {version} of the tables, this program {VERSION}")


def put_aside(file: Path) -> Path:
    """Move a broken file, and what belongs to it, out of the way; the newest broken one is kept. Raises OSError."""
    kept = file.with_name(file.name + ".broken")
    for suffix in ("-wal", "-shm", ""):
        part = file.with_name(file.name + suffix)
        if part.exists():
            os.replace(part, kept.with_name(kept.name + suffix))
    return kept


def open_to_read(file: Path, timeout: float = BUSY) -> sqlite3.Connection:
    """Raises sqlite3.Error, also where there is no file."""
    return sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=timeout, isolation_level=None)


def _number(connection: sqlite3.Connection, query: str, values: Sequence[Any] = ()) -> int:
    found = connection.execute(query, values).fetchone()
    return int(found[0]) if found and found[0] is not None else 0


# ------------------------------------------------------------------------------------------------- writing


def add_events(connection: sqlite3.Connection, events: Iterable[Event]) -> None:
    connection.executemany(
        "INSERT INTO events (at, kind, tenant, client, fields) VALUES (?, ?, ?, ?, ?)",
        ((e.at, e.kind, e.tenant, e.client, json.dumps(e.fields, default=str)) for e in events),
    )


def add_leases(connection: sqlite3.Connection, run: int, leases: Iterable[Lease]) -> None:
    """A lease that is there already is replaced: it was open then."""
    connection.executemany(
        "INSERT INTO leases (run, ticket, tenant, client, owner, since, until, end, requests)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (run, ticket) DO UPDATE SET until = excluded.until, end = excluded.end",
        ((run, x.ticket, x.tenant, x.client, x.owner, x.since, x.until, x.end, x.requests) for x in leases),
    )


def begin_span(connection: sqlite3.Connection, began: float, seen: float) -> int:
    cursor = connection.execute("INSERT INTO spans (began, seen) VALUES (?, ?)", (began, seen))
    return int(cursor.lastrowid or 0)


def extend_span(connection: sqlite3.Connection, span: int, seen: float) -> bool:
    """False: it is not there any more."""
    return connection.execute("UPDATE spans SET seen = ? WHERE id = ?", (seen, span)).rowcount > 0


# ------------------------------------------------------------------------------------------------- pruning


def size(connection: sqlite3.Connection) -> int:
    """Bytes that rows need, without the pages that are free again."""
    pages = _number(connection, "PRAGMA page_count") - _number(connection, "PRAGMA freelist_count")
    return pages * _number(connection, "PRAGMA page_size")


def prune(connection: sqlite3.Connection, now: float, max_age: float, max_bytes: int) -> None:
    """Forget what is older than `max_age` seconds, then the oldest until `max_bytes` hold the rest."""
    forgot = _forget(connection, now - max_age, now)
    if size(connection) > max_bytes:
        goal = max_bytes * 9 // 10
        while size(connection) > goal:
            horizon = _oldest_tenth(connection)
            if horizon is None:
                break
            forgot = _forget(connection, horizon, now) or forgot
    if forgot:
        connection.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _forget(connection: sqlite3.Connection, horizon: float, now: float) -> bool:
    """Delete what was over by `horizon`; nothing is certified before it from now on."""
    deleted = 0
    for table, time in (("events", "at"), ("leases", "until")):
        query = f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE {time} <= ? LIMIT {CHUNK})"
        while (count := connection.execute(query, (horizon,)).rowcount) > 0:
            deleted += count
    horizon = min(horizon, now)  # rows from a clock that ran ahead do not make the present unknown
    connection.execute("DELETE FROM spans WHERE seen <= ?", (horizon,))
    connection.execute("UPDATE spans SET began = ? WHERE began < ?", (horizon, horizon))
    return deleted > 0


def _oldest_tenth(connection: sqlite3.Connection) -> float | None:
    """Until when the oldest tenth of the fuller table reaches; None = there is nothing."""
    counts = {table: _number(connection, f"SELECT count(*) FROM {table}") for table in ("leases", "events")}
    table = max(counts, key=lambda name: counts[name])
    time = "until" if table == "leases" else "at"
    query = f"SELECT {time} FROM {table} ORDER BY {time} LIMIT 1 OFFSET ?"
    found = connection.execute(query, (counts[table] // 10,)).fetchone()
    return None if found is None else float(found[0])


# ------------------------------------------------------------------------------------------------- reading


def select_events(
    connection: sqlite3.Connection, since: float, until: float, kinds: Sequence[str] | None = None
) -> tuple[Event, ...]:
    """In the order in which they happened; the newest ROWS of them. `kinds` None: all."""
    wanted = "" if kinds is None else f" AND kind IN ({', '.join('?' * len(kinds))})"
    rows = connection.execute(
        f"SELECT at, kind, fields, id, tenant, client FROM events WHERE at BETWEEN ? AND ?{wanted}"
        f" ORDER BY id DESC LIMIT {ROWS}",
        (since, until, *(kinds or ())),
    ).fetchall()
    return tuple(Event(at, kind, _fields(text), *rest) for at, kind, text, *rest in reversed(rows))


def _fields(text: str) -> dict[str, Any]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def select_leases(
    connection: sqlite3.Connection, since: float, until: float, mine: Iterable[str] = ()
) -> tuple[Lease, ...]:
    """Leases that overlap the window, the ROWS that ended last. Those of `mine` come as one a tenant."""
    names = tuple(mine)
    marks = ", ".join("?" * len(names))
    is_mine = f"(coalesce(owner, client) IN ({marks}))" if names else "0"
    others = connection.execute(
        "SELECT ticket, tenant, client, owner, since, until, end, requests FROM leases"
        f" WHERE until >= ? AND since <= ? AND NOT {is_mine} ORDER BY until DESC LIMIT {ROWS}",
        (since, until, *names),
    ).fetchall()
    own = connection.execute(
        "SELECT ticket, tenant, client, owner, min(since), max(until), end, sum(requests) FROM leases"
        f" WHERE until >= ? AND since <= ? AND {is_mine} GROUP BY tenant",
        (since, until, *names),
    ).fetchall()
    return tuple(Lease(*row) for row in sorted((*others, *own), key=lambda row: (row[4], row[0])))


def select_record(connection: sqlite3.Connection, since: float, until: float, mine: Iterable[str]) -> Record:
    """One consistent look at everything that a certificate needs."""
    connection.execute("BEGIN")
    found = select_events(connection, since - LOOK_BACK, until)
    samples = [event for event in found if event.kind == HOLDERS]
    spans = connection.execute(
        "SELECT began, seen FROM spans WHERE seen >= ? AND began <= ? ORDER BY began", (since, until)
    ).fetchall()
    if len(found) == ROWS:  # there are more: before these, nothing is known here
        spans = [(max(began, found[0].at), seen) for began, seen in spans if seen > found[0].at]
    return Record(
        events=tuple(event for event in found if event.kind != HOLDERS),
        leases=select_leases(connection, since, until, mine),
        samples=tuple(sample(event) for event in samples),
        spans=tuple(Span(*row) for row in spans),
    )


def sample(event: Event) -> Sample:
    listed = event.fields.get("holders")
    if listed is None:
        return Sample(event.at, None)
    return Sample(
        event.at,
        tuple(Holder(h["pid"], h["name"], h["used"], tuple(h.get("lineage", ()))) for h in listed),
    )
