"""What the numbers say: medians, ratios, the limits they must keep, and the file that records them.

A ratio is taken within each round, where both were measured at nearly the same time; the median of them is quoted.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import parts

# measure -> part -> one value per round
Rounds = dict[str, dict[str, list[float]]]

MEASURES = {
    "cpu_request": "CPU per request, µs",
    "cpu_chunk": "CPU per streamed chunk, µs",
    "requests_per_s": "requests per second",
    "added_p50": "added latency p50, µs",
    "added_p99": "added latency p99, µs",
    "chunk_p50": "chunk delay p50, µs",
    "chunk_p99": "chunk delay p99, µs",
    "idle_kb": "memory per idle connection, kB",
}


BESIDE = ("go", "go+pool", "nginx")  # what the gate is compared with


@dataclass(frozen=True)
class Limit:
    """The most the gate's `measure` may be: a ratio to another part's, or the figure itself if `beside` is None."""

    measure: str
    beside: str | None
    most: float


LIMITS = (
    Limit("cpu_request", "go", 0.85),
    Limit("cpu_chunk", "go", 0.90),
    Limit("chunk_p99", "go", 2.00),
    Limit("cpu_chunk", "nginx", 1.50),
    Limit("idle_kb", None, 12.0),
)


def ratio(rounds: Rounds, measure: str, part: str, beside: str) -> float | None:
    """The median over the rounds of one part's figure by another's; None where it cannot be told."""
    values = rounds.get(measure, {})
    pairs = list(zip(values.get(part, []), values.get(beside, []), strict=False))
    if not pairs or any(b <= 0 for _, b in pairs):
        return None
    return median(a / b for a, b in pairs)


def check(rounds: Rounds) -> list[tuple[bool, str]]:
    """Each limit that can be judged from these figures: kept or not, and a line that says so."""
    lines = []
    for limit in LIMITS:
        if limit.beside is None:
            values = rounds.get(limit.measure, {}).get("gate", [])
            found = median(values) if values else None
        else:
            found = ratio(rounds, limit.measure, "gate", limit.beside)
        if found is None:
            continue
        kept = found <= limit.most
        what = MEASURES[limit.measure] + (f", gate / {limit.beside}" if limit.beside else "")
        lines.append((kept, f"{'kept  ' if kept else 'MISSED'} {what}: {found:.2f} (limit {limit.most:.2f})"))
    return lines


def table(rounds: Rounds) -> list[list[str]]:
    """Header and rows: the median of each measure for each part, then the gate's ratios."""
    names = [n for n in ("gate", *BESIDE, "direct") if any(n in by for by in rounds.values())]
    others = [n for n in BESIDE if n in names]
    rows = [["median", *names, *(f"gate / {n}" for n in others)]]
    for measure, title in MEASURES.items():
        by = rounds.get(measure, {})
        if not by:
            continue
        ratios = [ratio(rounds, measure, "gate", n) for n in others]
        rows.append(
            [title]
            + [_number(median(by[n])) if n in by else "" for n in names]
            + ["" if r is None else f"{r:.2f}" for r in ratios]
        )
    return rows


def round_lines(rounds: Rounds) -> list[str]:
    """Every round of every measure, so that nobody has to believe a median."""
    return [
        f"{title}: " + " · ".join(f"{name} {' '.join(map(_number, values))}" for name, values in by.items())
        for measure, title in MEASURES.items()
        if (by := rounds.get(measure))
    ]


def text(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" + "|--:" * (len(rows[0]) - 1) + "|")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def environment(nginx: str | None) -> dict[str, str]:
    """What was measured, on what."""
    versions = {"Python": platform.python_version()}
    for package in ("gpu-turnstile", "uvloop", "httptools", "msgspec"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    go = _said([str(parts.GO), "version"])
    versions["Go"] = go.split()[2].removeprefix("go") if go else "unknown"
    if nginx:
        versions["nginx"] = _said([nginx, "-v"]).rpartition("/")[2].split()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "load average before": f"{os.getloadavg()[0]:.1f}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _said(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=parts.go_environment(), timeout=20)
    except OSError:
        return ""
    return (done.stdout + done.stderr).strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def results_file(rounds: Rounds, about: dict[str, str], how: str) -> str:
    """The text of RESULTS.md."""
    facts = "\n".join(f"| {name} | {value} |" for name, value in about.items())
    limits = "\n".join(f"- {line}" for _, line in check(rounds))
    every = "\n".join(f"- {line}" for line in round_lines(rounds))
    return f"""# What the gate costs

Written by `python bench/run.py --update`. {how}

| | |
|---|---|
{facts}

{markdown(table(rounds))}

- **CPU** is user and system time of the proxy's processes: 16 kept connections that ask as fast as they are
  answered (a POST with a body of about 600 bytes), and 64 streams of 125 chunks per second.
- **Added latency** is at a steady 500 requests per second, minus the same without a proxy. **Chunk delay** is from
  the engine's write to the client's read; *direct* is without a proxy.
- **go** is `bench/ref/proxy.go`: `httputil.ReverseProxy` that reads the model and counts requests, as a gate must;
  **go+pool** is the same with its `BufferPool` set, which the library leaves unset. **nginx** (one worker,
  buffering off) only relays. Go may use all cores.
- A ratio is the median of the rounds' ratios. Microseconds of one machine say little about another; ratios travel
  better. The same program measured against itself came out within 7% (full run) and 20% (quick run) on a busy
  machine with two cores.

Limits (`--check`):

{limits}

All rounds:

{every}
"""
