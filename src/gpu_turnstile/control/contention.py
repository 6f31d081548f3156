"""`/contention`: was a measurement alone on the card? The judging is `contention.judge`; this file reads the window.

Before it is judged everything is looked at once more, so that the answer covers the very moment it is asked for.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from gpu_turnstile.contention import Kind, Who, Window, as_json, judge
from gpu_turnstile.control.problems import Refusal
from gpu_turnstile.journal.history import HistoryError
from gpu_turnstile.journal.lookout import Lookout

AHEAD = 5.0  # seconds that the caller's clock may be ahead of ours
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
UNIX = (1e9, 1e11)  # seconds since the epoch that make sense: 2001 to 5138
NAMES = 32  # how often a parameter may be given
FORMS = "give an ISO time (2026-09-18T10:00:00Z), seconds since the epoch, now, or a time ago such as -90s, -15m, -2h"

router = APIRouter(tags=["observability"])
_RELATIVE = re.compile(r"-(\d{1,9}(?:\.\d{1,6})?)([smhd])")
_SPACE_FOR_PLUS = re.compile(r" (\d\d:?\d\d)$")  # what becomes of "+02:00" in a query that nobody quoted


class FindingShape(BaseModel):
    kind: Kind
    who: str
    when: str = Field(description="where it begins in the window, ISO 8601 in UTC")
    seconds: float | None = Field(description="how much of the window it took; null: a moment")
    text: str


class CertificateShape(BaseModel):
    clean: bool = Field(description="nothing else used the card, and the gate watched all the time")
    since: str
    until: str
    seconds: float
    findings: list[FindingShape]
    notes: list[str] = Field(description="what could not be seen; does not make the window unclean")


Since = Annotated[str | None, Query(description=f"beginning of the window: {FORMS}")]
Until = Annotated[str, Query(description="its end, in the same forms")]
Owner = Annotated[list[str] | None, Query(description="whose measurement it is; may be given several times")]
Client = Annotated[list[str] | None, Query(description="clients that belong to it and name no owner")]
Pid = Annotated[list[int] | None, Query(description="processes of its own that use the card, with their children")]
Allow = Annotated[list[str] | None, Query(description="names of processes that may be on the card: Xorg, gnome-shell")]


@router.get("/contention", summary="Was a measurement alone on the card?")
async def contention(
    request: Request,
    since: Since = None,
    until: Until = "now",
    owner: Owner = None,
    client: Client = None,
    pid: Pid = None,
    allow: Allow = None,
) -> CertificateShape:
    """What else used the card in a window: requests of others, swaps and drains, lapses, processes, blind spots.

    Without `owner` and `client`, every use of the card is somebody else's.
    """
    lookout: Lookout | None = getattr(request.app.state.house, "lookout", None)
    if lookout is None:
        raise Refusal("history_unavailable", "this gate keeps no history, so that nothing can be certified", 503)
    window_of(since, until, time.time())  # what is wrong with it is said before anything is done
    names = frozenset(_few("owner", owner)) | frozenset(_few("client", client))
    who = Who(names, frozenset(_few("pid", pid)), frozenset(_few("allow", allow)))
    await lookout.look()
    window = window_of(since, until, time.time())  # now is when everything has been looked at
    try:
        record = await lookout.history.record(window.since, window.until, who.names)
    except HistoryError as problem:
        raise Refusal("history_unavailable", str(problem), 503, retry_after=5.0) from None
    return CertificateShape.model_validate(as_json(judge(window, who, record)))


def window_of(since: str | None, until: str, now: float) -> Window:
    """Raises Refusal. `now`: wall time, seconds; an end that is a little ahead of it is now."""
    if since is None or not since.strip():
        raise Refusal("bad_request", f"since is missing: {FORMS}")
    begin, end = moment("since", since, now), moment("until", until, now)
    if end > now + AHEAD:
        raise Refusal("bad_request", f"until lies {end - now:.0f} s in the future: the window has not ended yet")
    end = min(end, now)
    if begin >= end:
        raise Refusal("bad_request", f"the window is empty: since ({since}) is not before until ({until})")
    return Window(begin, end)


def moment(name: str, text: str, now: float) -> float:
    """Wall time in seconds. A time without a zone is UTC. Raises Refusal."""
    text = _SPACE_FOR_PLUS.sub(r"+\1", text.strip())
    if text == "now":
        return now
    if found := _RELATIVE.fullmatch(text):
        return now - float(found[1]) * UNITS[found[2]]
    try:
        return _unix(name, float(text))
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise Refusal("bad_request", f"{name}: {text[:80]!r} is no time; {FORMS}") from None


def _unix(name: str, seconds: float) -> float:
    if not math.isfinite(seconds) or not UNIX[0] <= seconds < UNIX[1]:
        hint = "these look like milliseconds; " if UNIX[1] <= seconds < UNIX[1] * 1000 else ""
        raise Refusal("bad_request", f"{name}: {seconds:g} are no seconds since the epoch; {hint}{FORMS}")
    return seconds


def _few(name: str, given: Iterable[Any] | None) -> list[Any]:
    found = list(given or ())
    if len(found) > NAMES:
        raise Refusal("bad_request", f"{name} is given {len(found)} times; {NAMES} is the most")
    return found
