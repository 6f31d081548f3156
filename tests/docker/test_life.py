"""The life of an engine in a real Docker: it comes, it answers, it is stopped or ends, and nothing of it is left."""

from __future__ import annotations

import asyncio
import socket
import time

import psutil
import pytest

from tests.aio import until
from tests.docker.daemon import Daemon
from tests.docker.house import DEAF, SERVE, House, answer, failure, printed, timed, with_house


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@with_house
async def test_it_starts_serves_on_the_loopback_and_stops(gate: House, daemon: Daemon):
    port = free_port()
    runtime = gate.runtime(SERVE, port=port)
    await runtime.start()
    assert await runtime.alive()
    assert await _served(port)
    await printed(runtime, "up")
    found = daemon.inspect("turnstile-engine")
    assert found["HostConfig"]["Init"]
    assert found["HostConfig"]["RestartPolicy"]["Name"] == "no"
    assert found["NetworkSettings"]["Ports"]["8080/tcp"] == [{"HostIp": "127.0.0.1", "HostPort": str(port)}]
    await runtime.stop()
    assert not await runtime.alive()
    assert daemon.names() == set()
    assert gate.exits == []
    assert runtime.output() == ("up",)


async def _served(port: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if (await answer(port)).startswith(b"HTTP/"):
            return True
        await asyncio.sleep(0.01)
    return False


@with_house
async def test_a_stop_is_idempotent_and_calls_at_once_join(gate: House, daemon: Daemon):
    runtime = gate.runtime()
    await runtime.stop()
    await runtime.start()
    await asyncio.gather(*(runtime.stop() for _ in range(5)))
    await runtime.stop()
    await runtime.start()
    await runtime.stop()
    assert daemon.names() == set()


@with_house
async def test_a_second_start_of_what_runs_is_refused(gate: House, daemon: Daemon):
    runtime = gate.runtime()
    await runtime.start()
    assert "already running" in (await failure(runtime)).reason


@with_house
async def test_the_first_process_hears_sigterm_at_once(gate: House, daemon: Daemon):
    runtime = gate.runtime("exec sleep 600", grace=8.0)
    await runtime.start()
    assert await timed(runtime.stop()) < 3


@with_house
async def test_what_is_deaf_to_sigterm_is_killed_after_its_grace(gate: House, daemon: Daemon):
    runtime = gate.runtime(DEAF, grace=1.0)
    await runtime.start()
    await printed(runtime, "deaf")
    assert 0.9 < await timed(runtime.stop()) < 4
    assert daemon.names() == set()


@with_house
async def test_an_engine_that_needs_its_grace_gets_it_and_its_last_words_are_heard(gate: House, daemon: Daemon):
    runtime = gate.runtime("trap 'sleep 0.5; echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done", grace=8.0)
    await runtime.start()
    await printed(runtime, "up")
    await runtime.stop()
    assert runtime.output()[-1] == "saved"


@with_house
async def test_a_paused_engine_can_be_stopped(gate: House, daemon: Daemon):
    runtime = gate.runtime()
    await runtime.start()
    assert daemon.call("POST", "/containers/turnstile-engine/pause").status_code == 204
    assert await timed(runtime.stop()) < 6
    assert daemon.names() == set()


@with_house
async def test_one_killed_by_somebody_else_is_noticed_within_a_second(gate: House, daemon: Daemon):
    runtime = gate.runtime()
    await runtime.start()
    await printed(runtime, "up")
    began = time.monotonic()
    await asyncio.to_thread(daemon.call, "POST", "/containers/turnstile-engine/kill")
    await until(lambda: gate.exits)
    assert time.monotonic() - began < 1
    assert gate.exits == ["was killed by SIGKILL (exit code 137); its last line: up"]
    assert not await runtime.alive()
    await runtime.start()
    assert await runtime.alive()
    await runtime.stop()
    assert len(gate.exits) == 1


@with_house
async def test_one_removed_by_somebody_else_is_noticed_within_a_second(gate: House, daemon: Daemon):
    runtime = gate.runtime()
    await runtime.start()
    await printed(runtime, "up")
    began = time.monotonic()
    await asyncio.to_thread(daemon.remove_all)
    await until(lambda: gate.exits)
    assert time.monotonic() - began < 1
    assert len(gate.exits) == 1
    await runtime.stop()


@with_house
async def test_an_engine_that_ends_at_once_says_with_what_code_and_words(gate: House, daemon: Daemon):
    runtime = gate.runtime("echo no model; exit 3")
    await runtime.start()
    await until(lambda: gate.exits)
    assert gate.exits == ["exited with code 3; its last line: no model"]
    assert runtime.output() == ("no model",)


@with_house
async def test_running_out_of_memory_is_called_that(gate: House, daemon: Daemon):
    if not daemon.call("GET", "/info").json()["MemoryLimit"]:
        pytest.skip("this machine has no memory cgroup")
    runtime = gate.runtime("exec tail /dev/zero", memory=32 << 20)
    await runtime.start()
    await until(lambda: gate.exits, 15)
    assert gate.exits == ["ran out of main memory and was killed (exit code 137)"]


@with_house
async def test_the_last_two_hundred_lines_are_kept_in_order(gate: House, daemon: Daemon):
    runtime = gate.runtime("seq 1000; sleep 0.2; echo err >&2; exec sleep 600")
    await runtime.start()
    await printed(runtime, "err")
    await until(lambda: len(runtime.output()) == 200)
    await runtime.stop()
    assert set(runtime.output()) == {*map(str, range(802, 1001)), "err"}
    assert [line for line in runtime.output() if line != "err"] == list(map(str, range(802, 1001)))


# ------------------------------------------------------------------------------------------------ failed starts


@with_house
async def test_a_taken_port_is_named_and_nothing_is_left(gate: House, daemon: Daemon):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        runtime = gate.runtime(port=port)
        assert f"127.0.0.1:{port} is taken by" in (await failure(runtime)).reason
    assert daemon.names() == set()
    await runtime.start()
    await runtime.stop()


@with_house
async def test_a_port_of_another_container_is_named(gate: House, daemon: Daemon):
    port = free_port()
    first = gate.runtime(name="first", port=port)
    await first.start()
    failed = await failure(gate.runtime(name="second", port=port))
    assert f"the port 127.0.0.1:{port} is taken by another container" in failed.reason
    assert daemon.names() == {"turnstile-first"}


@with_house
async def test_an_image_that_cannot_be_had_is_said_at_once(gate: House, daemon: Daemon):
    said: list[str] = []
    runtime = gate.runtime(image="127.0.0.1:1/none:7", progress=said.append)
    failed = await failure(runtime)
    assert "Docker has no image 127.0.0.1:1/none:7, and it could not be pulled: " in failed.reason
    assert said == ["pulling 127.0.0.1:1/none:7"]
    assert daemon.names() == set()
    await runtime.stop()


@with_house
async def test_an_unknown_program_is_named_and_nothing_is_left(gate: House, daemon: Daemon):
    runtime = gate.runtime()
    config = runtime._config
    runtime._config = {**config, "Cmd": ["nosuch"], "HostConfig": {**config["HostConfig"], "Init": False}}
    assert "the image cannot run nosuch: executable file not found" in (await failure(runtime)).reason
    assert daemon.names() == set()


@with_house
async def test_a_mount_that_is_not_there_is_named(gate: House, daemon: Daemon):
    failed = await failure(gate.runtime(keys='gpus = []\nmounts = ["/no/such/folder:/data"]'))
    assert "there is no /no/such/folder on the machine Docker runs on" in failed.reason
    assert daemon.names() == set()


@with_house
async def test_mounts_can_only_be_read_unless_they_say_otherwise(gate: House, daemon: Daemon):
    for folder in ("read", "write"):
        (daemon.folder / folder).mkdir(exist_ok=True)
    mounts = f'mounts = ["{daemon.folder}/read:/read", "{daemon.folder}/write:/write:rw"]'
    script = "touch /read/x 2>/dev/null || echo refused; touch /write/x && echo written; exec sleep 600"
    runtime = gate.runtime(script, f"gpus = []\n{mounts}")
    await runtime.start()
    await printed(runtime, "written")
    assert "refused" in runtime.output()
    await runtime.stop()


# ------------------------------------------------------------------------------------------------------ devices


@pytest.mark.parametrize(("keys", "seen"), [("", "all"), ('gpus = ["0", "1"]', "0,1"), ("gpus = []", None)])
def test_the_engine_sees_the_cards_of_its_preset(daemon, keys, seen):
    @with_house
    async def test(gate: House, daemon: Daemon) -> None:
        runtime = gate.runtime("env; echo done; exec sleep 600", keys)
        await runtime.start()
        await printed(runtime, "done")
        said = [line for line in runtime.output() if line.startswith("NVIDIA_VISIBLE_DEVICES=")]
        assert said == ([] if seen is None else [f"NVIDIA_VISIBLE_DEVICES={seen}"])

    test(daemon)


@with_house
async def test_a_device_docker_has_no_driver_for_is_said_and_nothing_is_left(gate: House, daemon: Daemon):
    failed = await failure(gate.runtime(keys='gpus = ["nvidia.com/gpu=7"]'))
    assert "Docker has no GPU driver" in failed.reason or "no CDI device nvidia.com/gpu=7" in failed.reason
    assert daemon.names() == set()


@with_house
async def test_a_cdi_device_is_given(gate: House, daemon: Daemon):
    if not daemon.knows_cdi:
        pytest.skip("this Docker is older than CDI")
    runtime = gate.runtime("env; echo done; exec sleep 600", 'gpus = ["nvidia.com/gpu=0"]')
    await runtime.start()
    await printed(runtime, "done")
    assert "CDI_GPU=0" in runtime.output()


@with_house
async def test_a_driver_that_refuses_is_quoted(gate: House, daemon: Daemon):
    hook = daemon.folder / "hook" / "nvidia-container-runtime-hook"
    works = hook.read_text()
    hook.write_text("#!/bin/sh\necho 'nvidia-container-cli: initialization error: driver not loaded' >&2; exit 1\n")
    try:
        failed = await failure(gate.runtime(keys=""))
    finally:
        hook.write_text(works)
    assert "the GPU driver refused: initialization error: driver not loaded" in failed.reason
    assert daemon.names() == set()


# ------------------------------------------------------------------------------------------- who has the name


@with_house
async def test_a_foreign_container_is_never_touched(gate: House, daemon: Daemon):
    id = daemon.make("turnstile-engine", start=True)
    runtime = gate.runtime()
    assert not await runtime.adopt()
    assert "a container turnstile-engine that is not ours" in (await failure(runtime)).reason
    await runtime.stop()
    assert daemon.inspect(id)["State"]["Running"]


@with_house
async def test_a_container_of_another_gate_is_foreign(gate: House, daemon: Daemon):
    daemon.make("turnstile-engine", start=False, Labels={"turnstile.gate": "another"})
    assert "of another gate" in (await failure(gate.runtime())).reason
    assert daemon.names() == {"turnstile-engine"}


@pytest.mark.parametrize("running", [False, True])
def test_what_is_ours_from_before_and_not_what_is_wanted_makes_room(daemon, running):
    @with_house
    async def test(gate: House, daemon: Daemon) -> None:
        labels = {"turnstile.gate": gate.host.gate, "turnstile.config": "old"}
        id = daemon.make("turnstile-engine", start=running, Labels=labels, HostConfig={"Init": True})
        runtime = gate.runtime()
        await runtime.start()
        assert daemon.inspect(id) is None
        assert daemon.inspect("turnstile-engine")["State"]["Running"]

    test(daemon)


@with_house
async def test_twelve_starts_of_one_name_make_one_container(gate: House, daemon: Daemon):
    runtimes = [gate.runtime() for _ in range(12)]
    results = await asyncio.gather(*(runtime.start() for runtime in runtimes), return_exceptions=True)
    assert results == [None] * 12
    assert daemon.names() == {"turnstile-engine"}
    await asyncio.gather(*(runtime.stop() for runtime in runtimes))
    assert daemon.names() == set()
    assert gate.exits == [] or len(gate.exits) == 11  # those whose engine was stopped by another were told


@with_house
async def test_starts_of_twelve_gates_with_one_state_folder_make_one_container(gate: House, daemon: Daemon):
    """Nothing in this process locks them out: the name alone does."""
    houses = [House(daemon.socket) for _ in range(12)]
    results = await asyncio.gather(*(h.runtime().start() for h in houses), return_exceptions=True)
    assert results == [None] * 12
    assert daemon.names() == {"turnstile-engine"}
    for other in houses:
        await other.host.close()


@with_house
async def test_a_cancelled_start_leaves_what_a_stop_can_find(gate: House, daemon: Daemon):
    for pause in (0.0, 0.005, 0.02, 0.05, 0.1):
        runtime = gate.runtime()
        starting = asyncio.create_task(runtime.start())
        await asyncio.sleep(pause)
        starting.cancel()
        await runtime.stop()
        assert daemon.names() == set()


# ------------------------------------------------------------------------------------- what an earlier gate left


@with_house
async def test_a_running_engine_with_the_same_configuration_is_adopted(gate: House, daemon: Daemon):
    earlier = House(daemon.socket)
    port = free_port()
    await earlier.runtime(SERVE, port=port).start()
    await earlier.host.close()
    pid = daemon.inspect("turnstile-engine")["State"]["Pid"]
    assert await gate.host.ports() == {"engine": port}
    runtime = gate.runtime(SERVE, port=port)
    assert await runtime.adopt()
    assert await runtime.alive()
    assert daemon.inspect("turnstile-engine")["State"]["Pid"] == pid
    await printed(runtime, "up")
    await asyncio.to_thread(daemon.call, "POST", "/containers/turnstile-engine/kill")
    await until(lambda: gate.exits, 1)


@with_house
async def test_one_with_another_configuration_is_ended_at_adoption(gate: House, daemon: Daemon):
    earlier = House(daemon.socket)
    await earlier.runtime("exec sleep 599").start()
    await earlier.host.close()
    assert not await gate.runtime().adopt()
    assert daemon.names() == set()


@with_house
async def test_one_that_has_ended_is_not_adopted_but_cleared_away(gate: House, daemon: Daemon):
    earlier = House(daemon.socket)
    await earlier.runtime("exit 0").start()
    await until(lambda: earlier.exits)
    await earlier.host.close()
    assert not await gate.runtime("exit 0").adopt()
    assert daemon.names() == set()


@with_house
async def test_nothing_to_adopt_is_no_error(gate: House, daemon: Daemon):
    assert not await gate.runtime().adopt()


@with_house
async def test_a_stop_ends_what_nobody_adopted(gate: House, daemon: Daemon):
    earlier = House(daemon.socket)
    await earlier.runtime().start()
    await earlier.host.close()
    await gate.runtime().stop()
    assert daemon.names() == set()


@with_house
async def test_containers_of_presets_that_are_no_more_are_swept_and_no_others(gate: House, daemon: Daemon):
    await gate.runtime(name="kept").start()
    await gate.runtime(name="gone").start()
    daemon.make("turnstile-foreign", start=True)
    assert await gate.host.sweep({"kept"}) == ["gone"]
    assert daemon.names() == {"turnstile-kept", "turnstile-foreign"}


@with_house
async def test_the_engines_processes_are_known_by_their_numbers_on_this_machine(gate: House, daemon: Daemon):
    runtime = gate.runtime("echo up; sleep 600 & exec sleep 601")
    await runtime.start()
    await printed(runtime, "up")
    found = await runtime.pids()
    first = daemon.inspect("turnstile-engine")["State"]["Pid"]
    assert first in found
    names = sorted(psutil.Process(pid).name() for pid in found if pid != first)
    assert names[-2:] == ["sleep", "sleep"]
    assert all(first in {pid, *(parent.pid for parent in psutil.Process(pid).parents())} for pid in found)
    await runtime.stop()
    assert await runtime.pids() == ()
