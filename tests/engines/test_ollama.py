"""Ollama's unload is believed when its list is empty twice, and is never waited for without a bound."""

from __future__ import annotations

import asyncio
import time

import httpx

from gpu_turnstile.engines.base import Health, Loaded, Released, Timing
from gpu_turnstile.engines.ollama import Ollama
from tests.engines.fake import CUT, HANG, run, serving

QUICK = Timing(unload_timeout=0.3, unload_poll=0.01, call_timeout=0.1, unload_resend=0.07, warm_timeout=0.1)
PAST, FUTURE = "2020-01-01T00:00:00.123456789+02:00", "2318-01-01T00:00:00Z"


class FakeOllama:
    """`slow` looks pass between an unload and the end; `stubborn` ones never end, `embedders` refuse generate."""

    def __init__(self, *names, slow=0, stubborn=(), embedders=()):
        self.models = dict.fromkeys(names, FUTURE)
        self.slow, self.stubborn, self.embedders = slow, set(stubborn), set(embedders)
        self.going: dict[str, int] = {}
        self.expiry_when_told = PAST

    def __call__(self, method, path, body):
        if path == "/api/version":
            return {"version": "0.32.1"}
        if path == "/api/ps":
            return self.ps()
        if path == "/api/generate" and body["model"] in self.embedders:
            return 400, {"error": f'"{body["model"]}" does not support generate'}
        if body.get("keep_alive") == 0:
            self.unload(body["model"])
            return {"model": body["model"], "done": True, "done_reason": "unload"}
        return {"model": body["model"], "done": True, "done_reason": "load"}

    def ps(self):
        for name in [name for name, looks in self.going.items() if looks == 0]:
            del self.going[name], self.models[name]
        self.going = {name: looks - 1 for name, looks in self.going.items()}
        return {"models": [item(name, expiry) for name, expiry in self.models.items()]}

    def unload(self, name):
        self.models[name] = self.expiry_when_told
        if name not in self.stubborn:
            self.going.setdefault(name, self.slow)


def item(name, expiry=FUTURE):
    return {"name": name, "model": name, "size": 5000, "size_vram": 4000, "expires_at": expiry, "digest": "d"}


def release(handler, timing=QUICK):
    async def main():
        async with serving(handler) as (server, http):
            began = time.monotonic()
            result = await Ollama(server.url, http, timing).release()
            return result, server, time.monotonic() - began

    return run(main())


def test_every_listed_model_is_told_to_go_without_a_prompt():
    result, server, _ = release(FakeOllama("a", "b", slow=2))
    assert result.outcome is Released.EMPTY
    assert result.left == ()
    sent = sorted(server.bodies("/api/generate"), key=lambda body: body["model"])
    assert sent == [{"model": "a", "keep_alive": 0}, {"model": "b", "keep_alive": 0}]
    assert server.paths()[0] == "GET /api/ps"


def test_an_embedding_model_is_unloaded_through_embed():
    result, server, _ = release(FakeOllama("bge-m3", embedders=["bge-m3"]))
    assert result.outcome is Released.EMPTY
    assert server.bodies("/api/embed") == [{"model": "bge-m3", "input": "x", "keep_alive": 0}]


def test_a_model_listed_twice_is_told_once():
    looks = []

    def handler(method, path, body):
        if path != "/api/ps":
            return {"done": True}
        looks.append(1)
        return {"models": [item("a"), item("a")] if len(looks) == 1 else []}

    result, server, _ = release(handler)
    assert result.outcome is Released.EMPTY
    assert len(server.bodies("/api/generate")) == 1


def test_a_list_that_flickers_is_not_taken_for_empty():
    looks = [["a"], [], ["a"], ["a"], [], []]

    def handler(method, path, body):
        if path != "/api/ps":
            return {"done": True}
        return {"models": [item(name) for name in (looks.pop(0) if looks else [])]}

    result, server, _ = release(handler)
    assert result.outcome is Released.EMPTY
    assert server.paths().count("GET /api/ps") == 6


def test_a_model_that_hangs_in_stopping_is_told_once_and_named_at_the_limit():
    result, server, took = release(FakeOllama("a", stubborn=["a"]))
    assert result.outcome is Released.TIMEOUT
    assert result.left == ("a",)
    assert "a (stopping)" in result.detail
    assert len(server.bodies("/api/generate")) == 1
    assert 0.25 < took < 2


def test_a_model_that_ignores_the_unload_is_told_again_but_not_in_a_storm():
    ollama = FakeOllama("a", stubborn=["a"])
    ollama.expiry_when_told = FUTURE
    result, server, _ = release(ollama)
    assert result.outcome is Released.TIMEOUT
    assert 2 <= len(server.bodies("/api/generate")) <= 5


def test_stopping_is_judged_by_the_servers_clock():
    ollama = FakeOllama("a", stubborn=["a"])
    ollama.expiry_when_told = "2031-05-05T10:00:00Z"

    async def main():
        async with serving(ollama) as (server, http):
            server.headers["Date"] = "Mon, 05 May 2031 10:00:05 GMT"
            result = await Ollama(server.url, http, QUICK).release()
            return result, server

    result, server = run(main())
    assert "a (stopping)" in result.detail
    assert len(server.bodies("/api/generate")) == 1


def test_a_refused_unload_is_not_success_and_its_reason_is_told():
    def handler(method, path, body):
        return {"models": [item("a")]} if path == "/api/ps" else (500, {"error": "no"})

    result, _, _ = release(handler)
    assert result.outcome is Released.TIMEOUT
    assert "unload: answered 500" in result.detail


def test_an_ollama_that_is_off_is_unreachable_at_once():
    async def main():
        async with serving(FakeOllama()) as (server, http):
            await server.stop()
            return await Ollama(server.url, http, QUICK).release()

    assert run(main()).outcome is Released.UNREACHABLE


def test_an_ollama_that_dies_while_unloading_is_unreachable():
    async def main():
        async with serving(FakeOllama("a", stubborn=["a"])) as (server, http):
            releasing = asyncio.create_task(Ollama(server.url, http, QUICK).release())
            await server.asked_for("/api/generate")
            await server.stop()
            return await releasing

    result = run(main())
    assert result.outcome is Released.UNREACHABLE
    assert result.left == ("a",)


def test_a_list_that_hangs_ends_at_the_limit():
    result, _, took = release(lambda *_: HANG)
    assert result.outcome is Released.TIMEOUT
    assert "no answer within" in result.detail
    assert took < 2


def test_the_last_look_cut_short_by_the_limit_does_not_hide_what_is_left():
    looks = []

    def handler(method, path, body):
        if path != "/api/ps":
            return {"done": True}
        looks.append(1)
        return {"models": [item("a", PAST)]} if len(looks) == 1 else HANG

    result, _, _ = release(handler, Timing(unload_timeout=0.2, unload_poll=0.01, call_timeout=5))
    assert result.left == ("a",)
    assert result.detail == "after 0.2 s it still lists a (stopping)"


def test_an_unload_call_that_hangs_does_not_hold_the_release():
    looks = []

    def handler(method, path, body):
        if path == "/api/generate":
            return HANG
        looks.append(1)
        return {"models": [item("a")] if len(looks) == 1 else []}

    result, server, _ = release(handler, Timing(unload_timeout=2, unload_poll=0.01, call_timeout=0.2))
    assert result.outcome is Released.EMPTY
    assert server.bodies("/api/embed") == []


def test_answers_that_are_no_list_are_not_an_empty_list():
    for answer in ({}, (200, "Ollama is running"), (502, "bad gateway"), CUT):
        result, _, _ = release(lambda *_, answer=answer: answer, Timing(unload_timeout=0.1, unload_poll=0.01))
        assert result.outcome is Released.TIMEOUT
        assert "could not be read" in result.detail


def test_a_server_without_a_list_is_unsupported():
    assert release(lambda *_: (404, "404 page not found"))[0].outcome is Released.UNSUPPORTED


def test_a_null_list_is_empty():
    assert release(lambda *_: {"models": None})[0].outcome is Released.EMPTY


def test_loaded_names_each_model_once_with_its_video_memory():
    async def main():
        async with serving(lambda *_: {"models": [item("a"), item("a"), {"model": "old"}]}) as (server, http):
            return await Ollama(server.url, http, QUICK).loaded()

    detail = {"size": 5000, "expires_at": FUTURE}
    assert run(main()) == (Loaded("a", 4000, detail), Loaded("old"))


def test_busy_is_unknown_while_something_is_loaded_and_false_when_nothing_is():
    async def main(*names):
        async with serving(FakeOllama(*names)) as (server, http):
            return await Ollama(server.url, http, QUICK).busy()

    assert run(main("a")) is None
    assert run(main()) is False


def test_what_cannot_be_asked_is_none():
    async def main():
        async with httpx.AsyncClient(trust_env=False) as http:
            ollama = Ollama("http://127.0.0.1:1/", http, QUICK)
            return await ollama.loaded(), await ollama.busy(), (await ollama.probe()).health

    assert run(main()) == (None, None, Health.DOWN)


def test_probe_tells_the_version():
    async def main():
        async with serving(FakeOllama()) as (server, http):
            return await Ollama(server.url + "/", http, QUICK).probe()

    probe = run(main())
    assert (probe.health, probe.detail) == (Health.READY, "Ollama 0.32.1")


def test_warm_pins_the_model_without_a_prompt_and_is_bounded():
    async def main(handler):
        async with serving(handler) as (server, http):
            return await Ollama(server.url, http, QUICK).warm("m"), server

    warmed, server = run(main(FakeOllama()))
    assert warmed.ok
    assert server.bodies("/api/generate") == [{"model": "m", "keep_alive": -1}]
    assert not run(main(lambda *_: HANG))[0].ok
