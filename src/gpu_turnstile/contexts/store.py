"""The folder of saved conversations: one folder a preset, one file a slot, an index of what is whole.

    contexts/            0700, locked by the gate that uses it
      qwen/              0700, what the engine is told to write into
        index.json       0600: size, SHA-256, tokens, time and fingerprint of each file
        ctx-….bin        0600, made empty by us before the engine fills it, so that it is never anybody else's to read

The files are transcripts: whoever can read one can read the conversation.

Invariants: only what stands in the index is ever offered to an engine, and it stands there only after its bytes were
read and their checksum taken; everything else of ours is rubbish and is swept. The index is replaced as a whole.
Nothing here blocks for long but `checksum` and `open_folder`, which are for threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

FILE = re.compile(r"ctx-[0-9a-f]{16}\.bin")
INDEX = "index.json"
PIECE = 1 << 20  # bytes read at a time


class StoreError(Exception):
    """The folder cannot be used. The text is one line for a person."""


class Entry(msgspec.Struct, frozen=True):
    """One saved slot. `at`: seconds of the epoch; `size` in bytes; `sha256` in hex."""

    file: str
    size: int
    sha256: str
    tokens: int
    at: float
    fingerprint: dict[str, str]


class Index(msgspec.Struct):
    """What is known of a preset. `prefill_…`: what reading prompts has cost it so far, measured by the engine.

    `running`: the fingerprint of the engine that was started last, for a gate that finds it running. `misses`: restores
    running of which the next answers used nothing; `useless`: why none is tried any more, with that fingerprint.
    """

    entries: list[Entry] = []
    prefill_tokens: float = 0.0
    prefill_seconds: float = 0.0
    running: dict[str, str] | None = None
    misses: int = 0
    useless: str | None = None
    useless_for: dict[str, str] | None = None


class Shelf:
    """One preset's files and index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = Index()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.index.entries)

    def load(self) -> None:
        """Read the index, forget entries without a file, remove files without an entry."""
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            self.index = msgspec.json.decode((self.folder / INDEX).read_bytes(), type=Index)
        self.index.entries = [entry for entry in self.index.entries if self._is_plausible(entry)]
        self.sweep()

    def _is_plausible(self, entry: Entry) -> bool:
        if not FILE.fullmatch(entry.file):
            return False
        try:
            found = (self.folder / entry.file).lstat()
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == entry.size

    def make(self) -> None:
        """The folder, for nobody but us. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)

    def new_file(self) -> str:
        """The name of an empty file of ours that an engine may fill. Raises OSError."""
        self.make()
        name = f"ctx-{secrets.token_hex(8)}.bin"
        os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        return name

    def path(self, name: str) -> Path:
        return self.folder / name

    def discard(self, names: Iterable[str]) -> None:
        """Remove files and their entries."""
        gone = set(names)
        for name in gone:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()
        if any(entry.file in gone for entry in self.index.entries):
            self.index.entries = [entry for entry in self.index.entries if entry.file not in gone]
            self.save()

    def sweep(self, keep: Iterable[str] = ()) -> None:
        """Remove files that nobody knows: what was under way when a gate or an engine died, or what clients saved."""
        known = {INDEX, *(entry.file for entry in self.index.entries), *keep}
        with contextlib.suppress(OSError):
            for file in self.folder.iterdir():
                if file.name not in known:
                    with contextlib.suppress(OSError):
                        file.unlink()

    def save(self) -> None:
        """Write the index. That it cannot be written costs what would have been in it."""
        with contextlib.suppress(OSError):
            self.make()
            handle, temporary = tempfile.mkstemp(prefix=".index.", dir=self.folder)  # mode 0600
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(msgspec.json.encode(self.index))
                os.replace(temporary, self.folder / INDEX)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise


class Store:
    """`limit` in bytes and `max_age` in seconds bound all presets together; 0 = no limit."""

    def __init__(self, folder: Path, limit: int, max_age: float) -> None:
        self.folder = folder
        self.limit = limit
        self.max_age = max_age
        self._shelves: dict[str, Shelf] = {}
        self._lock: int | None = None

    def open_folder(self) -> None:
        """Make it ours alone and read what is there. Raises StoreError."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(self.folder):
                raise StoreError(f"{self.folder} belongs to somebody else, or cannot be closed to others")
            self._lock = _locked(self.folder / "lock")
        except OSError as error:
            raise StoreError(f"{self.folder}: {error.strerror or error}") from None
        for folder in sorted(self.folder.iterdir()):
            if folder.is_dir() and not folder.is_symlink():
                self.shelf(folder.name)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def shelf(self, name: str) -> Shelf:
        if name not in self._shelves:
            shelf = self._shelves[name] = Shelf(self.folder / name)
            shelf.load()
        return self._shelves[name]

    @property
    def shelves(self) -> tuple[Shelf, ...]:
        return tuple(self._shelves.values())

    @property
    def size(self) -> int:
        return sum(shelf.size for shelf in self._shelves.values())

    def tidy(self, now: float, room: int = 0) -> int:
        """Remove what is too old, then the oldest until `room` bytes more would fit; how many files went."""
        before = sum(len(shelf.index.entries) for shelf in self.shelves)
        if self.max_age:
            for shelf in self.shelves:
                shelf.discard(entry.file for entry in shelf.index.entries if now - entry.at > self.max_age)
        while self.limit and self.size + room > self.limit:
            oldest = min(((e.at, e.file, s) for s in self.shelves for e in s.index.entries), key=_age, default=None)
            if oldest is None:
                break
            oldest[2].discard([oldest[1]])
        return before - sum(len(shelf.index.entries) for shelf in self.shelves)

    def has_room(self, size: int) -> bool:
        """Whether the disk could take so much and keep a little for others."""
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return False
        return free > size + max(64 << 20, size // 10)

    def drop(self, name: str | None = None) -> tuple[int, int]:
        """Remove what is saved of a preset (None = of all) and what was learned of it: (files, bytes)."""
        chosen = [shelf for shelf in self.shelves if name in (None, shelf.name)]
        count, size = sum(len(shelf.index.entries) for shelf in chosen), sum(shelf.size for shelf in chosen)
        for shelf in chosen:
            shelf.discard([entry.file for entry in shelf.index.entries])
            shelf.index.misses, shelf.index.useless, shelf.index.useless_for = 0, None, None
            shelf.save()
        return count, size


def _age(found: tuple[float, str, Shelf]) -> tuple[float, str]:
    return found[0], found[1]


def checksum(path: Path) -> tuple[int, str]:
    """(bytes, SHA-256) of a file, read to its end. Raises OSError. For a thread: it may take seconds."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def _is_private(folder: Path) -> bool:
    if sys.platform == "win32":
        return True
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    folder.chmod(0o700)
    return stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0


def _locked(path: Path) -> int:
    """A handle that keeps the folder for us as long as it is open. Raises StoreError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise StoreError(f"another gate keeps its conversations in {path.parent} (LLMC_CONTEXT_DIR)") from None
    return handle
