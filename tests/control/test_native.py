"""The presets in Ollama's own terms, read by Ollama's own client."""

from __future__ import annotations

import ollama

from tests.aio import run_async
from tests.e2e.house import house, llama


@run_async
async def test_ollamas_client_lists_the_presets_and_what_is_on_the_card(tmp_path):
    async with house(tmp_path, [llama("a", runtime="vram_gb = 8"), llama("b")]) as h:
        client = ollama.AsyncClient(host=h.gate)
        assert [m.model for m in (await client.list()).models] == ["a", "b"]
        assert (await client.ps()).models == []
        assert (await h.chat("b")).status_code == 200
        assert [m.model for m in (await client.ps()).models] == ["b"]
