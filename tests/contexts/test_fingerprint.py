"""What must match, and what may differ, between the engine that saved and the one that restores."""

from __future__ import annotations

import os

import pytest

from gpu_turnstile.contexts.fingerprint import differing, flag_value, traits
from gpu_turnstile.contexts.identity import facts

PLAIN = ("llama-server", "-m", "m.gguf", "--port", "1", "-c", "4096", "-np", "2")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (("-ctk", "q8_0"), ["KV type K"]),
        (("--cache-type-v=q4_0",), ["KV type V"]),
        (("-fa", "off"), ["flash attention"]),
        (("--swa-full",), ["SWA"]),
        (("-kvu",), ["unified KV"]),
        (("-np", "4"), ["slots"]),
        (("--lora", "a.gguf"), ["other flags"]),
        (("--rope-scale", "-2"), ["other flags"]),
        (("-c", "8192", "--port", "2", "-t", "8", "--api-key", "k"), []),
        (("--temp", "-1", "-lv", "3"), []),
    ],
)
def test_what_changes_the_numbers_in_the_cache_is_told_by_its_name(more, names):
    assert differing(traits(PLAIN, {}), traits((*PLAIN, *more), {})) == names


def test_a_variable_counts_like_its_flag():
    assert differing(traits(PLAIN, {}), traits(PLAIN, {"LLAMA_ARG_CACHE_TYPE_K": "q8_0"})) == ["KV type K"]
    assert differing(traits(PLAIN, {}), traits(PLAIN, {"LLAMA_ARG_ROPE_SCALE": "2"})) == ["other flags"]
    assert not differing(traits(PLAIN, {}), traits(PLAIN, {"LLAMA_ARG_THREADS": "2"}))


def test_spellings_of_one_flag_are_one_flag():
    assert traits(("l", "-ctk", "f16"), {}) == traits(("l", "--cache-type-k=f16"), {})


def test_the_order_of_flags_makes_no_difference_and_the_last_one_counts():
    assert traits(("l", "--lora", "a", "--mmproj", "b"), {}) == traits(("l", "--mmproj", "b", "--lora", "a"), {})
    assert flag_value(("l", "-np", "2", "-np", "3"), "-np") == "3"
    assert flag_value(("l",), "-np") is None


def test_a_model_that_was_written_again_is_another_also_with_the_same_size_and_date(tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(bytes(100_000))
    before, found = facts(PLAIN, {}, ("sh",), [model]), model.stat()
    with model.open("r+b") as file:
        file.seek(90_000)
        file.write(b"x")
    os.utime(model, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert differing(before, facts(PLAIN, {}, ("sh",), [model])) == ["model"]


def test_a_model_that_cannot_be_seen_from_here_is_known_by_its_name():
    one, other = (facts(("l", "--hf-repo", "a/b", "--hf-file", file), {}, ("sh",), []) for file in ("q4", "q5"))
    assert differing(one, other) == ["model"]


@pytest.mark.parametrize("word", ["{}", "{}:0.5", "other.gguf,{}"])
def test_an_adapter_that_was_replaced_is_another(tmp_path, word):
    adapter = tmp_path / "a.gguf"
    adapter.write_bytes(b"one")
    argv = (*PLAIN, "--lora", word.format(adapter))
    before = facts(argv, {}, ("sh",), [])
    adapter.write_bytes(b"two")
    assert differing(before, facts(argv, {}, ("sh",), [])) == ["adapters"]


def test_another_program_behind_the_same_name_is_another(tmp_path, monkeypatch):
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    before = facts(PLAIN, {}, ("llama-server",), [])
    program.write_text("#!/bin/sh\n# newer\n")
    assert differing(before, facts(PLAIN, {}, ("llama-server",), [])) == ["program"]
