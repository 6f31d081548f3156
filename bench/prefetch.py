"""What reading ahead saves: how long a real llama.cpp server loads with its file on disk, read ahead, or in the cache.

    python bench/prefetch.py [--model FILE.gguf] [--rounds 7]

Cold: the kernel is told to drop the file's pages, and it is made sure that it did. Read ahead: dropped, then read by
the gate's own prefetcher until it is done; its time is what a drain hides. Warm: as the load before left it. The three
take turns. Loading is from the start of the process to a good /health; the model is the one of `tools/real_model.py`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from swap import free_port, until_healthy

from gpu_turnstile import logs
from gpu_turnstile.prefetch import Prefetcher

TOOLS = Path(__file__).resolve().parents[1] / "tools"
GIVE_UP = 300.0  # seconds


def load(model: Path) -> float:
    """Seconds from the start of a server to its readiness."""
    port = free_port()
    command = [sys.executable, str(TOOLS / "llama_server.py"), "-m", str(model), "-c", "2048", "--port", str(port)]
    null = subprocess.DEVNULL
    began = time.monotonic()
    server = subprocess.Popen([*command, "--host", "127.0.0.1"], stdin=null, stdout=null, stderr=null)
    try:
        with httpx.Client(trust_env=False, timeout=GIVE_UP) as http:
            until_healthy(http, f"http://127.0.0.1:{port}", began + GIVE_UP)
        return time.monotonic() - began
    finally:
        server.kill()
        server.wait()


def drop(model: Path) -> None:
    """Take the file out of the page cache. SystemExit if the kernel keeps it."""
    file = os.open(model, os.O_RDONLY)
    try:
        os.fsync(file)  # what is not written yet cannot be dropped
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached(file, model.stat().st_size) > 0.01:
            raise SystemExit(f"{model} cannot be taken out of the page cache: somebody has it mapped, or it is a tmpfs")
    finally:
        os.close(file)


def cached(file: int, size: int) -> float:
    """The share of its pages that can be read without waiting for the disk, by a look at a thousand of them."""
    page, looks, found = bytearray(1), 1000, 0
    for look in range(looks):
        try:
            found += os.preadv(file, [page], size * look // looks, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
    return found / looks


def read_ahead(model: Path) -> float:
    """Seconds the prefetcher took."""
    prefetcher = Prefetcher()
    began = time.monotonic()
    prefetcher.begin([model])
    if not prefetcher.wait(GIVE_UP) or prefetcher.progress.left:
        raise SystemExit(f"{model} was not read ahead: {prefetcher.progress}")
    return time.monotonic() - began


def row(name: str, seconds: list[float]) -> str:
    return f"{name:22} " + " ".join(f"{f(seconds):8.2f}" for f in (min, statistics.median, max))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file on a real disk")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if given.model is None:
        found = subprocess.run([sys.executable, TOOLS / "real_model.py"], check=True, capture_output=True, text=True)
        given.model = Path(found.stdout.strip())
    logs.configure("warn", "text", None, color=False)
    load(given.model)  # the program itself is read once
    times: dict[str, list[float]] = {name: [] for name in ("cold", "read ahead", "warm", "(reading ahead)")}
    for _ in range(given.rounds):
        drop(given.model)
        times["cold"].append(load(given.model))
        drop(given.model)
        times["(reading ahead)"].append(read_ahead(given.model))
        times["read ahead"].append(load(given.model))
        times["warm"].append(load(given.model))
    print(f"{given.model.name}, {given.model.stat().st_size / 1e6:.0f} MB, {given.rounds} rounds")
    print(f"{'seconds':22} {'min':>8} {'p50':>8} {'max':>8}")
    print("\n".join(row(name, seconds) for name, seconds in times.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
