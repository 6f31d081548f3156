"""Servers that somebody else runs, by presets with listeners of their own."""

from __future__ import annotations

import asyncio

from gpu_turnstile.core.model import Phase
from gpu_turnstile.sim import OllamaSim, SimCard, serve
from gpu_turnstile.sim.a1111 import A1111Sim
from tests.aio import run_async, until
from tests.e2e.house import PresetText, house


def external(name: str, engine: str, url: str) -> PresetText:
    text = f'engine = "{engine}"\n[runtime]\nkind = "external"\nurl = "{url}"\nlisten = "127.0.0.1:0"\n'
    return PresetText(name, text)


@run_async
async def test_a_forge_and_two_ollamas_take_turns_each_on_its_own_port(tmp_path):
    card = SimCard(tmp_path / "card.json")
    second = OllamaSim(card=card, name="ollama-2")
    async with serve(A1111Sim(card=card)) as forge_url, serve(second) as second_url:
        presets = [external("forge", "a1111", forge_url), external("second", "ollama", second_url)]
        first = OllamaSim(card=card)
        async with house(tmp_path, presets, card=card, ollama=first) as h:
            chat = {"model": "llama3", "stream": False, "messages": [{"role": "user", "content": "hi"}]}
            ports = h.app.preset_ports
            bases = (h.gate, f"http://127.0.0.1:{ports['second']}")
            for base in (*bases, *bases):
                assert (await h.http.post(f"{base}/api/chat", json=chat)).status_code == 200
            forge = f"http://127.0.0.1:{ports['forge']}"
            assert (await h.http.get(f"{forge}/sdapi/v1/progress")).status_code == 200
            assert h.view.residents == ("second",)
            image, text = await asyncio.gather(
                h.http.post(f"{forge}/sdapi/v1/txt2img", json={"prompt": "x", "steps": 2}),
                h.http.post(f"{h.gate}/api/chat", json=chat),
            )
            assert (image.status_code, text.status_code) == (200, 200)
            assert len([e for e in second.log if e.path == "/api/chat"]) == 2


@run_async
async def test_an_image_server_of_its_own_leaves_the_card_when_its_work_is_done(tmp_path):
    card = SimCard(tmp_path / "card.json")
    async with serve(A1111Sim(card=card)) as url, house(tmp_path, [external("forge", "a1111", url)], card=card) as h:
        forge = f"http://127.0.0.1:{h.app.preset_ports['forge']}"
        assert (await h.http.post(f"{forge}/sdapi/v1/txt2img", json={"prompt": "x"})).status_code == 200
        await until(lambda: h.view.phase is Phase.IDLE)
