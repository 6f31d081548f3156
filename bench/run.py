"""Measure the gate beside a Go reverse proxy, and nginx where it is installed, in one run.

    python bench/run.py [--quick] [--rounds 3] [--json FILE] [--update] [--check] [--gate COMMAND]

All proxies stand in front of the same fake engine under the same load. In each round and for each measure they
take turns there and back (A B C C B A), so that a machine that gets slower meanwhile is slower for all. The load
generators check every answer; one wrong answer ends the run.

Exit code: 0; 1 if `--check` found a missed limit; 2 if something broke.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import parts
import report
from parts import BenchError, Part

RESULTS = parts.HERE / "RESULTS.md"
CONNECTIONS = 16
RATE = 500  # requests per second, for latency
STREAMS = 64
CHUNK_US = 8000  # 125 tokens per second
IDLE = 1000  # connections


@dataclass(frozen=True)
class Size:
    """How long one turn of one proxy is; each measure gives it two turns per round."""

    post_s: float
    paced_s: float
    chunks: int


FULL = Size(post_s=2, paced_s=1, chunks=200)
QUICK = Size(post_s=0.5, paced_s=0.3, chunks=60)


class Bench:
    """One run: started parts and what was measured of them."""

    def __init__(self, engine: Part, proxies: list[Part], size: Size) -> None:
        self.engine = engine
        self.proxies = proxies
        self.size = size
        self.rounds: report.Rounds = {}

    def memory(self) -> None:
        """Before any heavy load: memory that a process once had hides what connections take."""
        for part in self.proxies:
            parts.load(part, "post", "", str(CONNECTIONS), "0.3")
            before = part.rss()
            with parts.held(part, IDLE):
                self.note("idle_kb", part, (part.rss() - before) / 1024 / IDLE)

    def one_round(self) -> None:
        self.in_turns(self.requests, self.proxies)
        latency = self.in_turns(self.latency, [self.engine, *self.proxies])
        for part in self.proxies:
            for measure in ("p50", "p99"):
                self.note(f"added_{measure}", part, latency[part][measure] - latency[self.engine][measure])
        self.in_turns(self.streams, [self.engine, *self.proxies])

    def in_turns(self, turn: Callable[[Part], dict[str, float]], each: list[Part]) -> dict[Part, dict[str, float]]:
        """Two turns for each part, there and back; their mean is noted."""
        first = {part: turn(part) for part in each}
        second = {part: turn(part) for part in reversed(each)}
        means = {part: {m: (value + second[part][m]) / 2 for m, value in first[part].items()} for part in each}
        for part in each:
            for measure in report.MEASURES.keys() & means[part].keys():
                self.note(measure, part, means[part][measure])
        return means

    def note(self, measure: str, part: Part, value: float) -> None:
        name = "direct" if part is self.engine else part.name
        self.rounds.setdefault(measure, {}).setdefault(name, []).append(value)

    def requests(self, part: Part) -> dict[str, float]:
        before = part.cpu()
        got = parts.load(part, "post", "", str(CONNECTIONS), str(self.size.post_s))
        return {
            "cpu_request": (part.cpu() - before) / got["requests"] * 1e6,
            "requests_per_s": got["per_s"],
        }

    def latency(self, part: Part) -> dict[str, float]:
        got = parts.load(part, "post", "", str(CONNECTIONS), str(self.size.paced_s), str(RATE))
        return {"p50": got["p50_us"], "p99": got["p99_us"]}

    def streams(self, part: Part) -> dict[str, float]:
        before = part.cpu()
        got = parts.load(part, "streams", f"?n={self.size.chunks}&us={CHUNK_US}", str(STREAMS))
        found = {"chunk_p50": got["p50_us"], "chunk_p99": got["p99_us"]}
        if part is not self.engine:
            found["cpu_chunk"] = (part.cpu() - before) / got["chunks"] * 1e6
        return found


def measure(options: argparse.Namespace, nginx: str | None) -> report.Rounds:
    with ExitStack() as stack:
        workdir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        engine = stack.enter_context(parts.engine())
        proxies = [
            stack.enter_context(parts.gate(engine, options.gate, workdir)),
            stack.enter_context(parts.go_proxy(engine)),
        ]
        if not options.quick:
            proxies.append(stack.enter_context(parts.go_proxy(engine, pool=True)))
        if nginx:
            proxies.append(stack.enter_context(parts.nginx(engine, nginx, workdir)))
        bench = Bench(engine, proxies, QUICK if options.quick else FULL)
        bench.memory()
        for number in range(1, options.rounds + 1):
            print(f"bench: round {number} of {options.rounds} …", file=sys.stderr, flush=True)
            bench.one_round()
        return bench.rounds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the gate beside a Go reverse proxy and nginx.")
    parser.add_argument("--quick", action="store_true", help="short turns: rough figures in half a minute")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each proxy (default 3)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write everything as JSON")
    parser.add_argument("--update", action="store_true", help=f"rewrite {RESULTS.name}")
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is missed")
    parser.add_argument(
        "--gate",
        metavar="COMMAND",
        help="measure this instead of `turnstile serve`; {listen} and {engine} in it stand for the addresses",
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    nginx = parts.find_nginx()
    try:
        parts.build_ref()
        about = report.environment(nginx)
        rounds = measure(options, nginx)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    verdicts = report.check(rounds)
    if options.gate:
        about["gate"] = "another command (--gate)"
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    print(f"\n{report.text(report.table(rounds))}\n")
    print("\n".join(report.round_lines(rounds)))
    print("\n" + "\n".join(line for _, line in verdicts))
    if nginx is None:
        print("nginx is not installed: not measured")
    if options.json:
        options.json.write_text(json.dumps({"about": about, "rounds": rounds}, indent=1, ensure_ascii=False) + "\n")
    if options.update:
        how = f"{'Quick' if options.quick else 'Full'} run, rounds: {options.rounds}, the proxies in turns."
        RESULTS.write_text(report.results_file(rounds, about, how))
    return 1 if options.check and not all(kept for kept, _ in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
