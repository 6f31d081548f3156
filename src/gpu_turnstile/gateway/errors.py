"""The gate's own answers, in the shape the caller's library expects.

Every one of them carries `X-Turnstile-Error: <code>`, so nobody mistakes it for the engine's. A message says what
happened, what the gate did about it, and what the caller can do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from math import ceil
from typing import Any

from gpu_turnstile.core.model import Code
from gpu_turnstile.gateway.paths import Dialect
from gpu_turnstile.gateway.wire import SERVER

STATUS: dict[str, int] = {
    Code.UNKNOWN_MODEL: 404,
    Code.UNKNOWN_ROUTE: 404,
    Code.LOCKED: 409,
    Code.MODEL_UNAVAILABLE: 422,
    Code.SERVICE_INACTIVE: 503,
    Code.SWAP_FAILED: 503,
    Code.BUSY: 503,
    Code.SHUTTING_DOWN: 503,
    "bad_request": 400,
    "too_large": 413,
    "upstream_unreachable": 502,
    "upstream_died": 502,
}

_OPENAI_TYPE = {400: "invalid_request_error", 404: "invalid_request_error", 413: "invalid_request_error"}
_ANTHROPIC_TYPE = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


@dataclass(frozen=True, slots=True)
class Problem:
    """What the gate has to tell a client. `retry_after` in seconds; None = asking again does not help by itself."""

    code: str
    message: str
    status: int = 0
    retry_after: float | None = None
    field: str | None = None

    @property
    def http_status(self) -> int:
        return self.status or STATUS.get(self.code, 400)


def body(problem: Problem, dialect: Dialect) -> dict[str, Any]:
    """The JSON a library of that dialect turns into its own exception."""
    status, message, code = problem.http_status, problem.message, str(problem.code)
    match dialect:
        case Dialect.ANTHROPIC:
            kind = _ANTHROPIC_TYPE.get(status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": message, "code": code}}
        case Dialect.OLLAMA:
            return {"error": message, "code": code}
        case Dialect.COMFYUI:
            error = {"type": code, "message": message, "details": "", "extra_info": {}}
            return {"error": error, "node_errors": {}}
        case Dialect.OPENAI:
            kind = _OPENAI_TYPE.get(status, "server_error")
            return {"error": {"message": message, "type": kind, "param": problem.field, "code": code}}
        case Dialect.PLAIN:
            return {"error": code, "message": message}


def response(problem: Problem, dialect: Dialect, *, keep_alive: bool, head_only: bool = False, cors: bool) -> bytes:
    """The whole answer as bytes."""
    payload = json.dumps(body(problem, dialect), ensure_ascii=False).encode()
    status = problem.http_status
    reason = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Error"
    lines = [
        f"HTTP/1.1 {status} {reason}".encode(),
        b"Server: " + SERVER,
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(payload),
        b"X-Turnstile-Error: " + str(problem.code).encode(),
    ]
    if problem.retry_after is not None:
        lines.append(b"Retry-After: %d" % max(1, ceil(problem.retry_after)))
    if status == 415:
        lines.append(b"Accept-Encoding: gzip, deflate, br, zstd")
    if cors and problem.code != "origin_not_allowed":
        lines.append(b"Access-Control-Allow-Origin: *")
        lines.append(b"Access-Control-Expose-Headers: X-Turnstile-Error, Retry-After")
    if not keep_alive:
        lines.append(b"Connection: close")
    lines.append(b"\r\n")
    return b"\r\n".join(lines) + (b"" if head_only else payload)


def in_band(problem: Problem, dialect: Dialect, content_type: bytes, tail: bytes) -> bytes:
    """An error inside a stream that has begun and whose last bytes were `tail` (empty = nothing was sent yet).

    Empty where the stream's format has no place for one, or not here: inside an event or a line it would make the
    half that was sent look whole.
    """
    text = json.dumps(body(problem, dialect), ensure_ascii=False).encode()
    kind = content_type.lower()
    if kind.startswith(b"text/event-stream") and (not tail or tail.endswith(_EVENT_ENDS)):
        event = b"event: error\n" if dialect is Dialect.ANTHROPIC else b""
        return event + b"data: " + text + b"\n\n"
    if kind.startswith(b"application/x-ndjson") and (not tail or tail.endswith(b"\n")):
        return text + b"\n"
    return b""
