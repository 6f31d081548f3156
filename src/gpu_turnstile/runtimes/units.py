"""What a systemd service may be called. Pure: presets are checked with it when they are read, the runtime checks again.

A name becomes a word on the command line of systemctl: it must be no option, no path and no pattern.
"""

from __future__ import annotations

import re

_UNIT = re.compile(r"[A-Za-z0-9:_.\\][A-Za-z0-9:_.\\@-]{0,254}")


def unit_name(text: str) -> str:
    """The full name of a service. Raises ValueError."""
    name = text if text.endswith(".service") else f"{text}.service"
    if not _UNIT.fullmatch(name) or name == ".service":
        raise ValueError(f'"{text}" cannot be the name of a service unit: letters, digits, ":", "_", ".", "@", "-"')
    return name
