"""Conversations over a swap, seen from outside: the API, the commands, the settings. The engines are simulated."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from typer.testing import CliRunner

from gpu_turnstile.cli.main import app as cli
from tests.aio import run_async, until
from tests.e2e.house import house, llama

LONG = "word " * 200
SMALL = {"llmc_context_min_tokens": 100}


async def there_and_back(h, text=LONG):
    """One conversation with `a`, then `b` takes the card."""
    for model in ("a", "b"):
        answer = await h.chat(model, messages=[{"role": "user", "content": text}])
        assert answer.status_code == 200, answer.text
    if h.app.contexts is not None:
        await until(lambda: not h.app.contexts._tasks)


@run_async
async def test_the_api_lists_what_is_saved_and_removes_it(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")], **SMALL) as h:
        await there_and_back(h)
        found = (await h.http.get(f"{h.gate}/v1/contexts")).json()
        assert [row["preset"] for row in found["presets"]] == ["a"]
        assert found["presets"][0]["tokens"] > 200
        assert found["bytes"] > 0
        status = (await h.http.get(f"{h.gate}/status")).json()["contexts"]
        assert (status["saved"], status["bytes"]) == (1, found["bytes"])
        metrics = (await h.http.get(f"{h.gate}/metrics")).text
        assert "gpu_turnstile_context_slots_saved_total 1.0" in metrics
        assert (await h.http.delete(f"{h.gate}/v1/contexts/nobody")).status_code == 404
        gone = (await h.http.delete(f"{h.gate}/v1/contexts/a")).json()
        assert gone == {"files": 1, "bytes": found["bytes"]}
        assert not list((tmp_path / "state" / "contexts").rglob("ctx-*"))
        assert (await h.http.delete(f"{h.gate}/v1/contexts")).json()["files"] == 0


@run_async
async def test_the_commands_list_and_drop(tmp_path):
    def run(*words: str):
        return CliRunner().invoke(cli, ["context", *words], catch_exceptions=False)

    async with house(tmp_path, [llama("a"), llama("b")], **SMALL) as h:
        await there_and_back(h)
        shown = await asyncio.to_thread(run, "list", "--url", h.gate)
        assert shown.exit_code == 0
        assert "transcripts" in shown.stdout
        assert " 1 " in shown.stdout
        found = json.loads((await asyncio.to_thread(run, "list", "--json", "--url", h.gate)).stdout)
        assert found["presets"][0]["files"] == 1
        assert (await asyncio.to_thread(run, "drop", "--url", h.gate)).exit_code == 2
        assert (await asyncio.to_thread(run, "drop", "nobody", "--url", h.gate)).exit_code == 1
        done = await asyncio.to_thread(run, "drop", "a", "--url", h.gate)
        assert done.stdout.startswith("removed 1 files")
        assert not list((tmp_path / "state" / "contexts").rglob("ctx-*"))


@run_async
async def test_no_path_gives_out_what_is_in_a_file(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")], **SMALL) as h:
        await there_and_back(h, "secretword " * 200)
        for path in ("/v1/contexts", "/status", "/events?follow=false", "/metrics"):
            assert "secretword" not in (await h.http.get(f"{h.gate}{path}")).text


@run_async
async def test_nobody_else_saves_or_restores_the_slots_the_gate_keeps(tmp_path):
    """Clients could fill the disk past every limit, or read on in a conversation of somebody else's."""
    presets = [llama("a"), llama("free", runtime="context_save = false")]
    async with house(tmp_path, presets, **SMALL) as h:
        await h.chat("a", messages=[{"role": "user", "content": LONG}])
        for action in ("save", "restore", "erase"):
            answer = await h.http.post(f"{h.gate}/slots/0?action={action}", json={"filename": "mine"})
            assert (answer.status_code, answer.headers["x-turnstile-error"]) == (403, "not_allowed")
        assert not list((tmp_path / "state" / "contexts").rglob("mine"))
        await h.chat("free")
        answer = await h.http.post(f"{h.gate}/slots/0?action=erase", json={})
        assert "x-turnstile-error" not in answer.headers


@run_async
async def test_switched_off_nothing_is_saved_and_what_was_there_is_gone(tmp_path):
    presets = [llama("a"), llama("b")]
    async with house(tmp_path, presets, **SMALL) as h:
        await there_and_back(h)
    assert list((tmp_path / "state" / "contexts").rglob("ctx-*"))
    async with house(tmp_path, presets, llmc_context_save=False, **SMALL) as h:
        assert not list((tmp_path / "state" / "contexts").rglob("ctx-*"))
        await there_and_back(h)
        assert not list((tmp_path / "state" / "contexts").rglob("ctx-*"))
        answer = await h.http.get(f"{h.gate}/v1/contexts")
        assert (answer.status_code, answer.json()["error"]) == (404, "not_saved")
        assert (await h.http.get(f"{h.gate}/status")).json()["contexts"] is None


@pytest.mark.parametrize(
    "preset",
    [
        llama("a", runtime="context_save = false"),
        llama("a", "--slot-save-path", "/nowhere"),
        llama("a", "--no-slots"),
    ],
)
@run_async
async def test_a_preset_can_be_left_out(tmp_path, preset):
    async with house(tmp_path, [preset, llama("b")], **SMALL) as h:
        await there_and_back(h)
        assert not list((tmp_path / "state" / "contexts").rglob("ctx-*"))
        assert "context_lost" not in h.kinds()


@run_async
async def test_a_folder_that_cannot_be_used_costs_the_conversations_not_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    async with house(tmp_path, [llama("a"), llama("b")], llmc_context_dir=str(tmp_path / "file"), **SMALL) as h:
        await there_and_back(h)
        assert h.app.contexts is None


@run_async
async def test_the_history_tells_of_it(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")], **SMALL) as h:
        began = time.time()
        await there_and_back(h)
        await h.chat("a")
        await until(lambda: "context_restored" in h.kinds())
        told = await h.app.history.events(began - 1, time.time() + 1, ("context_saved", "context_restored"))
        mine = [event.kind for event in told if event.tenant == "a"]
        assert mine == ["context_saved", "context_restored"]
