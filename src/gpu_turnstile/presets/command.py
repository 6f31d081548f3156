"""How a preset becomes a command line: pure text, nothing is started or looked up here.

`{port}`, `{model}` and `{name}` (the preset's) are replaced in `command`, `args` and `env` of every engine; any other
brace is left alone, so JSON in an argument stays what it is. `llama-server` also gets the flags its preset's keys stand
for; the preset's own `args` come last, because the last one wins. Engines that answer to one name only are started with
the preset's, unless the preset gives them another.
"""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_turnstile.presets.schema import Model, Preset

_NAME_FLAGS = {"ninfer": "--model-id", "vllm": "--served-model-name"}  # engines that answer 404 to any other name
_REPOSITORY = "https://huggingface.co/{repo}/resolve/main/{file}"


# Variables, not flags: a build that does not know one passes it over, an unknown flag would stop its start.
KEEPS_SLOTS = {
    "LLAMA_ARG_CACHE_IDLE_SLOTS": "0",  # else idle conversations leave for a cache that dies with it
    "LLAMA_ARG_ENDPOINT_METRICS": "1",  # what reading prompts costs, and whether a restore saved it
}


# What an engine must be started with so that it can sleep: flags and variables.
_SLEEP_FLAGS = {
    "vllm": ("--enable-sleep-mode",),
    "sglang": ("--enable-memory-saver", "--enable-weights-cpu-backup"),  # without the second it wakes with garbage
}
_SLEEP_ENV = {"vllm": {"VLLM_SERVER_DEV_MODE": "1"}}


def argv(preset: Preset, port: int, host: str, slot_folder: str | None) -> tuple[str, ...]:
    """`slot_folder`: where the engine may put its slots, as it sees it; None = it shall not."""
    runtime = preset.runtime
    flags = _llama_server(preset, port, host) if preset.engine == "llama-server" else ()
    if slot_folder is not None:
        flags = (*flags, "--slot-save-path", slot_folder)
    words = (
        *(_filled(text, preset, port) for text in runtime.command),
        *flags,
        *(_filled(text, preset, port) for text in runtime.args),
    )
    if runtime.sleep is not None:
        words = (*words, *_for_sleep(preset.engine, host, words))
    flag = _NAME_FLAGS.get(preset.engine)
    return words if flag is None or _given(flag, words) is not None else (*words, flag, preset.name)


def _for_sleep(engine: str, host: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """What is missing for it to sleep. vLLM listens everywhere unless told, and what it opens then is for nobody."""
    flags = tuple(flag for flag in _SLEEP_FLAGS[engine] if flag not in words)
    return flags if _given("--host", words) is not None else (*flags, "--host", host)


def listens_on(words: tuple[str, ...]) -> tuple[str, ...]:
    """Every address a command line names; engines take the last."""
    return _all_given("--host", words)


def served_as(preset: Preset) -> str | None:
    """The only name the engine answers to; None: it takes any, or it is not the gate that starts it."""
    flag = _NAME_FLAGS.get(preset.engine)
    if flag is None or preset.runtime.kind not in ("process", "docker"):
        return None
    return _given(flag, argv(preset, 0, "", None))


def _given(flag: str, words: tuple[str, ...]) -> str | None:
    """What a flag is set to; the first of several names."""
    return next(iter(_all_given(flag, words)), None)


def _all_given(flag: str, words: tuple[str, ...]) -> tuple[str, ...]:
    found = []
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            found.append(value if equals else "".join(words[number + 1 : number + 2]))
    return tuple(found)


def environment(preset: Preset, port: int, keeps_slots: bool) -> dict[str, str]:
    own = {name: _filled(text, preset, port) for name, text in preset.runtime.env.items()}
    if preset.runtime.sleep is not None:
        own = {**_SLEEP_ENV.get(preset.engine, {}), **own}
    return {**KEEPS_SLOTS, **own} if keeps_slots else own


def why_no_contexts(preset: Preset) -> str | None:
    """What in a llama-server's preset keeps the gate from saving its slots; None = nothing."""
    texts = preset.runtime.args
    for flag in ("--slot-save-path", "--no-slots"):
        if any(text.split("=")[0] == flag for text in texts):
            return f'"{flag}" stands in its args'
    return None


def _filled(text: str, preset: Preset, port: int) -> str:
    text = text.replace("{port}", str(port)).replace("{name}", preset.name)
    if preset.model is None:
        return text
    return text.replace("{model}", _path(preset, preset.model.path) or preset.model.repo or "")


def _llama_server(preset: Preset, port: int, host: str) -> tuple[str, ...]:
    runtime = preset.runtime
    flags = [*_weights(preset, preset.model), "--host", host, "--port", str(port)]
    if runtime.context is not None:
        flags += ["-c", str(runtime.context)]
    if runtime.parallel is not None:
        flags += ["-np", str(runtime.parallel)]
    return tuple(flags)


def _weights(preset: Preset, model: Model | None) -> list[str]:
    if model is None:
        return []
    flags = _from_disk(preset, model) if model.path else _from_repository(model)
    if model.chat_template:
        flags += ["--chat-template-file", _path(preset, model.chat_template)]
    return flags


def _from_disk(preset: Preset, model: Model) -> list[str]:
    flags = ["-m", _path(preset, model.path)]
    return [*flags, "--mmproj", _path(preset, model.mmproj)] if model.mmproj else flags


def _from_repository(model: Model) -> list[str]:
    flags = ["--hf-repo", model.repo or "", "--hf-file", model.file or ""]
    if model.mmproj:
        flags += ["--mmproj-url", _REPOSITORY.format(repo=model.repo, file=model.mmproj)]
    return flags


def _path(preset: Preset, path: str | None) -> str:
    """A path as the engine sees it: `~` is the gate's user for a process, and means nothing in a container."""
    return os.path.expanduser(path or "") if preset.runtime.kind == "process" else path or ""
