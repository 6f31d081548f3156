"""What the gate adds to a hand-over: from the moment the memory is free to the arrival of the next request.

    python bench/handover.py            # 200 hand-overs, half in each direction
    python bench/handover.py --check    # exit code 1 if p99 is above LIMIT_MS

A whole gate stands in front of a simulated Ollama and ComfyUI that share a simulated card. Their memory comes back
some time after they said that they let go, as with a real driver, so that it is the last thing to happen. "Free" is
the card's own event; "arrived" is the engine's own log, both on one clock. What an engine itself needs, to stop or to
load, is in neither.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gpu_turnstile.app import App
from gpu_turnstile.presets.values import Address
from gpu_turnstile.settings import Settings
from gpu_turnstile.sim import ComfySim, OllamaSim, SimCard, SimModel, serve

LIMIT_MS = 25.0
GRAPH = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 1}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "t"}},
}
LATE = (0.06, 0.14)  # seconds between an engine's word and its memory; no whole number of polls


@dataclass
class Bench:
    app: App
    card: SimCard
    ollama: OllamaSim
    comfy: ComfySim
    http: httpx.AsyncClient
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    to_image: list[float] = field(default_factory=list)
    to_chat: list[float] = field(default_factory=list)

    async def chat(self) -> None:
        """Ask while an image job holds the card."""
        self.comfy.faults.free_late_s = self.dice.uniform(*LATE)
        body = {"model": "m", "stream": False, "messages": [{"role": "user", "content": "hi"}]}
        answer = await self.http.post(f"http://127.0.0.1:{self.app.port('llm')}/api/chat", json=body)
        answer.raise_for_status()
        self.to_chat.append(self._added("comfyui", self.ollama, "/api/chat"))

    async def image(self) -> None:
        """Ask while a model is on the card. The answer comes when the job has been queued."""
        self.ollama.faults.memory_late_s = self.dice.uniform(*LATE)
        answer = await self.http.post(f"http://127.0.0.1:{self.app.port('comfyui')}/prompt", json={"prompt": GRAPH})
        answer.raise_for_status()
        self.to_image.append(self._added("ollama", self.comfy, "/prompt"))

    def _added(self, leaver: str, sim: OllamaSim | ComfySim, path: str) -> float:
        """Milliseconds from the last memory that `leaver` gave back to the last request that reached `sim`."""
        freed = [e for e in self.card.events() if e.name == leaver and (e.what == "back" or e.bytes < 1 << 30)]
        arrived = [entry for entry in sim.log if entry.path == path]
        return (arrived[-1].time - freed[-1].time) * 1000


async def measure(count: int) -> Bench:
    """`count` hand-overs in all."""
    with tempfile.TemporaryDirectory(prefix="handover-") as folder:
        place = Path(folder)
        card = SimCard(place / "card.json")
        ollama = OllamaSim([SimModel("m", 8.0)], card=card, load_s=0.0, tokens_per_s=0)
        comfy = ComfySim(card=card, job_s=0.01)
        async with serve(ollama) as ollama_url, serve(comfy) as comfy_url:
            settings = Settings(
                listen_ollama=Address("127.0.0.1", 0),
                listen_comfy=Address("127.0.0.1", 0),
                ollama_url=ollama_url,
                comfy_url=comfy_url,
                turnstile_gpu=f"sim:{place / 'card.json'}",
                unload_poll_interval=0.01,
                history_poll_interval=0.01,
                shutdown_timeout=0.1,
            )
            (place / "presets").mkdir()
            app = App(settings, place / "presets", place / "state")
            await app.start()
            try:
                async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30) as http:
                    bench = Bench(app, card, ollama, comfy, http)
                    await bench.http.post(f"http://127.0.0.1:{app.port('llm')}/api/chat", json={"model": "m"})
                    for _ in range(count // 2):
                        await bench.image()
                        await bench.chat()
            finally:
                await app.stop()
            if card.alarms():
                raise SystemExit(f"two engines held the card: {card.alarms()[0].detail}")
    return bench


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def row(name: str, values: list[float]) -> str:
    middle, high = percentile(values, 0.5), percentile(values, 0.99)
    numbers = (min(values), middle, statistics.fmean(values), high, max(values))
    return f"{name:18} {len(values):5} " + " ".join(f"{number:8.1f}" for number in numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="hand-overs in all")
    parser.add_argument("--check", action="store_true", help=f"fail if p99 is above {LIMIT_MS:g} ms")
    given = parser.parse_args()
    began = time.monotonic()
    bench = uvloop.run(measure(max(2, given.count)))
    both = bench.to_image + bench.to_chat
    print(f"{'ms':18} {'count':>5} {'min':>8} {'p50':>8} {'mean':>8} {'p99':>8} {'max':>8}")
    print(row("chat to image", bench.to_image))
    print(row("image to chat", bench.to_chat))
    print(row("both", both))
    print(f"{len(both)} hand-overs in {time.monotonic() - began:.1f} s")
    worst = percentile(both, 0.99)
    if given.check and worst > LIMIT_MS:
        print(f"p99 is {worst:.1f} ms, {LIMIT_MS:g} ms are allowed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
