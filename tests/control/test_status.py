"""What the gate says about itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpu_turnstile.core.model import Mode
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.settings import Settings
from tests.control.fakes import FakeRuntime, SmallCard, run, seat, stage


def test_healthz_says_exactly_the_three_documented_things_in_every_state(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            assert await s.get("/healthz") == {"state": "idle", "llm_inflight": 0, "image_pending": False}
            leases = [s.take("one"), s.take("one")]
            await s.settled()
            assert await s.get("/healthz") == {"state": "llm", "llm_inflight": 2, "image_pending": False}
            job = s.take("pictures")
            assert await s.get("/healthz") == {"state": "llm", "llm_inflight": 2, "image_pending": True}
            for lease in leases:
                s.house.arbiter.release(lease)
            assert (await s.get("/healthz"))["state"] == "image"  # on its way in, for a job
            await s.settled()
            assert job.tenant == "pictures"
            assert await s.get("/healthz") == {"state": "image", "llm_inflight": 0, "image_pending": False}
            runtime = s.seats["pictures"].runtime
            assert isinstance(runtime, FakeRuntime)
            runtime.may_stop.clear()
            s.house.arbiter.release(job)
            await asyncio.sleep(0)
            assert (await s.get("/healthz"))["state"] == "image"  # its memory is not back yet
            runtime.may_stop.set()
            await s.settled()
            assert await s.get("/healthz") == {"state": "idle", "llm_inflight": 0, "image_pending": False}

    run(scenario())


def test_a_resident_with_nothing_to_do_is_idle(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            lease = s.take("one")
            await s.settled()
            s.house.arbiter.release(lease)
            assert (await s.get("/healthz"))["state"] == "idle"
            assert (await s.get("/mode"))["mode"] == "llm"

    run(scenario())


def test_training_takes_the_card_as_an_image_job_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            s.house.arbiter.presets_changed([*s.seats.values(), seat("lora", Mode.TRAIN)])
            s.take("lora")
            await s.settled()
            assert await s.get("/healthz") == {"state": "image", "llm_inflight": 0, "image_pending": False}

    run(scenario())


@pytest.mark.parametrize("path", ["/healthz", "/health", "/status"])
def test_head_works_where_load_balancers_use_it(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            assert (await s.http.head(path)).status_code == 200

    run(scenario())


def test_health_is_for_people(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            found = await s.get("/health")
            assert found["status"] == "ok"
            assert found["state"] == "idle"
            assert found["uptime_s"] >= 0

    run(scenario())


def test_status_names_who_holds_the_card_and_who_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, gauge=Gauge(SmallCard())) as s:
            s.take("one", "alice")
            await s.settled()
            s.take("two", "bob")
            found = await s.get("/status")
            assert (found["mode"], found["phase"], found["model"]) == ("llm", "draining", "one")
            assert found["residents"] == ["one"]
            assert found["target"] == "two"
            assert 59 < found["drain_deadline_in_s"] <= 60
            assert [(h["tenant"], h["client"]) for h in found["inflight"]] == [("one", "alice")]
            assert [(w["position"], w["wants"], w["client"]) for w in found["queue"]] == [(1, ["two"], "bob")]
            assert found["swaps"]["done"] == 1
            assert found["swaps"]["last"]["target"] == "one"
            assert found["card"]["used_gb"] == 8
            assert found["card"]["holders"] == [{"pid": 4711, "name": "llama-server", "used_gb": 7}]
            engines = {e["name"]: e for e in found["engines"]}
            assert engines["one"]["on_card"]
            assert (engines["one"]["vram_gb"], engines["one"]["vram_from"]) == (None, None)
            assert not engines["two"]["on_card"]
            assert engines["pictures"]["mode"] == "comfyui"
            assert found["presets"] == {"count": 3, "error": None}
            assert found["places"]["state"] == str(tmp_path / "state")

    run(scenario())


def test_status_shows_jobs_on_the_arbiters_clock(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            s.house.jobs = lambda: [{"prompt_id": "p1", "phase": "running", "since": s.house.arbiter.now - 5}]
            (job,) = (await s.get("/status"))["jobs"]
            assert (job["prompt_id"], job["phase"]) == ("p1", "running")
            assert 5 <= job["age_s"] < 6

    run(scenario())


def test_a_failed_reload_and_odd_settings_are_in_the_warnings(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = Settings(warnings=("LISTEN_OLLAMA looks odd",))
        async with stage(tmp_path, settings=settings) as s:
            (tmp_path / "presets" / "three.toml").write_text("engine = 5\n")
            s.house.store.refresh()
            found = await s.get("/status")
            assert "three.toml" in found["presets"]["error"]
            assert found["presets"]["count"] == 3
            assert found["warnings"][0] == "LISTEN_OLLAMA looks odd"
            assert "last good state" in found["warnings"][1]

    run(scenario())


def test_openapi_names_every_path_with_a_summary_and_docs_need_no_network(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            spec = await s.get("/openapi.json")
            for path in ("/healthz", "/health", "/status", "/metrics", "/events", "/v1/models", "/mode", "/unload"):
                for operation in spec["paths"][path].values():
                    assert operation["summary"]
            assert spec["paths"]["/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            page = (await s.http.get("/docs")).text
            assert all(path in page for path in spec["paths"])
            assert "http://" not in page
            assert "https://" not in page
            assert "<script" not in page

    run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing-here", 404, "not_found"),
        ("DELETE", "/status", 405, "method_not_allowed"),
        ("GET", "/events?since=x", 400, "bad_request"),
        ("POST", "/lock", 400, "bad_request"),
    ],
)
def test_every_error_is_json_with_the_gates_header(
    tmp_path: Path, method: str, path: str, status: int, code: str
) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            reply = await s.http.request(method, path)
            assert reply.status_code == status
            assert reply.headers["x-turnstile-error"] == code
            assert reply.json()["error"] == code
            assert reply.json()["message"]

    run(scenario())


def test_a_bug_in_the_control_api_is_a_500_in_the_same_shape(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            s.house.jobs = lambda: 1 / 0
            reply = await s.http.get("/status")
            assert reply.status_code == 500
            assert reply.headers["x-turnstile-error"] == "internal"
            assert reply.json()["error"] == "internal"

    run(scenario())
