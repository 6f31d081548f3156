"""One answer being made: words at a rate, after a prompt was read at a rate. A word is a token.

It knows no dialect: `dialects.py` and `ollama.py` put the words on the wire. Invariant: the engine's slot is
held from before the first word until the answer ends, however it ends.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpu_turnstile.sim.base import Cut, Sim, pause, until
from gpu_turnstile.sim.card import SimCard
from gpu_turnstile.sim.faults import TokenFaults

T = TypeVar("T", bound=TokenFaults)

_SAID = (
    "one card is enough for many if they take turns and somebody at the gate remembers whose turn it is "
    "so the painter waits while the writer ends the line and then the light goes round again"
)
_WORDS = _SAID.split()


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens per second; 0 = at once. `answer_tokens`: how long an answer is that nobody limits."""

    tokens_per_s: float = 200.0
    prompt_tokens_per_s: float = 0.0
    answer_tokens: int = 16


@dataclass(slots=True)
class Generation:
    """`limit`: the tokens asked for, made exactly; None = the engine's own length. Times in seconds."""

    sim: TokenSim[Any]
    model: str
    prompt: list[str]
    limit: int | None
    slot: Callable[[Generation], AbstractAsyncContextManager[None]]
    cached: int = 0  # words of the prompt that did not have to be read again
    made: int = 0
    text: str = ""
    load_s: float = 0.0
    prompt_s: float = 0.0
    made_s: float = 0.0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.perf_counter)

    @property
    def finish(self) -> str:
        return "stop" if self.limit is None else "length"

    async def words(self) -> AsyncGenerator[str, None]:
        asked = time.perf_counter()
        async with self.slot(self):
            start = time.perf_counter()
            self.load_s = start - asked
            await self._read_prompt()
            begin = time.perf_counter()
            self.prompt_s = begin - start
            pace = self.sim.pace
            count = pace.answer_tokens if self.limit is None else self.limit
            for word in itertools.islice(itertools.cycle(_WORDS), count):
                await self.sim.before_token(self.made)
                self.made += 1
                if pace.tokens_per_s > 0:
                    await pause(begin + self.made / pace.tokens_per_s - time.perf_counter())
                piece = word if self.made == 1 else " " + word
                self.text += piece
                self.made_s = time.perf_counter() - begin
                self.sim.counters["tokens"] += 1
                yield piece
            await self.sim.before_token(self.made)

    async def finished(self) -> Generation:
        """Make the whole answer."""
        async with aclosing(self.words()) as words:
            async for _ in words:
                pass
        return self

    async def _read_prompt(self) -> None:
        rate = self.sim.pace.prompt_tokens_per_s
        if rate > 0:
            await pause((len(self.prompt) - self.cached) / rate)


class TokenSim(Sim[T]):
    """An engine that answers with tokens."""

    def __init__(self, name: str, card: SimCard | None, faults: T, pace: Pace) -> None:
        self.pace = pace
        super().__init__(name, card, faults)

    async def before_token(self, made: int) -> None:
        """Where the faults of a stream strike: `made` tokens are out."""
        faults = self.faults
        if 0 < faults.cut_after <= made:
            raise Cut
        if 0 < faults.stall_after <= made:
            await until(lambda: not 0 < self.faults.stall_after <= made)


def prompt_words(body: dict[str, Any]) -> list[str]:
    """The prompt's tokens, whatever the dialect calls it."""
    texts = [_text(body.get("system")), _text(body.get("instructions"))]
    messages = _messages(body)
    texts += [f"{m.get('role', 'user')}: {_text(m.get('content'))}" for m in messages]
    texts += ["assistant:"] if messages else []
    texts += [_text(body.get(key)) for key in ("prompt", "content")]
    if isinstance(body.get("input"), str):
        texts.append(body["input"])
    return " ".join(texts).split()


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    found = body.get("messages") or body.get("input") or []
    return [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return " ".join(_text(part.get("text") if isinstance(part, dict) else part) for part in content)
    return ""
