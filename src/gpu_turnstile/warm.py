"""Loading the chat model again after image jobs, so that the next chat does not pay for it (`WARM_MODEL`).

Only when nobody wants the card: the model is loaded under a lease like any LLM request, and an image job that comes
meanwhile waits for it, at most `WARM_TIMEOUT`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from gpu_turnstile.arbiter import Arbiter, Ticket
from gpu_turnstile.core.model import Mode, Phase
from gpu_turnstile.engines.ollama import Ollama

log = structlog.get_logger("warm")


class Warmer:
    def __init__(self, arbiter: Arbiter, tenant: str, model: str) -> None:
        """Watches the arbiter from now on; `tenant` is the Ollama that loads `model`."""
        self._arbiter = arbiter
        self._tenant = tenant
        self._model = model
        self._tasks: set[asyncio.Task[None]] = set()
        arbiter.watch(self._on_note)

    def _on_note(self, kind: str, fields: dict[str, Any]) -> None:
        """An image server has left the card, and nobody came instead."""
        if kind != "swapped" or fields["target"] is not None:
            return
        seats = (self._arbiter.seat(name) for name in fields["evicted"])
        if any(seat is not None and seat.tenant.mode is Mode.COMFYUI for seat in seats):
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        if self._arbiter.snapshot().phase is not Phase.IDLE:
            return
        ticket = self._arbiter.acquire(
            (self._tenant,), wait=0, client="warm-up", on_answer=self._answered, on_cut=lambda reason: None
        )
        if ticket.tenant is not None:
            self._answered(ticket)

    def _answered(self, ticket: Ticket) -> None:
        if ticket.tenant is None:
            return
        task = asyncio.get_running_loop().create_task(self._warm(ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _warm(self, ticket: Ticket) -> None:
        seat = self._arbiter.seat(self._tenant)
        try:
            if seat is not None and isinstance(seat.engine, Ollama):
                warmed = await seat.engine.warm(self._model)
                self._arbiter.tell("warmed", {"model": self._model, "ok": warmed.ok, "detail": warmed.detail})
                if not warmed.ok:
                    log.warning("warm_up_failed", model=self._model, reason=warmed.detail)
        finally:
            self._arbiter.release(ticket)
