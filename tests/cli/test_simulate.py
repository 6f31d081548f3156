"""`turnstile simulate`, as it is typed."""

from __future__ import annotations

import json
from contextlib import closing
from time import time

import pytest
from typer.testing import CliRunner

from gpu_turnstile.cli.main import app
from gpu_turnstile.journal import schema
from gpu_turnstile.journal.schema import Lease

WORKLOAD = """
hours = 0.5
[preset.a]
[preset.b]
[client.x]
preset = "a"
work_s = 10
every_s = 300
[client.y]
preset = "b"
work_s = 10
every_s = 400
"""


def simulate(*arguments: str):
    return CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "80"})


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(WORKLOAD)
    return str(path)


def test_without_an_argument_it_plays_the_war_and_fits_into_80_columns():
    found = simulate()
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines[2:8]] == [
        [policy, context] for context in ("lost", "kept") for policy in ("arrival", "llama-swap", "amortised")
    ]
    assert sum(line.startswith("painter ") for line in lines) == 6


def test_json_has_everything_for_each_run(workload):
    found = simulate(workload, "--json", "--policy", "amortised", "--contexts", "lost", "--bound")
    (run,) = json.loads(found.stdout)
    assert (run["policy"], run["contexts"]) == ("amortised", "lost")
    assert set(run["clients"]) == {"x", "y"}
    assert 0 <= run["least_wait_s"] <= run["waited_s"]
    assert run["clients"]["x"]["wait_s"].keys() == {"p50", "p95", "max"}


def test_the_timeline_is_written_where_it_is_wanted(workload, tmp_path):
    picture = tmp_path / "war.svg"
    assert simulate(workload, "--plot", str(picture)).exit_code == 0
    assert picture.read_text().startswith("<svg ")
    found = simulate(workload, "--plot", str(tmp_path / "no" / "such" / "folder.svg"))
    assert found.exit_code == 2
    assert "cannot be written" in found.stderr


def test_the_history_of_a_gate_is_played(tmp_path):
    now = time() - 3600
    leases = [Lease(n, "ab"[n % 2], f"c{n % 2}", None, now + 20 * n, now + 20 * n + 9) for n in range(50)]
    with closing(schema.open_file(tmp_path / schema.FILE_NAME)) as connection:
        schema.add_leases(connection, 1, leases)
    found = simulate("--history", "--state-dir", str(tmp_path), "--context", "30", "--json")
    assert found.exit_code == 0, found.output
    assert all(run["done"] > 10 for run in json.loads(found.stdout))
    found = simulate("--history", "--state-dir", str(tmp_path), "--hours", "0.1")
    assert found.exit_code == 2
    assert "ask for more hours" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "random"), "is one of arrival, llama-swap, amortised"),
        (("--contexts", "some"), "is lost, kept or both"),
        (("nowhere.toml", "--history"), "not both"),
        (("nowhere.toml",), "cannot be read"),
        (("--bound",), "make --hours smaller"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_ends_with_2(arguments, message):
    found = simulate(*arguments)
    assert found.exit_code == 2
    assert message in " ".join(found.stderr.replace("│", " ").split())
