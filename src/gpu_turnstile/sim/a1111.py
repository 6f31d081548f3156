"""The simulated AUTOMATIC1111: one checkpoint that is moved off the card and back.

Kept from the real one: unloading does not wait for the job that runs, and after an unload a job fails until
`reload-checkpoint` was called.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gpu_turnstile.sim.base import Work, pause
from gpu_turnstile.sim.ollama_runners import SimModel
from gpu_turnstile.sim.servers import ServerSim, body_of

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class A1111Sim(ServerSim):
    """`api_key`: "user:password"."""

    kind: ClassVar[str] = "a1111"
    default_models = (SimModel("sd_xl_base_1.0", 7.0),)

    stuck = False  # the checkpoint is in main memory, and nobody asked for it back

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/sdapi/v1/progress", self._progress),
            Route("/sdapi/v1/memory", self._memory),
            Route("/sdapi/v1/unload-checkpoint", self._unload, methods=["POST"]),
            Route("/sdapi/v1/reload-checkpoint", self._reload, methods=["POST"]),
            Route("/sdapi/v1/txt2img", self._txt2img, methods=["POST"]),
            Route("/sdapi/v1/img2img", self._txt2img, methods=["POST"]),
        ]

    def wipe(self) -> None:
        super().wipe()
        self.stuck = False

    def key_of(self, request: Request) -> str:
        coded = request.headers.get("authorization", "").removeprefix("Basic ")
        try:
            return base64.b64decode(coded).decode()
        except (binascii.Error, UnicodeDecodeError):
            return ""

    def wrong_key(self) -> Response:
        return JSONResponse({"detail": "Incorrect username or password"}, 401, {"WWW-Authenticate": "Basic"})

    async def _progress(self, request: Request) -> Response:
        self.check(request)
        state = {
            "skipped": False,
            "interrupted": False,
            "job": "scripts_txt2img" if self.in_flight else "",
            "job_count": 1 if self.in_flight else 0,
            "job_timestamp": "20260101000000",
            "job_no": 0,
            "sampling_step": 3 if self.in_flight else 0,
            "sampling_steps": 20 if self.in_flight else 0,
        }
        done = 0.16 if self.in_flight else 0.0
        return JSONResponse(
            {"progress": done, "eta_relative": 0.0, "state": state, "current_image": None, "textinfo": None}
        )

    async def _memory(self, request: Request) -> Response:
        self.check(request)
        used, total = (reading := self.card.read()).used, reading.total
        own = {"current": self.card.held_by(self.name), "peak": total}
        cuda: dict[str, Any] = {"system": {"free": total - used, "used": used, "total": total}}
        cuda |= dict.fromkeys(("active", "allocated", "reserved"), own)
        cuda |= {"inactive": {"current": 0, "peak": 0}, "events": {"retries": 0, "oom": 0}}
        return JSONResponse({"ram": {"free": 1, "used": 1, "total": 2}, "cuda": cuda})

    async def _unload(self, request: Request) -> Response:
        self.check(request)
        self.stuck = not self.faults.unload_ignored
        self.unload(*self.held)
        return JSONResponse({})

    async def _reload(self, request: Request) -> Response:
        self.check(request)
        self.stuck = False
        await self.load(self.first)
        return JSONResponse({})

    async def _txt2img(self, request: Request) -> Response:
        self.check(request)
        asked = await body_of(request)
        if self.stuck:
            return JSONResponse({"error": "RuntimeError", "detail": "", "errors": "tensors on different devices"}, 500)
        return Work(self, lambda: self._draw(asked))

    async def _draw(self, asked: dict[str, Any]) -> Response:
        await self.load(self.first)
        await pause(self.work_s)
        return JSONResponse({"images": [PIXEL], "parameters": asked, "info": "{}"})
