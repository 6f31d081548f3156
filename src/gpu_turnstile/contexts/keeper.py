"""Carries one engine's conversations over its absence: saved before it is stopped, given back before it serves.

    starting ─ ready ─ … answered … ─ save ─ stopped ─ (checksums) ─ starting ─ …

Whoever swaps calls these in order. None of them raises, each takes no longer than the budget, and whatever goes wrong
costs what there was without it: the prompts are read again. It proves itself: after a restore the engine's own counters
tell what the first answers took from its cache; a preset whose restores are never used stops trying.

Invariant: an engine is only offered a file that was read to its end a moment ago and has the checksum, size and
fingerprint it was saved with: a truncated one would abort it, a foreign one would make it talk nonsense.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from gpu_turnstile.contexts.book import Book
from gpu_turnstile.contexts.fingerprint import Traits, differing
from gpu_turnstile.contexts.seal import Written, seal, whole_files
from gpu_turnstile.contexts.store import Entry, Shelf
from gpu_turnstile.contexts.trial import ENOUGH, Trial
from gpu_turnstile.engines.base import Moved, Slot, Slotted

log = structlog.get_logger("contexts")

LOOK = 2.0  # seconds for the first question to an engine that is to leave: one that hangs shall not take the budget


class Keeper:
    """`facts`: what the command line and the files on disk say about the engine; it is called in a thread."""

    def __init__(self, tenant: str, engine: Slotted, book: Book, facts: Callable[[], Traits]) -> None:
        self.tenant = tenant
        self.refill_s = 0.0  # seconds that reading again costs what the last absence lost; 0 = nothing, or unknown
        self._engine = engine
        self._book = book
        self._facts = facts
        self._known: Traits = {}
        self._serving: Traits | None = None  # what is known of the engine that serves; None = it is not to be saved
        self._fingerprint: Traits | None = None  # that, with the engine's own word, once it was asked
        self._checking: asyncio.Task[None] | None = None
        self._sealing: asyncio.Task[None] | None = None
        self._whole: set[str] = set()  # files that were just read and have their checksum
        self._loaded: dict[int, Entry] = {}  # slot -> what was restored into it
        self._written: list[Written] = []
        self._written_by: Traits = {}  # the engine that wrote them
        self._broke = False  # the connection, over a restore
        self._count = 0  # slots the engine has
        self._save_s = 0.0
        self._trial = Trial(tenant, engine, book)

    @property
    def _shelf(self) -> Shelf:
        return self._book.store.shelf(self.tenant)

    # --------------------------------------------------------------------------------------------- coming

    async def starting(self) -> None:
        """The engine is about to be started: what it will be like is read now, before its files can change."""
        self._serving, self._fingerprint, self._loaded = None, None, {}
        self._trial.end()
        try:
            self._known = await asyncio.to_thread(self._facts)
        except OSError as error:
            self._book.fail(self.tenant, "save", f"its files cannot be looked at: {error.strerror or error}")
            self._known = {}
        self._shelf.index.running = self._known or None
        self._shelf.save()
        self._checking = self._book.begin(self._check())

    def resuming(self) -> None:
        """An earlier gate has started it, and it still loads: what that gate wrote down about it holds."""
        self._known = self._shelf.index.running or {}
        self._checking = self._book.begin(self._check())

    async def _check(self) -> None:
        """Read every file that may be offered, while the engine loads."""
        if self._sealing is not None:
            await asyncio.wait([self._sealing])
        self._whole.clear()
        self._book.store.tidy(self._book.wall())
        self._whole = await whole_files(self._shelf, self._book)

    async def adopted(self) -> None:
        """An earlier gate started it: what that gate wrote down about it holds."""
        self._serving = self._shelf.index.running
        if self._serving is None:
            self._book.fail(self.tenant, "save", "nothing is known of how the engine was started; it is not saved")

    async def ready(self, *, restore: bool = True) -> bool:
        """It answers: give it back what it held. Nobody has sent it a request yet.

        False: the connection broke over it, and the engine must be taken for dead, even if its end is not seen yet.
        """
        began = time.monotonic()
        self._loaded, self._broke = {}, False
        try:
            async with asyncio.timeout(self._book.rules.budget):
                await self._ready(restore, began + self._book.rules.budget)
        except TimeoutError:
            self._book.fail(self.tenant, "restore_late", "giving back what was saved took longer than allowed")
        except Exception:
            log.exception("a restore failed in a way nobody expected", tenant=self.tenant)
            self._book.counts.failures["restore"] += 1
        self._account(began)
        return not self._broke

    async def _ready(self, restore: bool, deadline: float) -> None:
        if not self._known:
            return
        self._serving = self._known
        if not restore:
            return
        if self._checking is not None:
            await asyncio.wait([self._checking])
        if not self._shelf.index.entries:
            return
        fingerprint = await self._identify(deadline)
        fitting = self._fitting(fingerprint) if fingerprint is not None else []
        if fitting:
            await self._restore(fitting, deadline)

    async def _identify(self, deadline: float) -> Traits | None:
        """The fingerprint of the engine that serves. It is asked only when there is something to save or restore."""
        if self._fingerprint is None and self._serving is not None:
            build = await self._engine.build(_left(deadline))
            if build is None:
                self._book.fail(self.tenant, "save", "the engine does not say what it is; it is not saved")
                return None
            self._fingerprint = {**self._serving, "engine": build}
        return self._fingerprint

    def _fitting(self, now: Traits) -> list[Entry]:
        """The whole files of an engine like this one, newest and largest first; those of another are removed."""
        entries = [entry for entry in self._shelf.index.entries if entry.file in self._whole]
        stale = {entry.file: differing(entry.fingerprint, now) for entry in entries}
        changed = sorted({name for names in stale.values() for name in names})
        if changed:
            self._shelf.discard(file for file, names in stale.items() if names)
            self._book.fail(self.tenant, "stale", f"what was saved is not for this engine: other {', '.join(changed)}")
        fitting = [entry for entry in entries if not stale[entry.file]]
        return sorted(fitting, key=lambda entry: (-entry.at, -entry.tokens))

    async def _restore(self, entries: list[Entry], deadline: float) -> None:
        slots = await self._engine.slots(_left(deadline))
        self._count = len(slots or ())
        for slot, entry in zip(slots or (), entries, strict=False):
            moved = await self._engine.restore_slot(slot.number, entry.file, _left(deadline))
            if not moved.problem and moved.tokens == entry.tokens and moved.size == entry.size:
                self._loaded[slot.number] = entry
                continue
            self._book.fail(self.tenant, "restore_late" if moved.late else "restore", _said(moved, entry.tokens))
            if not moved.late:  # late is no fault of the file
                self._shelf.discard([entry.file])
            if moved.lost:
                self._broke, self._loaded = True, {}
            if moved.late or moved.lost or moved.unable:
                break

    def _account(self, began: float) -> None:
        """What came back, what did not, and what that costs."""
        seconds = time.monotonic() - began
        tokens = sum(entry.tokens for entry in self._loaded.values())
        lost = max(0, self._book.held.pop(self.tenant, 0) - tokens)
        speed = self._trial.speed
        self.refill_s = lost / speed if speed else 0.0
        if not self._loaded:
            return
        counts = self._book.counts
        counts.restored += len(self._loaded)
        counts.tokens_restored += tokens
        fields = {"slots": len(self._loaded), "tokens": tokens, "lost": lost, "seconds": round(seconds, 3)}
        self._book.tell("context_restored", {"tenant": self.tenant, **fields})
        restored = tuple(entry.tokens for entry in self._loaded.values())
        self._trial.begin(restored, seconds + self._save_s, self._fingerprint or {})

    # ---------------------------------------------------------------------------------------------- going

    async def save(self) -> None:
        """It is about to be stopped, and lives: have it write down what it holds."""
        began = time.monotonic()
        if self._serving is None:
            return
        try:
            async with asyncio.timeout(self._book.rules.budget):
                await self._save(began + self._book.rules.budget)
        except TimeoutError:
            self._book.fail(self.tenant, "save_late", "saving what it holds took longer than allowed")
        except Exception:
            log.exception("a save failed in a way nobody expected", tenant=self.tenant)
            self._book.counts.failures["save"] += 1
        self._save_s = time.monotonic() - began
        if self._written:
            self._written_by = self._fingerprint or {}
            tokens, size = sum(w.tokens for w in self._written), sum(w.size for w in self._written)
            fields = {"slots": len(self._written), "tokens": tokens, "bytes": size, "seconds": round(self._save_s, 3)}
            self._book.tell("context_saved", {"tenant": self.tenant, **fields})

    async def _save(self, deadline: float) -> None:
        slots = await self._engine.slots(min(LOOK, _left(deadline)))
        if slots is None:
            self._book.fail(self.tenant, "save", "the engine does not tell what its slots hold")
            return
        self._count = len(slots)
        held = sum(slot.tokens or 0 for slot in slots)
        self._book.held[self.tenant] = held + self._untouched(slots)
        if self._trial.is_open or held >= ENOUGH:
            self._trial.learn(await self._engine.prefill(_left(deadline)))
        worth = [slot for slot in slots if slot.tokens is None or slot.tokens >= self._book.rules.min_tokens]
        fingerprint = await self._identify(deadline) if worth else None
        if fingerprint is None or self._trial.is_useless(fingerprint):
            return
        for slot in sorted(worth, key=lambda slot: (slot.busy, -(slot.tokens or 0))):
            if not await self._save_one(slot, deadline):
                break

    def _untouched(self, slots: tuple[Slot, ...]) -> int:
        """Tokens restored into slots that nobody has used since: these do not tell them, and the files are good."""
        idle = {slot.number for slot in slots if not slot.tokens}
        return sum(entry.tokens for number, entry in self._loaded.items() if number in idle)

    async def _save_one(self, slot: Slot, deadline: float) -> bool:
        """Whether the next one may be tried."""
        store = self._book.store
        expected = self._expected(slot)
        if (store.limit and expected > store.limit) or not store.has_room(expected):
            self._book.fail(self.tenant, "save", "there is no room (LLMC_CONTEXT_LIMIT_GB, or the disk)")
            return True
        store.tidy(self._book.wall(), expected)
        try:
            file = self._shelf.new_file()
        except OSError as error:
            self._book.fail(self.tenant, "save", f"no file can be made: {error.strerror or error}")
            return False
        moved = await self._engine.save_slot(slot.number, file, _left(deadline))
        if not moved.problem and moved.tokens > 0:
            self._written.append(Written(slot.number, file, moved.tokens, moved.size, self._before(slot)))
        elif moved.problem:
            kind = "save_late" if moved.late else "save"
            self._book.fail(self.tenant, kind, f"a slot was not saved: {moved.problem}")
        return not (moved.late or moved.lost or moved.unable)

    def _before(self, slot: Slot) -> str | None:
        """The file that was restored into the slot."""
        entry = self._loaded.get(slot.number)
        return None if entry is None else entry.file

    def _expected(self, slot: Slot) -> int:
        """Bytes its file will have, by those before it; 0 = not known."""
        last = max(self._shelf.index.entries, key=lambda entry: entry.at, default=None)
        return int((slot.tokens or 0) * last.size / last.tokens) if last is not None and last.tokens else 0

    def stopped(self) -> None:
        """The engine is gone and writes no more: read what it wrote, beside whatever comes next; remove the rest."""
        self._serving = self._fingerprint = None
        self._trial.end()
        if self._shelf.index.running is not None:
            self._shelf.index.running = None
            self._shelf.save()
        written, self._written = self._written, []
        self._shelf.sweep(one.file for one in written)
        if written:
            work = seal(self._shelf, self._book, written, self._written_by, self._count)
            self._sealing = self._book.begin(work)


def _left(deadline: float) -> float:
    """Seconds; a call gets a little even at the end, so that it fails as late and not as wrong."""
    return max(0.05, deadline - time.monotonic())


def _said(moved: Moved, expected: int) -> str:
    if moved.problem:
        return f"what was saved could not be given back: {moved.problem}"
    return f"{moved.tokens} tokens came back of {expected} that were saved"
