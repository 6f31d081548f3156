"""Chaos: rounds of random clients, faults and restarts in front of one gate that lives through all of them.

    python -m tests.e2e.chaos --rounds 500 --seed 7

A round is decided by its seed and its number alone, so that one can be played again: `--seed 7 --first 131`. Inside a
round engines break in random ways; then they are healed, and everything must be as if nothing had happened:

- the card was never held by two engines (unless a fault kept memory on purpose), nor given to two by the gate;
- nobody waits, nothing is in flight, no job is followed;
- nobody waited longer than `BOUND`;
- a plain request to each engine succeeds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import uvloop

from gpu_turnstile.sim.faults import JobFate, PromptReply
from tests.aio import until
from tests.e2e.house import House, PresetText, graph, house, llama
from tests.e2e.test_document import LLM_WORK, MESSAGES, leave, raw, two

BOUND = 12.0  # seconds a client may take, whatever happens: every limit below, one after the other
SETTLE = 8.0  # seconds after which nothing may be left of a round
SETTINGS: dict[str, Any] = {
    "history_poll_interval": 0.02,
    "unload_poll_interval": 0.02,
    "unload_timeout": 1.0,
    "probe_timeout": 0.25,
    "free_timeout": 0.25,
    "job_timeout": 2.0,
    "llm_wait_timeout": 4.0,
    "warm_timeout": 0.5,
    "backoff_initial": 0.02,
    "backoff_max": 0.1,
    "turnstile_image_batch_max_wait": 0.3,
    "turnstile_bypass_poll": 0.1,
}
OLLAMA_FAULTS: list[dict[str, Any]] = [
    {"down": True},
    {"hang": True},
    {"server_error": True},
    {"cut_after": 2},
    {"stall_after": 2},
    {"ignore_disconnect": True},
    {"unload_s": 0.2},
    {"unload_s": -1},
    {"memory_late_s": 0.2},
    {"memory_leak": True},
    {"ps_flicker": 2},
    {"ps_hang": True},
    {"load_error": True},
]
COMFY_FAULTS: list[dict[str, Any]] = [
    {"down": True},
    {"hang": True},
    {"server_error": True},
    {"free_ignored": True},
    {"free_missing": True},
    {"free_hang": True},
    {"free_late_s": 0.2},
    *({"prompt_reply": reply} for reply in PromptReply if reply is not PromptReply.NORMAL),
    *({"job_end": fate} for fate in JobFate if fate is not JobFate.NORMAL),
]
# Faults that keep memory on the card for good, and those that hide whether it is: the gate goes on after its limits.
LEAKS = ("memory_leak", "free_ignored", "free_missing", "free_hang")
FINE = {200, 400, 404, 500, 502, 503}

Client = Callable[["Round"], Awaitable[str]]


class Broken(Exception):
    """A promise was not kept. The text says which, and in which round."""


class Round:
    """One round. `tally`: how its clients fared."""

    def __init__(self, h: House, name: str, owned: Iterable[str] = ()) -> None:
        self.h = h
        self.name = name
        self.dice = random.Random(name)
        self.owned = list(owned)
        self.tally: Counter[str] = Counter()
        self.story: list[str] = []
        self.excused = False

    async def play(self) -> Counter[str]:
        dice = self.dice
        clients = [asyncio.create_task(self._client(dice.choice(CLIENTS))) for _ in range(dice.randint(5, 14))]
        troubles = [asyncio.create_task(self._trouble()) for _ in range(dice.randint(0, 3))]
        try:
            await asyncio.gather(*troubles, *clients)
        finally:
            for task in (*clients, *troubles):
                task.cancel()
        self.heal()
        await self.check()
        return self.tally

    # ----------------------------------------------------------------------------------------------- clients

    async def _client(self, client: Client) -> None:
        await asyncio.sleep(self.dice.random() * 0.25)
        began = time.monotonic()
        name = client.__name__
        try:
            async with asyncio.timeout(BOUND):
                end = await client(self)
        except TimeoutError:
            raise Broken(f"{self.name}: a {name} client waited longer than {BOUND:g} s") from None
        except httpx.HTTPError as error:
            end = type(error).__name__
        self.tally[f"{name}: {end}"] += 1
        self.story.append(f"{name} {end} after {time.monotonic() - began:.2f} s")

    # ----------------------------------------------------------------------------------------------- trouble

    async def _trouble(self) -> None:
        dice, h = self.dice, self.h
        sim, faults = dice.choice([(h.ollama, OLLAMA_FAULTS), (h.comfy, COMFY_FAULTS)])
        fault, begin, length = dice.choice([None, *faults]), dice.random() * 0.25, 0.05 + dice.random() * 0.25
        await asyncio.sleep(begin)
        self.story.append(f"{sim.kind}: {fault or 'restart'} for {length:.2f} s")
        if fault is None:
            sim.restart()
            return
        self.excused = self.excused or any(name in LEAKS for name in fault)
        sim.faults.update(fault)
        await asyncio.sleep(length)
        sim.faults.heal()
        if "hang" in fault:  # what it took it will never answer: somebody restarts it
            sim.restart()

    def heal(self) -> None:
        self.h.ollama.faults.heal()
        self.h.comfy.faults.heal()

    # ------------------------------------------------------------------------------------------------ checks

    async def check(self) -> None:
        h = self.h
        await self._settled()
        alarms = h.card.alarms()
        if alarms and not self.excused:
            raise Broken(f"{self.name}: two engines held the card: {alarms[0].detail}")
        h.card.reset()
        if self.excused:  # what was kept on purpose goes with the next hand-overs
            await self._plain()
            await self._settled()
            h.card.reset()
        await self._plain()
        await self._settled()
        if h.card.alarms():
            raise Broken(f"{self.name}: two engines held the card after the round: {h.card.alarms()[0].detail}")
        h.card.reset()

    async def _settled(self) -> None:
        h = self.h

        def left() -> dict[str, int]:
            view = h.view
            counts = {
                "leases": len(view.leases),
                "waiting": len(view.waiting),
                "swap": int(view.phase == "swapping"),
                "stuck": len(view.stuck),
                "jobs": len(h.app.jobs.view()),
                "ollama": h.ollama.in_flight,
                "comfyui": h.comfy.queue.remaining,
            }
            return {name: count for name, count in counts.items() if count}

        try:
            await until(lambda: not left(), SETTLE)
        except AssertionError:
            raise Broken(f"{self.name}: {left()} is left of it after {SETTLE:g} s") from None

    async def _plain(self) -> None:
        for name, work in (("chat", chat), ("image", image), ("embed", embed)):
            answer = await work(self)
            if answer != "200":
                raise Broken(f"{self.name}: after the round a plain {name} request is answered with {answer}")
        for name in self.owned[:1]:
            status = (await self.h.chat(name)).status_code
            if status != 200:
                raise Broken(f"{self.name}: after the round preset {name} answers {status}")


# ------------------------------------------------------------------------------------------------------- clients


async def chat(r: Round) -> str:
    return await _post(r, r.h.gate, "/api/chat", {**LLM_WORK["/api/chat"], "options": {"num_predict": 5}})


async def openai(r: Round) -> str:
    return await _post(r, r.h.gate, "/v1/chat/completions", {**LLM_WORK["/v1/chat/completions"], "max_tokens": 5})


async def anthropic(r: Round) -> str:
    return await _post(r, r.h.gate, "/v1/messages", LLM_WORK["/v1/messages"])


async def embed(r: Round) -> str:
    return await _post(r, r.h.gate, "/api/embed", LLM_WORK["/api/embed"])


async def other_model(r: Round) -> str:
    return await _post(r, r.h.gate, "/api/chat", {**LLM_WORK["/api/chat"], "model": "qwen3:8b"})


async def image(r: Round) -> str:
    body: dict[str, Any] = {"prompt": graph(r.dice.random() * 0.08, r.dice.randrange(1000))}
    if r.dice.random() < 0.3:
        body["prompt_id"] = str(uuid.UUID(int=r.dice.getrandbits(128)))
    return await _post(r, r.h.comfy_gate, r.dice.choice(["/prompt", "/api/prompt"]), body)


async def bad_image(r: Round) -> str:
    return await _post(r, r.h.comfy_gate, "/prompt", {"prompt": {}})


async def preset(r: Round) -> str:
    if not r.owned:
        return await chat(r)
    answer = await r.h.chat(r.dice.choice(r.owned))
    return _fine(r, "preset", answer.status_code)


async def reader(r: Round) -> str:
    h = r.h
    urls = [f"{h.gate}/api/tags", f"{h.gate}/status", f"{h.gate}/metrics", f"{h.gate}/healthz"]
    urls += [f"{h.comfy_gate}/queue", f"{h.comfy_gate}/history", f"{h.comfy_gate}/healthz"]
    for url in r.dice.sample(urls, 3):
        async with asyncio.timeout(6):
            _fine(r, url, (await h.http.get(url, timeout=6)).status_code)
    return "read"


async def stream(r: Round) -> str:
    return await _stream(r, "/api/chat", {"model": "llama3", "messages": MESSAGES, "options": {"num_predict": 8}}, 99)


async def openai_stream(r: Round) -> str:
    body = {"model": "llama3", "messages": MESSAGES, "stream": True, "max_tokens": 8}
    return await _stream(r, "/v1/chat/completions", body, 99)


async def stream_leaver(r: Round) -> str:
    body = {"model": "llama3", "messages": MESSAGES, "options": {"num_predict": 200}}
    return await _stream(r, "/api/chat", body, r.dice.randint(0, 3))


async def chat_leaver(r: Round) -> str:
    return await _leave(r, r.h.gate, "/api/chat", LLM_WORK["/api/chat"])


async def image_leaver(r: Round) -> str:
    return await _leave(r, r.h.comfy_gate, "/prompt", {"prompt": graph(0.05, r.dice.randrange(1000))})


CLIENTS: list[Client] = [
    *(chat, chat, openai, anthropic, embed, other_model, preset),
    *(image, image, image, bad_image),
    *(stream, openai_stream, stream_leaver),
    *(reader, reader, chat_leaver, image_leaver),
]


async def _post(r: Round, base: str, path: str, body: object) -> str:
    answer = await r.h.http.post(base + path, json=body)
    return _fine(r, path, answer.status_code)


def _fine(r: Round, what: str, status: int) -> str:
    if status not in FINE:
        raise Broken(f"{r.name}: {what} was answered with {status}")
    return str(status)


async def _stream(r: Round, path: str, body: object, lines: int) -> str:
    """Read so many lines. An answer that ends must say whether it is complete."""
    async with r.h.http.stream("POST", r.h.gate + path, json=body) as answer:
        if answer.status_code != 200:
            return _fine(r, path, answer.status_code)
        said = []
        async for line in answer.aiter_lines():
            said.append(line)
            if len(said) > lines:
                return "left"
        text = "\n".join(said)
    complete = "data: [DONE]" in said if path.startswith("/v1/") else '"done":true' in text.replace(" ", "")
    if not complete and '"error"' not in text:
        raise Broken(f"{r.name}: an answer to {path} was cut and looks complete: {text[-200:]!r}")
    return "complete" if complete else "error in the stream"


async def _leave(r: Round, base: str, path: str, body: object) -> str:
    missing = r.dice.choice([0, 0, 10])
    writer = await raw(base, path, body, missing=missing)
    await asyncio.sleep(r.dice.random() * 0.2)
    leave(writer, r.dice.choice(["reset", "close"]))
    return "left"


# --------------------------------------------------------------------------------------------------------- the run


@contextlib.asynccontextmanager
async def arena(folder: Path, *, warm: bool = False, presets: Iterable[PresetText] = ()) -> AsyncIterator[House]:
    """The gate, its engines, and a look at every event whether it gave the card away twice."""
    settings = SETTINGS | ({"warm_model": "llama3"} if warm else {})
    async with house(folder, presets, alarms=True, **settings, **two(folder)) as h:
        crimes: list[str] = []

        def look(kind: str, fields: dict[str, Any]) -> None:
            held = [lease.tenant for lease in h.view.leases]
            if len(set(held)) > 1 or held.count("comfyui") > 1:
                crimes.append(f"at {kind} {fields} the card is given to {held}")

        h.app.arbiter.watch(look)
        yield h
        if crimes:
            raise Broken(crimes[0])


async def run(rounds: int, seed: int, *, first: int = 0, owned: bool = False, say: bool = False) -> Counter[str]:
    """Play them. Raises Broken."""
    tally: Counter[str] = Counter()
    presets = [llama("coder"), llama("writer")] if owned else []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        async with arena(Path(folder), warm=seed % 2 == 1, presets=presets) as h:
            for number in range(first, first + rounds):
                round_ = Round(h, f"seed {seed}, round {number}", [p.name for p in presets])
                h.events.clear()
                try:
                    tally += await round_.play()
                except BaseException:
                    if say:
                        _tell(round_, h)
                    raise
                if say and (number + 1) % 10 == 0:
                    print(f"{number + 1 - first}/{rounds} rounds, {tally.total()} clients", flush=True)
    return tally


def _tell(round_: Round, h: House) -> None:
    print(f"\n{round_.name}", file=sys.stderr)
    for line in round_.story:
        print(f"  {line}", file=sys.stderr)
    for kind, fields in h.events[-60:]:
        print(f"  event {kind} {json.dumps(fields, default=str)}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="default: another one every time")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--owned", action="store_true", help="with two presets that the gate starts and stops itself")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1, 10_000) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    try:
        tally = uvloop.run(run(given.rounds, seed, first=given.first, owned=given.owned, say=True))
    except (Broken, BaseExceptionGroup) as error:
        again = f"python -m tests.e2e.chaos --seed {seed}" + (" --owned" if given.owned else "")
        print(f"\n{error}\nagain: {again} --rounds {given.rounds} --first {given.first}", file=sys.stderr)
        return 1
    for what, count in sorted(tally.items()):
        print(f"{count:6} {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
