"""The simulated llama-server: recorded shapes, slots, loading and dying."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gpu_turnstile.sim import GB, LlamaFaults, LlamaSim, SimCard, serve
from gpu_turnstile.sim.llama_flags import FlagError, parse

from .helpers import browser, events_of, eventually, in_loop, standalone, within

HELLO = [{"role": "user", "content": "hello there"}]
LOADING = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}

# Recorded from llama.cpp b11549.
CHAT = {"choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings"}
CHUNK = {"choices", "created", "id", "model", "system_fingerprint", "object"}
TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}
NATIVE_PART = {"index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"}
NATIVE_END = NATIVE_PART | {
    "model",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
    "timings",
}
SLOT = {"id", "n_ctx", "speculative", "is_processing"}
USED_SLOT = SLOT | {
    "id_task",
    "n_prompt_tokens",
    "n_prompt_tokens_processed",
    "n_prompt_tokens_cache",
    "params",
    "next_token",
}


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[tuple[LlamaSim, httpx.AsyncClient]]:
    sim = LlamaSim(**{"load_s": 0.0, "tokens_per_s": 0, **settings})
    async with serve(sim) as url, browser(url) as http:
        await eventually(lambda: sim.ready)
        yield sim, http


async def ask(http: httpx.AsyncClient, text: str = "hello there", **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **more}
    return (await http.post("/v1/chat/completions", json=body)).json()


# ---------------------------------------------------------------------------------------------- loading


@in_loop
async def test_it_is_503_while_it_loads_and_holds_the_card_from_the_start() -> None:
    sim = LlamaSim(load_s=0.1, vram_gb=8)
    async with serve(sim) as url, browser(url) as http:
        await eventually(lambda: sim.card.read().used == 8 * GB)
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()) == (503, LOADING)
        assert (await http.post("/v1/chat/completions", json={"messages": HELLO})).json() == LOADING
        assert (await http.get("/v1/models")).status_code == 200
        await eventually(lambda: sim.ready)
        assert (await http.get("/health")).json() == {"status": "ok"}
    assert sim.card.read().used == 0


@in_loop
async def test_a_crash_while_loading_closes_the_port_and_frees_the_card(capfd: pytest.CaptureFixture[str]) -> None:
    sim = LlamaSim(load_s=0.05, faults=LlamaFaults(crash_loading=True))
    async with serve(sim) as url, browser(url) as http:
        await within(5, sim.exited.wait())
        assert sim.exit_code == 1
        assert sim.card.read().used == 0
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")
    assert "out of memory" in capfd.readouterr().err


@in_loop
async def test_it_crashes_where_the_card_has_no_room() -> None:
    card = SimCard(total=8 * GB)
    card.hold("somebody", 4 * GB, pid=0)
    sim = LlamaSim(card=card, vram_gb=6)
    async with serve(sim):
        await within(5, sim.exited.wait())
        assert sim.exit_code == 1
    assert "over_total" in [alarm.kind for alarm in card.alarms()]


@in_loop
async def test_it_may_never_become_healthy_until_healed() -> None:
    sim = LlamaSim(load_s=0, faults=LlamaFaults(never_healthy=True))
    async with serve(sim) as url, browser(url) as http:
        assert (await http.get("/health")).status_code == 503
        await http.post("/__sim__/faults", json={"never_healthy": False})
        await eventually(lambda: sim.ready)


# ---------------------------------------------------------------------------------------------- shapes


@in_loop
async def test_chat_answers_in_the_recorded_shape_and_honours_max_tokens() -> None:
    async with started(alias="tiny") as (_, http):
        for count in (1, 7, 40):
            answer = await ask(http, max_tokens=count)
            assert set(answer) == CHAT
            assert set(answer["timings"]) == TIMINGS
            assert answer["usage"]["completion_tokens"] == count
            assert answer["choices"][0]["finish_reason"] == "length"
            assert len(answer["choices"][0]["message"]["content"].split()) == count
        assert answer["model"] == "tiny"


@in_loop
async def test_a_chat_stream_opens_with_the_role_and_ends_with_timings_and_done() -> None:
    async with started() as (_, http):
        answer = await http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith("data: [DONE]\n\n")
        first, *words, last = events_of(answer.text)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
        assert [set(word) for word in words] == [CHUNK] * 2
        assert set(last) == CHUNK | {"timings"}
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")


@in_loop
async def test_a_chat_stream_that_is_asked_for_usage_ends_with_it() -> None:
    async with started() as (_, http):
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1}
        answer = await http.post("/v1/chat/completions", json={"messages": HELLO, **options})
        last = events_of(answer.text)[-1]
        assert set(last) == CHUNK | {"usage", "timings"}
        assert last["choices"] == []


@in_loop
async def test_the_native_completion_has_the_recorded_shape() -> None:
    async with started() as (_, http):
        answer = (await http.post("/completion", json={"prompt": "a b", "n_predict": 3})).json()
        assert set(answer) == NATIVE_END
        body = {"prompt": "a b", "n_predict": 3, "stream": True}
        *parts, end = events_of((await http.post("/completion", json=body)).text)
        assert [set(part) for part in parts] == [NATIVE_PART] * 3
        assert set(end) == NATIVE_END


@in_loop
async def test_messages_responses_and_counts_answer() -> None:
    async with started() as (_, http):
        body = {"messages": HELLO, "max_tokens": 2}
        answer = (await http.post("/v1/messages", json=body)).json()
        assert set(answer["usage"]) == {"cache_read_input_tokens", "input_tokens", "output_tokens"}
        stream = events_of((await http.post("/v1/messages", json={**body, "stream": True})).text)
        assert [event["type"] for event in stream] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert (await http.post("/v1/messages/count_tokens", json=body)).json() == {"input_tokens": 4}
        answer = (await http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2})).json()
        assert answer["usage"]["output_tokens"] == 2
        assert len((await http.post("/tokenize", json={"content": "a b c"})).json()["tokens"]) == 3


@in_loop
async def test_the_official_openai_client_understands_it() -> None:
    async with started(embeddings=True) as (sim, _):
        client = openai.AsyncOpenAI(base_url=f"{sim.url}/v1", api_key="any")
        assert [model.id async for model in client.models.list()] == ["sim.gguf"]
        stream = await client.chat.completions.create(model="x", messages=HELLO, stream=True, max_tokens=2)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "one card"
        assert len((await client.embeddings.create(model="x", input="a")).data[0].embedding) == 8


@in_loop
async def test_embeddings_and_metrics_need_their_flags() -> None:
    async with started() as (_, http):
        for answer in (await http.post("/v1/embeddings", json={"input": "a"}), await http.get("/metrics")):
            assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")


@in_loop
async def test_props_name_the_model_and_the_slots() -> None:
    async with started(model="models/a.gguf", parallel=2, ctx_size=4096) as (_, http):
        props = (await http.get("/props")).json()
        assert (props["total_slots"], props["model_path"], props["is_sleeping"]) == (2, "models/a.gguf", False)
        assert props["default_generation_settings"]["n_ctx"] == 2048


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{bad", "invalid_request_error"),
        (b"{}", "invalid_request_error"),
        (b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"word " * 5000), "exceed_context_size_error"),
    ],
)
@in_loop
async def test_bad_requests_are_400_with_their_kind(content: bytes, kind: str) -> None:
    async with started() as (_, http):
        answer = await http.post("/v1/chat/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, kind)


@in_loop
async def test_an_unknown_path_is_404_file_not_found() -> None:
    async with started() as (_, http):
        answer = await http.get("/nope")
        assert answer.status_code == 404
        assert answer.json() == {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}


# ---------------------------------------------------------------------------------------------- slots


@in_loop
async def test_requests_beyond_the_slots_wait_their_turn() -> None:
    async with started(parallel=2, tokens_per_s=100) as (sim, http):
        asking = [asyncio.ensure_future(ask(http, max_tokens=10)) for _ in range(5)]
        await eventually(lambda: sim.in_flight == 5)
        slots = (await http.get("/slots")).json()
        assert [slot["is_processing"] for slot in slots] == [True, True]
        assert set(slots[0]) == USED_SLOT
        assert {answer["usage"]["completion_tokens"] for answer in await asyncio.gather(*asking)} == {10}
        assert not any(slot["is_processing"] for slot in (await http.get("/slots")).json())


@in_loop
async def test_a_waiting_request_whose_client_left_does_not_block_the_next() -> None:
    async with started(tokens_per_s=100) as (sim, http):
        first, second, third = (asyncio.ensure_future(ask(http, max_tokens=20)) for _ in range(3))
        await eventually(lambda: sim.in_flight == 3)
        second.cancel()
        assert [answer["usage"]["completion_tokens"] for answer in (await first, await third)] == [20, 20]
        await eventually(lambda: sim.in_flight == 0)


@in_loop
async def test_a_prompt_that_goes_on_is_not_read_again() -> None:
    async with started() as (_, http):
        first = await ask(http, max_tokens=3)
        talk = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "and then"}]
        body = {"messages": talk, "max_tokens": 1}
        second = (await http.post("/v1/chat/completions", json=body)).json()
        assert first["timings"]["cache_n"] == 0
        assert second["timings"]["cache_n"] == 7
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 7


@in_loop
async def test_a_saved_slot_is_warm_again_in_a_new_process(tmp_path: Path) -> None:
    async with started(slot_save_path=str(tmp_path)) as (_, http):
        await ask(http, "a long story", max_tokens=3)
        saved = (await http.post("/slots/0?action=save", json={"filename": "a.bin"})).json()
        assert set(saved) == {"id_slot", "filename", "n_saved", "n_written", "timings"}
    async with started(slot_save_path=str(tmp_path)) as (_, http):
        restored = (await http.post("/slots/0?action=restore", json={"filename": "a.bin"})).json()
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        assert (await ask(http, "a long story", max_tokens=1))["timings"]["cache_n"] > 0
        assert (await http.post("/slots/0?action=erase")).json()["n_erased"] > 0
        assert (await ask(http, "a long story", max_tokens=1))["timings"]["cache_n"] == 0


@in_loop
async def test_a_failed_restore_is_400_and_wipes_the_slot(tmp_path: Path) -> None:
    async with started(slot_save_path=str(tmp_path)) as (_, http):
        await ask(http, max_tokens=1)
        answer = await http.post("/slots/0?action=restore", json={"filename": "missing.bin"})
        assert answer.status_code == 400
        saved = (await http.post("/slots/0?action=save", json={"filename": "a.bin"})).json()
        assert saved["n_saved"] == 0


@in_loop
async def test_a_truncated_slot_file_kills_the_server(tmp_path: Path) -> None:
    async with started(slot_save_path=str(tmp_path)) as (sim, http):
        await ask(http, max_tokens=1)
        await http.post("/slots/0?action=save", json={"filename": "a.bin"})
        whole = (tmp_path / "a.bin").read_bytes()
        (tmp_path / "a.bin").write_bytes(whole[:-1])
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/slots/0?action=restore", json={"filename": "a.bin"})
        await within(5, sim.exited.wait())
        assert sim.exit_code == 134


@pytest.mark.parametrize("name", ["", "../a", "a/b", "C:a"])
@in_loop
async def test_a_slot_file_is_a_plain_name(name: str, tmp_path: Path) -> None:
    async with started(slot_save_path=str(tmp_path)) as (_, http):
        answer = await http.post("/slots/0?action=save", json={"filename": name})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "Invalid filename")


# ---------------------------------------------------------------------------------------------- dying


@in_loop
async def test_a_client_that_leaves_stops_its_answer() -> None:
    async with started(tokens_per_s=50) as (sim, http):
        body = {"messages": HELLO, "max_tokens": 10_000, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_lines())
        await eventually(lambda: sim.in_flight == 0)
        assert not sim.slots.all[0].lock.locked()


@in_loop
async def test_a_crash_in_mid_stream_aborts_it_and_closes_the_port() -> None:
    async with started(faults=LlamaFaults(crash_after=3)) as (sim, http):
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
        await within(5, sim.exited.wait())
        assert sim.exit_code == 134
        assert sim.card.read().used == 0


@in_loop
async def test_the_same_simulator_starts_again_after_a_crash() -> None:
    sim = LlamaSim(load_s=0, faults=LlamaFaults(crash_after=1))
    async with serve(sim) as url, browser(url) as http:
        await eventually(lambda: sim.ready)
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(http)
        await within(5, sim.exited.wait())
    sim.faults.heal()
    async with serve(sim, port=int(url.rsplit(":", 1)[1])) as again, browser(again) as http:
        assert again == url
        await eventually(lambda: sim.ready)
        assert "choices" in await ask(http)


def test_sigterm_ends_an_idle_server_at_once_with_0() -> None:
    with standalone("llama-server", "-m", "a.gguf", "--port", "0", "--sim-load-s", "0") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(2) == 0


def test_sigterm_waits_for_an_open_answer_without_sending_more_and_the_second_does_not_wait() -> None:
    flags = ("--port", "0", "--sim-load-s", "0", "--sim-tokens-per-s", "100")
    with standalone("llama-server", *flags) as (process, url), httpx.Client(base_url=url, timeout=5) as http:
        while http.get("/health").status_code != 200:
            pass
        body = {"messages": HELLO, "max_tokens": 100_000, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(Exception, match="timed out"):
                process.wait(0.3)
            process.send_signal(signal.SIGTERM)
            assert process.wait(2) == 1


def test_sigterm_ends_it_when_the_last_client_has_left() -> None:
    flags = ("--port", "0", "--sim-load-s", "0", "--sim-tokens-per-s", "100")
    with standalone("llama-server", *flags) as (process, url), httpx.Client(base_url=url, timeout=5) as http:
        while http.get("/health").status_code != 200:
            pass
        body = {"messages": HELLO, "max_tokens": 100_000, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGTERM)
        http.close()
        assert process.wait(3) == 0


def test_it_may_ignore_sigterm() -> None:
    with standalone("llama-server", "--port", "0", "--sim-fault", "ignore_sigterm") as (process, url):
        process.send_signal(signal.SIGTERM)
        assert httpx.get(f"{url}/v1/models").status_code == 200
        process.kill()
        assert process.wait(2) == -signal.SIGKILL


# ---------------------------------------------------------------------------------------------- flags


def test_the_flags_of_a_preset_are_read_and_the_others_passed_over() -> None:
    flags = parse(["-m", "a.gguf", "-ngl", "99", "-c", "8192", "-np", "2", "-ctk", "q8_0", "--alias=x", "--no-mmap"])
    assert flags.values == {"model": "a.gguf", "ctx-size": 8192, "parallel": 2, "alias": "x"}
    assert flags.unknown == ["-ngl", "-ctk", "--no-mmap"]


@pytest.mark.parametrize("words", [["--port"], ["--port", "many"]])
def test_a_flag_without_its_value_is_an_error(words: list[str]) -> None:
    with pytest.raises(FlagError, match="--port"):
        parse(words)
