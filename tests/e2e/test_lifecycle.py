"""Engines that start badly, stop badly or give their memory back late, and who asks meanwhile (public bug reports)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import pytest

from gpu_turnstile.core.model import Phase
from gpu_turnstile.runtimes import process
from gpu_turnstile.runtimes.group import ProcessGroup
from gpu_turnstile.sim import GB
from tests.aio import run_async, until
from tests.e2e.house import House, PresetText, house, llama, write
from tests.runtimes.systemctl import FakeSystemd

DEAF = ("--sim-fault", "ignore_sigterm")
HEALTHY_ONCE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
        if not os.path.exists(sys.argv[2]):
            open(sys.argv[2], "w").close(); self.wfile.flush(); os._exit(3)
    def do_POST(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def own(name: str, *command: str, runtime: str = "") -> PresetText:
    """A preset of any HTTP server."""
    return PresetText(
        name, f'engine = "command"\n[runtime]\nkind = "process"\ncommand = {json.dumps(command)}\n{runtime}\n'
    )


# ------------------------------------------------------------------------------------------------------ starting


@run_async
async def test_twenty_requests_while_the_same_model_is_being_stopped_start_it_once_also_when_presets_are_touched(
    tmp_path,
):
    presets = [llama("a", *DEAF, runtime="parallel = 20\nstop_grace_s = 0.5"), llama("b")]
    async with house(tmp_path, presets) as h:
        await h.chat("a")
        other = asyncio.create_task(h.chat("b"))
        await until(lambda: "evicting" in h.kinds())
        twenty = [asyncio.create_task(h.chat("a")) for _ in range(20)]
        for _ in range(2):
            write(tmp_path, presets)
            await h.app.refresh()
        assert {answer.status_code for answer in await asyncio.gather(other, *twenty)} == {200}
        assert [f["tenant"] for k, f in h.events if k == "admitting"] == ["a", "b", "a"]
        steps = [k for k in h.kinds() if k in ("admitted", "evicted")]
        assert steps == ["admitted", "evicted", "admitted", "evicted", "admitted"]


@run_async
async def test_a_load_that_takes_longer_than_the_idle_time_is_not_cut(tmp_path):
    async with house(tmp_path, [llama("a", "--sim-load-s", "1", runtime="idle_unload_s = 0.1")]) as h:
        assert (await h.chat("a")).status_code == 200
        assert h.kinds().count("admitting") == 1


@run_async
async def test_an_engine_that_was_ready_once_and_ended_is_told_and_the_next_request_starts_it_afresh(tmp_path):
    script = own("a", sys.executable, "-c", HEALTHY_ONCE, "{port}", str(tmp_path / "was-here"))
    async with house(tmp_path, [script]) as h:
        began = time.monotonic()
        answer = await h.chat("a")
        assert answer.status_code in (502, 503)
        assert time.monotonic() - began < 3
        await until(lambda: h.view.phase is Phase.IDLE)
        assert (await h.chat("a")).status_code == 200


@run_async
async def test_a_port_that_somebody_else_has_is_named_and_nobody_is_taken_for_the_engine(tmp_path):
    asked = []

    async def stranger(reader, writer):
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with house(tmp_path, [llama("a", runtime=f"port = {port}")]) as h:
        answer = await h.chat("a")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (503, "swap_failed")
        assert f"port {port} is in use" in answer.json()["error"]["message"]
        assert asked == []
        assert not h.view.stuck
        server.close()
        await server.wait_closed()
        assert (await h.chat("a")).status_code == 200


# ------------------------------------------------------------------------------------------------------ stopping


@run_async
async def test_an_engine_deaf_to_sigterm_is_killed_after_its_grace_and_the_gate_answers_all_the_while(tmp_path):
    async with house(tmp_path, [llama("a", *DEAF, runtime="stop_grace_s = 1"), llama("b")]) as h:
        await h.chat("a")
        pid = h.app.arbiter.seats["a"].runtime.pid
        other = asyncio.create_task(h.chat("b"))
        slowest = 0.0
        while not other.done():
            for path in ("/status", "/v1/models", "/mode"):
                began = time.monotonic()
                assert (await h.http.get(f"{h.gate}{path}")).status_code == 200
                slowest = max(slowest, time.monotonic() - began)
        assert (await other).status_code == 200
        assert slowest < 0.5  # half of what the stop takes; alone on a machine it is some milliseconds
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@run_async
async def test_an_engine_that_outlives_even_sigkill_keeps_the_card_and_can_be_tried_again(tmp_path, monkeypatch):
    async with house(tmp_path, [llama("a", runtime="stop_grace_s = 0.1"), llama("b")], busy_retry_after=7) as h:
        await h.chat("a")
        with monkeypatch.context() as patched:
            patched.setattr(ProcessGroup, "signal", lambda self, number: None)
            patched.setattr(process, "KILL_WAIT", 0.2)
            answer = await h.chat("b")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert "outlived SIGKILL" in answer.json()["error"]["message"]
        assert h.view.stuck == ("a",)
        assert [f["tenant"] for k, f in h.events if k == "admitting"] == ["a"]
        assert (await h.chat("b")).status_code == 200
        assert h.view.stuck == ()


# -------------------------------------------------------------------------------------------------------- memory


def keeps_its_memory(h: House, name: str) -> asyncio.Event:
    """When it ends next, the card shows what it held as still in use, as a driver does; set when it has ended."""
    runtime = h.app.arbiter.seats[name].runtime
    stop_it, ended = runtime.stop, asyncio.Event()

    async def stop() -> None:
        if not ended.is_set():
            h.card.hold("the driver", 8 * GB, pid=0)
        await stop_it()
        ended.set()

    runtime.stop = stop
    return ended


@run_async
async def test_memory_an_owned_engine_gives_back_late_is_waited_for(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")], alarms=True) as h:
        await h.chat("a")
        ended = keeps_its_memory(h, "a")
        other = asyncio.create_task(h.chat("b"))
        await ended.wait()
        for _ in range(50):  # half a second of looks at the card
            assert h.kinds().count("admitting") == 1
            await asyncio.sleep(0.01)
        h.card.free("the driver", pid=0)
        assert (await other).status_code == 200
        assert [f["sure"] for k, f in h.events if k == "evicted"] == [True]


@run_async
async def test_memory_an_owned_engine_never_gives_back_is_a_503_at_the_limit_and_nobody_comes_in(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")], alarms=True, unload_timeout=0.5) as h:
        await h.chat("a")
        keeps_its_memory(h, "a")
        answer = await h.chat("b")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (503, "swap_failed")
        assert "8.0 GB used" in answer.json()["error"]["message"]
        assert h.view.stuck == ("a",)
        assert h.kinds().count("admitting") == 1
        h.card.free("the driver", pid=0)
        assert (await h.chat("b")).status_code == 200
        assert h.view.stuck == ()


# ------------------------------------------------------------------------------------------------------- listing


@run_async
async def test_listings_during_a_swap_are_whole_quick_and_wake_nobody(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b", "--sim-load-s", "1"), llama("c")]) as h:
        await h.chat("a")
        swap = asyncio.create_task(h.chat("b"))
        await until(lambda: h.view.phase is Phase.SWAPPING)
        began = time.monotonic()
        paths = ["/v1/models", "/api/tags", "/v1/models/c"] * 7
        answers = await asyncio.gather(*(h.http.get(f"{h.gate}{path}") for path in paths))
        assert time.monotonic() - began < 1
        assert not swap.done()
        assert {answer.status_code for answer in answers} == {200}
        for listing in answers[::3]:
            assert [model["id"] for model in listing.json()["data"]] == ["a", "b", "c"]
        for listing in answers[1::3]:
            assert [model["name"].partition(":")[0] for model in listing.json()["models"]] == ["a", "b", "c"]
        assert (await swap).status_code == 200
        assert [f["tenant"] for k, f in h.events if k == "admitting"] == ["a", "b"]


# ------------------------------------------------------------------------------------------------------- systemd


@pytest.mark.parametrize("user", [True, False])
def test_a_unit_of_the_user_is_asked_for_among_the_users_units(tmp_path, monkeypatch, user):
    (tmp_path / "systemd").mkdir()
    fake = FakeSystemd(tmp_path / "systemd", monkeypatch)
    fake.unit("llm.service", '"fails": 1')
    text = f'engine = "command"\n[runtime]\nkind = "systemd"\nunit = "llm"\nport = 1\nuser = {str(user).lower()}\n'

    @run_async
    async def ask() -> None:
        async with house(tmp_path, [PresetText("a", text)]) as h:
            answer = await h.chat("a")
            assert answer.status_code == 503
            assert "llm.service failed (exit-code)" in answer.json()["error"]["message"]

    ask()
    assert fake.calls
    assert {"--user" in call.split() for call in fake.calls} == {user}
