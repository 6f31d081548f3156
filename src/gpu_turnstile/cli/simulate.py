"""`turnstile simulate`: a workload under several orders, side by side. Needs no gate and no card."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from gpu_turnstile.cli import places, show
from gpu_turnstile.cli.say import WRONG, clean, fail
from gpu_turnstile.core.policy import Rules
from gpu_turnstile.journal.schema import FILE_NAME
from gpu_turnstile.presets.errors import PresetError
from gpu_turnstile.simulate import bound, file, recorded
from gpu_turnstile.simulate.compare import compare
from gpu_turnstile.simulate.outcome import Outcome, quantile
from gpu_turnstile.simulate.plot import timeline
from gpu_turnstile.simulate.workload import Workload

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line says. `hours`: of simulated time, or of history to look back."""

    workload: Path | None
    history: bool
    state_dir: Path | None
    hours: float | None
    seed: int | None
    policies: tuple[str, ...]
    contexts: tuple[str, ...]
    max_wait: float
    context: float
    plot: Path | None
    bound: bool
    as_json: bool


def simulate(wish: Wish) -> None:
    workload = _workload(wish)
    outcomes = compare(workload, wish.policies, wish.contexts, Rules(max_wait=wish.max_wait))
    least = {id(outcome): _least(workload, outcome) for outcome in outcomes} if wish.bound else {}
    if wish.plot is not None:
        try:
            wish.plot.write_text(timeline(outcomes), encoding="utf-8")
        except OSError as problem:
            fail(f"{wish.plot}: cannot be written: {problem.strerror}", WRONG)
    if wish.as_json:
        typer.echo(json.dumps([_told(outcome, least.get(id(outcome))) for outcome in outcomes], indent=2))
        return
    out = show.console()
    for note in workload.notes:
        typer.echo(note, err=True)
    out.print(
        Text(f"{clean(workload.name)}: {show.ago(workload.seconds)}, {len(workload.clients)} clients; waits in seconds")
    )
    out.print(show.table(_COLUMNS, [_row(outcome) for outcome in outcomes]))
    for outcome in outcomes:
        out.print(Text(f"\n{outcome.policy}, contexts {outcome.context}", style="bold"))
        out.print(show.table(("CLIENT", "PRESET", "DONE", "CUT", "WAIT 50 %", "95 %", "MOST"), _clients(outcome)))
        if id(outcome) in least:
            waited = sum(outcome.waits)
            out.print(Text(f"waited {waited:.0f} s in all; the best order there is: {least[id(outcome)]:.0f} s"))
    if wish.plot is not None:
        out.print(Text(f"\n{wish.plot}: the timeline"))


def _workload(wish: Wish) -> Workload:
    try:
        if wish.history:
            now = time.time()
            folder = places.state_dir(wish.state_dir)
            hours = 24.0 if wish.hours is None else wish.hours
            return recorded.load(folder / FILE_NAME, now - hours * HOUR, now, wish.context)
        workload = file.war() if wish.workload is None else file.load(wish.workload)
    except (PresetError, recorded.NoHistory) as problem:
        fail(str(problem), WRONG)
    seconds = workload.seconds if wish.hours is None else wish.hours * HOUR
    return replace(workload, seconds=seconds, seed=workload.seed if wish.seed is None else wish.seed)


def _least(workload: Workload, outcome: Outcome) -> float:
    """For the requests that were answered, as they came in that run."""
    try:
        return bound.least_wait(workload, bound.trace(workload, outcome))
    except bound.TooLong as problem:
        fail(f"--bound: {problem}; make --hours smaller", WRONG)


_COLUMNS = ("POLICY", "CONTEXTS", "STEPS", "DONE", "SWAPS", "SWAPPING", "PREFILL", "50 %", "95 %", "MOST")


def _row(outcome: Outcome) -> tuple[object, ...]:
    return (
        outcome.policy,
        outcome.context,
        outcome.steps,
        outcome.done,
        outcome.swaps,
        f"{outcome.swapping:.0f}",
        f"{outcome.prefill:.0f}",
        *_waits(outcome.waits),
    )


def _waits(waits: list[float]) -> tuple[str, str, str]:
    return f"{quantile(waits, 0.5):.0f}", f"{quantile(waits, 0.95):.0f}", f"{max(waits, default=0.0):.0f}"


def _clients(outcome: Outcome) -> Iterable[tuple[object, ...]]:
    for name, client in outcome.clients.items():
        yield (name, client.preset, client.done, client.cut, *_waits(client.waits))


def _told(outcome: Outcome, least: float | None) -> dict[str, Any]:
    """For programs; seconds."""
    told: dict[str, Any] = {
        "policy": outcome.policy,
        "contexts": outcome.context,
        "steps": outcome.steps,
        "done": outcome.done,
        "cut": outcome.cut,
        "swaps": outcome.swaps,
        "swapping_s": round(outcome.swapping, 3),
        "prefill_s": round(outcome.prefill, 3),
        "wait_s": _quantiles(outcome.waits),
        "clients": {},
    }
    for name, client in outcome.clients.items():
        found = {key: value for key, value in asdict(client).items() if key != "waits"}
        told["clients"][name] = found | {"wait_s": _quantiles(client.waits)}
    return told if least is None else told | {"least_wait_s": round(least, 3), "waited_s": round(sum(outcome.waits), 3)}


def _quantiles(waits: list[float]) -> dict[str, float]:
    parts = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: round(quantile(waits, part), 3) for name, part in parts.items()}
