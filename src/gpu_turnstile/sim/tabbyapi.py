"""The simulated TabbyAPI: one model at a time, loaded by a stream of progress, unloaded at once.

Kept from the real one: an unload cancels what runs, and without a model every request is refused with 503.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gpu_turnstile.sim.base import Answer, Work
from gpu_turnstile.sim.ollama_runners import SimModel
from gpu_turnstile.sim.servers import ServerSim, body_of


class TabbyAPISim(ServerSim):
    """`api_key`: the admin key."""

    kind: ClassVar[str] = "tabbyapi"
    default_models = (SimModel("qwen3-8b-exl3", 8.0), SimModel("bge-m3", 1.2, embedding=True))

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/health", self._health),
            Route("/v1/model", self._model),
            Route("/v1/model/load", self._load, methods=["POST"]),
            Route("/v1/model/unload", self._unload_model, methods=["POST"]),
            Route("/v1/model/embedding", self._embedding),
            Route("/v1/model/embedding/unload", self._unload_embedding, methods=["POST"]),
            Route("/v1/chat/completions", self._chat_loaded, methods=["POST"]),
        ]

    def begin(self) -> None:
        self._cancel = asyncio.Event()
        super().begin()

    def key_of(self, request: Request) -> str:
        return request.headers.get("x-admin-key") or super().key_of(request)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "healthy", "issues": []})

    async def _model(self, request: Request) -> Response:
        return self._card_of(request, embedding=False)

    async def _embedding(self, request: Request) -> Response:
        return self._card_of(request, embedding=True)

    async def _unload_model(self, request: Request) -> Response:
        name = self._the(request, embedding=False)
        self._cancel.set()
        self._cancel = asyncio.Event()
        self.unload(name)
        return JSONResponse(None)

    async def _unload_embedding(self, request: Request) -> Response:
        self.unload(self._the(request, embedding=True))
        return JSONResponse(None)

    async def _load(self, request: Request) -> Response:
        self.check(request)
        name = (await body_of(request)).get("model_name")
        if name not in self.models:
            return JSONResponse({"detail": "Could not find the model path for load."}, 400)
        return Work(self, self._loading(name), "text/event-stream")

    async def _loading(self, name: str) -> AsyncGenerator[bytes, None]:
        for module, status in ((1, "processing"), (2, "finished")):
            await self.load(name)
            step = {"model_type": "model", "module": module, "modules": 2, "status": status}
            yield f"data: {json.dumps(step)}\r\n\r\n".encode()

    async def _chat_loaded(self, request: Request) -> Response:
        name = self._the(request, embedding=False)
        return Work(self, lambda: self._until_cancelled(name))

    async def _until_cancelled(self, name: str) -> Response:
        answer = asyncio.ensure_future(self._chat(name))
        cancelled = asyncio.ensure_future(self._cancel.wait())
        await asyncio.wait({answer, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        cancelled.cancel()
        if answer.done():
            return answer.result()
        answer.cancel()
        self.counters["cancelled"] += 1
        return JSONResponse({"detail": "Chat completion aborted."}, 503)

    def _the(self, request: Request, *, embedding: bool) -> str:
        """The loaded model of that kind. Raises Answer: 401 for a wrong key, 503 when there is none."""
        self.check(request)
        for name, model in self.held.items():
            if model.embedding is embedding:
                return name
        kind = "embedding models" if embedding else "models"
        raise Answer(JSONResponse({"detail": f"No {kind} are currently loaded."}, 503))

    def _card_of(self, request: Request, *, embedding: bool) -> Response:
        name = self._the(request, embedding=embedding)
        parameters: dict[str, Any] = {"max_seq_len": self.models[name].context, "cache_mode": "FP16"}
        return JSONResponse(
            {"id": name, "object": "model", "created": 0, "owned_by": "tabbyAPI", "parameters": parameters}
        )
