"""The simulated LM Studio: models that load on demand, more than once if asked to, and unload by instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gpu_turnstile.sim.ollama_runners import SimModel
from gpu_turnstile.sim.servers import ServerSim, body_of


class LMStudioSim(ServerSim):
    kind: ClassVar[str] = "lm-studio"

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/api/v1/models", self._models),
            Route("/api/v1/models/load", self._load, methods=["POST"]),
            Route("/api/v1/models/unload", self._unload, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def _models(self, request: Request) -> Response:
        self.check(request)
        return JSONResponse({"models": [self._model(self.models[name]) for name in self.installed]})

    async def _load(self, request: Request) -> Response:
        """Loading it twice makes a second instance, `name:2`."""
        self.check(request)
        key = (await body_of(request)).get("model")
        if key not in self.installed:
            return _not_found(f"model {key!r} not found")
        number = 1 + len(self._instances(key))
        name = key if number == 1 else f"{key}:{number}"
        self.models[name] = SimModel(name, self.models[key].gb)
        await self.load(name)
        return JSONResponse({"type": "llm", "instance_id": name, "load_time_seconds": self.load_s, "status": "loaded"})

    async def _unload(self, request: Request) -> Response:
        self.check(request)
        name = (await body_of(request)).get("instance_id")
        if name not in self.held:
            return _not_found(f"no loaded instance {name!r}")
        self.unload(name)
        return JSONResponse({"instance_id": name})

    def _instances(self, key: str) -> list[str]:
        own = (name for name in self.held if name not in self.installed and name.rpartition(":")[0] == key)
        return [name for name in (key,) if name in self.held] + list(own)

    def _model(self, model: SimModel) -> dict[str, Any]:
        config = {"context_length": model.context, "flash_attention": True}
        return {
            "type": "embedding" if model.embedding else "llm",
            "publisher": "simulated",
            "key": model.name,
            "display_name": model.name,
            "quantization": {"name": "Q4_K_M", "bits_per_weight": 4},
            "size_bytes": model.size,
            "params_string": None,
            "loaded_instances": [{"id": name, "config": config} for name in self._instances(model.name)],
            "max_context_length": model.context,
            "format": "gguf",
        }


def _not_found(message: str) -> Response:
    return JSONResponse({"error": {"type": "invalid_request", "message": message}}, 404)
