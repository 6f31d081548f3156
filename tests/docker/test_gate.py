"""The whole gate with engines in containers: a swap, a killed gate, a preset that goes away."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docker.daemon import IMAGE, Daemon
from tests.e2e.gate import Gate
from tests.e2e.house import PresetText, write

SERVE = "echo ok > /www/health; exec httpd -f -p 8080 -h /www"


def container(name: str, serve: str = SERVE) -> PresetText:
    text = f"""
engine = "command"
[runtime]
kind = "docker"
image = "{IMAGE}"
command = ["sh", "-c", {serve!r}]
gpus = []
health = "/health"
stop_grace_s = 1
"""
    return PresetText(name, text)


@pytest.fixture
def gate(daemon: Daemon, tmp_path: Path) -> Iterator[Gate]:
    write(tmp_path, [container("a"), container("b")])
    gate = Gate(tmp_path, DOCKER_HOST=f"unix://{daemon.socket}")
    yield gate
    gate.stop()


def test_the_gate_swaps_containers_and_a_killed_one_finds_them_again(gate, daemon):
    gate.start()
    assert gate.chat("a").status_code == 501  # what this little server says to a POST: it was asked
    assert daemon.names() == {"turnstile-a"}
    assert gate.chat("b").status_code == 501
    assert daemon.names() == {"turnstile-b"}
    before = daemon.inspect("turnstile-b")
    gate.kill()
    gate.start()
    assert gate.chat("b").status_code == 501
    after = daemon.inspect("turnstile-b")
    assert before is not None
    assert after is not None
    assert after["Id"] == before["Id"]
    gate.kill()
    (gate.folder / "presets" / "b.toml").unlink()
    gate.start()
    assert daemon.names() == set()
    assert gate.chat("a").status_code == 501
    gate.stop()
    assert daemon.names() == set()


def running(daemon: Daemon) -> dict[str, Any] | None:
    found = daemon.inspect("turnstile-a")
    return found if found is not None and found["State"]["Running"] else None


def test_a_container_that_was_loading_when_the_gate_was_killed_is_waited_for(gate, daemon):
    write(gate.folder, [container("a", f"sleep 5; {SERVE}")])
    gate.start()
    before = gate.begin_and_kill("a", lambda: running(daemon))
    gate.start()
    assert gate.chat("a").status_code == 501
    after = daemon.inspect("turnstile-a")
    assert after is not None
    assert after["Id"] == before["Id"]


def test_while_docker_is_away_a_start_is_a_503_that_says_so_and_when_it_is_back_it_works(gate, daemon):
    gate.start()
    daemon.end(signal.SIGTERM)
    refused = gate.chat("a")
    assert (refused.status_code, refused.headers["x-turnstile-error"]) == (503, "swap_failed")
    assert int(refused.headers["retry-after"]) >= 1
    assert "Docker is not running" in refused.json()["error"]["message"]
    daemon.start()
    assert gate.chat("a").status_code == 501
    assert daemon.names() == {"turnstile-a"}


def test_a_container_that_somebody_else_ended_is_served_by_a_new_one(gate, daemon):
    gate.start()
    assert gate.chat("a").status_code == 501
    before = daemon.inspect("turnstile-a")
    assert daemon.call("POST", "/containers/turnstile-a/kill").status_code == 204
    again = [gate.chat("a").status_code for _ in range(2)]
    assert again[-1] == 501, again  # the first may have met the end itself
    after = daemon.inspect("turnstile-a")
    assert before is not None
    assert after is not None
    assert after["Id"] != before["Id"]
    assert after["State"]["Running"]


def test_a_docker_that_restarts_while_an_engine_is_loaded_is_found_again(gate, daemon):
    """It ends its containers with itself (no live-restore): the gate's word must be what the machine says."""
    gate.start()
    assert gate.chat("a").status_code == 501
    daemon.restart(signal.SIGTERM, live_restore=False)
    answers = [gate.chat("a").status_code for _ in range(2)]
    assert answers[-1] == 501, answers
    status = httpx.get(f"{gate.url}/status", trust_env=False, verify=False).json()
    assert status["residents"] == ["a"]
    assert daemon.names() == {"turnstile-a"}
    assert gate.chat("b").status_code == 501
    assert daemon.names() == {"turnstile-b"}
