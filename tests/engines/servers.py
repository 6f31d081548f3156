"""The servers that somebody else runs, as cases: what each tells and leaves, and running a story on one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gpu_turnstile.engines.base import Timing
from gpu_turnstile.engines.registry import ENGINES
from gpu_turnstile.sim import (
    A1111Sim,
    InvokeAISim,
    KoboldCppSim,
    LMStudioSim,
    LocalAISim,
    SimModel,
    TabbyAPISim,
    serve,
)
from tests.engines.fake import run, serving

QUICK = Timing(unload_timeout=0.4, unload_poll=0.01, call_timeout=0.3, unload_resend=0.1, warm_timeout=2)
SHORT = Timing(unload_timeout=0.1, unload_poll=0.02, call_timeout=0.3, warm_timeout=0.2)
CHAT = ("/v1/chat/completions", {"model": "m", "messages": []})


@dataclass(frozen=True)
class Case:
    """`held`: what `loaded` names, None = it does not say; `left`: what an ignored unload leaves."""

    sim: Any
    held: tuple[str, ...] | None
    left: tuple[str, ...]
    work: tuple[str, dict[str, Any]] = CHAT
    busy: bool | None = True
    key: str = "secret"
    waits: bool = False  # a release waits for the work that runs

    @property
    def engine(self) -> Any:
        return ENGINES[self.sim.kind]


CASES = [
    Case(
        A1111Sim, ("checkpoint",), ("checkpoint",), ("/sdapi/v1/txt2img", {"prompt": "x"}), key="me:secret", waits=True
    ),
    Case(InvokeAISim, None, ("1 model",), ("/api/v1/queue/default/enqueue_batch", {"batch": {}}), waits=True),
    Case(LMStudioSim, ("m",), ("m",), busy=None),
    Case(TabbyAPISim, ("m",), ("m",), busy=None),
    Case(KoboldCppSim, ("koboldcpp/m",), ("koboldcpp/m",), waits=True),
    Case(LocalAISim, ("m",), ("m",)),
]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.sim.kind)
readied = pytest.mark.parametrize("case", [c for c in CASES if hasattr(c.engine, "admit")], ids=lambda c: c.sim.kind)


def with_sim(case, story, *, timing=QUICK, loaded=1, **settings):
    """Run `story(engine, sim, http)` on a simulator with one model `m`, which is loaded."""

    async def main():
        sim = case.sim([SimModel("m", 8.0)], loaded=loaded, **settings)
        async with serve(sim) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
            return await story(case.engine(url, http, timing), sim, http)

    return run(main())


def with_fake(case, handler, story):
    async def main():
        async with serving(handler) as (server, http):
            return await story(case.engine(server.url, http, SHORT), server)

    return run(main())
