"""Ephemeral presets over HTTP, in front of real requests."""

from __future__ import annotations

from tests.aio import run_async, until
from tests.e2e.house import house, llama, write


@run_async
async def test_a_sweep_registers_uses_and_removes_its_variants(tmp_path):
    async with house(tmp_path, [llama("a"), llama("b")]) as h:
        made = await h.http.post(
            f"{h.gate}/v1/presets", json={"name": "a-8k", "from": "a", "runtime": {"context": 8192}}
        )
        assert made.status_code == 201, made.text
        assert made.json()["meta"]["context"] == 8192
        listed = (await h.http.get(f"{h.gate}/v1/models")).json()["data"]
        assert [(e["id"], e["meta"]["ephemeral_of"]) for e in listed] == [("a", None), ("a-8k", "a"), ("b", None)]
        assert (await h.chat("a-8k")).status_code == 200
        assert h.view.residents == ("a-8k",)
        props = (await h.http.get(f"{h.app.arbiter.seat('a-8k').engine.url}/props")).json()
        assert props["default_generation_settings"]["n_ctx"] == 8192

        write(tmp_path, [llama("c")])  # a reload
        await h.app.refresh()
        assert h.view.residents == ("a-8k",)
        assert (await h.chat("a-8k")).status_code == 200
        assert h.kinds().count("admitting") == 1

        gone = await h.http.delete(f"{h.gate}/v1/presets/a-8k")
        assert gone.status_code == 204
        await until(lambda: h.view.residents == (), 5)
        answer = await h.chat("a-8k")
        assert (answer.status_code, answer.headers["x-turnstile-error"]) == (404, "unknown_model")


@run_async
async def test_a_removed_variant_finishes_its_answer_first(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        await h.http.post(f"{h.gate}/v1/presets", json={"name": "v", "from": "a"})
        async with h.streaming("v", max_tokens=60) as lines:
            gone = await h.http.request("DELETE", f"{h.gate}/v1/presets", json={"name": "v"})
            assert gone.status_code == 204
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest
        await until(lambda: h.view.residents == (), 5)


@run_async
async def test_a_call_brings_nothing_that_could_run(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        for runtime in ({"command": ["/bin/sh"]}, {"args": ["--log-file", "/tmp/x"]}, {"image": "x"}):
            answer = await h.http.post(f"{h.gate}/v1/presets", json={"name": "v", "from": "a", "runtime": runtime})
            assert (answer.status_code, answer.headers["x-turnstile-error"]) == (400, "bad_request")
            assert "runtime." in answer.json()["message"]
        assert [p["name"] for p in (await h.http.get(f"{h.gate}/v1/presets")).json()["presets"]] == ["a"]


@run_async
async def test_a_file_is_not_removed_over_http(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        refused = await h.http.delete(f"{h.gate}/v1/presets/a")
        assert refused.status_code == 400
        assert "a file" in refused.json()["message"]
        assert (await h.http.delete(f"{h.gate}/v1/presets/nobody")).status_code == 404
        assert (await h.http.delete(f"{h.gate}/v1/presets")).status_code == 400


@run_async
async def test_an_edited_folder_takes_effect_without_a_listing(tmp_path):
    async with house(tmp_path, [llama("a")]) as h:
        write(tmp_path, [llama("b")])
        await until(lambda: "b" in h.app.arbiter.seats, 10)
        assert (await h.chat("b")).status_code == 200
