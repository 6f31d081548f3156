"""What is wrong with a preset or route file, said in one line: file, line, key, problem, and what would be right.

The line number is found by searching the text for the key, because the TOML parser does not keep it. It is a help
for a person's eye; nothing decides by it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Schema = TypeVar("Schema", bound=BaseModel)

_TABLE = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=(.*)""")
_AT_LINE = re.compile(r"\s*\(at line (\d+), column \d+\)")


class PresetError(Exception):
    """A file in the preset directory that cannot be used. `str()` is one line for a person.

    `line` is None where no line can be named; `key` is dotted ("runtime.context"), empty for the file as a whole.
    """

    def __init__(
        self, file: str | Path, message: str, *, line: int | None = None, key: str = "", nearest: str | None = None
    ) -> None:
        self.file = str(file)
        self.line = line
        self.key = key
        self.message = message
        self.nearest = nearest
        place = self.file if line is None else f"{self.file}:{line}"
        hint = f'; did you mean "{nearest}"?' if nearest else ""
        line_of_text = f"{place}: {message}{hint}"
        super().__init__("".join(c if c.isprintable() else "�" for c in line_of_text))


class Misfit(ValueError):
    """A rule between keys is broken. Validators raise it; `key` is dotted, relative to the table they check."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    close = get_close_matches(word, list(known), n=1)
    return close[0] if close else None


def read_toml(file: Path, shown: str) -> tuple[str, dict[str, Any]]:
    """The text and the tables of a file. Raises PresetError for anything that keeps it from being read."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        return text, tomllib.loads(text)
    except UnicodeDecodeError:
        raise PresetError(shown, "is not UTF-8 text; save it as UTF-8") from None
    except OSError as problem:
        raise PresetError(shown, f"cannot be read: {problem.strerror or problem}") from None
    except RecursionError:
        raise PresetError(shown, "is nested too deeply") from None
    except tomllib.TOMLDecodeError as problem:
        message = str(problem)
        at = _AT_LINE.search(message)
        reason = _AT_LINE.sub("", message).removesuffix(" (at end of document)")
        line = int(at[1]) if at else text.rstrip().count("\n") + 1
        raise PresetError(shown, f"is not valid TOML: {reason}", line=line) from None


def find_line(text: str, path: tuple[str, ...]) -> int | None:
    """The line that sets `path` or, failing that, the longest part of it that can be found (its table)."""
    best, best_length = None, 0
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.split("\n"), 1):
        if header := _TABLE.fullmatch(line.rstrip("\r")):
            table = _split(header[1])
            here = table
        elif key := _KEY.match(line):
            here = table + _split(key[1])
            if len(here) < len(path) and path[: len(here)] == here and _inline(path[len(here)], key[2]):
                here = path[: len(here) + 1]
        else:
            continue
        if len(here) > best_length and path[: len(here)] == here:
            best, best_length = number, len(here)
    return best


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _inline(key: str, value: str) -> bool:
    """Whether an inline table `{ … }` sets the key."""
    return value.lstrip().startswith("{") and re.search(rf"[{{,\s]{re.escape(key)}\s*=", value) is not None


# ------------------------------------------------------------------------------ pydantic's findings, in our words

_TYPES = {
    "string_type": "must be a text in quotes",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list in [ ]",
    "dict_type": "must be a table of key = value",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "string_too_short": "must not be empty",
    "finite_number": "must be a finite number",
}


def validate(schema: type[Schema], data: dict[str, Any], text: str, shown: str) -> Schema:
    """The data as an object of that schema. Raises PresetError for the first thing that is wrong in it.

    Unknown keys go first: a misspelt key explains the one that is missing.
    """
    try:
        return schema.model_validate(data)
    except ValidationError as problem:
        first = min(problem.errors(), key=lambda finding: finding["type"] != "extra_forbidden")
        raise _told(first, schema, text, shown) from None


def _told(finding: ErrorDetails, schema: type[BaseModel], text: str, shown: str) -> PresetError:
    kind, context = finding["type"], finding.get("ctx", {})
    path = tuple(part for part in finding["loc"] if isinstance(part, str) and part != "[key]")
    if isinstance(misfit := context.get("error"), Misfit) and misfit.key:
        path += tuple(misfit.key.split("."))
    key = ".".join(path)
    line = find_line(text, path)
    hint = None
    if kind == "extra_forbidden":
        message, hint = f'unknown key "{key}"', nearest(path[-1], _fields(schema, path[:-1]))
    elif kind == "missing":
        message = f'the key "{key}" is missing'
    elif kind == "value_error":
        message = f"{key}: {context['error']}" if key else str(context["error"])
    elif kind == "literal_error":
        message = f"{key}: {finding['input']!r} is not one of {context['expected']}".replace("'", '"')
        hint = nearest(str(finding["input"]), re.findall(r"'([^']*)'", context["expected"]))
    else:
        reason = _TYPES.get(kind) or finding["msg"].replace("Input should be", "must be").replace("String", "text")
        message = f"{key}: {reason}"
    return PresetError(shown, message, line=line, key=key, nearest=hint)


def _fields(schema: type[BaseModel], path: tuple[str, ...]) -> Iterable[str]:
    """The keys that are valid in the table at `path`."""
    parts = iter(path)
    for part in parts:
        annotation = schema.model_fields[part].annotation
        if get_origin(annotation) is dict:
            next(parts, None)  # the name of an entry is free
        nested = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        schema = next(kind for kind in nested if issubclass(kind, BaseModel))
    return schema.model_fields
