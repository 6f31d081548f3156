"""Two agents on two presets share one card: how far each gets, in the plain order and in the gate's own.

    python bench/agents.py             # two minutes each way
    python bench/agents.py --check     # exit code 1 if the own order does not get RATIO times as far
    python bench/agents.py --update    # also rewrites AGENTS.md

Two real llama.cpp servers (tools/llama_server.py) with small random models, each the only one that its agent wants.
An agent's session is long, and its next step is what it got before and a little more; between two steps it thinks.
`plain` is arrival order, and an engine's contexts end with it, as in the swap document; `own` are the gate's defaults.
Steps are counted when their whole answer is there; a wait is the time from the request to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gpu_turnstile import logs
from gpu_turnstile.app import App
from gpu_turnstile.core.policy import Order
from gpu_turnstile.presets.values import Address
from gpu_turnstile.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
RATIO = 2.0  # steps, own order against plain
SESSION = 500  # words of about four tokens each
TOKENS = 16  # of one answer
THINK = 0.5  # seconds between two steps
RESULTS = ROOT / "bench" / "AGENTS.md"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"turnstile_policy": Order.ARRIVAL, "llmc_context_save": False},
    "own": {},
}


@dataclass
class Way:
    """What became of one way of sharing the card. Waits in seconds, of every step."""

    name: str
    steps: dict[str, int] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    swaps: int = 0

    def p(self, share: float) -> float:
        ordered = sorted(self.waits)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def preset(model: Path) -> str:
    command = json.dumps([sys.executable, str(ROOT / "tools" / "llama_server.py")])
    return (
        f'engine = "llama-server"\n[model]\npath = {json.dumps(str(model))}\n'
        f'[runtime]\nkind = "process"\ncommand = {command}\nargs = ["-t", "1", "-tb", "1"]\n'
        "context = 8192\nparallel = 1\n"
    )


async def step(http: httpx.AsyncClient, url: str, model: str, prompt: str) -> tuple[float, str]:
    """Seconds to the first token, and what came."""
    body = {"model": model, "stream": True, "max_tokens": TOKENS, "temperature": 0, "prompt": prompt}
    began, first, text = time.monotonic(), 0.0, ""
    headers = {"X-Turnstile-Client": f"agent-{model}"}
    async with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic() - began
                text += json.loads(line[6:])["choices"][0]["text"]
    return first, text


async def agent(way: Way, http: httpx.AsyncClient, url: str, model: str, until: float) -> None:
    prompt = " ".join(f"{model}{number}" for number in range(SESSION))
    while time.monotonic() < until:
        waited, text = await step(http, url, model, prompt)
        prompt += f"{text} and now?"
        way.waits.append(waited)
        if time.monotonic() < until:
            way.steps[model] = way.steps.get(model, 0) + 1
        await asyncio.sleep(THINK)


async def share(name: str, place: Path, seconds: float) -> Way:
    settings = Settings(
        listen_ollama=Address("127.0.0.1", 0),
        listen_comfy=None,
        ollama_url=None,
        comfy_url=None,
        turnstile_gpu="none",
        **WAYS[name],
    )
    way = Way(name)
    app = App(settings, place / "presets", place / f"state-{name}")
    await app.start()
    try:
        app.arbiter.watch(lambda kind, fields: setattr(way, "swaps", way.swaps + (kind == "swapped")))
        url, until = f"http://127.0.0.1:{app.port('llm')}", time.monotonic() + seconds
        async with httpx.AsyncClient(trust_env=False, timeout=600) as http:
            await asyncio.gather(*(agent(way, http, url, model, until) for model in ("one", "two")))
    finally:
        await app.stop()
    return way


async def measure(seconds: float) -> list[Way]:
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        place = Path(folder)
        (place / "presets").mkdir()
        for seed, name in enumerate(("one", "two")):
            model = place / f"{name}.gguf"
            size = ["--embd", "512", "--layers", "8", "--ff", "2048", "--seed", str(seed)]
            make = [sys.executable, ROOT / "tools" / "make_tiny_gguf.py", model, *size]
            await asyncio.to_thread(subprocess.run, make, check=True)
            (place / "presets" / f"{name}.toml").write_text(preset(model))
        return [await share(name, place, seconds) for name in WAYS]


def table(ways: list[Way]) -> str:
    lines = [
        "| order | steps | of each agent | swaps | wait p50, s | p95, s | longest, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in ways:
        each = ", ".join(str(count) for _, count in sorted(way.steps.items()))
        lines.append(
            f"| {way.name} | {sum(way.steps.values())} | {each} | {way.swaps} | {way.p(0.5):.2f} | {way.p(0.95):.2f} | "
            f"{max(way.waits):.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="of each way (default 120)")
    parser.add_argument(
        "--check", action="store_true", help=f"fail below {RATIO:g} times the steps, or if p95 is worse"
    )
    parser.add_argument("--update", action="store_true", help=f"rewrite {RESULTS.name}")
    given = parser.parse_args()
    logs.configure("error", "text", None, color=False)
    ways = uvloop.run(measure(given.seconds))
    text = table(ways)
    print(text)
    if given.update:
        introduction = (
            "# Two agents, two presets, one card\n\n`make bench-agents`: two real llama.cpp servers with random models "
            f"of 127 MB on the CPU, one thread each,\nsessions that begin at about {4 * SESSION} tokens, "
            f"{given.seconds:g} s each way.\n\n"
        )
        RESULTS.write_text(introduction + text + "\n")
    plain, own = ways
    ratio = sum(own.steps.values()) / max(1, sum(plain.steps.values()))
    print(f"{ratio:.2f} times the steps")
    if given.check and (ratio < RATIO or own.p(0.95) > plain.p(0.95)):
        print("the gate's own order misses its limit", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
