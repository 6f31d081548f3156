"""What the gate refuses: clients that are too slow, too many or too big, foreign pages, and clients without a key.

Every limit is a setting. A client that meets one gets a JSON error that says which, and a closed connection where the
rest of what it sends cannot be read any more.
"""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.aio import run_async, until
from tests.gateway.bench import OK, SSE, Bench, RawClient, bench, chunk, get, post

CHAT = {"model": "m", "messages": []}
LIMIT = 0.1  # seconds, for every limit that is a time
LATE = 0.5  # by then a limit of LIMIT has struck


def parse(data: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}, body


async def refused(client: RawClient, *status: int, seconds: float = 5.0) -> tuple[dict[str, str], dict]:
    """The client's one answer: an error of that status, JSON, in the gate's own name, and then the end."""
    data, _ = await client.read_all(seconds)
    client.close()
    code, headers, body = parse(data)
    assert code in status, data
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["x-turnstile-error"]
    assert int(headers["content-length"]) == len(body), "one answer, not two"
    return headers, json.loads(body)


# ------------------------------------------------------------------------------------------- slow clients


@pytest.mark.parametrize("part", [b"P", b"POST /api/chat HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: g\r\nX: y\r\n"])
@run_async
async def test_a_head_that_does_not_come_to_its_end_is_a_408(part):
    async with bench(head_timeout=LIMIT) as b:
        client = await b.client()
        began = time.monotonic()
        await client.send(part)
        await refused(client, 408, seconds=2)
        assert LIMIT <= time.monotonic() - began < LATE
        await until(lambda: not b.gateway.connections)
        assert not b.engine.connections


@run_async
async def test_a_head_sent_byte_by_byte_does_not_get_more_time():
    async with bench(head_timeout=LIMIT) as b:
        client = await b.client()

        async def drip():
            for byte in get("/api/tags", *(f"X-{n}: y" for n in range(200))):
                await client.send(bytes([byte]))
                await asyncio.sleep(LIMIT / 20)

        dripping = asyncio.ensure_future(drip())
        began = time.monotonic()
        await refused(client, 408, seconds=2)
        assert time.monotonic() - began < LATE
        dripping.cancel()
        await asyncio.wait([dripping])


@run_async
async def test_the_head_of_a_later_request_has_the_same_limit():
    async with bench(head_timeout=LIMIT, idle_timeout=30) as b:
        b.engine.answer()
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        assert (await client.response())[0] == 200
        await client.send(b"POST /api")
        await refused(client, 408, seconds=2)


@run_async
async def test_many_slow_heads_keep_nobody_out():
    async with bench(head_timeout=LIMIT) as b:
        b.engine.answer()
        slow = [await b.client() for _ in range(100)]
        for client in slow:
            await client.send(b"POST /api/chat HTTP/1.1\r\nHost: g\r\nX-")
        assert (await b.ask(post("/api/chat", CHAT)))[0] == 200
        for client in slow:
            await refused(client, 408, seconds=2)


@pytest.mark.parametrize("before", ["nothing", "a request"])
@run_async
async def test_an_idle_connection_is_closed_without_a_word(before):
    async with bench(idle_timeout=LIMIT, head_timeout=30) as b:
        b.engine.answer()
        client = await b.client()
        if before == "a request":
            await client.send(post("/api/chat", CHAT))
            assert (await client.response())[0] == 200
        began = time.monotonic()
        assert await client.read_all(2) == (b"", False)
        assert LIMIT * 0.9 <= time.monotonic() - began < LATE


@run_async
async def test_a_connection_that_is_used_is_not_idle():
    async with bench(idle_timeout=LIMIT, head_timeout=LIMIT) as b:

        async def slow(connection, seen):
            await asyncio.sleep(LIMIT * 3)
            await connection.send(OK)

        b.engine.script(slow)
        client = await b.client()
        for _ in range(2):
            await client.send(post("/api/chat", CHAT))
            assert (await client.response())[0] == 200


WORK = b"POST /api/chat HTTP/1.1\r\nHost: g\r\n"
UPLOAD = b"POST /api/blobs/sha256:0 HTTP/1.1\r\nHost: g\r\n"
BODIES = [
    b"Content-Length: 100\r\n\r\n",
    b'Content-Length: 100\r\n\r\n{"model":',
    b"Transfer-Encoding: chunked\r\n\r\n5\r\n{ ",
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("head", [WORK, UPLOAD], ids=["work", "upload"])
@run_async
async def test_a_body_that_stops_coming_is_a_408_and_ends_its_engines_request(head, body):
    async with bench(body_timeout=LIMIT) as b:
        b.engine.answer()
        client = await b.client()
        began = time.monotonic()
        await client.send(head + body)
        await refused(client, 408, seconds=2)
        assert LIMIT <= time.monotonic() - began < LATE
        await until(lambda: not b.gateway.connections and b.engine.open == 0)
        assert not b.engine.seen


@pytest.mark.parametrize("head", [WORK, UPLOAD], ids=["work", "upload"])
@run_async
async def test_a_slow_body_that_goes_on_is_not_too_slow(head):
    async with bench(body_timeout=LIMIT) as b:
        b.engine.answer()
        client = await b.client()
        body = b'{"model": "m"}'
        await client.send(head + b"Content-Length: %d\r\n\r\n" % len(body))
        for byte in body:
            await asyncio.sleep(LIMIT / 3)
            await client.send(bytes([byte]))
        assert (await client.response())[0] == 200
        assert b.engine.seen[0].body == body


@run_async
async def test_a_body_the_engine_holds_up_is_not_the_clients_fault():
    async with bench(body_timeout=LIMIT) as b:
        size = 48 << 20

        async def late(reader, writer):
            writer.transport.pause_reading()
            await asyncio.sleep(LIMIT * 4)
            writer.transport.resume_reading()
            await reader.readuntil(b"\r\n\r\n")
            left = size
            while left and (piece := await reader.read(1 << 20)):
                left -= len(piece)
            writer.write(OK)

        server = await asyncio.start_server(late, "127.0.0.1", 0)
        b.ollama_engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = await b.client()
        await client.send(UPLOAD + b"Content-Length: %d\r\n\r\n" % size)
        await client.send(b"z" * size)
        assert (await client.response())[0] == 200
        server.close()


@run_async
async def test_a_client_that_may_go_on_gets_its_whole_time_again():
    """A look at the clock between the engine's first read and the client's next byte ended the upload."""
    async with bench(body_timeout=5.0) as b:
        b.engine.answer(OK)
        client = await b.client()
        await client.send(UPLOAD + b"Content-Length: 4\r\n\r\nab")
        (connection,) = await until(lambda: [c for c in b.gateway.connections if c.exchange is not None])
        connection.pause("upload")
        connection._since -= 20.0  # so long it could not go on
        connection.resume("upload")
        connection.check(time.monotonic())
        await client.send(b"cd")
        assert (await client.response())[0] == 200


@run_async
async def test_a_client_that_reads_slowly_has_all_the_time_it_needs():
    async with bench(body_timeout=LIMIT, idle_timeout=LIMIT, head_timeout=LIMIT) as b:
        body = b"x" * (16 << 20)
        b.engine.answer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        client = await b.client()
        client.writer.transport.pause_reading()
        await client.send(post("/api/chat", CHAT))
        await asyncio.sleep(LIMIT * 4)
        client.writer.transport.resume_reading()
        await client.reader.readuntil(b"\r\n\r\n")
        assert await client.reader.readexactly(len(body)) == body


# ------------------------------------------------------------------------------------------------ too many


@run_async
async def test_connections_above_the_limit_are_refused_and_the_others_are_served():
    async with bench(max_connections=3) as b:
        b.engine.answer()
        clients = [await b.client() for _ in range(3)]
        await until(lambda: len(b.gateway.connections) == 3)
        await refused(await b.client(), 503)
        for client in clients:
            await client.send(post("/api/chat", CHAT))
            assert (await client.response())[0] == 200
        clients[0].close()
        await until(lambda: len(b.gateway.connections) == 2)
        assert (await b.ask(post("/api/chat", CHAT)))[0] == 200


@run_async
async def test_a_refused_connections_request_is_not_served_even_if_it_came_along():
    async with bench(max_connections=1) as b:
        b.engine.answer()
        first = await b.client()
        await until(lambda: b.gateway.connections)
        second = await b.client()
        await second.send(post("/api/chat", CHAT))
        await refused(second, 503)
        assert not b.engine.seen
        first.close()


# ------------------------------------------------------------------------------------------------- too big

GENEROUS = {
    "a cookie": get("/api/tags", "Cookie: " + "c" * 12_000),
    "a token": get("/api/tags", "Authorization: Bearer " + "t" * 12_000),
    "a query": get("/api/tags?q=" + "x" * 20_000),
    "many fields": get("/api/tags", *(f"X-Field-{n}: {n}" for n in range(120))),
    "all of 32 kB": get("/api/tags", *(f"X-{n}: {'y' * 3000}" for n in range(10))),
}


@pytest.mark.parametrize("case", GENEROUS)
@run_async
async def test_large_heads_within_the_limits_pass_unchanged(case):
    async with bench() as b:
        b.engine.answer()
        assert (await b.ask(GENEROUS[case], method="GET"))[0] == 200
        assert b.engine.seen[0].raw == GENEROUS[case]


@run_async
async def test_a_large_head_of_an_answer_passes_unchanged():
    async with bench() as b:
        cookies = b"".join(b"Set-Cookie: c%d=%s\r\n" % (n, b"v" * 4000) for n in range(3))
        answer = b"HTTP/1.1 200 OK\r\nX-Big: " + b"y" * 12_000 + b"\r\n" + cookies + b"Content-Length: 2\r\n\r\nok"
        b.engine.answer(answer)
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        assert await client.read_until(b"\r\n\r\nok") == answer


TOO_BIG = {
    "a field": (get("/api/tags", "Cookie: " + "c" * 70_000), {}, (431,)),
    "a target": (get("/api/tags?" + "x" * 70_000), {}, (431, 414)),
    "too many fields": (get("/api/tags", *("X: y" for _ in range(300))), {}, (431,)),
    "a smaller limit": (get("/api/tags", "Cookie: " + "c" * 2000), {"head_limit": 1000}, (431,)),
    "fewer fields": (get("/api/tags", *("X: y" for _ in range(10))), {"max_headers": 5}, (431,)),
    "an endless head": (b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000, {}, (431,)),
    "an endless line": (b"G" * 100_000, {}, (431, 414, 400)),
}


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("case", TOO_BIG)
@run_async
async def test_a_head_above_a_limit_is_refused_in_words_and_reaches_nobody(case, apart):
    request, options, status = TOO_BIG[case]
    async with bench(**options) as b:
        client = await b.client()
        if apart:
            for start in range(0, len(request), 5000):
                try:
                    await client.send(request[start : start + 5000])
                except ConnectionError:
                    break
        else:
            await client.send(request)
        _, error = await refused(client, *status)
        assert error["message"]
        assert not b.engine.connections


SMUGGLED = get("/api/tags", "X-Smuggled: yes")


@pytest.mark.parametrize(
    "how", ["too large a body", "an unknown expectation", "no such engine", "a bad body", "foreign"]
)
@run_async
async def test_the_body_of_a_refused_request_is_never_read_as_a_request(how):
    options = {"body_limit": 1000} if how == "too large a body" else {}
    if how == "foreign":
        options = {"allowed_origins": ("http://own",)}
    body = SMUGGLED * (40 if how == "too large a body" else 1)
    extra = {"an unknown expectation": ["Expect: x"], "foreign": ["Origin: http://evil"]}.get(how, [])
    path = "/train/jobs" if how == "no such engine" else "/api/chat"
    async with bench(**options) as b:
        b.engine.answer()
        client = await b.client()
        head, _, _ = post(path, None, *extra, raw=body).partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        await asyncio.sleep(0.01)  # the refusal may come before the body does
        await client.send(body)
        got = await client.read()
        status, headers, _ = parse(got)
        assert status >= 400
        with_rest = got
        if headers.get("connection") == "close":
            rest, _ = await client.read_all()
            with_rest += rest
        else:
            await client.send(get("/api/version"))
            with_rest += await client.read_until(b"200 OK")
            assert [s.target for s in b.engine.seen] == ["/api/version"]
        assert not [s for s in b.engine.seen if s.header("x-smuggled")]
        assert with_rest.count(b"HTTP/1.1 ") <= 2


# --------------------------------------------------------------------------------------- foreign web pages


def from_host(host: str, path: str = "/api/tags", *fields: str) -> bytes:
    return get(path, *fields).replace(b"Host: gate", b"Host: " + host.encode())


HOSTS = ("localhost", "gate.example", "[::1]", "127.0.0.1")


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:11434", "LocalHost:1", "gate.example", "[::1]:80", "127.0.0.1:8"]
)
@run_async
async def test_an_allowed_host_is_served_with_or_without_a_port(host):
    async with bench(allowed_hosts=HOSTS) as b:
        b.engine.answer()
        assert (await b.ask(from_host(host), method="GET"))[0] == 200


FOREIGN = ["evil.example", "gate.example.evil", "evil-gate.example", "localhost.evil:11434", "[::2]", "127.0.0.2", ""]


@pytest.mark.parametrize("path", ["/api/tags", "/status", "/comfyui/queue", "/v1/models"])
@pytest.mark.parametrize("host", FOREIGN)
@run_async
async def test_a_foreign_host_is_refused_everywhere(host, path):
    async with bench(allowed_hosts=HOSTS) as b:
        for engine in (b.engine, b.comfy, b.control):
            engine.answer()
        status, headers, _ = await b.ask(from_host(host, path), method="GET")
        assert status in (403, 421)
        assert headers["x-turnstile-error"] == "host_not_allowed"
        assert not b.engine.seen
        assert not b.comfy.seen
        assert not b.control.seen


@run_async
async def test_a_foreign_host_is_refused_on_every_listener_for_work_and_for_tunnels():
    async with bench(allowed_hosts=HOSTS) as b:
        for engine in (b.engine, b.comfy):
            engine.answer()
        upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: k")
        work = post("/prompt", {"prompt": {}}).replace(b"Host: gate", b"Host: evil")
        for request in (from_host("evil", "/ws", *upgrade), from_host("evil", "/queue"), work):
            status, headers, _ = await b.ask(request, port=b.comfy_port, method=request.split()[0].decode())
            assert status in (403, 421)
            assert headers["x-turnstile-error"] == "host_not_allowed"
        assert not b.comfy.connections


@run_async
async def test_a_request_without_a_host_is_foreign_where_hosts_are_listed():
    async with bench(allowed_hosts=HOSTS) as b:
        client = await b.client()
        await client.send(b"GET /api/tags HTTP/1.0\r\n\r\n")
        data, _ = await client.read_all()
        assert parse(data)[0] in (403, 421)


ORIGINS = ("http://localhost:3000", "https://ui.example")


@pytest.mark.parametrize("origin", [None, "http://localhost:3000", "https://ui.example", "HTTPS://UI.example"])
@run_async
async def test_an_allowed_origin_or_none_is_served(origin):
    async with bench(allowed_origins=ORIGINS) as b:
        b.engine.answer()
        fields = [f"Origin: {origin}"] if origin else []
        assert (await b.ask(post("/api/chat", CHAT, *fields)))[0] == 200


EVIL = [
    "https://evil.example",
    "null",
    "http://localhost",
    "http://localhost:30000",
    "http://ui.example",
    "https://ui.example.evil",
]


@pytest.mark.parametrize("origin", EVIL)
@run_async
async def test_a_foreign_origin_is_refused_and_gets_no_permission(origin):
    async with bench(allowed_origins=ORIGINS) as b:
        b.engine.answer()
        b.comfy.answer()
        field = f"Origin: {origin}"
        upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: k")
        preflight = get("/api/chat", field, "Access-Control-Request-Method: POST", method="OPTIONS")
        requests = [
            post("/api/chat", CHAT, field),
            get("/api/tags", field),
            get("/comfyui/ws", field, *upgrade),
            preflight,
        ]
        for request in requests:
            status, headers, _ = await b.ask(request, method=request.split()[0].decode())
            assert (status, headers["x-turnstile-error"]) == (403, "origin_not_allowed")
            assert headers.get("access-control-allow-origin") not in ("*", origin)
        assert not b.engine.seen
        assert not b.comfy.seen


# ---------------------------------------------------------------------------------------------------- keys

KEYS = {"sk-alice": "alice", "sk-bob-2": "bob"}
DIALECTS = {
    "/v1/chat/completions": lambda e: e["error"]["code"],
    "/v1/messages": lambda e: e["error"]["code"],
    "/api/chat": lambda e: e["code"],
}
WRONG = [
    (),
    ("Authorization: Bearer sk-eve",),
    ("Authorization: Bearer",),
    ("Authorization: Bearer ",),
    ("Authorization: sk-alice",),
    ("Authorization: Basic sk-alice",),
    ("Authorization: Bearer sk-alic",),
    ("Authorization: Bearer sk-alicee",),
    ("Authorization: Bearer SK-ALICE",),
    ("Authorization: Bearer alice",),
    ("x-api-key: sk-eve",),
    ("x-api-key: ",),
    ("Authorization: Bearer sk-\xe4",),
]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("fields", WRONG, ids=[" ".join(f) for f in WRONG])
@run_async
async def test_no_key_or_a_wrong_one_is_a_401_in_the_callers_dialect(path, fields):
    async with bench(api_keys=KEYS) as b:
        b.engine.answer()
        status, headers, body = await b.ask(post(path, CHAT, *fields))
        assert (status, headers["x-turnstile-error"]) == (401, "unauthorized")
        assert DIALECTS[path](json.loads(body)) == "unauthorized"
        assert b"alice" not in body
        assert not b.engine.connections


RIGHT = [
    "Authorization: Bearer sk-alice",
    "authorization: bearer sk-alice",
    "x-api-key: sk-alice",
    "X-Api-Key: sk-alice",
]


@pytest.mark.parametrize("field", RIGHT)
@pytest.mark.parametrize("ask", [post("/v1/messages", CHAT), post("/api/show", CHAT), get("/api/tags")])
@run_async
async def test_a_right_key_is_served_and_goes_no_further(ask, field):
    async with bench(api_keys=KEYS) as b:
        b.engine.answer()
        head, _, body = ask.partition(b"\r\n\r\n")
        request = head + b"\r\n" + field.encode() + b"\r\nX-Own: yes\r\n\r\n" + body
        assert (await b.ask(request, method=ask.split()[0].decode()))[0] == 200
        [seen] = b.engine.seen
        assert seen.header("authorization") is None
        assert seen.header("x-api-key") is None
        assert seen.header("x-own") == "yes"
        assert b"sk-alice" not in seen.raw


@pytest.mark.parametrize(
    "fields",
    [("Authorization: Bearer sk-alice", "x-api-key: other"), ("x-api-key: sk-alice", "Authorization: Bearer other")],
)
@run_async
async def test_no_key_of_any_kind_reaches_an_engine_when_the_gate_has_keys(fields):
    async with bench(api_keys=KEYS) as b:
        b.engine.answer()
        await b.ask(post("/v1/messages", CHAT, *fields))
        for seen in b.engine.seen:
            assert seen.header("authorization") is None
            assert seen.header("x-api-key") is None


@run_async
async def test_without_keys_a_clients_own_go_through():
    async with bench() as b:
        b.engine.answer()
        fields = ("Authorization: Bearer upstream", "x-api-key: other")
        assert (await b.ask(post("/v1/messages", CHAT, *fields)))[0] == 200
        assert b.engine.seen[0].header("authorization") == "Bearer upstream"
        assert b.engine.seen[0].header("x-api-key") == "other"


async def client_of_lease(b: Bench, *fields: str) -> str:
    go = asyncio.Event()

    async def stream(connection, seen):
        await connection.send(SSE + chunk(b"data: 1\n\n"))
        await go.wait()
        await connection.send(b"0\r\n\r\n")

    b.engine._scripts.clear()
    b.engine.script(stream)
    client = await b.client()
    await client.send(post("/v1/chat/completions", CHAT, *fields))
    await client.read_until(b"data: 1")
    [lease] = b.view.leases
    go.set()
    await client.read_until(b"0\r\n\r\n")
    return lease.client


@run_async
async def test_the_keys_name_is_who_the_client_is_whatever_it_says():
    async with bench(api_keys=KEYS) as b:
        assert await client_of_lease(b, "Authorization: Bearer sk-bob-2") == "bob"
        assert await client_of_lease(b, "Authorization: Bearer sk-alice", "X-Turnstile-Client: bob") == "alice"
        assert await client_of_lease(b, "X-Turnstile-Client: bob", "x-api-key: sk-alice") == "alice"


@run_async
async def test_everything_needs_a_key_but_the_health_check():
    async with bench(api_keys=KEYS) as b:
        for engine in (b.engine, b.comfy, b.control):
            engine.answer()
        upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: k")
        closed = [
            get(p) for p in ("/status", "/metrics", "/v1/models", "/api/tags", "/comfyui/queue", "/ui", "/events")
        ]
        closed += [
            get("/comfyui/ws", *upgrade),
            post("/mode", {"mode": "llm"}),
            post("/lock", {}),
            post("/train/x", {}),
        ]
        for request in closed:
            status, headers, _ = await b.ask(request, method=request.split()[0].decode())
            assert (status, headers["x-turnstile-error"]) == (401, "unauthorized")
        for request in (get("/ws", *upgrade), get("/queue"), post("/prompt", {})):
            status, _, _ = await b.ask(request, port=b.comfy_port, method=request.split()[0].decode())
            assert status == 401
        for path in ("/healthz/../status", "/healthz%2f..", "//healthz", "/healthz/x", "/HEALTHZ"):
            assert (await b.ask(get(path), method="GET"))[0] == 401
        assert not b.engine.seen
        assert not b.comfy.seen
        assert not b.control.seen
        assert (await b.ask(get("/healthz"), method="GET"))[0] == 200
        assert (await b.ask(get("/healthz"), port=b.comfy_port, method="GET"))[0] == 200
