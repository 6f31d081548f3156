"""The slots of the simulated llama-server: who is processed, who waits, what each remembers.

A slot keeps the words of its last conversation; a prompt that begins with them is not read again. Saving and
restoring work as recorded from the real server, its traps included: a saved file may be empty, a failed restore
wipes the slot, and a truncated file kills the server. Invariant: a slot serves one request at a time, and
save, restore and erase wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_turnstile.sim.generation import Generation

_MAGIC = "SIMSLOT"


class BadSlotFile(Exception):
    """The file is missing or is not a slot file."""


class TruncatedSlotFile(Exception):
    """Shorter than it says: the real server aborts on this."""


@dataclass(slots=True)
class Slot:
    id: int
    n_ctx: int
    words: list[str] = field(default_factory=list)
    gen: Generation | None = None
    task: int = -1  # -1 = never used
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def shared_with(self, prompt: list[str]) -> int:
        pairs = zip(self.words, prompt, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def as_json(self) -> dict[str, Any]:
        busy = self.gen is not None
        shown: dict[str, Any] = {
            "id": self.id,
            "n_ctx": self.n_ctx,
            "speculative": False,
            "is_processing": busy,
        }
        if self.task < 0:
            return shown
        gen = self.gen
        read = len(gen.prompt) if gen is not None else 0
        limit = gen.limit if gen is not None and gen.limit is not None else -1
        made = gen.made if gen is not None else 0
        return {
            **shown,
            "id_task": self.task,
            "n_prompt_tokens": read if gen is not None else len(self.words),
            "n_prompt_tokens_processed": read - gen.cached if gen is not None else 0,
            "n_prompt_tokens_cache": gen.cached if gen is not None else 0,
            "params": {"max_tokens": limit, "n_predict": limit},
            "next_token": [
                {
                    "has_next_token": busy,
                    "has_new_line": False,
                    "n_remain": limit - made if limit >= 0 else -1,
                    "n_decoded": made,
                }
            ],
        }


class Slots:
    """`count` slots of `n_ctx` tokens each; a request beyond them waits for the first that is free."""

    def __init__(self, count: int, n_ctx: int) -> None:
        self.all = [Slot(number, n_ctx) for number in range(count)]
        self._tasks = itertools.count()
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def take(self, gen: Generation) -> AsyncIterator[None]:
        slot = await self._best(gen)
        async with slot.lock:
            slot.gen, slot.task = gen, next(self._tasks)
            gen.cached = max(0, min(slot.shared_with(gen.prompt), len(gen.prompt) - 1))
            try:
                yield
            finally:
                slot.gen = None
                slot.words = gen.prompt + gen.text.split()
                self._wake()

    def of(self, number: int) -> Slot:
        """Ids wrap around, as the real server's do."""
        return self.all[number % len(self.all)]

    async def _best(self, gen: Generation) -> Slot:
        while not (free := [slot for slot in self.all if not slot.lock.locked()]):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
        return max(free, key=lambda slot: (slot.shared_with(gen.prompt), -slot.id))

    def _wake(self) -> None:
        """A slot is about to be free: everybody who waits looks again, first come first."""
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)

    # ------------------------------------------------------------------------------------ files

    async def save(self, number: int, path: Path) -> tuple[int, int]:
        """(tokens, bytes written)."""
        slot = self.of(number)
        async with slot.lock:
            return len(slot.words), _write(path, slot.words)

    async def restore(self, number: int, path: Path) -> tuple[int, int]:
        """(tokens, bytes read). Raises BadSlotFile (the slot is then empty) or TruncatedSlotFile."""
        slot = self.of(number)
        async with slot.lock:
            slot.words = []
            slot.words, size = _read(path)
            slot.task = max(slot.task, 0)
            return len(slot.words), size

    async def erase(self, number: int) -> int:
        """The tokens forgotten."""
        slot = self.of(number)
        async with slot.lock:
            count, slot.words = len(slot.words), []
            return count


def _write(path: Path, words: list[str]) -> int:
    text = json.dumps(words)
    content = f"{_MAGIC} {len(text)}\n{text}"
    path.write_text(content)
    return len(content)


def _read(path: Path) -> tuple[list[str], int]:
    content = path.read_text() if path.is_file() else ""
    head, _, text = content.partition("\n")
    magic, _, size = head.partition(" ")
    if magic != _MAGIC or not size.isdigit():
        raise BadSlotFile
    if len(text) < int(size):
        raise TruncatedSlotFile
    return json.loads(text), len(content)
