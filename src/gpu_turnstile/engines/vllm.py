"""vLLM: one process group, one model, off the card when it is stopped.

Its `/health` answers 503 only when its engine is dead, and then for ever: that is no "not yet". It takes a fixed share
of the whole card at its start and fails if that is not free, so it must not be started before the memory is back.

Asleep (its development mode) it answers `/health` as if it served. Level 2 comes back with empty weights, which must be
read again before its cache is made anew; what it answered from before would be nonsense.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from gpu_turnstile.engines.base import Health, Probe
from gpu_turnstile.engines.http import probe_of
from gpu_turnstile.engines.openai_server import OpenAIServer, Step

# One line per engine of a server that has several: vllm:num_requests_running{engine="0",model_name="m"} 2.0
_STEPS = re.compile(rb"^vllm:(?:iteration_tokens_total_count|(?:prompt|generation)_tokens_total)[ {][^\n]*$", re.M)
_REQUESTS = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^\n]*\})?[ \t]+([0-9.eE+]{1,30})[ \t\r]*$", re.M)


_WAKE: dict[int, tuple[Step, ...]] = {
    1: (("POST", "/wake_up", None),),
    2: (
        ("POST", "/wake_up?tags=weights", None),
        ("POST", "/collective_rpc", {"method": "reload_weights"}),
        ("POST", "/wake_up?tags=kv_cache", None),
        ("POST", "/reset_prefix_cache", None),
    ),
}


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class VLLM(OpenAIServer):
    kind: ClassVar[str] = "vllm"

    def keeps_weights(self, level: int) -> bool:
        return level == 1

    async def sleep(self, level: int, limit: float) -> str | None:
        return await self.in_turn((("POST", f"/sleep?level={level}", None),), limit)

    async def wake(self, level: int, limit: float) -> str | None:
        return await self.in_turn(_WAKE[level], limit)

    async def sleeping(self) -> bool | None:
        told = (await self.get("/is_sleeping")).read(_Sleeping)
        return None if told is None else told.is_sleeping

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
