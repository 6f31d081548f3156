"""Every variable of the turnstile document has its effect when it is set as a person sets it: as text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from gpu_turnstile.app import App
from gpu_turnstile.cli.main import app as commands
from gpu_turnstile.settings import SPECS, Settings
from gpu_turnstile.sim import serve
from gpu_turnstile.sim.faults import JobFate
from tests.aio import run_async, until
from tests.e2e.house import House
from tests.e2e.test_document import (
    CHAT,
    chat,
    entries,
    gaps,
    idle,
    of_kind,
    posts,
    prompt,
    two,
    warmed,
    working,
)
from tests.e2e.test_program import program

QUICK = {"UNLOAD_POLL_INTERVAL": "20ms", "HISTORY_POLL_INTERVAL": "50ms", "UNLOAD_TIMEOUT": "5s"}


@contextlib.asynccontextmanager
async def live(
    tmp_path, *, upstream: str = "", ollama: dict[str, Any] | None = None, **env: str
) -> AsyncIterator[House]:
    """A gate whose settings were read from `env` and nothing else. `upstream`: ollama or comfy is not running."""
    sims = two(tmp_path, **(ollama or {}))
    async with contextlib.AsyncExitStack() as stack:
        urls = {}
        for name in ("ollama", "comfy"):
            async with contextlib.AsyncExitStack() as first:
                urls[name] = await (first if name == upstream else stack).enter_async_context(serve(sims[name]))
        given = {
            "LISTEN_OLLAMA": "127.0.0.1:0",
            "LISTEN_COMFY": "127.0.0.1:0",
            "OLLAMA_URL": urls["ollama"],
            "COMFY_URL": urls["comfy"],
            "TURNSTILE_GPU": f"sim:{tmp_path / 'card.json'}",
            "SHUTDOWN_TIMEOUT": "100ms",
            **QUICK,
            **env,
        }
        (tmp_path / "presets").mkdir()
        app = App(
            Settings.load(environ=given, program=tmp_path / "turnstile"), tmp_path / "presets", tmp_path / "state"
        )
        await app.start()
        stack.push_async_callback(app.stop)
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, verify=False, timeout=20))
        h = House(app, sims["card"], http, tmp_path, sims["ollama"], sims["comfy"])
        app.arbiter.watch(lambda kind, fields: h.events.append((kind, dict(fields))))
        yield h


async def seconds(work: Any, status: int = 200) -> float:
    began = time.monotonic()
    answer = await work
    assert answer.status_code == status
    return time.monotonic() - began


# ------------------------------------------------------------------------------------------------ one by one


@run_async
async def test_upstream_urls_say_where_requests_go(tmp_path):
    async with live(tmp_path) as h:
        assert (await chat(h)).status_code == 200
        assert (await prompt(h, 0.05)).status_code == 200
        assert len(posts(h.ollama, "/api/chat")) == len(posts(h.comfy, "/prompt")) == 1


@run_async
async def test_unload_timeout_is_the_longest_an_unload_takes(tmp_path):
    async with live(tmp_path, UNLOAD_TIMEOUT="300ms") as h:
        await chat(h)
        h.ollama.faults.unload_s = -1
        assert 0.28 < await seconds(prompt(h, 0.05)) < 1.2


@run_async
async def test_job_timeout_is_the_longest_a_job_holds_the_card(tmp_path):
    async with live(tmp_path, JOB_TIMEOUT="0.25s", UNLOAD_TIMEOUT="200ms") as h:
        h.comfy.faults.job_end = JobFate.NEVER
        await prompt(h)
        assert 0.2 < await seconds(chat(h)) < 1.2
        assert h.app.jobs.ends == {"timeout": 1}


@run_async
async def test_llm_wait_timeout_is_the_longest_a_request_waits(tmp_path):
    async with live(tmp_path, LLM_WAIT_TIMEOUT="150ms", BUSY_RETRY_AFTER="12") as h:
        await working(h, 0.9)
        assert 0.14 < await seconds(chat(h), 503) < 0.5
        assert (await chat(h)).headers["retry-after"] == "12"


@pytest.mark.parametrize("status", ["503", "429", "599"])
@run_async
async def test_busy_mode_and_status_say_what_a_blocked_request_sees(tmp_path, status):
    async with live(tmp_path, LLM_BUSY_MODE="reject", LLM_BUSY_STATUS=status, BUSY_RETRY_AFTER="3") as h:
        await working(h, 0.3)
        answer = await chat(h)
        assert (answer.status_code, answer.headers["retry-after"]) == (int(status), "3")


@run_async
async def test_busy_status_counts_in_reject_mode_only(tmp_path):
    async with live(tmp_path, LLM_BUSY_STATUS="429", LLM_WAIT_TIMEOUT="50ms") as h:
        await working(h, 0.3)
        assert (await chat(h)).status_code == 503


@run_async
async def test_warm_model_is_loaded_after_an_image_job(tmp_path):
    async with live(tmp_path, WARM_MODEL="qwen3:8b") as h:
        await prompt(h, 0.05)
        await until(lambda: warmed(h))
        assert warmed(h) == [{"model": "qwen3:8b", "keep_alive": -1}]


@run_async
async def test_warm_timeout_is_the_longest_a_warm_up_holds_the_card(tmp_path):
    async with live(tmp_path, WARM_MODEL="llama3", WARM_TIMEOUT="200ms", ollama={"load_s": 30.0}) as h:
        await prompt(h, 0.05)
        await until(lambda: warmed(h))
        began = time.monotonic()
        await until(lambda: not h.view.leases)
        assert 0.1 < time.monotonic() - began < 0.5


@run_async
async def test_unload_poll_interval_is_the_pause_between_two_looks(tmp_path):
    async with live(tmp_path, UNLOAD_POLL_INTERVAL="150ms") as h:
        await chat(h)
        h.ollama.faults.unload_s = 0.5
        h.ollama.log.clear()
        await prompt(h, 0.05)
        looks = [entry.time for entry in entries(h.ollama, "/api/ps") if entry.time > posts(h.ollama)[0].time]
        assert len(looks) <= 5
        assert min(gaps(looks)) > 0.13


@run_async
async def test_history_poll_interval_is_the_pause_between_two_looks_at_a_job(tmp_path):
    async with live(tmp_path, HISTORY_POLL_INTERVAL="150ms", TURNSTILE_BYPASS_POLL="0") as h:
        await prompt(h, 0.5)
        h.comfy.log.clear()
        await until(lambda: h.app.jobs.ends)
        looks = [entry.time for entry in entries(h.comfy, "/queue")][:4]
        assert min(gaps(looks)) > 0.13


@run_async
async def test_probe_timeout_bounds_the_start_in_front_of_upstreams_that_hang(tmp_path):
    sims = two(tmp_path)
    sims["ollama"].faults.hang = sims["comfy"].faults.hang = True
    async with serve(sims["ollama"]) as ollama, serve(sims["comfy"]) as comfy:
        env = {"OLLAMA_URL": ollama, "COMFY_URL": comfy, "PROBE_TIMEOUT": "200ms"}
        began = time.monotonic()
        async with program(tmp_path, **env) as p:
            await p.until_listening()
            assert time.monotonic() - began < 5.0, "the default is 5 s for each"
            told = [line for line in p.said.splitlines() if " warn " in line]
            for engine in ("ollama", "comfyui"):
                assert any(f"engine={engine}" in line for line in told)
        assert entries(sims["ollama"], "/api/version")
        assert entries(sims["comfy"], "/system_stats")


@run_async
async def test_free_timeout_bounds_the_call_to_free(tmp_path):
    async with live(tmp_path, FREE_TIMEOUT="200ms", UNLOAD_TIMEOUT="200ms") as h:
        h.comfy.faults.free_hang = True
        await working(h, 0.05)
        assert await seconds(chat(h)) < 1.2
        assert [f["sure"] for f in of_kind(h, "evicted")] == [False]


@run_async
async def test_backoff_begins_with_initial_doubles_and_stops_at_max(tmp_path):
    async with live(tmp_path, upstream="ollama", BACKOFF_INITIAL="40ms", BACKOFF_MAX="80ms") as h:
        began, tries = time.monotonic(), []

        def tried(*_: object) -> None:
            tries.append(time.monotonic() - began)

        h.app.gateway.unreachable = tried
        request = asyncio.create_task(chat(h))
        await until(lambda: len(tries) == 5)
        request.cancel()
        pauses = gaps(tries)
        assert 0.03 < pauses[0] < 0.07
        assert all(0.07 < pause < 0.13 for pause in pauses[1:])


@run_async
async def test_a_reply_longer_than_the_capture_limit_passes_whole_and_its_job_is_not_trampled(tmp_path):
    async with live(tmp_path, PROMPT_CAPTURE_LIMIT="8") as h:
        reply = await prompt(h, 0.3)
        assert set(reply.json()) == {"prompt_id", "number", "node_errors"}
        assert (await chat(h)).status_code == 200
        entry = h.comfy.queue.history[reply.json()["prompt_id"]]
        ended = entry["status"]["messages"][-1][1]["timestamp"] / 1000
        assert ended <= posts(h.ollama, "/api/chat")[0].time


@run_async
async def test_image_batch_max_wait_says_how_long_a_batch_may_be(tmp_path):
    async with live(tmp_path, TURNSTILE_IMAGE_BATCH_MAX_WAIT="0") as h:
        await asyncio.gather(*(prompt(h, 0.02, seed) for seed in range(3)))
        await idle(h)
        assert len(entries(h.comfy, "/free")) == 3
    (tmp_path / "b").mkdir()
    async with live(tmp_path / "b") as h:
        await asyncio.gather(*(prompt(h, 0.02, seed) for seed in range(3)))
        await idle(h)
        assert len(entries(h.comfy, "/free")) == 1


@pytest.mark.parametrize("limit", ["100ms", "10s"])
@run_async
async def test_shutdown_timeout_is_how_long_open_answers_may_go_on(tmp_path, limit):
    async with live(tmp_path, SHUTDOWN_TIMEOUT=limit, ollama={"tokens_per_s": 50}) as h:
        body = {**CHAT, "stream": True, "options": {"num_predict": 40}}
        async with h.http.stream("POST", f"{h.gate}/api/chat", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            stopping = asyncio.create_task(h.app.stop())
            complete = False
            with contextlib.suppress(httpx.HTTPError):
                async for line in lines:
                    complete = complete or json.loads(line).get("done") is True
        await stopping
        assert complete is (limit == "10s")
        h.app.stop = lambda: asyncio.sleep(0)  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------- as a program


@run_async
async def test_the_program_listens_where_it_is_told_and_logs_every_setting_with_its_source(tmp_path):
    sims = two(tmp_path)
    async with serve(sims["ollama"]) as ollama, serve(sims["comfy"]) as comfy:
        env = {"OLLAMA_URL": ollama, "COMFY_URL": comfy, "LISTEN_COMFY": "127.0.0.1:0", "LOG_FORMAT": "json"}
        async with (
            program(tmp_path, **env, LLM_WAIT_TIMEOUT="1m30s") as p,
            httpx.AsyncClient(trust_env=False, verify=False) as http,
        ):
            gate = None
            while gate is None:
                line = json.loads(await p.process.stderr.readline())
                p.said += json.dumps(line) + "\n"
                if line["event"] == "listening":
                    gate = line
            assert gate["version"]
            assert (await http.get(f"http://{gate['llm']}/api/tags")).status_code == 200
            assert (await http.get(f"http://{gate['comfyui']}/queue")).status_code == 200
            lines = [json.loads(text) for text in p.said.splitlines()]
            named = {line["name"]: line for line in lines if line["event"] == "setting"}
            (rest,) = [line for line in lines if line["event"] == "settings_by_default"]
            assert (named["LLM_WAIT_TIMEOUT"]["value"], named["LLM_WAIT_TIMEOUT"]["source"]) == ("1m30s", "environment")
            assert {*named, *rest} >= {*SPECS}
            p.process.send_signal(signal.SIGTERM)
            assert await p.end() == 0


@run_async
async def test_the_file_is_found_by_its_variable_and_the_environment_beats_it(tmp_path):
    (tmp_path / "my.env").write_text("# mine\nLOGLEVEL=debug\nLLM_BUSY_STATUS=429\nWARM_TIMEOUT=3m\n")
    env = {"GPU_TURNSTILE_CONFIG": str(tmp_path / "my.env"), "LLM_BUSY_STATUS": "503", "LOG_FORMAT": "json"}
    async with program(tmp_path, **env) as p:
        told = {}
        while "WARM_TIMEOUT" not in told or "LLM_BUSY_STATUS" not in told:
            line = json.loads(await p.process.stderr.readline())
            if line["event"] == "setting":
                told[line["name"]] = (line["value"], line["source"])
        assert told["LLM_BUSY_STATUS"] == ("503", "environment")
        assert told["WARM_TIMEOUT"] == ("3m", f"{tmp_path / 'my.env'}:4")


# ------------------------------------------------------------------------------------------------ what is wrong

DEFAULTS = {
    "LISTEN_OLLAMA": ":11434",
    "LISTEN_COMFY": ":8188",
    "OLLAMA_URL": "http://127.0.0.1:11435",
    "COMFY_URL": "http://127.0.0.1:8189",
    "UNLOAD_TIMEOUT": "60s",
    "JOB_TIMEOUT": "15m",
    "LLM_WAIT_TIMEOUT": "10m",
    "LLM_BUSY_MODE": "wait",
    "LLM_BUSY_STATUS": "503",
    "BUSY_RETRY_AFTER": "30",
    "WARM_MODEL": "",
    "LOGLEVEL": "warn",
    "LOG_FORMAT": "text",
    "LOG_FILE": "",
    "UNLOAD_POLL_INTERVAL": "500ms",
    "HISTORY_POLL_INTERVAL": "1s",
    "PROBE_TIMEOUT": "5s",
    "FREE_TIMEOUT": "30s",
    "WARM_TIMEOUT": "2m",
    "SHUTDOWN_TIMEOUT": "10s",
    "BACKOFF_INITIAL": "1s",
    "BACKOFF_MAX": "60s",
    "PROMPT_CAPTURE_LIMIT": "65536",
    "AUTO_UPDATE": "true",
    "UPDATE_INTERVAL": "6h",
    "UPDATE_REPO": "https://git.rambossek.at/PUBLIC/gpu-turnstile",
    "UPDATE_ASSET": "gpu-turnstile.exe",
}
DOCUMENT = tuple(DEFAULTS)
TIMES = [name for name in DOCUMENT if name.endswith(("_TIMEOUT", "_INTERVAL")) or name.startswith("BACKOFF")]
WRONG = [
    *((name, value) for name in TIMES for value in ("soon", "5", "-1s", "1 s")),
    *((name, value) for name in ("LISTEN_OLLAMA", "LISTEN_COMFY") for value in ("11434", "here", ":99999", "a b:1")),
    *((name, value) for name in ("OLLAMA_URL", "COMFY_URL") for value in ("127.0.0.1:1", "ftp://x", "http://", "x y")),
    *(("LLM_BUSY_STATUS", value) for value in ("200", "399", "600", "busy", "4.2")),
    *(("LLM_BUSY_MODE", value) for value in ("hold", "WAIT!")),
    *(("BUSY_RETRY_AFTER", value) for value in ("-1", "soon", "1.5")),
    *(("PROMPT_CAPTURE_LIMIT", value) for value in ("-1", "0", "much")),
    ("LOGLEVEL", "loud"),
    ("LOG_LEVEL", "loud"),
    ("LOG_FORMAT", "xml"),
    ("LOG_FILE", "/nowhere/at/all.log"),
    ("AUTO_UPDATE", "perhaps"),
    ("UPDATE_REPO", "not a url"),
]


def test_names_and_defaults_are_the_documents_to_the_letter():
    assert {name: SPECS[name].default for name in DOCUMENT} == DEFAULTS


@pytest.mark.parametrize("by", ["environment", "file"])
def test_a_value_that_cannot_be_read_stops_the_start_with_one_line_that_names_it(tmp_path, monkeypatch, by):
    monkeypatch.setattr("gpu_turnstile.app._serve", _never)
    for known in (*SPECS, "LOG_LEVEL"):
        monkeypatch.delenv(known, raising=False)
    (tmp_path / "presets").mkdir()
    folders = ["--presets", str(tmp_path / "presets"), "--state-dir", str(tmp_path / "state")]
    file = tmp_path / "gate.env"
    for name, value in WRONG:
        file.write_text(f"# a comment\n{name}={value}\n" if by == "file" else "")
        env = {"GPU_TURNSTILE_CONFIG": str(file)} | ({name: value} if by == "environment" else {})
        result = CliRunner().invoke(commands, ["serve", *folders], env=env)
        assert result.exit_code == 2, (name, value, result.output)
        (line,) = result.stderr.strip().splitlines()
        assert ("LOGLEVEL" if name == "LOG_LEVEL" else name) in line
        assert by == "environment" or name == "LOG_FILE" or f"{file}:2" in line
        assert "Traceback" not in result.output


async def _never(*_: object) -> int:
    return 99


@pytest.mark.parametrize("line", ["LOGLEVEL", "=x", "export", "A B=1", 'LOG_FILE="open', "{}"])
def test_a_malformed_file_stops_the_start_with_one_line_that_names_file_and_line(tmp_path, monkeypatch, line):
    monkeypatch.setattr("gpu_turnstile.app._serve", _never)
    file = tmp_path / "gate.env"
    file.write_text(f"LOGLEVEL=info\n{line}\n")
    result = CliRunner().invoke(commands, ["serve"], env={"GPU_TURNSTILE_CONFIG": str(file)})
    assert result.exit_code == 2
    (said,) = result.stderr.strip().splitlines()
    assert f"{file}:2" in said
