"""How a command ends: one line on stderr and an exit code."""

from __future__ import annotations

from typing import NoReturn

import typer

DONE, FAILED, WRONG, NO_GATE = 0, 1, 2, 3


def fail(message: str, code: int = FAILED) -> NoReturn:
    """Say what happened in one line, and end."""
    typer.echo("turnstile: " + " ".join(message.split()), err=True)
    raise typer.Exit(code)


def clean(text: object) -> str:
    """Text from elsewhere (names of clients, reasons), unable to move the cursor or break a table."""
    return "".join(c if c.isprintable() else "·" for c in str(text))
