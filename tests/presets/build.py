"""Small preset files for the tests of this folder."""

from __future__ import annotations

import tomllib
from pathlib import Path

from gpu_turnstile.presets.schema import Preset, parse_preset

LLAMA = """\
engine = "llama-server"

[model]
path = "/models/{stem}.gguf"

[runtime]
kind = "process"
command = ["llama-server"]
"""


def llama(stem: str, top: str = "") -> str:
    """A minimal valid preset; `top` are lines of its first table."""
    return top + "\n" + LLAMA.format(stem=stem) if top else LLAMA.format(stem=stem)


def parse(text: str, name: str = "p") -> Preset:
    return parse_preset(name, text, tomllib.loads(text), f"presets/{name}.toml")


def write(folder: Path, **files: str) -> None:
    for stem, text in files.items():
        (folder / f"{stem}.toml").write_text(text, encoding="utf-8")
