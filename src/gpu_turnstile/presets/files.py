"""Where the files of a preset's model lie on this machine. Looks, and never fetches; what is not there is left out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_turnstile.presets.schema import Preset

MOST_PARTS = 1000
_FIRST_PART = re.compile(r"(.+)-00001-of-(\d{5})\.gguf", re.IGNORECASE)


def model_files(preset: Preset) -> tuple[Path, ...]:
    """The files that it loads, as far as they lie on this machine: weights with their further parts, projector."""
    model = preset.model
    if model is None:
        return ()
    if model.path is not None:
        first = _on_this_machine(preset, model.path)
        extra = _on_this_machine(preset, model.mmproj) if model.mmproj else None
        return tuple(_existing([*_parts(first), *([extra] if extra else [])]))
    names = [name for name in (model.file, model.mmproj) if name]
    snapshots = _hub() / f"models--{(model.repo or '').replace('/', '--')}" / "snapshots"
    for snapshot in _newest_first(snapshots):
        files = [part for name in names for part in _parts(snapshot / name)] if names else _parts(snapshot)
        if found := tuple(_existing(files)):
            return found
    return ()


def _on_this_machine(preset: Preset, path: str) -> Path:
    """A container's paths are looked for where its mounts come from."""
    for mount in preset.runtime.mounts:
        outside, inside = mount.split(":")[:2]
        if path == inside or path.startswith(inside.rstrip("/") + "/"):
            return Path(outside) / path[len(inside) :].lstrip("/")
    return Path(os.path.expanduser(path))


def _parts(file: Path) -> list[Path]:
    """All parts of a model in several files; the weights in a folder."""
    if file.is_dir():
        return sorted(file.glob("*.safetensors"))
    match = _FIRST_PART.fullmatch(file.name)
    if match is None:
        return [file]
    return [
        file.with_name(f"{match[1]}-{n:05}-of-{match[2]}.gguf") for n in range(1, min(int(match[2]), MOST_PARTS) + 1)
    ]


def _existing(files: Sequence[Path]) -> Iterator[Path]:
    return (file for file in files if file.is_file())


def _hub() -> Path:
    """The cache of the Hugging Face Hub."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _newest_first(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []
