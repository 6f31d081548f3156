"""What every simulator has: /__sim__, faults by switch, standalone starts, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpu_turnstile.sim import GB, ComfySim, LlamaFaults, LlamaSim, OllamaFaults, OllamaSim, SimCard, serve
from gpu_turnstile.sim.faults import ComfyFaults, FaultError, JobFate, parse

from .helpers import browser, eventually, in_loop, standalone, within

EVERY_SIM = pytest.mark.parametrize("make", [OllamaSim, ComfySim, LlamaSim])


# ---------------------------------------------------------------------------------------------- /__sim__


@EVERY_SIM
@in_loop
async def test_the_state_tells_what_was_asked_and_what_is_switched(make: Any) -> None:
    sim = make()
    async with serve(sim) as url, browser(url) as http:
        await http.post("/somewhere?a=1", content=b"hello")
        state = (await http.get("/__sim__")).json()
        (entry,) = state["log"]
        assert entry == {
            "time": entry["time"],
            "method": "POST",
            "path": "/somewhere",
            "query": "a=1",
            "body": "",
        }
        assert state["kind"] == sim.kind
        assert state["in_flight"] == 0
        assert state["faults"] == sim.faults.as_dict()
        assert state["card"]["alarms"] == []


@in_loop
async def test_the_log_keeps_the_beginning_of_a_body() -> None:
    sim = ComfySim()
    async with serve(sim) as url, browser(url) as http:
        await http.post("/interrupt", content=b'{"prompt_id":"x"}')
        await http.post("/queue", content=b'{"delete":["' + b"y" * 100_000 + b'"]}')
    assert sim.log[0].body == '{"prompt_id":"x"}'
    assert sim.log[1].body.startswith('{"delete":["yyy')
    assert len(sim.log[1].body) == 4096


@EVERY_SIM
@in_loop
async def test_a_server_may_be_down_hang_or_answer_500_and_stays_controllable(make: Any) -> None:
    async with serve(make()) as url, browser(url) as http:
        await http.post("/__sim__/faults", json={"down": True})
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/")
        await http.post("/__sim__/faults", json={"down": False, "hang": True})
        with pytest.raises(TimeoutError):
            await within(0.05, http.get("/"))
        await http.post("/__sim__/faults", json={"hang": False, "server_error": True})
        assert (await http.get("/")).status_code == 500
        await http.post("/__sim__/reset")
        faults = (await http.get("/__sim__")).json()["faults"]
        assert (faults["down"], faults["hang"], faults["server_error"]) == (False, False, False)


@in_loop
async def test_a_wrong_switch_changes_nothing_and_names_the_right_one() -> None:
    sim = OllamaSim()
    async with serve(sim) as url, browser(url) as http:
        answer = await http.post("/__sim__/faults", json={"ps_hang": True, "unload": 5})
        assert answer.status_code == 400
        assert "unload_s" in answer.json()["error"]
        assert sim.faults == OllamaFaults()


# ---------------------------------------------------------------------------------------------- faults


def test_faults_are_read_from_words() -> None:
    assert parse(OllamaFaults, ["unload_s=5", "ps_hang"]) == OllamaFaults(unload_s=5.0, ps_hang=True)
    assert parse(ComfyFaults, ["job_end=never"]).job_end is JobFate.NEVER
    assert parse(LlamaFaults, ["crash_after=3"]).crash_after == 3


@pytest.mark.parametrize("word", ["nope", "ps_hang=7", "unload_s=soon", "ps_flicker=1.5", "unload_s=true"])
def test_a_word_that_is_no_fault_is_refused(word: str) -> None:
    with pytest.raises(FaultError):
        parse(OllamaFaults, [word])


def test_healing_turns_every_switch_off() -> None:
    faults = ComfyFaults(job_end=JobFate.OOM, free_hang=True, down=True)
    faults.heal()
    assert faults == ComfyFaults()


# ---------------------------------------------------------------------------------------------- in a test's loop


@EVERY_SIM
@in_loop
async def test_serving_ends_with_the_port_closed_and_the_card_free(make: Any) -> None:
    card = SimCard()
    async with serve(make(card=card)) as url, browser(url) as http:
        await http.post("/api/generate", json={"model": "llama3"})
    assert card.read().used == 0
    async with browser(url) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("/")


@in_loop
async def test_serving_leaves_the_signals_of_its_host_alone() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with serve(OllamaSim()):
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@in_loop
async def test_a_restart_gives_back_even_what_was_leaked() -> None:
    sim = OllamaSim(load_s=0, faults=OllamaFaults(memory_leak=True))
    async with serve(sim) as url, browser(url) as http:
        await http.post("/api/generate", json={"model": "llama3"})
        await http.post("/api/generate", json={"model": "llama3", "keep_alive": 0})
        await eventually(lambda: not sim.runners.listed())
        assert sim.card.read().used == 8 * GB
        await http.post("/__sim__/restart")
        assert sim.card.read().used == 0


@in_loop
async def test_engines_in_one_process_alarm_on_one_card() -> None:
    card = SimCard()
    async with serve(OllamaSim(card=card)) as url, serve(LlamaSim(card=card)), browser() as http:
        await http.post(f"{url}/api/generate", json={"model": "llama3"})
        await eventually(card.alarms)
    (alarm,) = card.alarms()
    assert set(alarm.names) == {"ollama", "sim"}


# ---------------------------------------------------------------------------------------------- standalone


@pytest.mark.parametrize(
    ("kind", "path"), [("ollama", "/api/version"), ("comfyui", "/queue"), ("llama-server", "/v1/models")]
)
def test_a_simulator_starts_fast_as_a_process_and_ends_by_sigterm(kind: str, path: str) -> None:
    begun = time.monotonic()
    with standalone(kind, "--port", "0") as (process, url):
        assert httpx.get(url + path).status_code == 200
        assert time.monotonic() - begun < 2  # 0.3 s on an idle machine
        process.send_signal(signal.SIGTERM)
        assert process.wait(2) == 0


def test_processes_share_a_card_and_a_killed_one_gives_its_memory_back(tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    card = SimCard(file)
    flags = ("--port", "0", "--sim-card", str(file), "--sim-load-s", "0", "-m", "a.gguf")
    with (
        standalone("llama-server", *flags) as (llama, _),
        standalone("ollama", "--port", "0", "--card", str(file), "--load-s", "0") as (_, url),
    ):
        wait_for(lambda: card.held_by("a") == 8 * GB)
        llama.kill()
        wait_for(lambda: card.read().used == 0)
        httpx.post(f"{url}/api/generate", json={"model": "llama3"})
        assert card.read().used == 8 * GB
        assert card.alarms() == ()


def test_the_card_command_shows_holders_and_alarms(tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    card = SimCard(file)
    card.hold("ollama", 8 * GB, pid=0)
    card.hold("comfyui", 10 * GB)
    shown = command("card", "--card", str(file))
    assert "18.0 of 24.0 GB in use" in shown.stdout
    assert "two_engines" in shown.stdout
    assert json.loads(command("card", "--card", str(file), "--json").stdout)["alarms"]
    assert "alarms: none" in command("card", "--card", str(file), "--reset").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["card"], "which card?"),
        (["card", "--card", "/nowhere/card.json"], "no card at"),
        (["ollama", "--fault", "unload"], "unload_s"),
        (["ollama", "--model", "x=big"], "number of GB"),
        (["llama-server", "--port"], "--port needs a value"),
        (["llama-server", "--sim-fault", "crash"], "crash"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(words: list[str], says: str) -> None:
    ended = command(*words)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_port_in_use_is_one_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = command("ollama", "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert ended.stderr.startswith("cannot listen on 127.0.0.1:")
    assert ended.stderr.count("\n") == 1


def test_the_package_is_named_without_loading_a_web_server() -> None:
    code = "import sys, gpu_turnstile.sim.app, gpu_turnstile.sim.card; print('uvicorn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TURNSTILE_SIM_CARD"}
    return subprocess.run(
        [sys.executable, "-m", "gpu_turnstile.sim", *words], capture_output=True, text=True, env=environment
    )


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "this never became true"
        time.sleep(0.005)
