"""How ComfyUI's web server (aiohttp) answers: shapes, errors, and who may ask. Pure: requests in, responses out.

As seen of 0.33: an empty answer has no content type, except that of an unknown path to read (chunked, octet-stream);
an unknown path to write is a 405, because the page's files are below every path; a handler that fails ends the
connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from gpu_turnstile.sim.base import Answer
from gpu_turnstile.sim.comfy_nodes import Json

_LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))


class JsonAnswer(JSONResponse):
    media_type = "application/json; charset=utf-8"

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def empty(status: int = 200) -> Response:
    return Response(b"", status)


def refused(error: Json, node_errors: Json) -> Answer:
    return Answer(JsonAnswer({"error": error, "node_errors": node_errors}, 400))


def broken() -> Answer:
    """What a handler that raises looks like from outside."""
    text = "500 Internal Server Error\n\nServer got itself in trouble"
    return Answer(Response(text, 500, media_type="text/plain", headers={"Connection": "close"}))


async def body_of(request: Request) -> Any:
    """What the body says; the real handlers break on what is no JSON, and on `null`."""
    try:
        body = json.loads(await request.body())
    except ValueError:
        raise broken() from None
    if body is None:
        raise broken()
    return body


async def fields_of(request: Request) -> Json:
    """The same where a list or a text simply has none of the fields."""
    body = await body_of(request)
    return body if isinstance(body, dict) else {}


async def object_of(request: Request) -> Json:
    """The same where everything but an object breaks the handler."""
    body = await body_of(request)
    if not isinstance(body, dict):
        raise broken()
    return body


def not_found(request: Request, methods: Iterable[str]) -> Response:
    """No route; `methods`: those the path has."""
    if request.method == "OPTIONS":
        return empty()
    if request.method in ("GET", "HEAD"):
        return StreamingResponse(iter(()), 404, media_type="application/octet-stream")
    allow = ",".join(sorted({"GET", "HEAD", *methods}))
    return Response("405: Method Not Allowed", 405, media_type="text/plain", headers={"Allow": allow})


def is_foreign(host: str, origin: str, site: str) -> bool:
    """Whether a page of another origin asks: a server reached by a loopback name answers none of them."""
    if site == "cross-site":
        return True
    asking, asked = urlsplit(origin), urlsplit(f"//{host}")
    return bool(asking.netloc) and asked.hostname in _LOOPBACK and asking.netloc != asked.netloc
