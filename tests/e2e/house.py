"""A whole gate in the test's own loop, in front of simulated engines that share one simulated card.

    async with house(tmp_path, presets=[llama("a"), llama("b")]) as h:
        assert (await h.chat("a")).status_code == 200

After every test: nothing in flight, nobody waiting, and the card was never held by two engines at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gpu_turnstile.app import App
from gpu_turnstile.presets.values import Address
from gpu_turnstile.settings import Settings
from gpu_turnstile.sim import ComfySim, OllamaSim, SimCard, serve
from tests.aio import until

SIM = [sys.executable, "-m", "gpu_turnstile.sim", "llama-server"]
GRAPH = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 1}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "t"}},
}


@dataclass(frozen=True)
class PresetText:
    name: str
    text: str


def llama(
    name: str, *args: str, command: Iterable[str] = SIM, runtime: str = "", top: str = "", path: str | None = None
) -> PresetText:
    """A preset of an owned llama-server; the simulated one unless `command` says otherwise."""
    if command is SIM:
        args = ("--sim-vram-gb", "8", "--sim-load-s", "0.1", "--sim-tokens-per-s", "100", *args)
    lines = [
        'engine = "llama-server"',
        top,
        "[model]",
        f"path = {json.dumps(path or f'/models/{name}.gguf')}",
        "[runtime]",
        'kind = "process"',
        f"command = {json.dumps(list(command))}",
        f"args = {json.dumps(list(args))}",
        "context = 4096",
        runtime,
    ]
    return PresetText(name, "\n".join(lines) + "\n")


def graph(seconds: float, seed: int = 0) -> dict[str, Any]:
    """A ComfyUI graph whose job takes so long."""
    sleep = {"class_type": "SleepImage", "inputs": {"image": ["1", 0], "seconds": seconds, "steps": 4, "seed": seed}}
    last = {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "t"}}
    return {**GRAPH, "2": sleep, "9": last}


@dataclass
class House:
    app: App
    card: SimCard
    http: httpx.AsyncClient
    folder: Path
    ollama: OllamaSim | None = None
    comfy: ComfySim | None = None
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def gate(self) -> str:
        return f"http://127.0.0.1:{self.app.port('llm')}"

    @property
    def comfy_gate(self) -> str:
        return f"http://127.0.0.1:{self.app.port('comfyui')}"

    @property
    def view(self) -> Any:
        return self.app.arbiter.snapshot()

    async def chat(
        self, model: str | None, *, stream: bool = False, max_tokens: int = 4, **more: Any
    ) -> httpx.Response:
        body = {"stream": stream, "max_tokens": max_tokens, "messages": [{"role": "user", "content": "hi"}], **more}
        if model is not None:
            body["model"] = model
        return await self.http.post(f"{self.gate}/v1/chat/completions", json=body)

    @contextlib.asynccontextmanager
    async def streaming(self, model: str, max_tokens: int = 1000) -> AsyncIterator[AsyncIterator[str]]:
        """A chat that is in the middle of its answer."""
        body = {
            "model": model,
            "stream": True,
            "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": "x"}],
        }
        async with self.http.stream("POST", f"{self.gate}/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            yield lines

    async def image(self, seconds: float = 0.2, seed: int = 0) -> httpx.Response:
        return await self.http.post(f"{self.comfy_gate}/prompt", json={"prompt": graph(seconds, seed)})

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    async def quiet(self) -> None:
        await until(lambda: not self.view.leases and not self.view.waiting and self.view.phase != "swapping", 10)


@contextlib.asynccontextmanager
async def house(
    folder: Path,
    presets: Iterable[PresetText] = (),
    *,
    ollama: OllamaSim | None = None,
    comfy: ComfySim | None = None,
    card: SimCard | None = None,
    alarms: bool = False,
    **settings: Any,
) -> AsyncIterator[House]:
    """`alarms`: whether the test itself makes two engines hold the card (a fault), so that it must not be checked."""
    path = folder / "card.json"
    card = card or SimCard(path)
    write(folder, presets)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_environment(TURNSTILE_SIM_CARD=str(path)))
        given: dict[str, Any] = {
            "listen_ollama": Address("127.0.0.1", 0),
            "listen_comfy": Address("127.0.0.1", 0),
            "ollama_url": await stack.enter_async_context(serve(ollama)) if ollama else None,
            "comfy_url": await stack.enter_async_context(serve(comfy)) if comfy else None,
            "turnstile_gpu": f"sim:{path}",
            "unload_poll_interval": 0.02,
            "history_poll_interval": 0.05,
            "unload_timeout": 5.0,
            "shutdown_timeout": 0.5,
            "llmc_health_timeout": 20.0,
            **settings,
        }
        app = App(Settings(**given), folder / "presets", folder / "state")
        await app.start()
        stack.push_async_callback(app.stop)
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=20))
        h = House(app, card, http, folder, ollama, comfy)
        app.arbiter.watch(lambda kind, fields: h.events.append((kind, dict(fields))))
        yield h
        await h.quiet()
        assert alarms or not card.alarms(), card.alarms()


def write(folder: Path, presets: Iterable[PresetText]) -> None:
    (folder / "presets").mkdir(exist_ok=True)
    for preset in presets:
        (folder / "presets" / f"{preset.name}.toml").write_text(preset.text)


@contextlib.contextmanager
def _environment(**variables: str) -> Any:
    import os

    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def engine_pids(word: str) -> list[int]:
    """Processes whose command line holds `word`."""
    import psutil

    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(word in w for w in p.info["cmdline"] or ())]


def started(pids: list[int]) -> list[int]:
    """Those that are engines already, and not shells that wait for their record to be written."""
    import psutil

    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).cmdline()[:1] == [sys.executable]:
                found.append(pid)
    return found


__all__ = ["House", "asyncio", "engine_pids", "graph", "house", "llama", "started", "write"]
