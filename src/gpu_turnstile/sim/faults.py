"""The faults a simulated engine can be told to have: plain switches, one dataclass per engine.

Set at construction, with `--fault name=value`, or while it runs (`POST /__sim__/faults`). Every switch is off
by default, and turning it off heals the engine: an unload, a load, a stream or a job that hung on it goes on (a
request that was never to be answered stays so). Durations are in seconds; where a comment says so, -1 means for
ever.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar, get_type_hints

F = TypeVar("F", bound="Faults")


class FaultError(ValueError):
    """An unknown switch or a value of the wrong kind; the message names what would be right."""


class PromptReply(StrEnum):
    """What comes back from ComfyUI's POST /prompt."""

    NORMAL = "normal"
    LOST = "lost"  # queued, then the connection is cut without an answer
    AFTER_END = "after_end"  # the answer comes when the job has already ended
    NO_ID = "no_id"  # 200 with prompt_id null, nothing queued
    HTML = "html"  # 200 with a page, nothing queued
    ERROR = "error"  # 500, nothing queued


class JobFate(StrEnum):
    """How ComfyUI's jobs end, whatever their graph says."""

    NORMAL = "normal"
    ERROR = "error"
    OOM = "oom"
    INTERRUPTED = "interrupted"
    NEVER = "never"


@dataclass
class Faults:
    """What every simulated engine can have."""

    down: bool = False  # cuts every connection without an answer
    hang: bool = False  # takes every request and never answers
    server_error: bool = False  # answers every request with 500

    def update(self, changes: dict[str, Any]) -> None:
        """All or nothing. Raises FaultError."""
        kinds = get_type_hints(type(self))
        checked = {name: _checked(name, value, kinds) for name, value in changes.items()}
        for name, value in checked.items():
            setattr(self, name, value)

    def heal(self) -> None:
        """All switches off."""
        for switch in fields(self):
            setattr(self, switch.name, switch.default)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class TokenFaults(Faults):
    """What every engine that streams tokens can have. Counts are tokens of one answer; 0 = off."""

    cut_after: int = 0  # the connection is cut after so many tokens
    stall_after: int = 0  # no byte more after so many tokens, the connection stays open
    ignore_disconnect: bool = False  # works on to the end after its client left


@dataclass
class OllamaFaults(TokenFaults):
    unload_s: float = 0.0  # "Stopping...": stays listed so long with expires_at in the past; -1 = for ever
    memory_late_s: float = 0.0  # memory comes back so long after the list is empty
    memory_leak: bool = False  # memory never comes back
    ps_flicker: int = 0  # every n-th /api/ps leaves models out, in turn all of them and all but the first
    ps_hang: bool = False  # /api/ps never answers
    load_error: bool = False  # loading fails with 500


@dataclass
class ComfyFaults(Faults):
    free_ignored: bool = False  # /free answers 200 and frees nothing
    free_missing: bool = False  # /free answers 404, as before it existed
    free_hang: bool = False  # /free never answers
    free_late_s: float = 0.0  # /free acts so long after it could have
    prompt_reply: PromptReply = PromptReply.NORMAL
    job_end: JobFate = JobFate.NORMAL


@dataclass
class LlamaFaults(TokenFaults):
    crash_loading: bool = False  # prints an out-of-memory report and exits with 1 while loading
    never_healthy: bool = False  # answers 503 "Loading model" for ever
    ignore_sigterm: bool = False
    crash_after: int = 0  # the process ends (exit code 134) after so many tokens of an answer


@dataclass
class SleepFaults(TokenFaults):
    """Of vLLM and SGLang."""

    sleep_refused: bool = False  # 500, as without the flag it must be started with
    sleep_frees_little: bool = False  # says that it sleeps, and keeps most of its memory
    sleep_hang: bool = False  # never answers, and frees nothing
    wake_refused: bool = False  # 500, and it goes on sleeping
    wake_hang: bool = False  # takes its memory and never answers
    wake_dies: bool = False  # the process ends in the middle of it


def parse(kind: type[F], switches: list[str]) -> F:
    """`["unload_s=5", "ps_hang"]` as faults of this kind. Raises FaultError."""
    faults = kind()
    for switch in switches:
        name, given, text = switch.partition("=")
        faults.update({name: _plain(text) if given else True})
    return faults


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _checked(name: str, value: Any, kinds: dict[str, Any]) -> Any:
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1) or sorted(kinds)
        raise FaultError(f"no fault {name!r}; there is {', '.join(near)}")
    kind = kinds[name]
    if kind is bool:
        right = isinstance(value, bool)
    elif kind is float:
        right = isinstance(value, int | float) and not isinstance(value, bool)
    elif kind is int:
        right = isinstance(value, int) and not isinstance(value, bool)
    else:
        right = value in list(kind)
    if not right:
        wanted = f"one of {', '.join(kind)}" if issubclass(kind, StrEnum) else kind.__name__
        raise FaultError(f"fault {name}: {value!r} is not {wanted}")
    return kind(value)
