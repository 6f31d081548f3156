"""vLLM: one process group, one model, off the card when it is stopped.

Its `/health` answers 503 only when its engine is dead, and then for ever: that is no "not yet". It takes a fixed share
of the whole card at its start and fails if that is not free, so it must not be started before the memory is back.
"""

from __future__ import annotations

import re
from typing import ClassVar

from gpu_turnstile.engines.base import Health, Probe
from gpu_turnstile.engines.http import probe_of
from gpu_turnstile.engines.openai_server import OpenAIServer

# One line per engine of a server that has several: vllm:num_requests_running{engine="0",model_name="m"} 2.0
_STEPS = re.compile(rb"^vllm:(?:iteration_tokens_total_count|(?:prompt|generation)_tokens_total)[ {][^\n]*$", re.M)
_REQUESTS = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^\n]*\})?[ \t]+([0-9.eE+]{1,30})[ \t\r]*$", re.M)


class VLLM(OpenAIServer):
    kind: ClassVar[str] = "vllm"

    async def probe(self) -> Probe:
        reply = await self.get("/health")
        if reply.status == 503:
            return Probe(Health.BROKEN, f"its engine is dead ({reply.reason})")
        return probe_of(reply)

    async def pulse(self) -> str | None:
        """Its counters of steps and tokens; None too where it was told to keep no statistics."""
        reply = await self.get("/metrics")
        steps = b"\n".join(_STEPS.findall(reply.body)) if reply.ok else b""
        return steps.decode("latin-1") or None

    async def busy(self) -> bool | None:
        """None too where it was told to keep no statistics."""
        reply = await self.get("/metrics")
        counts = _REQUESTS.findall(reply.body) if reply.ok else []
        if {name for name, _ in counts} != {b"running", b"waiting"}:
            return None
        try:
            return any(float(count) > 0 for _, count in counts)
        except ValueError:
            return None
