"""Giving memory back to the system after large bodies.

The C library keeps freed memory for later; after a hundred megabytes of base64 that is a hundred megabytes for ever.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

LARGE = 8 << 20  # bytes of a body after which it is worth the trouble
PAUSE = 0.5  # seconds; many large bodies in a row are one giving back


def _find_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc: its own library knows better
        return None


_trim = _find_trim()
_planned = False


def give_back_soon() -> None:
    """Ask the C library for what it keeps, once, in a moment."""
    global _planned
    if _trim is not None and not _planned:
        _planned = True
        asyncio.get_running_loop().call_later(PAUSE, _give_back)


def _give_back() -> None:
    global _planned
    _planned = False
    if _trim is not None:
        _trim(0)
