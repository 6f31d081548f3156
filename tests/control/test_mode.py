"""Changing what is on the card by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpu_turnstile.settings import Settings
from tests.control.fakes import FakeRuntime, run, stage, until


@pytest.mark.parametrize(
    ("body", "resident"),
    [
        ({"mode": "llm", "model": "two"}, "two"),
        ({"mode": "llm", "model": "gpt-4o"}, "one"),
        ({"mode": "comfyui"}, "pictures"),
        ({"mode": "comfyui", "model": "pictures"}, "pictures"),
    ],
)
def test_a_mode_brings_its_preset_in_and_answers_with_the_status(
    tmp_path: Path, body: dict[str, Any], resident: str
) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            reply = await s.http.post("/mode", json=body)
            assert reply.status_code == 200
            assert reply.json()["swaps"]["last"]["target"] in (resident, None)
            assert (await s.get("/mode"))["model"] == resident

    run(scenario())


def test_llm_without_a_model_is_the_one_that_was_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            await s.http.post("/mode", json={"mode": "llm", "model": "two"})
            await s.http.post("/mode", json={"mode": "idle"})
            assert (await s.get("/mode"))["residents"] == []
            reply = await s.http.post("/mode", json={"mode": "llm"})
            assert reply.json()["residents"] == ["two"]

    run(scenario())


def test_llm_without_a_model_is_the_external_ollama_when_nothing_else_is_meant(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            s.house.gateway.table.external = "two"
            reply = await s.http.post("/mode", json={"mode": "llm"})
            assert reply.json()["residents"] == ["two"]

    run(scenario())


@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded"])
def test_the_content_type_does_not_matter(tmp_path: Path, content_type: str) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            reply = await s.http.post(
                "/mode", content=b'{"mode": "llm", "model": "one"}', headers={"content-type": content_type}
            )
            assert reply.json()["residents"] == ["one"]

    run(scenario())


@pytest.mark.parametrize(
    ("body", "status", "code", "said"),
    [
        (b"{", 400, "bad_request", "not JSON"),
        (b"[]", 400, "bad_request", "object"),
        (b"", 400, "bad_request", '"mode" is missing'),
        (b'{"mode": "lmm"}', 400, "bad_request", "llm, comfyui, train, idle"),
        (b'{"mode": 5}', 400, "bad_request", "llm, comfyui, train, idle"),
        (b'{"mode": "llm", "model": 5}', 400, "bad_request", "the name of a preset"),
        (b'{"mode": "llm", "modell": "one"}', 400, "bad_request", "modell"),
        (b'{"mode": "idle", "model": "one"}', 400, "bad_request", "takes no model"),
        (b'{"mode": "llm", "model": "pictures"}', 400, "bad_request", "its mode is comfyui"),
        (b'{"mode": "comfyui", "model": "one"}', 400, "bad_request", "its mode is llm"),
        (b'{"mode": "llm"}', 400, "bad_request", "there is one, two"),
        (b'{"mode": "llm", "model": "onne"}', 404, "unknown_model", "one"),
        (b'{"mode": "comfyui", "model": "x"}', 404, "unknown_model", "pictures"),
        (b'{"mode": "train"}', 404, "unknown_model", "no preset of mode train"),
        (b'{"lock": "nobody", "owner": "me"}', 404, "unknown_model", "no preset is called"),
        (b'{"renew": true}', 400, "bad_request", "an owner is a text"),
        (b"[" * 70_000, 413, "too_large", "65536"),
    ],
)
def test_bad_input_says_what_would_be_right_and_changes_nothing(
    tmp_path: Path, body: bytes, status: int, code: str, said: str
) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            reply = await s.http.post("/mode", content=body)
            assert (reply.status_code, reply.headers["x-turnstile-error"]) == (status, code)
            assert reply.json()["error"] == code
            assert said in reply.json()["message"]
            assert (await s.get("/mode"))["phase"] == "idle"

    run(scenario())


def test_a_preset_that_does_not_start_is_a_503_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            runtime = s.seats["one"].runtime
            assert isinstance(runtime, FakeRuntime)
            runtime.broken = "the file is not there"
            reply = await s.http.post("/mode", json={"mode": "llm", "model": "one"})
            assert reply.status_code == 503
            assert reply.headers["x-turnstile-error"] == "swap_failed"
            assert int(reply.headers["retry-after"]) > 0
            assert "the file is not there" in reply.json()["message"]

    run(scenario())


def test_a_caller_that_hangs_up_is_taken_out_of_the_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            s.take("one")
            await s.settled()
            said = iter([{"type": "http.request", "body": b'{"mode": "llm", "model": "two"}'}])
            left = asyncio.Event()

            async def receive() -> dict[str, Any]:
                for message in said:
                    return message
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                pass

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/mode",
                "headers": [],
                "query_string": b"",
                "http_version": "1.1",
            }
            call = asyncio.create_task(s.app(scope, receive, send))
            await until(lambda: s.house.arbiter.snapshot().waiting)
            left.set()
            await call
            assert s.house.arbiter.snapshot().waiting == ()
            assert s.house.arbiter.snapshot().target is None

    run(scenario())


def test_unload_answers_when_the_card_is_empty(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            assert (await s.http.post("/unload")).status_code == 200  # nothing to do
            lease = s.take("one")
            await s.settled()
            call = asyncio.create_task(s.http.post("/unload"))
            await until(lambda: s.house.arbiter.snapshot().phase == "draining")
            s.house.arbiter.release(lease)
            reply = await call
            assert reply.status_code == 200
            assert reply.json()["residents"] == []

    run(scenario())


def test_an_unload_that_takes_too_long_is_202_and_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = Settings(unload_timeout=0.05, llmc_drain_grace_s=0.0)
        async with stage(tmp_path, settings=settings) as s:
            lease = s.take("one")
            await s.settled()
            reply = await s.http.post("/unload")
            assert reply.status_code == 202
            assert reply.json()["residents"] == ["one"]
            s.house.arbiter.release(lease)
            await s.settled()
            assert (await s.get("/mode"))["residents"] == []

    run(scenario())


def test_after_an_unload_whoever_waits_is_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            first = s.take("one")
            await s.settled()
            waiting = s.take("two")
            call = asyncio.create_task(s.http.post("/unload"))
            await asyncio.sleep(0.01)
            s.house.arbiter.release(first)
            assert (await call).status_code == 200
            await s.settled()
            assert waiting.tenant == "two"

    run(scenario())
