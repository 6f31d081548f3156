"""llama-server, plain commands, training services, and the registry that knows them all."""

from __future__ import annotations

import asyncio

import pytest

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health, Loaded, Released, Timing
from gpu_turnstile.engines.command import Command, Train
from gpu_turnstile.engines.llama_server import LlamaServer
from gpu_turnstile.engines.registry import ENGINES
from tests.engines.fake import CUT, HANG, run, serving

QUICK = Timing(call_timeout=0.2)
LOADING = (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})


def with_engine(kind, handler, story):
    async def main():
        async with serving(handler) as (server, http):
            return await story(kind(server.url, http, QUICK), server)

    return run(main())


class FakeLlama:
    def __init__(self, processing=False, sleeping=False, models=None):
        self.processing, self.sleeping = processing, sleeping
        self.models = models or [{"id": "m", "object": "model"}]

    def __call__(self, method, path, body):
        return {
            "/health": {"status": "ok"},
            "/props": {"is_sleeping": self.sleeping, "total_slots": 2},
            "/v1/models": {"object": "list", "data": self.models},
            "/slots": [{"id": 0, "is_processing": False}, {"id": 1, "is_processing": self.processing}],
        }[path]


@pytest.mark.parametrize(
    ("answer", "health"),
    [
        ({"status": "ok"}, Health.READY),
        (LOADING, Health.LOADING),
        (HANG, Health.SILENT),
        ((500, ""), Health.BROKEN),
        (CUT, Health.DOWN),
    ],
)
def test_llama_server_is_ready_when_its_health_says_so(answer, health):
    assert with_engine(LlamaServer, lambda *_: answer, lambda e, _: e.probe()).health is health


def test_llama_server_names_its_model_unless_it_sleeps():
    assert with_engine(LlamaServer, FakeLlama(), lambda e, _: e.loaded()) == (Loaded("m"),)
    assert with_engine(LlamaServer, FakeLlama(sleeping=True), lambda e, _: e.loaded()) == ()
    assert with_engine(LlamaServer, lambda *_: LOADING, lambda e, _: e.loaded()) is None


def test_a_router_names_only_the_models_it_has_loaded():
    models = [{"id": "a", "status": {"value": "loaded"}}, {"id": "b", "status": {"value": "unloaded"}}]
    assert with_engine(LlamaServer, FakeLlama(models=models), lambda e, _: e.loaded()) == (Loaded("a"),)


def test_slots_are_asked_once_in_two_seconds_however_many_ask():
    async def story(engine, server):
        answers = await asyncio.gather(*(engine.busy() for _ in range(20)))
        return set(answers), server.paths().count("GET /slots")

    assert with_engine(LlamaServer, FakeLlama(processing=True), story) == ({True}, 1)


def test_slots_are_asked_again_after_two_seconds():
    fake = FakeLlama(processing=True)

    async def story(engine, server):
        first = await engine.busy()
        fake.processing = False
        engine._asked_at -= 2
        return first, await engine.busy()

    assert with_engine(LlamaServer, fake, story) == (True, False)


def test_a_sleeping_server_is_idle_and_is_not_woken_to_be_asked():
    async def story(engine, server):
        return await engine.busy(), "GET /slots" in server.paths()

    assert with_engine(LlamaServer, FakeLlama(sleeping=True), story) == (False, False)


@pytest.mark.parametrize("answer", [(501, "no slots"), (404, ""), HANG, [1]])
def test_a_server_without_slots_is_of_unknown_work(answer):
    handler = lambda method, path, body: answer if path == "/slots" else {}  # noqa: E731
    assert with_engine(LlamaServer, handler, lambda e, _: e.busy()) is None


@pytest.mark.parametrize("kind", [LlamaServer, Command, Train])
def test_a_plain_server_unloads_by_being_stopped(kind):
    assert with_engine(kind, FakeLlama(), lambda e, _: e.release()).outcome is Released.UNSUPPORTED


@pytest.mark.parametrize(
    ("answer", "health"), [((204, ""), Health.READY), ((503, ""), Health.LOADING), ((404, ""), Health.BROKEN)]
)
def test_a_command_is_judged_by_its_own_health_path(answer, health):
    async def story(engine, server):
        engine.health_path = "/ready"
        return (await engine.probe()).health, server.paths(), await engine.loaded(), await engine.busy()

    assert with_engine(Command, lambda *_: answer, story) == (health, ["GET /ready"], None, None)


def test_a_command_that_does_not_listen_is_down():
    async def story(engine, server):
        await server.stop()
        return (await engine.probe()).health

    assert with_engine(Command, lambda *_: {}, story) is Health.DOWN


def test_each_engine_is_registered_under_its_own_name():
    assert {kind: engine.kind for kind, engine in ENGINES.items()} == {kind: kind for kind in ENGINES}
    assert ENGINES["train"].mode is Mode.TRAIN
    assert ENGINES["comfyui"].mode is Mode.COMFYUI
