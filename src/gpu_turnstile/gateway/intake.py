"""Reading just enough of a request's body to know whose work it is.

Pure: bytes in, the fields `model` and `stream` out. The body itself is forwarded as it came, never re-encoded; a
compressed one is inflated only to be read.

    JSON, whatever Content-Type says                    one msgspec decode where it is small and clean (the hot path),
                                                        else `JsonFields`
    multipart/form-data                                 `FormParts`: the part named `model`, wherever it stands
    application/x-www-form-urlencoded                   `FormPairs`; `curl -d '{…}'` says that too and means JSON
    audio/*, image/*, video/*, application/octet-stream nothing, unless it is JSON all the same

Of several `model`s the last one counts, as in the engines' own readers (Go, nlohmann, Python, Starlette's forms). If
the model can be read, the engine shall say what it thinks of the rest. `name` stands in for `model` where Ollama's API
says so (`NAMED`).

Invariant: no input makes this raise anything but `BadBody`, recurse, or hold more than it was given plus a few hundred
kilobytes; each `feed` does work in proportion to its piece.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec

from gpu_turnstile.gateway.codings import ACCEPTED, STEP, Inflated, codings
from gpu_turnstile.gateway.forms import FormPairs, FormParts, boundary_of
from gpu_turnstile.gateway.json_fields import BOM, JsonFields
from gpu_turnstile.gateway.wire import RequestHead
from gpu_turnstile.gateway.wish import BadBody, Reader, Wish

__all__ = ["ACCEPTED", "WHOLE", "BadBody", "Reader", "Wish", "needs_thread", "read_wish", "reader_for"]

WHOLE: Final = 1 << 20  # bytes up to which a body is decoded in one go: 2 ms, however dense it is
NAMED: Final = frozenset(("/api/show", "/api/delete", "/api/pull", "/api/push", "/api/create"))
_BINARY: Final = (b"audio/", b"image/", b"video/", b"application/octet-stream")

_decode = msgspec.json.Decoder(Wish).decode


def read_wish(head: RequestHead, body: bytes, limit: int) -> Wish:
    """Read the wish out of a whole body. `limit`: bytes it may have when inflated. Raises BadBody."""
    if not body:
        return Wish()
    if len(body) <= WHOLE and not head.encoding and head.content_type[:5].lower() != b"multi":
        try:
            return _named(head, _decode(body))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            body = _as_utf8(body)
    reader = reader_for(head, limit)
    for start in range(0, len(body), STEP):
        reader.feed(body[start : start + STEP])
    return reader.finish()


def reader_for(head: RequestHead, limit: int) -> Reader:
    """A reader for a body that has yet to come. Raises BadBody for what no reader can read."""
    return _Naming(head, Inflated(codings(head.encoding), _plain_reader(head), limit))


def needs_thread(head: RequestHead, size: int) -> bool:
    """Whether `read_wish` may take so long that it must not run on the loop.

    A plain body may: a large one should be fed to `reader_for` piece by piece while it comes. Of a compressed one
    every kilobyte can be many megabytes; inflating it lets go of the GIL.
    """
    return bool(head.encoding) or size > 16 * WHOLE


def _named(head: RequestHead, wish: Wish) -> Wish:
    if wish.model is None and wish.name is not None and head.path in NAMED:
        wish.model = wish.name
    return wish


class _Naming:
    """What holds for every kind of body: an empty one names nothing, and some paths have another name for `model`."""

    def __init__(self, head: RequestHead, reader: Reader) -> None:
        self._head, self._reader = head, reader
        self._empty = True

    def feed(self, data: bytes) -> None:
        self._empty = self._empty and not data
        self._reader.feed(data)

    def finish(self) -> Wish:
        return Wish() if self._empty else _named(self._head, self._reader.finish())


def _plain_reader(head: RequestHead) -> Reader:
    kind = head.content_type.partition(b";")[0].strip().lower()
    if kind.startswith(b"multipart/"):
        return FormParts(boundary_of(head.content_type))
    if kind == b"application/x-www-form-urlencoded":
        return _JsonOr(FormPairs())
    if kind.startswith(_BINARY):
        return _JsonOr(_Nothing())
    return JsonFields()


def _as_utf8(body: bytes) -> bytes:
    """JSON in UTF-16 or UTF-32, which Python's engines read; everything else as it is."""
    encoding = json.detect_encoding(body[:4])
    if encoding.startswith("utf-8"):
        return body
    try:
        return body.decode(encoding).encode()
    except UnicodeError:
        return body


class _Nothing:
    """A body that has no fields."""

    def feed(self, data: bytes) -> None:
        pass

    def finish(self) -> Wish:
        return Wish()


class _JsonOr:
    """JSON if the body begins like a JSON object, else what the label says."""

    def __init__(self, other: Reader) -> None:
        self._other = other
        self._reader: Reader | None = None

    def feed(self, data: bytes) -> None:
        if self._reader is None:
            begin = data.lstrip(b" \t\r\n").removeprefix(BOM)[:1]
            if not begin:
                return
            self._reader = JsonFields() if begin == b"{" else self._other
        self._reader.feed(data)

    def finish(self) -> Wish:
        return (self._reader or self._other).finish()
