"""What the simulated servers of other people have in common: models on the card, a key, work that takes a while.

It knows no dialect: one file per server puts that on the wire. Their shapes are from public sources and have not been
compared with the real programs. Invariant: what is in `held` is on the card, and the other way round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gpu_turnstile.sim.base import Answer, Sim, Work, pause
from gpu_turnstile.sim.card import SimCard
from gpu_turnstile.sim.faults import Faults
from gpu_turnstile.sim.ollama_runners import SimModel


@dataclass
class ServerFaults(Faults):
    unload_ignored: bool = False  # an unload is acknowledged, and frees nothing
    unload_late_s: float = 0.0  # an unload is acknowledged at once, and acts so much later


class ServerSim(Sim[ServerFaults]):
    """`models`: what is installed; `loaded`: how many of them, from the first, are loaded at the start.

    `load_s`, `work_s`: seconds to load a model and to do one piece of work. `api_key`: None = it asks for none.
    """

    default_models: Sequence[SimModel] = (SimModel("qwen3-8b", 8.0), SimModel("gemma3-4b", 4.0))

    def __init__(
        self,
        models: Sequence[SimModel] | None = None,
        *,
        loaded: int = 0,
        card: SimCard | None = None,
        name: str | None = None,
        api_key: str | None = None,
        load_s: float = 0.0,
        work_s: float = 0.0,
        faults: ServerFaults | None = None,
    ) -> None:
        self.models = {model.name: model for model in models or self.default_models}
        self.installed = tuple(self.models)
        self.held: dict[str, SimModel] = {}
        self.api_key = api_key
        self.load_s = load_s
        self.work_s = work_s
        self._at_start = list(self.models)[:loaded]
        self._one_load = asyncio.Lock()
        super().__init__(name or self.kind, card, faults or ServerFaults())

    def state(self) -> dict[str, Any]:
        return {"held": list(self.held)}

    def begin(self) -> None:
        for name in self._at_start:
            self.take(name)

    def wipe(self) -> None:
        self.held.clear()

    @property
    def first(self) -> str:
        """The model it works with when nobody names one."""
        return next(iter(self.held), next(iter(self.models)))

    def take(self, name: str) -> None:
        """The model is on the card now."""
        self.held[name] = self.models[name]
        self.card.hold(self.name, self.held[name].size, part=name)
        self.counters["loads"] += 1

    async def load(self, name: str) -> None:
        async with self._one_load:
            if name not in self.held:
                self.take(name)
                await pause(self.load_s)

    def unload(self, *names: str) -> None:
        """As the server does it, with its faults: what it answers says nothing about when, or whether, it acts."""
        self.counters["unloads"] += 1
        if self.faults.unload_ignored:
            return
        if self.faults.unload_late_s > 0:
            self.spawn(self._let_go_later(names))
        else:
            self._let_go(names)

    async def _let_go_later(self, names: Sequence[str]) -> None:
        await asyncio.sleep(self.faults.unload_late_s)
        self._let_go(names)

    def _let_go(self, names: Sequence[str]) -> None:
        for name in names:
            if self.held.pop(name, None) is not None:
                self.card.free(self.name, part=name)

    # ------------------------------------------------------------------------------------ at the door

    def key_of(self, request: Request) -> str:
        """The key a request carries."""
        return request.headers.get("authorization", "").removeprefix("Bearer ")

    def check(self, request: Request) -> None:
        """Raises Answer (401) for a wrong key."""
        if self.api_key is not None and self.key_of(request) != self.api_key:
            raise Answer(self.wrong_key())

    def wrong_key(self) -> Response:
        return JSONResponse({"detail": "Invalid API key"}, 401)

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions, in one piece: the answer that every text server has."""
        self.check(request)
        name = (await body_of(request)).get("model")
        model = name if name in self.models else self.first
        return Work(self, lambda: self._chat(model))

    async def _chat(self, model: str) -> Response:
        await self.load(model)
        await pause(self.work_s)
        message = {"role": "assistant", "content": "one card is enough"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
        return JSONResponse(
            {"id": "chatcmpl-sim", "object": "chat.completion", "model": model, "choices": [choice], "usage": usage}
        )


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises Answer (422) where there is none."""
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Answer(JSONResponse({"detail": "the body must be a JSON object"}, 422))
    return body
