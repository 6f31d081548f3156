"""What a body reader is, what it says, and what it says when it cannot.

Shared by the readers of the three kinds of body (`json_fields`, `forms`) and by what takes codings off (`codings`).
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

LONGEST_VALUE: Final = 4096  # bytes of a field that is read


class BadBody(Exception):
    """The body cannot be read: `status` is 400, 413 or 415, `message` is one line for the caller."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Wish(msgspec.Struct, gc=False):
    """What a request asks for. `model` is whatever it said, None when it said nothing or null."""

    model: Any = None
    name: Any = None
    stream: Any = None


class Reader(Protocol):
    """Fed with a body's pieces as they come; `finish` after the last one. Both raise BadBody."""

    def feed(self, data: bytes) -> None: ...
    def finish(self) -> Wish: ...
