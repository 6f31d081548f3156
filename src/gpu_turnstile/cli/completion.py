"""Completion on the command line: names of presets, and zsh from the first TAB on.

A TAB must never disturb: where no gate answers, the folder of presets is read, and where that is not to be read nothing
is offered.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

OPTIONS = ("--install-completion", "--show-completion")
# zsh loads a completion when it is first wanted. Typer's script then only defines itself, and the first TAB is lost.
_FIRST_TAB = """
if [ "$funcstack[1]" = "_%(prog_name)s" ]; then
  %(complete_func)s "$@"
fi
"""


def mend_zsh(arguments: Sequence[str]) -> None:
    """Before typer writes its script for zsh: make it complete when it is loaded, too."""
    if not any(argument in OPTIONS for argument in arguments):
        return
    with contextlib.suppress(ImportError, AttributeError, KeyError):  # another typer: then the first TAB is lost
        from typer import _completion_shared as shared

        shared._completion_scripts["zsh"] = shared.COMPLETION_SCRIPT_ZSH + _FIRST_TAB


def presets(incomplete: str) -> list[str]:
    """What the gate can bring onto the card."""
    from gpu_turnstile.cli import places
    from gpu_turnstile.client import Turnstile, TurnstileError

    try:
        with Turnstile(places.gate_url(os.environ.get("TURNSTILE_URL"))) as gate:
            names = [str(model["id"]) for model in gate.models()]
    except TurnstileError:
        names = [file.stem for file in places.presets_dir(None).glob("*.toml")]
    return sorted(name for name in names if name.startswith(incomplete))
