"""`turnstile context`: what is saved of conversations, and removing it."""

from __future__ import annotations

import json

import typer

from gpu_turnstile.cli import show
from gpu_turnstile.cli.gate import Gate

_UNITS = ("B", "kB", "MB", "GB", "TB")


def list_contexts(url: str | None, as_json: bool) -> None:
    with Gate(url).calling() as ts:
        found = ts.contexts()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    out = show.console()
    rows = [
        (row["preset"], row["files"], row["tokens"], size(row["bytes"]), _age(row["age_s"]), row["useless"] or "")
        for row in found["presets"]
    ]
    if rows:
        out.print(show.table(("PRESET", "FILES", "TOKENS", "SIZE", "SAVED", "GIVEN UP"), rows))
    failures = sum(found["failures"].values())
    spared = f"{show.ago(max(0.0, found['seconds_saved']))} of reading prompts spared"
    typer.echo(f"{size(found['bytes'])} in {found['folder']} (transcripts); {spared}, {failures} failures")


def drop(url: str | None, preset: str | None, as_json: bool) -> None:
    with Gate(url).calling() as ts:
        found = ts.drop_contexts(preset)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(f"removed {found['files']} files, {size(found['bytes'])}")


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f"{show.ago(seconds)} ago"


def size(count: float) -> str:
    """Bytes as people say them: 61 MB."""
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}"
