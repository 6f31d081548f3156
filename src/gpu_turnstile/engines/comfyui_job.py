"""How a ComfyUI job ended, told from what was seen of it. Pure: sightings in, an end out; no I/O, time is an argument.

ComfyUI keeps queue and history in memory and answers `{}` for a job that is unknown, unfinished or deleted alike, so
one look proves little. What this rests on:

  in the queue                     it is alive, whatever was suspected before
  in the history (queue asked first: the move is atomic)       it has ended, as the entry says
  in neither, in two agreeing looks, the server being          and last seen
    the one that knew it             queued  -> deleted       running -> cleared (ended, its entry wiped)
    another one, or never seen       lost
  nobody listens at its address, look after look,
    for as long as a restart may take          lost: queue and history ended with the process

"The one that knew it" is judged by evidence: a refused or broken connection since, or a look that came by a new
connection although this server keeps its connections open, says it was restarted. Silence says nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from gpu_turnstile.engines.base import JobEnd

AGREEING_LOOKS = 2
CONNECTIONS_KEPT = 32


class Where(Enum):
    QUEUED = auto()
    RUNNING = auto()
    ENDED = auto()
    GONE = auto()  # readable answers, and in neither list
    SILENT = auto()  # no readable answer; proves nothing
    CUT = auto()  # the connection broke, or none was to be had: it may be another server afterwards
    REFUSED = auto()  # nobody listens there: its process has ended


@dataclass(frozen=True, slots=True)
class Sighting:
    """`connections`: those this look came by; `others`: what else was answered so far by the server it found."""

    where: Where
    end: JobEnd | None = None
    connections: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()


class JobWatch:
    def __init__(self, patience: float) -> None:
        """`patience`: seconds a server may be gone until what it knew is given up."""
        self._patience = patience
        self._refused_since: float | None = None
        self._last_seen: Where | None = None
        self._gone_looks = 0
        self._cut = False
        self._known: deque[str] = deque(maxlen=CONNECTIONS_KEPT)
        self._keeps_connections = False
        self._same_server = False

    def see(self, sighting: Sighting, now: float) -> JobEnd | None:
        """The end, once it is certain. `now` in seconds, of any clock that never goes back."""
        if sighting.where is not Where.REFUSED:
            self._refused_since = None
        match sighting.where:
            case Where.ENDED:
                return sighting.end
            case Where.QUEUED | Where.RUNNING:
                self._alive(sighting)
            case Where.GONE:
                return self._missing(sighting)
            case Where.SILENT:
                self._gone_looks = 0
            case Where.CUT:
                self._gone_looks, self._cut = 0, True
            case Where.REFUSED:
                self._gone_looks, self._cut = 0, True
                return self._refused(now)
        return None

    def _refused(self, now: float) -> JobEnd | None:
        if self._refused_since is None:
            self._refused_since = now
        return JobEnd.LOST if now - self._refused_since >= self._patience else None

    def _alive(self, sighting: Sighting) -> None:
        self._last_seen = sighting.where
        self._gone_looks, self._cut, self._same_server = 0, False, False
        self._keeps_connections = self._keeps_connections or not sighting.connections.isdisjoint(self._known)
        self._known.extend((sighting.connections | sighting.others).difference(self._known))

    def _missing(self, sighting: Sighting) -> JobEnd | None:
        self._gone_looks += 1
        self._same_server = self._same_server or not sighting.connections.isdisjoint(self._known)
        if self._gone_looks < AGREEING_LOOKS:
            return None
        restarted = self._cut or (self._keeps_connections and not self._same_server)
        if self._last_seen is None or restarted:
            return JobEnd.LOST
        if self._last_seen is Where.QUEUED:
            return JobEnd.DELETED
        unsure = bool(self._known) and not self._same_server  # it tells connections apart, and this is another one
        return JobEnd.LOST if unsure else JobEnd.CLEARED


class _Status(msgspec.Struct):
    status_str: str | None = None
    completed: bool | None = None
    messages: list[list[msgspec.Raw]] | None = None


class HistoryEntry(msgspec.Struct):
    """The part of `/history/<id>` that says how it ended. Old versions have no `status`."""

    status: _Status | None = None


def end_of(entry: HistoryEntry) -> JobEnd | None:
    """None: the entry says neither; the turnstile document keeps asking then."""
    status = entry.status
    if status is None:
        return JobEnd.SUCCESS
    if status.status_str == "error":
        return JobEnd.INTERRUPTED if _was_interrupted(status) else JobEnd.ERROR
    return JobEnd.SUCCESS if status.completed or status.status_str == "success" else None


def _was_interrupted(status: _Status) -> bool:
    return any(message and bytes(message[0]) == b'"execution_interrupted"' for message in status.messages or ())
