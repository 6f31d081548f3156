"""What tests with a real engine need: is llama.cpp here, how is it started, a model it can load at once."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PACKAGES = ("xllamacpp", "gguf", "numpy")


def real_engine_missing() -> str | None:
    """Why there is no real engine: a reason to skip with. None if everything is here."""
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            return f"{package} cannot be imported ({error}): pip install -r requirements-real.txt"
    return None


def tiny_model(folder: Path, name: str = "tiny", **shape: int) -> Path:
    """Write a random model of half a megabyte into the folder; `embd`, `layers`, `ff`, `seed` make another one."""
    out = folder / f"{name}.gguf"
    options = [word for key, value in shape.items() for word in (f"--{key}", str(value))]
    subprocess.run([sys.executable, TOOLS / "make_tiny_gguf.py", out, *options], check=True, timeout=60)
    return out


def llama_command() -> list[str]:
    """What to put before llama-server's flags: a preset's `command`."""
    return [sys.executable, str(TOOLS / "llama_server.py")]
