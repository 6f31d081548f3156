"""What is known of all saved conversations together: the counts people see, the rules, and who is awaited.

A `Book` is made once, a `Keeper` for every engine that can save. Nothing here touches the network; what goes wrong
is counted and told, and never raised to whoever swaps.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from gpu_turnstile.contexts.store import Shelf, Store

log = structlog.get_logger("contexts")

FAILURES = ("save", "save_late", "restore", "restore_late", "corrupt", "stale")  # the kinds of what goes wrong
CLOSE_LIMIT = 60.0  # seconds the end of the gate waits for checksums; what has none then is swept at the next start


@dataclass(frozen=True, slots=True)
class Rules:
    """`min_tokens`: less is read again faster than it is worth; `budget`: seconds a save or a restore may take."""

    min_tokens: int = 1024
    budget: float = 10.0


@dataclass(slots=True)
class Counts:
    """Since the gate started. `saved`, `restored`: slots; `seconds_saved`: of reading prompts, less what it cost."""

    saved: int = 0
    restored: int = 0
    tokens_saved: int = 0
    tokens_restored: int = 0
    tokens_reused: int = 0
    seconds_saved: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Book:
    """`tell(kind, fields)` is how people hear of it. `awaited`: tenants whose next answers prove their restore."""

    store: Store
    rules: Rules
    tell: Callable[[str, dict[str, Any]], None]
    wall: Callable[[], float] = time.time
    counts: Counts = field(default_factory=Counts)
    awaited: dict[str, Callable[[], None]] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)  # tokens a tenant's engine held when it was evicted
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _said: set[tuple[str, str]] = field(default_factory=set)

    def answered(self, tenant: str) -> None:
        """A request of the tenant has had its answer. Called for every one: it costs a look into a small table."""
        hear = self.awaited.get(tenant)
        if hear is not None:
            hear()

    def fail(self, tenant: str, kind: str, reason: str, **fields: Any) -> None:
        """Count what went wrong and say it, the same thing of the same tenant once."""
        self.counts.failures[kind] += 1
        if (tenant, reason) not in self._said:
            if len(self._said) > 1000:
                self._said.clear()
            self._said.add((tenant, reason))
            self.tell("context_lost", {"tenant": tenant, "what": kind, "reason": reason, **fields})

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it beside everything else; its errors are logged."""
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait for the checksums that are under way, then let the folder go."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSE_LIMIT)
        for task in set(self._tasks):
            task.cancel()
        self.store.close()

    def saved(self) -> list[dict[str, Any]]:
        """What is saved, a row for each preset: the fields of `GET /v1/contexts`."""
        return [self._row(shelf) for shelf in self.store.shelves if shelf.index.entries or shelf.index.useless]

    def _row(self, shelf: Shelf) -> dict[str, Any]:
        entries = shelf.index.entries
        newest = max((entry.at for entry in entries), default=None)
        return {
            "preset": shelf.name,
            "files": len(entries),
            "bytes": shelf.size,
            "tokens": sum(entry.tokens for entry in entries),
            "age_s": None if newest is None else round(max(0.0, self.wall() - newest), 1),
            "useless": shelf.index.useless,
        }


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("something about saved conversations failed that should not; requests are not affected")
