"""Changing who holds the card by hand: `/mode` and `/unload`.

A change waits its turn like a request does and drains like a request does: nobody's work is cut for it before the
drain grace is over. A caller that hangs up is taken out of the line.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from gpu_turnstile.control import locks, shapes, views
from gpu_turnstile.control.body import read_object
from gpu_turnstile.control.feed import Event, Feed
from gpu_turnstile.control.given import TheCaller, TheFeed, TheHouse
from gpu_turnstile.control.house import House
from gpu_turnstile.control.problems import Refusal, from_scheduler
from gpu_turnstile.core.model import Code, Mode, Phase, Snapshot
from gpu_turnstile.core.routes import Missing, Resolved, Unresolved

T = TypeVar("T")


router = APIRouter(tags=["card"])

_BODY = {"requestBody": {"content": {"application/json": {"schema": shapes.ModeRequest.model_json_schema()}}}}


@router.get("/mode", summary="Which kind of work holds the card")
async def read_mode(house: TheHouse) -> shapes.ModeAnswer:
    """`llm`, `comfyui`, `train` or `idle`, and which preset it is."""
    return views.mode(house)


@router.post(
    "/mode",
    summary="Bring a preset onto the card, empty it, or lock it",
    openapi_extra=_BODY,
    response_model=None,
    responses={200: {"model": shapes.Status}},
)
async def set_mode(request: Request, house: TheHouse, feed: TheFeed, caller: TheCaller, response: Response) -> Any:
    """Answers when the change is done. `idle` unloads (see `POST /unload`).

    `llm` without a model is the preset on the card, else the last one, else the route `auto`, else the external Ollama
    or the only preset there is.
    """
    given = await read_object(request)
    if locks.is_lock_call(given):
        return await locks.act(house, given, caller)
    wish = _parse(given)
    if wish.mode is Mode.IDLE:
        response.status_code = await _or_gone(request, _unload(house, feed))
    else:
        tenant = _tenant(house, wish)
        owner = caller.owner or caller.name
        change = house.arbiter.set_mode(tenant, None, caller.said, owner=owner, token=caller.token)
        refusal = await _or_gone(request, change)
        if refusal is not None:
            raise from_scheduler(refusal)
    return await views.status(house, feed)


@router.post(
    "/unload",
    summary="Empty the card",
    responses={202: {"model": shapes.Status, "description": "Not empty yet: leases still hold it"}},
)
async def unload(request: Request, house: TheHouse, feed: TheFeed, response: Response) -> shapes.Status:
    """Drains, then takes everybody off the card; whoever waits is served afterwards.

    200 when the card was emptied, 202 when it takes longer than the drain grace and an unload together.
    """
    response.status_code = await _or_gone(request, _unload(house, feed))
    return await views.status(house, feed)


# ------------------------------------------------------------------------------------------------- understanding


def _parse(given: dict[str, Any]) -> shapes.ModeRequest:
    modes = ", ".join(Mode)
    if "mode" not in given:
        raise Refusal("bad_request", f'the field "mode" is missing; it is one of {modes}')
    for key in given:
        if key not in shapes.ModeRequest.model_fields:
            raise Refusal("bad_request", f'the field "{key[:80]}" is unknown; there are "mode" and "model"')
    try:
        wish = shapes.ModeRequest.model_validate(given)
    except ValidationError as problem:
        field = problem.errors()[0]["loc"][0]
        right = f"one of {modes}" if field == "mode" else "a text: the name of a preset"
        raise Refusal("bad_request", f'the field "{field}" must be {right}') from None
    if wish.mode is Mode.IDLE and wish.model is not None:
        raise Refusal("bad_request", 'mode "idle" empties the card; it takes no model')
    return wish


def _tenant(house: House, wish: shapes.ModeRequest) -> str:
    """Whom the wish means. Raises Refusal."""
    if wish.model is not None:
        preset = house.store.catalogue.find(wish.model)
        name = preset.name if preset is not None else wish.model
        seat = house.arbiter.seats.get(name)
        if seat is not None and seat.tenant.mode is not wish.mode:
            message = f'"{name}" is no {wish.mode} preset: its mode is {seat.tenant.mode}'
            raise Refusal("bad_request", message)
        if seat is not None:
            return name
    if wish.mode is Mode.LLM:
        return _language_model(house, wish.model)
    return _service(house, wish.mode, wish.model)


def _language_model(house: House, model: str | None) -> str:
    """The rules that a request's `model` goes through; without a model also what there is only one of."""
    found = house.gateway.resolve(model, None)
    if isinstance(found, Resolved) and found.wants:
        return found.wants[0]
    if isinstance(found, Missing):
        names = [name for name, seat in house.arbiter.seats.items() if seat.tenant.mode is Mode.LLM]
        external = house.gateway.table.external
        if external is not None or len(names) == 1:
            return external or names[0]
        raise Refusal("bad_request", f'which one? Name a "model": there is {", ".join(names) or "none"}')
    if isinstance(found, Resolved):
        raise Refusal(Code.SERVICE_INACTIVE, "this route never brings anybody in, and nobody is on the card")
    raise Refusal(found.code if isinstance(found, Unresolved) else "bad_request", found.message)


def _service(house: House, mode: Mode, model: str | None) -> str:
    table = house.gateway.table
    tenant = table.comfyui if mode is Mode.COMFYUI else table.train
    if model is None and tenant is not None:
        return tenant
    known = [name for name, seat in house.arbiter.seats.items() if seat.tenant.mode is mode]
    there = f"there is {', '.join(known)}" if known else f"there is no preset of mode {mode}"
    missing = f'no {mode} preset is called "{model[:80]}"' if model is not None else f"no engine serves {mode}"
    raise Refusal(Code.UNKNOWN_MODEL, f"{missing}; {there}")


# --------------------------------------------------------------------------------------------------------- doing


async def _or_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the caller hangs up."""
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Refusal("client_gone", "the caller has left", 499)
        return doing.result()
    finally:
        doing.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unload(house: House, feed: Feed) -> int:
    """Empty the card; the status to answer with. Raises Refusal when it could not be emptied."""
    settings = house.settings
    limit = settings.unload_timeout + settings.llmc_drain_grace_s
    with feed.subscribe(pause=limit) as items:
        house.arbiter.unload()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while not _is_empty(house.arbiter.snapshot()):
                    item = await anext(items, None)
                    if item is None:
                        return 202
                    if isinstance(item, Event) and _says_done(item):
                        return 200
                return 200
    return 202


def _is_empty(snapshot: Snapshot) -> bool:
    return snapshot.phase is Phase.IDLE and not snapshot.residents and not snapshot.stuck


def _says_done(event: Event) -> bool:
    """An unload is a swap without a target."""
    if event.kind == "swap_failed" and event.fields.get("target") is None:
        raise Refusal(Code.SWAP_FAILED, f"the card could not be emptied: {event.fields.get('reason')}")
    return event.kind == "swapped" and event.fields.get("target") is None
