"""The simulated LocalAI: models that load on demand, each a backend of its own that is shut down by name.

Kept from the real one: a shutdown waits for the requests that run, and refuses when that takes too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gpu_turnstile.sim.base import until
from gpu_turnstile.sim.servers import ServerSim, body_of

BUSY, READY = 1, 2


class LocalAISim(ServerSim):
    """`patience_s`: how long a shutdown waits for the requests that run."""

    kind: ClassVar[str] = "localai"

    patience_s = 30.0

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/readyz", self._ready),
            Route("/healthz", self._ready),
            Route("/system", self._system),
            Route("/backend/monitor", self._monitor),
            Route("/backend/shutdown", self._shutdown, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200)

    async def _system(self, request: Request) -> Response:
        self.check(request)
        return JSONResponse({"backends": ["llama-cpp"], "loaded_models": [{"id": name} for name in self.held]})

    async def _monitor(self, request: Request) -> Response:
        self.check(request)
        name = request.query_params.get("model", "")
        if name not in self.held:
            return _error(500, f"backend {name} is not currently loaded")
        memory = {"total": self.held[name].size, "breakdown": {"gopsutil-RSS": self.held[name].size}}
        return JSONResponse({"state": BUSY if self.in_flight else READY, "memory": memory})

    async def _shutdown(self, request: Request) -> Response:
        self.check(request)
        name = (await body_of(request)).get("model")
        if name not in self.held:
            return _error(404, f'model "{name}" is not loaded on this instance or on any worker node')
        try:
            async with asyncio.timeout(self.patience_s):
                await until(lambda: self.in_flight == 0)
        except TimeoutError:
            return _error(500, f"model is still busy: {name}")
        self.unload(name)
        return JSONResponse({"message": "model stopped"})


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"code": status, "message": message, "type": ""}}, status)
