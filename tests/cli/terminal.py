"""A command in a terminal of its own: the pseudo-terminal is its controlling one, so Ctrl-C is a real Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator

from tests.aio import until

TURNSTILE = (sys.executable, "-m", "gpu_turnstile")
CTRL_C = b"\x03"
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|\([A-Z]|[=>])")


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TURNSTILE_", "LISTEN_", "LLMC_"))}
    return {**clean, "TERM": "xterm-256color", **more}


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.raw = ""
        self._master = master
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._master)
        self.raw += data.decode(errors="replace")

    @property
    def text(self) -> str:
        return _ESCAPE.sub("", self.raw.replace("\x1b[H", "\n")).replace("\r\n", "\n")

    @property
    def pid(self) -> int:
        return self.process.pid

    async def says(self, what: str, seconds: float = 8.0) -> None:
        try:
            await until(lambda: re.search(what, self.text), seconds)
        except AssertionError:
            raise AssertionError(f"it did not say {what!r} but:\n{self.text}") from None

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    async def ends(self, seconds: float = 8.0) -> int:
        """Its exit code; negative when a signal ended it."""
        try:
            await until(lambda: self.process.poll() is not None, seconds)
        except AssertionError:
            raise AssertionError(f"it still runs, having said:\n{self.text}") from None
        await asyncio.sleep(0)
        assert self.process.returncode is not None
        return self.process.returncode


def terminal(*args: str, **more: str | int) -> contextlib.AbstractAsyncContextManager[Terminal]:
    """One of our own commands."""
    return in_terminal(*TURNSTILE, *args, **more)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def in_terminal(*command: str, columns: int = 80, rows: int = 24, **env: str) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(  # noqa: ASYNC220  (it needs a controlling terminal; starting it blocks for a moment)
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(**env),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    found = Terminal(process, master)
    try:
        yield found
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)


async def piped(*args: str, **env: str) -> tuple[int, str, str]:
    """The same without a terminal: exit code, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        *(*TURNSTILE, *args),
        env=environment(**env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()
