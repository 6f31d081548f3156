"""`turnstile certify -- COMMAND`: run a measurement, and say whether it was alone on the card.

The window is cut by the gate's own clock: its first answer ends where the command begins.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from types import FrameType

import typer

from gpu_turnstile.cli.gate import Gate, sentence
from gpu_turnstile.cli.say import NO_COMMAND, NO_EXEC, NO_GATE, SIGNAL, fail, warn
from gpu_turnstile.client import TurnstileError
from gpu_turnstile.contention import certificate_text, exit_code, from_json

FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def certify(url: str | None, command: list[str], query: dict[str, list[str]], as_json: bool) -> int:
    """The command's exit code if it failed, else CONTAMINATED or 0. Without a gate the command is not run."""
    program = shutil.which(command[0])
    if program is None:
        there = os.path.exists(command[0])
        fail(f"{command[0]}: {'cannot be executed' if there else 'no such command'}", NO_EXEC if there else NO_COMMAND)
    gate = Gate(url)
    with gate.calling() as turnstile:
        began = turnstile.contention("-1s", query=query)["until"]
    pid, code = _run(program, command)
    try:
        found = gate.client.contention(began, query={**query, "pid": [str(pid)]})
    except TurnstileError as problem:  # what nobody vouches for is not certified
        warn(f"not certified: {sentence(problem)}")
        return code or NO_GATE
    certificate = from_json(found)
    if as_json:
        import json

        typer.echo(json.dumps(found))
    else:
        typer.echo(certificate_text(certificate), err=True)
    return exit_code(certificate, code)


def _run(program: str, command: list[str]) -> tuple[int, int]:
    """Its pid and exit code (128 + signal). Ctrl-C reaches it from the terminal; what ends us is passed on."""
    with contextlib.ExitStack() as stack:
        process: subprocess.Popen[bytes] | None = None

        def pass_on(number: int, frame: FrameType | None) -> None:
            if process is not None and process.poll() is None:
                process.send_signal(number)

        for number in FORWARDED:
            stack.callback(signal.signal, number, signal.signal(number, pass_on))
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, lambda number, frame: None))
        try:
            process = subprocess.Popen(command, executable=program)
        except OSError as problem:
            fail(f"{command[0]}: {problem.strerror}", NO_EXEC)
        code = process.wait()
    return process.pid, SIGNAL - code if code < 0 else code
