"""What a person can see: the log, `/events`, `/status`, `/metrics`, and the glass that can be broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpu_turnstile.core.model import Phase
from gpu_turnstile.presets.values import ApiKey
from gpu_turnstile.sim import serve
from gpu_turnstile.sim.faults import JobFate
from tests.aio import run_async, until
from tests.e2e.house import GRAPH, House, graph, house, llama
from tests.e2e.test_document import CHAT, chat, idle, leases, of_kind, prompt, two, waiting, working
from tests.e2e.test_program import program

ANSI = re.compile(r"\x1b\[[0-9;]*m")


# ------------------------------------------------------------------------------------------------------- the log


@contextlib.asynccontextmanager
async def logged(tmp_path, **env: str) -> AsyncIterator[tuple[Any, str, str, dict[str, Any]]]:
    """The program in front of simulated engines: (program, llm gate, comfyui gate, simulators)."""
    sims = two(tmp_path)
    async with serve(sims["ollama"]) as ollama, serve(sims["comfy"]) as comfy:
        given = {
            "OLLAMA_URL": ollama,
            "COMFY_URL": comfy,
            "LISTEN_COMFY": "127.0.0.1:0",
            "LOG_FILE": str(tmp_path / "gate.log"),
            "UNLOAD_POLL_INTERVAL": "20ms",
            "HISTORY_POLL_INTERVAL": "30ms",
            "TURNSTILE_GPU": f"sim:{tmp_path / 'card.json'}",
            **env,
        }
        async with program(tmp_path, **given) as p:
            gates = await until(lambda: gates_in(tmp_path / "gate.log"), 15)
            yield p, f"http://{gates[0]}", f"http://{gates[1]}", sims


def gates_in(file: Path) -> tuple[str, str] | None:
    text = file.read_text() if file.exists() else ""
    found = re.search(r'llm"?[=:] ?"?(127[0-9.:]+).*comfyui"?[=:] ?"?(127[0-9.:]+)', text)
    return (found[1], found[2]) if found else None


async def script(http: httpx.AsyncClient, llm: str, comfy: str, sims: dict[str, Any]) -> str:
    """A chat, an image, a chat, a read, a refusal; the job's id."""
    assert (await http.post(f"{llm}/api/chat", json=CHAT)).status_code == 200
    reply = await http.post(f"{comfy}/prompt", json={"prompt": graph(0.1)})
    assert (await http.post(f"{llm}/api/chat", json=CHAT)).status_code == 200
    assert (await http.get(f"{llm}/api/tags?secret=1")).status_code == 200
    assert (await http.post(f"{comfy}/prompt", json={"prompt": {}})).status_code == 400
    assert (await http.post(f"{llm}/api/chat", json={**CHAT, "model": "nobody"})).status_code == 404
    return str(reply.json()["prompt_id"])


@run_async
async def test_at_info_every_request_is_an_arrow_in_and_an_arrow_out_with_status_and_duration(tmp_path):
    async with logged(tmp_path, LOGLEVEL="info", LOG_FORMAT="json") as (_, llm, comfy, sims):
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as http:
            job = await script(http, llm, comfy, sims)
        file = tmp_path / "gate.log"
        await until(lambda: file.read_text().count('"<--"') >= 6)
        lines = [json.loads(text) for text in file.read_text().splitlines()]
    arrows = [line for line in lines if line["event"].startswith(("-->", "<--"))]
    asked = [(line["method"], line["path"]) for line in arrows if line["event"].startswith("-->")]
    told = [line for line in arrows if line["event"].startswith("<--")]
    wanted = ["/api/chat", "/prompt", "/api/chat", "/api/tags", "/prompt", "/api/chat"]
    assert [path.partition("?")[0] for _, path in asked] == wanted
    assert [line["status"] for line in told] == [200, 200, 200, 200, 400, 404]
    durations = [next(line[key] for key in ("seconds", "duration", "duration_ms") if key in line) for line in told]
    assert all(isinstance(value, float) and value >= 0 for value in durations)
    assert durations[2] > 0.05, "it waited for the job"
    phases = [line for line in lines if line.get("prompt_id") == job]
    assert [line["event"] for line in phases].count("job_end") == 1
    assert {"queued", "running"} & {line.get("phase") for line in phases}
    events = [line["event"] for line in lines]
    for transition in ("evicting", "evicted", "admitting", "admitted", "swapped"):
        assert transition in events
    assert all({"time", "level", "logger", "event"} <= set(line) for line in lines)


@run_async
async def test_a_streamed_answer_and_one_whose_client_left_have_exactly_one_line_each(tmp_path):
    async with logged(tmp_path, LOGLEVEL="info") as (_, llm, _comfy, sims):
        body = {**CHAT, "stream": True, "options": {"num_predict": 400}}
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as http:
            async with http.stream("POST", f"{llm}/api/chat", json={**body, "options": {"num_predict": 4}}) as answer:
                await answer.aread()
            async with http.stream("POST", f"{llm}/api/chat", json=body) as answer:
                await anext(answer.aiter_lines())
        file = tmp_path / "gate.log"
        await until(lambda: file.read_text().count(" <-- ") == 2)
        assert file.read_text().count(" --> ") == 2
        await until(lambda: sims["ollama"].in_flight == 0)
        first, second = [line for line in file.read_text().splitlines() if " <-- " in line]
        assert "200" in first
        assert "200" not in second or "cut" in second or "left" in second, "the second answer did not end as a 200"


@run_async
async def test_at_warn_requests_are_not_logged(tmp_path):
    async with logged(tmp_path, LOGLEVEL="warn") as (_, llm, comfy, sims):
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as http:
            await script(http, llm, comfy, sims)
        text = (tmp_path / "gate.log").read_text()
        assert "-->" not in text
        assert "<--" not in text
        assert "settings_by_default" in text, "settings are told at every level"


@run_async
async def test_the_log_file_may_be_renamed_under_the_gate(tmp_path):
    async with logged(tmp_path, LOGLEVEL="info") as (_, llm, _comfy, _sims):
        file = tmp_path / "gate.log"
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as http:
            await http.get(f"{llm}/api/tags")
            file.rename(tmp_path / "gate.log.1")

            async def asked_again() -> bool:
                await http.get(f"{llm}/api/version")
                return file.exists() and "/api/version" in file.read_text()

            for _ in range(200):
                if await asked_again():
                    break
                await asyncio.sleep(0.02)
            assert file.exists()
            assert "/api/version" in file.read_text()
        assert "/api/tags" in (tmp_path / "gate.log.1").read_text()


@pytest.mark.parametrize(("no_color", "terminal"), [("", True), ("1", True), ("", False)])
@run_async
async def test_colours_are_for_terminals_whose_owner_wants_them(tmp_path, no_color, terminal):
    sims = two(tmp_path)
    master, slave = pty.openpty()
    reader, writer = (master, slave) if terminal else os.pipe()
    async with serve(sims["ollama"]) as ollama:
        (tmp_path / "presets").mkdir()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LLMC_", "TURNSTILE_", "NO_COLOR"))}
        env |= {"OLLAMA_URL": ollama, "COMFY_URL": "off", "LISTEN_COMFY": "off", "LISTEN_OLLAMA": "127.0.0.1:0"}
        env |= {"LOGLEVEL": "info", "TURNSTILE_GPU": "none"} | ({"NO_COLOR": no_color} if no_color else {})
        from tests.e2e.test_program import GATE

        folders = ("--presets", str(tmp_path / "presets"), "--state-dir", str(tmp_path / "state"))
        process = await asyncio.create_subprocess_exec(*GATE, *folders, env=env, cwd=tmp_path, stderr=writer)
        said = b""
        os.set_blocking(reader, False)

        def more() -> str:
            nonlocal said
            with contextlib.suppress(BlockingIOError):
                said += os.read(reader, 65536)
            return ANSI.sub("", said.decode())

        try:
            gate = await until(lambda: re.search(r"llm=(127[0-9.:]+)", more()), 15)
            async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as http:
                await http.post(f"http://{gate[1]}/api/chat", json=CHAT)
                await http.post(f"http://{gate[1]}/api/chat", json={**CHAT, "model": "nobody"})
            await until(lambda: more().count("<--") == 2)
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
            for end in {master, slave, reader, writer}:
                os.close(end)
    text = said.decode()
    assert bool(ANSI.search(text)) is (terminal and not no_color)
    if terminal and not no_color:
        assert "\x1b[36m-->" in text, "incoming is cyan"
        ends = [line for line in text.splitlines() if "<--" in line]
        assert "\x1b[32m<--" in ends[0], "2xx is green"
        assert "\x1b[33m<--" in ends[1], "4xx is yellow"


@run_async
async def test_a_client_cannot_forge_lines_or_colours_in_the_log(tmp_path):
    async with logged(tmp_path, LOGLEVEL="info") as (_, llm, _comfy, _sims):
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as http:
            await http.get(f"{llm}/api/tags", headers={"X-Turnstile-Client": "evil\x1b[31m \x7f"})
            await http.get(f"{llm}/api/%0d%0a2026-01-01T00:00:00.000Z%20error%20forged")
            await until(lambda: "forged" in (tmp_path / "gate.log").read_text())
        text = (tmp_path / "gate.log").read_text()
        assert "\x1b" not in text
        assert not [line for line in text.splitlines() if line.startswith("2026-01-01")]


# ----------------------------------------------------------------------------------------------------- /events


async def replay(h: House) -> list[dict[str, Any]]:
    text = (await h.http.get(f"{h.gate}/events?since=0&follow=false")).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@run_async
async def test_the_events_of_a_run_tell_its_story_in_order(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        await chat(h)
        job = (await prompt(h, 0.1)).json()["prompt_id"]
        await idle(h)
        told = await replay(h)
        assert [event["id"] for event in told] == list(range(1, len(told) + 1))
        kinds = [event["kind"] for event in told]
        wanted = ["started", "admitted", "swapped", "evicting", "evicted", "admitted", "job", "job_end", "evicting"]
        position = -1
        for kind in [*wanted, "evicted", "swapped"]:
            position = kinds.index(kind, position + 1)
        jobs = [event["fields"] for event in told if event["kind"] in ("job", "job_end")]
        assert {fields["prompt_id"] for fields in jobs} == {job}
        assert (jobs[-1]["end"], [fields["phase"] for fields in jobs[:-1]][-1]) == ("success", "running")


# ---------------------------------------------------------------------------------------------------- /metrics


def value(text: str, name: str) -> float:
    (found,) = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(found.rpartition(" ")[2])


@run_async
async def test_the_metrics_of_a_scripted_run_add_up(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        for seed, fate in enumerate(["normal", "error", "normal"]):
            assert (await chat(h)).status_code == 200
            h.comfy.faults.job_end = JobFate(fate)
            assert (await prompt(h, 0.05, seed)).status_code == 200
            await idle(h)
        text = (await h.http.get(f"{h.gate}/metrics")).text
        assert value(text, "gpu_turnstile_image_jobs_total") == 3
        assert value(text, 'gpu_turnstile_image_job_ends_total{end="success"}') == 2
        assert value(text, 'gpu_turnstile_image_job_ends_total{end="error"}') == 1
        assert value(text, 'gpu_turnstile_lock_wait_seconds_count{kind="llm"}') == 3
        assert value(text, 'gpu_turnstile_lock_wait_seconds_count{kind="image"}') == 3
        assert value(text, "gpu_turnstile_unload_seconds_count") == 6
        assert value(text, "gpu_turnstile_unload_seconds_sum") > 0
        assert value(text, "gpu_turnstile_queue_length") == 0
        assert value(text, "gpu_turnstile_swap_failures_total") == 0
        assert value(text, 'gpu_turnstile_state{state="idle"}') == 1


@run_async
async def test_metrics_show_the_line_while_it_stands(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        await working(h, 0.4)
        tasks = [asyncio.create_task(chat(h)) for _ in range(3)]
        await until(lambda: waiting(h, "ollama") == 3)
        text = (await h.http.get(f"{h.gate}/metrics")).text
        assert value(text, "gpu_turnstile_queue_length") == 3
        assert value(text, "gpu_turnstile_queue_oldest_seconds") > 0
        assert value(text, 'gpu_turnstile_state{state="image"}') == 1
        assert value(text, "gpu_turnstile_llm_inflight") == 0
        await asyncio.gather(*tasks)


@run_async
async def test_every_metric_is_in_the_documentation_and_no_other(tmp_path):
    docs = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    named = {name.removesuffix("_total") for name in re.findall(r"^\| `(gpu_turnstile_\w+)", docs, re.MULTILINE)}
    async with house(tmp_path, presets=[llama("a")], **two(tmp_path)) as h:
        text = (await h.http.get(f"{h.gate}/metrics")).text
    there = {line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE")}
    assert there == named


@run_async
async def test_an_unload_that_did_not_succeed_is_counted(tmp_path):
    async with house(tmp_path, alarms=True, unload_timeout=0.2, **two(tmp_path)) as h:
        before = (await h.http.get(f"{h.gate}/metrics")).text
        await chat(h)
        h.ollama.faults.unload_s = -1
        await prompt(h, 0.05)
        await idle(h)
        after = (await h.http.get(f"{h.gate}/metrics")).text
        (name,) = {
            line.split()[0]
            for line in after.splitlines()
            if "unload" in line and "fail" in line and not line.startswith("#") and "_created" not in line
        }
        assert value(before, name) == 0
        assert value(after, name) == 1


# ------------------------------------------------------------------------------------------- breaking the glass


async def break_glass(h: House, reason: str = "it hangs", **headers: str) -> httpx.Response:
    return await h.http.post(f"{h.gate}/gpu-turnstile/release", json={"reason": reason}, headers=headers)


@run_async
async def test_breaking_the_glass_cuts_every_llm_lease_says_so_and_the_card_is_usable(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h, contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(h.streaming("llama3", 4000)) for _ in range(3)]
        answer = await break_glass(h)
        assert answer.status_code == 200
        assert [cut["tenant"] for cut in answer.json()["released"]] == ["ollama"] * 3
        assert leases(h, "ollama") == 0
        for lines in streams:
            with pytest.raises(httpx.RemoteProtocolError):
                assert "data: [DONE]" not in [line async for line in lines]
        (told,) = of_kind(h, "released")
        assert told["reason"] == "it hangs"
        assert "released" in [event["kind"] for event in await replay(h)]
        await until(lambda: h.ollama.in_flight == 0)
        assert (await chat(h)).status_code == 200
        assert (await prompt(h, 0.05)).status_code == 200
        await idle(h)


@run_async
async def test_breaking_the_glass_cuts_a_job_that_never_ends_and_the_waiting_chat_is_served(tmp_path):
    async with house(tmp_path, alarms=True, unload_timeout=0.3, job_timeout=0.8, **two(tmp_path)) as h:
        h.comfy.faults.job_end = JobFate.NEVER
        job = (await prompt(h)).json()["prompt_id"]
        late = asyncio.create_task(chat(h))
        await until(lambda: h.view.waiting)
        answer = await break_glass(h)
        assert (answer.status_code, [cut["tenant"] for cut in answer.json()["released"]]) == (200, ["comfyui"])
        assert (await late).status_code == 200
        assert of_kind(h, "job_end")[0]["prompt_id"] == job
        assert (await h.http.get(f"{h.gate}/status")).json()["jobs"] == []


@run_async
async def test_breaking_the_glass_ends_a_swap_that_hangs(tmp_path):
    async with house(tmp_path, alarms=True, unload_timeout=20.0, **two(tmp_path)) as h:
        await chat(h)
        h.ollama.faults.unload_s = -1
        image = asyncio.create_task(prompt(h, 0.05))
        await until(lambda: h.view.phase is Phase.SWAPPING)
        answer = await break_glass(h)
        assert answer.status_code == 200
        assert len(answer.json()["released"]) == 1
        h.ollama.faults.heal()
        reply = await image
        assert reply.status_code in (200, 503)
        assert reply.status_code == 200 or reply.headers["x-turnstile-error"]
        assert (await prompt(h, 0.05)).status_code == 200
        assert (await chat(h)).status_code == 200


@run_async
async def test_breaking_the_glass_of_an_idle_gate_cuts_nothing_and_disturbs_nobody(tmp_path):
    async with house(tmp_path, **two(tmp_path)) as h:
        for body in (b"", b"{}", b'{"reason": "just looking"}'):
            answer = await h.http.post(f"{h.gate}/gpu-turnstile/release", content=body)
            assert (answer.status_code, answer.json()["released"]) == (200, [])
        for body in (b"[]", b"nonsense", b'{"reason": 5}'):
            answer = await h.http.post(f"{h.gate}/gpu-turnstile/release", content=body)
            assert answer.status_code == 400
            assert answer.headers["x-turnstile-error"] == "bad_request"
        assert (await h.http.get(f"{h.gate}/gpu-turnstile/release")).status_code == 405
        assert (await chat(h)).status_code == 200


@run_async
async def test_breaking_the_glass_needs_a_key_where_there_are_keys(tmp_path):
    keys = (ApiKey("me", "secret"),)
    async with house(tmp_path, turnstile_api_keys=keys, **two(tmp_path)) as h:
        assert (await break_glass(h)).status_code == 401
        assert (await break_glass(h, Authorization="Bearer wrong")).status_code == 401
        assert not of_kind(h, "released")
        assert (await break_glass(h, Authorization="Bearer secret")).status_code == 200


@run_async
async def test_breaking_the_glass_again_and_again_under_load_leaks_nothing(tmp_path):
    settings = {"history_poll_interval": 0.02, "unload_timeout": 0.5, "job_timeout": 2.0}
    async with house(tmp_path, alarms=True, **settings, **two(tmp_path)) as h:
        work = [chat(h, options={"num_predict": 20}) for _ in range(12)]
        work += [prompt(h, 0.05, seed) for seed in range(6)]
        tasks = [asyncio.create_task(item) for item in work]
        for _ in range(6):
            assert (await break_glass(h)).status_code == 200
            await asyncio.sleep(0.03)
        await asyncio.wait(tasks, timeout=15)
        for task in tasks:
            assert task.done()
            assert task.exception() is not None or task.result().status_code in (200, 502, 503)
        await until(lambda: not h.view.leases and not h.view.waiting and h.view.phase is not Phase.SWAPPING, 10)
        assert (await chat(h)).status_code == 200
        assert (await h.http.post(f"{h.comfy_gate}/prompt", json={"prompt": GRAPH})).status_code == 200
        await until(lambda: not h.view.leases, 5)


@run_async
async def test_breaking_the_glass_cuts_owned_engines_leases_too(tmp_path):
    async with house(tmp_path, [llama("a")]) as h, h.streaming("a", 5000) as lines:
        assert [cut["tenant"] for cut in (await break_glass(h)).json()["released"]] == ["a"]
        with pytest.raises(httpx.RemoteProtocolError):
            assert "data: [DONE]" not in [line async for line in lines]
        assert (await h.chat("a")).status_code == 200
