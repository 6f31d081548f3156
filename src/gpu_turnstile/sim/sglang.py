"""The simulated SGLang with its memory saver: it refuses to let go while it works, and wakes with a promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gpu_turnstile.sim.base import until
from gpu_turnstile.sim.sleeping import SleepingSim


class SGLangSim(SleepingSim):
    kind: ClassVar[str] = "sglang"

    def routes(self) -> Sequence[BaseRoute]:
        both = ["GET", "POST"]
        return [
            *super().routes(),
            Route("/flush_cache", self._flush, methods=both),
            Route("/release_memory_occupation", self._release, methods=both),
            Route("/resume_memory_occupation", self._resume, methods=both),
            Route("/health_generate", self._health_generate, methods=["GET"]),
            Route("/v1/loads", self._loads, methods=["GET"]),
        ]

    async def _flush(self, request: Request) -> Response:
        return Response(status_code=400 if self.in_flight else 200)

    async def _release(self, request: Request) -> Response:
        return await self.fall_asleep()

    async def _resume(self, request: Request) -> Response:
        """It answers at once; a token comes out when it is done."""
        if self.faults.wake_refused:
            return await self.awaken()
        self.spawn(self._awake())
        return Response()

    async def _awake(self) -> None:
        await self.awaken()

    async def _health_generate(self, request: Request) -> Response:
        await until(lambda: not self.asleep)
        return Response(status_code=200 if self.ready else 503)

    async def _loads(self, request: Request) -> Response:
        return JSONResponse({"loads": [{"num_running_reqs": self.in_flight, "num_waiting_reqs": 0}]})
