"""What the simulated Ollama puts on the wire: listings, heads and ends of answers, errors in three dialects.

Pure builders and readers. The native shapes are what the official client validates.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gpu_turnstile.sim.base import Answer
from gpu_turnstile.sim.generation import Generation
from gpu_turnstile.sim.ollama_runners import Runner, SimModel

Json = dict[str, Any]
Fail = Callable[[int, str], Answer]

NDJSON = "application/x-ndjson"
JSON_UTF8 = "application/json; charset=utf-8"
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")

INSTALLED_AT = 1_780_000_000.0


def installed(model: SimModel) -> Json:
    return {
        "name": full_name(model.name),
        "model": full_name(model.name),
        "modified_at": rfc3339(INSTALLED_AT),
        "size": model.size,
        "digest": sha256(model.name.encode()).hexdigest(),
        "details": details(model),
    }


def running(runner: Runner) -> Json:
    shown = installed(runner.model)
    del shown["modified_at"]
    return {
        **shown,
        "expires_at": rfc3339(runner.expires_at),
        "size_vram": runner.vram,
        "context_length": runner.model.context,
    }


def details(model: SimModel) -> Json:
    family = "bert" if model.embedding else "llama"
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{model.gb:.1f}B",
        "quantization_level": "Q4_K_M",
    }


def v1_model(name: str) -> Json:
    return {"id": name, "object": "model", "created": int(INSTALLED_AT), "owned_by": "library"}


def head(gen: Generation) -> Json:
    return {"model": gen.model, "created_at": rfc3339(time.time())}


def ending(gen: Generation) -> Json:
    return {
        "done": True,
        "done_reason": gen.finish,
        "total_duration": int((time.perf_counter() - gen.began) * 1e9),
        "load_duration": int(gen.load_s * 1e9),
        "prompt_eval_count": len(gen.prompt),
        "prompt_eval_duration": int(gen.prompt_s * 1e9),
        "eval_count": gen.made,
        "eval_duration": int(gen.made_s * 1e9),
    }


def wants_usage(body: Json) -> bool:
    return bool((body.get("stream_options") or {}).get("include_usage"))


def json_answer(data: Json) -> Response:
    return JSONResponse(data, media_type=JSON_UTF8)


def line(data: Json) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def native_error(status: int, message: str) -> Answer:
    return Answer(JSONResponse({"error": message}, status, media_type=JSON_UTF8))


def openai_error(status: int, message: str) -> Answer:
    error = {"message": message, "type": _error_type(status), "param": None, "code": None}
    return Answer(JSONResponse({"error": error}, status, media_type=JSON_UTF8))


def anthropic_error(status: int, message: str) -> Answer:
    error = {"type": _error_type(status), "message": message}
    return Answer(JSONResponse({"type": "error", "error": error}, status, media_type=JSON_UTF8))


def _error_type(status: int) -> str:
    return {400: "invalid_request_error", 404: "not_found_error"}.get(status, "api_error")


async def read_body(request: Request, fail: Fail) -> Json:
    raw = await request.body()
    if not raw:
        raise fail(400, "missing request body")
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise fail(400, f"invalid character in request body: {error}") from error
    if not isinstance(body, dict):
        raise fail(400, "json: cannot unmarshal into Go value")
    return body


def full_name(name: str) -> str:
    return name if not name or ":" in name else f"{name}:latest"


def go_duration(text: str) -> float:
    """Seconds of "5m", "1h30m", "-1s" or a bare number. Raises Answer (400) for anything else."""
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    parts = _DURATION.findall(digits)
    if parts and "".join(number + unit for number, unit in parts) == digits:
        return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)
    try:
        return float(text)
    except ValueError:
        raise native_error(400, f'time: invalid duration "{text}"') from None


def rfc3339(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "Z")
