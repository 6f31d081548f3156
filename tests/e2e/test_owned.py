"""Owned engines, each a process of its own, behind a whole gate."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import httpx
import pytest

from gpu_turnstile.core.model import Phase
from gpu_turnstile.core.policy import Order
from tests.aio import run_async, until
from tests.e2e.house import PresetText, engine_pids, house, llama, write


async def broken(lines) -> bool:
    """Whether a stream ends in an error, and nothing in it says that it was complete."""
    try:
        async for line in lines:
            assert line != "data: [DONE]"
    except httpx.RemoteProtocolError:
        return True
    return False


@run_async
async def test_a_request_brings_its_preset_in_and_another_one_swaps(tmp_path):
    async with house(tmp_path, [llama("a", path=f"/models/a-{tmp_path.name}.gguf"), llama("b")]) as h:
        assert (await h.chat("a")).status_code == 200
        assert h.view.residents == ("a",)
        assert (await h.chat("b")).status_code == 200
        assert h.view.residents == ("b",)
        evicted = [fields for kind, fields in h.events if kind == "evicted"]
        assert [(e["tenant"], e["sure"]) for e in evicted] == [("a", True)]
        assert len(engine_pids(f"/models/a-{tmp_path.name}.gguf")) == 0


@run_async
async def test_twenty_first_requests_start_one_engine(tmp_path):
    async with house(tmp_path, [llama("a", runtime="parallel = 20")]) as h:
        answers = await asyncio.gather(*(h.chat("a") for _ in range(20)))
        assert {a.status_code for a in answers} == {200}
        assert h.kinds().count("admitting") == 1


@run_async
async def test_a_running_answer_is_finished_before_the_card_changes_hands(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")], turnstile_policy=Order.ARRIVAL) as h:
        async with h.streaming("a", max_tokens=60) as lines:
            other = asyncio.create_task(h.chat("b"))
            await until(lambda: h.view.phase is Phase.DRAINING)
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]
        assert (await other).status_code == 200


@run_async
async def test_the_grace_ends_a_drain_and_the_cut_answer_is_not_a_clean_end(tmp_path):
    async with house(tmp_path, [llama("a", runtime="drain_grace_s = 0.2"), llama("b")]) as h:
        async with h.streaming("a", max_tokens=100_000) as lines:
            other = asyncio.create_task(h.chat("b"))
            assert await broken(lines)
        assert (await other).status_code == 200
        assert "forced" in h.kinds()


@run_async
async def test_a_model_nobody_knows_is_refused_with_close_names_and_swaps_nothing(tmp_path):
    async with house(tmp_path, [llama("coder"), llama("writer")]) as h:
        answer = await h.chat("koder")
        assert answer.status_code == 404
        assert answer.headers["x-turnstile-error"] == "unknown_model"
        assert '"coder"' in answer.json()["error"]["message"]
        assert (await h.chat(None)).status_code == 400
        assert h.view.phase is Phase.IDLE


@run_async
async def test_a_request_without_a_model_goes_to_the_resident(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")]) as h:
        await h.chat("b")
        assert (await h.chat(None)).status_code == 200
        assert h.view.residents == ("b",)


@run_async
async def test_an_engine_that_crashes_while_loading_is_a_503_with_its_last_words_and_the_next_request_tries_again(
    tmp_path,
):
    async with house(tmp_path, [llama("a", "--sim-fault", "crash_loading")]) as h:
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(h.chat("a"), h.chat("a"))
        assert asyncio.get_running_loop().time() - began < 5
        for answer in answers:
            assert answer.status_code == 503
            assert answer.headers["x-turnstile-error"] == "swap_failed"
            assert "memory" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
        assert h.view.phase is Phase.IDLE
        assert not h.card.read().used
        write(tmp_path, [llama("a")])
        await h.app.refresh()
        assert (await h.chat("a")).status_code == 200


@run_async
async def test_an_engine_that_is_never_ready_is_stopped_at_the_limit(tmp_path):
    async with house(tmp_path, [llama("a", "--sim-fault", "never_healthy")], llmc_health_timeout=1.0) as h:
        answer = await h.chat("a")
        assert answer.status_code == 503
        assert "not ready within 1 s" in answer.json()["error"]["message"]
        assert h.view.phase is Phase.IDLE
        assert not h.view.stuck
        assert not h.card.read().used


@run_async
async def test_a_command_that_does_not_exist_is_named(tmp_path):
    async with house(tmp_path, [llama("a", command=["no-such-program"])]) as h:
        answer = await h.chat("a")
        assert answer.status_code == 503
        assert "no-such-program" in answer.json()["error"]["message"]


@run_async
async def test_an_engine_killed_in_its_answer_is_a_break_and_the_next_request_brings_it_back(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        async with h.streaming("a") as lines:
            os.kill(h.app.arbiter.seats["a"].runtime.pid, signal.SIGKILL)
            assert await broken(lines)
        await until(lambda: h.view.phase is Phase.IDLE)
        assert h.view.name == "a"
        assert not h.view.leases
        assert (await h.chat("a")).status_code == 200


@run_async
async def test_an_idle_engine_is_stopped_after_its_time_and_comes_back(tmp_path):
    async with house(tmp_path, [llama("a", runtime="idle_unload_s = 0.3")]) as h:
        await h.chat("a")
        await until(lambda: h.view.phase is Phase.IDLE)
        assert h.view.name == "a"
        assert not h.card.read().used
        assert (await h.chat("a")).status_code == 200


@run_async
async def test_a_new_preset_is_listed_and_served_without_a_restart(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        await h.chat("a")
        write(tmp_path, [llama("b")])
        listing = (await h.http.get(f"{h.gate}/v1/models")).json()
        assert [(m["id"], m["meta"]["loaded"]) for m in listing["data"]] == [("a", True), ("b", False)]
        assert h.view.residents == ("a",)
        assert (await h.chat("b")).status_code == 200


@run_async
async def test_a_reading_path_of_an_engine_that_is_not_there_is_a_503_and_wakes_nothing(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        answer = await h.http.get(f"{h.gate}/props")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (503, "service_inactive")
        assert h.view.phase is Phase.IDLE


@run_async
async def test_stopping_the_gate_leaves_no_engine_behind(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        await h.chat("a")
        pid = h.app.arbiter.seats["a"].runtime.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("wanted", [True, False])
@run_async
async def test_the_next_models_file_is_read_ahead_while_the_one_before_drains(tmp_path, wanted):
    weights = tmp_path / "b.gguf"
    weights.write_bytes(b"w" * (4 << 20))
    presets = [llama("a"), llama("b", path=str(weights))]
    async with house(tmp_path, presets, llmc_prefetch=wanted, turnstile_policy=Order.ARRIVAL) as h:
        await h.chat("a")
        progress = h.app.prefetcher.progress
        async with h.streaming("a", 60):
            late = asyncio.create_task(h.chat("b"))
            await until(lambda: "drain" in h.kinds())
            assert (h.app.prefetcher.progress is not progress) == wanted
            if wanted:
                await until(lambda: h.app.prefetcher.progress.read + h.app.prefetcher.progress.cached == 4 << 20)
        assert (await late).status_code == 200


STRICT = """
import http.server, json, sys
own = sys.argv[sys.argv.index("--model-id") + 1]
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.say(200, {"status": "ok"})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.say(200 if asked.get("model") == own else 404, {"model": own, "kept": asked.get("seed")})
    def say(self, status, what):
        body = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@run_async
async def test_an_engine_that_answers_to_one_name_only_is_reached_by_every_name_of_its_preset(tmp_path):
    preset = PresetText(
        "strict",
        'engine = "ninfer"\naliases = ["gpt-4o"]\ncapabilities = ["tools"]\nmodel.path = "/m/weights.ninfer"\n'
        f"[runtime]\nkind = 'process'\ncommand = {json.dumps([sys.executable, '-c', STRICT, '{port}'])}\n",
    )
    async with house(tmp_path, [preset]) as h:
        (tmp_path / "presets" / "routes.toml").write_text('auto = ["strict"]\n')
        await h.app.refresh()
        for name in ("strict", "gpt-4o", "weights", "auto", "cap:tools", None):
            answer = await h.chat(name, seed=7)
            assert (answer.status_code, answer.json()) == (200, {"model": "strict", "kept": 7}), name
        assert h.kinds().count("admitting") == 1
