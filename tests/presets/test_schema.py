"""What a preset file may say, and how a mistake in it is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpu_turnstile.core.model import Mode
from gpu_turnstile.presets.errors import PresetError, find_line
from gpu_turnstile.presets.schema import Bench, Model, PresetFile, Runtime, check_alias, check_name, parse_preset
from tests.presets.build import llama, parse

DOCS = Path(__file__).parents[2] / "docs" / "presets.md"

FULL = """\
engine = "llama-server"
capabilities = ["tools", "vision"]
aliases = ["gpt-4o"]

[model]
repo = "org/Qwen3-Coder-30B-GGUF"
file = "Qwen3-Coder-30B-Q4_K_M.gguf"
mmproj = "mmproj-F16.gguf"
chat_template = "qwen3.jinja"

[runtime]
kind = "docker"
image = "registry/llama:server-cuda"
command = ["llama-server"]
args = ["--flash-attn", "on"]
env = { LLAMA_ARG_THREADS = "8" }
mounts = ["/srv/models:/models:ro"]
gpus = ["0"]
context = 131072
parallel = 2
max_output = 32768
reasoning = true
vram_gb = 21.5
drain_grace_s = 60
idle_unload_s = 1800
stop_grace_s = 10

[bench]
tokenizer = "org/Qwen3-Coder-30B"
"""


def complaint(text: str, name: str = "p") -> PresetError:
    with pytest.raises(PresetError) as caught:
        parse(text, name)
    assert str(caught.value).isprintable()
    return caught.value


def test_the_documented_preset_is_read() -> None:
    preset = parse(FULL, "qwen3-coder")
    assert (preset.name, preset.engine, preset.mode) == ("qwen3-coder", "llama-server", Mode.LLM)
    assert preset.aliases == ("gpt-4o",)
    assert preset.capabilities == ("tools", "vision")
    assert preset.stem == "Qwen3-Coder-30B-Q4_K_M"
    assert (preset.runtime.context, preset.runtime.parallel, preset.runtime.vram_gb) == (131072, 2, 21.5)
    assert preset.runtime.drain_grace_s == 60
    assert preset.bench.tokenizer == "org/Qwen3-Coder-30B"


def test_the_documentation_shows_that_preset_and_names_every_key() -> None:
    text = DOCS.read_text(encoding="utf-8")
    shown = re.findall(r"```toml\n(engine.*?)```", text, re.DOTALL)
    assert len(shown) >= 3
    for example in shown:
        parse(example)
    keys = {key for table in (PresetFile, Model, Runtime, Bench) for key in table.model_fields}
    assert keys <= set(re.findall(r"`([a-z_]+)`", text))


def test_a_preset_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        parse(FULL).engine = "vllm"  # type: ignore[misc]


OTHERS = {
    "an external ComfyUI": (
        'engine = "comfyui"\nruntime = { kind = "external", url = "http://gpu:8188" }',
        Mode.COMFYUI,
    ),
    "a trainer": (
        'engine = "train"\nruntime = { kind = "process", command = ["train", "{port}"], health = "/up" }',
        Mode.TRAIN,
    ),
    "vLLM by repository": (
        'engine = "vllm"\nmodel.repo = "org/M"\n'
        'runtime = { kind = "process", command = ["vllm", "serve", "{model}"], port = 8000 }',
        Mode.LLM,
    ),
    "a systemd unit": (
        'engine = "ollama"\nruntime = { kind = "systemd", unit = "ollama.service", port = 11435 }',
        Mode.LLM,
    ),
    "a systemd unit of the user": (
        'engine = "ollama"\nruntime = { kind = "systemd", unit = "ollama@1", user = true, port = 11435 }',
        Mode.LLM,
    ),
    "an Ollama told its port by variable": (
        'engine = "ollama"\n'
        'runtime = { kind = "process", command = ["ollama", "serve"], env = { OLLAMA_HOST = "127.0.0.1:{port}" } }',
        Mode.LLM,
    ),
}


@pytest.mark.parametrize(("text", "mode"), OTHERS.values(), ids=OTHERS)
def test_a_preset_can_be(text: str, mode: Mode) -> None:
    assert parse(text).mode is mode


# change of FULL -> (line, key, part of the message, nearest)
MISTAKES: dict[str, tuple[str, str, int | None, str, str, str | None]] = {
    "unknown key in a table": ("context =", "contxt =", 19, "runtime.contxt", "unknown key", "context"),
    "unknown table": ("[bench]", "[bensh]", 28, "bensh", "unknown key", "bench"),
    "unknown key at the top": ("aliases =", "alias =", 3, "alias", "unknown key", "aliases"),
    "a name of its own": ("aliases =", "name = 'x'\naliases =", 3, "name", "unknown key", None),
    "unknown engine": ('"llama-server"\ncap', '"lama-server"\ncap', 1, "engine", "not one of", "llama-server"),
    "unknown runtime": ('kind = "docker"', 'kind = "dokcer"', 12, "runtime.kind", "not one of", "docker"),
    "a missing engine": ('engine = "llama-server"', "", None, "engine", "is missing", None),
    "a missing kind": ('kind = "docker"', "", 11, "runtime.kind", "is missing", None),
    "a number in quotes": ("parallel = 2", 'parallel = "2"', 20, "runtime.parallel", "whole number", None),
    "a fraction of a slot": ("parallel = 2", "parallel = 2.5", 20, "runtime.parallel", "whole number", None),
    "true as a number": ("parallel = 2", "parallel = true", 20, "runtime.parallel", "whole number", None),
    "no slots": ("parallel = 2", "parallel = 0", 20, "runtime.parallel", "greater than or equal to 1", None),
    "a date": ("parallel = 2", "parallel = 2026-01-01", 20, "runtime.parallel", "whole number", None),
    "endless memory": ("21.5", "inf", 23, "runtime.vram_gb", "finite", None),
    "no memory": ("21.5", "0", 23, "runtime.vram_gb", "greater than 0", None),
    "a number as a switch": ("reasoning = true", "reasoning = 1", 22, "runtime.reasoning", "true or false", None),
    "a text for a list": ('["gpt-4o"]', '"gpt-4o"', 3, "aliases", "list", None),
    "a number in a list": ('["gpt-4o"]', "[4]", 3, "aliases", "text in quotes", None),
    "a number as variable": ('= "8"', "= 8", 16, "runtime.env.LLAMA_ARG_THREADS", "text in quotes", None),
    "a bad variable name": ("LLAMA_ARG_THREADS", '"A B"', 16, "runtime.env.A B", "name of a variable", None),
    "a misspelt key that is missing now": ("kind =", "knd =", 12, "runtime.knd", "unknown key", "kind"),
    "an alias twice": ('["gpt-4o"]', '["a", "a"]', 3, "aliases", '"a" is there twice', None),
    "a reserved alias": ('["gpt-4o"]', '["auto"]', 3, "aliases", '"auto"', None),
    "a capability with a blank": ('"vision"]', '"big vision"]', 2, "capabilities", '"big vision"', None),
    "a text for a table": ('{ LLAMA_ARG_THREADS = "8" }', '"X=8"', 16, "runtime.env", "table", None),
    "an empty image": ('"registry/llama:server-cuda"', '""', 13, "runtime.image", "must not be empty", None),
    "no image": ("image =", "#", 12, "runtime.kind", 'needs "image"', None),
    "a URL for a container": ("gpus =", 'url = "http://x"\ngpus =', 18, "runtime.url", "no meaning", None),
    "an image for a process": ('kind = "docker"', 'kind = "process"', 13, "runtime.image", "no meaning", None),
    "a relative mount": ("/srv/models:/", "srv/models:/", 17, "runtime.mounts", "/on/the/host", None),
    "file and path": ("mmproj =", 'path = "/x"\nmmproj =', 8, "model.path", "stands alone", None),
    "file without repo": ("repo =", "#", 7, "model.file", 'needs "repo"', None),
    "repo without file": ("file =", "#", 5, "model", 'needs "file"', None),
    "a repo without owner": ("org/Qwen3-Coder-30B-GGUF", "Qwen3", 6, "model.repo", "match", None),
    "our own flag": ('["--flash-attn", "on"]', '["--port=1"]', 15, "runtime.args", "the gate sets", None),
    "a health path": ("gpus =", 'health = "/x"\ngpus =', 18, "runtime.health", "has its own", None),
    "port 0": ("parallel = 2", "port = 0\nparallel = 2", 20, "runtime.port", "greater", None),
}


@pytest.mark.parametrize(("old", "new", "line", "key", "message", "nearest"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_with_line_key_and_what_was_meant(
    old: str, new: str, line: int | None, key: str, message: str, nearest: str | None
) -> None:
    text = FULL.replace(old, new, 1)
    assert text != FULL
    error = complaint(text)
    assert (error.line, error.key, error.nearest) == (line, key, nearest)
    assert message in str(error)
    assert str(error).startswith("presets/p.toml")


def test_the_one_line_reads_as_documented() -> None:
    error = complaint(FULL.replace("context =", "contxt ="), "qwen")
    assert str(error) == 'presets/qwen.toml:19: unknown key "runtime.contxt"; did you mean "context"?'


CROSS = {
    "a process without a command": ('engine = "llama-server"\nmodel.path = "/m"\nruntime.kind = "process"', "command"),
    "an external engine without a URL": ('engine = "ollama"\nruntime.kind = "external"', "url"),
    "an external engine with TLS": ('engine = "ollama"\nruntime = { kind = "external", url = "https://x" }', "TLS"),
    "a unit without an address": ('engine = "ollama"\nruntime = { kind = "systemd", unit = "x" }', '"port" or "url"'),
    "a unit that would be an option": (
        'engine = "ollama"\nruntime = { kind = "systemd", unit = "--host=evil", port = 1 }',
        "cannot be the name of a service unit",
    ),
    "a unit that would be a pattern": (
        'engine = "ollama"\nruntime = { kind = "systemd", unit = "llm*", port = 1 }',
        "cannot be the name of a service unit",
    ),
    "a user's unit that is no unit": (
        'engine = "command"\nruntime = { kind = "process", command = ["{port}"], user = true }',
        "only for systemd",
    ),
    "a model server without a model": ('engine = "vllm"\nruntime = { kind = "docker", image = "x" }', "[model]"),
    "an engine that cannot learn its port": (
        'engine = "command"\nruntime = { kind = "process", command = ["serve"] }',
        "{port}",
    ),
    "a placeholder without a model": (
        'engine = "command"\nruntime = { kind = "process", command = ["serve", "{model}", "{port}"] }',
        "{model}",
    ),
    "a health path that is no path": (
        'engine = "command"\nruntime = { kind = "process", command = ["{port}"], health = "up" }',
        '"/"',
    ),
    "an empty model": ('engine = "llama-server"\nmodel = {}\nruntime = { kind = "docker", image = "x" }', '"repo"'),
    "a file name that is no name": ("", "stem"),
}


@pytest.mark.parametrize(("text", "part"), CROSS.values(), ids=CROSS)
def test_refused_is(text: str, part: str) -> None:
    assert part in str(complaint(text, "p" if text else "my preset"))


@pytest.mark.parametrize("name", ["auto", "", "a/b", "a:b", "-a", ".a", "a b", "ä", "a\n", "x" * 129])
def test_a_name_that_would_break_headers_or_labels_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a name"):
        check_name(name)


@pytest.mark.parametrize("alias", ["auto", "auto:latest", "auto:x", "cap:x", "", "a b", "a\x00"])
def test_an_alias_cannot_be_a_reserved_word(alias: str) -> None:
    with pytest.raises(ValueError, match="cannot be an alias"):
        check_alias(alias)


@pytest.mark.parametrize("alias", ["gpt-4o", "openai/gpt-4o", "llama3:8b", "hf.co/org/x-GGUF:Q4", "Modèle"])
def test_an_alias_is_whatever_clients_are_used_to(alias: str) -> None:
    assert check_alias(alias) == alias


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        ({"path": "/m/Qwen3-0.6B-Q8_0.gguf"}, "Qwen3-0.6B-Q8_0"),
        ({"path": "C:\\models\\a.GGUF"}, "a"),
        ({"path": "/m/Qwen2.5-7B/"}, "Qwen2.5-7B"),
        ({"repo": "org/r", "file": "sub/x.Q4_K_M.gguf"}, "x.Q4_K_M"),
        ({"repo": "org/Qwen3-0.6B"}, "Qwen3-0.6B"),
        ({"path": "x.ninfer"}, "x"),
    ],
)
def test_the_model_id_is_the_artifacts_stem(model: dict[str, Any], stem: str) -> None:
    assert Model(**model).stem == stem


# ---------------------------------------------------------------------------------------------------------- revision


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('aliases = ["gpt-4o"]', ""),
        ('"vision"', '"images"'),
        ("drain_grace_s = 60", "drain_grace_s = 5"),
        ("idle_unload_s = 1800", ""),
        ("stop_grace_s = 10", ""),
        ("max_output = 32768", ""),
        ("reasoning = true", "reasoning = false"),
        ("vram_gb = 21.5", "vram_gb = 20"),
        ('tokenizer = "org/Qwen3-Coder-30B"', ""),
        ("context = 131072", "# a comment\ncontext = 131_072"),
    ],
)
def test_what_does_not_concern_the_engine_leaves_the_revision_alone(old: str, new: str) -> None:
    assert parse(FULL.replace(old, new, 1)).revision == parse(FULL).revision


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("context = 131072", "context = 65536"),
        ("parallel = 2", ""),
        ('"on"]', '"off"]'),
        ("server-cuda", "server"),
        ("Q4_K_M", "Q8_0"),
        ('"8"', '"4"'),
        (":ro", ":rw"),
    ],
)
def test_what_concerns_the_engine_changes_the_revision(old: str, new: str) -> None:
    assert parse(FULL.replace(old, new, 1)).revision != parse(FULL).revision


def test_the_revision_is_the_same_in_every_run_and_under_every_name() -> None:
    assert parse(llama("a")).revision == parse(llama("a"), "other").revision == "f47cb07216029622"


# ------------------------------------------------------------------------------------------------------ the odd corners


def test_the_schema_can_be_exported_for_editors() -> None:
    schema = json.dumps(PresetFile.model_json_schema())
    assert '"engine"' in schema
    assert '"name"' not in schema


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("a = 1\n[t]\nb = 2", ("t", "b"), 3),
        ("t.b = 1", ("t", "b"), 1),
        ("t = { a = 1, b = 2 }", ("t", "b"), 1),
        ("x = 1\n[t] # c\n'b' = 2", ("t", "b"), 3),
        ("[t.u]\nb = 1", ("t", "u", "b"), 2),
        ("b = 1\n[t]\nc = 2", ("t", "b"), 2),
        ("b = 1", ("t",), None),
        ("", (), None),
        ("[t]\r\nb = 1\r\n", ("t", "b"), 2),
    ],
)
def test_the_line_of_a_key_is_found(text: str, path: tuple[str, ...], line: int | None) -> None:
    assert find_line(text, path) == line


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "url", "x"]), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(["engine", "capabilities", "aliases", "model", "runtime", "bench", "junk"])


@given(st.dictionaries(KEYS, JUNK))
def test_any_data_at_all_is_either_a_preset_or_one_line(data: dict[str, Any]) -> None:
    message = ""
    try:
        parse_preset("p", "", data, "p.toml")
    except PresetError as caught:
        message = str(caught)
    assert message.isprintable()
