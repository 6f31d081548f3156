"""`turnstile demo`: checks what it was given and starts the play."""

from __future__ import annotations

import shlex
from pathlib import Path

from gpu_turnstile.cli.say import WRONG, fail


def demo(real: bool, engine: str | None, model: Path | None) -> int:
    """Run the demo; its exit code."""
    from gpu_turnstile.demo.play import main
    from gpu_turnstile.demo.stage import Real

    if not real:
        return main(None)
    if engine is None or model is None:
        fail("--real needs --engine COMMAND and --model FILE; `make demo REAL=1` brings both", WRONG)
    if not model.is_file():
        fail(f"--model: {model} is no file", WRONG)
    return main(Real(tuple(shlex.split(engine)), model.resolve()))
