"""Signs of life: what a streaming client is sent while it waits for the card, so that it does not give up.

Only what its own protocol calls harmless: a comment in an event stream, an object with empty content where native
Ollama streams. Never to a client that does not stream: its answer is one document.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import Enum

from gpu_turnstile.gateway.paths import Dialect
from gpu_turnstile.gateway.wire import SERVER


class Sign(Enum):
    COMMENT = b"text/event-stream"
    CHAT = b"application/x-ndjson; chat"
    GENERATE = b"application/x-ndjson; generate"

    @property
    def content_type(self) -> bytes:
        return self.value.partition(b";")[0]


_NATIVE = {"/api/chat": Sign.CHAT, "/api/generate": Sign.GENERATE}


def kind(dialect: Dialect, path: str, stream: object) -> Sign | None:
    """Which sign a request may get. Native Ollama streams unless told not to, the others only if told to."""
    if dialect is Dialect.OLLAMA:
        return _NATIVE.get(path) if stream is not False else None
    if stream is True and dialect in (Dialect.OPENAI, Dialect.ANTHROPIC):
        return Sign.COMMENT
    return None


def head(sign: Sign, http11: bool, keep_alive: bool) -> bytes:
    """The head of an answer that is begun before its engine's."""
    lines = [
        b"HTTP/1.1 200 OK",
        b"Server: " + SERVER,
        b"Content-Type: " + sign.content_type,
        b"Cache-Control: no-cache",
        b"X-Accel-Buffering: no",
    ]
    if http11:
        lines.append(b"Transfer-Encoding: chunked")
    if not keep_alive:
        lines.append(b"Connection: close")
    return b"\r\n".join([*lines, b"\r\n"])


def text(sign: Sign, model: str, position: int | None) -> bytes:
    if sign is Sign.COMMENT:
        where = f", position {position}" if position else ""
        return f": waiting for the card{where}\n\n".encode()
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    line: dict[str, object] = {"model": model, "created_at": now}
    line |= {"message": {"role": "assistant", "content": ""}} if sign is Sign.CHAT else {"response": ""}
    return json.dumps(line | {"done": False}).encode() + b"\n"
