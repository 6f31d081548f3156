"""The whole gate with engines in containers: a swap, a killed gate, a preset that goes away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import IMAGE, Daemon
from tests.e2e.gate import Gate
from tests.e2e.house import PresetText, write

SERVE = "echo ok > /www/health; exec httpd -f -p 8080 -h /www"


def container(name: str) -> PresetText:
    text = f"""
engine = "command"
[runtime]
kind = "docker"
image = "{IMAGE}"
command = ["sh", "-c", {SERVE!r}]
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
