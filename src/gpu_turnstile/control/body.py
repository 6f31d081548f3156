"""Reading the body of a control call: a JSON object, bounded, whatever its content type says."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request

from gpu_turnstile.control.problems import Refusal

BODY_LIMIT = 64 * 1024


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body (people use `curl -d`). Raises Refusal."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_LIMIT:
            raise Refusal("too_large", f"the body is larger than {BODY_LIMIT} bytes")
    try:
        found = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as problem:
        raise Refusal("bad_request", f"the body is not JSON: {problem}") from None
    if not isinstance(found, dict):
        raise Refusal("bad_request", 'the body must be an object, like {"mode": "llm", "model": "a-preset"}')
    return found
