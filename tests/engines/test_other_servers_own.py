"""What only one of the servers has that somebody else runs: a restart, a pause, instances, a second kind of model."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Released
from gpu_turnstile.engines.registry import ENGINES
from gpu_turnstile.sim import TabbyAPISim, serve
from gpu_turnstile.sim.app import app
from tests.aio import until
from tests.engines.fake import run, serving
from tests.engines.servers import CASES, CHAT, QUICK, with_fake, with_sim


def test_a1111_without_admit_is_stuck_after_an_unload():
    async def story(engine, sim, http):
        await engine.release()
        return (await http.post("/sdapi/v1/txt2img", json={})).status_code

    assert with_sim(CASES[0], story) == 500


def test_a1111_without_cuda_can_only_be_believed():
    def handler(method, path, body):
        return {"cuda": {"error": "unavailable"}} if "memory" in path else {"state": {"job": "", "job_count": 0}}

    release = with_fake(CASES[0], handler, lambda engine, _: engine.release())
    assert release.outcome is Released.ACCEPTED


def test_invokeai_stays_paused_after_a_release_and_goes_on_after_one_that_failed():
    async def story(engine, sim, http):
        await engine.release()
        await http.post("/api/v1/queue/default/enqueue_batch", json={"batch": {}})
        assert (sim.going.is_set(), sim.items["pending"]) == (False, 1)
        assert await engine.busy() is True
        await engine.admit()
        await until(lambda: sim.items["completed"] == 1)
        sim.faults.unload_ignored = True
        assert (await engine.release()).outcome is Released.TIMEOUT
        assert sim.going.is_set()

    with_sim(CASES[1], story)


def test_an_invokeai_that_does_not_say_what_it_dropped_can_only_be_believed():
    async def story(engine, sim, http):
        sim.answers_null = True
        return (await engine.release()).outcome

    assert with_sim(CASES[1], story) is Released.ACCEPTED


def test_every_instance_of_an_lm_studio_model_is_unloaded():
    async def story(engine, sim, http):
        await http.post("/api/v1/models/load", json={"model": "m"})
        assert [model.name for model in await engine.loaded()] == ["m", "m:2"]
        assert (await engine.release()).outcome is Released.EMPTY
        assert sim.counters["unloads"] == 2

    with_sim(CASES[2], story)


def instances(*names):
    return {"models": [{"key": "m", "loaded_instances": [{"id": name} for name in names]}]}


def test_a_list_that_flickers_is_not_taken_for_empty():
    looks = [["a"], [], ["a"], [], []]

    def handler(method, path, body):
        return {"instance_id": "a"} if method == "POST" else instances(*(looks.pop(0) if looks else []))

    async def main():
        async with serving(handler) as (server, http):
            return await ENGINES["lm-studio"](server.url, http, QUICK).release(), server.paths()

    release, paths = run(main())
    assert release.outcome is Released.EMPTY
    assert paths.count("GET /api/v1/models") == 5


def test_what_stays_is_told_again_but_not_in_a_storm_and_its_refusal_is_named():
    def handler(method, path, body):
        return (500, "no") if method == "POST" else instances("a", "b")

    async def main():
        async with serving(handler) as (server, http):
            return await ENGINES["lm-studio"](server.url, http, QUICK).release(), server.paths()

    release, paths = run(main())
    assert release.detail == ("after 0.4 s it still lists a (unload: answered 500: no), b (unload: answered 500: no)")
    assert 4 <= paths.count("POST /api/v1/models/unload") <= 10


def test_tabbyapis_embedding_model_is_unloaded_too():
    async def main():
        sim = TabbyAPISim(loaded=2)
        async with serve(sim) as url, httpx.AsyncClient(trust_env=False) as http:
            engine = ENGINES["tabbyapi"](url, http, QUICK)
            assert [model.name for model in await engine.loaded()] == ["qwen3-8b-exl3", "embedding model bge-m3"]
            assert (await engine.release()).outcome is Released.EMPTY
            assert sim.held == {}

    run(main())


class FakeKobold:
    """Its worker restarts by going away: the test brings it back."""

    model = "koboldcpp/m"

    def __call__(self, method, path, body):
        if path == "/api/admin/reload_config":
            self.model = "inactive"
            return {"success": True}
        perf = {"idle": 1, "queue": 0}
        return {"/api/v1/model": {"result": self.model}, "/api/extra/version": {"version": "1"}}.get(path, perf)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_refused_connection_while_koboldcpp_restarts_is_no_end(comes_back):
    async def main():
        async with serving(FakeKobold()) as (server, http):
            releasing = asyncio.create_task(ENGINES["koboldcpp"](server.url, http, QUICK).release())
            await server.asked_for("/api/admin/reload_config")
            await server.stop()
            if comes_back:
                await asyncio.sleep(0.05)
                await server.start()
            return await releasing

    release = run(main())
    assert release.outcome is (Released.EMPTY if comes_back else Released.UNREACHABLE)
    assert release.left == (() if comes_back else ("koboldcpp/m",))


def test_a_koboldcpp_without_admin_mode_is_refused_at_once():
    class NoAdmin(FakeKobold):
        def __call__(self, method, path, body):
            return {"success": False} if "admin" in path else super().__call__(method, path, body)

    release = with_fake(CASES[4], NoAdmin(), lambda engine, _: engine.release())
    assert release.outcome is Released.REFUSED
    assert "admin mode is off" in release.detail


def test_localai_waits_for_the_requests_that_run():
    async def story(engine, sim, http):
        asking = asyncio.create_task(http.post(CHAT[0], json=CHAT[1]))
        await until(lambda: sim.in_flight == 1)
        assert (await engine.release()).outcome is Released.EMPTY
        assert (await asking).is_success

    with_sim(CASES[5], story, work_s=0.15)


def test_image_servers_are_of_the_image_mode_and_each_has_a_simulator_command():
    image = {kind for kind, engine in ENGINES.items() if engine.mode is Mode.COMFYUI}
    assert image == {"a1111", "comfyui", "invokeai"}
    assert {case.sim.kind for case in CASES} <= {command.name for command in app.registered_commands}
