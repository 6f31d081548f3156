"""The members `model`, `name` and `stream` of a JSON object that comes in pieces, however large it is.

For what msgspec is not asked to read in one go: large bodies, inflated ones, and those with NaN, lone surrogates, bytes
that are no UTF-8, or deep nesting. Only the top level is read. Of everything else only quotes and brackets are
looked at: the engine judges the rest. The work is done by `bytes.find` and by possessive patterns, which cannot
backtrack, so a piece costs C time in proportion to its length.

Invariant: of valid JSON, cut into pieces anywhere, the same is read as by any JSON reader; of several members with one
name the last one counts.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from gpu_turnstile.gateway.wish import LONGEST_VALUE, BadBody, Wish

BOM: Final = b"\xef\xbb\xbf"
DEEPEST: Final = 10_000  # levels; Go's reader, and so Ollama, ends there too

_string = msgspec.json.Decoder(str).decode

_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_REST: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # of a string, up to its quote or to a lone backslash
_KEY: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SCALAR: Final = re.compile(rb'[^ \t\r\n,:"{}\[\]]++')
_OPENING: Final = re.compile(rb'(?:[\[{](?:[^"\[\]{}]++|"[^"\\\[\]{}]{0,256}+")*+)++')
_CLOSING: Final = re.compile(rb'(?:[\]}][^"\[\]{}]*+)++')
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_CLOSER: Final = bytes.maketrans(b"[{", b"]}")


def _whole(inner: bytes) -> bytes:
    """Arrays and objects of `inner`."""
    return rb"\[(?:" + inner + rb")*+\]|\{(?:" + inner + rb")*+\}"


def _level(inner: bytes) -> bytes:
    return inner + b"|" + _whole(inner)


_SHORT_STRING: Final = rb'"[^"\\]{0,256}+"|"(?:[^"\\]{1,64}+|\\.){0,32}+"'
_FLAT: Final = rb'[^"\[\]{}]++|' + _SHORT_STRING
# Everything that leaves the depth as it is, three levels of whole arrays and objects included: one call goes over many
# small values, so that dense JSON costs C time and not a step of Python for each bracket.
_EVEN: Final = re.compile(rb"(?:" + _level(_level(_level(_FLAT))) + rb")*+", re.DOTALL)
# Likewise whole members of the top-level object, with their commas, that are none of ours.
_OTHERS: Final = re.compile(
    rb'(?:[ \t\r\n]*+"(?!(?:model|name|stream)")[^"\\]{0,256}+"[ \t\r\n]*+:[ \t\r\n]*+'
    rb"(?:[^ \t\r\n,:\"{}\[\]]++|" + _SHORT_STRING + b"|" + _whole(_FLAT) + rb")[ \t\r\n]*+,)*+",
    re.DOTALL,
)

_START, _FIRST_KEY, _NEXT_KEY, _COLON, _VALUE, _AFTER, _NESTED, _STRING, _END = range(9)
_WANTED: Final = frozenset(("model", "name", "stream"))


class JsonFields:
    """The members `model`, `name` and `stream` of a JSON object that comes in pieces."""

    __slots__ = ("_carry", "_escaped", "_field", "_found", "_stack", "_state", "_then")

    def __init__(self) -> None:
        self._state = _START
        self._then = _AFTER  # the state after the string that is being gone over
        self._carry = b""  # the beginning of a key or a value whose end has not come yet
        self._stack = bytearray()  # the closing brackets of the value that is being gone over
        self._escaped = False  # the string that is being gone over was cut after a backslash
        self._field: str | None = None
        self._found: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        if self._carry:
            data, self._carry = self._carry + data, b""
        position, size = 0, len(data)
        while position < size:
            if self._state == _STRING:
                position = self._over_string(data, position)
            elif self._state == _NESTED:
                position = self._over_nested(data, position)
            else:
                if self._state in (_FIRST_KEY, _NEXT_KEY):
                    position = self._over_members(data, position)
                position = _SPACE.match(data, position).end()  # type: ignore[union-attr]
                if position < size:
                    position = self._token(data, position)

    def finish(self) -> Wish:
        if self._state is not _END:
            raise BadBody(400, "the request body is not valid JSON: it ends before its object does")
        return Wish(**self._found)

    def _token(self, data: bytes, position: int) -> int:
        state, byte = self._state, data[position : position + 1]
        if state == _VALUE:
            return self._value(data, position, byte)
        if state in (_FIRST_KEY, _NEXT_KEY):
            if byte == b'"':
                return self._key(data, position)
            if byte == b"}" and state == _FIRST_KEY:
                self._state = _END
                return position + 1
        elif state == _COLON and byte == b":":
            self._state = _VALUE
            return position + 1
        elif state == _AFTER and byte in b",}":
            self._state = _NEXT_KEY if byte == b"," else _END
            return position + 1
        elif state == _START:
            return self._begin(data, position, byte)
        raise BadBody(400, f"the request body is not valid JSON: {_shown(byte)} is out of place")

    def _begin(self, data: bytes, position: int, byte: bytes) -> int:
        if byte == b"{":
            self._state = _FIRST_KEY
            return position + 1
        if data.startswith(BOM, position):
            return position + len(BOM)
        if BOM.startswith(data[position:]):
            self._carry = data[position:]
            return len(data)
        raise BadBody(400, 'the request body must be a JSON object with a field "model"')

    def _over_members(self, data: bytes, position: int) -> int:
        end = _OTHERS.match(data, position).end()  # type: ignore[union-attr]
        if end > position:
            self._state = _NEXT_KEY
        return end

    def _key(self, data: bytes, position: int) -> int:
        match = _KEY.match(data, position)
        if match is not None:
            key = data[position + 1 : match.end() - 1]
            if b"\\" in key:
                try:
                    key = _string(match[0]).encode()
                except (msgspec.MsgspecError, UnicodeError):
                    key = b""
            name = key.decode("latin-1")
            self._field = name if name in _WANTED else None
            self._state = _COLON
            return match.end()
        if len(data) - position <= LONGEST_VALUE:
            self._carry = data[position:]
            return len(data)
        self._field = None
        self._state, self._then = _STRING, _COLON
        return position + 1

    def _value(self, data: bytes, position: int, byte: bytes) -> int:
        if byte == b'"':
            if self._field is None:
                self._state, self._then = _STRING, _AFTER
                return position + 1
            return self._wanted_string(data, position)
        if byte in b"{[":
            self._keep({} if byte == b"{" else [])
            self._state = _NESTED
            return position
        match = _SCALAR.match(data, position)
        if match is None:
            raise BadBody(400, f"the request body is not valid JSON: {_shown(byte)} is out of place")
        if match.end() == len(data):
            return self._wait(data, position)
        if self._field is not None:
            try:
                self._keep(json.loads(match[0]))
            except (ValueError, RecursionError):
                raise BadBody(400, f'the request body is not valid JSON: the field "{self._field}"') from None
        self._state = _AFTER
        return match.end()

    def _wanted_string(self, data: bytes, position: int) -> int:
        end = _REST.match(data, position + 1).end()  # type: ignore[union-attr]
        if data[end : end + 1] != b'"':
            return self._wait(data, position)
        if end - position > LONGEST_VALUE:
            self._too_long()
        try:
            self._keep(_string(data[position : end + 1]))
        except (msgspec.MsgspecError, UnicodeError):
            raise BadBody(400, f'the field "{self._field}" is not a valid JSON string in UTF-8') from None
        self._state = _AFTER
        return end + 1

    def _wait(self, data: bytes, position: int) -> int:
        """Keep a value's beginning until more has come."""
        if len(data) - position > LONGEST_VALUE:
            self._too_long()
        self._carry = data[position:]
        return len(data)

    def _too_long(self) -> None:
        what = f'the field "{self._field}"' if self._field else "a number"
        raise BadBody(400, f"{what} is longer than {LONGEST_VALUE} bytes")

    def _keep(self, value: Any) -> None:
        if self._field is not None:
            self._found[self._field] = value

    def _over_string(self, data: bytes, position: int) -> int:
        if self._escaped:
            self._escaped = False
            position += 1
        quote = data.find(b'"', position)
        backslash = data.find(b"\\", position, quote if quote >= 0 else len(data))
        if backslash >= 0:
            quote = _REST.match(data, backslash).end()  # type: ignore[union-attr]
            if data[quote : quote + 1] != b'"':
                self._escaped = quote < len(data)
                return len(data)
        elif quote < 0:
            return len(data)
        self._state = self._then
        return quote + 1

    def _over_nested(self, data: bytes, position: int) -> int:
        """Go over arrays and objects. Only quotes and brackets matter: the engine judges the rest."""
        if self._stack:
            position = _EVEN.match(data, position).end()  # type: ignore[union-attr]
            if position == len(data):
                return position
        if data[position] == 34:
            self._state, self._then = _STRING, _NESTED
            return position + 1
        match = _OPENING.match(data, position)
        if match is not None:
            self._stack += match[0].translate(_CLOSER, _NOT_BRACKETS)
            if len(self._stack) > DEEPEST:
                raise BadBody(400, f"the request body is nested deeper than {DEEPEST} levels")
            return match.end()
        return self._close(data, position)

    def _close(self, data: bytes, position: int) -> int:
        match = _CLOSING.match(data, position)
        assert match is not None
        closers = match[0].translate(None, _NOT_BRACKETS)[: len(self._stack)]
        if self._stack[-len(closers) :][::-1] != closers:
            raise BadBody(400, "the request body is not valid JSON: its brackets do not match")
        del self._stack[-len(closers) :]
        if self._stack:
            return match.end()
        self._state = _AFTER
        for _ in closers:
            while data[position] not in b"]}":
                position += 1
            position += 1
        return position


def _shown(byte: bytes) -> str:
    return repr(byte.decode("latin-1"))
