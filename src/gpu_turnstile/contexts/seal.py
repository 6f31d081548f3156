"""The two readings of a saved file: one after it was written, before it counts; one before it is offered.

Both go from its first byte to its last, in a thread, beside whatever the card is doing. What they do not find as it
should be is removed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gpu_turnstile.contexts.book import Book
from gpu_turnstile.contexts.fingerprint import Traits
from gpu_turnstile.contexts.store import Entry, Shelf, checksum


@dataclass(frozen=True, slots=True)
class Written:
    """A file an engine says it has written, not read by us yet. `tokens`, `size` (bytes) by its word.

    `replaces`: the file whose conversation goes on in this one.
    """

    slot: int
    file: str
    tokens: int
    size: int
    replaces: str | None


async def whole_files(shelf: Shelf, book: Book) -> set[str]:
    """The saved files that have the size and checksum they were saved with; the others are removed."""
    whole = set()
    for entry in tuple(shelf.index.entries):
        if await _read(shelf, entry.file) == (entry.size, entry.sha256):
            whole.add(entry.file)
        else:
            shelf.discard([entry.file])
            book.fail(shelf.name, "corrupt", "a saved file is not what was saved; it is removed")
    return whole


async def seal(shelf: Shelf, book: Book, written: list[Written], fingerprint: Traits, most: int) -> None:
    """Into the index with what is whole; of all the preset has, the newest `most` stay."""
    at = book.wall()
    for one in written:
        size, digest = await _read(shelf, one.file)
        if size != one.size:
            shelf.discard([one.file])
            reason = f"a saved file has {size} bytes where the engine wrote {one.size}; it is removed"
            book.fail(shelf.name, "corrupt", reason)
            continue
        shelf.index.entries.append(Entry(one.file, size, digest, one.tokens, at, fingerprint))
        shelf.discard([one.replaces] if one.replaces else ())
        book.counts.saved += 1
        book.counts.tokens_saved += one.tokens
    newest = sorted(shelf.index.entries, key=lambda entry: (-entry.at, -entry.tokens))
    shelf.discard(entry.file for entry in newest[max(1, most) :])
    book.store.tidy(book.wall())
    shelf.save()


async def _read(shelf: Shelf, file: str) -> tuple[int, str]:
    """(bytes, checksum); -1 bytes: it cannot be read."""
    try:
        return await asyncio.to_thread(checksum, shelf.path(file))
    except OSError as error:
        return -1, str(error)
