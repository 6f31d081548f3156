"""`/v1/presets`: every preset, and the ephemeral ones that come and go over HTTP.

An ephemeral preset varies one that is on disk; what it may bring is decided in `presets/ephemeral.py`, and it is never
a command, an image, a mount or a device.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from gpu_turnstile.control import models
from gpu_turnstile.control.body import read_object
from gpu_turnstile.control.given import TheHouse
from gpu_turnstile.control.house import House
from gpu_turnstile.control.problems import Refusal
from gpu_turnstile.control.shapes import PresetEntry, PresetList
from gpu_turnstile.presets.ephemeral import Change
from gpu_turnstile.presets.errors import PresetError
from gpu_turnstile.presets.schema import Preset

router = APIRouter(tags=["presets"])

_BODY = {"requestBody": {"content": {"application/json": {"schema": Change.model_json_schema()}}}}


@router.get("/v1/presets", summary="Every preset")
async def presets(house: TheHouse) -> PresetList:
    """Also those that serve no language model; `meta.ephemeral_of` tells the variants."""
    await house.refresh()
    found = house.store.catalogue.presets
    error = house.store.error
    return PresetList(
        presets=[_entry(house, preset) for _, preset in sorted(found.items())], error=str(error) if error else None
    )


@router.post("/v1/presets", status_code=201, summary="Register an ephemeral preset", openapi_extra=_BODY)
async def register(request: Request, house: TheHouse) -> PresetEntry:
    """In memory: it survives reloads, not a restart; one of the same name is replaced. What is on disk wins."""
    given = await read_object(request)
    await house.refresh()
    try:
        preset = await house.register(given)
    except PresetError as problem:
        raise Refusal("bad_request", str(problem)) from None
    return _entry(house, preset)


@router.delete("/v1/presets", status_code=204, summary="Remove an ephemeral preset")
async def remove(request: Request, house: TheHouse) -> None:
    """Named in the body, `{"name": "..."}`. On the card, it drains and leaves."""
    name = (await read_object(request)).get("name")
    if not isinstance(name, str):
        raise Refusal("bad_request", 'which one? The body must be {"name": "an-ephemeral-preset"}')
    await _remove(house, name)


@router.delete("/v1/presets/{name}", status_code=204, summary="The same, named in the path")
async def remove_named(house: TheHouse, name: str) -> None:
    """204 when it is gone from the table; its engine leaves when its last answer has ended."""
    await _remove(house, name)


async def _remove(house: House, name: str) -> None:
    if await house.remove(name):
        return
    if name in house.store.catalogue.presets:
        raise Refusal("bad_request", f'"{name}" is a file; remove it from {house.store.folder}')
    raise Refusal("unknown_model", f'no ephemeral preset is called "{name[:80]}"; GET /v1/presets lists them')


def _entry(house: House, preset: Preset) -> PresetEntry:
    loaded = preset.name in house.arbiter.snapshot().residents
    meta = models.entry(house, preset, loaded).meta
    return PresetEntry(name=preset.name, mode=preset.mode, runtime=preset.runtime.kind, meta=meta)
