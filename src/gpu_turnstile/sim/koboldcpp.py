"""The simulated koboldcpp in admin mode: a model goes and comes by a restart, during which every connection is cut.

Kept from the real one: a wrong admin password gets 200 with `success: false`, and an unloaded server is "inactive".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from gpu_turnstile.sim.base import cut, pause
from gpu_turnstile.sim.servers import ServerSim, body_of

OPTIONS = ("initial_model", "unload_model")


class KoboldCppSim(ServerSim):
    """`api_key`: the admin password. `restart_s`: how long nobody answers after a `reload_config`."""

    kind: ClassVar[str] = "koboldcpp"

    restart_s = 0.05
    _away = False

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/api/v1/model", self._model),
            Route("/api/extra/version", self._version),
            Route("/api/extra/perf", self._perf),
            Route("/api/admin/list_options", self._options),
            Route("/api/admin/reload_config", self._reload, methods=["POST"]),
            Route("/v1/chat/completions", self._chat_loaded, methods=["POST"]),
        ]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (cut(scope, receive) if self._away else super()._answer(scope, receive, send))

    def _admin(self, request: Request) -> bool:
        return self.api_key is None or self.key_of(request) == self.api_key

    async def _model(self, request: Request) -> Response:
        return JSONResponse({"result": f"koboldcpp/{self.first}" if self.held else "inactive"})

    async def _version(self, request: Request) -> Response:
        serves = {"llm": bool(self.held), "txt2img": False, "vision": False, "transcribe": False, "tts": False}
        about = {"result": "KoboldCpp", "version": "1.100-sim", "protected": False, "embeddings": False, "admin": 2}
        return JSONResponse({**about, **serves})

    async def _perf(self, request: Request) -> Response:
        figures = {"last_process": 0.0, "last_eval": 0.0, "last_token_count": 0, "total_gens": 0, "stop_reason": -1}
        waiting = max(0, self.in_flight - 1)
        return JSONResponse({**figures, "queue": waiting, "idle": 0 if self.in_flight else 1, "uptime": 1.0})

    async def _options(self, request: Request) -> Response:
        return JSONResponse([*self.models, *OPTIONS] if self._admin(request) else [])

    async def _reload(self, request: Request) -> Response:
        wanted = (await body_of(request)).get("filename")
        known = wanted in OPTIONS or wanted in self.models
        if not self._admin(request) or not known:
            return JSONResponse({"success": False})
        if not (wanted == "unload_model" and self.faults.unload_ignored):
            self.spawn(self._restart(None if wanted == "unload_model" else wanted))
        return JSONResponse({"success": True})

    async def _restart(self, wanted: str | None) -> None:
        await pause(0.01)  # the answer is still on its way
        self._away = True
        await pause(self.restart_s)
        self.unload(*self.held)
        if wanted is not None:
            await self.load(wanted if wanted in self.models else self.first)
        self._away = False

    async def _chat_loaded(self, request: Request) -> Response:
        if not self.held:
            return JSONResponse({"detail": {"msg": "no model loaded", "type": "service_unavailable"}}, 503)
        return await self.chat(request)
