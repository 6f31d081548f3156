"""llama.cpp's slots as files: what each holds, saving one, restoring one, and what reading prompts has cost.

What is known of them (measured on b11434 and b11549): the status says little. Saving an empty slot is a 200, so is
restoring one, so the number of tokens is what counts. A save or restore of a slot that works waits until it is done, so
each has a limit. A truncated file does not fail, it aborts the whole server: whoever restores must know that the file
is whole. With a projector loaded, and without `--slot-save-path`, the answer is 501, for good.
"""

from __future__ import annotations

import re

import msgspec

from gpu_turnstile.engines.base import Moved, Prefill, Slot
from gpu_turnstile.engines.http import Failure, Reply
from gpu_turnstile.engines.keyed import KeyedEngine

_COUNTER = re.compile(
    rb"^llamacpp:prompt_(tokens_total|seconds_total|tokens_cached_total)[ \t]+([0-9.eE+-]{1,30})[ \t\r]*$", re.M
)
NEVER = frozenset({404, 405, 501})


class _Slot(msgspec.Struct):
    id: int
    is_processing: bool = False
    n_prompt_tokens: int | None = None
    id_task: int | None = None


class _Done(msgspec.Struct):
    n_saved: int = 0
    n_written: int = 0
    n_restored: int = 0
    n_read: int = 0


class _Props(msgspec.Struct):
    build_info: str = ""
    is_sleeping: bool = False


class _Meta(msgspec.Struct):
    n_vocab: int = 0
    n_embd: int = 0
    n_params: int = 0
    size: int = 0


class _Model(msgspec.Struct):
    meta: _Meta | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class LlamaSlots(KeyedEngine):
    async def build(self, limit: float) -> str | None:
        props = (await self.get("/props", limit)).read(_Props)
        models = (await self.get("/v1/models", limit)).read(_Models)
        meta = models.data[0].meta if models is not None and models.data else None
        if props is None or meta is None:
            return None
        return f"{props.build_info} {meta.size}/{meta.n_params}/{meta.n_embd}/{meta.n_vocab}"

    async def slots(self, limit: float) -> tuple[Slot, ...] | None:
        listed = (await self.get("/slots", limit)).read(list[_Slot])
        return None if listed is None else tuple(Slot(s.id, s.is_processing, _tokens(s)) for s in listed)

    async def save_slot(self, number: int, file: str, limit: float) -> Moved:
        reply = await self.post(f"/slots/{number}?action=save", {"filename": file}, limit)
        done = reply.read(_Done)
        return _failed(reply) if done is None else Moved(done.n_saved, done.n_written)

    async def restore_slot(self, number: int, file: str, limit: float) -> Moved:
        reply = await self.post(f"/slots/{number}?action=restore", {"filename": file}, limit)
        done = reply.read(_Done)
        return _failed(reply) if done is None else Moved(done.n_restored, done.n_read)

    async def prefill(self, limit: float) -> Prefill | None:
        reply = await self.get("/metrics", limit)
        found = dict(_COUNTER.findall(reply.body)) if reply.ok else {}
        try:
            tokens, seconds = float(found[b"tokens_total"]), float(found[b"seconds_total"])
            cached = found.get(b"tokens_cached_total")
            return Prefill(int(tokens), seconds, None if cached is None else int(float(cached)))
        except (KeyError, ValueError, OverflowError):
            return None


def _tokens(slot: _Slot) -> int | None:
    """A slot that has never worked does not name the number."""
    if slot.n_prompt_tokens is None and slot.id_task is None:
        return 0
    return slot.n_prompt_tokens


def _failed(reply: Reply) -> Moved:
    late = reply.failure is Failure.TIMEOUT
    lost = reply.failure in (Failure.BROKEN, Failure.UNREACHABLE)
    return Moved(problem=reply.reason, late=late, lost=lost, unable=reply.status in NEVER)
