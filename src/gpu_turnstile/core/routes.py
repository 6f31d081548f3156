"""What a request calls its model -> the tenants that may serve it, best first.

Pure look-ups in tables that are built once per reload; nothing here knows TOML, HTTP or locks. The order is one
rule, and the first that answers wins:

    1. a capability (header, or `cap:<c>`)      every tenant that has it, the resident first
    2. a route (`auto`, `auto:<name>`)          its chain, the resident first; empty = the resident, never a swap
    3. a name, an alias, an artifact stem       that tenant
    4. the external Ollama, if there is one     whatever the model is called
    5. nothing named                            the resident, else the route `auto`, else `Missing`
    6. anything else                            `Unresolved`, or the resident where the policy says so

`auto…` and `cap:…` are reserved words: a route or capability nobody defined is never handed on as a model name,
because a typing error must not cost a swap. Names are case-sensitive; `llama3` and `llama3:latest` are one name.

Invariant: the same directory, request and residents give the same answer, and nobody outside the directory is
ever wanted (a chat request never ends at ComfyUI because ComfyUI happens to hold the card).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import TypeAlias

from gpu_turnstile.core.model import Code

ROUTE = "auto"
ROUTE_PREFIX = "auto:"
CAPABILITY_PREFIX = "cap:"
LATEST = ":latest"

_LONGEST_SHOWN = 80  # characters of a client's name that are repeated in a message
_LONGEST_COMPARED = 200  # beyond this no close match is looked for: it costs time and helps nobody


class UnknownModel(StrEnum):
    """What happens to a model nobody knows (`LLMC_UNKNOWN_MODEL`)."""

    ERROR = "error"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class Resolved:
    """`wants`: tenants, best first. `in_place`: any of them will do, so a draining resident may still serve it.

    `model`: what the request called it; None = it named nothing.
    `stay`: it must never be the reason of a swap (an empty route): ask with `wait=0`.
    """

    wants: tuple[str, ...]
    in_place: bool
    model: str | None
    stay: bool = False


@dataclass(frozen=True, slots=True)
class Unresolved:
    """Nobody serves it. `close`: what could have been meant, best first."""

    code: Code
    message: str
    close: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """The request names no model and there is no default: 400."""

    message: str = 'the field "model" is missing, and neither a resident nor a route "auto" can stand in'


@dataclass(frozen=True, slots=True)
class BadModel:
    """The field `model` is there but is not a string: 400."""

    message: str


Resolution: TypeAlias = Resolved | Unresolved | Missing | BadModel


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """Everybody a request can name, of one mode. Immutable; compared and hashed by identity, so it is a cache key.

    `aliases` and `stems` map to names. `capabilities` map to names in the order they are preferred. `chains` map a
    route to its entries as written (names, aliases or stems); the default route is `auto`.
    `external`: the tenant that takes whatever nobody else is called; it need not be in `names`.
    """

    names: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    stems: Mapping[str, str] = field(default_factory=dict)
    capabilities: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    chains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    external: str | None = None
    unknown: UnknownModel = UnknownModel.ERROR
    _index: dict[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        index = {canonical(stem): name for stem, name in self.stems.items()}
        index |= {canonical(alias): name for alias, name in self.aliases.items()}
        index |= {canonical(name): name for name in self.names}
        object.__setattr__(self, "_index", index)

    def find(self, model: str) -> str | None:
        """The tenant with that name, alias or stem."""
        return self._index.get(canonical(model))

    def serving(self, residents: Iterable[str]) -> str | None:
        """The first resident that a request of this directory may use."""
        for resident in residents:
            if resident == self.external or resident in self._index:
                return resident
        return None

    def known(self) -> tuple[str, ...]:
        """Every word `model` may be."""
        routes = (ROUTE if chain == ROUTE else ROUTE_PREFIX + chain for chain in self.chains)
        return (*self._index, *routes, *(CAPABILITY_PREFIX + c for c in self.capabilities))


def canonical(model: str) -> str:
    """Ollama's default tag is no part of a name: `llama3:latest` is `llama3`, `llama3:1b` is another model."""
    return model.removesuffix(LATEST)


def resolve(
    directory: Directory,
    model: object,
    capability: str | None = None,
    residents: tuple[str, ...] = (),
    locked: bool = False,
) -> Resolution:
    """Find who may serve `model` (as it came out of the JSON) or `capability` (the header; it goes first).

    `residents`: who is on the card, the one used last first. `locked`: a lock lives, so nothing is guessed.
    """
    if model is not None and not isinstance(model, str):
        return BadModel(f'the field "model" must be a string, not {_json_type(model)}')
    resident = directory.serving(residents)
    if capability:
        return _by_capability(directory, capability, resident, model or None)
    if not model:
        return _unnamed(directory, resident)
    word = canonical(model)
    if word.startswith(CAPABILITY_PREFIX):
        return _by_capability(directory, word.removeprefix(CAPABILITY_PREFIX), resident, model)
    if word == ROUTE or word.startswith(ROUTE_PREFIX):
        return _by_route(directory, word.removeprefix(ROUTE_PREFIX), resident, model)
    name = directory.find(word) or directory.external
    if name is not None:
        return Resolved((name,), in_place=False, model=model)
    return _unknown(directory, model, None if locked else resident)


def _by_capability(directory: Directory, capability: str, resident: str | None, model: str | None) -> Resolution:
    names = directory.capabilities.get(capability, ())
    if names:
        return Resolved(_first(resident, names), in_place=True, model=model)
    close = _close(capability, directory.capabilities)
    message = f"no preset has the capability {_quoted(capability)}{_did_you_mean(close)}"
    return Unresolved(Code.UNKNOWN_MODEL, message, close)


def _by_route(directory: Directory, route: str, resident: str | None, model: str | None) -> Resolution:
    chain = directory.chains.get(route)
    if chain is None:
        close = _close(route, (c for c in directory.chains if c != ROUTE))
        close = tuple(ROUTE_PREFIX + name for name in close)
        message = f"routes.toml has no route {_quoted(route)}{_did_you_mean(close)}"
        return Unresolved(Code.UNKNOWN_ROUTE, message, close)
    if not chain:
        return _resident_only(route, resident, model)
    names = []
    for entry in chain:
        name = directory.find(entry)
        if name is None:
            close = _close(entry, directory.known())
            message = f"the route {_quoted(route)} names {_quoted(entry)}, which no preset is called"
            return Unresolved(Code.UNKNOWN_ROUTE, message + _did_you_mean(close), close)
        names.append(name)
    return Resolved(_first(resident, names), in_place=True, model=model)


def _resident_only(route: str, resident: str | None, model: str | None) -> Resolution:
    if resident is None:
        message = f"the route {_quoted(route)} takes what is on the card and never swaps; nothing is on it now"
        return Unresolved(Code.SERVICE_INACTIVE, message)
    return Resolved((resident,), in_place=True, model=model, stay=True)


def _unnamed(directory: Directory, resident: str | None) -> Resolution:
    if resident is not None:
        return Resolved((resident,), in_place=True, model=None)
    if directory.chains.get(ROUTE):
        return _by_route(directory, ROUTE, None, None)
    return Missing()


def _unknown(directory: Directory, model: str, resident: str | None) -> Resolution:
    if directory.unknown is UnknownModel.RESIDENT and resident is not None:
        return Resolved((resident,), in_place=True, model=model)
    close = _close(model, directory.known())
    return Unresolved(Code.UNKNOWN_MODEL, f"no preset is called {_quoted(model)}{_did_you_mean(close)}", close)


def _first(resident: str | None, names: Iterable[str]) -> tuple[str, ...]:
    """The names without repeats, in order, but the resident before all others."""
    unique = dict.fromkeys(names)
    if resident in unique:
        return (resident, *(name for name in unique if name != resident))
    return tuple(unique)


def _close(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """Up to three known words that look like `word`; those that differ only in case come first."""
    if len(word) > _LONGEST_COMPARED:
        return ()
    folded: dict[str, list[str]] = {}
    for name in sorted(known):
        folded.setdefault(name.casefold(), []).append(name)
    near = get_close_matches(word.casefold(), folded, n=3)
    return tuple(name for key in near for name in folded[key])[:3]


def _did_you_mean(close: tuple[str, ...]) -> str:
    return "; did you mean " + " or ".join(f'"{name}"' for name in close) + "?" if close else ""


def _quoted(text: str) -> str:
    """A client's text, fit for one line: bounded, and nothing in it that a terminal or a log would obey."""
    shown = text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
    return '"' + "".join(c if c.isprintable() else "�" for c in shown) + '"'


def _json_type(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "a list" if isinstance(value, list) else "an object"
