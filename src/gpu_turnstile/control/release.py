"""Breaking the glass: forcing the card free when something hangs (the turnstile document's open question, answered).

It cuts work that runs. It says what it cut, to the caller, in the log and in `/events`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError

from gpu_turnstile.control.given import TheCaller, TheHouse
from gpu_turnstile.control.problems import Refusal

router = APIRouter(tags=["card"])


class ReleaseRequest(BaseModel):
    reason: str = Field("asked for by hand", max_length=500)


class Released(BaseModel):
    released: list[dict[str, Any]] = Field(description="what was cut: leases, and a swap that was under way")
    reason: str


_BODY = {"requestBody": {"content": {"application/json": {"schema": ReleaseRequest.model_json_schema()}}}}


@router.post("/gpu-turnstile/release", summary="Force the card free", openapi_extra=_BODY)
async def release(request: Request, house: TheHouse, caller: TheCaller) -> Released:
    """Ends every lock and every lease now, whoever holds it, and a swap that hangs. Whoever waits is served next.

    Who did it, from where, why, and whose work and locks were ended stands in the log, in `/events` and in the history.
    """
    text = await request.body()
    try:
        wish = ReleaseRequest.model_validate_json(text) if text.strip() else ReleaseRequest()
    except ValidationError as error:
        first = error.errors()[0]
        raise Refusal("bad_request", f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}", 400) from None
    cut = await house.arbiter.break_glass(wish.reason, caller.name or "", caller.peer)
    return Released(released=cut, reason=wish.reason)
