"""The client APIs that several engines speak: OpenAI (chat, completions, responses, embeddings) and Anthropic.

Builders of bodies and streams from a `Generation`; they know no engine beyond the few habits in `Style`. The
shapes are those of llama-server b11549, recorded; Ollama's differ where `Style` says.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from gpu_turnstile.sim.generation import Generation

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
SSE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Style:
    """`timings`: adds llama.cpp's measurements. `opener`: a first chunk that carries only the role."""

    fingerprint: str
    timings: bool = False
    opener: bool = False


# ---------------------------------------------------------------------------------------------- OpenAI chat


def chat_body(gen: Generation, style: Style) -> Json:
    message = {"role": "assistant", "content": gen.text}
    choice = {"index": 0, "message": message, "finish_reason": gen.finish}
    return {
        "id": f"chatcmpl-{gen.id}",
        "object": "chat.completion",
        "created": gen.created,
        "model": gen.model,
        "system_fingerprint": style.fingerprint,
        "choices": [choice],
        "usage": usage(gen),
        **_timings(gen, style),
    }


async def chat_stream(gen: Generation, style: Style, with_usage: bool) -> AsyncGenerator[bytes, None]:
    def chunk(delta: Json, finish: str | None = None) -> Json:
        return _chat_chunk(gen, style, [{"index": 0, "delta": delta, "finish_reason": finish}])

    async with aclosing(gen.words()) as words:
        async for word in words:
            if style.opener and gen.made == 1:
                yield sse(chunk({"role": "assistant", "content": None}))
            yield sse(chunk({"content": word} if style.opener else {"role": "assistant", "content": word}))
    last = chunk({} if style.opener else {"role": "assistant", "content": ""}, gen.finish)
    if not with_usage:
        yield sse({**last, **_timings(gen, style)})
    else:
        yield sse(last)
        yield sse({**_chat_chunk(gen, style, []), "usage": usage(gen), **_timings(gen, style)})
    yield DONE


def _chat_chunk(gen: Generation, style: Style, choices: list[Json]) -> Json:
    return {
        "id": f"chatcmpl-{gen.id}",
        "object": "chat.completion.chunk",
        "created": gen.created,
        "model": gen.model,
        "system_fingerprint": style.fingerprint,
        "choices": choices,
    }


# ---------------------------------------------------------------------------------------------- OpenAI completions


def completion_body(gen: Generation, style: Style) -> Json:
    return {**_completion(gen, style, gen.text, gen.finish), "usage": usage(gen), **_timings(gen, style)}


async def completion_stream(gen: Generation, style: Style, with_usage: bool) -> AsyncGenerator[bytes, None]:
    async with aclosing(gen.words()) as words:
        async for word in words:
            yield sse(_completion(gen, style, word, None))
    last = _completion(gen, style, "", gen.finish)
    if with_usage or style.timings:
        last["usage"] = usage(gen)
    yield sse({**last, **_timings(gen, style)})
    yield DONE


def _completion(gen: Generation, style: Style, text: str, finish: str | None) -> Json:
    return {
        "id": f"cmpl-{gen.id}",
        "object": "text_completion",
        "created": gen.created,
        "model": gen.model,
        "system_fingerprint": style.fingerprint,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}],
    }


# ---------------------------------------------------------------------------------------------- OpenAI responses


def response_body(gen: Generation) -> Json:
    return {
        "id": f"resp_{gen.id}",
        "object": "response",
        "created_at": gen.created,
        "completed_at": gen.created,
        "status": "completed",
        "model": gen.model,
        "output": [_response_item(gen, "completed")],
        "usage": {
            "input_tokens": len(gen.prompt),
            "output_tokens": gen.made,
            "total_tokens": len(gen.prompt) + gen.made,
            "input_tokens_details": {"cached_tokens": gen.cached},
        },
    }


async def response_stream(gen: Generation, style: Style) -> AsyncGenerator[bytes, None]:
    item = f"msg_{gen.id}"
    async with aclosing(gen.words()) as words:
        async for word in words:
            if gen.made == 1:
                for event in _response_opening(gen):
                    yield event
            yield event_sse("response.output_text.delta", item_id=item, delta=word)
    if gen.made == 0:
        for event in _response_opening(gen):
            yield event
    yield event_sse("response.output_text.done", item_id=item, text=gen.text)
    yield event_sse("response.content_part.done", item_id=item, part=_response_part(gen.text))
    yield event_sse("response.output_item.done", item=_response_item(gen, "completed"))
    body = response_body(gen)
    del body["completed_at"]
    yield event_sse("response.completed", response=body, **_timings(gen, style))


def _response_opening(gen: Generation) -> list[bytes]:
    begun = {"id": f"resp_{gen.id}", "object": "response", "status": "in_progress"}
    item = {**_response_item(gen, "in_progress"), "content": []}
    part = {"type": "output_text", "text": ""}
    return [
        event_sse("response.created", response=begun),
        event_sse("response.in_progress", response=begun),
        event_sse("response.output_item.added", item=item),
        event_sse("response.content_part.added", item_id=item["id"], part=part),
    ]


def _response_item(gen: Generation, status: str) -> Json:
    return {
        "type": "message",
        "id": f"msg_{gen.id}",
        "role": "assistant",
        "status": status,
        "content": [_response_part(gen.text)],
    }


def _response_part(text: str) -> Json:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


# ---------------------------------------------------------------------------------------------- Anthropic messages


def message_body(gen: Generation) -> Json:
    return {
        **_message_head(gen),
        "content": [{"type": "text", "text": gen.text}],
        "stop_reason": _stop_reason(gen),
        "usage": _message_usage(gen),
    }


async def message_stream(gen: Generation) -> AsyncGenerator[bytes, None]:
    async with aclosing(gen.words()) as words:
        async for word in words:
            if gen.made == 1:
                for event in _message_opening(gen):
                    yield event
            delta = {"type": "text_delta", "text": word}
            yield event_sse("content_block_delta", index=0, delta=delta)
    if gen.made == 0:
        for event in _message_opening(gen):
            yield event
    yield event_sse("content_block_stop", index=0)
    ending = {"stop_reason": _stop_reason(gen), "stop_sequence": None}
    yield event_sse("message_delta", delta=ending, usage={"output_tokens": gen.made})
    yield event_sse("message_stop")


def _message_opening(gen: Generation) -> list[bytes]:
    head = {**_message_head(gen), "usage": {**_message_usage(gen), "output_tokens": 0}}
    return [
        event_sse("message_start", message=head),
        event_sse("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    ]


def _message_head(gen: Generation) -> Json:
    return {
        "id": f"msg_{gen.id}",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": gen.model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _message_usage(gen: Generation) -> Json:
    return {
        "cache_read_input_tokens": gen.cached,
        "input_tokens": len(gen.prompt) - gen.cached,
        "output_tokens": gen.made,
    }


def _stop_reason(gen: Generation) -> str:
    return "max_tokens" if gen.finish == "length" else "end_turn"


# ---------------------------------------------------------------------------------------------- shared


def usage(gen: Generation) -> Json:
    return {
        "prompt_tokens": len(gen.prompt),
        "completion_tokens": gen.made,
        "total_tokens": len(gen.prompt) + gen.made,
        "prompt_tokens_details": {"cached_tokens": gen.cached},
    }


def timings(gen: Generation) -> Json:
    """llama.cpp's own measurements, in milliseconds and tokens per second."""
    read, read_ms, made_ms = len(gen.prompt) - gen.cached, gen.prompt_s * 1000, gen.made_s * 1000
    return {
        "cache_n": gen.cached,
        "prompt_n": read,
        "prompt_ms": read_ms,
        "prompt_per_token_ms": read_ms / max(read, 1),
        "prompt_per_second": read / max(gen.prompt_s, 1e-6),
        "predicted_n": gen.made,
        "predicted_ms": made_ms,
        "predicted_per_token_ms": made_ms / max(gen.made, 1),
        "predicted_per_second": gen.made / max(gen.made_s, 1e-6),
    }


def embedding(text: str, size: int = 8) -> list[float]:
    """The same text gives the same numbers."""
    digest = sha256(text.encode()).digest()
    return [byte / 127.5 - 1 for byte in digest[:size]]


def embedding_list(body: Json, model: str) -> Json:
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    packed = body.get("encoding_format") == "base64"
    vectors = [embedding(str(text)) for text in texts]
    count = sum(len(str(text).split()) for text in texts)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _base64(vector) if packed else vector}
            for i, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def sse(data: Json) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def event_sse(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\n".encode() + sse({"type": kind, **data})


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _timings(gen: Generation, style: Style) -> Json:
    return {"timings": timings(gen)} if style.timings else {}
