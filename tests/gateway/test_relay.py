"""The gateway with well-behaved clients and engines: what goes in comes out, and nothing is left over."""

from __future__ import annotations

import asyncio
import json

from tests.aio import run_async, until
from tests.gateway.bench import NDJSON, OK, SSE, bench, chunk, get, post, proved

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@run_async
async def test_a_request_and_its_answer_pass_unchanged():
    async with bench() as b:
        answer = (
            b"HTTP/1.1 200 Fine\r\nX-Odd-CASE: a\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nContent-Length: 2\r\n\r\nok"
        )
        b.engine.answer(answer)
        request = post("/api/chat?x=%2F&y", CHAT, "X-Mixed-Case: Value", "Accept-Encoding: gzip")
        client = await b.client()
        await client.send(request)
        assert await client.read_until(b"ok") == answer
        assert b.engine.seen[0].raw == request


@run_async
async def test_connections_are_kept_alive_on_both_sides():
    async with bench() as b:
        b.engine.answer()
        client = await b.client()
        for _ in range(3):
            await client.send(post("/api/chat", CHAT))
            status, _, body = await client.response()
            assert (status, body) == (200, b"{}")
            await proved()
        assert len(b.engine.connections) == 1


@run_async
async def test_every_flush_of_a_stream_arrives_by_itself_and_at_once():
    async with bench() as b:
        go = asyncio.Event()

        async def stream(connection, seen):
            await connection.send(SSE)
            for n in range(5):
                await connection.send(chunk(b"data: %d\n\n" % n))
                await go.wait()
                go.clear()
            await connection.send(b"0\r\n\r\n")

        b.engine.script(stream)
        client = await b.client()
        await client.send(post("/v1/chat/completions", CHAT))
        for n in range(5):
            assert (await client.read_until(b"\n\n\r\n")).endswith(chunk(b"data: %d\n\n" % n))
            go.set()
        assert await client.read() == b"0\r\n\r\n"


@run_async
async def test_requests_for_the_resident_run_side_by_side():
    async with bench() as b:
        go = asyncio.Event()

        async def slow(connection, seen):
            await go.wait()
            await connection.send(OK)

        b.engine.script(slow)
        clients = [await b.client() for _ in range(5)]
        for client in clients:
            await client.send(post("/api/chat", CHAT))
        await until(lambda: len(b.view.leases) == 5)
        go.set()
        for client in clients:
            assert (await client.response())[0] == 200


@run_async
async def test_reading_paths_take_no_lease_and_reach_the_engine():
    async with bench() as b:
        held = asyncio.Event()

        async def look(connection, seen):
            held.set()
            assert not b.view.leases
            await connection.send(OK)

        b.engine.script(look)
        assert (await b.ask(get("/api/tags"), method="GET"))[0] == 200
        assert held.is_set()


@run_async
async def test_control_paths_go_to_the_control_api():
    async with bench() as b:
        b.control.answer()
        assert (await b.ask(get("/status"), method="GET"))[0] == 200
        assert b.control.seen[0].target == "/status"


@run_async
async def test_the_comfyui_mount_and_listener_reach_the_same_engine():
    async with bench() as b:
        b.comfy.answer()
        await b.ask(get("/comfyui/queue?x=1"), method="GET")
        await b.ask(get("/queue?x=1"), port=b.comfy_port, method="GET")
        assert [s.target for s in b.comfy.seen] == ["/queue?x=1", "/queue?x=1"]


@run_async
async def test_an_upload_is_streamed_while_it_comes():
    async with bench() as b:
        b.comfy.answer()
        body = b"x" * 3_000_000
        head = b"POST /upload/image HTTP/1.1\r\nHost: gate\r\nContent-Length: %d\r\n\r\n" % len(body)
        client = await b.client(b.comfy_port)
        await client.send(head + body[:1000])
        await until(lambda: b.comfy.connections)
        await client.send(body[1000:])
        assert (await client.response())[0] == 200
        assert b.comfy.seen[0].body == body


@run_async
async def test_a_chunked_request_reaches_the_engine_with_one_length():
    async with bench() as b:
        b.engine.answer()
        payload = json.dumps(CHAT).encode()
        head = b"POST /api/chat HTTP/1.1\r\nHost: gate\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in payload)
        assert (await b.ask(head + chunks + b"0\r\nTrailer: t\r\n\r\n"))[0] == 200
        seen = b.engine.seen[0]
        assert seen.body == payload
        assert seen.header("content-length") == str(len(payload))
        assert seen.header("transfer-encoding") is None


@run_async
async def test_two_requests_sent_at_once_are_answered_in_order():
    async with bench() as b:
        b.engine.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1")
        b.engine.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n2")
        client = await b.client()
        await client.send(post("/api/chat", CHAT) + post("/api/chat", CHAT))
        assert (await client.read_until(b"\n1"))[-1:] == b"1"
        assert (await client.read_until(b"\n2"))[-1:] == b"2"


@run_async
async def test_a_websocket_is_a_raw_tunnel():
    async with bench() as b:

        async def echo(connection, seen):
            await connection.send(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nhello"
            )
            while data := await connection.reader.read(65536):
                await connection.send(data[::-1])

        b.comfy.script(echo)
        client = await b.client(b.comfy_port)
        await client.send(get("/ws?clientId=1", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: k"))
        assert (await client.read_until(b"hello")).startswith(b"HTTP/1.1 101 ")
        await client.send(b"\x00\xffabc")
        assert await client.read() == b"cba\xff\x00"
        assert b.comfy.seen[0].header("upgrade") == "websocket"
        assert not b.view.leases


@run_async
async def test_a_client_that_leaves_cancels_its_request_at_the_engine_and_leaves_every_count():
    async with bench() as b:

        async def for_ever(connection, seen):
            await connection.send(SSE + chunk(b"data: 1\n\n"))
            await connection.closed.wait()

        b.engine.script(for_ever)
        client = await b.client()
        await client.send(post("/v1/chat/completions", CHAT))
        await client.read_until(b"data: 1")
        client.reset()
        await until(lambda: b.engine.connections[0].closed.is_set(), 0.5)
        await until(lambda: not b.view.leases, 0.5)


@run_async
async def test_a_client_that_leaves_the_queue_is_never_sent_to_the_engine():
    async with bench() as b:
        go = asyncio.Event()

        async def hold(connection, seen):
            await go.wait()
            await connection.send(OK)

        b.engine.script(hold)
        b.comfy.answer()
        first = await b.client()
        await first.send(post("/api/chat", CHAT))
        await until(lambda: b.view.leases)
        image = await b.client(b.comfy_port)
        await image.send(post("/prompt", {"prompt": {}}))
        waiting = await b.client()
        await waiting.send(post("/api/chat", CHAT))
        await until(lambda: len(b.view.waiting) == 2)
        image.reset()
        waiting.reset()
        await until(lambda: not b.view.waiting, 0.5)
        go.set()
        assert (await first.response())[0] == 200
        assert (len(b.engine.seen), len(b.comfy.seen)) == (1, 0)


@run_async
async def test_an_image_job_keeps_the_card_after_its_answer():
    async with bench(quiet=False) as b:
        b.comfy.answer(b'HTTP/1.1 200 OK\r\nContent-Length: 21\r\n\r\n{"prompt_id": "p-123"}'[:-1] + b"}")
        b.comfy._scripts.clear()
        body = b'{"prompt_id": "p-123", "number": 0}'
        b.comfy.answer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert (await b.ask(post("/prompt", {"prompt": {}}), port=b.comfy_port))[2] == body
        ticket, job = await until(lambda: b.followed and b.followed[0])
        assert job == "p-123"
        assert len(b.view.leases) == 1
        b.arbiter.release(ticket)
        await until(lambda: b.comfy_engine.released == 1)


@run_async
async def test_a_prompt_that_comfyui_refuses_gives_the_card_back_at_once():
    async with bench() as b:
        b.comfy.answer(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}")
        assert (await b.ask(post("/api/prompt", {"prompt": {}}), port=b.comfy_port))[0] == 400
        await until(lambda: not b.view.leases)
        assert not b.followed


@run_async
async def test_an_engine_that_dies_in_its_answer_is_never_a_clean_end():
    async with bench() as b:

        async def die(connection, seen):
            await connection.send(SSE + chunk(b"data: 1\n\n"))
            await asyncio.sleep(0)
            connection.reset()

        b.engine.script(die)
        client = await b.client()
        await client.send(post("/v1/chat/completions", CHAT))
        data, _ = await client.read_all()
        assert b"0\r\n\r\n" not in data
        assert b"[DONE]" not in data
        assert b.gateway.counts.died_midstream == 1


@run_async
async def test_a_cut_answer_with_a_length_is_never_a_clean_end():
    async with bench() as b:

        async def die(connection, seen):
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 100)
            connection.close()

        b.engine.script(die)
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        data, reset = await client.read_all()
        assert reset or len(data.partition(b"\r\n\r\n")[2]) < 1000


@run_async
async def test_bad_requests_are_refused_in_the_callers_shape_and_start_nothing():
    async with bench() as b:
        status, headers, body = await b.ask(post("/v1/chat/completions", raw=b'{"model":'))
        assert (status, headers["x-turnstile-error"]) == (400, "bad_request")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        status, _, body = await b.ask(post("/api/chat", raw=b"[]"))
        assert (status, "error" in json.loads(body)) == (400, True)
        status, _, body = await b.ask(post("/v1/messages", {"model": 123}))
        assert (status, json.loads(body)["type"]) == (400, "error")
        assert not b.engine.seen


@run_async
async def test_a_body_above_the_limit_is_refused():
    async with bench(body_limit=1000) as b:
        status, headers, _ = await b.ask(post("/api/chat", {"model": "m", "x": "y" * 2000}))
        assert (status, headers["x-turnstile-error"]) == (413, "too_large")


@run_async
async def test_an_engine_that_refuses_connections_is_tried_again_until_it_answers():
    async with bench(backoff_initial=0.01) as b:
        await b.engine.stop()
        b.engine.answer()
        client = await b.client()
        await client.send(post("/api/chat", CHAT))
        await until(lambda: b.gateway.counts.unreachable >= 2)
        await b.engine.start()
        assert (await client.response())[0] == 200
        assert len(b.engine.seen) == 1


@run_async
async def test_an_ndjson_stream_ends_with_its_last_chunk():
    async with bench() as b:
        b.engine.answer(NDJSON + chunk(b'{"done":false}\n') + chunk(b'{"done":true}\n') + b"0\r\n\r\n")
        assert (await b.ask(post("/api/chat", CHAT)))[2] == b'{"done":false}\n{"done":true}\n'
