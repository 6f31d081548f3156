"""What a request costs in memory while it waits for the card, and a connection while it is idle.

    python bench/waiting.py [--requests 1000] [--check]

A ComfyUI that never answers holds the card; then so many chats wait. Everything is on loopback. Prints the gate's
resident memory per waiting request beyond its body; `--check` exits 1 above the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path

import psutil

LIMIT_KB = 40.0
BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"x" * 540)


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An Ollama that holds nothing, and a ComfyUI whose /prompt never answers."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        await answer(reader, writer)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await reader.readuntil(b"\r\n\r\n"):
        if head.startswith(b"POST /prompt"):
            await asyncio.Event().wait()
        body = b'{"models":[],"queue_running":[],"queue_pending":[],"version":"0"}'
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )


def post(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def status(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


async def until_queued(port: int, wanted: int) -> None:
    for _ in range(600):
        found = re.search(r"^gpu_turnstile_queue_length (\d+)", await status(port), re.MULTILINE)
        if found and int(found[1]) >= wanted:
            return
        await asyncio.sleep(0.05)
    raise SystemExit(f"the requests did not queue up:\n{await status(port)}")


async def main(requests: int, check: bool) -> int:
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "LISTEN_OLLAMA": "127.0.0.1:0",
            "LISTEN_COMFY": "127.0.0.1:0",
            "OLLAMA_URL": url,
            "COMFY_URL": url,
            "TURNSTILE_GPU": "none",
            "TURNSTILE_BYPASS_POLL": "0",
            "TURNSTILE_KEEPALIVE_INTERVAL": "0",
        }
        command = [sys.executable, "-m", "gpu_turnstile", "serve", "--presets", folder, "--state-dir", folder]
        gate = await asyncio.create_subprocess_exec(
            *command, env=os.environ | settings, stderr=asyncio.subprocess.PIPE, cwd=Path(folder)
        )
        try:
            return await measure(gate, requests, check)
        finally:
            gate.kill()
            await gate.wait()


async def measure(gate: asyncio.subprocess.Process, requests: int, check: bool) -> int:
    assert gate.stderr is not None
    while b"listening" not in (line := await gate.stderr.readline()):
        if not line:
            raise SystemExit("the gate did not start")
    main_port = int(re.search(rb"llm=127\.0\.0\.1:(\d+)", line)[1])  # type: ignore[index]
    comfy_port = int(re.search(rb"comfyui=127\.0\.0\.1:(\d+)", line)[1])  # type: ignore[index]
    memory = psutil.Process(gate.pid).memory_info
    _, holder = await asyncio.open_connection("127.0.0.1", comfy_port)
    holder.write(post("/prompt", b"{}"))
    warm = [await asyncio.open_connection("127.0.0.1", main_port) for _ in range(50)]
    for _, writer in warm:
        writer.write(post("/api/chat", BODY))
    await until_queued(main_port, 50)
    before = memory().rss
    clients = [await asyncio.open_connection("127.0.0.1", main_port) for _ in range(requests)]
    for _, writer in clients:
        writer.write(post("/api/chat", BODY))
    await until_queued(main_port, requests + 50)
    each = (memory().rss - before) / requests / 1000 - len(BODY) / 1000
    print(f"memory per waiting request beyond its body: {each:.1f} kB (limit {LIMIT_KB:.0f}), {requests} requests")
    return int(check and each > LIMIT_KB)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    sys.exit(asyncio.run(main(options.requests, options.check)))
