"""The simulated llama-server: one model, held from the first moment of loading until the process ends.

Shapes were recorded from llama.cpp b11549. Kept as well: 503 while it loads, requests that wait for a slot, and
a SIGTERM that waits for open answers while sending no further byte. Slots are in `llama_slots.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gpu_turnstile.sim import dialects
from gpu_turnstile.sim.base import Answer, Work, pause, until
from gpu_turnstile.sim.card import GB, SimCard
from gpu_turnstile.sim.dialects import SSE, Json, Style
from gpu_turnstile.sim.faults import LlamaFaults
from gpu_turnstile.sim.generation import Generation, Pace, TokenSim, prompt_words
from gpu_turnstile.sim.llama_slots import BadSlotFile, Slots, TruncatedSlotFile

STYLE = Style("b11549-sim", timings=True, opener=True)
JSON_UTF8 = "application/json; charset=utf-8"
SERVER = {"server": "llama.cpp"}
ABORTED = 134  # exit code of a failed assertion
_LAST_WORDS_S = 0.5  # what the real one needs to exit after its last client has left

Endpoint = Callable[[Request], Awaitable[Response]]


class LlamaSim(TokenSim[LlamaFaults]):
    """`name`: on the card; default: the alias, else the model's stem. Times in seconds, rates per second.

    `ctx_size` is shared by `parallel` slots. `answer_tokens`: the length of an answer without `max_tokens`.
    """

    kind: ClassVar[str] = "llama-server"

    def __init__(
        self,
        model: str = "sim.gguf",
        *,
        card: SimCard | None = None,
        name: str | None = None,
        alias: str | None = None,
        vram_gb: float = 8.0,
        ctx_size: int = 4096,
        parallel: int = 1,
        slot_save_path: str | None = None,
        embeddings: bool = False,
        load_s: float = 0.05,
        tokens_per_s: float = 200.0,
        prompt_tokens_per_s: float = 0.0,
        answer_tokens: int = 16,
        faults: LlamaFaults | None = None,
    ) -> None:
        pace = Pace(tokens_per_s, prompt_tokens_per_s, answer_tokens)
        super().__init__(name or alias or Path(model).stem, card, faults or LlamaFaults(), pace)
        self.model = model
        self.alias = alias or Path(model).name
        self.vram = int(vram_gb * GB)
        self.load_s = load_s
        self.slot_save_path = Path(slot_save_path) if slot_save_path else None
        self.embeddings = embeddings
        self._n_ctx = ctx_size // parallel
        self._parallel = parallel
        self.slots = Slots(parallel, self._n_ctx)
        self.ready = False
        self._started = int(time.time())

    def routes(self) -> Sequence[BaseRoute]:
        table: list[tuple[str, str, Endpoint]] = [
            ("GET", "/health /v1/health", self._health),
            ("GET", "/props", self._props),
            ("GET", "/slots", self._get_slots),
            ("POST", "/slots/{number:int}", self._slot_action),
            ("GET", "/metrics", self._metrics),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/v1/chat/completions /chat/completions", self._chat),
            ("POST", "/v1/completions", self._completions),
            ("POST", "/completion /completions", self._completion),
            ("POST", "/v1/responses", self._responses),
            ("POST", "/v1/messages", self._messages),
            ("POST", "/v1/messages/count_tokens", self._count_tokens),
            ("POST", "/v1/embeddings /embeddings", self._embeddings),
        ]
        guarded = [
            Route(path, self._when_ready(endpoint), methods=[method])
            for method, paths, endpoint in table
            for path in paths.split()
        ]
        open_too = [Route(path, self._models, methods=["GET"]) for path in ("/v1/models", "/models")]
        return [*guarded, *open_too]

    def state(self) -> Json:
        return {"ready": self.ready, "slots": [slot.as_json() for slot in self.slots.all]}

    def not_found(self, request: Request, exc: Exception) -> Response:
        return _error(404, "not_found_error", "File Not Found").response

    def server_error(self) -> Response:
        return _error(500, "server_error", "simulated server error").response

    # ------------------------------------------------------------------------------------ life

    def begin(self) -> None:
        self.spawn(self._load())

    def wipe(self) -> None:
        self.ready = False
        self.closing = False
        self.slots = Slots(self._parallel, self._n_ctx)

    def terminate(self) -> None:
        """SIGTERM: at once when idle, else when the last client has left; the second one does not wait."""
        if self.faults.ignore_sigterm:
            _say("SIGTERM ignored")
        elif self.closing:
            self.exit(1)
        elif self.in_flight == 0:
            self.exit(0)
        else:
            self.closing = True
            self.spawn(self._exit_when_left())

    async def before_token(self, made: int) -> None:
        await super().before_token(made)
        if 0 < self.faults.crash_after <= made:
            self.exit(ABORTED)
            await asyncio.Future()
        if self.closing:
            await asyncio.Future()  # not another byte: only the client can end it

    async def _load(self) -> None:
        self.counters["loads"] += 1
        _say(f"loading model '{self.model}'")
        granted = self.card.hold(self.name, self.vram)
        await pause(self.load_s)
        if granted < self.vram or self.faults.crash_loading:
            self._report_out_of_memory()
            self.exit(1)
            return
        await until(lambda: not self.faults.never_healthy)
        self.ready = True
        _say("server is listening, all slots are idle")

    def _report_out_of_memory(self) -> None:
        wanted = self.vram / 1024**2
        _say(f"allocating {wanted:.2f} MiB on device 0: cudaMalloc failed: out of memory")
        _say("llama_model_load: error loading model: unable to allocate CUDA0 buffer")
        _say(f"srv    load_model: failed to load model, '{self.model}'")

    async def _exit_when_left(self) -> None:
        await until(lambda: self.in_flight == 0)
        await pause(_LAST_WORDS_S)
        self.exit(0)

    # ------------------------------------------------------------------------------------ neutral

    def _when_ready(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            if not self.ready:
                raise _error(503, "unavailable_error", "Loading model")
            return await endpoint(request)

        return guarded

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        meta: Json = {"vocab_type": 1, "n_vocab": 32000, "n_ctx": self._n_ctx, "n_ctx_train": 32768}
        meta |= {"n_embd": 4096, "n_params": 8_000_000_000, "size": self.vram, "ftype": "Q4_K - Medium"}
        model = {
            "id": self.alias,
            "aliases": [self.alias],
            "tags": [],
            "object": "model",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "created": self._started,
            "owned_by": "llamacpp",
            "meta": meta if self.ready else None,
        }
        return _json({"models": [_ollama_style(self.alias)], "object": "list", "data": [model]})

    async def _props(self, request: Request) -> Response:
        return _json(
            {
                "default_generation_settings": {"params": {"n_predict": -1}, "n_ctx": self._n_ctx},
                "total_slots": self._parallel,
                "model_alias": self.alias,
                "model_ftype": "Q4_K - Medium",
                "model_path": self.model,
                "modalities": {"vision": False, "video": False, "audio": False},
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": False,
                "ui": False,
                "ui_settings": {},
                "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
                "chat_template_caps": {"supports_system_role": True, "supports_tools": False},
                "bos_token": "<s>",
                "eos_token": "</s>",
                "build_info": STYLE.fingerprint,
                "is_sleeping": False,
                "cors_proxy_enabled": False,
            }
        )

    async def _metrics(self, request: Request) -> Response:
        message = "This server does not support metrics endpoint. Start it with `--metrics`"
        raise _error(501, "not_supported_error", message)

    async def _tokenize(self, request: Request) -> Response:
        body = await _body(request)
        return _json({"tokens": list(range(len(prompt_words({"prompt": body.get("content", "")}))))})

    async def _count_tokens(self, request: Request) -> Response:
        return _json({"input_tokens": len(prompt_words(await _body(request)))})

    # ------------------------------------------------------------------------------------ slots

    async def _get_slots(self, request: Request) -> Response:
        return _json([slot.as_json() for slot in self.slots.all])

    async def _slot_action(self, request: Request) -> Response:
        number, action = request.path_params["number"], request.query_params.get("action")
        if action == "erase":
            return _json({"id_slot": number, "n_erased": await self.slots.erase(number)})
        path = self._slot_file(str((await _body(request)).get("filename", "")))
        if action == "save":
            tokens, size = await self.slots.save(number, path)
            done = {"n_saved": tokens, "n_written": size, "timings": {"save_ms": 0.1}}
        elif action == "restore":
            tokens, size = await self._restore(number, path)
            done = {"n_restored": tokens, "n_read": size, "timings": {"restore_ms": 0.1}}
        else:
            raise _error(400, "invalid_request_error", "Invalid action")
        return _json({"id_slot": number, "filename": path.name, **done})

    def _slot_file(self, name: str) -> Path:
        if self.slot_save_path is None:
            message = "This server does not support slots action. Start it with `--slot-save-path`"
            raise _error(501, "not_supported_error", message)
        if not name or ".." in name or set(name) & set("/\\:"):
            raise _error(400, "invalid_request_error", "Invalid filename")
        return self.slot_save_path / name

    async def _restore(self, number: int, path: Path) -> tuple[int, int]:
        try:
            return await self.slots.restore(number, path)
        except BadSlotFile:
            message = "Unable to restore slot: No available space in KV cache or invalid slot save file"
            raise _error(400, "invalid_request_error", message) from None
        except TruncatedSlotFile:
            _say("GGML_ASSERT(nread <= state_size) failed")
            self.exit(ABORTED)
            return await asyncio.Future()

    # ------------------------------------------------------------------------------------ work

    async def _chat(self, request: Request) -> Response:
        body = await _body(request)
        gen = self._generation(body, "messages", "max_completion_tokens", "max_tokens", "n_predict")
        if body.get("stream"):
            wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return self._stream(dialects.chat_stream(gen, STYLE, wants_usage))
        return self._whole(gen, lambda: dialects.chat_body(gen, STYLE))

    async def _completions(self, request: Request) -> Response:
        body = await _body(request)
        gen = self._generation(body, "prompt", "max_tokens", "n_predict")
        if body.get("stream"):
            return self._stream(dialects.completion_stream(gen, STYLE, with_usage=True))
        return self._whole(gen, lambda: dialects.completion_body(gen, STYLE))

    async def _completion(self, request: Request) -> Response:
        body = await _body(request)
        gen = self._generation(body, "prompt", "n_predict", "max_tokens")
        if body.get("stream"):
            return self._stream(_native_stream(gen))
        return self._whole(gen, lambda: _native_end(gen, gen.text))

    async def _responses(self, request: Request) -> Response:
        body = await _body(request)
        gen = self._generation(body, "input", "max_output_tokens", "max_tokens")
        if body.get("stream"):
            return self._stream(dialects.response_stream(gen, STYLE))
        return self._whole(gen, lambda: dialects.response_body(gen))

    async def _messages(self, request: Request) -> Response:
        body = await _body(request)
        gen = self._generation(body, "messages", "max_tokens")
        if body.get("stream"):
            return self._stream(dialects.message_stream(gen))
        return self._whole(gen, lambda: dialects.message_body(gen))

    async def _embeddings(self, request: Request) -> Response:
        body = await _body(request)
        if not self.embeddings:
            message = "This server does not support embeddings. Start it with `--embeddings`"
            raise _error(501, "not_supported_error", message)
        if "input" not in body:
            raise _error(400, "invalid_request_error", '"input" or "content" must be provided')
        gen = Generation(self, self.alias, prompt_words(body), 0, self.slots.take)
        return self._whole(gen, lambda: dialects.embedding_list(body, self.alias))

    def _generation(self, body: Json, needed: str, *limits: str) -> Generation:
        if needed not in body:
            raise _error(400, "invalid_request_error", f"'{needed}' is required")
        prompt = prompt_words(body)
        if len(prompt) >= self._n_ctx:
            message = (
                f"request ({len(prompt)} tokens) exceeds the available context size "
                f"({self._n_ctx} tokens), try increasing it"
            )
            sizes = {"n_prompt_tokens": len(prompt), "n_ctx": self._n_ctx}
            raise _error(400, "exceed_context_size_error", message, **sizes)
        limit = next((body[key] for key in limits if isinstance(body.get(key), int) and body[key] >= 0), None)
        return Generation(self, self.alias, prompt, limit, self.slots.take)

    def _stream(self, chunks: AsyncGenerator[bytes, None]) -> Response:
        return Work(self, chunks, SSE, SERVER)

    def _whole(self, gen: Generation, answer: Callable[[], Json]) -> Response:
        async def work() -> Response:
            await gen.finished()
            return _json(answer())

        return Work(self, work)


# ---------------------------------------------------------------------------------------------- shapes


def _ollama_style(name: str) -> Json:
    """How llama-server lists its model for clients that expect Ollama."""
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [""]}
    return {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {**details, "parameter_size": "", "quantization_level": ""},
    }


async def _native_stream(gen: Generation) -> AsyncGenerator[bytes, None]:
    async with aclosing(gen.words()) as words:
        async for word in words:
            yield dialects.sse(
                {
                    "index": 0,
                    "content": word,
                    "tokens": [gen.made],
                    "stop": False,
                    "id_slot": -1,
                    "tokens_predicted": gen.made,
                    "tokens_evaluated": len(gen.prompt),
                }
            )
    yield dialects.sse(_native_end(gen, ""))


def _native_end(gen: Generation, content: str) -> Json:
    limit = gen.limit if gen.limit is not None else -1
    return {
        "index": 0,
        "content": content,
        "tokens": [],
        "id_slot": 0,
        "stop": True,
        "model": gen.model,
        "tokens_predicted": gen.made,
        "tokens_evaluated": len(gen.prompt),
        "generation_settings": {"max_tokens": limit, "n_predict": limit},
        "prompt": " ".join(gen.prompt),
        "has_new_line": False,
        "truncated": False,
        "stop_type": "limit" if gen.finish == "length" else "eos",
        "stopping_word": "",
        "tokens_cached": len(gen.prompt) + gen.made - 1,
        "timings": dialects.timings(gen),
    }


def _json(data: Any) -> Response:
    return JSONResponse(data, headers=SERVER, media_type=JSON_UTF8)


def _error(status: int, kind: str, message: str, **more: Any) -> Answer:
    error = {"message": message, "type": kind, "code": status, **more}
    return Answer(JSONResponse({"error": error}, status, headers=SERVER, media_type=JSON_UTF8))


async def _body(request: Request) -> Json:
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise _error(400, "invalid_request_error", f"[json.exception.parse_error.101] {error}") from error
    if not isinstance(body, dict):
        raise _error(400, "invalid_request_error", "request must be an object")
    return body


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
