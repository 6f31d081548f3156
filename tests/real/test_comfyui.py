"""A ComfyUI behind the gate: the real one, and the simulated one in its place.

Every test runs against the simulator; where `TURNSTILE_REAL_COMFY` is the address of a running ComfyUI
(`http://127.0.0.1:8188`), against that as well, so that the simulator cannot differ from it unnoticed. Only stock
nodes are used, no models and no custom nodes. What runs on it meanwhile is interrupted: use one of your own.

    TURNSTILE_REAL_COMFY=http://127.0.0.1:8188 .venv/bin/pytest tests/real/test_comfyui.py
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import websockets

from gpu_turnstile.sim import ComfySim, OllamaSim, SimCard, serve
from gpu_turnstile.sim.comfy_files import PIXEL
from tests.aio import run_async, until
from tests.e2e.house import House, house
from tests.e2e.test_document import MODELS, chat, of_kind

REAL = os.environ.get("TURNSTILE_REAL_COMFY", "").rstrip("/")
WAIT = 20.0  # seconds for what a slow machine may take
POLL = 0.05

both = pytest.mark.parametrize(
    "where",
    [
        "simulated",
        pytest.param(
            "real",
            marks=[
                pytest.mark.real,
                pytest.mark.skipif(not REAL, reason="TURNSTILE_REAL_COMFY is not the address of a ComfyUI"),
            ],
        ),
    ],
)


# ---------------------------------------------------------------------------------------------- what the tests share


class Graphs:
    """Graphs of stock nodes that were never run before."""

    def __init__(self) -> None:
        self._fresh = itertools.count(random.SystemRandom().randrange(1 << 23))

    def quick(self) -> dict[str, Any]:
        return self._chain(0)

    def some(self) -> dict[str, Any]:
        """Its job takes a moment: half a second on two cores."""
        return self._chain(10)

    def many(self) -> dict[str, Any]:
        """Its job is there for as long as a test needs one, and is interrupted between two nodes: some seconds."""
        return self._chain(100)

    def broken(self, picture: str) -> dict[str, Any]:
        """It fails when it runs."""
        return {"8": {"class_type": "LoadImage", "inputs": {"image": picture}}, "9": _preview("8")}

    def _chain(self, length: int) -> dict[str, Any]:
        color = next(self._fresh)
        inputs = {"width": 1024, "height": 1024, "batch_size": 1, "color": color}
        graph: dict[str, Any] = {"1": {"class_type": "EmptyImage", "inputs": inputs}}
        source = "1"
        for n in range(length):
            size = {"width": 1000 + n % 24, "height": 1024}
            scale = {"image": [source, 0], "upscale_method": "lanczos", "crop": "disabled", **size}
            source = f"s{n}"
            graph[source] = {"class_type": "ImageScale", "inputs": scale}
        return {**graph, "9": _preview(source)}


def _preview(source: str) -> dict[str, Any]:
    return {"class_type": "PreviewImage", "inputs": {"images": [source, 0]}}


class Studio:
    """A gate with an Ollama and a ComfyUI."""

    def __init__(self, h: House, url: str) -> None:
        self.h = h
        self.http = h.http
        self.url = url
        self.graphs = Graphs()

    @property
    def gate(self) -> str:
        return self.h.comfy_gate

    async def post(self, graph: dict[str, Any], base: str | None = None, **more: Any) -> str:
        answer = await self.http.post(f"{base or self.gate}/prompt", json={"prompt": graph, **more}, timeout=WAIT)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["prompt_id"])

    async def running(self, job: str) -> None:
        """Return when ComfyUI works on it."""
        async with asyncio.timeout(WAIT):
            while (await self.queue())[0] != [job]:  # noqa: ASYNC110 - another process is asked
                await asyncio.sleep(POLL)

    async def queue(self) -> tuple[list[str], list[str]]:
        listed = (await self.http.get(f"{self.url}/queue")).json()
        return [item[1] for item in listed["queue_running"]], [item[1] for item in listed["queue_pending"]]

    async def ended(self, count: int = 1) -> list[tuple[str, str]]:
        """The jobs the gate says have ended, and how."""
        await until(lambda: len(of_kind(self.h, "job_end")) >= count, WAIT)
        return [(fields["prompt_id"], fields["end"]) for fields in of_kind(self.h, "job_end")]


@contextlib.asynccontextmanager
async def studio(tmp_path, where: str) -> AsyncIterator[Studio]:
    card = SimCard(tmp_path / "card.json")
    ollama = OllamaSim(card=card, models=MODELS, load_s=0.01, answer_tokens=4)
    async with contextlib.AsyncExitStack() as stack:
        url = REAL
        if where == "simulated":
            url = await stack.enter_async_context(serve(ComfySim(card=card, job_s=0.01)))
        settings = {"history_poll_interval": POLL, "turnstile_bypass_poll": POLL, "unload_timeout": WAIT}
        h = await stack.enter_async_context(house(tmp_path, card=card, ollama=ollama, comfy_url=url, **settings))
        yield Studio(h, url)


# ------------------------------------------------------------------------------------------------ through the gate


@both
@run_async
async def test_a_job_is_followed_to_its_end_and_a_chat_waits_for_it(tmp_path, where):
    async with studio(tmp_path, where) as s:
        job = await s.post(s.graphs.some())
        assert (await chat(s.h)).status_code == 200
        assert await s.ended() == [(job, "success")]
        assert of_kind(s.h, "evicted")[0]["detail"].startswith("/free was accepted")


@both
@run_async
async def test_jobs_that_come_at_once_run_one_after_the_other(tmp_path, where):
    async with studio(tmp_path, where) as s:
        jobs = await asyncio.gather(*(s.post(s.graphs.some()) for _ in range(4)))
        assert sorted(await s.ended(4)) == sorted((job, "success") for job in jobs)


@both
@run_async
async def test_a_job_that_fails_ends_as_error(tmp_path, where):
    async with studio(tmp_path, where) as s:
        files = {"image": ("turnstile-broken.png", b"no picture", "image/png")}
        answer = await s.http.post(f"{s.gate}/upload/image", files=files, data={"overwrite": "true"})
        assert answer.json() == {"name": "turnstile-broken.png", "subfolder": "", "type": "input"}
        job = await s.post(s.graphs.broken("turnstile-broken.png"))
        assert await s.ended() == [(job, "error")]


@both
@pytest.mark.parametrize("named", [False, True], ids=["whatever_runs", "by_its_id"])
@run_async
async def test_a_job_that_is_interrupted_gives_the_card_back(tmp_path, where, named):
    async with studio(tmp_path, where) as s:
        job = await s.post(s.graphs.many())
        await s.running(job)
        body = {"prompt_id": job} if named else None
        assert (await s.http.post(f"{s.gate}/interrupt", json=body)).status_code == 200
        assert await s.ended() == [(job, "interrupted")]
        assert (await chat(s.h)).status_code == 200


@both
@run_async
async def test_a_job_past_the_gate_is_waited_for_and_one_of_ours_behind_it_can_be_deleted(tmp_path, where):
    async with studio(tmp_path, where) as s:
        direct = await s.post(s.graphs.many(), s.url)
        await s.running(direct)
        await until(lambda: of_kind(s.h, "job"), WAIT)
        assert of_kind(s.h, "job")[0]["prompt_id"] == direct
        talk = asyncio.create_task(chat(s.h))
        await until(lambda: s.h.view.waiting, WAIT)
        behind = await s.post(s.graphs.quick(), s.url)
        assert (await s.http.post(f"{s.gate}/queue", json={"delete": [behind]})).status_code == 200
        assert await s.queue() == ([direct], [])
        assert not talk.done()
        await s.http.post(f"{s.gate}/interrupt")
        assert (await talk).status_code == 200
        assert await s.ended() == [(direct, "interrupted")]


@both
@run_async
async def test_a_page_sees_its_job_on_its_websocket_and_others_only_that_there_is_one(tmp_path, where):
    async with studio(tmp_path, where) as s:
        base = s.gate.replace("http", "ws")
        async with websockets.connect(f"{base}/ws?clientId=check-a") as mine, websockets.connect(f"{base}/ws") as other:
            first = json.loads(await mine.recv())
            assert (first["type"], first["data"]["sid"]) == ("status", "check-a")
            assert json.loads(await other.recv())["type"] == "status"
            job = await s.post(s.graphs.quick(), client_id="check-a")
            await s.ended()
            heard = await _heard(mine)
            assert [kind for kind, _ in heard if kind not in ("status", "progress_state")] == [
                "execution_start",
                "execution_cached",
                "executing",
                "executing",
                "executed",
                "execution_success",
                "executing",
            ]
            assert heard[-1] == ("executing", {"node": None, "prompt_id": job})
            assert {kind for kind, _ in await _heard(other)} == {"status"}


async def _heard(socket: websockets.ClientConnection) -> list[tuple[str, Any]]:
    """What has come, in order."""
    messages = []
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0.3):
                messages.append(json.loads(await socket.recv()))
    return [(message["type"], message["data"]) for message in messages]


@both
@run_async
async def test_a_picture_is_uploaded_and_seen_through_the_gate(tmp_path, where):
    async with studio(tmp_path, where) as s:
        files = {"image": ("turnstile-check.png", PIXEL, "image/png")}
        await s.http.post(f"{s.gate}/upload/image", files=files, data={"overwrite": "1"})
        seen = await s.http.get(f"{s.gate}/view", params={"filename": "turnstile-check.png", "type": "input"})
        assert (seen.status_code, seen.headers["content-type"], seen.content) == (200, "image/png", PIXEL)
        assert not s.h.view.leases


@both
@run_async
async def test_a_graph_with_one_good_output_runs_and_tells_what_was_wrong_with_the_other(tmp_path, where):
    async with studio(tmp_path, where) as s:
        bad = {"7": _preview("8"), "8": {"class_type": "LoadImage", "inputs": {"image": "not-there.png"}}}
        answer = await s.http.post(f"{s.gate}/prompt", json={"prompt": {**s.graphs.quick(), **bad}})
        assert answer.status_code == 200
        (error,) = answer.json()["node_errors"]["8"]["errors"]
        assert error["type"] == "custom_validation_failed"
        assert await s.ended() == [(answer.json()["prompt_id"], "success")]


# ------------------------------------------------------------------------------- what both answer, word for word

NO_OUTPUTS = {
    "error": {"type": "prompt_no_outputs", "message": "Prompt has no outputs", "details": "", "extra_info": {}},
    "node_errors": {},
}
TROUBLE = b"500 Internal Server Error\n\nServer got itself in trouble"
JSON, TEXT, BYTES = "application/json", "text/plain", "application/octet-stream"
QUEUE = {"queue_running": [], "queue_pending": []}

ANSWERS: list[tuple[str, str, bytes, int, str | None, object]] = [
    ("GET", "/queue", b"", 200, JSON, QUEUE),
    ("GET", "/api/queue", b"", 200, JSON, QUEUE),
    ("GET", "/prompt", b"", 200, JSON, {"exec_info": {"queue_remaining": 0}}),
    ("GET", "/history/nobody", b"", 200, JSON, {}),
    ("GET", "/object_info/Nobody", b"", 200, JSON, {}),
    ("GET", "/nosuch", b"", 404, BYTES, b""),
    ("GET", "/view", b"", 404, None, b""),
    ("GET", "/view?filename=../x", b"", 400, None, b""),
    ("GET", "/view?filename=no.png", b"", 404, None, b""),
    ("GET", "/free", b"", 404, BYTES, b""),
    ("OPTIONS", "/prompt", b"", 200, None, b""),
    ("PUT", "/prompt", b"", 405, TEXT, b"405: Method Not Allowed"),
    ("POST", "/nosuch", b"", 405, TEXT, b"405: Method Not Allowed"),
    ("POST", "/upload/image", b"zzz", 400, None, b""),
    ("POST", "/queue", b"{}", 200, None, b""),
    ("POST", "/queue", b"[]", 200, None, b""),
    ("POST", "/queue", b"", 500, TEXT, TROUBLE),
    ("POST", "/history", b'{"delete": ["nobody"]}', 200, None, b""),
    ("POST", "/interrupt", b"", 200, None, b""),
    ("POST", "/interrupt", b"{", 200, None, b""),
    ("POST", "/interrupt", b"[]", 500, TEXT, TROUBLE),
    ("POST", "/free", b"{}", 200, None, b""),
    ("POST", "/free", b"", 500, TEXT, TROUBLE),
    ("POST", "/prompt", b'{"prompt": {}}', 400, JSON, NO_OUTPUTS),
    ("POST", "/prompt", b"{", 500, TEXT, TROUBLE),
    ("POST", "/prompt", b"null", 500, TEXT, TROUBLE),
]


@both
@pytest.mark.parametrize("through", ["gate", "directly"])
@run_async
async def test_both_give_these_answers_with_and_without_the_gate(tmp_path, where, through):
    async with studio(tmp_path, where) as s:
        base = s.gate if through == "gate" else s.url
        for method, path, body, status, kind, said in ANSWERS:
            answer = await s.http.request(method, base + path, content=body)
            content = answer.json() if isinstance(said, dict) else answer.content
            found = (answer.status_code, answer.headers.get("content-type", "").split(";")[0] or None, content)
            assert found == (status, kind, said), (method, path, body)


@both
@run_async
async def test_a_page_of_another_origin_is_turned_away(tmp_path, where):
    async with studio(tmp_path, where) as s:
        own = httpx.URL(s.gate)
        for origin, status in (("http://evil.example", 403), (f"http://{own.host}:{own.port}", 200), ("null", 200)):
            answer = await s.http.get(f"{s.gate}/queue", headers={"Origin": origin})
            assert answer.status_code == status, origin
