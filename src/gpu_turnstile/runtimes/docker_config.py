"""How a preset becomes a container: the body of a create call. Pure text, nothing is started or looked up here.

Kept true here: only this machine can reach the engine's port; what is mounted can only be read unless the preset says
`:rw`; Docker never starts an engine again by itself (two owners of one card) and never removes one (its exit code is
wanted); process 1 is an init, because a first process without a handler ignores SIGTERM.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Set
from pathlib import PurePosixPath
from typing import Any, Protocol

INSIDE_PORT = 8080  # where an engine listens inside, unless its preset says: each container has all ports to itself
EVERYWHERE = "0.0.0.0"  # inside: Docker's forwarding does not come from the loopback
CONTEXTS = "/turnstile-contexts"  # where an engine sees the folder its slots are saved in
GRACE = 10.0  # seconds between asking and forcing
SHARED_MEMORY = 8 << 30  # bytes /dev/shm may take; Docker's 64 MB are too few for the workers of PyTorch engines
LOG = {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "2"}}  # readable, and bounded on disk

PRESET, CONFIG, GATE = "turnstile.preset", "turnstile.config", "turnstile.gate"  # the labels

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")  # a model in several files: its neighbours are needed as well

Json = dict[str, Any]


class _Model(Protocol):
    @property
    def path(self) -> str | None: ...
    @property
    def mmproj(self) -> str | None: ...
    @property
    def chat_template(self) -> str | None: ...


class _Runtime(Protocol):
    @property
    def image(self) -> str | None: ...
    @property
    def port(self) -> int | None: ...
    @property
    def gpus(self) -> tuple[str, ...] | None: ...
    @property
    def mounts(self) -> tuple[str, ...]: ...
    @property
    def stop_grace_s(self) -> float | None: ...
    @property
    def model_fields_set(self) -> Set[str]: ...


class DockerPreset(Protocol):
    """What is needed of a preset. This room does not import the presets' one."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> _Model | None: ...
    @property
    def runtime(self) -> _Runtime: ...
    def argv(self, port: int, host: str = ..., slot_folder: str | None = ...) -> tuple[str, ...]: ...
    def environment(self, port: int, keeps_slots: bool = ...) -> dict[str, str]: ...


def container_config(preset: DockerPreset, port: int, contexts: str | None = None) -> Json:
    """The create body of a preset whose engine shall be reached at 127.0.0.1:`port`.

    `contexts`: the folder on the host that its slots are saved in; None = they are not.
    """
    runtime = preset.runtime
    inside = runtime.port or INSIDE_PORT
    key = f"{inside}/tcp"
    grace = GRACE if runtime.stop_grace_s is None else runtime.stop_grace_s
    body: Json = {
        "Image": runtime.image,
        "Env": [f"{name}={value}" for name, value in preset.environment(inside, bool(contexts)).items()],
        "Labels": {PRESET: preset.name},
        "ExposedPorts": {key: {}},
        "StopTimeout": math.ceil(grace),
        "HostConfig": {
            "Init": True,
            "RestartPolicy": {"Name": "no"},
            "AutoRemove": False,
            "PortBindings": {key: [{"HostIp": "127.0.0.1", "HostPort": str(port)}]},
            "Mounts": [*map(_mount, runtime.mounts), *_model_mounts(preset), *_context_mount(contexts)],
            "DeviceRequests": device_requests(_devices(runtime)),
            "ShmSize": SHARED_MEMORY,
            "LogConfig": LOG,
        },
    }
    if command := preset.argv(inside, EVERYWHERE, CONTEXTS if contexts else None):
        body["Cmd"] = list(command)
    return body


def _devices(runtime: _Runtime) -> tuple[str, ...]:
    """An empty list is no device; only a list left out is all of them."""
    return (runtime.gpus or ()) if "gpus" in runtime.model_fields_set else ("all",)


def device_requests(devices: tuple[str, ...]) -> list[Json]:
    """`all`, indexes and UUIDs of NVIDIA cards, and names of CDI devices (`vendor/class=name`) of any maker."""
    cdi = [device for device in devices if "=" in device]
    ids = [device for device in devices if "=" not in device]
    requests: list[Json] = []
    if "all" in ids:
        requests.append({"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}})
    elif ids:
        requests.append({"Driver": "", "Count": 0, "DeviceIDs": ids, "Capabilities": [["gpu"]], "Options": {}})
    if cdi:
        requests.append({"Driver": "cdi", "Count": 0, "DeviceIDs": cdi, "Capabilities": None, "Options": {}})
    return requests


def same_devices(asked: list[Json] | None, got: list[Json] | None) -> bool:
    """Whether the container has the devices that were asked for. Podman answers 201 and leaves them out."""
    return _comparable(asked) == _comparable(got)


def _comparable(requests: list[Json] | None) -> list[tuple[object, ...]]:
    return [
        (r.get("Driver") or "", r.get("Count") or 0, r.get("DeviceIDs") or [], r.get("Capabilities") or [])
        for r in requests or []
    ]


def _mount(text: str) -> Json:
    source, target, *mode = text.split(":")
    return _bind(source, target, writable=mode == ["rw"])


def _bind(source: str, target: str, *, writable: bool = False) -> Json:
    """A mount of the kind that fails where the source is missing; the other kind makes an empty folder."""
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": not writable}


def _context_mount(contexts: str | None) -> list[Json]:
    return [_bind(contexts, CONTEXTS, writable=True)] if contexts else []


def _model_mounts(preset: DockerPreset) -> list[Json]:
    """The model's own files, at the path they have outside, unless a mount of the preset puts something there."""
    model = preset.model
    if model is None or model.path is None:
        return []
    targets = [PurePosixPath(mount.split(":")[1]) for mount in preset.runtime.mounts]
    mounts = []
    for path in map(PurePosixPath, filter(None, (model.path, model.mmproj, model.chat_template))):
        source = path.parent if _SPLIT.search(path.name) else path
        if source.is_absolute() and not any(source.is_relative_to(target) for target in targets):
            mounts.append(_bind(str(source), str(source)))
            targets.append(source)
    return mounts


def labelled(body: Json, gate: str) -> Json:
    """The body with the labels that make the container ours, and tell later whether it is still what is wanted."""
    labels = {**body.get("Labels", {}), GATE: gate, CONFIG: config_hash(body)}
    return {**body, "Labels": labels}


def config_hash(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def split_image(image: str) -> tuple[str, str]:
    """Repository and tag or digest. Without either it is `latest`: Docker would pull all tags there are."""
    if "@" in image:
        repository, _, digest = image.partition("@")
        return repository, digest
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "latest")
