"""Calls to an engine are bounded and come back as values, whatever the other side does."""

from __future__ import annotations

import asyncio
import socket

import httpx
import msgspec
import pytest

from gpu_turnstile.engines.base import Health
from gpu_turnstile.engines.http import Failure, Reply, call, probe_of
from tests.engines.fake import CUT, HANG, run, serving


class Shape(msgspec.Struct):
    name: str


def ask(handler, method="GET", timeout=0.2, keep_alive=True):
    async def main():
        async with serving(handler) as (server, http):
            server.keep_alive = keep_alive
            reply = await call(http, method, server.url + "/x", timeout=timeout)
            return reply, server

    return run(main())


def test_a_good_answer_is_read_as_the_shape_asked_for():
    reply, _ = ask(lambda *_: {"name": "a", "more": [1, 2]})
    assert reply.ok
    assert reply.read(Shape) == Shape("a")


def test_an_answer_of_another_shape_reads_as_none():
    assert ask(lambda *_: (200, "<html>"))[0].read(Shape) is None
    assert ask(lambda *_: {"name": 3})[0].read(Shape) is None
    assert ask(lambda *_: (500, {"name": "a"}))[0].read(Shape) is None


def test_an_error_status_says_what_the_server_said_in_one_line():
    assert ask(lambda *_: (500, "out of\n memory"))[0].reason == "answered 500: out of memory"


def test_a_server_that_hangs_is_a_timeout_and_ends_in_time():
    reply, _ = ask(lambda *_: HANG)
    assert reply.failure is Failure.TIMEOUT


def test_a_port_nobody_listens_on_is_unreachable():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"

        async def main():
            async with httpx.AsyncClient(trust_env=False) as http:
                return await call(http, "GET", url, timeout=1)

        reply = run(main())
        assert reply.failure is Failure.UNREACHABLE
        assert reply.refused


@pytest.mark.parametrize("trouble", [HANG, CUT])
def test_a_server_that_is_there_and_does_not_answer_has_refused_nobody(trouble):
    assert not ask(lambda *_: trouble)[0].refused


def test_a_host_that_does_not_resolve_is_unreachable_and_a_bad_url_is_broken():
    async def main(url):
        async with httpx.AsyncClient(trust_env=False) as http:
            return await call(http, "GET", url, timeout=5)

    unknown = run(main("http://no-such-host.invalid/"))
    assert unknown.failure in (Failure.UNREACHABLE, Failure.TIMEOUT)
    assert not unknown.refused
    assert run(main("http://[::1")).failure is Failure.BROKEN


def test_a_server_that_drips_bytes_for_ever_does_not_get_more_time():
    async def drip(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def main():
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        async with httpx.AsyncClient(trust_env=False) as http:
            port = server.sockets[0].getsockname()[1]
            return await call(http, "GET", f"http://127.0.0.1:{port}/", timeout=0.2)

    assert run(main()).failure is Failure.TIMEOUT


def test_a_get_on_a_connection_the_server_closed_is_sent_again():
    answers = [CUT, {"name": "a"}]
    reply, server = ask(lambda *_: answers.pop(0))
    assert reply.ok
    assert len(server.asked) == 2


def test_a_post_is_never_sent_twice():
    reply, server = ask(lambda *_: CUT, method="POST")
    assert reply.failure is Failure.BROKEN
    assert len(server.asked) == 1


def test_two_answers_on_one_connection_carry_its_name():
    async def main(keep_alive):
        async with serving(lambda *_: {}) as (server, http):
            server.keep_alive = keep_alive
            replies = [await call(http, "GET", server.url + "/x", timeout=1) for _ in range(2)]
            return len({reply.connection for reply in replies})

    assert run(main(keep_alive=True)) == 1
    assert run(main(keep_alive=False)) == 2


def test_an_answer_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr("gpu_turnstile.engines.http.ANSWER_LIMIT", 1000)
    assert ask(lambda *_: (200, "x" * 5000))[0].failure is Failure.BROKEN


def test_health_is_told_from_the_answer():
    assert probe_of(Reply(status=204)).health is Health.READY
    assert probe_of(Reply(status=503, body=b"Loading model")).health is Health.LOADING
    assert probe_of(Reply(status=404)).health is Health.BROKEN
    assert probe_of(Reply(failure=Failure.UNREACHABLE, error="refused")).health is Health.DOWN
    assert probe_of(Reply(failure=Failure.TIMEOUT, error="slow")).health is Health.SILENT
    assert probe_of(Reply(failure=Failure.BROKEN, error="garbage")).health is Health.DOWN
