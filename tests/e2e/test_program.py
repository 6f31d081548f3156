"""The program as a person starts it: a process of its own, with signals, exit codes and lines on stderr."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator

import httpx
import psutil

from tests.aio import run_async, until
from tests.e2e.house import PresetText, llama, write

GATE = (sys.executable, "-m", "gpu_turnstile", "serve")
# The same, and how many objects a full collection of the running gate has to look through is said on stderr.
COUNTED = """
import gc, sys, threading, time
from gpu_turnstile.cli.main import main
def count():
    while not gc.get_freeze_count():
        time.sleep(0.02)
    print("objects", len(gc.get_objects()), file=sys.stderr, flush=True)
threading.Thread(target=count, daemon=True).start()
main()
"""


class Program:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""

    async def until_listening(self) -> str:
        """The base URL of the main listener."""
        assert self.process.stderr is not None
        while True:
            line = (await self.process.stderr.readline()).decode()
            self.said += line
            if not line:
                raise AssertionError(f"it ended with {await self.process.wait()}:\n{self.said}")
            if found := re.search(r"llm=127\.0\.0\.1:(\d+)", line):
                return f"http://127.0.0.1:{found[1]}"

    async def end(self) -> int:
        assert self.process.stderr is not None
        self.said += (await self.process.stderr.read()).decode()
        return await self.process.wait()


@contextlib.asynccontextmanager
async def program(
    tmp_path, presets: list[PresetText] | None = None, command: tuple[str, ...] = GATE, **env: str
) -> AsyncIterator[Program]:
    write(tmp_path, presets or [])
    (tmp_path / "presets").mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLMC_", "TURNSTILE_", "LISTEN_"))}
    environment |= {
        "LISTEN_OLLAMA": "127.0.0.1:0",
        "LISTEN_COMFY": "off",
        "OLLAMA_URL": "off",
        "COMFY_URL": "off",
        "TURNSTILE_GPU": "none",
        "TURNSTILE_SIM_CARD": str(tmp_path / "card.json"),
        "NO_COLOR": "1",
        **env,
    }
    process = await asyncio.create_subprocess_exec(
        *(*command, "--presets", str(tmp_path / "presets"), "--state-dir", str(tmp_path / "state")),
        env=environment,
        cwd=tmp_path,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def chat(model: str, **more) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@run_async
async def test_ctrl_c_stops_what_it_started_and_leaves_no_child_behind(tmp_path):
    async with program(tmp_path, [llama("a")]) as p, httpx.AsyncClient(trust_env=False, timeout=20) as http:
        gate = await p.until_listening()
        assert (await http.post(f"{gate}/v1/chat/completions", json=chat("a"))).status_code == 200
        engines = children(p.process.pid)
        assert engines
        p.process.send_signal(signal.SIGINT)
        assert await p.end() == 0
        assert not [e for e in engines if e.is_running()]


@run_async
async def test_open_requests_may_finish_within_the_limit(tmp_path):
    async with program(tmp_path, [llama("a")], SHUTDOWN_TIMEOUT="10s") as p:
        gate = await p.until_listening()
        async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
            body = chat("a", stream=True) | {"max_tokens": 60}
            async with http.stream("POST", f"{gate}/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                p.process.send_signal(signal.SIGTERM)
                rest = [line async for line in lines]
        assert "data: [DONE]" in rest
        assert await p.end() == 0


@run_async
async def test_a_second_ctrl_c_does_not_wait_for_anybody(tmp_path):
    async with program(tmp_path, [llama("a")], SHUTDOWN_TIMEOUT="10m") as p:
        gate = await p.until_listening()
        async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
            body = chat("a", stream=True) | {"max_tokens": 100_000}
            async with http.stream("POST", f"{gate}/v1/chat/completions", json=body) as answer:
                await anext(answer.aiter_lines())
                engines = children(p.process.pid)
                p.process.send_signal(signal.SIGINT)
                await until(lambda: not _listening(gate))
                p.process.send_signal(signal.SIGINT)
                assert await p.end() == 0
        assert not [e for e in engines if e.is_running()]


def _listening(gate: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(gate.rsplit(":", 1)[1]))) == 0


@run_async
async def test_a_port_in_use_is_one_line_and_exit_code_2(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with program(tmp_path, LISTEN_OLLAMA=f"127.0.0.1:{taken.getsockname()[1]}") as p:
            assert await p.end() == 2
    (line,) = [line for line in p.said.splitlines() if "LISTEN_OLLAMA" in line]
    assert "in use" in line
    assert "Traceback" not in p.said


@run_async
async def test_a_bad_preset_is_one_line_with_file_and_key_and_exit_code_2(tmp_path):
    async with program(tmp_path, [PresetText("a", llama("a").text + "contxt = 4096\n")]) as p:
        assert await p.end() == 2
    (line,) = p.said.strip().splitlines()
    assert "a.toml" in line
    assert 'did you mean "context"' in line


@run_async
async def test_bad_toml_is_one_line_and_exit_code_2(tmp_path):
    async with program(tmp_path, [PresetText("a", "engine = [")]) as p:
        assert await p.end() == 2
    (line,) = p.said.strip().splitlines()
    assert "a.toml" in line


@run_async
async def test_a_bad_setting_is_one_line_and_exit_code_2(tmp_path):
    async with program(tmp_path, UNLOAD_TIMEOUT="soon") as p:
        assert await p.end() == 2
    (line,) = p.said.strip().splitlines()
    assert "UNLOAD_TIMEOUT" in line
    assert "soon" in line


@run_async
async def test_two_gates_on_one_state_folder_are_refused(tmp_path):
    async with program(tmp_path) as first:
        await first.until_listening()
        async with program(tmp_path) as second:
            assert await second.end() == 2
    assert "another gate is running" in second.said


@run_async
async def test_a_full_collection_has_next_to_nothing_to_look_through(tmp_path):
    """Over all that Python and the libraries keep it takes 0.1 to 0.2 s, in which no stream moves."""
    async with program(tmp_path, [llama("a")], (sys.executable, "-c", COUNTED, "serve")) as p:
        assert p.process.stderr is not None
        while (line := (await p.process.stderr.readline()).decode()) and not line.startswith("objects "):
            p.said += line
        assert 0 < int(line.removeprefix("objects ") or 0) < 5_000, p.said
        p.process.send_signal(signal.SIGTERM)
        assert await p.end() == 0


@run_async
async def test_a_gate_open_to_the_network_without_keys_warns(tmp_path):
    async with program(tmp_path, LISTEN_OLLAMA="127.0.0.1:0", LISTEN_COMFY="0.0.0.0:0") as p:
        await p.until_listening()
        assert "reachable from other machines" in p.said
        p.process.send_signal(signal.SIGTERM)
        assert await p.end() == 0
