"""Small answers the gate gives itself when no engine is there to give them, so that nothing is woken for them.

Clients probe: `HEAD /` by Claude Code, `GET /` by the Ollama command, pre-flights by browsers. A 404 there makes a
healthy gate look broken.
"""

from __future__ import annotations

import json

from gpu_turnstile import __version__
from gpu_turnstile.gateway.paths import Place, Site
from gpu_turnstile.gateway.wire import SERVER, RequestHead

_PROBES = {
    "/": (b"text/plain; charset=utf-8", b"gpu-turnstile is running"),
    "/api/hello": (b"application/json", b'{"message": "hello"}'),
    "/api/version": (b"application/json", json.dumps({"version": __version__}).encode()),
}


def answer(head: RequestHead, place: Place) -> bytes | None:
    """What the gate says in an engine's place; None = only an engine can answer."""
    if head.method == "OPTIONS" and head.preflight:
        return preflight(head)
    return probe(head, place)


def probe(head: RequestHead, place: Place) -> bytes | None:
    """The answer to a client that only wants to know whether somebody is there; None = it wants more."""
    if place.site is not Site.LLM or head.method not in ("GET", "HEAD") or head.path not in _PROBES:
        return None
    kind, body = _PROBES[head.path]
    lines = [b"HTTP/1.1 200 OK", b"Server: " + SERVER, b"Content-Type: " + kind, b"Content-Length: %d" % len(body)]
    if head.origin:
        lines.append(b"Access-Control-Allow-Origin: *")
    if not head.keep_alive:
        lines.append(b"Connection: close")
    return b"\r\n".join([*lines, b"\r\n"]) + (b"" if head.method == "HEAD" else body)


def preflight(head: RequestHead) -> bytes:
    """What an engine of ours would answer: every local client may ask."""
    wanted = next((v for n, v in head.headers if n.lower() == b"access-control-request-headers"), b"*")
    lines = [
        b"HTTP/1.1 204 No Content",
        b"Server: " + SERVER,
        b"Access-Control-Allow-Origin: *",
        b"Access-Control-Allow-Methods: GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS",
        b"Access-Control-Allow-Headers: " + wanted,
        b"Access-Control-Max-Age: 600",
        b"Vary: Origin, Access-Control-Request-Headers",
    ]
    if not head.keep_alive:
        lines.append(b"Connection: close")
    return b"\r\n".join([*lines, b"\r\n"])
