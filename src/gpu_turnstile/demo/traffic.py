"""The demo's clients: each asks through the gate as an ordinary client would, and notes how it went."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

Say = Callable[[str, str], None]

GRAPH = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 1}},
    "2": {"class_type": "SleepImage", "inputs": {"image": ["1", 0], "seconds": 2.0, "steps": 4, "seed": 1}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "demo"}},
}


@dataclass(slots=True)
class Outcome:
    """One request. Times in seconds; `waited` is until the first byte of the answer's content."""

    who: str
    what: str
    waited: float
    took: float
    end: str
    text: str = ""
    expected: bool = True


class Clients:
    def __init__(self, gate: str, comfy: str, say: Say) -> None:
        self.outcomes: list[Outcome] = []
        self._gate, self._comfy, self._say = gate, comfy, say
        self._http = httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(120, connect=5))
        self._seed = 0

    async def close(self) -> None:
        await self._http.aclose()

    async def chat(self, who: str, model: str, prompt: str = "Say something.", tokens: int = 40) -> Outcome:
        """A streaming OpenAI chat, whoever serves it."""
        return await self._chat(who, model, prompt, tokens, "ok")

    async def refused(self, who: str, model: str, expect: str) -> Outcome:
        """A chat that should end with this error."""
        return await self._chat(who, model, "Say something.", 40, expect)

    async def chat_cut_off(self, who: str, model: str, cut: Callable[[], None]) -> Outcome:
        """A long answer, whatever the model would like; `cut` is called when it has begun."""
        return await self._chat(who, model, "Say something.", 1500, "cut off", cut, ignore_eos=True)

    async def _chat(
        self,
        who: str,
        model: str,
        prompt: str,
        tokens: int,
        expect: str,
        begun: Callable[[], None] | None = None,
        **more: object,
    ) -> Outcome:
        body = {
            "model": model,
            "stream": True,
            "max_tokens": tokens,
            "temperature": 0,
            "messages": [{"role": "user", "content": prompt}],
            **more,
        }
        return await self._stream(who, model, "/v1/chat/completions", body, _openai_text, expect, begun)

    async def ollama(self, who: str, model: str, tokens: int = 40) -> Outcome:
        """A streaming chat in Ollama's own API."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Say something."}],
            "options": {"num_predict": tokens},
        }
        return await self._stream(who, model, "/api/chat", body, _ollama_text, "ok")

    async def _stream(
        self,
        who: str,
        model: str,
        path: str,
        body: Mapping[str, object],
        read: Callable[[str], str],
        expect: str,
        begun: Callable[[], None] | None = None,
    ) -> Outcome:
        began, first, text, end = time.monotonic(), None, "", "ok"
        self._say(who, f"asks {model}")
        try:
            async with self._http.stream("POST", self._gate + path, json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    end = f"{answer.status_code} {answer.headers.get('X-Turnstile-Error', '')}".strip()
                async for line in answer.aiter_lines():
                    piece = read(line)
                    if piece:
                        if first is None and begun is not None:
                            begun()
                        first = first or time.monotonic()
                        text += piece
        except httpx.HTTPError:
            end = "cut off"
        now = time.monotonic()
        return self._note(Outcome(who, model, (first or now) - began, now - began, end, text, end == expect))

    async def image(self, who: str) -> Outcome:
        """An image: post the graph, then look at the history until it is there, as ComfyUI's own page does."""
        self._seed += 1
        graph = {**GRAPH, "2": {**GRAPH["2"], "inputs": {**GRAPH["2"]["inputs"], "seed": self._seed}}}  # type: ignore[dict-item]
        began = time.monotonic()
        self._say(who, "asks for an image")
        reply = await self._http.post(f"{self._comfy}/prompt", json={"prompt": graph})
        posted = time.monotonic() - began
        if reply.status_code != 200:
            return self._note(Outcome(who, "image", posted, posted, str(reply.status_code), expected=False))
        prompt_id = reply.json()["prompt_id"]
        while True:
            history = (await self._http.get(f"{self._comfy}/history/{prompt_id}")).json()
            if prompt_id in history:
                status = history[prompt_id]["status"]["status_str"]
                took = time.monotonic() - began
                return self._note(
                    Outcome(
                        who, "image", posted, took, "ok" if status == "success" else status, "", status == "success"
                    )
                )
            await asyncio.sleep(0.2)

    async def give_up(self, who: str, model: str, after: float) -> None:
        """A client that leaves while it waits."""
        self._say(who, f"asks {model}, and will not wait longer than {after:g} s")
        body = {"model": model, "messages": [], "stream": False}
        try:
            await self._http.post(self._gate + "/v1/chat/completions", json=body, timeout=after)
        except httpx.TimeoutException:
            self._say(who, "has left")

    def _note(self, outcome: Outcome) -> Outcome:
        self.outcomes.append(outcome)
        mark = "done" if outcome.end == "ok" else outcome.end
        self._say(
            outcome.who, f"{outcome.what}: {mark}, first byte after {outcome.waited:.1f} s, all {outcome.took:.1f} s"
        )
        return outcome


def _openai_text(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line[6:]).get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def _ollama_text(line: str) -> str:
    return str(json.loads(line).get("message", {}).get("content", "")) if line.startswith("{") else ""
