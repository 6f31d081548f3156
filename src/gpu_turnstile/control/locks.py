"""Locks by HTTP: `POST /mode` with a lock field, and its aliases `/lock` and `/unlock` (the swap document's table).

This file reads bodies and writes answers; every rule is the lock book's. What the book says is durable before it is
told. Wrong types, silly TTLs, unknown presets and missing owners: an answer that says what would be right, no change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gpu_turnstile.control.body import read_object
from gpu_turnstile.control.given import Caller, TheCaller, TheHouse
from gpu_turnstile.control.house import House
from gpu_turnstile.control.problems import Refusal, from_scheduler
from gpu_turnstile.core.locks import (
    Denied,
    Ended,
    Granted,
    Missing,
    Queued,
    Refused,
    Stale,
    Standing,
    Unlocked,
    check_owner,
    check_ttl,
)
from gpu_turnstile.core.model import Code, Refuse, Unlock

T = TypeVar("T")
router = APIRouter(tags=["locks"])

FIELDS = frozenset(("lock", "preset", "unlock", "renew", "owner", "ttl", "wait", "force", "token", "leave", "reason"))
MAX_REASON = 500
_EXAMPLE = {"lock": "a-preset", "owner": "me", "ttl": 900, "wait": False}
_BODY = {"requestBody": {"content": {"application/json": {"schema": {"type": "object", "example": _EXAMPLE}}}}}


@router.post("/lock", summary="Pin a preset", openapi_extra=_BODY)
async def lock(request: Request, house: TheHouse, caller: TheCaller) -> Response:
    """200 with owners and token; 202 with the position in the queue, with `wait`; 409 where others hold it.

    `{"lock": "<preset>" | true, "owner": "<id>"}`, with `ttl`, `wait` and `token` if wanted; or `{"renew": true, …}`.
    """
    given = await read_object(request)
    if not given.keys() & {"lock", "preset", "renew"}:
        given["lock"] = True
    return await act(house, given, caller)


@router.post("/unlock", summary="Let a lock go", openapi_extra=_BODY)
async def unlock(request: Request, house: TheHouse, caller: TheCaller) -> Response:
    """`{"owner": "<id>"}` for one owner; without one everybody, which needs `"force": true` from who is no owner.

    `{"owner": "<id>", "leave": true}` takes it out of the queue only.
    """
    given = await read_object(request)
    return await act(house, given | {"lock": False}, caller)


def is_lock_call(given: dict[str, Any]) -> bool:
    """Whether the body of a `POST /mode` is about locks."""
    return bool(given.keys() & (FIELDS - {"preset"}))


@dataclass(frozen=True, slots=True)
class Wish:
    """A body that was understood. `what`: a preset's name, True = the resident, False = unlock, None = renew."""

    what: str | bool | None
    owner: str | None
    ttl: float | None
    token: int | None
    reason: str
    wait: bool
    force: bool
    leave: bool


def parse(given: dict[str, Any]) -> Wish:
    """Every field is looked at, also where it changes nothing. Raises Refusal saying what would be right."""
    for key in given:
        if key not in FIELDS:
            raise Refusal("bad_request", f'the field "{key[:80]}" is unknown; there are {", ".join(sorted(FIELDS))}')
    given = {key: value for key, value in given.items() if value is not None}
    return Wish(
        what=_what(given),
        owner=_checked(given, "owner", check_owner),
        ttl=_checked(given, "ttl", check_ttl),
        token=_checked(given, "token", _token),
        reason=_checked(given, "reason", _reason) or "",
        wait=_flag(given, "wait"),
        force=_flag(given, "force"),
        leave=_flag(given, "leave"),
    )


def _what(given: dict[str, Any]) -> str | bool | None:
    wish: object = given.get("lock", given.get("preset"))
    unlock, renew = _flag(given, "unlock"), _flag(given, "renew")
    if renew and (unlock or wish is not None):
        raise Refusal("bad_request", 'a call renews, or it locks or unlocks: "renew" goes without "lock"')
    if renew:
        return None
    if unlock or wish is False:
        return False
    if wish is True or (isinstance(wish, str) and wish):
        return wish
    message = 'the field "lock" must be the name of a preset, true (the resident) or false (unlock)'
    raise Refusal("bad_request", message)


def _checked(given: dict[str, Any], name: str, check: Callable[[object], T]) -> T | None:
    if name not in given:
        return None
    try:
        return check(given[name])
    except ValueError as problem:
        raise Refusal("bad_request", f'the field "{name}": {problem}') from None


def _token(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("a token is the number that the lock was given with")


def _reason(value: object) -> str:
    if isinstance(value, str) and len(value) <= MAX_REASON and value.isprintable():
        return value.strip()
    raise ValueError(f"a reason is a text of at most {MAX_REASON} printable characters")


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if isinstance(value, bool):
        return value
    raise Refusal("bad_request", f'the field "{name}" must be true or false')


async def act(house: House, given: dict[str, Any], caller: Caller) -> Response:
    """Carry out one lock call. Raises Refusal for what cannot be understood."""
    wish, arbiter, settings = parse(given), house.arbiter, house.settings
    token = caller.token if wish.token is None else wish.token
    if wish.what is None:
        answer = await arbiter.renew(_owner(wish, caller), wish.ttl, token)
    elif wish.what is False:
        given_owner = _owner(wish, caller) if wish.leave else wish.owner or caller.owner
        open_to_all = settings.llmc_open_unlock
        answer = await arbiter.unlock(
            Unlock(0, given_owner, caller.name, token, wish.force, open_to_all, wish.leave, caller.peer, wish.reason)
        )
    else:
        preset = None if wish.what is True else _preset(house, wish.what)
        ttl = settings.llmc_lock_ttl_s if wish.ttl is None else wish.ttl
        owner, client = _owner(wish, caller), caller.name or ""
        answer = await arbiter.lock(owner, preset, ttl, token, wait=wish.wait, client=client)
    return _respond(answer, arbiter.saves)


def _preset(house: House, name: str) -> str:
    found = house.store.catalogue.find(name)
    return found.name if found is not None else name


def _owner(wish: Wish, caller: Caller) -> str:
    """Whose lock it is: as the body says, the header, else who calls."""
    try:
        return check_owner(wish.owner or caller.owner or caller.name)
    except ValueError as problem:
        raise Refusal("bad_request", f'the field "owner": {problem}') from None


# ------------------------------------------------------------------------------------------------------- answers


def standing(view: Standing) -> dict[str, Any]:
    """Who holds and who waits, as every answer and `/status` show it. Seconds."""
    return {
        "preset": view.preset,
        "owners": {
            o.owner: {
                "expires_in": round(o.expires_in, 1),
                "ttl": o.ttl,
                "held": round(o.held, 1),
                "client": o.client or None,
            }
            for o in view.owners
        },
        "queue": [
            {
                "owner": w.owner,
                "preset": w.preset,
                "position": w.position,
                "expires_in": round(w.expires_in, 1),
                "waited": round(w.waited, 1),
                "client": w.client or None,
            }
            for w in view.queue
        ],
        "entitled": view.entitled,
    }


def _respond(answer: object, saved: bool) -> JSONResponse:
    if isinstance(answer, Refuse):
        raise from_scheduler(answer)
    now = standing(answer.standing)  # type: ignore[attr-defined]
    if not saved:
        now["warning"] = "the disk does not take it: a restart of the gate will not know of this"
    ended = getattr(answer, "ended", None)
    if ended is not None:
        now["ended"] = _told(ended, answer.standing.now)  # type: ignore[attr-defined]
    match answer:
        case Granted():
            said = {"locked": answer.preset, "owner": answer.owner, "token": answer.token, "ttl": answer.ttl}
            return JSONResponse(said | {"expires_in": answer.expires_in, "joined": answer.joined} | now)
        case Queued():
            said = {"queued": True, "position": answer.position, "lock": answer.preset, "owner": answer.owner}
            return JSONResponse(said | now, 202, _retry(answer.retry_after))
        case Unlocked():
            gone = {"unlocked": list(answer.owners), "left_queue": list(answer.waiters)}
            return JSONResponse(gone | {"cut": [end.owner for end in answer.cut]} | now)
        case Missing():
            return _error(404, "not_held", answer.message, now, None)
        case Refused():
            return _error(409, Code.LOCKED, answer.message, now, answer.retry_after)
        case Stale() | Denied():
            return _error(409, Code.LOCKED, answer.message, now, None)
    raise AssertionError(answer)


def _told(ended: Ended, now: float) -> str:
    """What was lost, with the time on the wall."""
    at = datetime.fromtimestamp(time.time() - (now - ended.at), UTC)
    return ended.text(now, at.isoformat(timespec="seconds").replace("+00:00", "Z"))


def _error(status: int, code: str, message: str, now: dict[str, Any], retry_after: float | None) -> JSONResponse:
    headers = {"X-Turnstile-Error": str(code)} | (_retry(retry_after) if retry_after is not None else {})
    return JSONResponse({"error": str(code), "message": message} | now, status, headers)


def _retry(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, ceil(seconds)))}
