"""What the simulated vLLM and SGLang share: one model, loaded with the process, that can leave the card and return.

Kept from the real ones: `/health` answers 200 while it sleeps; sleeping cuts off what runs; a driver's context stays on
the card; an engine that wakes where its memory is not free dies of it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gpu_turnstile.sim import dialects
from gpu_turnstile.sim.base import Answer, Cut, Work, pause, until
from gpu_turnstile.sim.card import GB, MB, SimCard
from gpu_turnstile.sim.dialects import SSE, Json, Style
from gpu_turnstile.sim.faults import SleepFaults
from gpu_turnstile.sim.generation import Generation, Pace, TokenSim, prompt_words

STYLE = Style("sim")
CONTEXT = 500 * MB  # what a driver's context keeps of the card


class SleepingSim(TokenSim[SleepFaults]):
    """`model`: the only name it answers to; also its name on the card. Times in seconds, rates per second.

    `can_sleep`: whether it was started with the flag for that.
    """

    def __init__(
        self,
        model: str = "m",
        *,
        card: SimCard | None = None,
        can_sleep: bool = True,
        vram_gb: float = 8.0,
        load_s: float = 0.05,
        wake_s: float = 0.02,
        tokens_per_s: float = 200.0,
        faults: SleepFaults | None = None,
    ) -> None:
        self.model = model
        self.can_sleep = can_sleep
        self.vram = int(vram_gb * GB)
        self.load_s = load_s
        self.wake_s = wake_s
        self.ready = False
        self.asleep = False
        super().__init__(model, card, faults or SleepFaults(), Pace(tokens_per_s))

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/health", self._health, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]

    def state(self) -> dict[str, Any]:
        return {"ready": self.ready, "asleep": self.asleep}

    # ------------------------------------------------------------------------------------ life

    def begin(self) -> None:
        self.spawn(self._load())

    async def before_listening(self) -> None:
        """As the real ones: while they load, connections are refused."""
        await until(lambda: self.ready or self.leaving.is_set())

    def wipe(self) -> None:
        self.ready = self.asleep = False

    async def before_token(self, made: int) -> None:
        await super().before_token(made)
        if self.asleep:
            raise Cut

    async def _load(self) -> None:
        self.counters["loads"] += 1
        granted = self.card.hold(self.name, self.vram)
        await pause(self.load_s)
        if granted < self.vram:
            self._die("Free memory on device is less than desired GPU memory utilization")
        else:
            self.ready = True

    def _die(self, last_words: str) -> None:
        print(last_words, file=sys.stderr, flush=True)
        self.exit(1)

    # ------------------------------------------------------------------------------------ sleep

    async def fall_asleep(self) -> Response:
        if not self.can_sleep or self.faults.sleep_refused:
            return JSONResponse({"error": "sleep mode is not enabled"}, 500)
        await until(lambda: not self.faults.sleep_hang)
        self.counters["sleeps"] += 1
        self.asleep = True
        self.card.hold(self.name, self.vram * 3 // 4 if self.faults.sleep_frees_little else CONTEXT)
        return Response()

    async def awaken(self) -> Response:
        if self.faults.wake_refused:
            return JSONResponse({"error": "simulated failure"}, 500)
        granted = self.card.hold(self.name, self.vram)
        await pause(self.wake_s)
        if granted < self.vram or self.faults.wake_dies:
            self._die("CUDA Error: out of memory at cumem_allocator.cpp:62")
            raise Cut
        await until(lambda: not self.faults.wake_hang)
        self.counters["wakes"] += 1
        self.asleep = False
        return Response()

    # ------------------------------------------------------------------------------------ what it answers

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.ready else 503)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _chat(self, request: Request) -> Response:
        body: Json = json.loads(await request.body())
        if body.get("model") != self.model:
            return JSONResponse({"error": {"message": f"The model `{body.get('model')}` does not exist."}}, 404)
        if not self.ready or self.asleep:
            raise Answer(JSONResponse({"error": {"message": "it is not ready, or asleep"}}, 500))
        gen = Generation(self, self.model, prompt_words(body), body.get("max_tokens"), _no_slot)
        if body.get("stream"):
            return Work(self, dialects.chat_stream(gen, STYLE, with_usage=False), SSE)

        async def whole() -> Response:
            await gen.finished()
            return JSONResponse(dialects.chat_body(gen, STYLE))

        return Work(self, whole)


@contextlib.asynccontextmanager
async def _no_slot(gen: Generation) -> AsyncIterator[None]:
    yield
