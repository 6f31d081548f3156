"""Many swaps under load between two real llama.cpp servers: no request is lost, and there is never a second engine.

Clients ask for both presets at the same time, streaming and not; each checks that its answer is whole. A watcher looks
at the machine's processes all the while, and the gate's own log is read afterwards. A piece of it is in the suite;
`TURNSTILE_SWAPS=200` (`make swaps`) is the proof.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvloop

from tests.e2e.gate import Gate
from tests.e2e.house import engine_pids, llama, write
from tests.real.engine import llama_command, real_engine_missing, tiny_model

MISSING = real_engine_missing()
SWAPS = int(os.environ.get("TURNSTILE_SWAPS", "20"))
CLIENTS = 6
PRESETS = ("one", "two")
RSS_GROWTH = 24 << 20  # bytes the gate may grow by, however many swaps there are
LIMIT = 30 + 3 * SWAPS  # seconds

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bool(MISSING) and not os.environ.get("TURNSTILE_REAL"), reason=str(MISSING)),
    pytest.mark.timeout(LIMIT + 60),
]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    models = {name: tiny_model(tmp_path, name, seed=seed) for seed, name in enumerate(PRESETS)}
    write(tmp_path, [llama(n, command=llama_command(), path=str(m), runtime="parallel = 4") for n, m in models.items()])
    gate = Gate(tmp_path, TURNSTILE_GPU="none", LOGLEVEL="info", LOG_FORMAT="json", BUSY_RETRY_AFTER="1")
    gate.start()
    yield gate
    gate.stop()


# --------------------------------------------------------------------------------------------------- who is asked


@dataclass
class Load:
    """Clients that ask until so many swaps were made; what they got."""

    gate: Gate
    whole: Counter[str] = field(default_factory=Counter)  # by kind of request
    refused: int = 0  # with a Retry-After; asked again, and answered
    done: bool = False
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    async def run(self) -> list[Held]:
        """What the gate held of the system, a quarter of the way and at the end."""
        async with asyncio.timeout(LIMIT), httpx.AsyncClient(base_url=self.gate.url, trust_env=False) as http:
            clients = [asyncio.create_task(self._client(http)) for _ in range(CLIENTS)]
            found = [await self._after(count, http, clients) for count in (SWAPS // 4, SWAPS)]
            self.done = True
            await asyncio.gather(*clients)
        return found

    async def _after(self, swaps: int, http: httpx.AsyncClient, clients: list[asyncio.Task[None]]) -> Held:
        while await swaps_made(http) < swaps:
            for client in clients:
                if client.done():
                    client.result()  # a wrong answer ends the test at once
            await asyncio.sleep(0.1)
        assert self.gate.process is not None
        return Held.now(self.gate.process.pid)

    async def _client(self, http: httpx.AsyncClient) -> None:
        while not self.done:
            preset, stream, tokens = self.dice.choice(PRESETS), self.dice.random() < 0.5, self.dice.randint(1, 60)
            await self._ask(http, preset, stream, tokens)

    async def _ask(self, http: httpx.AsyncClient, preset: str, stream: bool, tokens: int) -> None:
        """Once; again when it was refused as the documentation says. Anything else that is no whole answer fails."""
        body = {"model": preset, "stream": stream, "max_tokens": tokens, "messages": [{"role": "user", "content": "x"}]}
        async with http.stream("POST", "/v1/chat/completions", json=body, timeout=60) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        if answer.status_code == 503:
            self.refused += 1
            assert self.refused < SWAPS, lines
            await asyncio.sleep(int(answer.headers["retry-after"]))
            return await self._ask(http, preset, stream, tokens)
        assert answer.status_code == 200, lines
        check = whole_stream if stream else whole_answer
        check(lines, preset, tokens)
        self.whole[f"{preset}, {'stream' if stream else 'one piece'}"] += 1
        return None


async def swaps_made(http: httpx.AsyncClient) -> int:
    found = re.search(r"^gpu_turnstile_swap_seconds_count (\d+)", (await http.get("/metrics")).text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def whole_answer(lines: list[str], preset: str, tokens: int) -> None:
    answer = json.loads("".join(lines))
    assert answer["usage"]["completion_tokens"] == tokens
    assert preset in answer["model"]


def whole_stream(lines: list[str], preset: str, tokens: int) -> None:
    """The engine's own last words: its finish reason, how many tokens it made, and the end mark."""
    assert lines[-1] == "data: [DONE]"
    chunks: list[Any] = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
    assert chunks[-1]["timings"]["predicted_n"] == tokens
    assert all(preset in chunk["model"] for chunk in chunks)


# -------------------------------------------------------------------------------------------- what is looked at


@dataclass(frozen=True)
class Held:
    """Of the operating system, by the gate's process."""

    files: int
    threads: int
    children: int
    rss: int

    @classmethod
    def now(cls, pid: int) -> Held:
        process = psutil.Process(pid)
        with process.oneshot():
            children = len(process.children(recursive=True))
            return cls(process.num_fds(), process.num_threads(), children, process.memory_info().rss)


class Watcher(threading.Thread):
    """Looks for the engines of both presets all the while; `both` tells when it saw two at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._files = [str(folder / f"{name}.gguf") for name in PRESETS]
        self.looks, self.both = 0, 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.01):
            pids = [engine_pids(file) for file in self._files]
            self.looks += 1
            self.both += sum(map(len, pids)) > 1


def never_two(told: list[dict[str, Any]]) -> int:
    """How many swaps the gate's log tells of, in which nobody was let in before the one before him was out."""
    inside: str | None = None
    swaps = 0
    for line in told:
        match line["event"]:
            case "admitting":
                assert inside is None, line
                inside = line["tenant"]
                swaps += 1
            case "evicted":
                assert inside == line["tenant"], line
                inside = None
    return swaps


def test_swaps_under_load_lose_no_request_and_leave_nothing_behind(gate: Gate, tmp_path: Path) -> None:
    watcher = Watcher(tmp_path)
    watcher.start()
    load = Load(gate)
    early, late = uvloop.run(load.run())
    watcher.over.set()
    watcher.join()
    told = gate.told("admitting", "evicted", "forced", "swap_failed", "engine_lost", "evict_failed")
    print(f"{SWAPS} swaps: {dict(load.whole)}, refused and asked again: {load.refused}; {early} -> {late}")
    assert never_two(told) >= SWAPS
    assert watcher.both == 0, f"in {watcher.both} of {watcher.looks} looks there were two engines"
    assert watcher.looks > SWAPS
    assert {line["event"] for line in told} <= {"admitting", "evicted"}
    assert len(load.whole) == 2 * len(PRESETS)
    assert late.files <= early.files + CLIENTS + 4
    assert late.threads <= early.threads + 4
    assert late.children <= 1
    assert late.rss <= early.rss + RSS_GROWTH
    gate.stop()
    assert not any(engine_pids(str(tmp_path / f"{name}.gguf")) for name in PRESETS)
