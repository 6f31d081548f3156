"""The simulated Ollama: shapes, official clients, loading and unloading, faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from gpu_turnstile.sim import GB, OllamaFaults, OllamaSim, SimModel, serve

from .helpers import browser, eventually, in_loop, lines_of, within

HELLO = [{"role": "user", "content": "hello there"}]
UNLOAD = {"model": "llama3", "keep_alive": 0}


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[tuple[OllamaSim, httpx.AsyncClient]]:
    sim = OllamaSim(**{"load_s": 0.01, "tokens_per_s": 0, **settings})
    async with serve(sim) as url, browser(url) as http:
        yield sim, http


async def listed(http: httpx.AsyncClient) -> list[str]:
    return [model["name"] for model in (await http.get("/api/ps")).json()["models"]]


async def load(http: httpx.AsyncClient, model: str = "llama3", **more: Any) -> None:
    answer = await http.post("/api/generate", json={"model": model, **more})
    assert answer.json()["done_reason"] == "load"


async def read_into(got: list[bytes], http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with http.stream("POST", "/api/generate", json=body) as answer:
        async for chunk in answer.aiter_raw():
            got.append(chunk)


# ---------------------------------------------------------------------------------------------- shapes


@in_loop
async def test_the_root_says_that_it_runs_also_to_head() -> None:
    async with started() as (_, http):
        assert (await http.get("/")).text == "Ollama is running"
        assert (await http.head("/")).status_code == 200
        assert set((await http.get("/api/version")).json()) == {"version"}


@in_loop
async def test_ps_lists_what_is_loaded_with_all_of_ollamas_fields() -> None:
    async with started() as (_, http):
        await load(http)
        (model,) = (await http.get("/api/ps")).json()["models"]
        assert set(model) == {
            "name",
            "model",
            "size",
            "digest",
            "details",
            "expires_at",
            "size_vram",
            "context_length",
        }
        assert model["name"] == "llama3:latest"
        assert model["size"] == model["size_vram"] == 8 * GB
        stays = datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)
        assert 290 < stays.total_seconds() <= 300


@in_loop
async def test_generate_streams_ndjson_and_ends_with_the_counts() -> None:
    async with started() as (_, http):
        body = {"model": "llama3", "prompt": "hello there", "options": {"num_predict": 3}}
        answer = await http.post("/api/generate", json=body)
        assert answer.headers["content-type"] == "application/x-ndjson"
        *words, last = lines_of(answer.text)
        assert [set(word) for word in words] == [{"model", "created_at", "response", "done"}] * 3
        assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 3)
        assert last["prompt_eval_count"] == 2


@in_loop
async def test_an_answer_without_a_limit_ends_by_itself() -> None:
    async with started(answer_tokens=5) as (_, http):
        body = {"model": "llama3", "messages": HELLO, "stream": False}
        answer = (await http.post("/api/chat", json=body)).json()
        assert (answer["done_reason"], answer["eval_count"]) == ("stop", 5)
        assert len(answer["message"]["content"].split()) == 5


@in_loop
async def test_an_unknown_model_is_404_in_each_dialect() -> None:
    async with started() as (_, http):
        body = {"model": "nope", "prompt": "x", "messages": HELLO, "max_tokens": 1}
        answer = await http.post("/api/generate", json=body)
        assert (answer.status_code, answer.json()) == (404, {"error": "model 'nope' not found"})
        answer = await http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        answer = await http.post("/v1/messages", json=body)
        assert (answer.status_code, answer.json()["type"]) == (404, "error")


@pytest.mark.parametrize("content", [b"", b"{bad", b"[]", b'{"model": 7}'])
@in_loop
async def test_a_bad_body_is_400_and_loads_nothing(content: bytes) -> None:
    async with started() as (sim, http):
        answer = await http.post("/api/generate", content=content)
        assert answer.status_code == 400
        assert "error" in answer.json()
        assert sim.counters["loads"] == 0


# ---------------------------------------------------------------------------------------------- official clients


@in_loop
async def test_the_official_ollama_client_understands_everything() -> None:
    async with started() as (sim, _):
        client = ollama.AsyncClient(sim.url)
        assert [model.model for model in (await client.list()).models] == [
            "llama3:latest",
            "qwen3:8b",
            "bge-m3:latest",
        ]
        assert (await client.show("bge-m3")).capabilities == ["embedding"]
        assert (await client.generate("llama3", "hi")).done_reason == "stop"
        chunks = [chunk async for chunk in await client.chat("llama3", HELLO, stream=True)]
        assert chunks[-1].done
        assert [model.size_vram for model in (await client.ps()).models] == [8 * GB]
        assert len((await client.embed("bge-m3", ["a", "b"])).embeddings) == 2
        assert len((await client.embeddings("bge-m3", "a")).embedding) == 8
        assert [p.status async for p in await client.pull("x", stream=True)][-1] == "success"
        with pytest.raises(ollama.ResponseError, match="model 'nope' not found"):
            await client.chat("nope", HELLO)


@in_loop
async def test_the_official_openai_client_understands_everything() -> None:
    async with started() as (sim, _):
        client = openai.AsyncOpenAI(base_url=f"{sim.url}/v1", api_key="any")
        assert "qwen3:8b" in [model.id async for model in client.models.list()]
        whole = await client.chat.completions.create(model="llama3", messages=HELLO, max_tokens=3)
        assert whole.usage is not None
        assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (3, "length")
        stream = await client.chat.completions.create(
            model="llama3", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices).startswith("one card")
        assert chunks[-1].usage is not None
        legacy = await client.completions.create(model="llama3", prompt="a", max_tokens=2)
        assert legacy.choices[0].text == "one card"
        assert len((await client.embeddings.create(model="bge-m3", input=["a", "b"])).data) == 2
        assert (await client.responses.create(model="llama3", input="hi")).output_text.startswith("one card")
        kinds = [event.type async for event in await client.responses.create(model="llama3", input="x", stream=True)]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        spoken = await client.audio.transcriptions.create(model="llama3", file=("a.wav", b"0"))
        assert spoken.text
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=HELLO)


@in_loop
async def test_the_official_anthropic_client_understands_messages() -> None:
    async with started() as (sim, _):
        client = anthropic.AsyncAnthropic(base_url=sim.url, api_key="any")
        whole = await client.messages.create(model="llama3", max_tokens=2, messages=HELLO)
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 2)
        async with client.messages.stream(model="llama3", max_tokens=2, messages=HELLO) as stream:
            assert await stream.get_final_text() == "one card"


# ---------------------------------------------------------------------------------------------- coming and going


@in_loop
async def test_loading_holds_the_card_from_its_beginning() -> None:
    async with started(load_s=30) as (sim, http):
        asking = asyncio.ensure_future(http.post("/api/generate", json={"model": "llama3", "prompt": "x"}))
        await eventually(lambda: sim.card.held_by("ollama") == 8 * GB)
        assert await listed(http) == ["llama3:latest"]
        asking.cancel()


@in_loop
async def test_twenty_first_requests_load_the_model_once() -> None:
    async with started(load_s=0.05) as (sim, http):
        body = {"model": "llama3", "prompt": "x", "stream": False}
        answers = await asyncio.gather(*(http.post("/api/generate", json=body) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert sim.counters["loads"] == 1


@in_loop
async def test_another_model_puts_its_own_neighbour_out() -> None:
    async with started() as (sim, http):
        await load(http, "llama3")
        await load(http, "qwen3:8b")
        assert await listed(http) == ["qwen3:8b"]
        assert sim.card.read().used == 6 * GB
        assert sim.card.alarms() == ()


@in_loop
async def test_two_models_stay_together_where_two_may() -> None:
    async with started(max_loaded=2) as (sim, http):
        await load(http, "llama3")
        await load(http, "qwen3:8b")
        assert await listed(http) == ["llama3:latest", "qwen3:8b"]
        assert sim.card.read().used == 14 * GB
        assert sim.card.alarms() == ()


@in_loop
async def test_a_model_that_does_not_fit_is_partly_on_the_cpu() -> None:
    async with started(models=[SimModel("big", 30.0)]) as (_, http):
        await load(http, "big")
        (model,) = (await http.get("/api/ps")).json()["models"]
        assert model["size_vram"] == 24 * GB < model["size"]


@in_loop
async def test_an_unload_is_acknowledged_at_once_and_happens_later() -> None:
    async with started() as (sim, http):
        await load(http)
        sim.faults.unload_s = 0.1
        answer = (await http.post("/api/generate", json=UNLOAD)).json()
        assert (answer["done"], answer["done_reason"], answer["response"]) == (True, "unload", "")
        assert await listed(http) == ["llama3:latest"]
        await eventually(lambda: sim.card.read().used == 0)
        assert await listed(http) == []


@in_loop
async def test_an_unload_waits_for_the_answer_in_flight() -> None:
    async with started(tokens_per_s=100, answer_tokens=10) as (sim, http):
        asking = asyncio.ensure_future(http.post("/api/generate", json={"model": "llama3", "prompt": "x"}))
        await eventually(lambda: sim.counters["tokens"] > 0)
        await http.post("/api/chat", json={"model": "llama3", "messages": [], "keep_alive": 0})
        (model,) = (await http.get("/api/ps")).json()["models"]
        assert datetime.fromisoformat(model["expires_at"]) <= datetime.now(UTC)
        assert lines_of((await asking).text)[-1]["eval_count"] == 10
        await eventually(lambda: not sim.runners.listed())


@pytest.mark.parametrize("keep_alive", ["50ms", "0.05s", 0.05])
@in_loop
async def test_a_model_leaves_by_itself_when_its_keep_alive_is_over(keep_alive: Any) -> None:
    async with started() as (sim, http):
        await load(http, keep_alive=keep_alive)
        await eventually(lambda: sim.card.read().used == 0)


@pytest.mark.parametrize("keep_alive", [-1, "-1m", -1.0])
@in_loop
async def test_a_pinned_model_expires_in_centuries(keep_alive: Any) -> None:
    async with started() as (_, http):
        await load(http, keep_alive=keep_alive)
        (model,) = (await http.get("/api/ps")).json()["models"]
        assert datetime.fromisoformat(model["expires_at"]).year > 2300


@in_loop
async def test_a_senseless_keep_alive_is_refused() -> None:
    async with started() as (_, http):
        answer = await http.post("/api/generate", json={"model": "llama3", "keep_alive": "soon"})
        assert (answer.status_code, answer.json()) == (400, {"error": 'time: invalid duration "soon"'})


@in_loop
async def test_keep_alive_zero_with_a_prompt_answers_and_then_unloads() -> None:
    async with started() as (sim, http):
        answer = await http.post("/api/generate", json={**UNLOAD, "prompt": "x", "stream": False})
        assert answer.json()["done_reason"] == "stop"
        await eventually(lambda: not sim.runners.listed())


@in_loop
async def test_an_embedding_model_refuses_to_generate_and_unloads_by_embed() -> None:
    async with started() as (sim, http):
        await http.post("/api/embed", json={"model": "bge-m3", "input": "x"})
        for path, use in (("/api/generate", "generate"), ("/api/chat", "chat")):
            answer = await http.post(path, json={"model": "bge-m3", "keep_alive": 0})
            assert answer.status_code == 400
            assert answer.json() == {"error": f'"bge-m3" does not support {use}'}
        assert await listed(http) == ["bge-m3:latest"]
        await http.post("/api/embed", json={"model": "bge-m3", "input": "x", "keep_alive": 0})
        await eventually(lambda: not sim.runners.listed())


@in_loop
async def test_a_client_that_leaves_stops_its_answer() -> None:
    async with started(tokens_per_s=50, answer_tokens=10_000) as (sim, http):
        async with http.stream("POST", "/api/generate", json={"model": "llama3", "prompt": "x"}) as answer:
            await anext(answer.aiter_lines())
            assert sim.in_flight == 1
        await eventually(lambda: sim.in_flight == 0)
        assert sim.counters["clients_gone"] == 1
        assert sim.counters["tokens"] < 100


@in_loop
async def test_a_client_that_leaves_before_the_first_byte_stops_its_answer() -> None:
    async with started(prompt_tokens_per_s=0.1) as (sim, http):
        body = {"model": "llama3", "prompt": "x", "stream": False}
        asking = asyncio.ensure_future(http.post("/api/generate", json=body))
        await eventually(lambda: sim.state()["loaded"].get("llama3:latest", {}).get("refs") == 1)
        asking.cancel()
        await eventually(lambda: sim.in_flight == 0)
        assert sim.runners.listed()[0].refs == 0


@in_loop
async def test_beyond_its_seats_requests_of_a_model_wait() -> None:
    async with started(tokens_per_s=100, answer_tokens=5, parallel=1) as (sim, http):
        body = {"model": "llama3", "prompt": "x"}
        begun = asyncio.get_running_loop().time()
        await asyncio.gather(*(http.post("/api/generate", json=body) for _ in range(3)))
        assert asyncio.get_running_loop().time() - begun >= 0.15
        assert sim.counters["peak_in_flight"] == 3


# ---------------------------------------------------------------------------------------------- faults


@in_loop
async def test_a_stuck_unload_stays_listed_as_expired_until_it_is_healed() -> None:
    async with started(faults=OllamaFaults(unload_s=-1)) as (sim, http):
        await load(http)
        await http.post("/api/generate", json=UNLOAD)
        with pytest.raises(TimeoutError):
            await within(0.1, eventually(lambda: not sim.runners.listed()))
        (model,) = (await http.get("/api/ps")).json()["models"]
        assert datetime.fromisoformat(model["expires_at"]) < datetime.now(UTC)
        assert sim.card.read().used == 8 * GB
        await http.post("/__sim__/faults", json={"unload_s": 0})
        await eventually(lambda: not sim.runners.listed())
        assert sim.card.read().used == 0


@in_loop
async def test_memory_may_come_back_later_than_the_list_says() -> None:
    async with started(faults=OllamaFaults(memory_late_s=0.15)) as (sim, http):
        await load(http)
        await http.post("/api/generate", json=UNLOAD)
        await eventually(lambda: not sim.runners.listed())
        assert sim.card.read().used == 8 * GB
        await eventually(lambda: sim.card.read().used == 0)


@in_loop
async def test_memory_may_never_come_back() -> None:
    async with started(faults=OllamaFaults(memory_leak=True)) as (sim, http):
        await load(http)
        await http.post("/api/generate", json=UNLOAD)
        await eventually(lambda: not sim.runners.listed())
        assert sim.card.read().used == 8 * GB
        await http.post("/__sim__/reset")
        assert sim.card.read().used == 0


@in_loop
async def test_ps_may_flicker_between_all_some_and_nothing() -> None:
    async with started(max_loaded=2, faults=OllamaFaults(ps_flicker=2)) as (_, http):
        await load(http, "llama3")
        await load(http, "qwen3:8b")
        assert [len(await listed(http)) for _ in range(4)] == [2, 0, 2, 1]


@in_loop
async def test_ps_may_hang_while_the_rest_answers() -> None:
    async with started(faults=OllamaFaults(ps_hang=True)) as (_, http):
        with pytest.raises(TimeoutError):
            await within(0.05, http.get("/api/ps"))
        assert (await http.get("/api/version")).status_code == 200


@in_loop
async def test_a_load_may_fail_and_the_next_one_work() -> None:
    async with started(faults=OllamaFaults(load_error=True)) as (sim, http):
        answer = await http.post("/api/generate", json={"model": "llama3", "prompt": "x"})
        assert answer.status_code == 500
        assert "error" in answer.json()
        assert sim.card.read().used == 0
        sim.faults.load_error = False
        await load(http)


@in_loop
async def test_a_stream_may_be_cut_without_an_end() -> None:
    async with started(faults=OllamaFaults(cut_after=3)) as (sim, http):
        got: list[bytes] = []
        with pytest.raises(httpx.RemoteProtocolError):
            await read_into(got, http, {"model": "llama3", "prompt": "x"})
        assert [json.loads(line)["done"] for line in b"".join(got).splitlines()] == [False] * 3
        await eventually(lambda: sim.in_flight == 0)


@in_loop
async def test_a_stream_may_stall_and_go_on_when_healed() -> None:
    async with started(answer_tokens=5, faults=OllamaFaults(stall_after=2)) as (sim, http):
        asking = asyncio.ensure_future(http.post("/api/generate", json={"model": "llama3", "prompt": "x"}))
        await eventually(lambda: sim.counters["tokens"] == 2)
        sim.faults.heal()
        assert lines_of((await asking).text)[-1]["eval_count"] == 5


@in_loop
async def test_it_may_work_on_for_a_client_that_left() -> None:
    faults = OllamaFaults(ignore_disconnect=True)
    async with started(tokens_per_s=200, answer_tokens=20, faults=faults) as (sim, http):
        asking = asyncio.ensure_future(http.post("/api/generate", json={"model": "llama3", "prompt": "x"}))
        await eventually(lambda: sim.counters["tokens"] > 0)
        asking.cancel()
        await eventually(lambda: sim.counters["clients_gone"] == 1)
        assert sim.in_flight == 1
        await eventually(lambda: sim.in_flight == 0)
        assert sim.counters["tokens"] == 20
