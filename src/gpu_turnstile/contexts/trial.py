"""What a preset's restores have been worth: the open proof, the verdicts so far, and the speed they are reckoned with.

The verdicts and the speed are kept in the preset's index, so that a restart of the gate does not forget that a model
gains nothing. Invariant: a preset is given up for one fingerprint only; with another it has a new chance.
"""

from __future__ import annotations

from gpu_turnstile.contexts.book import Book
from gpu_turnstile.contexts.fingerprint import Traits
from gpu_turnstile.contexts.proof import Proof
from gpu_turnstile.contexts.store import Index, Shelf
from gpu_turnstile.engines.base import Prefill, Slotted

ENOUGH = 256  # tokens read in one run that say something about the speed of reading


class Trial:
    def __init__(self, tenant: str, engine: Slotted, book: Book) -> None:
        self._tenant = tenant
        self._engine = engine
        self._book = book
        self._proof: Proof | None = None
        self._fingerprint: Traits = {}

    @property
    def _shelf(self) -> Shelf:
        return self._book.store.shelf(self._tenant)

    @property
    def _index(self) -> Index:
        return self._shelf.index

    @property
    def is_open(self) -> bool:
        """A restore waits for its proof."""
        return self._proof is not None

    @property
    def speed(self) -> float:
        """Prompt tokens a second, as measured by the engine; 0 = not known."""
        index = self._index
        return index.prefill_tokens / index.prefill_seconds if index.prefill_seconds > 0 else 0.0

    def begin(self, tokens: tuple[int, ...], cost: float, fingerprint: Traits) -> None:
        """Conversations of so many tokens were restored; it took `cost` seconds to save and restore them."""
        self._proof, self._fingerprint = Proof(tokens, cost), fingerprint
        self._book.awaited[self._tenant] = self._answered

    def end(self) -> None:
        """There will be no more answers, and nobody to ask."""
        self._proof = None
        self._book.awaited.pop(self._tenant, None)

    def is_useless(self, fingerprint: Traits) -> bool:
        index = self._index
        if index.useless is not None and index.useless_for != fingerprint:
            index.useless, index.useless_for, index.misses = None, None, 0
        return index.useless is not None

    def learn(self, told: Prefill | None) -> None:
        """The counters of an engine that is about to leave: its last word on the restore, and how fast it reads."""
        self._judge(told, over=True)
        if told is not None and told.tokens >= ENOUGH:
            index = self._index
            index.prefill_tokens = index.prefill_tokens / 2 + told.tokens
            index.prefill_seconds = index.prefill_seconds / 2 + told.seconds
            self._shelf.save()

    def _answered(self) -> None:
        if self._proof is not None and self._proof.wants_a_look():
            self._book.begin(self._look())

    async def _look(self) -> None:
        self._judge(await self._engine.prefill(self._book.rules.budget), over=False)

    def _judge(self, told: Prefill | None, *, over: bool) -> None:
        """What the engine's counters say about the answers since the restore; `over`: there will be no more."""
        proof = self._proof
        if proof is None:
            return
        verdict = proof.see(told)
        if verdict is not None:
            self._index.misses = 0 if verdict else self._index.misses + 1
            if proof.is_useless(self._index.misses):
                self._give_up()
            self._shelf.save()
        if over or proof.is_last:
            self.end()
            if proof.reused is not None:
                self._report(proof, proof.reused)

    def _report(self, proof: Proof, reused: int) -> None:
        counts, speed = self._book.counts, self.speed
        saved = reused / speed - proof.cost if speed else 0.0
        counts.tokens_reused += reused
        counts.seconds_saved += saved
        fields = {"tokens": reused, "of": proof.restored, "seconds_saved": round(saved, 2) if speed else None}
        self._book.tell("context_reused", {"tenant": self._tenant, **fields})

    def _give_up(self) -> None:
        index = self._index
        index.useless = f"after {index.misses} restores running its answers used nothing of them"
        index.useless_for = self._fingerprint
        self._shelf.discard([entry.file for entry in index.entries])
        why = f"{index.useless}; nothing is saved until the preset changes, or: turnstile context drop {self._tenant}"
        self._book.tell("context_useless", {"tenant": self._tenant, "reason": why})
