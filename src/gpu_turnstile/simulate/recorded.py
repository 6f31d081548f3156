"""The recorded history of a gate as a workload: who asked for what, how long it took, and what swaps have cost.

The history knows when a lease began, not when its ticket was drawn. But tickets are numbered as they come, so nobody
asked later than the first lease of a younger ticket; where nobody waited that is exact, else it is the latest moment.
A request that came within RETURN seconds of the client's last answer is the next step of a loop and keeps that
distance; any other comes at its recorded time, whatever the policy does. What a lease took includes what its engine
read again after a swap, so contexts cost nothing extra here unless somebody says so.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from gpu_turnstile.journal import schema
from gpu_turnstile.journal.schema import Event
from gpu_turnstile.simulate.workload import Client, Job, Preset, Workload

RETURN = 60.0  # seconds
LIMIT = 50_000  # leases
SWAP = 8.0  # seconds, where no swap to a preset was recorded


class NoHistory(Exception):
    """There is nothing to play. The text is one line for a person."""


@dataclass(frozen=True, slots=True)
class Row:
    """A lease: `run` and `ticket` say in what order it was asked for. Wall times."""

    run: int
    ticket: int
    tenant: str
    client: str
    since: float
    until: float


def load(file: Path, since: float, until: float, context: float = 0.0) -> Workload:
    """What happened between two wall times; `context`: seconds that every client pays for a lost one.

    Raises NoHistory.
    """
    try:
        with closing(schema.open_to_read(file)) as connection:
            found = connection.execute(
                "SELECT run, ticket, tenant, client, since, until FROM leases WHERE since >= ? AND until <= ?"
                f" ORDER BY run, ticket LIMIT {LIMIT + 1}",
                (since, until),
            ).fetchall()
            swaps = schema.select_events(connection, since, until, ("swapped",))
    except sqlite3.Error as problem:
        raise NoHistory(f"{file}: the history cannot be read: {problem}") from None
    if not found:
        raise NoHistory(f"{file}: no request is recorded in that time; ask for more hours")
    notes = [f"only the first {LIMIT} requests are played"] if len(found) > LIMIT else []
    return build([Row(*row) for row in found[:LIMIT]], swaps, context, tuple(notes))


def build(rows: Sequence[Row], swaps: Iterable[Event], context: float, notes: tuple[str, ...] = ()) -> Workload:
    """The workload of these leases, in order of run and ticket."""
    asked = arrivals(rows)
    start = min(asked)
    seconds = max(row.until for row in rows) - start
    jobs: dict[tuple[str, str], list[Job]] = defaultdict(list)
    last: dict[tuple[str, str], float] = {}
    for at, row in sorted(zip(asked, rows, strict=True), key=lambda pair: pair[0]):
        who = (row.client, row.tenant)
        pause = at - last.get(who, float("-inf"))
        loop = 0.0 <= pause <= RETURN
        work = row.until - row.since
        jobs[who].append(Job(work, pause=pause) if loop else Job(work, at=at - start))
        last[who] = max(last.get(who, 0.0), row.until)
    costs: dict[str, list[float]] = defaultdict(list)
    for swap in swaps:
        costs[str(swap.fields.get("target"))].append(float(swap.fields.get("seconds", SWAP)))
    tenants = sorted({row.tenant for row in rows})
    several = {client for client, _ in jobs if sum(name == client for name, _ in jobs) > 1}
    return Workload(
        "history",
        tuple(
            Preset(
                name,
                swap=median(costs[name]) if costs[name] else SWAP,
                exclusive=_one_at_a_time([row for row in rows if row.tenant == name]),
                drain_grace=None,
            )
            for name in tenants
        ),
        tuple(
            Client(f"{client} on {tenant}" if client in several else client, tenant, context=context, jobs=tuple(todo))
            for (client, tenant), todo in jobs.items()
        ),
        seconds + 1.0,
        notes=notes,
    )


def _one_at_a_time(rows: Sequence[Row]) -> bool:
    """Whether it looks as if it never did two things at once, though there was more to do."""
    ordered = sorted(rows, key=lambda row: row.since)
    pauses = [after.since - before.until for before, after in pairwise(ordered)]
    return bool(pauses) and min(pauses) >= 0.0 and min(pauses) < 1.0


def arrivals(rows: Sequence[Row]) -> list[float]:
    """When each was asked for, at the latest: no later than any younger ticket of its run became a lease."""
    latest: dict[int, float] = {}
    found: list[float] = []
    for row in reversed(rows):
        latest[row.run] = min(row.since, latest.get(row.run, row.since))
        found.append(latest[row.run])
    return found[::-1]
