"""The gate in front of an Ollama and a ComfyUI that somebody else runs."""

from __future__ import annotations

import asyncio

from gpu_turnstile.core.model import Phase
from gpu_turnstile.sim import ComfySim, OllamaSim, SimCard
from tests.aio import run_async, until
from tests.e2e.house import house


def engines(tmp_path, **ollama):
    card = SimCard(tmp_path / "card.json")
    return {"card": card, "ollama": OllamaSim(card=card, **ollama), "comfy": ComfySim(card=card)}


def calls(sim, *paths):
    return [entry.path for entry in sim.log if entry.path in paths]


async def ollama_chat(h, model="llama3"):
    body = {"model": model, "stream": False, "messages": [{"role": "user", "content": "hi"}]}
    return await h.http.post(f"{h.gate}/api/chat", json=body)


@run_async
async def test_one_image_job_unloads_ollama_runs_frees_and_gives_the_card_back(tmp_path):
    async with house(tmp_path, **engines(tmp_path)) as h:
        assert (await ollama_chat(h)).status_code == 200
        reply = await h.image(0.2)
        assert reply.status_code == 200
        assert h.view.residents == ("comfyui",)
        await until(lambda: h.view.phase is Phase.IDLE)
        order = [e.path for e in (*h.ollama.log, *h.comfy.log) if e.path in ("/api/generate", "/prompt", "/free")]
        assert order == ["/api/generate", "/prompt", "/free"]
        assert h.app.jobs.ends == {"success": 1}


@run_async
async def test_a_chat_is_held_until_the_image_job_was_freed(tmp_path):
    async with house(tmp_path, **engines(tmp_path)) as h:
        await h.image(0.5)
        chat = asyncio.create_task(ollama_chat(h))
        await until(lambda: h.view.waiting)
        assert not calls(h.ollama, "/api/chat")
        assert (await chat).status_code == 200
        free = next(e.time for e in h.comfy.log if e.path == "/free")
        asked = next(e.time for e in h.ollama.log if e.path == "/api/chat")
        assert free < asked


@run_async
async def test_listing_and_websockets_never_wait(tmp_path):
    async with house(tmp_path, **engines(tmp_path)) as h:
        await h.image(0.5)
        assert (await h.http.get(f"{h.gate}/api/tags")).status_code == 200
        assert (await h.http.get(f"{h.comfy_gate}/queue")).status_code == 200
        assert (await h.http.get(f"{h.comfy_gate}/api/system_stats")).status_code == 200
        assert h.view.residents == ("comfyui",)


@run_async
async def test_images_in_a_row_are_one_batch_with_one_free(tmp_path):
    async with house(tmp_path, **engines(tmp_path)) as h:
        replies = await asyncio.gather(*(h.image(0.1, seed) for seed in range(4)))
        assert {r.status_code for r in replies} == {200}
        await until(lambda: h.view.phase is Phase.IDLE)
        assert calls(h.comfy, "/free") == ["/free"]
        assert h.app.jobs.ends == {"success": 4}


@run_async
async def test_healthz_says_what_the_document_says(tmp_path):
    async with house(tmp_path, **engines(tmp_path)) as h:
        for base in (h.gate, h.comfy_gate):
            health = (await h.http.get(f"{base}/healthz")).json()
            assert health == {"state": "idle", "llm_inflight": 0, "image_pending": False}
        await h.image(0.3)
        assert (await h.http.get(f"{h.gate}/healthz")).json()["state"] == "image"


@run_async
async def test_an_ollama_that_does_not_let_go_does_not_fail_the_image_job(tmp_path):
    async with house(tmp_path, alarms=True, unload_timeout=0.5, **engines(tmp_path)) as h:
        await ollama_chat(h)
        h.ollama.faults.unload_s = -1
        assert (await h.image(0.1)).status_code == 200
        evicted = [f for kind, f in h.events if kind == "evicted"]
        assert evicted[0]["sure"] is False


@run_async
async def test_who_holds_the_card_is_found_out_at_the_start(tmp_path):
    parts = engines(tmp_path)
    async with house(tmp_path, **parts) as h:
        await ollama_chat(h)
        await h.app.arbiter.start()
        assert h.view.residents == ("ollama",)
