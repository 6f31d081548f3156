"""Ollama, run by somebody else: what it holds, and how it is asked to let go.

Its unload is an acknowledgement, not a fact, and its list flickers. So a release asks every listed model to go
(never with a prompt: that would generate) and looks at the list until two consecutive looks find it empty. A model
that was told and is "Stopping…" (its expiry lies in the past) is left alone; one that is still meant to stay is told
again, at most every `timing.unload_resend` seconds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import ClassVar

import msgspec

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health, Loaded, Probe, Release, Released
from gpu_turnstile.engines.http import Failure, HttpEngine, Reply, probe_of

AGREEING_LOOKS = 2  # an empty list is believed when this many consecutive looks say so
CONFIRM_AFTER = 0.2  # seconds to the confirming look: five looks a second at most


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    name: str = ""
    model: str = ""
    size: int | None = None
    size_vram: int | None = None
    expires_at: str | None = None
    context_length: int | None = None


class _Ps(msgspec.Struct):
    models: list[_Model] | None


@dataclass(frozen=True, slots=True)
class Warmed:
    ok: bool
    detail: str = ""


@dataclass(slots=True)
class _Progress:
    """One release: who was told when, what was said, what the last look showed."""

    told: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    listed: dict[str, bool] = field(default_factory=dict)  # name -> stopping
    unread: str = ""
    empty_looks: int = 0


class Ollama(HttpEngine):
    kind: ClassVar[str] = "ollama"
    mode: ClassVar[Mode] = Mode.LLM

    async def probe(self) -> Probe:
        reply = await self.get("/api/version")
        version = reply.read(_Version)
        return Probe(Health.READY, f"Ollama {version.version}") if version else probe_of(reply)

    async def loaded(self) -> tuple[Loaded, ...] | None:
        models = _models(await self.get("/api/ps"))
        if models is None:
            return None
        return tuple(Loaded(name, model.size_vram, _detail(model)) for name, model in models.items())

    async def busy(self) -> bool | None:
        """Nothing loaded is nothing to do; whether a loaded model works, Ollama does not say."""
        models = _models(await self.get("/api/ps"))
        return None if models is None or models else False

    async def warm(self, model: str) -> Warmed:
        """Load `model` and pin it; bounded by `timing.warm_timeout`."""
        body = {"model": model, "keep_alive": -1}
        reply = await self.post("/api/generate", body, self.timing.warm_timeout)
        return Warmed(True) if reply.ok else Warmed(False, reply.reason)

    async def release(self) -> Release:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timing.unload_timeout
        progress = _Progress()
        while (left := deadline - loop.time()) > 0:
            reply = await self.get("/api/ps", min(self.timing.call_timeout, left))
            if reply.failure is Failure.UNREACHABLE:
                return Release(Released.UNREACHABLE, reply.reason, tuple(progress.listed))
            if reply.status == 404:
                return Release(Released.UNSUPPORTED, f"it has no /api/ps ({reply.reason})")
            if progress.told and reply.was_cut_short(self.timing.call_timeout, left):
                break
            _look(progress, reply)
            if progress.empty_looks == AGREEING_LOOKS:
                return Release(Released.EMPTY, "its list is empty")
            await self._tell(progress, deadline)
            pause = min(self.timing.unload_poll, CONFIRM_AFTER) if progress.empty_looks else self.timing.unload_poll
            await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
        return _gave_up(progress, self.timing.unload_timeout)

    async def _tell(self, progress: _Progress, deadline: float) -> None:
        """Ask whoever is due to go. All at once: one that hangs does not keep the others on the card."""
        now = asyncio.get_running_loop().time()
        due = [name for name, stopping in progress.listed.items() if self._is_due(progress, name, stopping, now)]
        limit = min(self.timing.call_timeout, deadline - now)
        if not due or limit <= 0:
            return
        progress.told.update(dict.fromkeys(due, now))
        for name, refusal in zip(due, await asyncio.gather(*(self._unload(n, limit) for n in due)), strict=True):
            progress.refusals[name] = refusal

    def _is_due(self, progress: _Progress, name: str, stopping: bool, now: float) -> bool:
        told = progress.told.get(name)
        return told is None or (not stopping and now - told >= self.timing.unload_resend)

    async def _unload(self, model: str, limit: float) -> str:
        """Empty when it was acknowledged, else why not. Embedding models refuse the first call and take the second."""
        reply = await self.post("/api/generate", {"model": model, "keep_alive": 0}, limit)
        if reply.status is not None and not reply.ok:
            reply = await self.post("/api/embed", {"model": model, "input": "x", "keep_alive": 0}, limit)
        return "" if reply.ok else reply.reason


def _models(reply: Reply) -> dict[str, _Model] | None:
    """The list without its duplicates; None if this is no such list."""
    listing = reply.read(_Ps)
    if listing is None:
        return None
    return {model.name or model.model: model for model in listing.models or ()}


def _look(progress: _Progress, reply: Reply) -> None:
    models = _models(reply)
    if models is None:
        progress.unread = reply.reason if not reply.ok else "/api/ps did not answer with a list"
        progress.empty_looks = 0
        return
    now = reply.server_time()
    progress.unread = ""
    progress.listed = {name: _is_stopping(model, now) for name, model in models.items()}
    progress.empty_looks = 0 if models else progress.empty_looks + 1


def _is_stopping(model: _Model, now: datetime) -> bool:
    """Told to go and not gone yet: the expiry is past. By the server's clock, and its Date has whole seconds."""
    try:
        return datetime.fromisoformat(model.expires_at or "") < now - timedelta(seconds=1)
    except (ValueError, TypeError):
        return False


def _gave_up(progress: _Progress, seconds: float) -> Release:
    if progress.unread:
        detail = f"its list could not be read: {progress.unread}"
    elif progress.listed:
        words = [_describe(name, stopping, progress) for name, stopping in progress.listed.items()]
        detail = f"after {seconds:g} s it still lists {', '.join(words)}"
    else:
        detail = f"its list was not reliably empty within {seconds:g} s"
    return Release(Released.TIMEOUT, detail, tuple(progress.listed))


def _describe(name: str, stopping: bool, progress: _Progress) -> str:
    refusal = progress.refusals.get(name)
    if refusal:
        return f"{name} (unload: {refusal})"
    return f"{name} (stopping)" if stopping else name


def _detail(model: _Model) -> dict[str, object]:
    known = {"size": model.size, "expires_at": model.expires_at, "context_length": model.context_length}
    return {key: value for key, value in known.items() if value is not None}
