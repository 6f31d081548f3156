"""The simulated ComfyUI against what was recorded from the real 0.33."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from gpu_turnstile.sim.comfy_files import PIXEL

from .comfy_desk import ended, graph, running, started, submit
from .helpers import in_loop

STATUS = {"status_str", "completed", "messages"}


def failing(kind: str) -> dict[str, Any]:
    return {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 3}},
        "3": {"class_type": "RaiseNode", "inputs": {"image": ["1", 0], "kind": kind}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "arb"}},
    }


# ---------------------------------------------------------------------------------------------- shapes


@in_loop
async def test_an_idle_server_answers_as_recorded() -> None:
    async with started() as (_, http):
        for prefix in ("", "/api"):
            assert (await http.get(f"{prefix}/queue")).json() == {"queue_running": [], "queue_pending": []}
            assert (await http.get(f"{prefix}/prompt")).json() == {"exec_info": {"queue_remaining": 0}}
            assert (await http.get(f"{prefix}/history")).json() == {}
            assert (await http.get(f"{prefix}/history/unknown")).json() == {}
        stats = (await http.get("/system_stats")).json()
        assert stats["system"]["comfyui_version"] == "0.33.0"
        assert {"vram_total", "vram_free", "torch_vram_total", "torch_vram_free"} < set(stats["devices"][0])
        info = (await http.get("/object_info/EmptyImage")).json()["EmptyImage"]
        assert list(info["input"]["required"]) == ["width", "height", "batch_size", "color"]
        assert "KSampler" in (await http.get("/object_info")).json()
        assert "max_upload_size" in (await http.get("/features")).json()
        for path in ("/nosuch", "/api/nosuch", "/jobs"):
            answer = await http.get(path)
            assert (answer.status_code, answer.content) == (404, b"")
            assert answer.headers["content-type"] == "application/octet-stream"


@in_loop
async def test_a_job_goes_from_the_queue_to_the_history() -> None:
    async with started() as (_, http):
        answer = await http.post("/prompt", json={"prompt": graph(0.2), "client_id": "A", "extra_data": {"x": 1}})
        assert list(answer.json()) == ["prompt_id", "number", "node_errors"]
        job = answer.json()["prompt_id"]
        await running(http, job)
        (item,) = (await http.get("/queue")).json()["queue_running"]
        assert item[:3] == [0, job, graph(0.2)]
        assert item[4] == ["9"]
        assert set(item[3]) == {"x", "client_id", "create_time"}
        assert (await http.get("/prompt")).json() == {"exec_info": {"queue_remaining": 1}}
        entry = await ended(http, job)
        assert set(entry) == {"prompt", "outputs", "status", "meta"}
        assert entry["prompt"] == item
        assert set(entry["status"]) == STATUS
        assert (entry["status"]["status_str"], entry["status"]["completed"]) == ("success", True)
        assert [message[0] for message in entry["status"]["messages"]] == [
            "execution_start",
            "execution_cached",
            "execution_success",
        ]
        (image,) = entry["outputs"]["9"]["images"]
        assert image == {"filename": "arb_00001_.png", "subfolder": "", "type": "output"}
        picture = await http.get("/view", params=image)
        assert (picture.headers["content-type"], picture.content[:4]) == ("image/png", b"\x89PNG")
        assert (await http.get("/queue")).json()["queue_running"] == []


@in_loop
async def test_the_same_graph_again_is_cached_but_not_after_another() -> None:
    async with started() as (_, http):
        first = await ended(http, await submit(http, graph(seed=1)))
        again = await ended(http, await submit(http, graph(seed=1)))
        assert again["status"]["messages"][1][1]["nodes"] == ["1", "2", "9"]
        assert again["outputs"] == first["outputs"]
        await ended(http, await submit(http, graph(seed=2)))
        after = await ended(http, await submit(http, graph(seed=1)))
        assert after["status"]["messages"][1][1]["nodes"] == []
        assert after["outputs"] != first["outputs"]


@in_loop
async def test_with_only_the_tail_changed_the_rest_is_cached() -> None:
    async with started() as (_, http):
        await ended(http, await submit(http, graph()))
        entry = await ended(http, await submit(http, graph(output="PreviewImage")))
        assert entry["status"]["messages"][1][1]["nodes"] == ["1", "2"]
        assert entry["outputs"]["9"]["images"][0]["type"] == "temp"


@pytest.mark.parametrize(("kind", "exception"), [("value", "ValueError"), ("oom", "torch.OutOfMemoryError")])
@in_loop
async def test_a_node_that_fails_ends_the_job_as_recorded(kind: str, exception: str) -> None:
    async with started() as (_, http):
        entry = await ended(http, await submit(http, failing(kind)))
        assert (entry["status"]["status_str"], entry["status"]["completed"]) == ("error", False)
        event, data = entry["status"]["messages"][-1]
        assert event == "execution_error"
        assert data["exception_type"] == exception
        assert {"prompt_id", "node_id", "node_type", "executed", "exception_message", "traceback"} < set(data)
        assert (data["node_id"], data["node_type"], data["executed"]) == ("3", "RaiseNode", ["1"])


@in_loop
async def test_a_text_to_image_workflow_runs() -> None:
    prompt = {
        "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sim-xl.safetensors"}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a gate", "clip": ["4", 1]}},
        "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["4", 1]}},
        "3": {
            "class_type": "KSampler",
            "inputs": {
                "seed": 1,
                "steps": 4,
                "cfg": 1.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
                "model": ["4", 0],
                "positive": ["6", 0],
                "negative": ["7", 0],
                "latent_image": ["5", 0],
            },
        },
        "8": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["4", 2]}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "x"}},
    }
    async with started() as (_, http):
        assert (await ended(http, await submit(http, prompt)))["status"]["completed"]


# ---------------------------------------------------------------------------------------------- refusals


def _save(node: str) -> dict[str, Any]:
    return {"class_type": "SaveImage", "inputs": {"images": [node, 0], "filename_prefix": "x"}}


_NO_IMAGES = {"9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "x"}}}
_WRONG_MODEL = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "missing.safetensors"}},
    "2": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
    "3": {"class_type": "VAEDecode", "inputs": {"samples": ["2", 0], "vae": ["1", 2]}},
    "9": _save("3"),
}


@pytest.mark.parametrize(
    ("body", "kind", "node_error"),
    [
        ({}, "no_prompt", None),
        ({"prompt": {}}, "prompt_no_outputs", None),
        ({"prompt": {"1": {"class_type": "Nope", "inputs": {}}}}, "missing_node_type", None),
        ({"prompt": {"1": {"inputs": {}}}}, "missing_node_type", None),
        ({"prompt": graph(), "prompt_id": "mine"}, "invalid_prompt_id", None),
        ({"prompt": _NO_IMAGES}, "prompt_outputs_failed_validation", "required_input_missing"),
        ({"prompt": {"9": _save("77")}}, "prompt_outputs_failed_validation", "exception_during_validation"),
        ({"prompt": _WRONG_MODEL}, "prompt_outputs_failed_validation", "value_not_in_list"),
    ],
)
@in_loop
async def test_what_cannot_run_is_400_and_not_queued(body: dict[str, Any], kind: str, node_error: str | None) -> None:
    async with started() as (sim, http):
        answer = await http.post("/prompt", json=body)
        assert answer.status_code == 400
        assert set(answer.json()) == {"error", "node_errors"}
        assert set(answer.json()["error"]) == {"type", "message", "details", "extra_info"}
        assert answer.json()["error"]["type"] == kind
        told = [e["type"] for node in answer.json()["node_errors"].values() for e in node["errors"]]
        assert told == ([node_error] if node_error else [])
        assert sim.counters["prompts"] == 0


@in_loop
async def test_a_graph_with_one_valid_output_runs_and_names_the_other() -> None:
    prompt = {**graph(), "8": {"class_type": "LoadImage", "inputs": {"image": "missing.png"}}, "7": _save("8")}
    async with started() as (_, http):
        answer = await http.post("/prompt", json={"prompt": prompt})
        assert answer.status_code == 200
        assert answer.json()["node_errors"]["8"]["dependent_outputs"] == ["7"]
        entry = await ended(http, answer.json()["prompt_id"])
        assert list(entry["outputs"]) == ["9"]


@in_loop
async def test_an_uploaded_image_can_be_loaded() -> None:
    async with started() as (_, http):
        answer = await http.post("/upload/image", files={"image": ("cat.png", PIXEL)})
        assert answer.json() == {"name": "cat.png", "subfolder": "", "type": "input"}
        prompt = {"8": {"class_type": "LoadImage", "inputs": {"image": "cat.png"}}, "9": _save("8")}
        assert (await ended(http, await submit(http, prompt)))["status"]["completed"]


@pytest.mark.parametrize("path", ["/prompt", "/free", "/queue", "/history"])
@in_loop
async def test_a_body_that_is_no_json_is_500(path: str) -> None:
    async with started() as (_, http):
        answer = await http.post(path, content=b"")
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (500, "text/plain")
        assert answer.text == "500 Internal Server Error\n\nServer got itself in trouble"


# ---------------------------------------------------------------------------------------------- the queue


@in_loop
async def test_the_queue_is_a_heap_with_front_numbers_and_own_ids() -> None:
    mine = [str(uuid.UUID(int=n, version=4)) for n in range(3)]
    async with started() as (_, http):
        first = await submit(http, graph(30))
        await running(http, first)
        await submit(http, graph(seed=2), prompt_id=mine[0])
        await submit(http, graph(seed=3), prompt_id=mine[1], front=True)
        await submit(http, graph(seed=4), prompt_id=mine[2], number=0.5)
        pending = (await http.get("/queue")).json()["queue_pending"]
        assert sorted((item[0], item[1]) for item in pending) == [(-2, mine[1]), (0.5, mine[2]), (1, mine[0])]
        await http.post("/queue", json={"delete": [mine[2], first]})
        pending = (await http.get("/queue")).json()["queue_pending"]
        assert {item[1] for item in pending} == {mine[0], mine[1]}
        await running(http, first)
        await http.post("/queue", json={"clear": True})
        assert (await http.get("/queue")).json()["queue_pending"] == []
        assert (await http.get("/history")).json() == {}


@in_loop
async def test_an_interrupt_ends_the_running_job_at_its_next_step() -> None:
    async with started() as (_, http):
        job = await submit(http, graph(0.4))
        await running(http, job)
        answer = await http.post("/interrupt", json={"prompt_id": "another"})
        assert (answer.status_code, answer.content) == (200, b"")
        await http.post("/api/interrupt")
        entry = await ended(http, job)
        assert (entry["status"]["status_str"], entry["status"]["completed"]) == ("error", False)
        event, data = entry["status"]["messages"][-1]
        assert event == "execution_interrupted"
        assert set(data) == {"prompt_id", "node_id", "node_type", "executed", "timestamp"}


@in_loop
async def test_an_interrupt_when_idle_harms_nobody() -> None:
    async with started() as (_, http):
        await http.post("/interrupt")
        assert (await ended(http, await submit(http, graph())))["status"]["completed"]


@in_loop
async def test_the_history_can_be_cut_and_deleted() -> None:
    async with started() as (_, http):
        jobs = [await submit(http, graph(seed=n)) for n in range(3)]
        await ended(http, jobs[-1])
        assert list((await http.get("/history?max_items=1")).json()) == jobs[2:]
        await http.post("/history", json={"delete": [jobs[1]]})
        assert list((await http.get("/history")).json()) == [jobs[0], jobs[2]]
        await http.post("/history", json={"clear": True})
        assert (await http.get("/history")).json() == {}


@in_loop
async def test_the_jobs_api_lists_cancels_and_forgets_like_the_real_one() -> None:
    async with started() as (_, http):
        done = await submit(http, graph(seed=9))
        await ended(http, done)
        now, later = await submit(http, graph(0.4)), await submit(http, graph(seed=2))
        await running(http, now)
        jobs = (await http.get("/api/jobs")).json()["jobs"]
        assert [(job["id"], job["status"]) for job in jobs] == [
            (later, "pending"),
            (now, "in_progress"),
            (done, "completed"),
        ]
        for job in (later, now):
            assert (await http.post(f"/api/jobs/{job}/cancel")).json() == {"cancelled": True}
        await ended(http, now)
        assert (await http.get(f"/api/jobs/{now}")).json()["status"] == "cancelled"
        assert (await http.get(f"/api/jobs/{later}")).status_code == 404
        assert (await http.post(f"/api/jobs/{now}/cancel")).json() == {"cancelled": False}
        assert (await http.get("/api/jobs?status=bogus")).status_code == 400
