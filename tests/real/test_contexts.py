"""Conversations of real llama.cpp servers that survive a swap; skipped with the reason where there are none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.aio import run_async, until
from tests.e2e.gate import Gate
from tests.e2e.house import House, house, llama, write
from tests.real.engine import llama_command, real_engine_missing, tiny_model

MISSING = real_engine_missing()
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bool(MISSING) and not os.environ.get("TURNSTILE_REAL"), reason=str(MISSING)),
]

SMALL = {"turnstile_gpu": "none", "llmc_context_min_tokens": 64}


def two(tmp_path, *args, **more):
    """Two presets with real engines and models of half a megabyte."""
    return [
        llama(name, *args, command=llama_command(), path=str(tiny_model(tmp_path, name, seed=seed)), **more)
        for seed, name in enumerate(("one", "two"))
    ]


def words(subject: str, count: int = 120) -> str:
    """A long text of its own: conversations of different subjects have no beginning in common."""
    return " ".join(f"{subject}{number}" for number in range(count))


async def cached(h: House, text: str, model: str = "one") -> tuple[int, int]:
    """(tokens of the prompt, how many of them were in the engine's cache) of one answer."""
    answer = await h.chat(model, messages=[{"role": "user", "content": text}])
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def files(h: House, preset: str = "one") -> list[Path]:
    return sorted((h.folder / "state" / "contexts" / preset).glob("ctx-*.bin"))


def counts(h: House):
    return h.app.contexts.counts


async def away_and_sealed(h: House) -> None:
    """Another preset takes the card, and what was saved has its checksum."""
    assert (await h.chat("two")).status_code == 200
    await until(lambda: not h.app.contexts._tasks)


@run_async
async def test_a_conversation_is_still_in_the_cache_after_a_swap_there_and_back(tmp_path):
    async with house(tmp_path, two(tmp_path), **SMALL) as h:
        prompt, reused = await cached(h, words("a"))
        assert prompt > 350
        assert reused == 0
        await h.chat("two")
        again, reused = await cached(h, words("a"))
        assert again == prompt
        assert reused >= prompt - 2
        saved = next(fields for kind, fields in h.events if kind == "context_saved")
        assert saved["tokens"] >= prompt
        told = await until(lambda: [fields for kind, fields in h.events if kind == "context_reused"])
        assert told[0]["tokens"] == reused
        assert counts(h).tokens_reused == reused
        assert not counts(h).failures


@run_async
async def test_four_conversations_at_once_all_come_back(tmp_path):
    presets = two(tmp_path, "-np", "4", "-c", "16384")
    async with house(tmp_path, presets, **SMALL) as h:
        subjects = ("a", "b", "c", "d")
        first = await asyncio.gather(*(cached(h, words(s)) for s in subjects))
        await h.chat("two")
        second = await asyncio.gather(*(cached(h, words(s)) for s in subjects))
        for (prompt, _), (_, reused) in zip(first, second, strict=True):
            assert reused >= prompt - 2
        await until(lambda: counts(h).tokens_reused)
        assert counts(h).restored == 4


@run_async
async def test_files_are_private_and_do_not_grow_over_many_swaps(tmp_path):
    async with house(tmp_path, two(tmp_path), **SMALL) as h:
        sizes = []
        for turn in range(6):
            prompt, reused = await cached(h, words("a"))
            assert turn == 0 or reused >= prompt - 2
            await away_and_sealed(h)
            assert len(files(h)) == 1
            sizes.append(files(h)[0].stat().st_size)
        assert max(sizes) - min(sizes) <= sizes[0] // 20
        place = files(h)[0]
        for path, mode in ((place, 0o600), (place.parent, 0o700), (place.parent.parent, 0o700)):
            assert stat.S_IMODE(path.stat().st_mode) == mode
        assert h.app.contexts.store.size == sum(path.stat().st_size for path in [*files(h), *files(h, "two")])
        assert not counts(h).failures


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def foreign(file: Path) -> None:
    file.write_bytes(b"GGSQ" + bytes(file.stat().st_size - 4))


@pytest.mark.parametrize("spoil", [truncated, flipped, foreign])
@run_async
async def test_a_spoilt_file_is_never_offered_and_costs_only_its_tokens(tmp_path, spoil):
    async with house(tmp_path, two(tmp_path), **SMALL) as h:
        await cached(h, words("a"))
        await away_and_sealed(h)
        spoil(files(h)[0])
        _, reused = await cached(h, words("a"))
        assert reused < 20
        assert counts(h).failures == {"corrupt": 1}
        assert not files(h)
        assert "ended_by_a_restore" not in h.kinds()
        # what is read again counts for the turn of the preset on the card, and only what is
        refills = [fields.get("refill", 0.0) for kind, fields in h.events if kind == "swapped"]
        assert refills[:-1] == [0.0] * (len(refills) - 1)
        assert refills[-1] > 0


@run_async
async def test_what_another_model_saved_is_not_offered(tmp_path):
    async with house(tmp_path, two(tmp_path), **SMALL) as h:
        await cached(h, words("a"))
        await away_and_sealed(h)
        tiny_model(tmp_path, "one", seed=7)
        _, reused = await cached(h, words("a"))
        assert reused < 20
        assert counts(h).failures == {"stale": 1}
        reason = next(fields["reason"] for kind, fields in h.events if kind == "context_lost")
        assert "other model" in reason


@run_async
async def test_an_engine_killed_while_it_saves_costs_a_prefill_and_nothing_else(tmp_path):
    async with house(tmp_path, two(tmp_path), **SMALL) as h:
        await cached(h, words("a"))
        keeper = h.app.arbiter.seats["one"].keeper
        save = keeper._engine.save_slot

        async def killed(*given):
            os.kill(h.app.arbiter.seats["one"].runtime.pid, signal.SIGKILL)
            return await save(*given)

        keeper._engine.save_slot = killed
        await away_and_sealed(h)
        assert not files(h)
        keeper._engine.save_slot = save
        _, reused = await cached(h, words("a"))
        assert reused < 20
        assert counts(h).failures == {"save": 1}


@run_async
async def test_an_engine_that_dies_of_a_restore_is_started_again_without_it(tmp_path):
    async with house(tmp_path, two(tmp_path), **SMALL) as h:
        await cached(h, words("a"))
        await away_and_sealed(h)
        engine = h.app.arbiter.seats["one"].keeper._engine
        restore = engine.restore_slot

        async def truncates_first(number, file, limit):
            truncated(files(h)[0])  # behind the back of the check
            return await restore(number, file, limit)

        engine.restore_slot = truncates_first
        _, reused = await cached(h, words("a"))
        assert reused < 20
        assert counts(h).failures == {"restore": 1}
        assert h.view.residents == ("one",)
        assert not files(h)


@run_async
async def test_a_disk_that_is_full_costs_a_prefill_and_leaves_nothing(tmp_path):
    command = ["prlimit", "--fsize=100000", *llama_command()]  # a write beyond that fails, as on a full disk
    presets = [llama("one", command=command, path=str(tiny_model(tmp_path, "one"))), two(tmp_path)[1]]
    async with house(tmp_path, presets, **SMALL) as h:
        prompt, _ = await cached(h, words("a"))
        await away_and_sealed(h)
        assert not files(h)
        again, reused = await cached(h, words("a"))
        assert again == prompt
        assert reused < 20
        assert sum(counts(h).failures.values()) == 1


@run_async
async def test_a_gate_that_was_stopped_gives_back_what_it_saved_when_it_is_started_again(tmp_path):
    presets = two(tmp_path)
    async with house(tmp_path, presets, **SMALL) as h:
        await cached(h, words("a"))
    async with house(tmp_path, presets, **SMALL) as h:
        prompt, reused = await cached(h, words("a"))
        assert reused >= prompt - 2


def ask(gate: Gate, text: str) -> int:
    """Tokens of the prompt that were in the engine's cache."""
    body = {"model": "one", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    answer = httpx.post(f"{gate.url}/v1/chat/completions", json=body, trust_env=False, timeout=20)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def wait_for(gate: Gate, word: str) -> None:
    """Until the gate's log says it."""
    deadline = time.monotonic() + 15
    while word not in gate.log.read_text():
        assert time.monotonic() < deadline, gate.log.read_text()
        time.sleep(0.005)


@pytest.mark.parametrize("moment", ["evicting", "context_saved", "evicted", "admitting", "context_restored"])
def test_a_gate_killed_in_the_middle_of_it_loses_no_request_and_offers_nothing_half_written(tmp_path, moment):
    write(tmp_path, two(tmp_path))
    gate = Gate(tmp_path, TURNSTILE_GPU="none", LLMC_CONTEXT_MIN_TOKENS="64", LOGLEVEL="info")
    try:
        gate.start()
        ask(gate, words("a"))
        if moment == "context_restored":
            gate.chat("two")
            swap = "one"
        else:
            swap = "two"
        if moment == "admitting":
            gate.log.write_text("")
        with contextlib.suppress(httpx.HTTPError), ThreadPoolExecutor(1) as pool:
            asked = pool.submit(gate.chat, swap)
            wait_for(gate, moment)
            gate.kill()
            asked.result()
        gate.start()
        ask(gate, words("a"))  # warm or cold: whatever was whole
        gate.chat("two")
        again = ask(gate, words("a"))
        assert again > 300
        names = {file.name for file in (tmp_path / "state" / "contexts" / "one").glob("ctx-*")}
        assert len(names) <= 1
    finally:
        gate.stop()
