"""`/api/tags` and `/api/ps` in Ollama's own terms, for clients that know no other list.

The gate answers them only where it owns presets and there is no Ollama: else they are Ollama's business.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from gpu_turnstile.control.given import TheHouse
from gpu_turnstile.control.house import House
from gpu_turnstile.core.model import Mode
from gpu_turnstile.presets.estimate import Facts
from gpu_turnstile.presets.schema import Preset

router = APIRouter(tags=["models"])
GB = 1 << 30


@router.get("/api/tags", summary="The presets, as Ollama lists models")
async def tags(house: TheHouse) -> dict[str, Any]:
    await house.refresh()
    return {"models": [_entry(house, preset) for preset in _presets(house)]}


@router.get("/api/ps", summary="The preset on the card, as Ollama lists running models")
async def running(house: TheHouse) -> dict[str, Any]:
    residents = house.arbiter.snapshot().residents
    return {"models": [_running(house, preset) for preset in _presets(house) if preset.name in residents]}


def _presets(house: House) -> list[Preset]:
    found = house.store.catalogue.presets
    return [preset for _, preset in sorted(found.items()) if preset.mode is Mode.LLM]


def _entry(house: House, preset: Preset) -> dict[str, Any]:
    """Sizes are what the preset needs on the card, as far as that is known; 0 = it is not."""
    size = house.store.facts.get(preset.name, Facts()).size
    modified = datetime.fromtimestamp(house.started, UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": preset.name,
        "model": preset.name,
        "modified_at": modified,
        "size": int(size.gb * GB) if size is not None else 0,
        "digest": hashlib.sha256(f"{preset.name} {preset.revision}".encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": preset.engine,
            "families": [preset.engine],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _running(house: House, preset: Preset) -> dict[str, Any]:
    entry = _entry(house, preset)
    del entry["modified_at"]
    return entry | {"expires_at": "2318-01-01T00:00:00Z", "size_vram": entry["size"]}
