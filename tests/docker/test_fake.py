"""What a real Docker does seldom or cannot do here: other versions, pulls, slow removals, dropped devices, silence."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from gpu_turnstile.runtimes import docker, docker_api, docker_end
from gpu_turnstile.runtimes.base import StartFailed, StopFailed
from gpu_turnstile.runtimes.docker_errors import DockerAway, DockerError
from gpu_turnstile.runtimes.docker_host import DockerHost
from tests.aio import run_async, until
from tests.docker.fake import Answer, FakeDocker, fake_docker, made, no
from tests.docker.house import GATE, failure, house

# ------------------------------------------------------------------------------------------------------ versions


@pytest.mark.parametrize(
    ("newest", "oldest", "spoken"),
    [("1.41", "1.12", "1.41"), ("1.51", "1.24", "1.51"), ("1.52", "1.44", "1.51"), ("1.9", "1.2", "1.9")],
)
def test_the_newest_version_both_sides_know_is_spoken(tmp_path, newest, oldest, spoken):
    @run_async
    async def test() -> None:
        async with fake_docker(tmp_path, api=newest, oldest=oldest) as fake, house(fake.socket) as gate:
            assert await gate.host.api.inspect("x") is None
            assert fake.calls == ["GET /version", f"GET /v{spoken}/containers/x/json"]

    test()


@run_async
async def test_a_docker_that_is_too_new_is_said_to_be_that(tmp_path):
    async with fake_docker(tmp_path, api="1.99", oldest="1.90") as fake, house(fake.socket) as gate:
        failed = await failure(gate.runtime())
        assert "Docker 27.0 is too new" in failed.reason
        assert "update the gate" in failed.reason


@run_async
async def test_the_version_is_agreed_on_anew_when_docker_was_exchanged(tmp_path):
    async with fake_docker(tmp_path, api="1.51") as fake, house(fake.socket) as gate:
        await gate.host.api.inspect("x")
        await fake.vanish()
        with pytest.raises(DockerAway, match="Docker is not running"):
            await gate.host.api.inspect("x")
        fake.api = "1.41"
        await fake.serve()
        await gate.host.api.inspect("x")
        assert fake.calls[-1].startswith("GET /v1.41/")


@run_async
async def test_a_version_refused_on_an_open_connection_is_agreed_on_anew(tmp_path):
    async with fake_docker(tmp_path, api="1.51") as fake, house(fake.socket) as gate:
        await gate.host.api.inspect("x")
        fake.api = "1.41"
        assert await gate.host.api.inspect("x") is None
        fake.api, fake.oldest = "1.52", "1.44"
        assert await gate.host.api.inspect("x") is None


# --------------------------------------------------------------------------------------------------------- pulls


def pulls(fake: FakeDocker, *lines: dict[str, object], hold: bool = False) -> None:
    """The image is missing until the pull has been answered."""
    asked: list[str] = []

    def rule(method: str, path: str, body: dict[str, object]) -> Answer | None:
        if path == "/images/create":
            asked.append(path)
            return Answer(lines=list(lines), hold=hold)
        if path.startswith("/images/") and not asked:
            return no(404, "No such image")
        return None

    fake.rules.append(rule)


def layer(status: str, id: str, current: int, total: int) -> dict[str, object]:
    return {"status": status, "id": id, "progressDetail": {"current": current, "total": total}}


@run_async
async def test_a_missing_image_is_pulled_and_says_how_far_it_is(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        pulls(
            fake,
            {"status": "Pulling from a/b", "id": "7"},
            layer("Downloading", "one", 1_000_000_000, 4_000_000_000),
            layer("Downloading", "one", 1_000_000_001, 4_000_000_000),
            layer("Downloading", "two", 3_000_000_000, 4_000_000_000),
            {"status": "Download complete", "id": "one", "progressDetail": {}},
            layer("Extracting", "one", 2_000_000_000, 4_000_000_000),
            {"status": "Pull complete", "id": "one", "progressDetail": {}},
        )
        said: list[str] = []
        runtime = gate.runtime(image="a/b:7", progress=said.append)
        await runtime.start()
        assert said == [
            "pulling a/b:7",
            "pulling a/b:7: downloading 25 % of 4.0 GB",
            "pulling a/b:7: downloading 50 % of 8.0 GB",
            "pulling a/b:7: downloading 87 % of 8.0 GB",
            "pulling a/b:7: extracting 50 % of 4.0 GB",
            "pulling a/b:7: extracting 100 % of 4.0 GB",
            "pulled a/b:7",
        ]
        assert any("/images/create?fromImage=a%2Fb&tag=7" in call for call in fake.calls)
        await runtime.stop()


@run_async
async def test_a_pull_that_fails_half_way_says_why(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        pulls(fake, layer("Downloading", "one", 1, 100), {"error": "no space left on device", "errorDetail": {}})
        failed = await failure(gate.runtime(image="a/b:7"))
        assert failed.reason.endswith("a/b:7, and it could not be pulled: no space left on device")


@run_async
async def test_a_stop_interrupts_a_pull(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        pulls(fake, layer("Downloading", "one", 1, 100), hold=True)
        said: list[str] = []
        runtime = gate.runtime(image="a/b:7", progress=said.append)
        starting = asyncio.create_task(runtime.start())
        await until(lambda: len(said) == 2)
        await runtime.stop()
        with pytest.raises(StartFailed, match="was stopped while its image was pulled"):
            await starting
        assert fake.container is None


@run_async
async def test_what_is_named_by_its_id_is_not_pulled(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        pulls(fake)
        assert "cannot be pulled" in (await failure(gate.runtime(image="sha256:" + "0" * 64))).reason


# --------------------------------------------------------------------------------------------- names and removals


@run_async
async def test_a_name_that_is_taken_for_three_seconds_after_a_stop_is_waited_for(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        free_at = time.monotonic() + 3

        def taken(method: str, path: str, body: dict[str, object]) -> Answer | None:
            if path == "/containers/create" and time.monotonic() < free_at:
                return no(409, "Conflict. The container name is already in use")
            return None

        fake.rules.append(taken)
        runtime = gate.runtime()
        await runtime.start()
        assert time.monotonic() >= free_at
        assert await runtime.alive()


@run_async
async def test_a_name_that_never_comes_free_ends_in_a_clear_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(docker, "NAME_WAIT", 0.2)
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        runtime = gate.runtime()
        fake.container = made({"Labels": {"turnstile.gate": GATE}}, "removing")
        assert "the name turnstile-engine is still taken" in (await failure(runtime)).reason


@run_async
async def test_a_stop_that_fails_is_followed_by_a_kill(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        fake.rules.append(lambda method, path, body: no(500, "tried to kill") if path.endswith("/stop") else None)
        runtime = gate.runtime()
        await runtime.start()
        await runtime.stop()
        assert fake.container is None
        assert any(call.endswith("/kill") for call in fake.calls)


@run_async
async def test_what_outlives_every_kill_makes_the_stop_fail_and_can_be_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(docker_end, "KILL_WAIT", 0.3)
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        runtime = gate.runtime(grace=0.0)
        await runtime.start()
        fake.rules.append(lambda m, path, b: no(500, "no exit event") if path[-5:] in ("/stop", "/kill") else None)
        with pytest.raises(StopFailed, match=r"could not be ended and may still hold the card: .*no exit event"):
            await runtime.stop()
        assert await runtime.alive()
        fake.rules.clear()
        await runtime.stop()
        assert fake.container is None


@run_async
async def test_a_stop_docker_never_answers_is_followed_by_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(docker_api, "STOP_MARGIN", 0.2)
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        fake.rules.append(lambda method, path, body: Answer(hold=True) if path.endswith("/stop") else None)
        runtime = gate.runtime(grace=0.0)
        await runtime.start()
        await runtime.stop()
        assert fake.container is None


@run_async
async def test_a_removal_that_is_under_way_is_no_failure(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        refusals = iter([no(409, "removal is already in progress")] * 3)
        fake.rules.append(lambda method, path, body: next(refusals, None) if method == "DELETE" else None)
        runtime = gate.runtime()
        await runtime.start()
        await runtime.stop()
        assert fake.container is None


# ------------------------------------------------------------------------------------------- devices and failures


@run_async
async def test_a_docker_that_drops_the_devices_is_refused_and_nothing_is_left(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:

        def podman(method: str, path: str, body: dict[str, object]) -> Answer | None:
            if path != "/containers/create":
                return None
            fake.container = made({**body, "HostConfig": {**body["HostConfig"], "DeviceRequests": None}})  # type: ignore[dict-item]
            return Answer(201, {"Id": fake.container["Id"]})

        fake.rules.append(podman)
        assert "would have no GPU" in (await failure(gate.runtime(keys=""))).reason
        assert fake.container is None
        assert not any(call.endswith("/start") for call in fake.calls)
        await gate.runtime(keys="gpus = []").start()


@run_async
async def test_a_failed_start_leaves_no_container(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        text = 'could not select device driver "" with capabilities: [[gpu]]'
        fake.rules.append(lambda method, path, body: no(500, text) if path.endswith("/start") else None)
        failed = await failure(gate.runtime())
        assert failed.reason.startswith("Docker has no GPU driver: install the NVIDIA Container Toolkit")
        assert fake.container is None


@run_async
async def test_a_docker_that_takes_calls_and_says_nothing_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(docker_api, "CALL", 0.2)
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        fake._answer = lambda *request: Answer(hold=True)  # type: ignore[method-assign]
        assert "Docker did not answer within 0.2 s" in (await failure(gate.runtime())).reason


@run_async
async def test_a_connection_that_died_while_idle_costs_nothing(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        for _ in range(20):
            await gate.host.api.inspect("x")
            await fake.vanish()
            await fake.serve()
        runtime = gate.runtime()
        await runtime.start()
        assert await runtime.alive()


@run_async
async def test_a_name_in_the_events_is_only_a_hint(tmp_path):
    """An event of the past (the stream begins a second ago) ends nothing that runs."""
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        stale = {"Type": "container", "Action": "die", "Actor": {"ID": "c0ffee" * 10}}
        fake.rules.append(lambda m, path, b: Answer(lines=[stale] * 3, hold=True) if path == "/events" else None)
        runtime = gate.runtime()
        await runtime.start()
        await until(lambda: any("/events" in call for call in fake.calls))
        await asyncio.sleep(0.05)
        assert gate.exits == []
        assert await runtime.alive()


@run_async
async def test_the_stream_of_events_is_opened_again_and_what_happened_meanwhile_is_seen(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        runtime = gate.runtime()
        await runtime.start()
        await until(lambda: any("/events" in call for call in fake.calls))
        await fake.vanish()
        assert await runtime.alive()
        fake.container["State"].update(Status="exited", Running=False, ExitCode=1)
        await fake.serve()
        await until(lambda: gate.exits == ["exited with code 1"], 1.5)


@run_async
async def test_a_socket_that_may_not_be_used_says_who_may(tmp_path, monkeypatch):
    async def denied(*args: object, **kwargs: object) -> None:
        raise docker_api.httpx.ConnectError("denied") from PermissionError(13, "Permission denied")

    (tmp_path / "docker.sock").touch()
    host = DockerHost(tmp_path / "docker.sock", GATE)
    monkeypatch.setattr(host.api._http, "request", denied)
    with pytest.raises(DockerAway, match=r"permission denied on .*docker.sock: the user .* may not use Docker; "):
        await host.api.version()
    await host.close()


@run_async
async def test_an_error_that_is_no_json_is_passed_on_as_it_is(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        fake.rules.append(lambda m, path, b: Answer(502, "a proxy's page") if path.startswith("/images") else None)
        with pytest.raises(DockerError, match="502"):
            await gate.host.api.has_image("x")


# ------------------------------------------------------------------------------------------------------ processes


@run_async
async def test_its_processes_are_known_also_while_docker_is_away_or_cannot_list_them(tmp_path):
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        listed = {"Titles": ["PID"], "Processes": [["999999901"], ["999999902"]]}
        answers = [Answer(body=listed)]
        fake.rules.append(lambda method, path, body: answers[0] if path.endswith("/top") else None)
        runtime = gate.runtime()
        assert await runtime.pids() == ()
        await runtime.start()
        assert await runtime.pids() == (999999901, 999999902)
        await fake.vanish()
        assert await runtime.pids() == (999999901, 999999902)
        await fake.serve()
        answers[0] = no(500, "ps: not found")
        fake.container["State"]["Pid"] = 999999903
        assert await runtime.pids() == (999999903,)
        answers[0] = Answer(body={"Titles": ["USER"], "Processes": [["root"]]})
        assert await runtime.pids() == (999999903,)
        await runtime.stop()
        assert await runtime.pids() == ()


@run_async
async def test_a_number_that_somebody_else_has_here_is_not_believed(tmp_path):
    """Docker in a virtual machine, or Podman, counts anew: its 1 is our 1, from which everything descends."""
    async with fake_docker(tmp_path) as fake, house(fake.socket) as gate:
        listed = {"Titles": ["PID"], "Processes": [["1"], [str(os.getpid())], ["999999901"]]}
        fake.rules.append(lambda method, path, body: Answer(body=listed) if path.endswith("/top") else None)
        runtime = gate.runtime()
        await runtime.start()
        assert await runtime.pids() == (999999901,)
        await runtime.stop()
