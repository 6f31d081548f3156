"""What a child process is given and what is checked before: environment, command, working directory."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_turnstile.runtimes.base import StartFailed

GATES_OWN = ("TURNSTILE_", "LLMC_", "GPU_TURNSTILE_")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # in the name of one of the gate's own settings
DEFAULTS = {"GGML_NO_BACKTRACE": "1"}  # a failed assert in llama.cpp would start a debugger and die slowly

# A shell that becomes the engine when it is given a line, and ends when the gate ends before that.
WAIT_FOR_A_LINE = ("/bin/sh", "-c", 'read -r _ && exec "$@" </dev/null', "sh")


def child_environment(parent: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The preset's own settings win; the keys that open the gate do not go down."""
    inherited = {key: value for key, value in parent.items() if not _opens_the_gate(key)}
    return {**DEFAULTS, **inherited, **own}


def _opens_the_gate(key: str) -> bool:
    return key.startswith(GATES_OWN) and any(word in key for word in SECRET)


def check_command(argv: Sequence[str], cwd: Path | None, environment: Mapping[str, str]) -> None:
    """Raise StartFailed naming what is wrong, where the system's own error would name something else."""
    if not argv:
        raise StartFailed("there is no command to run")
    if any("\0" in text for text in (*argv, *environment.values())):
        raise StartFailed(f"cannot run {argv[0]}: an argument or a variable has a NUL character in it")
    if cwd is not None and not cwd.is_dir():
        raise StartFailed(f"working directory {cwd} does not exist")
    name = argv[0]
    if os.sep not in name:
        if shutil.which(name, path=environment.get("PATH")) is None:
            raise StartFailed(f"command not found: {name} (nowhere on PATH)")
        return
    file = (cwd or Path()) / name
    if not file.exists():
        raise StartFailed(f"command not found: {name} (no such file)")
    if file.is_dir() or not os.access(file, os.X_OK):
        raise StartFailed(f"not executable: {name}")


def check_port(port: int | None) -> None:
    """Raise StartFailed if somebody listens there already: its answers would be taken for the engine's."""
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as engines do: old connections are no matter
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StartFailed(
                f"port {port} is in use by another program ({error.strerror}); it was not asked"
            ) from None
