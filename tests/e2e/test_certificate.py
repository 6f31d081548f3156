"""The contention certificate through a whole gate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys

import httpx

from gpu_turnstile.contention import certificate_text, from_json
from tests.aio import run_async, until
from tests.e2e.house import engine_pids, house, llama


async def chat(h, model, **headers):
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    answer = await h.http.post(f"{h.gate}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


async def begin(h):
    """The gate's own time: the window begins where the first certificate ended."""
    return (await h.http.get(f"{h.gate}/contention?since=-1s")).json()["until"]


async def certificate(h, since, **query):
    found = await h.http.get(f"{h.gate}/contention", params={"since": since, **query})
    assert found.status_code == 200, found.text
    return from_json(found.json())


@run_async
async def test_2026_09_18_a_speed_probe_is_clean_alone_and_contaminated_by_another_client(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")]) as h:
        await chat(h, "a", **{"X-Turnstile-Client": "bench"})
        began = await begin(h)
        await chat(h, "a", **{"X-Turnstile-Client": "bench"})
        clean = await certificate(h, began, owner="bench")
        assert clean.clean, certificate_text(clean)
        began = await begin(h)
        await chat(h, "a", **{"X-Turnstile-Client": "bench"})
        await chat(h, "a", **{"X-Turnstile-Client": "agent"})
        found = await certificate(h, began, owner="bench")
        assert [(str(f.kind), f.who) for f in found.findings] == [("lease", "agent")]
        await chat(h, "b")
        found = await certificate(h, began, owner="bench")
        print(certificate_text(found), found.notes)
        assert {"drain", "swap", "lease"} == {str(f.kind) for f in found.findings}


@run_async
async def test_a_request_that_still_runs_and_one_by_token_are_told_apart(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        token = (await h.http.post(f"{h.gate}/lock", json={"lock": "a", "owner": "bench"})).json()["token"]
        await chat(h, "a", **{"X-Turnstile-Lock": str(token), "X-Turnstile-Client": "bench"})
        began = await begin(h)
        await chat(h, "a", **{"X-Turnstile-Lock": str(token), "X-Turnstile-Client": "bench"})
        assert (await certificate(h, began, owner="bench")).clean
        async with h.streaming("a"):
            found = await certificate(h, began, owner="bench")
            assert [str(f.kind) for f in found.findings] == ["lease"]
        await h.http.post(f"{h.gate}/unlock", json={"owner": "bench"})


@contextlib.asynccontextmanager
async def detached(tmp_path):
    """An Ollama that nobody here started: its parent is gone. Its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    sim = (sys.executable, "-m", "gpu_turnstile.sim", "ollama", "--port", port, "--model", "m=4", "--load-s", "0")
    card = ("--card", str(tmp_path / "card.json"))
    launcher = await asyncio.create_subprocess_exec("setsid", "--fork", *sim, *card, stdout=asyncio.subprocess.DEVNULL)
    await launcher.wait()
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            await until(lambda: _answers(int(port)), 10)
            await http.post(f"{url}/api/generate", json={"model": "m", "prompt": "x", "options": {"num_predict": 1}})
        yield url
    finally:
        for pid in engine_pids(port):
            os.kill(pid, signal.SIGTERM)
        await until(lambda: not engine_pids(port), 5)


def _answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@run_async
async def test_an_engine_that_others_run_is_no_stranger_on_the_card_and_another_process_is(tmp_path):
    async with detached(tmp_path) as url, house(tmp_path, ollama_url=url, alarms=True) as h:
        began = await begin(h)
        clean = await certificate(h, began)
        assert clean.clean, certificate_text(clean)
        async with detached(tmp_path):
            found = await certificate(h, began)
            assert [str(f.kind) for f in found.findings] == ["process"]
