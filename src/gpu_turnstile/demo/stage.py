"""The demo's stage: a temporary folder, the engines, and a gate in front of them, each a process of its own.

Everything listens on loopback ports that were free, and everything is gone when the stage is struck.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx

SIM = (sys.executable, "-m", "gpu_turnstile.sim")
PRESETS = ("coder", "writer")
START_LIMIT = 30.0  # seconds


class StageError(Exception):
    """The demo cannot be set up. The text is for a person."""


@dataclass(frozen=True, slots=True)
class Real:
    """Real llama.cpp servers: what starts one, and a model file."""

    command: tuple[str, ...]
    model: Path


@dataclass(slots=True)
class Stage:
    folder: Path
    gate: str  # base URL of the main listener
    comfy: str  # base URL of ComfyUI's listener
    card: Path

    @property
    def alarms(self) -> int:
        """How often two engines held the simulated card at once."""
        from gpu_turnstile.sim.card import SimCard

        return len(SimCard(self.card).alarms())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def stage(real: Real | None) -> AsyncIterator[Stage]:
    """Set everything up, yield it, take everything down."""
    folder = Path(tempfile.mkdtemp(prefix="turnstile-demo-"))
    processes: list[asyncio.subprocess.Process] = []
    try:
        yield await _set_up(folder, real, processes)
    finally:
        await _strike(processes)
        shutil.rmtree(folder, ignore_errors=True)


async def _set_up(folder: Path, real: Real | None, processes: list[asyncio.subprocess.Process]) -> Stage:
    card = folder / "card.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLMC_", "TURNSTILE_", "LISTEN_"))}
    environment["TURNSTILE_SIM_CARD"] = str(card)
    write_presets(folder, real)
    ollama, comfy, gate, comfy_gate = (free_port() for _ in range(4))
    log = (folder / "log.txt").open("wb")

    async def run(*command: str, **more: str) -> None:
        processes.append(
            await asyncio.create_subprocess_exec(
                *command, env=environment | more, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        )

    await run(*SIM, "ollama", "--port", str(ollama), "--load-s", "0.8", "--tokens-per-s", "30")
    await run(*SIM, "comfyui", "--port", str(comfy), "--job-s", "2")
    await run(
        *(sys.executable, "-m", "gpu_turnstile", "serve"),
        *("--presets", str(folder / "presets"), "--state-dir", str(folder / "state")),
        LISTEN_OLLAMA=f"127.0.0.1:{gate}",
        LISTEN_COMFY=f"127.0.0.1:{comfy_gate}",
        OLLAMA_URL=f"http://127.0.0.1:{ollama}",
        COMFY_URL=f"http://127.0.0.1:{comfy}",
        TURNSTILE_GPU="none" if real else f"sim:{card}",
        HISTORY_POLL_INTERVAL="200ms",
        UNLOAD_POLL_INTERVAL="100ms",
    )
    ready = [
        f"http://127.0.0.1:{port}{path}"
        for port, path in ((ollama, "/api/version"), (comfy, "/system_stats"), (gate, "/healthz"))
    ]
    await _wait_for(ready, processes, folder / "log.txt")
    return Stage(folder, f"http://127.0.0.1:{gate}", f"http://127.0.0.1:{comfy_gate}", card)


def write_presets(folder: Path, real: Real | None) -> None:
    """Two owned LLM presets. Two presets may not name one file, so the second gets a name of its own for it."""
    presets = folder / "presets"
    presets.mkdir()
    for number, name in enumerate(PRESETS):
        if real is None:
            command, model, vram = [*SIM, "llama-server"], folder / f"{name}.gguf", 12 - 2 * number
            args = ["--sim-vram-gb", str(vram), "--sim-load-s", "1.2", "--sim-tokens-per-s", "30"]
        else:
            command, model, vram = list(real.command), folder / f"{name}{real.model.suffix}", 0
            model.symlink_to(real.model)
            args = []
        lines = [
            'engine = "llama-server"',
            "[model]",
            f"path = {json.dumps(str(model))}",
            "[runtime]",
            'kind = "process"',
            f"command = {json.dumps(command)}",
            f"args = {json.dumps(args)}",
            "context = 2048",
            "parallel = 2",
            "drain_grace_s = 8",
            *([f"vram_gb = {vram}"] if vram else []),
        ]
        (presets / f"{name}.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


async def _wait_for(urls: list[str], processes: list[asyncio.subprocess.Process], log: Path) -> None:
    deadline = asyncio.get_running_loop().time() + START_LIMIT
    async with httpx.AsyncClient(trust_env=False) as http:
        for url in urls:
            while not await _answers(http, url):
                dead = [p for p in processes if p.returncode is not None]
                if dead or asyncio.get_running_loop().time() > deadline:
                    raise StageError(f"{url} does not answer; the last output was:\n{_tail(log)}")
                await asyncio.sleep(0.05)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-8:])


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url, timeout=2)).status_code == 200
    except httpx.HTTPError:
        return False


async def _strike(processes: list[asyncio.subprocess.Process]) -> None:
    """The gate first, so that it can stop what it started."""
    for process in reversed(processes):
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(15):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
