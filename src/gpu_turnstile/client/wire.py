"""The gate's calls and answers, without any I/O: what to send, and what an answer means.

Both clients use it, so they cannot disagree. An answer becomes a value or one of `errors`.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from gpu_turnstile.client import shapes
from gpu_turnstile.client.errors import (
    BadRequest,
    Locked,
    NotHeld,
    StaleLock,
    TurnstileError,
    Unavailable,
    Unreachable,
)

URL = "TURNSTILE_URL"
KEY = "TURNSTILE_API_KEY"
DEFAULT_URL = "http://127.0.0.1:11434"
CONNECT = 3.0  # seconds
ANSWER = 10.0  # seconds for a call that changes nothing on the card
JUDGED = 30.0  # seconds for a certificate: the history is flushed and the card read first
QUIET = 60.0  # seconds; the event stream says something every 15
UNLOCK = "/unlock"
Outcome = shapes.Granted | shapes.Queued | shapes.Unlocked | TurnstileError
_LABEL = 100  # characters the gate keeps of a client's name
_BAD = frozenset((400, 401, 403, 404, 405, 413, 421, 499))


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call. `limit`: seconds the answer may take; None = as long as the change takes."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    limit: float | None = ANSWER

    @property
    def timeout(self) -> httpx.Timeout:
        return httpx.Timeout(self.limit, connect=CONNECT)

    @property
    def token(self) -> int | None:
        return (self.body or {}).get("token")


def url(given: str | None) -> str:
    """What was given, else TURNSTILE_URL, else this machine."""
    found = given or os.environ.get(URL) or DEFAULT_URL
    return (found if "://" in found else f"http://{found}").rstrip("/")


def options(key: str | None, client: str | None) -> dict[str, Any]:
    """What the HTTP client is made with. Proxies of the environment are for elsewhere."""
    key = key or os.environ.get(KEY)
    headers = {"X-Turnstile-Client": label(client or who())}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return {"headers": headers, "timeout": httpx.Timeout(ANSWER, connect=CONNECT), "trust_env": False}


def who() -> str:
    """`user@host`: who a person is to the gate."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def label(name: str) -> str:
    """A name as a header can carry it."""
    return "".join(c if " " <= c <= "~" else "?" for c in name)[:_LABEL]


# --------------------------------------------------------------------------------------------------------- calls


def lock(preset: str | None, owner: str, ttl: float | None, wait: bool, token: int | None) -> Call:
    body: dict[str, Any] = {"lock": True if preset is None else preset, "owner": owner}
    return Call("POST", "/lock", body | _given(ttl=ttl, token=token, wait=wait or None))


def renew(owner: str, ttl: float | None, token: int | None) -> Call:
    return Call("POST", "/lock", {"renew": True, "owner": owner} | _given(ttl=ttl, token=token))


def unlock(
    owner: str | None, token: int | None, force: bool = False, leave: bool = False, reason: str | None = None
) -> Call:
    fields = _given(owner=owner, token=token, force=force or None, leave=leave or None, reason=reason)
    return Call("POST", UNLOCK, {"lock": False} | fields)


def drop_contexts(preset: str | None) -> Call:
    return Call("DELETE", "/v1/contexts" + ("" if preset is None else f"/{quote(preset, safe='')}"))


def release(reason: str) -> Call:
    return Call("POST", "/gpu-turnstile/release", {"reason": reason}, None)


def mode(wish: str | None, model: str | None) -> Call:
    return Call("GET", "/mode") if wish is None else Call("POST", "/mode", {"mode": wish} | _given(model=model), None)


def contention(since: str, until: str | None, query: Mapping[str, Iterable[str]]) -> Call:
    """`query`: owner, client, pid and allow, each any number of times."""
    pairs = [("since", since), *([("until", until)] if until is not None else [])]
    pairs += [(name, value) for name, values in query.items() for value in values]
    return Call("GET", f"/contention?{urlencode(pairs)}", limit=JUDGED)


def unload() -> Call:
    return Call("POST", "/unload", {}, None)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# ------------------------------------------------------------------------------------------------------- answers


def read(call: Call, reply: httpx.Response) -> dict[str, Any]:
    """The JSON object of a good answer. Raises TurnstileError for every other."""
    check_identity(reply)
    try:
        found = reply.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unavailable(f"the gate answered {reply.status_code} with something that is not JSON", status=500)
    if reply.is_success:
        return found
    raise _problem(call, reply, found)


def text(reply: httpx.Response) -> str:
    """A good answer that is no JSON."""
    check_identity(reply)
    if not reply.is_success:
        raise Unavailable(f"the gate answered {reply.status_code}", status=reply.status_code)
    return reply.text


def check_identity(reply: httpx.Response) -> None:
    """The port may well belong to the engine the gate was meant to stand in front of."""
    ours = reply.headers.get("server", "").startswith("gpu-turnstile") or "x-turnstile-error" in reply.headers
    if not ours:
        where = f"{reply.url.scheme}://{reply.url.netloc.decode()}"
        raise Unreachable(f"something answers at {where}, but it is no gpu-turnstile")


def absent(where: str, problem: Exception) -> Unreachable:
    if isinstance(problem, (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, httpx.UnsupportedProtocol)):
        return Unreachable(f"no gate answers at {where} ({problem})")
    broken = Unreachable(f"the gate at {where} broke off: {problem or type(problem).__name__}")
    broken.sent = True
    return broken


def _problem(call: Call, reply: httpx.Response, body: dict[str, Any]) -> TurnstileError:
    status, code = reply.status_code, reply.headers.get("x-turnstile-error", "")
    message = _message(body) or f"the gate answered {status}"
    retry = _seconds(reply.headers)
    if code == "not_held":
        return NotHeld(message, code=code, status=status)
    if status == 409 and code == "locked":
        if call.token is not None and retry is None:
            return StaleLock(message, code=code, status=status)
        return Locked(
            message,
            owners=shapes.owners(body),
            queue=shapes.queue(body),
            preset=body.get("preset"),
            retry_after=retry,
        )
    kind = BadRequest if status in _BAD else Unavailable
    return kind(message, code=code, status=status, retry_after=retry)


def _message(body: dict[str, Any]) -> str:
    """The control API's own shape, or OpenAI's."""
    error = body.get("error")
    return str(body.get("message") or (error.get("message") if isinstance(error, dict) else "") or "")


def _seconds(headers: Mapping[str, str]) -> float | None:
    value = headers.get("retry-after", "")
    return float(value) if value.isdigit() else None


def read_lock(call: Call, reply: httpx.Response) -> shapes.Granted | shapes.Queued:
    body = read(call, reply)
    about = (shapes.owners(body), shapes.queue(body), body.get("ended"), body)
    if body.get("queued"):
        pause = _seconds(reply.headers) or 1.0
        return shapes.Queued(body["lock"], body["owner"], body["position"], pause, *about)
    return shapes.Granted(
        body["locked"], body["owner"], body["token"], body["ttl"], body["expires_in"], body["joined"], *about
    )


def read_unlock(call: Call, reply: httpx.Response) -> shapes.Unlocked:
    body = read(call, reply)
    return shapes.Unlocked(tuple(body["unlocked"]), tuple(body["left_queue"]), tuple(body["cut"]), body)


def answer(call: Call, reply: httpx.Response) -> Outcome:
    """What the gate says to a call about locks, also where it is an error."""
    try:
        return read_unlock(call, reply) if call.path == UNLOCK else read_lock(call, reply)
    except TurnstileError as problem:
        return problem


class EventLines:
    """Lines of `/events` -> events."""

    def __init__(self) -> None:
        self._kind = ""

    def feed(self, line: str) -> Iterator[shapes.Event]:
        name, _, value = line.partition(": ")
        if name == "event":
            self._kind = value
        elif name == "data":
            yield shapes.Event.read(self._kind, json.loads(value))


def events_query(since: int | None, follow: bool) -> dict[str, Any]:
    return {"follow": str(follow).lower()} | _given(since=since)
