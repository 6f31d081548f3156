"""Ephemeral presets: they vary what is on disk, and bring nothing of their own that could run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_turnstile.presets.ephemeral import FLAGS, MOST
from gpu_turnstile.presets.errors import PresetError
from gpu_turnstile.presets.store import PresetStore

BASE = """
engine = "llama-server"
aliases = ["gpt-4o"]
capabilities = ["vision"]
[model]
path = "/models/base-Q4.gguf"
[runtime]
kind = "process"
command = ["llama-server"]
args = ["--flash-attn", "on"]
env = { LLAMA_ARG_THREADS = "8" }
context = 4096
"""
OTHERS = {
    "image": 'engine = "comfyui"\n[runtime]\nkind = "docker"\nimage = "comfy:1"\nport = 8188\n',
    "outside": 'engine = "vllm"\n[runtime]\nkind = "external"\nurl = "http://127.0.0.1:1"\n',
    "trained": 'engine = "train"\n[runtime]\nkind = "process"\ncommand = ["train", "{port}"]\n',
}


@pytest.fixture
def store(tmp_path: Path) -> PresetStore:
    (tmp_path / "base.toml").write_text(BASE)
    for name, text in OTHERS.items():
        (tmp_path / f"{name}.toml").write_text(text)
    store = PresetStore(tmp_path)
    store.refresh()
    assert store.error is None
    return store


def variant(name: str = "v", base: str = "base", runtime: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "from": base, **({"runtime": runtime} if runtime is not None else {}), **more}


def test_a_variant_is_its_base_with_the_change_in_it(store):
    preset = store.register(variant(runtime={"context": 8192, "args": ["-ctk", "q8_0", "--top-p=0.9"]}))
    assert preset.argv(1)[-4:] == ("on", "-ctk", "q8_0", "--top-p=0.9")
    assert preset.argv(1)[preset.argv(1).index("-c") :][:2] == ("-c", "8192")
    assert preset.runtime.command == ("llama-server",)
    assert preset.environment(1) == {"LLAMA_ARG_THREADS": "8"}
    assert preset.revision != store.catalogue.presets["base"].revision


def test_aliases_and_capabilities_are_not_inherited_and_the_model_id_stays_with_the_file(store):
    store.register(variant(aliases=["sweep-1"], capabilities=["tools"]))
    directory = store.catalogue.directory()
    assert store.catalogue.find("gpt-4o").name == "base"
    assert store.catalogue.find("base-Q4").name == "base"
    assert store.catalogue.find("sweep-1").name == "v"
    assert directory.capabilities == {"vision": ("base",), "tools": ("v",)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("command", ["/bin/sh"]),
        ("image", "evil:1"),
        ("mounts", ["/:/host:rw"]),
        ("gpus", ["all"]),
        ("env", {"LD_PRELOAD": "/tmp/x.so"}),
        ("cwd", "/tmp"),
        ("kind", "docker"),
        ("url", "http://elsewhere"),
        ("unit", "ssh.service"),
        ("listen", ":1"),
        ("api_key", "x"),
        ("health", "/x"),
    ],
)
def test_what_could_run_or_reach_something_cannot_be_brought(store, key, value):
    with pytest.raises(PresetError, match=f'unknown key "runtime.{key}"'):
        store.register(variant(runtime={key: value}))
    assert "v" not in store.catalogue.presets


@pytest.mark.parametrize("table", ["engine", "model", "bench"])
def test_neither_can_another_engine_or_model(store, table):
    with pytest.raises(PresetError, match=f'unknown key "{table}"'):
        store.register(variant(**{table: "x"}))


@pytest.mark.parametrize(
    "args",
    [
        ["--log-file", "/etc/cron.d/x"],
        ["--path", "/"],
        ["--slot-save-path", "/"],
        ["--chat-template-file", "/etc/passwd"],
        ["--lora", "/x"],
        ["-m", "/x"],
        ["--model", "/x"],
        ["-hf", "evil/model"],
        ["--model-url", "http://evil"],
        ["--rpc", "evil:1"],
        ["--host", "0.0.0.0"],
        ["--port", "1"],
        ["--tools", "all"],
        ["--api-key-file", "x"],
        ["--temp", "0.5", "stray"],
        ["stray"],
        ["-ctk", "/etc/passwd"],
        ["-ctk", "../x"],
        ["-ctk", "a b"],
        ["-ctk", "{model}"],
        ["-ctk="],
        ["-ctk", "x\ny"],
        ["--temp=$(id)"],
    ],
)
def test_flags_are_numbers_and_choices_and_never_files_ports_or_programs(store, args):
    with pytest.raises(PresetError, match=r"runtime\.args"):
        store.register(variant(runtime={"args": args}))


def test_no_flag_that_may_be_brought_takes_a_file_an_address_or_a_program():
    suspicious = ("file", "path", "url", "host", "port", "repo", "trust", "tool", "plugin", "template", "dir", "lora")
    found = [flag for flags in FLAGS.values() for flag in flags if any(word in flag for word in suspicious)]
    assert found == []


def test_an_engine_whose_flags_are_not_known_takes_none(store):
    with pytest.raises(PresetError, match='of the engine "comfyui" may not bring flags'):
        store.register(variant(base="image", runtime={"args": ["--listen"]}))


def test_a_negative_number_is_a_value_and_no_flag(store):
    assert store.register(variant(runtime={"args": ["-n", "-1", "--seed=-1"]})).runtime.args[-2:] == ("-1", "--seed=-1")


def test_an_engine_somebody_else_runs_cannot_be_varied(store):
    with pytest.raises(PresetError, match="the gate does not start it itself"):
        store.register(variant(base="outside"))


@pytest.mark.parametrize("name", ["base", "gpt-4o", "base-Q4", "image"])
@pytest.mark.parametrize("taken_by", ["name", "alias"])
def test_a_name_on_disk_wins(store, name, taken_by):
    with pytest.raises(PresetError, match=f'"{name}" is taken'):
        store.register(variant(name) if taken_by == "name" else variant(aliases=[name]))
    assert store.catalogue.variants == {}


def test_two_variants_cannot_share_an_alias_but_one_can_be_replaced(store):
    store.register(variant("v", aliases=["x"]))
    with pytest.raises(PresetError, match='"x" is taken'):
        store.register(variant("w", aliases=["x"]))
    store.register(variant("v", aliases=["x"], runtime={"context": 9}))
    assert store.catalogue.presets["v"].runtime.context == 9


def test_an_unknown_base_is_named_with_the_nearest_one(store):
    with pytest.raises(PresetError, match='did you mean "base"'):
        store.register(variant(base="bose"))


def test_a_variant_of_a_variant_is_refused(store):
    store.register(variant())
    with pytest.raises(PresetError, match="no preset on disk"):
        store.register(variant("w", base="v"))


def test_variants_survive_a_reload_and_follow_their_base(store, tmp_path):
    store.register(variant(runtime={"context": 9}))
    (tmp_path / "base.toml").write_text(BASE.replace('"on"', '"off"'))
    assert store.refresh()
    assert store.catalogue.presets["v"].runtime.args == ("--flash-attn", "off")
    assert store.catalogue.presets["v"].runtime.context == 9


def test_a_variant_survives_a_reload_that_fails(store, tmp_path):
    store.register(variant())
    (tmp_path / "bad.toml").write_text("nonsense = 1")
    store.refresh()
    assert store.error is not None
    assert "v" in store.catalogue.presets


def test_a_variant_goes_with_its_base_and_gives_way_to_a_file_of_its_name(store, tmp_path):
    store.register(variant("v"))
    store.register(variant("w", base="trained"))
    (tmp_path / "v.toml").write_text(BASE.replace("base-Q4", "v-Q4").replace("gpt-4o", "gpt-5"))
    (tmp_path / "trained.toml").unlink()
    store.refresh()
    assert store.error is None
    assert store.catalogue.variants == {}
    assert "w" not in store.catalogue.presets
    assert store.catalogue.presets["v"].stem == "v-Q4"


def test_removed_is_removed(store):
    store.register(variant())
    assert store.remove("v")
    assert not store.remove("v")
    assert not store.remove("base")
    assert "base" in store.catalogue.presets
    assert "v" not in store.catalogue.presets


def test_there_is_a_limit(store):
    for number in range(MOST):
        store.register(variant(f"v{number}"))
    with pytest.raises(PresetError, match=f"there are {MOST} ephemeral presets"):
        store.register(variant("one-more"))
    store.register(variant("v0", runtime={"context": 9}))
