"""A ComfyUI that the gate starts and stops itself: its jobs are finished before it leaves, whoever sent them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.aio import run_async, until
from tests.e2e.gate import Gate
from tests.e2e.house import House, PresetText, engine_pids, graph, house, llama, write
from tests.e2e.test_document import of_kind


def painter(folder: Path, *args: str) -> PresetText:
    command = [sys.executable, "-m", "gpu_turnstile.sim", "comfyui"]
    card = ["--card", str(folder / "card.json")]
    lines = [
        'engine = "comfyui"',
        "[runtime]",
        'kind = "process"',
        f"command = {json.dumps(command)}",
        f"args = {json.dumps(['--port', '{port}', '--vram-gb', '8', '--job-s', '0.01', *card, *args])}",
    ]
    return PresetText("painter", "\n".join(lines) + "\n")


def painters(folder: Path) -> list[int]:
    return engine_pids(str(folder / "card.json"))


async def direct(h: House, seconds: float) -> str:
    """A job sent to its own port; its id."""
    seat = h.app.arbiter.seat("painter")
    answer = await h.http.post(f"{seat.engine.url}/prompt", json={"prompt": graph(seconds, 7)})
    return str(answer.json()["prompt_id"])


@run_async
async def test_it_is_started_for_a_job_and_stopped_for_a_chat_when_its_jobs_have_ended(tmp_path):
    async with house(tmp_path, [painter(tmp_path), llama("a")]) as h:
        for seed in (0, 10):
            answers = await asyncio.gather(*(h.image(0.2, seed + n) for n in range(3)))
            assert [answer.status_code for answer in answers] == [200] * 3
            assert (await h.chat("a")).status_code == 200
            assert painters(tmp_path) == []
        assert h.app.jobs.ends == {"success": 6}


@run_async
async def test_what_its_jobs_took_of_the_card_must_be_back_before_anybody_comes(tmp_path):
    async with house(tmp_path, [painter(tmp_path), llama("a")]) as h:
        assert (await h.image(0.02)).status_code == 200
        assert (await h.chat("a")).status_code == 200
        (left,) = of_kind(h, "evicted")
        assert left["detail"] == "stopped; 8.0 GB of 8.0 GB came back"


@run_async
async def test_its_size_is_not_learned_from_a_start_that_loads_no_model(tmp_path):
    async with house(tmp_path, [painter(tmp_path, "--context-gb", "0.4")]) as h:
        assert (await h.image(0.02)).status_code == 200
        await h.quiet()
        (shown,) = (await h.http.get(f"{h.gate}/status")).json()["engines"]
        assert shown["vram_gb"] is None


@run_async
async def test_a_job_sent_to_its_own_port_is_waited_for(tmp_path):
    async with house(tmp_path, [painter(tmp_path), llama("a")], turnstile_bypass_poll=0.03) as h:
        assert (await h.image(0.02)).status_code == 200
        await h.quiet()
        job = await direct(h, 0.6)
        await until(lambda: of_kind(h, "job"))
        await until(lambda: [fields["prompt_id"] for fields in of_kind(h, "job")][-1] == job)
        assert (await h.chat("a")).status_code == 200
        assert h.app.jobs.ends == {"success": 2}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    write(tmp_path, [painter(tmp_path), llama("a", path=str(tmp_path / "a.gguf"))])
    gate = Gate(tmp_path, LOG_FORMAT="json", LOGLEVEL="info", HISTORY_POLL_INTERVAL="50ms")
    yield gate
    gate.stop()
    for pid in painters(tmp_path) + engine_pids(str(tmp_path / "a.gguf")):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("look", ["5s", "0"])
def test_its_job_survives_a_gate_that_is_killed_in_the_middle_of_it(gate, look):
    gate.more["TURNSTILE_BYPASS_POLL"] = look
    gate.start()
    job = post(gate, "/comfyui/prompt", prompt=graph(60)).json()["prompt_id"]
    gate.kill()
    gate.start()
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(gate.chat, "a")
        eventually(lambda: status(gate)["queue"])
        assert [shown["prompt_id"] for shown in status(gate)["jobs"]] == [job]
        assert painters(gate.folder), "the chat waits for the job"
        assert not chat.done()
        post(gate, "/comfyui/interrupt")
        assert chat.result(20).status_code == 200
    (end,) = gate.told("job_end")
    assert (end["prompt_id"], end["end"]) == (job, "interrupted")
    assert gate.told("bypass")[0]["what"] == "1 job(s) sent by an earlier gate"
    assert painters(gate.folder) == []


def post(gate: Gate, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{gate.url}{path}", json=body, trust_env=False, timeout=20)


def status(gate: Gate) -> dict[str, Any]:
    return dict(httpx.get(f"{gate.url}/status", trust_env=False).json())


def eventually(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.02)
