"""Where things are when nobody says: presets, state, and the gate itself."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_turnstile.cli.say import WRONG, fail

APP = "gpu-turnstile"
DEFAULT_PORT = 11434
_WILDCARDS = ("", "0.0.0.0", "::")


def presets_dir(given: Path | None) -> Path:
    """What was given, else `./presets` if it is there, else the user's configuration folder."""
    if given is not None:
        return given
    here = Path("presets")
    if here.is_dir():
        return here
    from platformdirs import user_config_path

    return user_config_path(APP, appauthor=False) / "presets"


def state_dir(given: Path | None) -> Path:
    if given is not None:
        return given
    from platformdirs import user_state_path

    return user_state_path(APP, appauthor=False)


def config_file(given: Path | None) -> Path | None:
    """What was typed; it ends the command if it is not there. Only a file that nobody typed may be missing."""
    if given is not None and not given.exists():
        fail(f"--config: {given}: no such file", WRONG)
    return given


def gate_url(given: str | None) -> str:
    """What was given, else this machine at the port the settings name."""
    if given:
        url = given if "://" in given else f"http://{given}"
        return url.rstrip("/")
    from gpu_turnstile.settings import Settings, SettingsError

    try:
        address = Settings.load(environ=os.environ).listen_ollama
    except SettingsError:
        address = None
    if address is None or not address.port:
        return f"http://127.0.0.1:{DEFAULT_PORT}"
    host = "127.0.0.1" if address.host in _WILDCARDS else address.host
    return f"http://[{host}]:{address.port}" if ":" in host else f"http://{host}:{address.port}"
