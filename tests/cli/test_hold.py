"""The commands for locks, as processes against a real gate: what they print, and the code they end with."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys

from tests.aio import run_async, until
from tests.cli.terminal import CTRL_C, piped, terminal
from tests.e2e.house import house, llama

PATH = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))


def gate(tmp_path, **more):
    return house(tmp_path, [llama("a"), llama("b")], **more)


def holders(h):
    return [o.owner for o in h.view.locks.owners]


def waiters(h):
    return [w.owner for w in h.view.locks.queue]


async def call(h, path, **body):
    return await h.http.post(f"{h.gate}{path}", json=body, headers={"X-Turnstile-Client": "tests"})


@run_async
async def test_a_lock_from_one_command_is_renewed_shown_and_ended_by_others_of_the_same_shell(tmp_path):
    async with gate(tmp_path) as h:
        url = {"TURNSTILE_URL": h.gate}
        code, out, err = await piped("lock", "a", "--ttl", "600", **url)
        assert (code, err) == (0, "")
        (owner,) = holders(h)
        assert owner.endswith(f":{os.getpid()}")
        assert out == f"locked a for {owner}, token 1, until 10 min of silence\n"
        code, out, _ = await piped("renew", "--ttl", "1200", **url)
        assert (code, out) == (0, f"renewed a for {owner}, token 1, until 20 min of silence\n")
        code, out, _ = await piped("queue", **url)
        assert code == 0
        assert re.sub(r"\s+", " ", out).startswith(f"a is locked by {owner} (since")
        code, out, _ = await piped("unlock", **url)
        assert (code, out) == (0, f"unlocked: {owner}\n")
        code, out, _ = await piped("unlock", **url)
        assert (code, out) == (0, f"{owner} held no lock and was not in the queue\n")
        assert (await piped("queue", **url))[1] == "free\n"


@run_async
async def test_what_is_not_to_be_had_has_exit_code_4_and_what_is_gone_5(tmp_path):
    async with gate(tmp_path) as h:
        url = {"TURNSTILE_URL": h.gate}
        await call(h, "/lock", lock="a", owner="first")
        refused, late, renewed, stale, denied, missing = await asyncio.gather(
            piped("lock", "b", **url),
            piped("lock", "b", "--timeout", "0.2", **url),
            piped("renew", "--owner", "stranger", **url),
            piped("renew", "--owner", "first", "--token", "99", **url),
            piped("unlock", "--owner", "first", **url),
            piped("lock", "nobody", **url),
        )
        assert [answer[0] for answer in (refused, late, renewed, stale, denied, missing)] == [4, 4, 5, 5, 4, 1]
        assert "never taken over" in refused[2]
        assert "given up" in late[2]
        assert "force" in denied[2]
        for _, out, err in (refused, renewed, stale, denied, missing):
            assert (out, err.count("\n")) == ("", 1)
        assert (holders(h), waiters(h)) == (["first"], [])
        code, out, _ = await piped("unlock", "--force", **url)
        assert (code, out) == (0, "unlocked: first\n")


@run_async
async def test_wrong_usage_is_exit_code_2_and_no_gate_3(tmp_path):
    answers = await asyncio.gather(
        piped("lock"),
        piped("lock", "a", "--resident"),
        piped("release", "--reason", " ", "--url", "127.0.0.1:9"),
        *(piped(*c, "--url", "127.0.0.1:9") for c in (("lock", "a"), ("queue",), ("why",), ("top",), ("unlock",))),
    )
    assert [code for code, _, _ in answers] == [2, 2, 2, 3, 3, 3, 3, 3]
    for _, out, err in answers[2:]:
        assert (out, err.count("\n")) == ("", 1)


@run_async
async def test_json_is_the_gates_own_answer(tmp_path):
    async with gate(tmp_path) as h:
        url = {"TURNSTILE_URL": h.gate}
        await h.chat("b")

        async def said(*args):
            code, out, err = await piped(*args, "--json", **url)
            assert (code, err) == (0, "")
            return json.loads(out)

        assert (await said("lock", "--resident", "--owner", "me"))["locked"] == "b"
        assert (await said("renew", "--owner", "me"))["token"] == 1
        assert list((await said("queue"))["owners"]) == ["me"]
        assert (await said("why", "--client", "me"))["holds"] == ["the lock on b"]
        assert (await said("unlock", "--owner", "me"))["unlocked"] == ["me"]
        assert await said("release", "--reason", "a test") == {"released": [], "reason": "a test"}


@run_async
async def test_waiting_for_a_lock_in_a_terminal_and_giving_up(tmp_path):
    async with gate(tmp_path) as h:
        await call(h, "/lock", lock="a", owner="first")
        async with terminal("lock", "b", "--owner", "me", "--wait", TURNSTILE_URL=h.gate) as t:
            await t.says("waiting for b, position 1 of 1; a is locked by first")
            async with terminal("queue", TURNSTILE_URL=h.gate) as q:
                assert await q.ends() == 0
                assert re.search(r"1\s+me\s+b\s", q.text)
            t.press(CTRL_C)
            assert await t.ends() == 130
        assert waiters(h) == []
        async with terminal("lock", "b", "--owner", "me", "--wait", TURNSTILE_URL=h.gate) as t:
            await t.says("position 1")
            await call(h, "/unlock", owner="first")
            assert await t.ends() == 0
            assert "locked b for me, token 2" in t.text
        await call(h, "/unlock", owner="me", force=True)


@run_async
async def test_inside_run_the_commands_mean_the_lock_of_that_run(tmp_path):
    async with gate(tmp_path) as h:
        url = {"TURNSTILE_URL": h.gate}
        script = "turnstile renew --ttl 77 && turnstile unlock && turnstile renew; echo code $?"
        code, out, _ = await piped("run", "-p", "a", "--owner", "me", "--", "sh", "-c", script, PATH=PATH, **url)
        assert code == 0
        assert out.splitlines() == ["renewed a for me, token 1, until 77 s of silence", "unlocked: me", "code 5"]


@run_async
async def test_release_says_what_it_cut(tmp_path):
    async with gate(tmp_path) as h:
        await call(h, "/lock", lock="a", owner="first")
        async with h.streaming("a", max_tokens=5000):
            code, out, _ = await piped("release", "--reason", "it hangs", TURNSTILE_URL=h.gate)
        assert code == 0
        assert re.search(r"cut: a request of .* on a, ", out)
        assert out.endswith("released; the locks are ended\n")
        assert holders(h) == []


@run_async
async def test_why_tells_what_holds_the_card_and_what_would_help(tmp_path):
    async with gate(tmp_path) as h:
        await h.chat("a")
        await call(h, "/lock", lock="a", owner="first")
        await call(h, "/lock", lock="b", owner="second", wait=True)
        await call(h, "/lock", lock="b", owner="third", wait=True)
        code, out, err = await piped("why", "--client", "third", TURNSTILE_URL=h.gate)
        assert (code, err) == (0, "")
        assert "waiting: third, the lock on b, position 2, for" in out
        assert "the card: serving, a, since" in out
        assert "the lock: a is locked by first" in out
        assert "ahead: second, the lock on b, position 1" in out
        assert re.search(r"a swap takes \d", out)
        assert "what would help: asking for a as well" in out
        await call(h, "/unlock", force=True)
        for owner in ("second", "third"):
            await call(h, "/unlock", owner=owner)


@run_async
async def test_top_is_live_in_80_columns_and_ctrl_c_ends_it(tmp_path):
    async with gate(tmp_path) as h, terminal("top", TURNSTILE_URL=h.gate) as t:
        await t.says("lock +free")
        await call(h, "/lock", lock="a", owner="first")
        await t.says("a is locked by first")
        await t.says("locked +owner=first")
        await h.chat("a")
        await t.says(r"serving  llm  a")
        assert max(len(line) for line in t.text.splitlines()) <= 80
        t.press(CTRL_C)
        assert await t.ends() == 0
        assert "Traceback" not in t.text
        await call(h, "/unlock", owner="first")


@run_async
async def test_top_survives_a_gate_that_goes_away(tmp_path):
    async with gate(tmp_path) as h:
        context = terminal("top", TURNSTILE_URL=h.gate)
        t = await context.__aenter__()
        await t.says("lock +free")
    await t.says("no gate answers|broke off")
    os.kill(t.pid, signal.SIGINT)
    assert await t.ends() == 0
    await context.__aexit__(None, None, None)


@run_async
async def test_without_a_terminal_or_with_no_color_nothing_is_coloured(tmp_path):
    async with gate(tmp_path) as h:
        await h.chat("a")
        await call(h, "/lock", lock="a", owner="first")
        await call(h, "/lock", lock="b", owner="x" * 120, wait=True)
        for command in (("top",), ("queue",), ("why",), ("status",)):
            code, out, _ = await piped(*command, TURNSTILE_URL=h.gate)
            assert (code, "\x1b" in out) == (0, False), command
            if command != ("why",):
                assert max(map(len, out.splitlines())) <= 80, command
        async with terminal("queue", TURNSTILE_URL=h.gate, NO_COLOR="1") as t:
            assert await t.ends() == 0
            await until(lambda: "waiting for the lock" in t.text)
            assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", t.raw)
        await call(h, "/unlock", force=True)
        await call(h, "/unlock", owner="x" * 120)
