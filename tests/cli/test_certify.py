"""`turnstile certify` as people use it: a measurement in a process of its own, judged by a real gate."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import pytest

from tests.aio import run_async
from tests.e2e.house import house, llama

CHAT = """
import sys, urllib.request
head = {"X-Turnstile-Owner": sys.argv[2], "Content-Type": "application/json"}
body = b'{"model": "a", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}'
urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body, head)).read()
"""


async def certify(url: str, *args: str) -> tuple[int, str, str]:
    return await command(url, "certify", *args)


async def command(url: str, *args: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpu_turnstile", *args),
        env={**os.environ, "TURNSTILE_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@run_async
async def test_a_measurement_alone_is_clean_and_a_strangers_request_contaminates_it(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        await h.chat("a")
        alone = (sys.executable, "-c", CHAT, h.gate, "bench")
        code, _, err = await certify(h.gate, "--owner", "bench", "--", *alone)
        assert (code, err.split(":")[0]) == (0, "clean")
        disturbed = (sys.executable, "-c", CHAT, h.gate, "somebody else")
        code, out, _ = await certify(h.gate, "--owner", "bench", "--json", "--", *disturbed)
        assert code == 3
        assert [f["kind"] for f in json.loads(out)["findings"]] == ["lease"]


@pytest.mark.parametrize(("script", "code"), [("exit 5", 5), ("kill -KILL $$", 137)])
@run_async
async def test_a_command_that_fails_says_so_itself(tmp_path, script, code):
    async with house(tmp_path, [llama("a")]) as h:
        assert (await certify(h.gate, "--", "sh", "-c", script))[0] == code


@run_async
async def test_without_a_gate_or_a_command_nothing_is_run(tmp_path):
    mark = tmp_path / "mark"
    code, _, err = await certify("http://127.0.0.1:9", "--", "touch", str(mark))
    assert (code, mark.exists(), err.count("\n")) == (3, False, 1)
    code, _, err = await certify("http://127.0.0.1:9", "--", "no-such-command-here")
    assert (code, "no such command" in err) == (127, True)


@run_async
async def test_under_run_the_measurement_is_the_locks_owners_and_fails_fast_where_others_hold_it(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")]) as h:
        await h.chat("a")
        chat = (sys.executable, "-c", CHAT, h.gate, "bench")
        run = ("run", "--no-wait", "--preset", "a", "--owner", "bench", "--", sys.executable, "-m", "gpu_turnstile")
        code, _, err = await command(h.gate, *run, "certify", "--", *chat)
        assert (code, err.split(":")[0]) == (0, "clean")
        await h.http.post(f"{h.gate}/lock", json={"lock": "b", "owner": "somebody"})
        began = time.monotonic()
        code, out, err = await command(h.gate, *run, "certify", "--", *chat)
        assert (code, out, "held on 'b' by somebody" in err) == (125, "", True)
        assert time.monotonic() - began < 5
        assert not h.view.locks.queue
        await h.http.post(f"{h.gate}/unlock", json={"owner": "somebody"})
