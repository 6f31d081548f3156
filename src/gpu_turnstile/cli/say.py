"""How a command ends: one line on stderr and an exit code."""

from __future__ import annotations

from typing import NoReturn

import typer

DONE, FAILED, WRONG, NO_GATE, HELD, NOT_YOURS = 0, 1, 2, 3, 4, 5
RUN_FAILED, NO_EXEC, NO_COMMAND, SIGNAL = 125, 126, 127, 128  # of `run`, as of env, nice and timeout


def fail(message: str, code: int = FAILED) -> NoReturn:
    """Say what happened in one line, and end."""
    typer.echo("turnstile: " + " ".join(message.split()), err=True)
    raise typer.Exit(code)


def warn(message: str) -> None:
    """A line on stderr; the command goes on."""
    typer.echo("turnstile: " + clean(" ".join(message.split())), err=True)


def clean(text: object) -> str:
    """Text from elsewhere (names of clients, reasons), unable to move the cursor or break a table."""
    return "".join(c if c.isprintable() else "·" for c in str(text))
