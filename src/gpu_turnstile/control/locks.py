"""Locks by HTTP: `POST /mode` with a lock field, and its aliases `/lock` and `/unlock` (the swap document's table).

This file reads bodies and writes answers; every rule is the lock book's. What the book says is durable before it is
told. Wrong types, silly TTLs, unknown presets and missing owners: an answer that says what would be right, no change.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gpu_turnstile.control.body import read_object
from gpu_turnstile.control.given import TheHouse
from gpu_turnstile.control.house import House
from gpu_turnstile.control.problems import Refusal, from_scheduler
from gpu_turnstile.core.locks import (
    Denied,
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
from gpu_turnstile.core.model import Code, Refuse

router = APIRouter(tags=["locks"])

FIELDS = frozenset(("lock", "preset", "unlock", "renew", "owner", "ttl", "wait", "force", "token", "reason"))
_EXAMPLE = {"lock": "a-preset", "owner": "me", "ttl": 900, "wait": False}
_BODY = {"requestBody": {"content": {"application/json": {"schema": {"type": "object", "example": _EXAMPLE}}}}}


@router.post("/lock", summary="Pin a preset", openapi_extra=_BODY)
async def lock(request: Request, house: TheHouse) -> Response:
    """200 with owners and token; 202 with the position in the queue, with `wait`; 409 where others hold it.

    `{"lock": "<preset>" | true, "owner": "<id>"}`, with `ttl`, `wait` and `token` if wanted; or `{"renew": true, …}`.
    """
    given = await read_object(request)
    if not given.keys() & {"lock", "preset", "renew"}:
        given["lock"] = True
    return await act(house, given, _caller(request))


@router.post("/unlock", summary="Let a lock go", openapi_extra=_BODY)
async def unlock(request: Request, house: TheHouse) -> Response:
    """`{"owner": "<id>"}` for one owner; without one everybody, which needs `"force": true` from who is no owner."""
    given = await read_object(request)
    return await act(house, given | {"lock": False}, _caller(request))


def is_lock_call(given: dict[str, Any]) -> bool:
    """Whether the body of a `POST /mode` is about locks."""
    return bool(given.keys() & (FIELDS - {"preset"}))


def _caller(request: Request) -> str | None:
    name = request.headers.get("x-turnstile-client", "").strip()
    return name[:100] or None


async def act(house: House, given: dict[str, Any], caller: str | None) -> Response:
    """Carry out one lock call. Raises Refusal for what cannot be understood."""
    for key in given:
        if key not in FIELDS:
            raise Refusal("bad_request", f'the field "{key[:80]}" is unknown; there are {", ".join(sorted(FIELDS))}')
    token, force = _token(given), _flag(given, "force")
    wish = given.get("lock", given.get("preset"))
    if _flag(given, "unlock"):
        wish = False
    if _flag(given, "renew"):
        answer = await house.arbiter.renew(_owner(given, caller), _ttl(given, None), token)
    elif wish is False:
        owner = _owner(given, None) if "owner" in given else None
        open_unlock = house.settings.llmc_open_unlock
        answer = await house.arbiter.unlock(owner, caller, token, force=force, open_unlock=open_unlock)
    elif wish is True or (isinstance(wish, str) and wish):
        preset = None if wish is True else _preset(house, str(wish))
        ttl = _ttl(given, house.settings.llmc_lock_ttl_s)
        wait = _flag(given, "wait")
        answer = await house.arbiter.lock(
            _owner(given, caller), preset, ttl or 0.0, token, wait=wait, client=caller or ""
        )
    else:
        raise Refusal(
            "bad_request", 'the field "lock" must be the name of a preset, true (the resident) or false (unlock)'
        )
    return _respond(answer)


def _preset(house: House, name: str) -> str:
    found = house.store.catalogue.find(name)
    return found.name if found is not None else name


def _owner(given: dict[str, Any], default: str | None) -> str:
    try:
        return check_owner(given.get("owner", default))
    except ValueError as problem:
        raise Refusal("bad_request", f'the field "owner": {problem}') from None


def _ttl(given: dict[str, Any], default: float | None) -> float | None:
    if "ttl" not in given:
        return default
    try:
        return check_ttl(given["ttl"], default or 0.0)
    except ValueError as problem:
        raise Refusal("bad_request", f'the field "ttl": {problem}') from None


def _token(given: dict[str, Any]) -> int | None:
    token = given.get("token")
    if token is None or (isinstance(token, int) and not isinstance(token, bool)):
        return token
    raise Refusal("bad_request", 'the field "token" must be the number that the lock was given with')


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if isinstance(value, bool):
        return value
    raise Refusal("bad_request", f'the field "{name}" must be true or false')


# ------------------------------------------------------------------------------------------------------- answers


def standing(view: Standing) -> dict[str, Any]:
    """Who holds and who waits, as every answer and `/status` show it. Seconds."""
    return {
        "preset": view.preset,
        "owners": {
            o.owner: {"expires_in": round(o.expires_in, 1), "ttl": o.ttl, "held": round(o.held, 1)} for o in view.owners
        },
        "queue": [
            {
                "owner": w.owner,
                "preset": w.preset,
                "position": w.position,
                "expires_in": round(w.expires_in, 1),
                "waited": round(w.waited, 1),
            }
            for w in view.queue
        ],
        "entitled": view.entitled,
    }


def _respond(answer: object) -> JSONResponse:
    if isinstance(answer, Refuse):
        raise from_scheduler(answer)
    now = standing(answer.standing)  # type: ignore[attr-defined]
    ended = getattr(answer, "ended", None)
    if ended is not None:
        now["ended"] = ended.text(answer.standing.now)  # type: ignore[attr-defined]
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


def _error(status: int, code: str, message: str, now: dict[str, Any], retry_after: float | None) -> JSONResponse:
    headers = {"X-Turnstile-Error": str(code)} | (_retry(retry_after) if retry_after is not None else {})
    return JSONResponse({"error": str(code), "message": message} | now, status, headers)


def _retry(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, ceil(seconds)))}
