"""Engines that sleep instead of being stopped, behind a whole gate. The engines are simulated, each a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import pytest

from gpu_turnstile.core.model import Phase
from gpu_turnstile.sim.card import GB
from tests.aio import run_async, until
from tests.e2e.gate import Gate
from tests.e2e.house import PresetText, engine_pids, house, llama, started, write

LOAD_S = 1.0


def sleeper(name: str, *args: str, engine: str = "vllm", runtime: str = "sleep = 1", gb: float = 8.0) -> PresetText:
    command = [sys.executable, "-m", "gpu_turnstile.sim", engine]
    words = ("--port", "{port}", "--served-model-name", name, "--sim-vram-gb", str(gb), "--sim-load-s", str(LOAD_S))
    lines = [
        f'engine = "{engine}"',
        f'model.repo = "org/{name}"',
        "[runtime]",
        'kind = "process"',
        f"command = {json.dumps(command)}",
        f"args = {json.dumps([*words, *args])}",
        runtime,
    ]
    return PresetText(name, "\n".join(lines) + "\n")


def pid(h, name):
    return h.app.arbiter.seats[name].runtime.pid


def alive(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def told(h, kind):
    return [fields for what, fields in h.events if what == kind]


async def sim(h, name, path="", body=None):
    """Talk to the simulator itself, past the gate."""
    url = f"{h.app.arbiter.seats[name].engine.url}/__sim__{path}"
    return (await h.http.post(url, json=body)) if body is not None else (await h.http.get(url)).json()


async def asleep(h, name="s"):
    """`s` was used and sleeps, `a` has the card; the pid of `s`."""
    assert (await h.chat(name)).status_code == 200
    first = pid(h, name)
    assert (await h.chat("a")).status_code == 200
    return first


KINDS = [("vllm", 1), ("vllm", 2), ("sglang", 1)]


@pytest.mark.parametrize(("engine", "level"), KINDS)
@run_async
async def test_a_preset_that_sleeps_returns_with_the_same_process_and_sooner_than_a_load(tmp_path, engine, level):
    async with house(tmp_path, [sleeper("s", engine=engine, runtime=f"sleep = {level}"), llama("a")]) as h:
        first = await asleep(h)
        assert alive(first)
        assert h.card.held_by("s") < 600 * 2**20
        assert h.view.residents == ("a",)
        metrics = (await h.http.get(f"{h.gate}/metrics")).text
        assert "\ngpu_turnstile_asleep 1.0\n" in metrics
        assert '\ngpu_turnstile_sleep_events_total{event="asleep"} 1.0\n' in metrics
        engines = (await h.http.get(f"{h.gate}/status")).json()["engines"]
        assert {e["name"]: (e["on_card"], e["asleep"]) for e in engines} == {"s": (False, True), "a": (True, False)}
        assert (await h.chat("s")).status_code == 200
        assert pid(h, "s") == first
        assert [e["tenant"] for e in told(h, "awake")] == ["s"]
        back = [e["seconds"] for e in told(h, "admitted") if e["tenant"] == "s"]
        assert back[1] < LOAD_S < back[0]
        assert (told(h, "asleep")[0]["ram_gb"] > 0) == (level == 1)
        assert abs(h.app.arbiter.seats["s"].held - 8 * GB) < GB / 8


@run_async
async def test_what_runs_is_finished_before_it_sleeps(tmp_path):
    async with house(tmp_path, [sleeper("s"), llama("a")]) as h:
        async with h.streaming("s", max_tokens=60) as lines:
            other = asyncio.create_task(h.chat("a"))
            await until(lambda: h.view.waiting)
            assert not told(h, "asleep")
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
        assert (await other).status_code == 200
        assert len(told(h, "asleep")) == 1


@pytest.mark.parametrize("fault", ["sleep_refused", "sleep_frees_little", "sleep_hang"])
@run_async
async def test_a_sleep_that_goes_wrong_is_a_stop(tmp_path, fault):
    presets = [sleeper("s", "--fault", fault), llama("a")]
    async with house(tmp_path, presets, llmc_sleep_timeout_s=0.5) as h:
        first = await asleep(h)
        assert not alive(first)
        assert [e["tenant"] for e in told(h, "sleep_failed")] == ["s"]
        assert not h.card.held_by("s")
        assert (await h.chat("s")).status_code == 200


@pytest.mark.parametrize("fault", ["wake_refused", "wake_hang", "wake_dies"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@run_async
async def test_a_wake_that_goes_wrong_is_a_fresh_start_and_the_request_is_served(tmp_path, engine, fault):
    presets = [sleeper("s", engine=engine), llama("a")]
    async with house(tmp_path, presets, llmc_sleep_timeout_s=1.0) as h:
        first = await asleep(h)
        await sim(h, "s", "/faults", {fault: True})
        assert (await h.chat("s")).status_code == 200
        assert not alive(first)
        assert [e["tenant"] for e in told(h, "wake_failed")] == ["s"]
        assert "engine_lost" not in h.kinds()


@run_async
async def test_nothing_is_woken_into_memory_that_somebody_else_took(tmp_path):
    """An engine that was woken would die of it, so it is not even asked; it is started when there is room."""
    async with house(tmp_path, [sleeper("s", gb=16), llama("a")], alarms=True) as h:
        first = await asleep(h)
        log = [entry["path"] for entry in (await sim(h, "s"))["log"]]
        h.card.hold("foreign", 10 * GB)
        assert (await h.chat("s")).status_code in (422, 503)
        if alive(first):
            assert "/wake_up" not in [entry["path"] for entry in (await sim(h, "s"))["log"]][len(log) :]
        h.card.free("foreign")
        await until(lambda: not h.card.held_by("foreign"))
        assert (await h.chat("s")).status_code == 200


@run_async
async def test_a_sleeper_that_dies_is_started_by_the_next_request(tmp_path):
    async with house(tmp_path, [sleeper("s"), llama("a")]) as h:
        first = await asleep(h)
        os.kill(first, signal.SIGKILL)
        await until(lambda: "sleeper_ended" in h.kinds())
        assert h.view.residents == ("a",)
        assert (await h.chat("s")).status_code == 200
        assert pid(h, "s") != first


@pytest.mark.parametrize("change", ["removed", "changed"])
@run_async
async def test_the_sleeper_of_a_preset_that_is_gone_or_changed_is_ended(tmp_path, change):
    async with house(tmp_path, [sleeper("s"), llama("a")]) as h:
        first = await asleep(h)
        if change == "removed":
            (tmp_path / "presets" / "s.toml").unlink()
        else:
            write(tmp_path, [sleeper("s", "--sim-tokens-per-s", "50")])
        await h.app.refresh()
        await until(lambda: not alive(first))
        assert (await h.chat("s")).status_code == (404 if change == "removed" else 200)


@run_async
async def test_a_resident_whose_preset_changed_is_stopped_and_does_not_sleep(tmp_path):
    async with house(tmp_path, [sleeper("s"), llama("a")]) as h:
        await h.chat("s")
        first = pid(h, "s")
        write(tmp_path, [sleeper("s", "--sim-tokens-per-s", "50")])
        await h.app.refresh()
        assert (await h.chat("a")).status_code == 200
        assert not alive(first)
        assert not told(h, "asleep")


@run_async
async def test_stopping_the_gate_leaves_no_sleeper_and_puts_nobody_to_sleep(tmp_path):
    async with house(tmp_path, [sleeper("s"), sleeper("t"), llama("a")]) as h:
        first = await asleep(h)
        await h.chat("t")
        second = pid(h, "t")
    assert not alive(first)
    assert not alive(second)


@run_async
async def test_main_memory_has_a_limit_and_the_longest_asleep_goes(tmp_path):
    presets = [sleeper(name) for name in ("s", "t", "u")] + [llama("a")]
    async with house(tmp_path, presets, llmc_sleep_ram_gb=17) as h:
        pids = []
        for name in ("s", "t", "u", "a"):
            assert (await h.chat(name)).status_code == 200
            pids.append(pid(h, name))
        assert [alive(number) for number in pids] == [False, True, True, True]
        assert [e["tenant"] for e in told(h, "sleeper_ended")] == ["s"]


@run_async
async def test_one_that_is_larger_than_the_limit_is_stopped(tmp_path):
    async with house(tmp_path, [sleeper("s"), llama("a")], llmc_sleep_ram_gb=4) as h:
        assert not alive(await asleep(h))
        assert not told(h, "asleep")


@run_async
async def test_one_that_is_quicker_to_load_than_to_wake_is_stopped(tmp_path):
    async with house(tmp_path, [sleeper("s", "--sim-wake-s", "3"), llama("a")]) as h:
        first = await asleep(h)
        assert alive(first)
        await h.chat("s")
        await h.chat("a")
        assert not alive(first)
        assert len(told(h, "asleep")) == 1


@run_async
async def test_what_sleepers_keep_of_the_card_is_no_reason_to_refuse_one_that_needs_all_of_it(tmp_path):
    presets = [sleeper("s"), sleeper("t"), llama("a"), sleeper("big", gb=23.5, runtime="sleep = 1\nvram_gb = 23.5")]
    async with house(tmp_path, presets, llmc_vram_reserve_gb=0, llmc_vram_limit_gb=24) as h:
        for name in ("s", "t", "a", "big"):
            answer = await h.chat(name)
            assert answer.status_code == 200, answer.text


@run_async
async def test_idle_unload_puts_to_sleep_and_the_next_request_wakes(tmp_path):
    async with house(tmp_path, [sleeper("s", runtime="sleep = 1\nidle_unload_s = 0.3")]) as h:
        await h.chat("s")
        first = pid(h, "s")
        await until(lambda: "asleep" in h.kinds())
        await until(lambda: h.view.phase is Phase.IDLE)
        assert (await h.chat("s")).status_code == 200
        assert pid(h, "s") == first


@pytest.mark.parametrize("path", ["/sleep", "/collective_rpc", "/wake_up", "/resume_memory_occupation", "//sleep/"])
@run_async
async def test_no_client_steers_the_engine_itself(tmp_path, path):
    async with house(tmp_path, [sleeper("s")]) as h:
        await h.chat("s")
        for method in ("GET", "POST"):
            answer = await h.http.request(method, f"{h.gate}{path}", json={"model": "s", "method": "x"})
            assert (answer.status_code, answer.headers["x-turnstile-error"]) == (403, "not_allowed")
        paths = {entry["path"] for entry in (await sim(h, "s"))["log"]}
        assert path.strip("/") not in {seen.strip("/") for seen in paths}


@run_async
async def test_a_gate_that_finds_a_sleeper_ends_it_and_one_that_is_awake_stays(tmp_path):
    for was_asleep in (True, False):
        async with house(tmp_path, [sleeper("s")]) as h:
            await h.chat("s")
            seat = h.app.arbiter.seats["s"]
            first = seat.runtime.pid
            if was_asleep:
                assert await seat.engine.sleep(1, 5.0) is None
            fresh = next(s for s in h.app.seating.seats() if s.tenant.name == "s")
            seat.on_lost = None
            assert await fresh.adopt() is not was_asleep
            assert alive(first) is not was_asleep
            if was_asleep:
                h.app.arbiter.lost("s", "ended by the test")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_one_that_was_loading_when_its_gate_was_killed_is_no_sleeper_and_is_waited_for(tmp_path, engine):
    write(tmp_path, [sleeper("s", "--sim-load-s", "4", "--download-dir", str(tmp_path / "weights"), engine=engine)])
    gate = Gate(tmp_path)
    try:
        gate.start()
        (first,) = gate.begin_and_kill("s", lambda: started(engine_pids(str(tmp_path / "weights"))))
        gate.start()
        assert gate.chat("s").status_code == 200
        assert engine_pids(str(tmp_path / "weights")) == [first]
    finally:
        gate.stop()


@run_async
async def test_one_that_was_stuck_is_stopped_and_does_not_take_that_into_its_sleep(tmp_path):
    async with house(tmp_path, [sleeper("s")]) as h:
        await h.chat("s")
        first = pid(h, "s")
        h.app.arbiter.wedged("s", "the test says so")
        assert (await h.chat("s")).status_code == 200
        assert pid(h, "s") != first
        assert not told(h, "asleep")


@run_async
async def test_one_that_never_came_up_is_stopped_and_not_put_to_sleep(tmp_path):
    presets = [sleeper("s", "--sim-load-s", "30")]
    async with house(tmp_path, presets, llmc_health_timeout=1.0) as h:
        assert (await h.chat("s")).status_code == 503
        assert not {"asleep", "sleep_failed"} & set(h.kinds())
        assert not h.card.held_by("s")


@pytest.mark.parametrize("hangs", ["sleep_hang", "wake_hang"])
@run_async
async def test_a_sleep_or_wake_that_is_broken_off_by_force_is_no_resident_and_is_stopped(tmp_path, hangs):
    async with house(tmp_path, [sleeper("s"), llama("a")]) as h:
        first = await asleep(h) if hangs == "wake_hang" else None
        if first is None:
            await h.chat("s")
            first = pid(h, "s")
        await sim(h, "s", "/faults", {hangs: True})
        wanted = "s" if hangs == "wake_hang" else "a"
        late = asyncio.create_task(h.chat(wanted))
        await until(lambda: h.app.arbiter.swapping and h.app.arbiter.seats["s"].bed.state == "unsure")
        await h.app.arbiter.break_glass("the test says so")
        assert (await late).status_code in (200, 503)
        assert h.view.residents != ("s",) or pid(h, "s") != first
        assert (await h.chat("a")).status_code == 200
        assert not alive(first)
        assert h.view.residents == ("a",)
