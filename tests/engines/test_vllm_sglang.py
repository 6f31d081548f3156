"""vLLM, SGLang and NInfer: ready, which model, busy; against servers that answer as their sources say."""

from __future__ import annotations

import pytest

from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import Health, Loaded, Released, Timing
from gpu_turnstile.engines.ninfer import NInfer
from gpu_turnstile.engines.registry import ENGINES
from gpu_turnstile.engines.sglang import SGLang
from gpu_turnstile.engines.vllm import VLLM
from tests.engines.fake import CUT, HANG, run, serving

QUICK = Timing(call_timeout=0.3)
every = pytest.mark.parametrize("kind", [VLLM, SGLang, NInfer])


def with_engine(kind, answers, story):
    """`answers`: path to answer; any other path is a 404."""

    async def main():
        async with serving(lambda method, path, body: answers.get(path, (404, "Not Found"))) as (server, http):
            return await story(kind(server.url, http, QUICK), server)

    return run(main())


def metrics(*lines):
    head = "# HELP vllm:num_requests_running Number of requests.\n# TYPE vllm:num_requests_running gauge\n"
    return {"/metrics": (200, head + "\n".join(lines) + "\n")}


@every
@pytest.mark.parametrize(
    ("answer", "health"),
    [((200, ""), Health.READY), (HANG, Health.SILENT), ((500, ""), Health.BROKEN), (CUT, Health.DOWN)],
)
def test_they_are_ready_when_their_health_says_so(kind, answer, health):
    assert with_engine(kind, {"/health": answer}, lambda e, _: e.probe()).health is health


@pytest.mark.parametrize(("kind", "health"), [(VLLM, Health.BROKEN), (SGLang, Health.LOADING)])
def test_a_503_is_a_dead_engine_or_one_that_starts(kind, health):
    assert with_engine(kind, {"/health": (503, "")}, lambda e, _: e.probe()).health is health


@every
def test_they_name_the_model_they_serve(kind):
    models = {"object": "list", "data": [{"id": "org/m", "object": "model", "owned_by": "x", "max_model_len": 8}]}
    assert with_engine(kind, {"/v1/models": models}, lambda e, _: e.loaded()) == (Loaded("org/m"),)
    for broken in ((401, {"error": "no key"}), (503, ""), [], {"data": "x"}, (200, "no JSON"), HANG):
        assert with_engine(kind, {"/v1/models": broken}, lambda e, _: e.loaded()) is None


@every
def test_their_key_goes_with_every_question(kind):
    async def story(engine, server):
        engine.api_key = "secret"
        return engine.headers()

    assert with_engine(kind, {}, story) == {"Authorization": "Bearer secret"}


@every
def test_they_unload_by_being_stopped_and_serve_language_models(kind):
    assert with_engine(kind, {}, lambda e, _: e.release()).outcome is Released.UNSUPPORTED
    assert kind.mode is Mode.LLM
    assert ENGINES[kind.kind] is kind


@pytest.mark.parametrize(
    ("lines", "busy"),
    [
        (['vllm:num_requests_running{model_name="m"} 0.0', 'vllm:num_requests_waiting{model_name="m"} 0.0'], False),
        (['vllm:num_requests_running{model_name="m"} 2.0', 'vllm:num_requests_waiting{model_name="m"} 0.0'], True),
        (['vllm:num_requests_running{model_name="m"} 0.0', 'vllm:num_requests_waiting{model_name="m"} 1.0'], True),
        (
            [
                'vllm:num_requests_running{engine="0",model_name="a } 9"} 0.0',
                'vllm:num_requests_running{engine="1",model_name="a } 9"} 1.0',
                'vllm:num_requests_waiting{engine="0"} 0.0',
            ],
            True,
        ),
        (["vllm:num_requests_running 0", "vllm:num_requests_waiting 0"], False),
        (["vllm:num_requests_running 1e+01", "vllm:num_requests_waiting 0"], True),
        (["vllm:num_requests_running 0"], None),
        (["vllm:num_requests_running_total 5", "vllm:num_requests_waiting_by_reason 5"], None),
        (["vllm:num_requests_running ..", "vllm:num_requests_waiting 0"], None),
        (["python_info 1"], None),
    ],
)
def test_vllm_is_busy_when_its_counters_say_so(lines, busy):
    assert with_engine(VLLM, metrics(*lines), lambda e, _: e.busy()) is busy


@pytest.mark.parametrize("answer", [(404, ""), (500, ""), HANG, CUT])
def test_vllm_without_its_counters_is_of_unknown_work(answer):
    assert with_engine(VLLM, {"/metrics": answer}, lambda e, _: e.busy()) is None


LOADS, OLD_LOAD = "/v1/loads?include=core", "/get_load"


@pytest.mark.parametrize(
    ("answers", "busy"),
    [
        ({LOADS: {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}]}}, False),
        ({LOADS: {"loads": [{"num_running_reqs": 0}, {"num_running_reqs": 1, "num_waiting_reqs": 0}]}}, True),
        ({LOADS: {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 3}]}}, True),
        ({OLD_LOAD: [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]}, False),
        ({OLD_LOAD: [{"dp_rank": 0, "num_reqs": 2, "num_waiting_reqs": 0, "num_tokens": 9}]}, True),
        ({OLD_LOAD: [{"num_reqs": 0}, {"dp_rank": 1}]}, None),
        ({OLD_LOAD: []}, None),
        ({OLD_LOAD: {"load": 3}}, None),
        ({LOADS: {"loads": []}}, None),
        ({LOADS: HANG, OLD_LOAD: HANG}, None),
        ({}, None),
    ],
)
def test_sglang_is_busy_when_any_of_its_workers_is(answers, busy):
    assert with_engine(SGLang, answers, lambda e, _: e.busy()) is busy


def test_ninfer_does_not_tell_whether_it_works():
    assert with_engine(NInfer, {}, lambda e, _: e.busy()) is None


SLEEP = {
    (VLLM, 1): (["POST /sleep?level=1"], ["POST /wake_up"]),
    (VLLM, 2): (
        ["POST /sleep?level=2"],
        [
            "POST /wake_up?tags=weights",
            "POST /collective_rpc",
            "POST /wake_up?tags=kv_cache",
            "POST /reset_prefix_cache",
        ],
    ),
    (SGLang, 1): (
        ["POST /flush_cache", "POST /release_memory_occupation"],
        ["POST /resume_memory_occupation", "GET /health_generate"],
    ),
}
sleepers = pytest.mark.parametrize(("kind", "level"), SLEEP)


def after(path):
    return path.split(" ")[1]


@sleepers
def test_they_sleep_and_wake_in_the_order_their_makers_ask_for(kind, level):
    down, up = SLEEP[kind, level]

    async def story(engine, server):
        assert await engine.sleep(level, 1.0) is None
        assert server.paths() == down
        assert await engine.wake(level, 1.0) is None
        assert server.paths() == down + up
        if level == 2:
            assert server.bodies("/collective_rpc") == [{"method": "reload_weights"}]

    with_engine(kind, {after(path): (200, "") for path in down + up}, story)


@sleepers
@pytest.mark.parametrize("answer", [(500, "no"), (404, ""), HANG, CUT])
def test_every_step_that_goes_wrong_ends_a_sleep_or_a_wake_and_is_told(kind, level, answer):
    down, up = SLEEP[kind, level]
    for steps, act in ((down, "sleep"), (up, "wake")):
        for number, wrong in enumerate(steps):

            async def story(engine, server, number=number, steps=steps, act=act):
                told = await getattr(engine, act)(level, 0.2)
                assert told.startswith(after(steps[number]))
                assert list(dict.fromkeys(server.paths())) == steps[: number + 1]

            good = {after(path): (200, "") for path in steps}
            with_engine(kind, {**good, after(wrong): answer}, story)


@pytest.mark.parametrize(
    ("answer", "told"),
    [({"is_sleeping": True}, True), ({"is_sleeping": False}, False), ((404, ""), None), ({}, None), (HANG, None)],
)
def test_vllm_says_whether_it_sleeps_and_sglang_does_not(answer, told):
    assert with_engine(VLLM, {"/is_sleeping": answer}, lambda e, _: e.sleeping()) is told
    assert with_engine(SGLang, {}, lambda e, _: e.sleeping()) is None
