"""The simulated vLLM with its development mode: two levels of sleep, and weights that are empty after the second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from gpu_turnstile.sim.sleeping import SleepingSim


class VLLMSim(SleepingSim):
    kind: ClassVar[str] = "vllm"
    weights = True  # whether they are what they were on disk

    def routes(self) -> Sequence[BaseRoute]:
        return [
            *super().routes(),
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._wake, methods=["POST"]),
            Route("/is_sleeping", self._is_sleeping, methods=["GET"]),
            Route("/collective_rpc", self._rpc, methods=["POST"]),
            Route("/reset_prefix_cache", self._reset, methods=["POST"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    async def before_token(self, made: int) -> None:
        await super().before_token(made)
        assert self.weights, "it would answer nonsense"

    async def _sleep(self, request: Request) -> Response:
        answer = await self.fall_asleep()
        if self.asleep and request.query_params.get("level", "1") == "2":
            self.weights = False
        return answer

    async def _wake(self, request: Request) -> Response:
        """In parts it is awake with the last of them, the cache."""
        return await self.awaken() if request.query_params.get("tags") != "weights" else Response()

    async def _is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": self.asleep})

    async def _rpc(self, request: Request) -> Response:
        self.weights |= json.loads(await request.body()).get("method") == "reload_weights"
        return JSONResponse({"results": [None]})

    async def _reset(self, request: Request) -> Response:
        return Response()

    async def _metrics(self, request: Request) -> Response:
        lines = f"vllm:num_requests_running {self.in_flight}\nvllm:num_requests_waiting 0\n"
        return PlainTextResponse(lines + f"vllm:generation_tokens_total {self.counters['tokens']}\n")
