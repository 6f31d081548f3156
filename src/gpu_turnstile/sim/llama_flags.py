"""The command line of the simulated llama-server: the flags a preset passes, read as the real one reads them.

Its flags (`-np`, `-ctk`) are no shape a standard parser takes, so this is a table and a loop. Invariant: a flag
that is not in the table never stops the start; it is handed back, to be named on stderr.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ALIASES = {
    "-m": "--model",
    "-c": "--ctx-size",
    "-np": "--parallel",
    "-a": "--alias",
    "--embedding": "--embeddings",
}
VALUES: dict[str, Callable[[str], Any]] = {
    "--model": str,
    "--host": str,
    "--port": int,
    "--ctx-size": int,
    "--parallel": int,
    "--alias": str,
    "--slot-save-path": str,
    "--sim-card": str,
    "--sim-card-name": str,
    "--sim-vram-gb": float,
    "--sim-load-s": float,
    "--sim-tokens-per-s": float,
    "--sim-prompt-tokens-per-s": float,
    "--sim-answer-tokens": int,
    "--sim-fault": str,
}
SWITCHES = {"--embeddings"}


class FlagError(ValueError):
    """A known flag without a usable value."""


@dataclass(slots=True)
class Flags:
    """`values`: by long name without dashes, as given; `unknown`: the flags that were passed over."""

    values: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def parse(words: list[str]) -> Flags:
    """Raises FlagError."""
    flags = Flags()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, joined, value = word.partition("=")
        name = ALIASES.get(name, name)
        if name in SWITCHES:
            flags.values[name.lstrip("-")] = True
        elif name in VALUES:
            text = value if joined else (rest.pop(0) if rest else None)
            _take(flags, name, text)
        else:
            flags.unknown.append(word)
            if not joined and rest and not rest[0].startswith("-"):
                rest.pop(0)  # its value
    return flags


def _take(flags: Flags, name: str, text: str | None) -> None:
    if text is None:
        raise FlagError(f"{name} needs a value")
    if name == "--sim-fault":
        flags.faults.append(text)
        return
    try:
        flags.values[name.lstrip("-")] = VALUES[name](text)
    except ValueError:
        raise FlagError(f"{name}: {text!r} is not {VALUES[name].__name__}") from None
