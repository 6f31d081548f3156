"""What a preset file may say: the strict schema of one TOML file, and the rules between its keys.

Strict means: an unknown key, a wrong type, a number in quotes or a key that its kind of runtime has no use for is an
error, never ignored: a setting that silently does nothing is worse than none. The file's stem is the preset's name.

Invariant: a `Preset` that exists can be turned into a command, container or address without further checks.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gpu_turnstile.core.model import Mode
from gpu_turnstile.core.routes import CAPABILITY_PREFIX, ROUTE, ROUTE_PREFIX, canonical
from gpu_turnstile.presets import command
from gpu_turnstile.presets.errors import Misfit, PresetError, validate
from gpu_turnstile.presets.values import address, http_url
from gpu_turnstile.runtimes.units import unit_name

EngineKind = Literal[
    "llama-server",
    "ninfer",
    "vllm",
    "sglang",
    "ollama",
    "comfyui",
    "train",
    "command",
    "a1111",
    "invokeai",
    "koboldcpp",
    "lm-studio",
    "localai",
    "tabbyapi",
]
RuntimeKind = Literal["docker", "process", "systemd", "external"]

# Every other engine serves language models.
MODES = {"comfyui": Mode.COMFYUI, "a1111": Mode.COMFYUI, "invokeai": Mode.COMFYUI, "train": Mode.TRAIN}
FILE_ENGINES = ("llama-server", "ninfer")  # load one model file
REPO_ENGINES = ("vllm", "sglang")  # load a whole repository or folder
EXTERNAL_ENGINES = ("a1111", "invokeai", "koboldcpp", "lm-studio", "localai", "tabbyapi")  # run by somebody else
HEALTH_ENGINES = ("command", "train")  # have no readiness path of their own
LOOPBACKS = {"127.0.0.1", "::1", "localhost"}
SLEEP_LEVELS = {"vllm": (1, 2), "sglang": (1,)}
DEFAULT_HEALTH = "/health"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_WORD = re.compile(r"[^\s\x00-\x1f\x7f]{1,200}")
_SUFFIX = re.compile(r"\.(gguf|ninfer|safetensors|bin|pt|pth|ckpt|onnx|engine)$", re.IGNORECASE)
_MOUNT = re.compile(r"/[^:]*:/[^:]*(:(ro|rw))?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OUR_FLAGS = ("-m", "--model", "--host", "--port")  # of llama-server: what the gate itself decides
_RUNTIME_KEYS = {  # keys only some runtimes have a use for
    "image": ("docker",),
    "gpus": ("docker",),
    "mounts": ("docker",),
    "command": ("docker", "process"),
    "args": ("docker", "process"),
    "env": ("docker", "process"),
    "port": ("docker", "process", "systemd"),
    "cwd": ("process",),
    "unit": ("systemd",),
    "user": ("systemd",),
    "url": ("systemd", "external"),
    "listen": ("external",),
    "api_key": ("external",),
    "stop_grace_s": ("docker", "process", "systemd"),
    "context_save": ("docker", "process"),
    "sleep": ("docker", "process"),
}


def check_name(name: str) -> str:
    """A preset's name, a capability or a route: it goes into headers, labels and container names as it is."""
    if name == ROUTE or not _NAME.fullmatch(name):
        raise ValueError(f'"{name}" cannot be a name: letters, digits, ".", "_", "-"; not "{ROUTE}"')
    return name


def check_alias(alias: str) -> str:
    """What a client may call the preset: also `openai/gpt-4o` or `llama3:8b`, but none of the reserved words."""
    reserved = canonical(alias) == ROUTE or alias.startswith((ROUTE_PREFIX, CAPABILITY_PREFIX))
    if reserved or not _WORD.fullmatch(alias):
        raise ValueError(f'"{alias}" cannot be an alias: no blanks, not "{ROUTE}", nor "{ROUTE_PREFIX}…" or "cap:…"')
    return alias


def each_once(words: tuple[str, ...]) -> tuple[str, ...]:
    twice = next((word for word in words if words.count(word) > 1), None)
    if twice is not None:
        raise ValueError(f'"{twice}" is there twice')
    return words


def _ascii_path(path: str) -> str:
    if not path.startswith("/") or not re.fullmatch(r"[!-~]+", path):
        raise ValueError('must be a path that begins with "/"')
    return path


def _mount(mount: str) -> str:
    if not _MOUNT.fullmatch(mount):
        raise ValueError(f'"{mount}" must be /on/the/host:/in/the/container, and may end in :ro (default) or :rw')
    return mount


def _listen(text: str) -> str:
    if address(text) is None:
        raise ValueError('must be an address such as ":7860" or "127.0.0.1:7860"')
    return text


def _env_name(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        raise ValueError(f'"{name}" cannot be the name of a variable')
    return name


# Tuples are read from TOML's lists; the strictness about what is in them stays.
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
Name = Annotated[str, AfterValidator(check_name)]
Alias = Annotated[str, AfterValidator(check_alias)]
Mount = Annotated[str, AfterValidator(_mount)]
Names = Annotated[tuple[Name, ...], Field(strict=False), AfterValidator(each_once)]
Aliases = Annotated[tuple[Alias, ...], Field(strict=False), AfterValidator(each_once)]
Mounts = Annotated[tuple[Mount, ...], Field(strict=False)]
Env = dict[Annotated[str, AfterValidator(_env_name)], str]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]


class Strict(BaseModel):
    """No unknown keys, no guessed types, no changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Model(Strict):
    """The weights: `repo` with `file`, or `path`. The other two are files in the same repository or on disk."""

    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$")] | None = None
    file: Text | None = None
    path: Text | None = None
    mmproj: Text | None = None
    chat_template: Text | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.path and (self.repo or self.file):
            raise Misfit("path", '"path" stands alone; leave out "repo" and "file"')
        if self.file and not self.repo:
            raise Misfit("file", '"file" needs "repo"; for a file on disk use "path"')
        if not self.path and not self.repo:
            raise Misfit("", 'needs "repo" (and "file"), or "path"')
        return self

    @property
    def stem(self) -> str:
        """The model id: the artifact's file name without its suffix, or the repository's or folder's name."""
        artifact = self.file or self.path or self.repo or ""
        return _SUFFIX.sub("", re.split(r"[/\\]", artifact.rstrip("/\\"))[-1])


class Runtime(Strict):
    """How the engine is put on the card, and what it is told. Times are seconds, VRAM is GB."""

    kind: RuntimeKind
    image: Text | None = None
    command: Texts = ()
    args: Texts = ()
    env: Env = Field(default_factory=dict)
    cwd: Text | None = None
    unit: Annotated[str, AfterValidator(unit_name)] | None = None
    user: bool = False  # a unit of the gate's own user, not of the system
    url: Annotated[str, AfterValidator(http_url)] | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    listen: Annotated[str, AfterValidator(_listen)] | None = None
    api_key: Text | None = None
    health: Annotated[str, AfterValidator(_ascii_path)] | None = None
    gpus: Texts | None = None  # None: all of them; (): none
    mounts: Mounts = ()
    context: Count | None = None
    parallel: Count | None = None
    max_output: Count | None = None
    reasoning: bool | None = None
    vram_gb: Annotated[float, Field(gt=0)] | None = None
    drain_grace_s: Seconds | None = None
    idle_unload_s: Seconds | None = None
    stop_grace_s: Seconds | None = None
    context_save: bool | None = None  # None: as LLMC_CONTEXT_SAVE says
    sleep: Literal[1, 2] | None = None  # the level it sleeps at instead of being stopped; None: it is stopped

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in which `{port}`, `{model}` and `{name}` are replaced."""
        return (*self.command, *self.args, *self.env.values())

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        for key, kinds in _RUNTIME_KEYS.items():
            if key in self.model_fields_set and self.kind not in kinds:
                raise Misfit(key, f'has no meaning for kind "{self.kind}" (only for {", ".join(kinds)})')
        needed = {"docker": "image", "process": "command", "systemd": "unit", "external": "url"}[self.kind]
        if not getattr(self, needed):
            raise Misfit("kind", f'"{self.kind}" needs "{needed}"')
        if self.kind == "systemd" and (self.url is None) == (self.port is None):
            raise Misfit("kind", '"systemd" needs either "port" or "url", to know where the engine listens')
        return self


class Bench(Strict):
    tokenizer: Text | None = None


class PresetFile(Strict):
    """One file, as it is written. Its JSON Schema is what editors check against."""

    engine: EngineKind
    capabilities: Names = ()
    aliases: Aliases = ()
    model: Model | None = None
    runtime: Runtime
    bench: Bench = Bench()

    @model_validator(mode="after")
    def _engine_has_what_it_needs(self) -> Self:
        for check in (_check_external, _check_model, _check_health, _check_flags, _check_port, _check_sleep):
            check(self)
        return self


def _check_external(preset: PresetFile) -> None:
    if preset.engine in EXTERNAL_ENGINES and preset.runtime.kind != "external":
        raise Misfit("runtime.kind", f'engine "{preset.engine}" is run by somebody else: it must be "external"')


def _check_model(preset: PresetFile) -> None:
    engine, model = preset.engine, preset.model
    if model is not None:
        if engine in FILE_ENGINES and model.repo and not model.file:
            raise Misfit("model", f'engine "{engine}" loads one file: it needs "file" beside "repo"')
        return
    if engine in (*FILE_ENGINES, *REPO_ENGINES) and preset.runtime.kind in ("docker", "process"):
        raise Misfit("engine", f'"{engine}" needs a table [model]')
    if any("{model}" in text for text in preset.runtime.texts):
        raise Misfit("runtime", "{model} stands in it, but there is no table [model]")


def _check_health(preset: PresetFile) -> None:
    if preset.runtime.health is not None and preset.engine not in HEALTH_ENGINES:
        raise Misfit("runtime.health", f'engine "{preset.engine}" has its own (only for {", ".join(HEALTH_ENGINES)})')


def _check_flags(preset: PresetFile) -> None:
    if preset.engine == "llama-server":
        for argument in preset.runtime.args:
            if argument.split("=")[0] in OUR_FLAGS:
                raise Misfit("runtime.args", f'"{argument}" does not belong here: the gate sets model, host and port')


def _check_port(preset: PresetFile) -> None:
    runtime = preset.runtime
    told = runtime.port is not None or any("{port}" in text for text in runtime.texts)
    if runtime.kind == "process" and preset.engine != "llama-server" and not told:
        message = 'how does it learn its port? Write {port} into "args" or "env", or set "port"'
        raise Misfit("runtime", message)


def _check_sleep(preset: PresetFile) -> None:
    level = preset.runtime.sleep
    if level is not None and level not in SLEEP_LEVELS.get(preset.engine, ()):
        can = "; ".join(f"{engine}: {', '.join(map(str, levels))}" for engine, levels in SLEEP_LEVELS.items())
        raise Misfit("runtime.sleep", f'engine "{preset.engine}" has no sleep of level {level} (there are {can})')
    hosts = command.listens_on((*preset.runtime.command, *preset.runtime.args))
    if level is not None and preset.runtime.kind == "process" and not set(hosts) <= LOOPBACKS:
        message = "an engine that can be put to sleep can be steered by all who reach its port: only this machine may"
        raise Misfit("runtime.sleep", f'{message}; leave "--host" out of "args", or make it 127.0.0.1')


class Preset(PresetFile):
    """A preset: a file and the name it got from its stem."""

    name: Name

    @property
    def mode(self) -> Mode:
        return MODES.get(self.engine, Mode.LLM)

    @property
    def stem(self) -> str | None:
        """The artifact stem (the model id), where the preset names a model."""
        return self.model.stem if self.model else None

    @property
    def health_path(self) -> str:
        """The readiness path of engines that have none of their own."""
        return self.runtime.health or DEFAULT_HEALTH

    def argv(self, port: int, host: str = "127.0.0.1", slot_folder: str | None = None) -> tuple[str, ...]:
        """The command that starts the engine on that address; for a container, what its entry point is given.

        `slot_folder`: where a llama-server may put its slots, by its own view of the disk.
        """
        return command.argv(self, port, host, slot_folder)

    @property
    def served_as(self) -> str | None:
        """The only name its engine answers to; None: any."""
        return command.served_as(self)

    def environment(self, port: int, keeps_slots: bool = False) -> dict[str, str]:
        """The variables the engine gets on top of the gate's own."""
        return command.environment(self, port, keeps_slots)

    @property
    def why_no_contexts(self) -> str | None:
        """What keeps the gate from carrying this preset's conversations over a swap, for a person; None = nothing."""
        if self.engine != "llama-server":
            return f'engine "{self.engine}" cannot put conversations into files'
        if self.runtime.kind not in ("docker", "process"):
            return f'the gate does not choose the flags of kind "{self.runtime.kind}"'
        if self.runtime.context_save is False:
            return "context_save is off in the preset"
        return command.why_no_contexts(self)

    @property
    def revision(self) -> str:
        """Changes exactly when the engine would have to be started again to honour the file."""
        concerns = self.model_dump(mode="json", include={"engine", "model", "runtime"}, exclude_defaults=True)
        for key in ("listen", "max_output", "reasoning", "vram_gb", "drain_grace_s", "idle_unload_s", "stop_grace_s"):
            concerns["runtime"].pop(key, None)
        return hashlib.sha256(json.dumps(concerns, sort_keys=True).encode()).hexdigest()[:16]


def parse_preset(name: str, text: str, data: dict[str, Any], shown: str) -> Preset:
    """A preset from the tables of its file. Raises PresetError; `shown` is what the file is called in it."""
    try:
        check_name(name)
    except ValueError as problem:
        raise PresetError(shown, f"the file's stem is the preset's name; {problem}") from None
    content = validate(PresetFile, data, text, shown)
    return Preset(name=name, **dict(content))
