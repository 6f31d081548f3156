"""An engine with slots that is a few lines of memory and writes real files, and a keeper for it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_turnstile.contexts.book import Book, Rules
from gpu_turnstile.contexts.keeper import Keeper
from gpu_turnstile.contexts.store import Shelf, Store
from gpu_turnstile.engines.base import Moved, Prefill, Slot
from tests.aio import until


@dataclass
class FakeSlots:
    """`held`: slot -> tokens. `deals`: what happens to the next calls, by name, instead of what should."""

    folder: Path
    held: dict[int, int] = field(default_factory=dict)
    count: int = 2
    name: str = "b1"
    told: Prefill | None = None
    deals: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)

    async def build(self, limit: float) -> str | None:
        return self.name

    async def slots(self, limit: float) -> tuple[Slot, ...] | None:
        await self._deal("slots", limit)
        return tuple(Slot(n, n in self.busy, self.held.get(n, 0)) for n in range(self.count))

    async def save_slot(self, number: int, file: str, limit: float) -> Moved:
        self.asked.append(f"save {number}")
        if (deal := await self._deal("save", limit)) is not None:
            return deal
        content = json.dumps({"tokens": self.held[number]}).encode().ljust(100 + self.held[number])
        (self.folder / file).write_bytes(content)
        return Moved(self.held[number], len(content))

    async def restore_slot(self, number: int, file: str, limit: float) -> Moved:
        self.asked.append(f"restore {number}")
        if (deal := await self._deal("restore", limit)) is not None:
            return deal
        content = (self.folder / file).read_bytes()
        self.held[number] = json.loads(content)["tokens"]
        return Moved(self.held[number], len(content))

    async def prefill(self, limit: float) -> Prefill | None:
        return self.told

    async def _deal(self, what: str, limit: float) -> Any:
        deal = self.deals.get(what)
        if callable(deal):
            return await deal(limit)
        return deal

    def restart(self) -> None:
        self.held, self.asked, self.told = {}, [], None


@dataclass
class Bench:
    book: Book
    engine: FakeSlots
    keeper: Keeper
    told: list[tuple[str, dict[str, Any]]]
    facts: dict[str, str]

    @property
    def shelf(self) -> Shelf:
        return self.book.store.shelf("p")

    @property
    def files(self) -> list[Path]:
        return sorted(self.shelf.folder.glob("ctx-*.bin"))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]

    async def come(self) -> None:
        await self.keeper.starting()
        await self.keeper.ready()

    async def go(self) -> None:
        """Off the card, until everything is sealed."""
        await self.keeper.save()
        self.engine.restart()
        self.keeper.stopped()
        await self.idle()

    async def idle(self) -> None:
        await until(lambda: not self.book._tasks)


@contextlib.asynccontextmanager
async def bench(folder: Path, *, limit: int = 0, max_age: float = 0.0, budget: float = 5.0) -> AsyncIterator[Bench]:
    store = Store(folder / "contexts", limit, max_age)
    store.open_folder()
    told: list[tuple[str, dict[str, Any]]] = []
    book = Book(store, Rules(min_tokens=100, budget=budget), lambda kind, fields: told.append((kind, fields)))
    engine = FakeSlots(store.shelf("p").folder)
    facts = {"model": "m"}
    keeper = Keeper("p", engine, book, lambda: dict(facts))
    try:
        yield Bench(book, engine, keeper, told, facts)
    finally:
        await book.close()
