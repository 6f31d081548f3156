"""Did a restore do anything? Judged from the engine's own counters after the first answers: pure.

An engine may restore a file and then read the whole prompt again (sliding windows, hybrids, recurrent models in some
builds): its word that n tokens are back proves nothing. What it took from its cache does, and the first answer since
its start shows that exactly. A prompt that is not a continuation proves nothing either way: only one at least as long
as the longest restored conversation is held against a restore that gave nothing.
"""

from __future__ import annotations

from gpu_turnstile.engines.base import Prefill

HIT = 0.5  # of the shortest restored conversation: more than this from the cache is no coincidence
MISS = 0.1  # of the prompt: less than this is a shared system prompt at best
AS_LONG = 0.9  # of the longest restored conversation
MISSES = 3  # running, before a preset stops trying


class Proof:
    """One restore: `restored` tokens in all, `cost` seconds it took to save and restore them."""

    def __init__(self, tokens: tuple[int, ...], cost: float) -> None:
        self.restored = sum(tokens)
        self.cost = cost
        self.reused: int | None = None  # tokens, as far as it is known
        self._tokens = tokens
        self._answers = 0
        self._judged = False

    @property
    def is_last(self) -> bool:
        """As many answers have been given as conversations were restored: there is nothing more to wait for."""
        return self._judged and self._answers >= len(self._tokens)

    def wants_a_look(self) -> bool:
        """An answer has ended; whether the counters are worth reading now."""
        self._answers += 1
        return not self._judged or self._answers == len(self._tokens)

    def see(self, told: Prefill | None) -> bool | None:
        """Whether the restore was of use, from the first look that shows work; None = that is not to be seen."""
        if told is None or told.cached is None:
            self._judged = True
            return None
        self.reused = min(told.cached, self.restored)
        prompt = told.tokens + told.cached
        if self._judged or prompt == 0:
            return None
        self._judged = True
        if told.cached >= HIT * min(self._tokens):
            return True
        if prompt >= AS_LONG * max(self._tokens) and told.cached < MISS * prompt:
            return False
        return None

    @staticmethod
    def is_useless(misses: int) -> bool:
        return misses >= MISSES
