"""A folder of presets as one immutable catalogue, and the store that keeps it up to date.

All or nothing: one bad file fails the reload, the catalogue stays at its last good state and `error` says why. That
is what lets a person edit files under a running gate. Nothing is watched: `refresh` compares names, times, sizes and
inodes, which is cheap and also works on bind mounts, and parses only when they differ.

Invariant: a word means one preset. A name, alias or artifact stem that two presets claim is an error naming both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_turnstile.core.model import Mode
from gpu_turnstile.core.routes import Directory, UnknownModel, canonical
from gpu_turnstile.presets.ephemeral import Ephemeral
from gpu_turnstile.presets.errors import PresetError, find_line, read_toml
from gpu_turnstile.presets.estimate import Facts, facts
from gpu_turnstile.presets.learned import Learned
from gpu_turnstile.presets.routes_file import FILE_NAME as ROUTES_FILE
from gpu_turnstile.presets.routes_file import Routes, parse_routes
from gpu_turnstile.presets.schema import Preset, parse_preset

SUFFIX = ".toml"
_RACY = 2_000_000_000  # ns; a file this young may change again without its time changing (coarse clocks)

_Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything the folder says, and the variants of it that were registered meanwhile.

    `notes` are lines for a person about what is allowed but looks unintended. `variants`: ephemeral preset -> the one
    on disk that it is made from.
    """

    presets: Mapping[str, Preset] = field(default_factory=lambda: MappingProxyType({}))
    routes: Routes = field(default_factory=Routes)
    notes: tuple[str, ...] = ()
    variants: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def aliases(self) -> dict[str, str]:
        return {alias: preset.name for preset in self.presets.values() for alias in preset.aliases}

    @property
    def stems(self) -> dict[str, str]:
        """Artifact stem (model id) to preset; to the one on disk, where variants share it."""
        return {p.stem: p.name for p in self.presets.values() if p.stem and p.name not in self.variants}

    def directory(
        self,
        external: str | None = None,
        unknown: UnknownModel = UnknownModel.ERROR,
        mode: Mode = Mode.LLM,
    ) -> Directory:
        """What requests of that mode can name. `external`: the tenant that takes every other name."""
        names = {preset.name for preset in self.presets.values() if preset.mode is mode}
        return Directory(
            names=tuple(sorted(names)),
            aliases={alias: name for alias, name in self.aliases.items() if name in names},
            stems={stem: name for stem, name in self.stems.items() if name in names},
            capabilities=self._capabilities(names),
            chains=self.routes.chains,
            external=external,
            unknown=unknown,
        )

    def find(self, word: str) -> Preset | None:
        """The preset with that name, alias or stem."""
        name = canonical(word)
        if name not in self.presets:
            words = {canonical(w): n for w, n in (self.stems | self.aliases).items()}
            name = words.get(name, "")
        return self.presets.get(name)

    def _capabilities(self, names: set[str]) -> dict[str, tuple[str, ...]]:
        """Capability to presets: those that routes.toml mentions in its order, then the others by name."""
        mentioned = (self.find(entry) for entry in self.routes.entries())
        order = dict.fromkeys([*(p.name for p in mentioned if p), *sorted(names)])
        found: dict[str, tuple[str, ...]] = {}
        for name in (name for name in order if name in names):
            for capability in self.presets[name].capabilities:
                found[capability] = (*found.get(capability, ()), name)
        return found


class PresetStore:
    """The catalogue of one folder. `refresh` before reading it wherever being up to date matters.

    `facts`: what is known of each preset beyond its file. Everything that changes something here looks at files, so
    it belongs in a thread, one call at a time.
    """

    def __init__(self, folder: Path, clock: Callable[[], int] = time.time_ns, learned: Learned | None = None) -> None:
        self.folder = folder
        self.catalogue = Catalogue()
        self.facts: Mapping[str, Facts] = {}
        self.error: PresetError | None = None
        self._ephemeral = Ephemeral()
        self._disk = Catalogue()
        self._learned = learned
        self._clock = clock
        self._seen: _Signature | None = None

    def refresh(self) -> bool:
        """Read the folder again if it changed. True: there is a new catalogue. Never raises; see `error`."""
        try:
            signature = _scan(self.folder)
            if signature is not None and signature == self._seen:
                return False
            self._seen = signature if _settled(signature, self._clock()) else None
            fresh = self._missing() if signature is None else load(self.folder, [name for name, *_ in signature])
        except PresetError as problem:
            self.error = problem
            self._seen = None  # try again: a cure (chmod, mount) need not show in the signature
            return False
        self.error = None
        self._disk = fresh
        return self._merge()

    def register(self, given: dict[str, Any]) -> Preset:
        """Add a variant of a preset on disk (see `ephemeral`). Raises PresetError, and nothing has changed."""
        preset = self._ephemeral.register(given, self._disk.presets)
        self._merge()
        return preset

    def remove(self, name: str) -> bool:
        """Forget a variant; False = there is none of that name."""
        found = self._ephemeral.remove(name)
        self._merge()
        return found

    def size_up(self) -> None:
        """Look again at what is known of each preset."""
        self.facts = {name: facts(preset, self._learned) for name, preset in self.catalogue.presets.items()}

    def _merge(self) -> bool:
        """What is on disk and what was registered, as one; True: that is something new."""
        presets = {**self._disk.presets, **self._ephemeral.derived(self._disk.presets)}
        variants = MappingProxyType(self._ephemeral.bases)
        fresh = replace(self._disk, presets=MappingProxyType(presets), variants=variants)
        if fresh == self.catalogue:
            return False
        self.catalogue = fresh
        self.size_up()
        return True

    def _missing(self) -> Catalogue:
        """No folder is no presets, but one that vanishes (an unmounted volume) takes nobody off the card."""
        if self._disk.presets:
            raise PresetError(self.folder, "the preset directory is gone; its last good state stays in force")
        return Catalogue(notes=(f"{self.folder}: no such directory, so there are no presets",))


def load(folder: Path, files: list[str]) -> Catalogue:
    """The catalogue of those files. Raises PresetError for the first that is wrong."""
    presets: dict[str, Preset] = {}
    texts: dict[str, str] = {}
    routes, routes_text = Routes(), ""
    for file in files:
        shown = str(folder / file)
        text, data = read_toml(folder / file, shown)
        if file == ROUTES_FILE:
            routes, routes_text = parse_routes(text, data, shown), text
            continue
        preset = parse_preset(file.removesuffix(SUFFIX), text, data, shown)
        presets[preset.name], texts[preset.name] = preset, text
    _check_claims(folder, presets, texts)
    catalogue = Catalogue(MappingProxyType(presets), routes)
    return Catalogue(catalogue.presets, routes, tuple(_dangling(catalogue, folder / ROUTES_FILE, routes_text)))


def _check_claims(folder: Path, presets: Mapping[str, Preset], texts: Mapping[str, str]) -> None:
    """Raise if two presets answer to one word."""
    owners: dict[str, tuple[str, str]] = {}
    for name, what, word, path in (claim for preset in presets.values() for claim in _claims(preset)):
        owner, owned_as = owners.setdefault(canonical(word), (name, what))
        if owner != name:
            other = folder / f"{owner}{SUFFIX}"
            message = f'the {what} "{word}" is already the {owned_as} of {other}'
            raise PresetError(
                folder / f"{name}{SUFFIX}", message, line=find_line(texts[name], path), key=".".join(path)
            )


def _claims(preset: Preset) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(preset, what, word, key) of everything a request may call it."""
    yield preset.name, "name", preset.name, ()
    for alias in preset.aliases:
        yield preset.name, "alias", alias, ("aliases",)
    if preset.model and preset.stem:
        key = "file" if preset.model.file else "path" if preset.model.path else "repo"
        yield preset.name, "artifact stem", preset.stem, ("model", key)


def _dangling(catalogue: Catalogue, file: Path, text: str) -> Iterator[str]:
    for route, chain in catalogue.routes.chains.items():
        for entry in chain:
            if catalogue.find(entry) is None:
                line = find_line(text, (route,)) or find_line(text, ("route", route))
                yield f'{file}:{line}: the route "{route}" names "{entry}", which no preset is called; it will fail'


def _scan(folder: Path) -> _Signature | None:
    """What tells whether anything changed; None = there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            files = [entry for entry in entries if entry.name.endswith(SUFFIX) and not entry.name.startswith(".")]
            return tuple(sorted(_stat(entry) for entry in files))
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise PresetError(folder, f"the preset directory cannot be read: {problem.strerror}") from None


def _stat(entry: os.DirEntry[str]) -> tuple[str, int, int, int]:
    try:
        stat = entry.stat()
    except OSError:  # it went away, or is a link to nowhere: reading it will say so
        return entry.name, 0, 0, 0
    return entry.name, stat.st_mtime_ns, stat.st_size, stat.st_ino


def _settled(signature: _Signature | None, now: int) -> bool:
    """Whether an equal signature next time will mean equal content."""
    return signature is not None and all(abs(now - changed) > _RACY for _, changed, _, _ in signature)
