"""What a preset needs of the card: computed, then learned; who says so; and when nothing can be known."""

from __future__ import annotations

import json

from gpu_turnstile.sim import GB
from tests.aio import run_async, until
from tests.e2e.house import house, llama


async def _meta(h, name):
    entries = (await h.http.get(f"{h.gate}/v1/models")).json()["data"]
    return next(entry["meta"] for entry in entries if entry["id"] == name)


@run_async
async def test_a_size_nobody_declared_is_learned_from_the_load_and_listed_as_such(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b", runtime="vram_gb = 9")]) as h:
        assert (await _meta(h, "a"))["vram_from"] is None
        await h.chat("a")
        await until(lambda: h.app.arbiter.seats["a"].tenant.footprint > 0, 5)
        meta = await _meta(h, "a")
        assert (meta["vram_gb"], meta["vram_from"], meta["loaded"]) == (8.0, "learned", True)
        await h.chat("b")
        meta = await _meta(h, "b")
        assert (meta["vram_gb"], meta["vram_from"]) == (9.0, "declared")
        engines = (await h.http.get(f"{h.gate}/status")).json()["engines"]
        assert {e["name"]: (e["vram_gb"], e["vram_from"]) for e in engines} == {
            "a": (8.0, "learned"),
            "b": (9.0, "declared"),
        }
    kept = json.loads((tmp_path / "state" / "learned.json").read_text())
    assert kept["a"]["bytes"] == 8 * GB
    async with house(tmp_path) as h:
        assert (await _meta(h, "a"))["vram_from"] == "learned"


@run_async
async def test_a_learned_size_never_refuses_what_has_run_but_counts_against_others(tmp_path):
    """An engine that takes what it finds (vLLM takes 0.9 of the card) would else run once and never again."""
    async with house(tmp_path, [llama("huge", "--sim-vram-gb", "22"), llama("b")], alarms=True) as h:
        assert h.app.arbiter._rules.capacity < 22
        for model in ("huge", "b", "huge"):
            assert (await h.chat(model)).status_code == 200
        await h.chat("b")
        h.card.hold("game", 4 * GB, pid=0)
        answer = await h.chat("huge")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (422, "model_unavailable")
        message = answer.json()["error"]["message"]
        assert "22 GB (learned)" in message
        assert "game" in message
        assert h.view.residents == ("b",)
        h.card.free("game", pid=0)


@run_async
async def test_a_refusal_says_how_the_size_is_known(tmp_path):
    async with house(tmp_path, [llama("big", runtime="vram_gb = 200")]) as h:
        message = (await h.chat("big")).json()["error"]["message"]
        assert "200 GB (declared)" in message


@run_async
async def test_a_card_that_cannot_be_read_lets_swaps_through_unless_told_to_refuse(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with house(tmp_path / "one", [llama("a")], turnstile_gpu="none") as h:
        assert (await h.chat("a")).status_code == 200
    async with house(tmp_path / "two", [llama("a")], turnstile_gpu="none", llmc_vram_unknown="refuse") as h:
        answer = await h.chat("a")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (422, "model_unavailable")
        assert "LLMC_VRAM_UNKNOWN" in answer.json()["error"]["message"]
        assert h.view.residents == ()
