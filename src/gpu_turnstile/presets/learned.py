"""How many bytes of the card each preset took when it was loaded last: a small file in the state folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

import msgspec

LEAST = 64 << 20  # bytes; less is the noise of other programs
MOST = 1000  # presets
SAME = 0.02  # two loads that differ by no more of the size are alike


class Measured(msgspec.Struct, frozen=True):
    revision: str
    bytes: int
    at: float = 0.0  # seconds of the epoch


class Learned:
    """A changed preset is unknown again.

    A file that makes no sense is begun anew; one that cannot be written only costs the memory after a restart.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._measured: dict[str, Measured] = {}
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            self._measured = msgspec.json.decode(file.read_bytes(), type=dict[str, Measured])

    def of(self, name: str, revision: str) -> int | None:
        found = self._measured.get(name)
        return found.bytes if found is not None and found.revision == revision else None

    def note(self, name: str, revision: str, bytes: int) -> bool:
        """A load was measured. What is too little to be true is not believed; what is about the same is no news."""
        known = self.of(name, revision)
        if bytes < LEAST or (known is not None and abs(bytes - known) <= known * SAME):
            return False
        self._measured.pop(name, None)
        self._measured[name] = Measured(revision, bytes, time.time())
        while len(self._measured) > MOST:
            del self._measured[next(iter(self._measured))]
        with contextlib.suppress(OSError):
            self._save()
        return True

    def _save(self) -> None:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{self.file.name}.", dir=self.file.parent)  # mode 0600
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(msgspec.json.encode(self._measured))
            os.replace(temporary, self.file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
