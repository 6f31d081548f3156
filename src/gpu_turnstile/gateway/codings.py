"""Content codings (RFC 9110, 8.4) taken off only to be read: in bounded steps, and nothing of it is kept.

Invariant: no more than one step (and what the coding's own window needs, at most 16 MiB) is held, however much is
inside; what inflates to more than the limit, at any level, ends there.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import brotli  # type: ignore[import-untyped]

from gpu_turnstile.gateway.wish import BadBody, Reader, Wish

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STEP: Final = 1 << 16  # bytes that are inflated in one go
MOST_CODINGS: Final = 4
MOST_MEMBERS: Final = 10_000  # of a gzip or zstd body: each costs as much as a whole step
ZSTD_WINDOW: Final = 23  # log2 of the bytes a sender may ask a receiver to hold (RFC 9659: 8 MiB)


class _Coding(Protocol):
    """One content coding. `run` yields pieces of bounded size; `complete` = the data so far may be all of it."""

    def run(self, data: bytes) -> Iterator[bytes]: ...
    @property
    def complete(self) -> bool: ...


class _Zlib:
    """gzip with its members, or one deflate stream. `bits` 0: with or without zlib's wrapper, whichever comes."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._inflate: Any = zlib.decompressobj(bits) if bits else None
        self._first = b""
        self._members = 0
        self.complete = False

    def run(self, data: bytes) -> Iterator[bytes]:
        if self._inflate is None:
            data = self._first = self._first + data
            if len(data) < 2:
                return
            wrapped = data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
        while True:
            if self.complete and data:
                self._next_member()
            piece = self._inflate.decompress(data, STEP)
            if piece:
                yield piece
            self.complete = self._inflate.eof
            data = self._inflate.unused_data if self.complete else self._inflate.unconsumed_tail
            if not data and (self.complete or len(piece) < STEP):
                return

    def _next_member(self) -> None:
        self._members += 1
        if not self._bits or self._members > MOST_MEMBERS:
            raise zlib.error("there is more after its end")
        self._inflate, self.complete = zlib.decompressobj(self._bits), False


class _Zstd:
    def __init__(self) -> None:
        self._inflate = self._new()
        self._members = 0

    @staticmethod
    def _new() -> Any:
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW})

    @property
    def complete(self) -> bool:
        return bool(self._inflate.eof)

    def run(self, data: bytes) -> Iterator[bytes]:
        while True:
            if self._inflate.eof:
                if not data:
                    return
                self._members += 1
                if self._members > MOST_MEMBERS:
                    raise zstd.ZstdError("too many frames")
                self._inflate = self._new()
            piece = self._inflate.decompress(data, STEP)
            if piece:
                yield piece
            if self._inflate.eof:
                data = self._inflate.unused_data
            elif self._inflate.needs_input:
                return
            else:
                data = b""


class _Brotli:
    def __init__(self) -> None:
        self._inflate = brotli.Decompressor()

    @property
    def complete(self) -> bool:
        return bool(self._inflate.is_finished())

    def run(self, data: bytes) -> Iterator[bytes]:
        while True:
            if self.complete and data:
                raise brotli.error("there is more after its end")
            piece = self._inflate.process(data, output_buffer_limit=STEP)
            data = b""
            if piece:
                yield piece
            elif self.complete or self._inflate.can_accept_more_data():
                return


_CODINGS: Final[dict[str, Callable[[], _Coding]]] = {
    "gzip": lambda: _Zlib(zlib.MAX_WBITS | 16),
    "x-gzip": lambda: _Zlib(zlib.MAX_WBITS | 16),
    "deflate": lambda: _Zlib(0),
    "br": _Brotli,
    "zstd": _Zstd,
}
ACCEPTED: Final = ", ".join(name for name in _CODINGS if not name.startswith("x-"))  # for Accept-Encoding of a 415


def codings(field: bytes) -> list[tuple[str, _Coding]]:
    """The codings to take off, the outermost first. Raises BadBody (415)."""
    names = [name.strip().lower() for name in field.decode("latin-1").split(",")]
    names = [name for name in names if name and name != "identity"]
    unknown = [name for name in names if name not in _CODINGS]
    if unknown or len(names) > MOST_CODINGS:
        what = f"{unknown[0][:40]!r}" if unknown else f"more than {MOST_CODINGS} times"
        raise BadBody(415, f"the Content-Encoding {what} is not known here; use {ACCEPTED} or none")
    return [(name, _CODINGS[name]()) for name in reversed(names)]


class Inflated:
    """Takes the codings off in bounded steps and hands what is inside to `reader`."""

    def __init__(self, codings: list[tuple[str, _Coding]], reader: Reader, limit: int) -> None:
        self._codings = codings
        self._sizes = [0] * len(codings)
        self._reader = reader
        self._limit = limit

    def feed(self, data: bytes, depth: int = 0) -> None:
        if depth == len(self._codings):
            self._reader.feed(data)
            return
        name, coding = self._codings[depth]
        try:
            for start in range(0, len(data), STEP):
                for piece in coding.run(data[start : start + STEP]):
                    self._count(depth, len(piece))
                    self.feed(piece, depth + 1)
        except (zlib.error, zstd.ZstdError, brotli.error, MemoryError) as error:
            raise BadBody(400, f"the request body is not valid {name}: {error}") from None

    def _count(self, depth: int, size: int) -> None:
        self._sizes[depth] += size
        if self._sizes[depth] > self._limit:
            what = f"the request body inflates to more than the {self._limit} bytes allowed"
            raise BadBody(413, f"{what} (TURNSTILE_BODY_LIMIT)")

    def finish(self) -> Wish:
        for name, coding in self._codings:
            if not coding.complete:
                raise BadBody(400, f"the request body is not valid {name}: it is cut off")
        return self._reader.finish()
