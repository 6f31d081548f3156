"""`/metrics`, read the way Prometheus reads it."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.control.fakes import Stage, run, stage


async def scrape(s: Stage) -> tuple[dict[str, str], dict[tuple[str, str], float]]:
    """Types by family, and values by (sample name, its labels)."""
    reply = await s.http.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(reply.text))
    values = {}
    for family in families:
        for sample in family.samples:
            values[sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))] = sample.value
    return {family.name: family.type for family in families}, values


def test_names_and_types_are_the_documents(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, image_jobs={"success": 3, "error": 1}) as s:
            types, values = await scrape(s)
            assert types == {
                "gpu_turnstile_state": "gauge",
                "gpu_turnstile_llm_inflight": "gauge",
                "gpu_turnstile_image_jobs": "counter",
                "gpu_turnstile_image_job_ends": "counter",
                "gpu_turnstile_lock_wait_seconds": "histogram",
                "gpu_turnstile_unload_seconds": "histogram",
                "gpu_turnstile_swap_seconds": "histogram",
                "gpu_turnstile_swap_failures": "counter",
                "gpu_turnstile_unload_failures": "counter",
                "gpu_turnstile_queue_length": "gauge",
                "gpu_turnstile_queue_oldest_seconds": "gauge",
                "gpu_turnstile_locked": "gauge",
                "gpu_turnstile_lock_owners": "gauge",
                "gpu_turnstile_lock_expires_seconds": "gauge",
                "gpu_turnstile_lock_queue_length": "gauge",
                "gpu_turnstile_lock_queue_oldest_seconds": "gauge",
                "gpu_turnstile_requests": "counter",
                "gpu_turnstile_upstream_died_midstream": "counter",
                "gpu_turnstile_upstream_unreachable": "counter",
                "gpu_turnstile_engine_restarts": "counter",
                "gpu_turnstile_connections": "gauge",
                "gpu_turnstile_info": "gauge",
            }
            assert values["gpu_turnstile_image_jobs_total", ""] == 4
            assert values["gpu_turnstile_image_job_ends_total", "end=success"] == 3
            assert values["gpu_turnstile_image_job_ends_total", "end=timeout"] == 0

    run(scenario())


def test_exactly_one_of_the_three_states_is_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            for name in ("idle", "llm"):
                _, values = await scrape(s)
                states = {state: values["gpu_turnstile_state", f"state={state}"] for state in ("idle", "llm", "image")}
                assert states == {**dict.fromkeys(states, 0.0), name: 1.0}
                s.take("one")
                await s.settled()

    run(scenario())


def test_waits_swaps_and_the_line_are_measured(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            s.take("one")
            await s.settled()
            s.take("two")
            s.take("pictures")
            s.house.gateway.counts.requests = 7
            _, values = await scrape(s)
            assert values["gpu_turnstile_lock_wait_seconds_count", "kind=llm"] == 1
            assert values["gpu_turnstile_lock_wait_seconds_bucket", "kind=llm,le=+Inf"] == 1
            assert values["gpu_turnstile_lock_wait_seconds_count", "kind=image"] == 0
            assert values["gpu_turnstile_swap_seconds_count", ""] == 1
            assert values["gpu_turnstile_unload_seconds_count", ""] == 0
            assert values["gpu_turnstile_llm_inflight", ""] == 1
            assert values["gpu_turnstile_queue_length", ""] == 2
            assert values["gpu_turnstile_queue_oldest_seconds", ""] >= 0
            assert values["gpu_turnstile_requests_total", ""] == 7

    run(scenario())


def test_the_lock_its_owners_their_time_and_its_queue_are_measured(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as s:
            arbiter = s.house.arbiter
            _, values = await scrape(s)
            assert (values["gpu_turnstile_lock_owners", ""], values["gpu_turnstile_lock_queue_length", ""]) == (0, 0)
            assert not [
                name for name, _ in values if name in ("gpu_turnstile_locked", "gpu_turnstile_lock_expires_seconds")
            ]
            for owner, preset, ttl in (("ann", "one", 60.0), ("bob", "one", 600.0), ("cid", "two", 60.0)):
                await arbiter.lock(owner, preset, ttl, None, wait=True)
            _, values = await scrape(s)
            assert values["gpu_turnstile_locked", "preset=one"] == 1
            assert values["gpu_turnstile_lock_owners", ""] == 2
            assert 59 < values["gpu_turnstile_lock_expires_seconds", "owner=ann"] <= 60
            assert 599 < values["gpu_turnstile_lock_expires_seconds", "owner=bob"] <= 600
            assert values["gpu_turnstile_lock_queue_length", ""] == 1
            assert 0 <= values["gpu_turnstile_lock_queue_oldest_seconds", ""] < 1

    run(scenario())
