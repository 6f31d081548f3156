"""Swaps that cannot work must not cost the one that does: room on the card, rollback, hold-back."""

from __future__ import annotations

import asyncio

from gpu_turnstile.sim import GB
from tests.aio import run_async, until
from tests.e2e.house import house, llama, write


@run_async
async def test_a_preset_larger_than_the_card_is_refused_and_the_resident_stays(tmp_path):
    presets = [llama("a", runtime="vram_gb = 8"), llama("big", runtime="vram_gb = 200")]
    async with house(tmp_path, presets) as h:
        await h.chat("a")
        answer = await h.chat("big")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (422, "model_unavailable")
        assert h.view.residents == ("a",)
        assert h.kinds().count("evicting") == 0


@run_async
async def test_what_other_processes_hold_counts_and_they_are_named(tmp_path):
    presets = [llama("a", runtime="vram_gb = 8"), llama("b", runtime="vram_gb = 12")]
    async with house(tmp_path, presets, alarms=True) as h:
        await h.chat("a")
        h.card.hold("whisper", 14 * GB, pid=0)
        answer = await h.chat("b")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (422, "model_unavailable")
        assert "whisper" in answer.json()["error"]["message"]
        assert h.view.residents == ("a",)
        h.card.free("whisper", pid=0)
        assert (await h.chat("b")).status_code == 200


@run_async
async def test_after_a_failed_swap_the_previous_preset_comes_back(tmp_path):
    async with house(tmp_path, [llama("a"), llama("broken", "--sim-fault", "crash_loading")]) as h:
        await h.chat("a")
        assert (await h.chat("broken")).status_code == 503
        await until(lambda: h.view.residents == ("a",), 10)
        assert "rollback" in h.kinds()


@run_async
async def test_without_rollback_the_card_stays_empty(tmp_path):
    presets = [llama("a"), llama("broken", "--sim-fault", "crash_loading")]
    async with house(tmp_path, presets, llmc_rollback=False) as h:
        await h.chat("a")
        assert (await h.chat("broken")).status_code == 503
        assert h.view.residents == ()


@run_async
async def test_a_preset_that_fails_again_and_again_evicts_nobody_any_more(tmp_path):
    async with house(tmp_path, [llama("a"), llama("broken", "--sim-fault", "crash_loading")]) as h:
        await h.chat("a")
        for _ in range(3):
            assert (await h.chat("broken")).status_code == 503
            await until(lambda: h.view.residents == ("a",), 10)
        swaps = h.kinds().count("admitting")
        answers = await asyncio.gather(*(h.chat("broken") for _ in range(5)))
        assert {a.status_code for a in answers} == {503}
        assert "3 times in a row" in answers[0].json()["error"]["message"]
        assert h.kinds().count("admitting") == swaps
        write(tmp_path, [llama("broken")])
        await h.app.refresh()
        assert (await h.chat("broken")).status_code == 200


@run_async
async def test_the_preset_at_home_comes_back_when_the_other_has_nothing_to_do(tmp_path):
    settings = {"llmc_idle_restore": "a", "llmc_idle_restore_s": 0.3}
    async with house(tmp_path, [llama("a"), llama("b")], **settings) as h:
        assert (await h.chat("b")).status_code == 200
        await until(lambda: h.view.residents == ("a",), 10)
        assert "restore" in h.kinds()
        assert (await h.http.post(f"{h.gate}/unload")).status_code == 200
        await h.quiet()
        assert h.view.residents == ()


@run_async
async def test_a_home_that_is_no_preset_is_said(tmp_path):
    async with house(tmp_path, [llama("a")], llmc_idle_restore="bob") as h:
        warnings = (await h.http.get(f"{h.gate}/status")).json()["warnings"]
        assert any("LLMC_IDLE_RESTORE" in warning and "bob" in warning for warning in warnings)


@run_async
async def test_presets_that_fit_together_stay_together_when_they_may(tmp_path):
    presets = [llama("a", runtime="vram_gb = 8"), llama("b", runtime="vram_gb = 8")]
    async with house(tmp_path, presets, alarms=True, turnstile_colocate=True) as h:
        for model in ("a", "b", "a", "b"):
            assert (await h.chat(model)).status_code == 200
        assert set(h.view.residents) == {"a", "b"}
        assert h.kinds().count("admitting") == 2
