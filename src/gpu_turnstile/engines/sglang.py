"""SGLang: one process group, one model, off the card when it is stopped.

Its `/health` computes a token, which takes a second when it is idle, and answers 503 while it starts and when nothing
comes out of its engine. What it works on stands in `/v1/loads`, in older versions in `/get_load`.

It does not say whether it sleeps, and answers a wake before it is done: a token that comes out is the end of it.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gpu_turnstile.engines.openai_server import OpenAIServer


class _Rank(msgspec.Struct):
    """The load of one worker. Old versions count running and waiting requests together, as `num_reqs`."""

    num_running_reqs: int | None = None
    num_reqs: int | None = None
    num_waiting_reqs: int = 0

    @property
    def busy(self) -> bool | None:
        told = self.num_reqs if self.num_running_reqs is None else self.num_running_reqs
        return None if told is None else told + self.num_waiting_reqs > 0


class _Loads(msgspec.Struct):
    loads: list[_Rank]


class SGLang(OpenAIServer):
    kind: ClassVar[str] = "sglang"

    def keeps_weights(self, level: int) -> bool:
        return True

    async def sleep(self, level: int, limit: float) -> str | None:
        return await self.in_turn((("POST", "/flush_cache", None), ("POST", "/release_memory_occupation", {})), limit)

    async def wake(self, level: int, limit: float) -> str | None:
        return await self.in_turn((("POST", "/resume_memory_occupation", {}), ("GET", "/health_generate", None)), limit)

    async def sleeping(self) -> bool | None:
        return None

    async def busy(self) -> bool | None:
        loads = (await self.get("/v1/loads?include=core")).read(_Loads)
        ranks = loads.loads if loads is not None else (await self.get("/get_load")).read(list[_Rank])
        answers = {rank.busy for rank in ranks or ()}
        if True in answers:
            return True
        return False if answers == {False} else None
