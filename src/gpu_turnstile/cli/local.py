"""The commands that need no running gate: presets in a folder, and the settings."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from gpu_turnstile.cli import places, show
from gpu_turnstile.cli.say import WRONG, clean, fail
from gpu_turnstile.presets import store
from gpu_turnstile.presets.errors import PresetError
from gpu_turnstile.settings import Settings, SettingsError


def check(folder: Path | None, as_json: bool = False) -> None:
    """Read a folder as the gate would; every file's first error, then what only looks wrong."""
    where = places.presets_dir(folder)
    if not where.is_dir():
        fail(f"{where}: no such folder", WRONG)
    try:
        names = sorted(p.name for p in where.iterdir() if p.suffix == store.SUFFIX and not p.name.startswith("."))
    except OSError as problem:
        fail(f"{where}: cannot be read: {problem.strerror}", WRONG)
    errors = [error for name in names if (error := _error(where, [name]))]
    errors = errors or [error for error in [_error(where, names)] if error]
    catalogue = None if errors else store.load(where, names)
    notes = list(catalogue.notes) if catalogue is not None else []
    count = len(catalogue.presets) if catalogue is not None else 0
    if as_json:
        found = {"folder": str(where), "presets": count, "errors": errors, "notes": notes}
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in (*errors, *notes):
            typer.echo(line, err=True)
        if not errors:
            typer.echo(f"{where}: {count} {'preset' if count == 1 else 'presets'}, all good")
    if errors:
        raise typer.Exit(WRONG)


def _error(folder: Path, names: list[str]) -> str | None:
    try:
        store.load(folder, names)
    except PresetError as problem:
        return str(problem)
    return None


def list_presets(folder: Path | None, as_json: bool) -> None:
    where = places.presets_dir(folder)
    found = store.PresetStore(where)
    found.refresh()
    if found.error is not None:
        fail(str(found.error), WRONG)
    presets = sorted(found.catalogue.presets.values(), key=lambda preset: preset.name)
    if as_json:
        dumps = [{"mode": p.mode, "model_id": p.stem, **p.model_dump(mode="json", exclude_unset=True)} for p in presets]
        typer.echo(json.dumps(dumps, indent=2))
        return
    if not presets:
        typer.echo(f"no presets in {where}")
        return
    rows = [
        (
            p.name,
            p.engine,
            p.runtime.kind,
            p.runtime.context or "",
            "" if p.runtime.vram_gb is None else f"{p.runtime.vram_gb:g}",
            ", ".join(p.aliases),
            ", ".join(p.capabilities),
        )
        for p in presets
    ]
    show.console().print(show.table(("NAME", "ENGINE", "RUN BY", "CONTEXT", "GB", "ALIASES", "CAN"), rows))


def settings(config: Path | None, as_json: bool) -> None:
    config = places.config_file(config)
    try:
        loaded = Settings.load(config)
    except SettingsError as problem:
        fail(str(problem), WRONG)
    rows = loaded.explain()
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        out = show.console()
        wide = out.width >= 140
        columns = ("NAME", "VALUE", "FROM", "MEANING") if wide else ("NAME", "VALUE", "FROM")
        out.print(show.table(columns, ((row.name, row.value, row.source, row.meaning)[: len(columns)] for row in rows)))
    for warning in loaded.warnings:
        typer.echo(f"warning: {clean(warning)}", err=True)
