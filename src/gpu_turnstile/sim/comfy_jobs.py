"""ComfyUI's newer view of queue and history: /api/jobs (0.33). Pure builders over the queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_turnstile.sim.comfy_nodes import Json
from gpu_turnstile.sim.comfy_queue import Job, Queue

STATUSES = ("pending", "in_progress", "completed", "failed", "cancelled")


def jobs(queue: Queue) -> Iterator[Json]:
    """Newest first."""
    for job in sorted(queue.pending, key=lambda job: job.number, reverse=True):
        yield _live(job, "pending")
    if queue.running is not None:
        yield _live(queue.running, "in_progress")
    for entry in reversed(queue.history.values()):
        yield _ended(entry)


def job(queue: Queue, job_id: str) -> Json | None:
    """One job with its outputs; None = there is none of this id (a deleted one leaves no trace)."""
    found = next((shown for shown in jobs(queue) if shown["id"] == job_id), None)
    entry = queue.history.get(job_id)
    if found is None or found["status"] in ("pending", "in_progress") or entry is None:
        return found
    workflow = {"prompt": entry["prompt"][2], "extra_data": entry["prompt"][3]}
    return {**found, "outputs": entry["outputs"], "execution_status": entry["status"], "workflow": workflow}


def cancel(queue: Queue, job_id: str) -> bool:
    """Deletes a pending one, interrupts a running one; False = neither."""
    return queue.delete(job_id) or queue.interrupt(job_id)


def _live(job: Job, status: str) -> Json:
    return _head(job.as_json(), status, {})


def _ended(entry: Json) -> Json:
    events = [event for event, _ in entry["status"]["messages"]]
    times = {
        "execution_start_time": entry["status"]["messages"][0][1]["timestamp"],
        "execution_end_time": entry["status"]["messages"][-1][1]["timestamp"],
    }
    if entry["status"]["completed"]:
        status = "completed"
    else:
        status = "cancelled" if "execution_interrupted" in events else "failed"
    shown = _head(entry["prompt"], status, times)
    files = [(node, image) for node, output in entry["outputs"].items() for image in output["images"]]
    shown["outputs_count"] = shown["previewable_outputs_count"] = len(files)
    if files:
        node, image = files[-1]
        shown["preview_output"] = {**image, "nodeId": node, "mediaType": "images"}
    return shown


def _head(item: list[Any], status: str, times: Json) -> Json:
    number, job_id, _, extra, _ = item
    workflow = extra.get("extra_pnginfo", {}).get("workflow", {}).get("id")
    return {
        "id": job_id,
        "status": status,
        "priority": number,
        "create_time": extra["create_time"],
        **times,
        "outputs_count": 0,
        "previewable_outputs_count": 0,
        **({"workflow_id": workflow} if workflow else {}),
    }
