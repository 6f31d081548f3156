"""The simulated InvokeAI: a queue worked off one by one, a processor that can be paused, a model cache.

Kept from the real one: the answer to an enqueue comes at once, the cache statistics are those of the last job, and
emptying the cache spares what is in use.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gpu_turnstile.sim.base import pause
from gpu_turnstile.sim.ollama_runners import SimModel
from gpu_turnstile.sim.servers import ServerSim, body_of

QUEUE = "/api/v1/queue/default"


class InvokeAISim(ServerSim):
    """`answers_null`: empties its cache as old versions did, without saying what it dropped."""

    kind: ClassVar[str] = "invokeai"
    default_models = (SimModel("flux-dev", 12.0), SimModel("t5-encoder", 5.0))

    answers_null = False

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/api/v1/app/version", self._version),
            Route("/api/v2/models/stats", self._stats),
            Route("/api/v2/models/empty_model_cache", self._empty, methods=["POST"]),
            Route(f"{QUEUE}/status", self._status),
            Route(f"{QUEUE}/processor/pause", self._pause, methods=["PUT"]),
            Route(f"{QUEUE}/processor/resume", self._resume, methods=["PUT"]),
            Route(f"{QUEUE}/enqueue_batch", self._enqueue, methods=["POST"]),
        ]

    def begin(self) -> None:
        self.items: Counter[str] = Counter()
        self.going = asyncio.Event()
        self.going.set()
        self.seen: dict[str, int] = {}  # what the last job used
        super().begin()
        self._new = asyncio.Semaphore(0)
        self.spawn(self._work_off())

    def take(self, name: str) -> None:
        super().take(name)
        self.seen[name] = self.models[name].size

    async def _work_off(self) -> None:
        while True:
            await self._new.acquire()
            await self.going.wait()
            self._move("pending", "in_progress")
            with self.working():
                for name in self.models:
                    await self.load(name)
                await pause(self.work_s)
            self._move("in_progress", "completed")

    def _move(self, here: str, there: str) -> None:
        self.items[here] -= 1
        self.items[there] += 1

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": "6.0.0-sim", "highlights": None})

    async def _stats(self, request: Request) -> Response:
        self.check(request)
        if not self.seen:
            return JSONResponse(None)
        figures = {"hits": 0, "misses": 0, "high_watermark": sum(self.seen.values()), "in_cache": len(self.seen)}
        return JSONResponse({**figures, "cleared": 0, "cache_size": 0, "loaded_model_sizes": self.seen})

    async def _empty(self, request: Request) -> Response:
        self.check(request)
        dropped = {} if self.in_flight else dict(self.held)
        self.unload(*dropped)
        if self.answers_null:
            return JSONResponse(None)
        freed = sum(model.size for model in dropped.values())
        return JSONResponse({"models_cleared": len(dropped), "bytes_freed": freed})

    async def _status(self, request: Request) -> Response:
        self.check(request)
        names = ("pending", "in_progress", "completed", "failed", "canceled")
        queue: dict[str, Any] = {"queue_id": "default", "item_id": None, "batch_id": None, "session_id": None}
        queue |= {name: self.items[name] for name in names}
        queue["total"] = sum(self.items[name] for name in names)
        return JSONResponse({"queue": queue, "processor": self._processor()})

    async def _pause(self, request: Request) -> Response:
        self.check(request)
        self.going.clear()
        return JSONResponse(self._processor())

    async def _resume(self, request: Request) -> Response:
        self.check(request)
        self.going.set()
        return JSONResponse(self._processor())

    async def _enqueue(self, request: Request) -> Response:
        self.check(request)
        batch = (await body_of(request)).get("batch", {})
        self.items["pending"] += 1
        self._new.release()
        return JSONResponse(
            {"queue_id": "default", "enqueued": 1, "requested": 1, "batch": batch, "priority": 0}, status_code=201
        )

    def _processor(self) -> dict[str, bool]:
        return {"is_started": self.going.is_set(), "is_processing": self.in_flight > 0}
