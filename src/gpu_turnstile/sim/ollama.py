"""The simulated Ollama: its native API and the OpenAI and Anthropic ones it also speaks.

Which model is in memory is `ollama_runners.py`'s affair; here requests become answers. The native shapes are
in `ollama_shapes.py`. Two facts a gate must live with are kept: an unload is only acknowledged,
and an embedding model refuses /api/generate even for that.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from gpu_turnstile.sim import dialects
from gpu_turnstile.sim import ollama_shapes as shapes
from gpu_turnstile.sim.base import Work, gone
from gpu_turnstile.sim.card import SimCard
from gpu_turnstile.sim.dialects import SSE, Style
from gpu_turnstile.sim.faults import OllamaFaults
from gpu_turnstile.sim.generation import Generation, Pace, TokenSim, prompt_words
from gpu_turnstile.sim.ollama_runners import LoadError, Runners, SimModel
from gpu_turnstile.sim.ollama_shapes import Fail, Json

__all__ = ["OllamaSim", "SimModel"]

VERSION = "0.32.1"
STYLE = Style("fp_ollama")
DEFAULT_MODELS = (
    SimModel("llama3:latest", 8.0),
    SimModel("qwen3:8b", 6.0),
    SimModel("bge-m3:latest", 1.2, embedding=True),
)


class OllamaSim(TokenSim[OllamaFaults]):
    """`models`: what is installed (a name alone = 8 GB). Times in seconds; `tokens_per_s` 0 = at once.

    `keep_alive_s`, `max_loaded`, `parallel`: what OLLAMA_KEEP_ALIVE, OLLAMA_MAX_LOADED_MODELS and
    OLLAMA_NUM_PARALLEL set. `answer_tokens`: the length of an answer whose request sets no limit.
    """

    kind: ClassVar[str] = "ollama"

    def __init__(
        self,
        models: Sequence[SimModel | str] = DEFAULT_MODELS,
        *,
        card: SimCard | None = None,
        name: str = "ollama",
        load_s: float = 0.05,
        tokens_per_s: float = 200.0,
        prompt_tokens_per_s: float = 0.0,
        answer_tokens: int = 16,
        keep_alive_s: float = 300.0,
        max_loaded: int = 1,
        parallel: int = 4,
        faults: OllamaFaults | None = None,
    ) -> None:
        pace = Pace(tokens_per_s, prompt_tokens_per_s, answer_tokens)
        super().__init__(name, card, faults or OllamaFaults(), pace)
        known = [SimModel(shapes.full_name(m)) if isinstance(m, str) else m for m in models]
        self.models = {shapes.full_name(model.name): model for model in known}
        self.keep_alive_s = keep_alive_s
        self.runners = Runners(self, load_s, max_loaded, parallel)

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route("/", self._root, methods=["GET"]),
            Route("/api/version", self._version, methods=["GET"]),
            Route("/api/tags", self._tags, methods=["GET"]),
            Route("/api/ps", self._ps, methods=["GET"]),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/pull", self._pull, methods=["POST"]),
            Route("/api/generate", self._generate, methods=["POST"]),
            Route("/api/chat", self._chat, methods=["POST"]),
            Route("/api/embed", self._embed, methods=["POST"]),
            Route("/api/embeddings", self._embeddings, methods=["POST"]),
            Route("/v1/models", self._v1_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._v1_one_model, methods=["GET"]),
            Route("/v1/chat/completions", self._v1_chat, methods=["POST"]),
            Route("/v1/completions", self._v1_completions, methods=["POST"]),
            Route("/v1/embeddings", self._v1_embeddings, methods=["POST"]),
            Route("/v1/responses", self._v1_responses, methods=["POST"]),
            Route("/v1/messages", self._v1_messages, methods=["POST"]),
            Route("/v1/audio/transcriptions", self._v1_transcriptions, methods=["POST"]),
        ]

    def state(self) -> Json:
        return {"loaded": {r.model.name: {"refs": r.refs, "vram": r.vram} for r in self.runners.listed()}}

    def wipe(self) -> None:
        self.runners.wipe()

    # ------------------------------------------------------------------------------------ neutral

    async def _root(self, request: Request) -> Response:
        return PlainTextResponse("Ollama is running")

    async def _version(self, request: Request) -> Response:
        return shapes.json_answer({"version": VERSION})

    async def _tags(self, request: Request) -> Response:
        return shapes.json_answer({"models": [shapes.installed(model) for model in self.models.values()]})

    async def _ps(self, request: Request) -> Response:
        if self.faults.ps_hang:
            await gone(request.receive)
            return shapes.json_answer({})
        self.counters["ps"] += 1
        shown = [shapes.running(runner) for runner in self.runners.listed()]
        every = self.faults.ps_flicker
        if every > 0 and self.counters["ps"] % every == 0:
            flickers = self.counters["ps"] // every
            shown = shown[:1] if flickers % 2 == 0 else []
        return shapes.json_answer({"models": shown})

    async def _show(self, request: Request) -> Response:
        model = self._model(await shapes.read_body(request, shapes.native_error), shapes.native_error)
        return shapes.json_answer(
            {
                "license": "",
                "modelfile": f"FROM {model.name}\n",
                "parameters": f"num_ctx {model.context}",
                "template": "{{ .Prompt }}",
                "details": shapes.details(model),
                "model_info": {"general.architecture": "llama", "llama.context_length": model.context},
                "capabilities": ["embedding"] if model.embedding else ["completion"],
                "modified_at": shapes.rfc3339(shapes.INSTALLED_AT),
            }
        )

    async def _pull(self, request: Request) -> Response:
        await shapes.read_body(request, shapes.native_error)
        lines = [{"status": "pulling manifest"}, {"status": "success"}]
        return Response(b"".join(shapes.line(status) for status in lines), media_type=shapes.NDJSON)

    async def _v1_models(self, request: Request) -> Response:
        return shapes.json_answer({"object": "list", "data": [shapes.v1_model(name) for name in self.models]})

    async def _v1_one_model(self, request: Request) -> Response:
        model = self._model({"model": request.path_params["name"]}, shapes.openai_error)
        return shapes.json_answer(shapes.v1_model(model.name))

    # ------------------------------------------------------------------------------------ native work

    async def _generate(self, request: Request) -> Response:
        body = await shapes.read_body(request, shapes.native_error)
        model = self._model(body, shapes.native_error, "generate")
        if not body.get("prompt"):
            return self._load_or_unload(body, model, {"response": ""})
        return self._native_answer(body, model, lambda text: {"response": text}, {"context": [1, 2, 3]})

    async def _chat(self, request: Request) -> Response:
        body = await shapes.read_body(request, shapes.native_error)
        model = self._model(body, shapes.native_error, "chat")
        if not body.get("messages"):
            return self._load_or_unload(body, model, {"message": {"role": "assistant", "content": ""}})
        return self._native_answer(body, model, lambda text: {"message": {"role": "assistant", "content": text}}, {})

    def _load_or_unload(self, body: Json, model: SimModel, empty: Json) -> Response:
        keep_alive = self._keep_alive(body)
        opening = {"model": body["model"], "created_at": shapes.rfc3339(time.time()), **empty}
        if keep_alive == 0:
            self.runners.promise_unload(model)
            return shapes.json_answer({**opening, "done": True, "done_reason": "unload"})

        async def load() -> Response:
            async with self._runner(model, keep_alive, shapes.native_error):
                return shapes.json_answer({**opening, "done": True, "done_reason": "load"})

        return Work(self, load)

    def _native_answer(self, body: Json, model: SimModel, part: Callable[[str], Json], extra: Json) -> Response:
        limit = (body.get("options") or {}).get("num_predict")
        gen = self._generation(body, model, limit, self._keep_alive(body), shapes.native_error)

        async def stream() -> AsyncGenerator[bytes, None]:
            async with aclosing(gen.words()) as words:
                async for word in words:
                    yield shapes.line({**shapes.head(gen), **part(word), "done": False})
            yield shapes.line({**shapes.head(gen), **part(""), **shapes.ending(gen), **extra})

        async def whole() -> Response:
            await gen.finished()
            return shapes.json_answer({**shapes.head(gen), **part(gen.text), **shapes.ending(gen), **extra})

        if body.get("stream", True):
            return Work(self, stream(), shapes.NDJSON)
        return Work(self, whole)

    async def _embed(self, request: Request) -> Response:
        body = await shapes.read_body(request, shapes.native_error)
        texts = body.get("input", "")
        texts = texts if isinstance(texts, list) else [texts]

        def answer(model: SimModel) -> Json:
            return {
                "model": body["model"],
                "embeddings": [dialects.embedding(str(text)) for text in texts],
                "total_duration": 1_000_000,
                "load_duration": 100_000,
                "prompt_eval_count": sum(len(str(text).split()) for text in texts),
            }

        return self._with_model(body, answer, shapes.native_error, self._keep_alive(body))

    async def _embeddings(self, request: Request) -> Response:
        body = await shapes.read_body(request, shapes.native_error)
        prompt = str(body.get("prompt", ""))
        keep_alive = self._keep_alive(body)
        return self._with_model(
            body, lambda _: {"embedding": dialects.embedding(prompt)}, shapes.native_error, keep_alive
        )

    # ------------------------------------------------------------------------------------ OpenAI, Anthropic

    async def _v1_chat(self, request: Request) -> Response:
        body = await shapes.read_body(request, shapes.openai_error)
        gen = self._v1_generation(body, "chat", shapes.openai_error, "max_completion_tokens", "max_tokens")
        if body.get("stream"):
            return Work(self, dialects.chat_stream(gen, STYLE, shapes.wants_usage(body)), SSE)
        return self._whole(gen, lambda: dialects.chat_body(gen, STYLE))

    async def _v1_completions(self, request: Request) -> Response:
        body = await shapes.read_body(request, shapes.openai_error)
        gen = self._v1_generation(body, "generate", shapes.openai_error, "max_tokens")
        if body.get("stream"):
            return Work(self, dialects.completion_stream(gen, STYLE, shapes.wants_usage(body)), SSE)
        return self._whole(gen, lambda: dialects.completion_body(gen, STYLE))

    async def _v1_responses(self, request: Request) -> Response:
        body = await shapes.read_body(request, shapes.openai_error)
        gen = self._v1_generation(body, "chat", shapes.openai_error, "max_output_tokens")
        if body.get("stream"):
            return Work(self, dialects.response_stream(gen, STYLE), SSE)
        return self._whole(gen, lambda: dialects.response_body(gen))

    async def _v1_messages(self, request: Request) -> Response:
        body = await shapes.read_body(request, shapes.anthropic_error)
        gen = self._v1_generation(body, "chat", shapes.anthropic_error, "max_tokens")
        if body.get("stream"):
            return Work(self, dialects.message_stream(gen), SSE)
        return self._whole(gen, lambda: dialects.message_body(gen))

    async def _v1_embeddings(self, request: Request) -> Response:
        body = await shapes.read_body(request, shapes.openai_error)
        if "input" not in body:
            raise shapes.openai_error(400, "invalid input")
        return self._with_model(body, lambda _: dialects.embedding_list(body, body["model"]), shapes.openai_error)

    async def _v1_transcriptions(self, request: Request) -> Response:
        form = re.search(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)', await request.body())
        model = form[1].decode(errors="replace") if form else ""
        return self._with_model({"model": model}, lambda _: {"text": "one card is enough"}, shapes.openai_error)

    def _v1_generation(self, body: Json, use: str, fail: Fail, *limits: str) -> Generation:
        limit = next((body[key] for key in limits if body.get(key) is not None), None)
        return self._generation(body, self._model(body, fail, use), limit, self.keep_alive_s, fail)

    # ------------------------------------------------------------------------------------ shared

    def _generation(self, body: Json, model: SimModel, limit: int | None, keep_alive: float, fail: Fail) -> Generation:
        limit = limit if limit is not None and limit >= 0 else None
        slot = lambda _: self._runner(model, keep_alive, fail)  # noqa: E731
        return Generation(self, body["model"], prompt_words(body), limit, slot)

    def _whole(self, gen: Generation, answer: Callable[[], Json]) -> Response:
        async def work() -> Response:
            await gen.finished()
            return shapes.json_answer(answer())

        return Work(self, work)

    def _with_model(
        self,
        body: Json,
        answer: Callable[[SimModel], Json],
        fail: Fail,
        keep_alive: float | None = None,
    ) -> Response:
        """An answer that needs the model for a moment only."""
        model = self._model(body, fail)

        async def work() -> Response:
            async with self._runner(model, self.keep_alive_s if keep_alive is None else keep_alive, fail):
                await self.before_token(0)
                return shapes.json_answer(answer(model))

        return Work(self, work)

    def _runner(self, model: SimModel, keep_alive: float, fail: Fail) -> AbstractAsyncContextManager[None]:
        @asynccontextmanager
        async def seat() -> AsyncGenerator[None, None]:
            try:
                async with self.runners.use(model, keep_alive):
                    yield
            except LoadError as error:
                raise fail(500, str(error)) from error

        return seat()

    def _model(self, body: Json, fail: Fail, use: str = "") -> SimModel:
        name = body.get("model") or body.get("name") or ""
        if not isinstance(name, str):
            raise fail(400, "json: cannot unmarshal into Go struct field .model of type string")
        model = self.models.get(shapes.full_name(name))
        if model is None:
            raise fail(404, f"model '{name}' not found")
        if use and model.embedding:
            raise fail(400, f'"{name}" does not support {use}')
        return model

    def _keep_alive(self, body: Json) -> float:
        value = body.get("keep_alive")
        if value is None:
            return self.keep_alive_s
        if isinstance(value, int | float):
            return float(value)
        return shapes.go_duration(str(value))
