"""Presets change while the gate works: nothing that is unchanged is restarted, and nothing that runs is cut."""

from __future__ import annotations

import asyncio
import signal

import httpx

from tests.aio import run_async, until
from tests.e2e.house import house, llama, write
from tests.e2e.test_program import chat, program


@run_async
async def test_a_stream_survives_every_kind_of_edit_and_its_own_presets_removal(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")]) as h:
        async with h.streaming("a", max_tokens=150) as lines:
            reading = asyncio.create_task(_all(lines))
            for extra in ("--first", "--second"):
                write(tmp_path, [llama("b", extra)])
                await h.app.refresh()
            (tmp_path / "presets" / "b.toml").write_text("engine = [")
            await h.app.refresh()
            health = (await h.http.get(f"{h.gate}/status")).json()["presets"]
            assert health["count"] == 2
            assert "b.toml" in health["error"]
            write(tmp_path, [llama("b", "--second")])
            (tmp_path / "presets" / "a.toml").unlink()
            await h.app.refresh()
            assert (await h.http.get(f"{h.gate}/status")).json()["presets"] == {"count": 1, "error": None}
            assert not reading.done()
            assert "data: [DONE]" in await reading
        assert [f["tenant"] for k, f in h.events if k == "admitting"] == ["a"]
        await until(lambda: [f["tenant"] for k, f in h.events if k == "evicted"] == ["a"])
        assert (await h.chat("a")).status_code == 404
        assert (await h.chat("b")).status_code == 200


async def _all(lines) -> list[str]:
    return [line async for line in lines]


@run_async
async def test_two_edits_of_a_preset_in_use_start_its_new_form_once_after_its_answer(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        async with h.streaming("a", max_tokens=60) as lines:
            for context in (1024, 2048):
                write(tmp_path, [llama("a", runtime=f"parallel = {context // 1024}")])
                await h.app.refresh()
            assert "data: [DONE]" in await _all(lines)
        assert (await h.chat("a")).status_code == 200
        assert [k for k in h.kinds() if k in ("admitted", "evicted")] == ["admitted", "evicted", "admitted"]


@run_async
async def test_sighup_reloads_the_presets_and_ends_nothing(tmp_path):
    async with program(tmp_path, [llama("a")]) as gate, httpx.AsyncClient(trust_env=False, timeout=20) as http:
        url = await gate.until_listening()
        assert (await http.post(f"{url}/v1/chat/completions", json=chat("a"))).status_code == 200
        write(tmp_path, [llama("b")])
        gate.process.send_signal(signal.SIGHUP)

        async with asyncio.timeout(5):
            status = {"presets": {"count": 1}}
            while status["presets"]["count"] != 2:
                status = (await http.get(f"{url}/status")).json()
        assert status["residents"] == ["a"]
        assert gate.process.returncode is None
        gate.process.send_signal(signal.SIGTERM)
        assert await gate.end() == 0
