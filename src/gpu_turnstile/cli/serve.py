"""`turnstile serve`: settings, folders, then the composition root. What is wrong at start is one line, exit code 2."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

from gpu_turnstile.cli import places
from gpu_turnstile.cli.say import WRONG, fail
from gpu_turnstile.presets.errors import PresetError
from gpu_turnstile.settings import SPECS, Given, Settings, SettingsError

_AT_START = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)


def serve(config: Path | None, presets: Path | None, state_dir: Path | None, log_level: str | None) -> int:
    """Run the gate until it is told to stop; its exit code."""
    config = places.config_file(config)
    if presets is not None and not presets.is_dir():
        fail(f"--presets: {presets} is no folder", WRONG)
    try:
        settings = _with_level(Settings.load(config), log_level)
        from gpu_turnstile.app import run

        return run(settings, places.presets_dir(presets), places.state_dir(state_dir))
    except (SettingsError, PresetError) as problem:
        fail(str(problem), WRONG)
    except OSError as problem:
        if problem.errno not in _AT_START:
            raise
        fail(_why(problem), WRONG)


def _with_level(settings: Settings, level: str | None) -> Settings:
    if level is None:
        return settings
    try:
        parsed = SPECS["LOGLEVEL"].parse(level)
    except ValueError as problem:
        raise SettingsError(f'--log-level: "{level}" {problem}') from None
    given = {**settings.given, "LOGLEVEL": Given(level, "--log-level")}
    return replace(settings, loglevel=parsed, given=given)


def _why(problem: OSError) -> str:
    where = f"{problem.filename}: " if problem.filename else ""
    line = f"{where}{problem.strerror or problem}"
    if problem.errno == errno.EADDRINUSE:
        line += "; another program listens there (the engine itself?): move it, or set LISTEN_OLLAMA or LISTEN_COMFY"
    return line
