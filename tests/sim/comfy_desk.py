"""What the ComfyUI tests share: the recorded workflow, and asking a simulator about its jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from gpu_turnstile.sim import ComfySim, serve

from .helpers import browser, eventually


def graph(seconds: float = 0.0, seed: int = 1, output: str = "SaveImage") -> dict[str, Any]:
    """The recorded workflow: EmptyImage -> SleepImage -> SaveImage."""
    last = {"images": ["2", 0]} | ({"filename_prefix": "arb"} if output == "SaveImage" else {})
    return {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": seed}},
        "2": {
            "class_type": "SleepImage",
            "inputs": {"image": ["1", 0], "seconds": seconds, "steps": 4, "seed": seed},
        },
        "9": {"class_type": output, "inputs": last},
    }


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[tuple[ComfySim, httpx.AsyncClient]]:
    sim = ComfySim(**{"job_s": 0.0, **settings})
    async with serve(sim) as url, browser(url) as http:
        yield sim, http


async def submit(http: httpx.AsyncClient, prompt: dict[str, Any], **more: Any) -> str:
    answer = await http.post("/prompt", json={"prompt": prompt, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt_id"]


async def ended(http: httpx.AsyncClient, job: str) -> dict[str, Any]:
    async def look() -> Any:
        return (await http.get(f"/history/{job}")).json().get(job)

    return await eventually(look)


async def running(http: httpx.AsyncClient, job: str) -> None:
    async def look() -> bool:
        return [item[1] for item in (await http.get("/queue")).json()["queue_running"]] == [job]

    await eventually(look)
