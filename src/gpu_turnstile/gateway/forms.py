"""The fields `model` and `stream` of forms that come in pieces. Of several fields with one name the last one counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from gpu_turnstile.gateway.wish import LONGEST_VALUE, BadBody, Wish

LONGEST_PART_HEAD: Final = 16384
LONGEST_BOUNDARY: Final = 200

_PARAMETER: Final = re.compile(
    rb"[ \t]*;[ \t]*(?:([!#$%&'*+\-.^_`|~0-9A-Za-z]+)[ \t]*=[ \t]*(\"(?:[^\"\\]|\\.)*\"|[^;\"]*))?", re.DOTALL
)
_AFTER_BOUNDARY: Final = re.compile(rb"(?:(--)|[ \t]{0,64}(?=\r\n))")
_LINE_LEFT: Final = 70  # bytes after a boundary that are enough to know whether it is one


def _parameters(value: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The parameters of a header field's value, as far as they can be read; names in lower case."""
    position = value.find(b";")
    while 0 <= position < len(value):
        match = _PARAMETER.match(value, position)
        if match is None or match.end() == position:
            return
        position = match.end()
        if match[1] is not None:
            text = match[2].rstrip(b" \t")
            if text.startswith(b'"'):
                text = re.sub(rb"\\(.)", rb"\1", text[1:-1], flags=re.DOTALL)
            yield match[1].lower(), text


def boundary_of(content_type: bytes) -> bytes:
    found = {value for name, value in _parameters(content_type) if name == b"boundary"}
    if len(found) != 1 or not 0 < len(boundary := found.pop()) <= LONGEST_BOUNDARY:
        raise BadBody(400, "the Content-Type names no boundary between the parts of the form")
    return boundary


class FormParts:
    """The parts `model` and `stream` of a multipart form that comes in pieces. A part with a file name is a file."""

    __slots__ = ("_carry", "_delimiter", "_field", "_found", "_step", "_value")

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._carry = b"\r\n"  # so that a form may begin with its first boundary
        self._step = self._to_boundary
        self._field: str | None = None
        self._value = b""
        self._found: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        if self._step == self._epilogue:
            return
        data, self._carry = self._carry + data, b""
        position = 0
        while position < len(data):
            position = self._step(data, position)

    def finish(self) -> Wish:
        if self._step != self._epilogue:
            self.feed(b"\r\n" + b" " * _LINE_LEFT)
        if self._step != self._epilogue:
            raise BadBody(400, "the form is malformed: it ends without its last boundary")
        return Wish(model=self._found.get("model"), stream=self._found.get("stream") == "true" or None)

    def _to_boundary(self, data: bytes, position: int) -> int:
        """Go over a part's content, or what comes before the first part."""
        delimiter, search = self._delimiter, position
        while (found := data.find(delimiter, search)) >= 0:
            after = found + len(delimiter)
            match = _AFTER_BOUNDARY.match(data, after)
            if match is None and len(data) - after >= _LINE_LEFT:
                search = found + 2  # only looks like one
                continue
            self._take(data[position:found])
            if match is None:
                self._carry = data[found:]
                return len(data)
            self._store()
            self._step = self._part_head if match[1] is None else self._epilogue
            return match.end()
        end = max(position, len(data) - len(delimiter) + 1)
        self._take(data[position:end])
        self._carry = data[end:]
        return len(data)

    def _take(self, content: bytes) -> None:
        if self._field is not None:
            self._value += content
            if len(self._value) > LONGEST_VALUE + 2:
                raise BadBody(400, f'the field "{self._field}" is longer than {LONGEST_VALUE} bytes')

    def _store(self) -> None:
        if self._field is not None:
            try:
                self._found[self._field] = self._value[2:].decode()
            except UnicodeDecodeError:
                raise BadBody(400, f'the field "{self._field}" is not UTF-8') from None
        self._field, self._value = None, b""

    def _part_head(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n\r\n", position)
        if (end if end >= 0 else len(data)) - position > LONGEST_PART_HEAD:
            raise BadBody(400, "the form is malformed: the head of a part is too long")
        if end < 0:
            self._carry = data[position:]
            return len(data)
        for line in data[position:end].split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-disposition":
                parameters = dict(_parameters(value))
                field = parameters.get(b"name", b"").decode("latin-1")
                self._field = field if field in ("model", "stream") and b"filename" not in parameters else None
        self._step = self._to_boundary
        return end + 2  # the content begins with the empty line's CRLF, because that may belong to a boundary

    def _epilogue(self, data: bytes, position: int) -> int:
        return len(data)


class FormPairs:
    """The pairs `model` and `stream` of a URL-encoded form that comes in pieces."""

    __slots__ = ("_carry", "_found", "_over")

    def __init__(self) -> None:
        self._carry = b""
        self._over = False  # inside a pair that is too long to be one of ours
        self._found: dict[str, str] = {}

    def feed(self, data: bytes) -> None:
        *pairs, rest = (self._carry + data).split(b"&")
        for pair in pairs:
            self._pair(pair)
        self._over = self._over and not pairs
        self._carry = b"" if self._over else rest
        if len(rest) > 4 * LONGEST_VALUE:
            if rest.startswith((b"model=", b"stream=")):
                self._pair(rest)
            self._carry, self._over = b"", True

    def _pair(self, pair: bytes) -> None:
        if self._over:
            self._over = False
            return
        key, _, value = pair.partition(b"=")
        if len(key) > 64 or (field := unquote_to_bytes(key)) not in (b"model", b"stream"):
            return
        text = unquote_to_bytes(value.replace(b"+", b" "))
        if len(text) > LONGEST_VALUE:
            raise BadBody(400, f'the field "{field.decode()}" is longer than {LONGEST_VALUE} bytes')
        try:
            self._found[field.decode()] = text.decode()
        except UnicodeDecodeError:
            raise BadBody(400, f'the field "{field.decode()}" is not UTF-8') from None

    def finish(self) -> Wish:
        self._pair(self._carry)
        return Wish(model=self._found.get("model"), stream=self._found.get("stream") == "true" or None)
