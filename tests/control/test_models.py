"""The listing: presets first, then the external Ollama, and never a failure because of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from gpu_turnstile.core.model import Mode
from tests.control.fakes import LLAMA, LLAMA_RUNTIME, ExternalFake, Stage, run, seat, stage


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_presets_are_listed_with_what_a_client_needs_to_size_itself(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            s.take("one")
            await s.settled()
            found = await s.get(path)
            assert found["object"] == "list"
            assert [entry["id"] for entry in found["data"]] == ["one", "two"]
            first = found["data"][0]
            assert (first["object"], first["owned_by"]) == ("model", "gpu-turnstile")
            assert first["meta"] == {
                "model_id": "one-Q4",
                "engine": "llama-server",
                "context": 4096,
                "reasoning": None,
                "max_output": None,
                "vram_gb": 21.5,
                "vram_from": "declared",
                "capabilities": ["vision"],
                "aliases": ["gpt-4o"],
                "loaded": True,
                "ephemeral_of": None,
            }
            assert not found["data"][1]["meta"]["loaded"]

    run(scenario())


def test_a_changed_folder_is_in_the_next_listing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            new = LLAMA.format(top="", stem="three", runtime=LLAMA_RUNTIME)
            (tmp_path / "presets" / "three.toml").write_text(new)
            assert [e["id"] for e in (await s.get("/v1/models"))["data"]] == ["one", "three", "two"]

    run(scenario())


def test_the_folder_is_read_before_every_listing(tmp_path: Path) -> None:
    async def scenario() -> None:
        seen = []

        async def refresh() -> None:
            seen.append("refreshed")

        async with stage(tmp_path, refresh=refresh) as s:
            await s.get("/v1/models")
            await s.get("/v1/models/one")
        assert seen == ["refreshed", "refreshed"]

    run(scenario())


@pytest.mark.parametrize("name", ["one", "gpt-4o", "one-Q4", "one:latest"])
def test_one_model_is_found_by_every_name_it_has(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            assert (await s.get(f"/v1/models/{name}"))["id"] == "one"

    run(scenario())


@pytest.mark.parametrize("name", ["onne", "pictures"])
def test_an_unknown_model_is_a_404_in_the_shape_of_openai(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            reply = await s.http.get(f"/v1/models/{name}")
            assert reply.status_code == 404
            assert reply.headers["x-turnstile-error"] == "unknown_model"
            assert reply.json()["error"]["code"] == "unknown_model"
        assert name != "onne" or 'did you mean "one"' in reply.json()["error"]["message"]

    run(scenario())


class Ollama:
    """The external one, behind a mock transport."""

    def __init__(self) -> None:
        self.answer: httpx.Response | Exception = httpx.ConnectError("refused")
        self.asked = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        assert str(request.url) == "http://127.0.0.1:11435/v1/models"
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @property
    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self))


def with_external(s: Stage) -> None:
    s.house.arbiter.presets_changed(
        [*s.seats.values(), seat("ollama", Mode.LLM, runtime=ExternalFake(), url="http://127.0.0.1:11435")]
    )
    s.house.gateway.table.external = "ollama"


def listing(*entries: Any) -> httpx.Response:
    return httpx.Response(200, json={"object": "list", "data": list(entries)})


def test_the_external_ollamas_models_follow_and_a_preset_wins_a_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        ollama = Ollama()
        theirs = {"id": "llama3:8b", "object": "model", "created": 1, "owned_by": "library"}
        ollama.answer = listing(theirs, {"id": "one"})
        async with stage(tmp_path, http=ollama.client) as s:
            with_external(s)
            found = await s.get("/v1/models")
            assert [entry["id"] for entry in found["data"]] == ["one", "two", "llama3:8b"]
            assert found["data"][2] == theirs
            assert await s.get("/v1/models/llama3:8b") == theirs

    run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.Response(500, text="no"),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"data": None}),
    ],
)
def test_an_external_ollama_that_says_nothing_useful_is_left_out(tmp_path: Path, answer: Any) -> None:
    async def scenario() -> None:
        ollama = Ollama()
        ollama.answer = answer
        async with stage(tmp_path, http=ollama.client) as s:
            with_external(s)
            for _ in range(3):
                assert [entry["id"] for entry in (await s.get("/v1/models"))["data"]] == ["one", "two"]
        assert ollama.asked == 1  # it is not asked again at once

    run(scenario())


def test_its_last_answer_stands_in_when_it_falls_silent(tmp_path: Path) -> None:
    async def scenario() -> None:
        ollama = Ollama()
        async with stage(tmp_path, http=ollama.client) as s:
            with_external(s)
            for answer in (listing({"id": "llama3"}), httpx.ConnectError("gone")):
                ollama.answer = answer
                assert [entry["id"] for entry in (await s.get("/v1/models"))["data"]] == ["one", "two", "llama3"]

    run(scenario())
