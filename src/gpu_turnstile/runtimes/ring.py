"""The last lines a process printed, in bounded memory whatever it prints.

A line ends at a newline; a carriage return starts it over, as on a terminal (a progress bar is one line, its last
state). What is longer than a line may be is cut.
"""

from __future__ import annotations

import re
from collections import deque

LINES = 200
LINE_CHARS = 2000
LINE_BYTES = 4 * LINE_CHARS  # enough for LINE_CHARS of any UTF-8 text

COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class OutputRing:
    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES)
        self._unfinished = b""

    def feed(self, data: bytes) -> None:
        *finished, rest = (self._unfinished + data).split(b"\n")
        for line in finished[-LINES:]:
            self._lines.append(_text(line))
        self._unfinished = _last_state(rest)[:LINE_BYTES]

    def lines(self) -> tuple[str, ...]:
        """Oldest first, with the line that is still being written."""
        unfinished = _text(self._unfinished)
        return (*self._lines, unfinished)[-LINES:] if unfinished else tuple(self._lines)

    def last(self) -> str:
        """The last line that says something, or nothing."""
        return next((line for line in reversed(self.lines()) if line.strip()), "").strip()


def _last_state(line: bytes) -> bytes:
    """What a terminal would show of it. A return at its very end has overwritten nothing yet."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _text(line: bytes) -> str:
    shown = _last_state(line).rstrip(b"\r")[:LINE_BYTES].decode(errors="replace")
    return COLOURS.sub("", shown)[:LINE_CHARS]
