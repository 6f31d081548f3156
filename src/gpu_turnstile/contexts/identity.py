"""Which program and which model files these are: what the disk says, for the fingerprint.

A file is known by its place in the file system, size, time of change and beginning. Its content is not read: models
have tens of gigabytes, and a file that was replaced or written to has another time of change, whatever its date says.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpu_turnstile.contexts.fingerprint import Traits, files_behind, named, traits

MODEL_FLAGS = ("-m", "--model", "--hf-repo", "--hf-file")
BEGINNING = 1 << 16  # bytes: a GGUF's description, as far as it is not its vocabulary


def facts(argv: Sequence[str], env: Mapping[str, str], program: Sequence[str], files: Iterable[Path]) -> Traits:
    """What can be known of an engine before it is started. Raises OSError; for a thread."""
    found = traits(argv, env)
    model = named(argv, MODEL_FLAGS)  # all there is to go by where the files cannot be seen from here
    found["model"] = _digest([*model, *(_file(path) for path in files)])
    found["program"] = _digest([_word(word) for word in program])
    found["adapters"] = _digest([_file(Path(word)) for word in files_behind(argv) if os.path.isfile(word)])
    return found


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(words).encode(errors="surrogateescape")).hexdigest()[:16]


def _file(path: Path) -> str:
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        beginning = hashlib.sha256(file.read(BEGINNING)).hexdigest()
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {beginning}"


def _word(word: str) -> str:
    """Of a command: a file it names stands for itself."""
    place = shutil.which(word) or word
    path = Path(os.path.realpath(place))
    return f"{path} {_file(path)}" if path.is_file() else word
