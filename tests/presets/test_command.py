"""How a preset becomes a command line."""

from __future__ import annotations

import pytest

from gpu_turnstile.presets.errors import PresetError
from gpu_turnstile.presets.schema import Preset
from tests.presets.build import parse


def test_llama_server_on_a_file_gets_every_flag_its_keys_stand_for_and_its_own_args_last() -> None:
    preset = parse("""
engine = "llama-server"
model = { path = "/m/q.gguf", mmproj = "/m/mm.gguf", chat_template = "/m/t.jinja" }
[runtime]
kind = "process"
command = ["nice", "llama-server"]
args = ["--flash-attn", "on", "--slot-save-path", "/tmp/{port}"]
env = { CUDA_VISIBLE_DEVICES = "0", NAME = "at-{port}" }
context = 8192
parallel = 2
""")
    assert preset.argv(9001) == (
        *("nice", "llama-server", "-m", "/m/q.gguf", "--mmproj", "/m/mm.gguf", "--chat-template-file", "/m/t.jinja"),
        *("--host", "127.0.0.1", "--port", "9001", "-c", "8192", "-np", "2"),
        *("--flash-attn", "on", "--slot-save-path", "/tmp/9001"),
    )
    assert preset.environment(9001) == {"CUDA_VISIBLE_DEVICES": "0", "NAME": "at-9001"}


def test_llama_server_on_a_repository_is_told_to_fetch_from_it() -> None:
    preset = parse("""
engine = "llama-server"
model = { repo = "org/Q-GGUF", file = "q.gguf", mmproj = "mm.gguf" }
runtime = { kind = "docker", image = "x" }
""")
    assert preset.argv(8080, "0.0.0.0") == (
        *("--hf-repo", "org/Q-GGUF", "--hf-file", "q.gguf"),
        *("--mmproj-url", "https://huggingface.co/org/Q-GGUF/resolve/main/mm.gguf"),
        *("--host", "0.0.0.0", "--port", "8080"),
    )


def test_keys_left_out_are_left_to_the_engine() -> None:
    preset = parse('engine = "llama-server"\nmodel.path = "/q"\nruntime = { kind = "process", command = ["l"] }')
    assert preset.argv(1) == ("l", "-m", "/q", "--host", "127.0.0.1", "--port", "1")


@pytest.mark.parametrize(
    ("engine", "model", "command", "argv"),
    [
        ("command", "", '["serve", "--port={port}"]', ("serve", "--port=7")),
        ("command", 'model.path = "/m"', '["serve", "{model}", "{port}"]', ("serve", "/m", "7")),
        ("sglang", 'model.repo = "o/m"', '["serve", "{model}", "{port}"]', ("serve", "o/m", "7")),
        ("command", "", '["serve", "{port}", "--as={name}"]', ("serve", "7", "--as=p")),
        ("command", "", """['x', '{"a": {"b": 1}}', '{port}', '{other}']""", ("x", '{"a": {"b": 1}}', "7", "{other}")),
        ("command", 'model.path = "/{port}"', '["x", "{model}"]\nruntime.port = 7', ("x", "/{port}")),
    ],
)
def test_placeholders_are_replaced_and_other_braces_stay(
    engine: str, model: str, command: str, argv: tuple[str, ...]
) -> None:
    text = f'engine = "{engine}"\n{model}\nruntime.kind = "process"\nruntime.command = {command}'
    assert parse(text).argv(7) == argv


def test_the_home_folder_is_meant_by_a_process_but_not_inside_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    process = parse('engine = "llama-server"\nmodel.path = "~/q"\nruntime = { kind = "process", command = ["l"] }')
    container = parse('engine = "llama-server"\nmodel.path = "~/q"\nruntime = { kind = "docker", image = "x" }')
    assert process.argv(1)[:3] == ("l", "-m", "/home/ann/q")
    assert container.argv(1)[:2] == ("-m", "~/q")


@pytest.mark.parametrize(
    ("engine", "args", "argv", "served"),
    [
        ("ninfer", "[]", ("s", "/m", "7", "--model-id", "p"), "p"),
        ("ninfer", '["--model-id", "q"]', ("s", "/m", "7", "--model-id", "q"), "q"),
        ("ninfer", '["--model-id=q"]', ("s", "/m", "7", "--model-id=q"), "q"),
        ("vllm", "[]", ("s", "/m", "7", "--served-model-name", "p"), "p"),
        ("vllm", '["--served-model-name", "q", "r"]', ("s", "/m", "7", "--served-model-name", "q", "r"), "q"),
        ("vllm", '["--served-model-name", "x-{name}"]', ("s", "/m", "7", "--served-model-name", "x-p"), "x-p"),
        ("sglang", "[]", ("s", "/m", "7"), None),
        ("command", "[]", ("s", "/m", "7"), None),
    ],
)
def test_an_engine_that_answers_to_one_name_only_is_started_with_the_presets_unless_it_was_given_another(
    engine: str, args: str, argv: tuple[str, ...], served: str | None
) -> None:
    text = f'engine = "{engine}"\nmodel.path = "/m"\nruntime.kind = "process"\nruntime.args = {args}'
    preset = parse(f'{text}\nruntime.command = ["s", "{{model}}", "{{port}}"]')
    assert preset.argv(7) == argv
    assert preset.served_as == served


def test_nothing_is_known_of_the_names_of_an_engine_that_somebody_else_starts() -> None:
    assert parse('engine = "vllm"\nruntime = { kind = "external", url = "http://h:1" }').served_as is None
    assert parse('engine = "vllm"\nruntime = { kind = "systemd", unit = "v", port = 1 }').served_as is None


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("", None),
        ("context_save = true", None),
        ("context_save = false", "context_save is off"),
        ('args = ["--slot-save-path=/mine"]', "stands in its args"),
        ('args = ["--no-slots"]', "stands in its args"),
    ],
)
def test_a_llama_server_saves_its_slots_unless_its_preset_says_otherwise(more, why):
    preset = parse(f"""
engine = "llama-server"
[model]
path = "/q"
[runtime]
kind = "process"
command = ["l"]
{more}
""")
    assert why in preset.why_no_contexts if why else preset.why_no_contexts is None


def test_the_folder_for_slots_is_a_flag_and_the_rest_are_variables_that_the_preset_may_override():
    preset = parse("""
engine = "llama-server"
[model]
path = "/q"
[runtime]
kind = "process"
command = ["l"]
args = ["-v"]
env = { LLAMA_ARG_CACHE_IDLE_SLOTS = "1" }
""")
    assert preset.argv(1, slot_folder="/s")[-3:] == ("--slot-save-path", "/s", "-v")
    assert "--slot-save-path" not in preset.argv(1)
    assert preset.environment(1) == {"LLAMA_ARG_CACHE_IDLE_SLOTS": "1"}
    assert preset.environment(1, True) == {"LLAMA_ARG_CACHE_IDLE_SLOTS": "1", "LLAMA_ARG_ENDPOINT_METRICS": "1"}


def sleeper(
    engine: str, level: int, more: str = "", kind: str = 'kind = "process"\ncommand = ["x"]\nport = 1'
) -> Preset:
    return parse(f'engine = "{engine}"\nmodel.repo = "o/m"\n[runtime]\nsleep = {level}\n{kind}\n{more}')


def test_an_engine_that_may_sleep_is_started_for_it_and_listens_to_this_machine_only() -> None:
    vllm = sleeper("vllm", 2)
    assert vllm.argv(1) == ("x", "--enable-sleep-mode", "--host", "127.0.0.1", "--served-model-name", "p")
    assert vllm.environment(1) == {"VLLM_SERVER_DEV_MODE": "1"}
    sglang = sleeper("sglang", 1)
    assert sglang.argv(1) == ("x", "--enable-memory-saver", "--enable-weights-cpu-backup", "--host", "127.0.0.1")
    assert sglang.environment(1) == {}
    docker = sleeper("vllm", 1, kind='kind = "docker"\nimage = "i"')
    assert docker.argv(1, "0.0.0.0")[:3] == ("--enable-sleep-mode", "--host", "0.0.0.0")


def test_what_the_preset_says_itself_is_not_said_twice() -> None:
    args = 'args = ["--enable-sleep-mode", "--host=localhost"]\nenv = { VLLM_SERVER_DEV_MODE = "0" }'
    vllm = sleeper("vllm", 1, args)
    assert vllm.argv(1) == ("x", "--enable-sleep-mode", "--host=localhost", "--served-model-name", "p")
    assert vllm.environment(1) == {"VLLM_SERVER_DEV_MODE": "0"}


@pytest.mark.parametrize("sleep", ["sleep = 1", ""])
def test_another_level_is_another_engine_to_start(sleep: str) -> None:
    text = 'engine = "vllm"\nmodel.repo = "o/m"\n[runtime]\nkind = "process"\ncommand = ["x"]\nport = 1\n'
    assert parse(text + sleep).revision != parse(text + "sleep = 2").revision


@pytest.mark.parametrize(
    ("engine", "level", "more", "says"),
    [
        ("sglang", 2, "", "no sleep of level 2"),
        ("command", 1, "", "no sleep of level 1"),
        ("vllm", 3, "", "sleep"),
        ("vllm", 1, 'args = ["--host", "0.0.0.0"]', "only this machine"),
        ("vllm", 1, 'args = ["--host=::"]', "only this machine"),
        ("vllm", 1, 'args = ["--host", "127.0.0.1", "--host", "0.0.0.0"]', "only this machine"),
    ],
)
def test_a_sleep_that_cannot_be_or_would_open_the_engine_is_an_error(
    engine: str, level: int, more: str, says: str
) -> None:
    with pytest.raises(PresetError, match=says):
        sleeper(engine, level, more)


@pytest.mark.parametrize("engine", ["vllm", "ninfer"])
def test_an_image_that_needs_no_words_at_all_gets_the_name(engine: str) -> None:
    preset = parse(f'engine = "{engine}"\nmodel.path = "/m"\n[runtime]\nkind = "docker"\nimage = "i"')
    assert preset.argv(1)[1:] == ("p",)
    assert preset.served_as == "p"
