"""Large heads, Expect, Host, and what a refusal leaves behind on its connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest
import structlog

from gpu_turnstile.gateway.server import Table
from tests.aio import run_async, until
from tests.gateway.bench import OK, bench, get, post

CHAT = {"model": "m"}
BODY = json.dumps(CHAT).encode()


# -------------------------------------------------------------------------------------------- large heads

LARGE = {
    "a cookie of 12 kB": ["Cookie: " + "c" * 12_000],
    "an authorization of 12 kB": ["Authorization: Bearer " + "t" * 12_000],
    "both": ["Cookie: " + "c" * 12_000, "Authorization: Bearer " + "t" * 12_000],
    "a field of 32 kB": ["X-Large: " + "x" * 32_000],
    "120 fields": [f"X-Field-{n}: {n}" for n in range(120)],
    "the same field 100 times": ["Cookie: a=1"] * 100,
}


@pytest.mark.parametrize("name", LARGE)
@run_async
async def test_a_large_head_passes_unchanged(name):
    async with bench() as b:
        b.engine.answer()
        request = post("/api/chat", CHAT, *LARGE[name])
        assert (await b.ask(request))[0] == 200
        assert b.engine.seen[0].raw == request


@pytest.mark.parametrize("size", [1, 1000])
@run_async
async def test_a_large_head_may_come_in_pieces(size):
    async with bench() as b:
        b.engine.answer()
        request = post("/api/chat", CHAT, "Cookie: " + "c" * (100 if size == 1 else 12_000))
        client = await b.client()
        for start in range(0, len(request), size):
            await client.send(request[start : start + size])
            await asyncio.sleep(0)
        assert (await client.response())[0] == 200
        assert b.engine.seen[0].raw == request


@run_async
async def test_a_query_of_20_kb_passes_unchanged():
    async with bench() as b:
        b.comfy.answer()
        target = "/view?filename=" + "q" * 20_000
        assert (await b.ask(get(target), port=b.comfy_port, method="GET"))[0] == 200
        assert b.comfy.seen[0].target == target


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (["X-Small: 1", "Cookie: " + "secret" * 12_000, "X-End: 1"], "Cookie"),
        (["Authorization: Bearer " + "secret" * 12_000], "Authorization"),
        (["Cookie: " + "secret" * 5_000, "X-Longest: " + "secret" * 8_000], "X-Longest"),
    ],
)
@run_async
async def test_a_head_above_the_limit_is_a_431_that_names_the_field_and_not_its_value(lines, word):
    with structlog.testing.capture_logs() as logs:
        async with bench() as b:
            client = await b.client()
            await client.send(get("/api/tags", *lines))
            status, headers, body = await client.response("GET")
            assert (status, headers["connection"]) == (431, "close")
            assert "x-turnstile-error" in headers
            assert word in json.loads(body)["message"]
            assert b"secret" not in body
            assert not b.engine.seen
    assert any(word in str(entry) for entry in logs)
    assert "secret" not in str(logs)


@run_async
async def test_a_target_above_the_limit_is_a_414_or_431_and_says_so():
    async with bench() as b:
        client = await b.client()
        await client.send(get("/view?x=" + "q" * 70_000))
        status, _, body = await client.response("GET")
        assert status in (414, 431)
        assert any(word in json.loads(body)["message"] for word in ("target", "URL", "request line"))


@run_async
async def test_too_many_fields_are_a_431():
    async with bench() as b:
        client = await b.client()
        await client.send(get("/api/tags", *(f"X-{n}: y" for n in range(300))))
        status, _, body = await client.response("GET")
        assert status == 431
        assert "256" in json.loads(body)["message"]


@run_async
async def test_a_head_without_end_is_refused_and_not_kept():
    async with bench() as b:
        client = await b.client()
        await client.send(b"GET / HTTP/1.1\r\nHost: g\r\n")
        try:
            for _ in range(100):
                await client.send(b"X-Field: yyyyyyyyyyyyyyyyyyyyyyy\r\n" * 100)
        except ConnectionError:
            pass
        data, _ = await client.read_all()
        assert data.startswith(b"HTTP/1.1 431 ") or not data


@run_async
async def test_a_large_head_of_an_answer_passes_and_three_cookies_stay_three_lines():
    async with bench() as b:
        lines = (
            b"X-Large: "
            + b"x" * 12_000
            + b"\r\nSet-Cookie: a=1\r\nX: y\r\nSet-Cookie: b=2; Path=/, c\r\nset-cookie: c=3"
        )
        answer = b"HTTP/1.1 200 OK\r\n" + lines + b"\r\nContent-Length: 2\r\n\r\n{}"
        b.engine.answer(answer)
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        assert await client.read_until(b"\r\n\r\n{}") == answer


@run_async
async def test_an_answers_head_of_32_kb_passes_and_one_without_end_is_a_502():
    async with bench() as b:
        b.engine.answer(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 32_000 + b"\r\nContent-Length: 2\r\n\r\n{}")
        assert (await b.ask(post("/api/chat", CHAT)))[0] == 200
        b.engine._scripts.clear()
        b.engine.answer(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000)
        assert (await b.ask(post("/api/chat", CHAT)))[0] == 502


# -------------------------------------------------------------------------------------------------- Expect


def expecting(path: str, size: int, what: str = "100-continue", *lines: str) -> bytes:
    fields = [f"Expect: {what}", "Content-Type: application/json", f"Content-Length: {size}", *lines]
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: gate", *fields, "", ""]).encode()


@pytest.mark.parametrize("what", ["100-continue", "100-Continue", "100-continue "])
@pytest.mark.parametrize("path", ["/api/chat", "/comfyui/upload/image"])
@run_async
async def test_a_client_that_waits_is_told_to_go_on_at_once(path, what):
    body = b'{"model":"m","x":"' + b"y" * 5_000_000 + b'"}'
    async with bench() as b:
        b.engine.answer()
        b.comfy.answer()
        client = await b.client()
        begin = time.monotonic()
        await client.send(expecting(path, len(body), what))
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert time.monotonic() - begin < 0.2
        await client.send(body)
        assert (await client.response())[0] == 200
        seen = (b.engine.seen + b.comfy.seen)[0]
        assert seen.body == body
        assert seen.header("expect") is None


@run_async
async def test_a_body_that_is_already_there_needs_no_word_to_go_on():
    async with bench() as b:
        b.engine.answer()
        client = await b.client()
        await client.send(expecting("/api/chat", len(BODY)) + BODY)
        assert (await client.read_until(b"\r\n\r\n{}")).endswith(OK)


@run_async
async def test_an_http_1_0_client_is_never_told_to_go_on():
    async with bench() as b:
        b.engine.answer()
        client = await b.client()
        await client.send(expecting("/api/chat", len(BODY)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await client.send(BODY)
        data, _ = await client.read_all()
        assert data.startswith(b"HTTP/1.1 200 ")


@run_async
async def test_an_engines_refusal_before_the_body_reaches_the_client():
    async with bench() as b:
        refusal = b"HTTP/1.1 413 Payload Too Large\r\nContent-Length: 8\r\nConnection: close\r\n\r\ntoo much"

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(refusal)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        b.comfy_engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = await b.client(b.comfy_port)
        await client.send(expecting("/upload/image", 5_000_000))
        data = await client.read_until(b"too much", 2)
        assert b"HTTP/1.1 413 Payload Too Large\r\n" in data
        server.close()


@run_async
async def test_an_unknown_expectation_is_a_417_and_its_body_is_no_request():
    async with bench() as b:
        b.engine.answer()
        client = await b.client()
        smuggled = post("/api/chat", CHAT)
        await client.send(expecting("/api/chat", len(smuggled), "a-miracle") + smuggled)
        data, _ = await client.read_all()
        assert data.startswith(b"HTTP/1.1 417 ")
        assert data.count(b"HTTP/1.1 ") == 1
        assert not b.engine.seen


@run_async
async def test_a_refusal_without_a_word_to_go_on_closes_the_connection():
    async with bench(body_limit=1000) as b:
        client = await b.client()
        await client.send(expecting("/api/chat", 5_000_000))
        data, reset = await client.read_all()
        assert data.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close\r\n" in data.lower()
        assert not reset


# ------------------------------------------------------------------------------------ what a refusal leaves

KEYS = {"api_keys": {"k": "me"}}
REFUSALS = {
    "too large": ({"body_limit": 10}, "/api/chat", [], 413),
    "an unknown expectation": ({}, "/api/chat", ["Expect: x"], 417),
    "no key": (KEYS, "/api/chat", [], 401),
    "no key for an upload": (KEYS, "/comfyui/upload/image", [], 401),
    "a foreign host": ({"allowed_hosts": ("other",)}, "/api/chat", [], 421),
    "a foreign origin": ({"allowed_origins": ("http://o",)}, "/api/chat", ["Origin: http://evil"], 403),
    "no engine to count tokens": ({}, "/tokenize", [], None),
    "no comfyui": ({}, "/comfyui/upload/image", [], 503),
    "no trainer": ({}, "/train/start", [], 503),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", REFUSALS)
@run_async
async def test_the_body_of_a_refused_request_is_never_taken_for_a_request(name, late, chunked):
    """Whether it comes with the head or later: the connection is closed, or the body is read and forgotten."""
    options, path, lines, status = REFUSALS[name]
    async with bench(**options) as b:
        b.engine.answer()
        if name.startswith(("no engine", "no comfyui", "no trainer")):
            b.gateway.table = Table()
        smuggled = get("/api/tags") + get("/api/version")
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(smuggled)}"
        head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: gate", *lines, framing, "", ""]).encode()
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(smuggled), smuggled) if chunked else smuggled
        client = await b.client()
        await client.send(head if late else head + body)
        if late:
            await asyncio.sleep(0.02)  # time for the answer, where the body is not waited for
            with contextlib.suppress(ConnectionError):
                await client.send(body)
        with contextlib.suppress(OSError):
            client.writer.write_eof()
        data, _ = await client.read_all()
        assert status is None or data.startswith(b"HTTP/1.1 %d " % status)
        assert data.count(b"HTTP/1.1 ") == 1
        assert all(seen.target not in ("/api/tags", "/api/version") for seen in b.engine.seen)


@run_async
async def test_a_refusal_arrives_although_the_client_is_still_sending():
    """A close with unread bytes would reset the connection and make the answer vanish."""
    async with bench(body_limit=1000) as b:
        client = await b.client()
        head = b"POST /api/chat HTTP/1.1\r\nHost: g\r\nContent-Length: 20000000\r\n\r\n"
        client.writer.write(head + b"x" * 2_000_000)
        status, headers, _ = await client.response()
        assert (status, headers["connection"]) == (413, "close")
        await asyncio.wait_for(client.read_all(), 5)


# --------------------------------------------------------------------------------------------------- Host


@run_async
async def test_the_host_reaches_the_engine_as_it_was_sent():
    async with bench() as b:
        b.engine.answer()
        await b.ask(get("/api/tags").replace(b"Host: gate", b"hOsT: Gate.local:1"), method="GET")
        assert b"hOsT: Gate.local:1\r\n" in b.engine.seen[0].raw


@pytest.mark.parametrize(
    "host", [b"", b"Host: a\r\nHost: b\r\n", b"Host: a, b\r\n", b"Host: a/b\r\n", b"Host: [::1\r\n"]
)
@run_async
async def test_a_request_without_one_good_host_is_a_400(host):
    async with bench() as b:
        client = await b.client()
        await client.send(b"GET /api/tags HTTP/1.1\r\n" + host + b"\r\n")
        data, _ = await client.read_all()
        assert data.startswith(b"HTTP/1.1 400 ")
        assert not b.engine.seen


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("gate", 200),
        ("GATE", 200),
        ("gate:11434", 200),
        ("[::1]:11434", 200),
        ("evil", 421),
        ("gate.evil", 421),
        ("evil:80", 421),
        ("gate@evil", 400),
        ("[::1", 400),
        ("[gate]", 400),
        ("gate:x", 400),
    ],
)
@run_async
async def test_with_a_list_of_hosts_only_those_come_in_and_no_spelling_crashes(host, status):
    async with bench(allowed_hosts=("gate", "::1")) as b:
        b.engine.answer()
        client = await b.client()
        await client.send(f"GET /api/tags HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        got, headers, _ = await client.response("GET")
        assert got == status
        assert (got == 200) != ("x-turnstile-error" in headers)


@run_async
async def test_a_list_of_hosts_is_not_got_round_by_an_absolute_target():
    async with bench(allowed_hosts=("gate",)) as b:
        b.engine.answer()
        for target, host in (("http://evil/api/tags", "gate"), ("http://gate/api/tags", "evil")):
            client = await b.client()
            await client.send(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert (await client.response("GET"))[0] in (400, 421)
        assert not b.engine.seen


@pytest.mark.parametrize("names", ["host", "Host, close", "content-length", "content-type, host"])
@run_async
async def test_connection_cannot_take_host_or_framing_from_the_engine(names):
    async with bench() as b:
        b.engine.answer()
        assert (await b.ask(post("/api/chat", CHAT, f"Connection: {names}")))[0] == 200
        await until(lambda: b.engine.seen)
        assert b.engine.seen[0].header("host") == "gate"
        assert b.engine.seen[0].body == BODY


@pytest.mark.parametrize("size", [1, 40, 1 << 16])
@run_async
async def test_the_request_that_follows_a_refused_one_is_answered_whole(size):
    """A refusal takes no byte more than its own request, wherever the packets end."""
    async with bench() as b:
        b.engine.answer()
        client = await b.client()
        data = post("/api/chat", raw=b"[]") + get("/api/tags") + post("/api/chat", raw=b"{") + get("/api/ps")
        for start in range(0, len(data), size):
            await client.send(data[start : start + size])
            await asyncio.sleep(0)
        await until(lambda: len(b.engine.seen) == 2)
        assert [seen.target for seen in b.engine.seen] == ["/api/tags", "/api/ps"]


@run_async
async def test_what_follows_a_refused_request_and_is_none_closes_the_connection():
    async with bench() as b:
        b.engine.answer()
        client = await b.client()
        await client.send(post("/api/chat", raw=b"[]") + b": g\r\n\r\n")
        await client.send(get("/api/tags"))
        data, _ = await client.read_all()
        assert data.count(b"HTTP/1.1 400 ") == 2
        assert not b.engine.seen
