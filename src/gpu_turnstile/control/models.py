"""`/v1/models`: what a client can name, presets first, then whatever the external Ollama has.

Only presets that serve language models: an image preset in a chat client's menu would be a trap. The folder is read
again before every listing (cheap when nothing changed), so an edited preset needs no restart.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gpu_turnstile.control.given import TheHouse, TheOllama
from gpu_turnstile.control.house import House
from gpu_turnstile.control.problems import Refusal
from gpu_turnstile.control.shapes import ModelEntry, ModelList, ModelMeta
from gpu_turnstile.core.model import Code, Mode
from gpu_turnstile.presets.errors import nearest
from gpu_turnstile.presets.estimate import Facts
from gpu_turnstile.presets.schema import Preset

router = APIRouter(tags=["models"])


@router.get("/models", summary="The same as /v1/models")
@router.get("/v1/models", summary="Models that can be named")
async def models(house: TheHouse, ollama: TheOllama) -> ModelList:
    """OpenAI's listing. `meta` is what a client needs to size itself, and whether the preset holds the card now."""
    await house.refresh()
    entries = _presets(house)
    names = {entry.id for entry in entries}
    return ModelList(data=[*entries, *(item for item in await ollama.models(house) if item["id"] not in names)])


@router.get("/models/{name:path}", summary="The same as /v1/models/{name}")
@router.get("/v1/models/{name:path}", summary="One of them")
async def model(house: TheHouse, ollama: TheOllama, name: str) -> ModelEntry | dict[str, Any]:
    """Also by alias or by artifact stem; the `id` in the answer is the preset's name."""
    await house.refresh()
    entries = {entry.id: entry for entry in _presets(house)}
    preset = house.store.catalogue.find(name)
    if preset is not None and preset.name in entries:
        return entries[preset.name]
    external = await ollama.models(house)
    for item in external:
        if item["id"] == name:
            return item
    close = nearest(name, [*entries, *(str(item["id"]) for item in external)])
    hint = f'; did you mean "{close}"?' if close else "; GET /v1/models lists them"
    raise Refusal(Code.UNKNOWN_MODEL, f'no model is called "{name[:80]}"{hint}')


def _presets(house: House) -> list[ModelEntry]:
    residents = house.arbiter.snapshot().residents
    found = house.store.catalogue.presets
    return [
        entry(house, preset, preset.name in residents) for _, preset in sorted(found.items()) if preset.mode is Mode.LLM
    ]


def entry(house: House, preset: Preset, loaded: bool) -> ModelEntry:
    """What is known of a preset, for a client that sizes itself by it."""
    runtime, facts = preset.runtime, house.store.facts.get(preset.name, Facts())
    meta = ModelMeta(
        model_id=preset.stem,
        engine=preset.engine,
        context=facts.context,
        reasoning=runtime.reasoning,
        max_output=runtime.max_output,
        vram_gb=facts.size.gb if facts.size is not None else None,
        vram_from=facts.size.how if facts.size is not None else None,
        capabilities=list(preset.capabilities),
        aliases=list(preset.aliases),
        loaded=loaded,
        ephemeral_of=house.store.catalogue.variants.get(preset.name),
    )
    return ModelEntry(id=preset.name, created=int(house.started), meta=meta)
