"""The header of a GGUF file: what a model says about itself, without its weights.

A file from anywhere: every count and length is checked against a limit and against the file before it is believed,
nothing nests, and the long tables (the vocabulary) are passed over; only their length is kept. Versions 2 and 3.
The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_PAIRS = 65_536
MOST_TENSORS = 1_000_000
LONGEST_KEY = 65_535  # bytes
LONGEST_TEXT = 16 << 20  # bytes; chat templates are long
LONGEST_ARRAY = 1 << 24  # elements
MOST_LAYERS = 4_096
KEPT_ARRAY = 4_096  # elements; a longer one is only counted

STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Value = int | float | bool | str | tuple[int | float | bool, ...]


class NotGguf(ValueError):
    """The file is no GGUF file, or a broken one. One line for a person."""


@dataclass(frozen=True, slots=True)
class Header:
    """`lengths` has the element count of every array, also of those that are not in `values`. `size` in bytes."""

    version: int
    tensors: int
    size: int
    values: dict[str, Value] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        found = self.values.get("general.architecture")
        return found if isinstance(found, str) else ""

    def number(self, key: str) -> int | None:
        """A whole number of this architecture (`block_count`); None: not there, or no number."""
        value = self.values.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    @property
    def layers(self) -> int | None:
        count = self.number("block_count")
        return count if count and count <= MOST_LAYERS else None

    def each(self, key: str) -> tuple[int, ...] | None:
        """A whole number per layer: written once for all, or one by one."""
        value, count = self.values.get(f"{self.architecture}.{key}"), self.layers or 0
        if isinstance(value, tuple):
            fits = len(value) == count and all(isinstance(item, int) and item >= 0 for item in value)
            return tuple(int(item) for item in value) if fits else None
        number = self.number(key)
        return None if number is None else (number,) * count


def read_header(file: Path) -> Header:
    """Raises NotGguf, and OSError if the file cannot be read."""
    with file.open("rb") as stream:
        try:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise NotGguf("the file is empty") from None
        with data:
            return _Reader(data).header()


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._size = len(data)

    def header(self) -> Header:
        if self._bytes(4) != MAGIC:
            raise NotGguf("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise NotGguf(f"version {version} is none that is known here ({VERSIONS[0]} or {VERSIONS[1]})")
        tensors = self._count("Q", MOST_TENSORS, "tensors")
        pairs = self._count("Q", MOST_PAIRS, "pairs")
        values: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for _ in range(pairs):
            key = self._text(LONGEST_KEY)
            if key in values or key in lengths:
                raise NotGguf(f"{key} is there twice")
            value = self._value(self._number("I"), key, lengths)
            if value is not None:
                values[key] = value
        return Header(int(version), tensors, self._size, values, lengths)

    def _value(self, kind: int | float, key: str, lengths: dict[str, int]) -> Value | None:
        if kind == STRING:
            return self._text(LONGEST_TEXT)
        if kind != ARRAY:
            return self._number(_format(kind))
        kind, count = self._number("I"), self._count("Q", LONGEST_ARRAY, f"elements of {key}")
        lengths[key] = count
        if kind == STRING:
            for _ in range(count):
                self._skip(self._count("Q", LONGEST_TEXT, "bytes of a text"))
            return None
        layout = f"<{count}{_format(kind)}"
        where = self._skip(struct.calcsize(layout))
        return struct.unpack_from(layout, self._data, where) if count <= KEPT_ARRAY else None

    def _count(self, letter: str, most: int, what: str) -> int:
        count = int(self._number(letter))
        if count > most:
            raise NotGguf(f"{count} {what} are more than the {most} that are believed")
        return count

    def _number(self, letter: str) -> int | float:
        size = struct.calcsize(letter)
        value: int | float = struct.unpack_from("<" + letter, self._data, self._skip(size))[0]
        return value

    def _text(self, longest: int) -> str:
        return self._bytes(self._count("Q", longest, "bytes of a text")).decode(errors="replace")

    def _bytes(self, count: int) -> bytes:
        where = self._skip(count)
        return self._data[where : where + count]

    def _skip(self, count: int) -> int:
        """Go on by `count` bytes; returns where they begin."""
        where = self._at
        if count > self._size - where:
            raise NotGguf("it ends in the middle of its header")
        self._at = where + count
        return where


def _format(kind: int | float) -> str:
    try:
        return NUMBERS[int(kind)]
    except KeyError:
        raise NotGguf(f"a value is of an unknown kind ({kind})") from None
