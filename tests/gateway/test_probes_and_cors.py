"""What clients and browsers ask before they ask: probes, token counts, pre-flights. None of it wakes an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest

from gpu_turnstile.core.routes import Directory
from gpu_turnstile.gateway.server import Table
from tests.aio import run_async, until
from tests.gateway.bench import OK, SSE, Bench, bench, chunk, get, post

SOON = 0.15  # seconds; a tenth is what people are promised
ORIGIN = "http://ui.local"
ALLOW = "access-control-allow-origin"
CHAT = {"model": "m", "messages": []}
EXTERNAL, ASLEEP, HELD = "an Ollama that somebody else runs", "presets and nothing on the card", "ComfyUI has the card"
SITUATIONS = [EXTERNAL, ASLEEP, HELD]


@contextlib.asynccontextmanager
async def situation(b: Bench, name: str):
    """Put the bench into one of the situations for the time of the block."""
    b.control.answer()
    if name == ASLEEP:
        b.gateway.table = Table(directory=Directory(names=("ollama",)), comfyui="comfyui", listing_is_ours=True)
        b.engine.answer()
        yield
        return
    b.engine.answer(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n{"version":"0.9"}')
    if name == EXTERNAL:
        yield
        return
    go = asyncio.Event()

    async def hold(connection, seen):
        await go.wait()
        await connection.send(b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n")

    b.comfy.script(hold)
    image = await b.client(b.comfy_port)
    await image.send(post("/prompt", {}))
    await until(lambda: b.comfy.seen)
    yield
    go.set()
    await image.response()


async def timed(b: Bench, request: bytes, method: str) -> tuple[int, dict[str, str], bytes]:
    begin = time.monotonic()
    answer = await b.ask(request, method=method)
    assert time.monotonic() - begin < SOON
    return answer


# ------------------------------------------------------------------------------------------------- probes


@pytest.mark.parametrize("where", SITUATIONS)
@pytest.mark.parametrize(
    ("method", "path"), [(m, p) for p in ("/", "/api/hello", "/api/version") for m in ("GET", "HEAD")]
)
@run_async
async def test_a_probe_finds_somebody_at_home_and_touches_no_card(where, method, path):
    async with bench() as b:
        if path == "/api/hello":
            b.engine.answer(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")  # no engine knows it
        async with situation(b, where):
            released = b.ollama_engine.released
            client = await b.client()
            begin = time.monotonic()
            await client.send(get(path, method=method))
            status, _, body = await client.response(method)
            assert time.monotonic() - begin < SOON
            assert status == 200
            assert (not body) == (method == "HEAD")
            if path == "/api/version" and body:
                assert isinstance(json.loads(body)["version"], str)
            await client.send(get("/", method=method))  # the connection is still good
            assert (await client.response(method))[0] in (200, 404)
            assert not b.view.waiting
            assert len(b.view.leases) == (where == HELD)
            assert b.ollama_engine.released == released


@pytest.mark.parametrize("where", SITUATIONS)
@run_async
async def test_the_list_of_models_wakes_nobody(where):
    async with bench() as b, situation(b, where):
        assert (await timed(b, get("/v1/models"), "GET"))[0] == 200
        assert bool(b.control.seen) == (where == ASLEEP)
        assert not b.view.waiting


@run_async
async def test_a_probe_for_an_engine_that_is_down_does_not_hang():
    async with bench(backoff_initial=5.0) as b:
        await b.engine.stop()
        for method in ("HEAD", "GET"):
            assert (await timed(b, get("/", method=method), method))[0] == 200


@run_async
async def test_a_probe_with_a_query_is_still_a_probe():
    async with bench() as b, situation(b, ASLEEP):
        assert (await timed(b, get("/?x=1"), "GET"))[0] == 200
        request = get("/", "Content-Length: 2") + b"{}"
        assert (await timed(b, request, "GET"))[0] == 200


@run_async
async def test_a_read_that_no_engine_can_answer_is_a_503_that_says_what_would_help():
    async with bench() as b, situation(b, ASLEEP):
        status, headers, _ = await timed(b, get("/props"), "GET")
        assert (status, headers["x-turnstile-error"]) == (503, "service_inactive")


# ------------------------------------------------------------------------------------------ counting tokens

COUNT = "/v1/messages/count_tokens?beta=true"


@pytest.mark.parametrize("where", [ASLEEP, HELD])
@run_async
async def test_tokens_are_not_counted_by_waking_an_engine(where):
    async with bench() as b, situation(b, where):
        status, headers, body = await timed(b, post(COUNT, CHAT, "anthropic-version: 2023-06-01"), "POST")
        assert status in (404, 501)
        assert "x-turnstile-error" in headers
        assert json.loads(body)["type"] == "error"
        assert not b.engine.seen
        assert not b.view.waiting


@run_async
async def test_tokens_are_counted_by_the_engine_that_is_on_the_card():
    async with bench() as b:
        b.engine.answer()
        assert (await b.ask(post("/v1/messages", CHAT)))[0] == 200
        request = post(COUNT, CHAT, "anthropic-version: 2023-06-01")
        assert (await b.ask(request))[0] == 200
        assert b.engine.seen[1].raw == request


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template", "/v1/responses/input_tokens", "/slots/0?action=save"])
@run_async
async def test_what_only_a_loaded_model_can_tell_is_not_asked_of_one_that_is_not_loaded(path):
    async with bench() as b, situation(b, HELD):
        status, headers, _ = await timed(b, post(path, {}), "POST")
        assert status in (404, 501, 503)
        assert "x-turnstile-error" in headers
        assert not b.engine.seen


@run_async
async def test_a_message_reaches_the_engine_with_its_query_and_its_fields():
    async with bench() as b:
        b.engine.answer()
        fields = ["anthropic-version: 2023-06-01", "x-api-key: k", "anthropic-beta: a,b"]
        request = post("/v1/messages?beta=true", CHAT, *fields)
        assert (await b.ask(request))[0] == 200
        assert b.engine.seen[0].raw == request


@run_async
async def test_a_message_waits_for_the_card_or_is_told_when_to_come_back():
    async with bench(llm_wait=0) as b, situation(b, HELD):
        status, headers, body = await b.ask(post("/v1/messages?beta=true", CHAT))
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert json.loads(body)["error"]["type"] == "overloaded_error"


# --------------------------------------------------------------------------------------------------- CORS

ASKED = "x-stainless-os, authorization, content-type"


def preflight(path: str, asked: str = ASKED) -> bytes:
    lines = [f"Origin: {ORIGIN}", "Access-Control-Request-Method: POST"]
    return get(path, *lines, *([f"Access-Control-Request-Headers: {asked}"] if asked else []), method="OPTIONS")


def allowed(raw: bytes) -> list[str]:
    """The values of every Access-Control-Allow-Origin line in a head."""
    lines = raw.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return [line.partition(":")[2].strip() for line in lines if line.lower().startswith(ALLOW)]


def fine(values: list[str]) -> bool:
    return len(values) == 1 and values[0] in ("*", ORIGIN)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/completion"])
@run_async
async def test_a_preflight_for_an_engine_that_sleeps_is_answered_by_the_gate(path):
    async with bench() as b, situation(b, ASLEEP):
        client = await b.client()
        begin = time.monotonic()
        await client.send(preflight(path))
        raw = await client.read_until(b"\r\n\r\n")
        assert time.monotonic() - begin < SOON
        assert raw.startswith((b"HTTP/1.1 204 ", b"HTTP/1.1 200 "))
        assert fine(allowed(raw))
        fields = dict(line.lower().split(": ", 1) for line in raw.decode().split("\r\n")[1:] if ": " in line)
        assert "post" in fields["access-control-allow-methods"]
        assert {h.strip() for h in ASKED.split(",")} <= {
            h.strip() for h in fields["access-control-allow-headers"].split(",")
        }
        assert not b.view.waiting
        assert not b.view.leases
        await client.send(get("/"))
        assert (await client.response("GET"))[0] == 200


@run_async
async def test_a_preflight_for_a_comfyui_that_is_not_there_is_answered_by_the_gate():
    async with bench() as b:
        b.gateway.table = Table()
        for request, port in ((preflight("/comfyui/prompt"), b.port), (preflight("/prompt"), b.comfy_port)):
            client = await b.client(port)
            await client.send(request)
            raw = await client.read_until(b"\r\n\r\n")
            assert raw.startswith((b"HTTP/1.1 204 ", b"HTTP/1.1 200 "))
            assert fine(allowed(raw))


@run_async
async def test_a_preflight_for_an_engine_that_cannot_be_reached_is_answered_by_the_gate():
    async with bench(backoff_initial=5.0) as b:
        await b.engine.stop()
        client = await b.client()
        begin = time.monotonic()
        await client.send(preflight("/api/chat"))
        raw = await client.read_until(b"\r\n\r\n")
        assert time.monotonic() - begin < SOON
        assert fine(allowed(raw))


@run_async
async def test_a_preflight_without_asked_headers_is_answered_too():
    async with bench() as b, situation(b, ASLEEP):
        client = await b.client()
        await client.send(preflight("/api/chat", ""))
        raw = await client.read_until(b"\r\n\r\n")
        assert fine(allowed(raw))


@pytest.mark.parametrize("where", [EXTERNAL, HELD])
@run_async
async def test_the_engines_own_answer_to_a_preflight_passes_unchanged(where):
    async with bench() as b:
        answer = (
            b"HTTP/1.1 204 No Content\r\nAccess-Control-Allow-Origin: http://ui.local\r\n"
            b"Access-Control-Allow-Methods: POST\r\n\r\n"
        )
        b.engine.answer(answer)
        b.engine.answer(answer)
        async with situation(b, where):
            client = await b.client()
            await client.send(preflight("/v1/chat/completions"))
            assert await client.read_until(b"\r\n\r\n") == answer


def cors_engine(streams: bool = False):
    """An engine that always sends the field: empty without an Origin, else an echo of it."""

    async def script(connection, seen):
        field = b"Access-Control-Allow-Origin: " + (seen.header("origin") or "").encode() + b"\r\n\r\n"
        body = chunk(b"data: 1\n\n") + b"0\r\n\r\n" if streams else b""
        await connection.send((SSE if streams else OK[:-2]).replace(b"\r\n\r\n", b"\r\n" + field) + (body or b"{}"))

    return script


@pytest.mark.parametrize("streams", [False, True])
@run_async
async def test_the_gate_adds_nothing_to_an_engines_own_field(streams):
    async with bench() as b:
        b.engine.script(cors_engine(streams))
        client = await b.client()
        await client.send(post("/v1/chat/completions", CHAT, f"Origin: {ORIGIN}"))
        assert allowed(await client.read_until(b"\r\n\r\n")) == [ORIGIN]


@pytest.mark.parametrize("streams", [False, True])
@run_async
async def test_an_empty_field_of_an_engine_reaches_no_client(streams):
    """Strict clients refuse it; it says nothing."""
    async with bench() as b:
        b.engine.script(cors_engine(streams))
        client = await b.client()
        await client.send(post("/v1/chat/completions", CHAT))
        assert allowed(await client.read_until(b"\r\n\r\n")) == []


REFUSED = {
    "a body that is no JSON": (EXTERNAL, "/v1/chat/completions", b"[", 400),
    "no engine to count": (ASLEEP, "/tokenize", b"{}", None),
    "a reader's engine that sleeps": (ASLEEP, "/train/start", b"{}", 503),
    "the card is taken": (HELD, "/v1/chat/completions", b'{"model":"m"}', 503),
}


@pytest.mark.parametrize("name", REFUSED)
@run_async
async def test_the_gates_own_errors_can_be_read_by_a_page(name):
    where, path, body, status = REFUSED[name]
    async with bench(llm_wait=0) as b, situation(b, where):
        for lines, values in (([f"Origin: {ORIGIN}"], 1), ([], 0)):
            client = await b.client()
            await client.send(post(path, None, *lines, raw=body))
            raw = await client.read_until(b"\r\n\r\n")
            assert status is None or raw.startswith(b"HTTP/1.1 %d " % status)
            assert b"X-Turnstile-Error: " in raw
            assert len(allowed(raw)) == values
            assert fine(allowed(raw)) or not values


@run_async
async def test_the_code_of_an_error_can_be_read_by_a_page():
    """Without Access-Control-Expose-Headers a script sees neither the code nor when to come back."""
    async with bench(llm_wait=0) as b, situation(b, HELD):
        _, headers, _ = await b.ask(post("/v1/chat/completions", CHAT, f"Origin: {ORIGIN}"))
        exposed = headers["access-control-expose-headers"].lower()
        assert "x-turnstile-error" in exposed
        assert "retry-after" in exposed


@run_async
async def test_with_a_list_of_origins_a_foreign_page_gets_no_permission():
    async with bench(allowed_origins=("http://other",)) as b, situation(b, ASLEEP):
        client = await b.client()
        await client.send(preflight("/api/chat"))
        raw = await client.read_until(b"\r\n\r\n")
        assert raw.startswith(b"HTTP/1.1 403 ")
        assert allowed(raw) == []


@run_async
async def test_options_that_is_no_preflight_is_a_read():
    async with bench() as b:
        async with situation(b, ASLEEP):
            assert (await b.ask(get("/v1/chat/completions", method="OPTIONS"), method="OPTIONS"))[0] == 503
        async with situation(b, EXTERNAL):
            b.gateway.table = Table(directory=Directory(external="ollama"), external="ollama")
            assert (await b.ask(get("*", method="OPTIONS"), method="OPTIONS"))[0] == 200
            assert b.engine.seen[-1].target == "*"
