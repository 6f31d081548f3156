"""The simulated ComfyUI 0.33: its HTTP routes, each also under /api, and its websocket.

What runs is `comfy_queue.py`'s affair, what may run `comfy_nodes.py`'s. Two facts a gate must live with are
kept: POST /prompt answers before the job has begun, and /free only sets a flag. Invariant: the events of a job
go to the socket with its client id alone (the last one that came with it); only `status` goes to everybody.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from gpu_turnstile.sim import comfy_jobs, comfy_nodes
from gpu_turnstile.sim.base import Answer, Cut, Sim, gone, pause
from gpu_turnstile.sim.card import GB, SimCard
from gpu_turnstile.sim.comfy_files import Files
from gpu_turnstile.sim.comfy_http import (
    JsonAnswer,
    broken,
    empty,
    fields_of,
    is_foreign,
    not_found,
    object_of,
    refused,
)
from gpu_turnstile.sim.comfy_nodes import Json
from gpu_turnstile.sim.comfy_queue import Job, Queue, Settings
from gpu_turnstile.sim.faults import ComfyFaults, PromptReply

VERSION = "0.33.0"
FEATURES = {
    "supports_preview_metadata": True,
    "supports_model_type_tags": True,
    "max_upload_size": 104857600,
    "extension": {"manager": {"supports_v4": True}},
    "node_replacements": True,
    "assets": False,
}
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Endpoint = Callable[[Request], Awaitable[Response]]


class Sockets:
    """The open websockets: a queue of messages each. `send` never waits."""

    def __init__(self) -> None:
        self._by_sid: dict[str, asyncio.Queue[str]] = {}

    def join(self, sid: str) -> asyncio.Queue[str]:
        """The later one of two with one sid gets everything; the earlier stays open and hears nothing."""
        self._by_sid[sid] = asyncio.Queue()
        return self._by_sid[sid]

    def leave(self, sid: str, messages: asyncio.Queue[str]) -> None:
        if self._by_sid.get(sid) is messages:
            del self._by_sid[sid]

    def send(self, event: str, data: Json, sid: str | None) -> None:
        text = json.dumps({"type": event, "data": data})
        receivers = [*self._by_sid.values()] if sid is None else [*filter(None, [self._by_sid.get(sid)])]
        for messages in receivers:
            messages.put_nowait(text)


class ComfySim(Sim[ComfyFaults]):
    """`vram_gb`: what a job takes and keeps; `residual_gb`: what stays after /free; `context_gb`: what its process
    takes at the start. `job_s`: seconds of a job whose graph has no SleepImage node."""

    kind: ClassVar[str] = "comfyui"

    def __init__(
        self,
        *,
        card: SimCard | None = None,
        name: str = "comfyui",
        vram_gb: float = 10.0,
        residual_gb: float = 0.5,
        context_gb: float = 0.0,
        job_s: float = 0.1,
        faults: ComfyFaults | None = None,
    ) -> None:
        super().__init__(name, card, faults or ComfyFaults())
        self.sockets = Sockets()
        settings = Settings(name, int(vram_gb * GB), int(residual_gb * GB), job_s)
        self.queue = Queue(settings, self.card, self.faults, self.sockets, self.counters)
        self.files = Files(self.queue)
        self._context = int(context_gb * GB)
        self._number = 0

    def routes(self) -> Sequence[BaseRoute]:
        self._table: list[tuple[str, str, Endpoint]] = [
            ("GET", "/prompt", self._get_prompt),
            ("POST", "/prompt", self._post_prompt),
            ("GET", "/queue", self._get_queue),
            ("POST", "/queue", self._post_queue),
            ("GET", "/history", self._get_history),
            ("GET", "/history/{job_id}", self._get_history),
            ("POST", "/history", self._post_history),
            ("POST", "/interrupt", self._post_interrupt),
            ("POST", "/free", self._post_free),
            ("GET", "/system_stats", self._system_stats),
            ("GET", "/object_info", self._object_info),
            ("GET", "/object_info/{name}", self._object_info),
            ("GET", "/view", self._view),
            ("POST", "/upload/image", self._upload),
            ("GET", "/features", self._constant(FEATURES)),
            ("GET", "/embeddings", self._constant([])),
            ("GET", "/extensions", self._constant([])),
            ("GET", "/models", self._constant(["checkpoints", "loras", "vae"])),
            ("GET", "/models/checkpoints", self._constant(comfy_nodes.CHECKPOINTS)),
            ("GET", "/settings", self._constant({})),
            ("GET", "/users", self._constant({"storage": "server", "migrated": True})),
            ("GET", "/api/jobs", self._get_jobs),
            ("GET", "/api/jobs/{job_id}", self._get_job),
            ("POST", "/api/jobs/cancel", self._cancel_jobs),
            ("POST", "/api/jobs/{job_id}/cancel", self._cancel_job),
        ]
        twins: list[BaseRoute] = [
            Route(prefix + path, endpoint, methods=[method])
            for prefix in ("", "/api")
            for method, path, endpoint in self._table
        ]
        sockets = [WebSocketRoute(path, self._ws) for path in ("/ws", "/api/ws")]
        doors = [Route(path, self._no_socket, methods=["GET"]) for path in ("/ws", "/api/ws")]
        return [Route("/", self._page, methods=["GET"]), *twins, *doors, *sockets]

    def state(self) -> Json:
        running = self.queue.running
        return {
            "running": running.id if running else None,
            "pending": [job.id for job in self.queue.pending],
            "ended": {job: entry["status"]["status_str"] for job, entry in self.queue.history.items()},
            "models_on_card": self.queue.holding,
        }

    def not_found(self, request: Request, exc: Exception) -> Response:
        path = request.url.path.removeprefix("/api")
        return not_found(request, [method for method, known, _ in self._table if known == path])

    def server_error(self) -> Response:
        return broken().response

    def begin(self) -> None:
        if self._context:
            self.card.hold(self.name, self._context)
        self.spawn(self.queue.work())

    def wipe(self) -> None:
        self._number = 0
        self.queue.wipe()

    # ------------------------------------------------------------------------------------ jobs

    async def _get_prompt(self, request: Request) -> Response:
        return JsonAnswer(self.queue.status()["status"])

    async def _post_prompt(self, request: Request) -> Response:
        body = await fields_of(request)
        self._refuse_if_told()
        job, node_errors = self._job(body)
        self.queue.put(job)
        self.counters["prompts"] += 1
        if self.faults.prompt_reply is PromptReply.LOST:
            raise Cut
        if self.faults.prompt_reply is PromptReply.AFTER_END:
            await job.ended.wait()
        return JsonAnswer({"prompt_id": job.id, "number": job.number, "node_errors": node_errors})

    def _refuse_if_told(self) -> None:
        reply = self.faults.prompt_reply
        if reply is PromptReply.NO_ID:
            raise Answer(JsonAnswer({"prompt_id": None, "number": self._number, "node_errors": {}}))
        if reply is PromptReply.HTML:
            raise Answer(HTMLResponse("<html><body>Please sign in</body></html>"))
        if reply is PromptReply.ERROR:
            raise broken()

    def _job(self, body: Json) -> tuple[Job, Json]:
        """Raises Answer (400) with ComfyUI's reason."""
        job_id = body.get("prompt_id")
        if job_id is not None and not (isinstance(job_id, str) and _UUID.fullmatch(job_id)):
            details = (
                "prompt_id must be a UUID string in canonical lowercase hyphenated form; "
                "omit it to let the server generate one"
            )
            raise refused(comfy_nodes.error("invalid_prompt_id", "prompt_id must be a valid UUID", details), {})
        if "prompt" not in body:
            message = "No prompt provided"
            raise refused(comfy_nodes.error("no_prompt", message, message), {})
        graph, extra = body["prompt"], body.get("extra_data", {})
        if not isinstance(graph, dict) or not all(isinstance(node, dict) for node in graph.values()):
            raise broken()
        if not isinstance(extra, dict):
            raise broken()
        number = self._next_number(body)
        checked = comfy_nodes.check(graph, self.queue.inputs)
        if checked.error is not None:
            raise refused(checked.error, checked.node_errors)
        extra = dict(extra)
        if "client_id" in body:
            extra["client_id"] = body["client_id"]
        extra["create_time"] = int(time.time() * 1000)
        job = Job(number, job_id or str(uuid.uuid4()), graph, extra, checked.outputs)
        return job, checked.node_errors

    def _next_number(self, body: Json) -> float:
        if "number" in body:
            try:
                return float(body["number"])
            except (TypeError, ValueError):
                raise broken() from None
        number, self._number = self._number, self._number + 1
        return -number if body.get("front") else number

    async def _get_queue(self, request: Request) -> Response:
        running = [self.queue.running.as_json()] if self.queue.running else []
        pending = [job.as_json() for job in self.queue.pending]
        return JsonAnswer({"queue_running": running, "queue_pending": pending})

    async def _post_queue(self, request: Request) -> Response:
        body = await fields_of(request)
        if body.get("clear"):
            self.queue.clear()
        for job_id in body.get("delete", []):
            self.queue.delete(job_id)
        return empty()

    async def _get_history(self, request: Request) -> Response:
        history = self.queue.history
        job_id = request.path_params.get("job_id")
        if job_id is not None:
            return JsonAnswer({job_id: history[job_id]} if job_id in history else {})
        count, offset = request.query_params.get("max_items"), int(request.query_params.get("offset", -1))
        ids = list(history)
        if count is not None:
            first = len(ids) - int(count) if offset < 0 else offset
            ids = ids[max(first, 0) :][: int(count)]
        return JsonAnswer({key: history[key] for key in ids})

    async def _post_history(self, request: Request) -> Response:
        body = await fields_of(request)
        if body.get("clear"):
            self.queue.history.clear()
        for job_id in body.get("delete", []):
            self.queue.history.pop(job_id, None)
        return empty()

    async def _post_interrupt(self, request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except ValueError:
            body = {}  # it means whatever runs
        if not isinstance(body, dict):
            raise broken()
        self.queue.interrupt(body.get("prompt_id"))
        return empty()

    async def _post_free(self, request: Request) -> Response:
        faults = self.faults
        if faults.free_missing:
            return empty(404)
        if faults.free_hang:
            await gone(request.receive)
            return empty()
        body = await object_of(request)
        self.counters["free_calls"] += 1
        if not faults.free_ignored:
            self.spawn(self._free(bool(body.get("unload_models")), bool(body.get("free_memory"))))
        return empty()

    async def _free(self, unload: bool, forget: bool) -> None:
        await pause(self.faults.free_late_s)
        self.queue.free(unload, forget)

    # ------------------------------------------------------------------------------------ /api/jobs

    async def _get_jobs(self, request: Request) -> Response:
        wanted = [status for status in request.query_params.get("status", "").split(",") if status]
        wrong = [status for status in wanted if status not in comfy_jobs.STATUSES]
        if wrong:
            valid = ", ".join(comfy_jobs.STATUSES)
            message = f"Invalid status value(s): {', '.join(wrong)}. Valid values: {valid}"
            return JsonAnswer({"error": message}, 400)
        found = [job for job in comfy_jobs.jobs(self.queue) if not wanted or job["status"] in wanted]
        offset, limit = int(request.query_params.get("offset", 0)), request.query_params.get("limit")
        shown = found[offset:] if limit is None else found[offset : offset + int(limit)]
        pagination = {
            "offset": offset,
            "limit": None if limit is None else int(limit),
            "total": len(found),
            "has_more": offset + len(shown) < len(found),
        }
        return JsonAnswer({"jobs": shown, "pagination": pagination})

    async def _get_job(self, request: Request) -> Response:
        found = comfy_jobs.job(self.queue, request.path_params["job_id"])
        return JsonAnswer(found) if found else JsonAnswer({"error": "Job not found"}, 404)

    async def _cancel_job(self, request: Request) -> Response:
        return JsonAnswer({"cancelled": comfy_jobs.cancel(self.queue, request.path_params["job_id"])})

    async def _cancel_jobs(self, request: Request) -> Response:
        try:
            asked = json.loads(await request.body())
        except ValueError:
            return JsonAnswer({"error": "Request body must be valid JSON"}, 400)
        ids = asked.get("job_ids") if isinstance(asked, dict) else None
        if not isinstance(ids, list):
            return JsonAnswer({"error": "job_ids must be a list"}, 400)
        wrong = [job_id for job_id in ids if not (isinstance(job_id, str) and _UUID.fullmatch(job_id))]
        if wrong:
            return JsonAnswer({"error": "job_ids contains invalid id(s)", "invalid_ids": wrong}, 400)
        cancelled = [comfy_jobs.cancel(self.queue, job_id) for job_id in ids]  # all of them, not up to the first
        return JsonAnswer({"cancelled": any(cancelled)})

    # ------------------------------------------------------------------------------------ neutral

    async def _answer(self, scope: Scope, heard: Receive, send: Send) -> None:
        """The first thing it looks at is who asks."""
        headers = Headers(scope=scope)
        foreign = is_foreign(headers.get("host", ""), headers.get("origin", ""), headers.get("sec-fetch-site", ""))
        if foreign and scope["type"] == "http":
            await empty(403)(scope, heard, send)
        else:
            await super()._answer(scope, heard, send)

    def _constant(self, data: Any) -> Endpoint:
        async def answer(request: Request) -> Response:
            return JsonAnswer(data)

        return answer

    async def _page(self, request: Request) -> Response:
        return HTMLResponse("<!doctype html><title>ComfyUI (simulated)</title>")

    async def _system_stats(self, request: Request) -> Response:
        reading = self.card.read()
        device = {
            "name": f"cuda:0 {self.card.name}",
            "type": "cuda",
            "index": 0,
            "vram_total": reading.total,
            "vram_free": reading.free,
            "torch_vram_total": self.card.held_by(self.name),
            "torch_vram_free": 0,
        }
        return JsonAnswer({"system": _SYSTEM, "devices": [device]})

    async def _object_info(self, request: Request) -> Response:
        name = request.path_params.get("name")
        names = [name] if name else [*comfy_nodes.NODES]
        known = [name for name in names if name in comfy_nodes.NODES]
        return JsonAnswer({name: comfy_nodes.object_info(name) for name in known})

    async def _view(self, request: Request) -> Response:
        return await self.files.view(request)

    async def _upload(self, request: Request) -> Response:
        return await self.files.upload(request)

    async def _no_socket(self, request: Request) -> Response:
        return PlainTextResponse('No WebSocket UPGRADE hdr: None\n Can "Upgrade" only to "WebSocket".', 400)

    # ------------------------------------------------------------------------------------ the websocket

    async def _ws(self, ws: WebSocket) -> None:
        await ws.accept()
        sid = ws.query_params.get("clientId") or uuid.uuid4().hex
        messages = self.sockets.join(sid)
        await ws.send_json({"type": "status", "data": {**self.queue.status(), "sid": sid}})
        running = self.queue.running
        if running is not None and running.client == sid and self.queue.node is not None:
            await ws.send_json({"type": "executing", "data": {"node": self.queue.node}})
        writer = asyncio.ensure_future(_write(ws, messages))
        try:
            await self._listen(ws)
        except WebSocketDisconnect:
            pass
        finally:
            writer.cancel()
            self.sockets.leave(sid, messages)

    async def _listen(self, ws: WebSocket) -> None:
        while True:
            message = await ws.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text") or "{}"
            if '"feature_flags"' in text:
                await ws.send_json({"type": "feature_flags", "data": FEATURES})


async def _write(ws: WebSocket, messages: asyncio.Queue[str]) -> None:
    while True:
        await ws.send_text(await messages.get())


_SYSTEM = {
    "os": "linux",
    "ram_total": 64 * GB,
    "ram_free": 48 * GB,
    "comfyui_version": VERSION,
    "required_frontend_version": "1.49.6",
    "installed_templates_version": None,
    "required_templates_version": "0.11.44",
    "comfy_package_versions": [],
    "python_version": "3.11.7 (simulated)",
    "pytorch_version": "2.13.0+cu128",
    "embedded_python": False,
    "deploy_environment": "local-git",
    "argv": ["main.py"],
}
