"""Ephemeral presets: variants of a preset on disk that somebody registers while the gate runs, for sweeps.

They live in memory: they survive reloads and are gone after a restart. A call over HTTP must not become code
execution, so a variant takes its command, image, mounts, environment and model from the file it is made from and may
change only the keys of `Change`; of the engine's flags only those in `FLAGS`, which are numbers and choices: none that
reads or writes a file, opens a port, fetches something or runs something.

Invariant: what is on disk wins. A variant whose name or alias a file claims, or whose file is gone, is no more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from gpu_turnstile.core.routes import canonical
from gpu_turnstile.presets.errors import PresetError, nearest, validate
from gpu_turnstile.presets.schema import (
    Aliases,
    Count,
    Name,
    Names,
    Preset,
    PresetFile,
    Seconds,
    Strict,
    Texts,
)

MOST = 100  # variants at a time
STARTED_HERE = ("docker", "process")  # runtimes whose engine the gate gives its flags
SHOWN = "the preset"

_LLAMA_SERVER = """
    -b --batch-size -ub --ubatch-size -n --predict --n-predict --keep -t --threads -tb --threads-batch
    -fa --flash-attn -ctk --cache-type-k -ctv --cache-type-v -kvu --kv-unified -no-kvu --no-kv-unified --swa-full
    -ngl --gpu-layers --n-gpu-layers -sm --split-mode -mg --main-gpu -ts --tensor-split -nkvo --no-kv-offload
    -cmoe --cpu-moe -ncmoe --n-cpu-moe --mlock --mmap --no-mmap --warmup --no-warmup -cb --cont-batching
    -nocb --no-cont-batching --context-shift --no-context-shift --cache-reuse -cram --cache-ram --ctx-checkpoints
    --cache-idle-slots --no-cache-idle-slots --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale
    --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -s --seed --temp
    --top-k --top-p --min-p --typical --repeat-penalty --repeat-last-n --presence-penalty --frequency-penalty
    --dry-multiplier --dry-base --jinja --no-jinja --reasoning-format --reasoning-budget --pooling
    --draft --draft-max --draft-n --draft-min --draft-n-min --draft-p-min -ngld --gpu-layers-draft
    --n-gpu-layers-draft --threads-http --metrics --slots --no-slots
"""
_VLLM = """
    --max-model-len --gpu-memory-utilization --max-num-seqs --max-num-batched-tokens --kv-cache-dtype --dtype
    --quantization --enforce-eager --no-enforce-eager --enable-prefix-caching --no-enable-prefix-caching
    --enable-chunked-prefill --no-enable-chunked-prefill --swap-space --cpu-offload-gb --block-size --seed
    --tensor-parallel-size --pipeline-parallel-size --max-logprobs --disable-log-requests
"""
_SGLANG = """
    --context-length --mem-fraction-static --max-running-requests --max-total-tokens --max-prefill-tokens
    --chunked-prefill-size --kv-cache-dtype --dtype --quantization --schedule-policy --schedule-conservativeness
    --disable-radix-cache --disable-cuda-graph --cuda-graph-max-bs --attention-backend --sampling-backend
    --random-seed --tp-size --page-size --enable-torch-compile
"""
FLAGS: Mapping[str, frozenset[str]] = {
    "llama-server": frozenset(_LLAMA_SERVER.split()),
    "vllm": frozenset(_VLLM.split()),
    "sglang": frozenset(_SGLANG.split()),
}
_VALUE = re.compile(r"-?[A-Za-z0-9][A-Za-z0-9.,_:+-]{0,99}")


class RuntimeChange(Strict):
    """What a variant may change under `[runtime]`. `args` come behind the file's own, and the last one wins."""

    args: Texts = ()
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    context: Count | None = None
    parallel: Count | None = None
    max_output: Count | None = None
    reasoning: bool | None = None
    vram_gb: Annotated[float, Field(gt=0)] | None = None
    drain_grace_s: Seconds | None = None
    idle_unload_s: Seconds | None = None
    stop_grace_s: Seconds | None = None


class Change(Strict):
    """The body of `POST /v1/presets`. Aliases and capabilities are not inherited: a variant is asked for by name."""

    name: Name
    base: Annotated[str, Field(alias="from", min_length=1, description="the preset on disk that it is made from")]
    capabilities: Names = ()
    aliases: Aliases = ()
    runtime: RuntimeChange = RuntimeChange()


class Ephemeral:
    """The variants. Not thread-safe: whoever reads the folder calls it, one at a time."""

    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}

    @property
    def bases(self) -> dict[str, str]:
        """Variant -> the preset on disk that it is made from."""
        return {name: change.base for name, change in self._changes.items()}

    def register(self, given: dict[str, Any], disk: Mapping[str, Preset]) -> Preset:
        """Check and keep a variant; one of the same name is replaced. Raises PresetError, and nothing has changed."""
        change = validate(Change, given, "", SHOWN)
        if change.name not in self._changes and len(self._changes) >= MOST:
            raise PresetError(SHOWN, f"there are {MOST} ephemeral presets, the most allowed; DELETE some first")
        found = derive(change, disk)
        others = [p for name, p in self.derived(disk).items() if name != change.name]
        taken = _claimed(change, [*disk.values(), *others])
        if taken is not None:
            raise PresetError(SHOWN, taken, key="name")
        self._changes[change.name] = change
        return found

    def remove(self, name: str) -> bool:
        return self._changes.pop(name, None) is not None

    def derived(self, disk: Mapping[str, Preset]) -> dict[str, Preset]:
        """The variants as presets, made from what is on disk now; those that cannot be any more are forgotten."""
        found: dict[str, Preset] = {}
        for name, change in tuple(self._changes.items()):
            try:
                preset = derive(change, disk)
            except PresetError:
                del self._changes[name]
                continue
            if _claimed(change, disk.values()) is None:
                found[name] = preset
            else:
                del self._changes[name]
        return found


def derive(change: Change, disk: Mapping[str, Preset]) -> Preset:
    """The preset on disk with the change in it. Raises PresetError."""
    base = disk.get(change.base)
    if base is None:
        known = nearest(change.base, disk)
        raise PresetError(SHOWN, f'no preset on disk is called "{change.base}"', key="from", nearest=known)
    if base.runtime.kind not in STARTED_HERE:
        kind = base.runtime.kind
        raise PresetError(
            SHOWN, f'"{base.name}" cannot be varied: the gate does not start it itself ({kind})', key="from"
        )
    check_args(base, change.runtime.args)
    changed = change.runtime.model_dump(exclude_unset=True, exclude={"args"})
    data = base.model_dump(mode="json", exclude_unset=True, exclude={"name"})
    runtime = data["runtime"] | changed
    if change.runtime.args:
        runtime["args"] = [*base.runtime.args, *change.runtime.args]
    data |= {"runtime": runtime, "capabilities": list(change.capabilities), "aliases": list(change.aliases)}
    return Preset(name=change.name, **dict(validate(PresetFile, data, "", SHOWN)))


def check_args(base: Preset, args: Iterable[str]) -> None:
    """Every flag is one of FLAGS, every value a number or a word. Raises PresetError."""
    allowed = FLAGS.get(base.engine, frozenset())
    takes_value = False
    for argument in args:
        if argument.startswith("-") and not re.match(r"-[\d.]", argument):
            flag, equals, value = argument.partition("=")
            if flag not in allowed:
                raise PresetError(
                    SHOWN, _refused(base.engine, flag), key="runtime.args", nearest=nearest(flag, allowed)
                )
            values, takes_value = ([value] if equals else []), not equals
        elif not takes_value:
            raise PresetError(SHOWN, f"runtime.args: {_text(argument)} follows no flag", key="runtime.args")
        else:
            values, takes_value = [argument], False
        for value in values:
            if not _VALUE.fullmatch(value):
                raise PresetError(
                    SHOWN, f"runtime.args: {_text(value)} is neither a number nor a word", key="runtime.args"
                )


def _refused(engine: str, flag: str) -> str:
    if engine not in FLAGS:
        return f'runtime.args: an ephemeral preset of the engine "{engine}" may not bring flags'
    return f"runtime.args: {_text(flag)} may not be brought: only flags that are numbers or choices (docs/presets.md)"


def _text(value: str) -> str:
    return json.dumps(value[:80], ensure_ascii=False)


def _claimed(change: Change, presets: Iterable[Preset]) -> str | None:
    """Why its name or an alias cannot be used: another preset answers to it."""
    words = {canonical(word): word for word in (change.name, *change.aliases)}
    for preset in presets:
        for word in (preset.name, *preset.aliases, *([preset.stem] if preset.stem else [])):
            if canonical(word) in words:
                return f'"{words[canonical(word)]}" is taken: the preset "{preset.name}" answers to it'
    return None
