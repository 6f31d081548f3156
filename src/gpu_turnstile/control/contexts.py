"""Saved conversations: what there is, and removing it. Their content is not to be had here, nor anywhere else."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from pydantic import BaseModel, Field

from gpu_turnstile.contexts.book import Book
from gpu_turnstile.control.given import TheHouse
from gpu_turnstile.control.problems import Refusal

router = APIRouter(tags=["conversations"])


class SavedPreset(BaseModel):
    preset: str
    files: int
    bytes: int
    tokens: int
    age_s: float | None = Field(description="of the newest; null: there is none")
    useless: str | None = Field(description="why nothing is saved any more for this preset; null: it is")


class Contexts(BaseModel):
    """Counts are since the gate started; `saved` and `restored` are slots."""

    folder: str
    bytes: int
    limit_bytes: int = Field(description="0: no limit")
    saved: int
    restored: int
    tokens_saved: int
    tokens_restored: int
    tokens_reused: int = Field(description="what answers after a restore took from the engine's cache, by its own word")
    seconds_saved: float = Field(description="of reading prompts, less what saving and restoring took")
    failures: dict[str, int] = Field(description="what went wrong, by kind; each cost a prefill and nothing else")
    presets: list[SavedPreset]


class Dropped(BaseModel):
    files: int
    bytes: int


def view(book: Book) -> Contexts:
    saved = [SavedPreset.model_validate(row) for row in book.saved()]
    return Contexts(
        folder=str(book.store.folder),
        bytes=book.store.size,
        limit_bytes=book.store.limit,
        presets=saved,
        **asdict(book.counts),
    )


@router.get("/v1/contexts", summary="Saved conversations")
async def read_contexts(house: TheHouse) -> Contexts:
    """How many files, of which preset, how old; what restoring them has brought."""
    return view(_book(house.contexts))


@router.delete("/v1/contexts", summary="Remove all saved conversations")
async def drop_all(house: TheHouse) -> Dropped:
    """The files are gone when this answers. A preset that had given up saving tries again."""
    return _dropped(_book(house.contexts).store.drop())


@router.delete("/v1/contexts/{preset}", summary="Remove a preset's saved conversations")
async def drop(preset: str, house: TheHouse) -> Dropped:
    """The same for one preset; one that has nothing saved is no error."""
    book = _book(house.contexts)
    if preset not in house.arbiter.seats and preset not in {shelf.name for shelf in book.store.shelves}:
        raise Refusal("unknown_model", f'no preset is called "{preset[:80]}", and nothing of it is saved', 404)
    return _dropped(book.store.drop(preset))


def _book(book: Book | None) -> Book:
    if book is None:
        raise Refusal("not_saved", "no conversations are saved: LLMC_CONTEXT_SAVE is off, or the log says why", 404)
    return book


def _dropped(done: tuple[int, int]) -> Dropped:
    return Dropped(files=done[0], bytes=done[1])
