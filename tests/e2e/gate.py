"""A gate in a process of its own: what can be killed, and started again where it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")


class Gate:
    """`turnstile serve` in a process of its own, in a folder that outlives it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.more = environment
        self.card = folder / "card.json"
        self.log = folder / "gate.log"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        state, presets = str(self.folder / "state"), str(self.folder / "presets")
        return [sys.executable, "-m", "gpu_turnstile", "serve", "--presets", presets, "--state-dir", state]

    def environment(self) -> dict[str, str]:
        own = {
            "TURNSTILE_SIM_CARD": str(self.card),
            "TURNSTILE_GPU": f"sim:{self.card}",
            "LISTEN_OLLAMA": f"127.0.0.1:{self.port}",
            "LISTEN_COMFY": "off",
            "OLLAMA_URL": "",
            "COMFY_URL": "",
            "SHUTDOWN_TIMEOUT": "500ms",
        }
        return {**os.environ, **own, **self.more}

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command(), env=self.environment(), stdout=log, stderr=log)
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/healthz", trust_env=False, verify=False).status_code == 200:
                    return
            time.sleep(0.02)
        raise AssertionError(self.log.read_text()[-4000:])

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(15)

    def told(self, *events: str) -> list[dict[str, Any]]:
        """The lines of its log about these events; it must write JSON (LOG_FORMAT=json, LOGLEVEL=info)."""
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") in events]

    def begin_and_kill(self, model: str, there: Callable[[], T]) -> T:
        """Kill it while it starts an engine: as soon as `there` says that one was started; what it said."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.chat, model)
            deadline = time.monotonic() + 15
            while not (found := there()):
                assert time.monotonic() < deadline, self.log.read_text()[-4000:]
                time.sleep(0.01)
            self.kill()
            with contextlib.suppress(httpx.HTTPError):
                asked.result()
        return found

    def chat(self, model: str) -> httpx.Response:
        body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, trust_env=False, verify=False, timeout=20)
