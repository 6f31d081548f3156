"""TabbyAPI: one language model and one embedding model, each asked for and unloaded by a path of its own.

Its unload cancels running jobs at once, and it does not tell whether there are any: a release belongs after the drain,
and what somebody sent past the gate is cut. Where it does not load on demand (`inline_model_loading`), `admit` loads
`model`, else the one that the last release took off. The key must be the admin key.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, TypeVar

import msgspec

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health, Loaded, Probe, Release
from gpu_turnstile.engines.http import Reply, probe_of
from gpu_turnstile.engines.keyed import KeyedEngine
from gpu_turnstile.engines.polling import Look, Told, Wait, deadline_of, told, until_empty

T = TypeVar("T")

MODEL = "/v1/model"
EMBEDDING = "/v1/model/embedding"
EMBEDDING_MARK = "embedding model "
NOTHING_LOADED = "models are currently loaded"  # "No [embedding] models …", with 503 (400 in old versions)


class _Card(msgspec.Struct):
    id: str


class _Issue(msgspec.Struct):
    description: str = ""


class _Health(msgspec.Struct):
    status: str
    issues: list[_Issue] = []


class _Refusal(msgspec.Struct):
    detail: str


class TabbyAPI(KeyedEngine):
    kind: ClassVar[str] = "tabbyapi"
    mode: ClassVar[Mode] = Mode.LLM
    model: str | None = None  # what `admit` loads; None = what was unloaded last

    def headers(self) -> dict[str, str]:
        return {"x-api-key": self.api_key, "x-admin-key": self.api_key} if self.api_key else {}

    async def probe(self) -> Probe:
        reply = await self.get("/health")
        if reply.status == 503 and (unwell := _decode(reply, _Health)) is not None:
            issues = "; ".join(issue.description for issue in unwell.issues if issue.description)
            return Probe(Health.BROKEN, issues or "it says that it is unhealthy")
        if reply.ok and reply.read(_Health) is None:
            return Probe(Health.BROKEN, "/health did not answer as this server does")
        return probe_of(reply)

    async def loaded(self) -> tuple[Loaded, ...] | None:
        held = (await self._look(self.timing.call_timeout)).held
        return None if held is None else tuple(Loaded(name) for name in held)

    async def busy(self) -> bool | None:
        """Nothing loaded is nothing to do; whether a loaded model works, it does not say."""
        loaded = await self.loaded()
        return None if loaded is None or loaded else False

    async def release(self) -> Release:
        deadline = deadline_of(self.timing)
        return await until_empty(Wait(MODEL), self._look, self._unload, self.timing, deadline)

    async def admit(self) -> Probe:
        look = await self._look(self.timing.call_timeout)
        if look.held is None:
            return probe_of(look.reply)
        if any(not name.startswith(EMBEDDING_MARK) for name in look.held):
            return Probe(Health.READY)
        if self.model is None:
            return Probe(Health.READY, "no model is loaded, and it is not known which to load: requests decide")
        body = {"model_name": self.model, "name": self.model}  # old versions know `name`
        reply = await self.post(f"{MODEL}/load", body, self.timing.warm_timeout)
        if not reply.ok:
            return probe_of(reply)
        after = await self._look(self.timing.call_timeout)
        return Probe(Health.READY) if after.held else Probe(Health.BROKEN, f"it did not load {self.model}")

    async def _look(self, limit: float) -> Look:
        text, embedding = await asyncio.gather(self.get(MODEL, limit), self.get(EMBEDDING, limit))
        names = _names(text)
        more = () if embedding.status == 404 else _names(embedding)  # 404: a version without embeddings
        if names is None or more is None:
            return Look(text if names is None else embedding, None)
        return Look(text, names + tuple(EMBEDDING_MARK + name for name in more))

    async def _unload(self, name: str, limit: float) -> Told:
        if name.startswith(EMBEDDING_MARK):
            return _told(await self.post(f"{EMBEDDING}/unload", {}, limit))
        self.model = self.model or name
        return _told(await self.post(f"{MODEL}/unload", {}, limit))


def _told(reply: Reply) -> Told:
    return Told() if _says_nothing_loaded(reply) else told(reply)


def _names(reply: Reply) -> tuple[str, ...] | None:
    card = reply.read(_Card)
    if card is not None:
        return (card.id,)
    return () if _says_nothing_loaded(reply) else None


def _says_nothing_loaded(reply: Reply) -> bool:
    refusal = _decode(reply, _Refusal) if reply.status in (400, 503) else None
    return refusal is not None and NOTHING_LOADED in refusal.detail


def _decode(reply: Reply, shape: type[T]) -> T | None:
    """The body of an answer that is not a 2xx."""
    try:
        return msgspec.json.decode(reply.body, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
