"""What every engine can be asked, whatever its dialect. One file per dialect implements this.

An engine here is a thin translator between HTTP and a few plain answers. It knows no scheduler, keeps no state
that the real server could contradict, and never guesses: what it could not find out is `None` or `UNKNOWN`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol

import httpx

from gpu_turnstile.core.model import Mode


class Health(StrEnum):
    READY = "ready"  # answers work now
    LOADING = "loading"  # alive, not ready yet
    DOWN = "down"  # nobody listens, or connections break before there is an answer: so Docker's proxy has it
    SILENT = "silent"  # somebody listens and does not answer in time
    BROKEN = "broken"  # answers, but says it cannot serve


@dataclass(frozen=True, slots=True)
class Probe:
    health: Health
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model the engine says it holds. `vram` in bytes; None = it does not say."""

    name: str
    vram: int | None = None
    detail: dict[str, object] = field(default_factory=dict)


class Released(StrEnum):
    """How sure we are that an engine gave its memory back (DESIGN: only the memory itself ends an eviction)."""

    EMPTY = "empty"  # the engine's own list is empty
    ACCEPTED = "accepted"  # it said yes, and has no list to check (ComfyUI's /free)
    UNREACHABLE = "unreachable"  # nobody answered: it may be off, or hang with its memory
    TIMEOUT = "timeout"  # its list did not become empty in time
    REFUSED = "refused"  # it answered that it will not (an error status)
    UNSUPPORTED = "unsupported"  # it has no call for that (an old ComfyUI without /free)


@dataclass(frozen=True, slots=True)
class Release:
    """What became of a release. `left`: what its list still names; `detail`: one line for a person."""

    outcome: Released
    detail: str = ""
    left: tuple[str, ...] = ()


class JobEnd(StrEnum):
    """How a tracked job ended. Label of the metric and word in the log."""

    SUCCESS = "success"
    ERROR = "error"
    INTERRUPTED = "interrupted"
    DELETED = "deleted"  # taken out of the queue before it ran
    CLEARED = "cleared"  # it ran and ended; its history entry was cleared before anybody could read how
    LOST = "lost"  # neither queued nor in history: the server was restarted
    TIMEOUT = "timeout"  # JOB_TIMEOUT


class JobPhase(StrEnum):
    """Where a tracked job is. A word for `/status`; nothing is decided by it."""

    QUEUED = "queued"
    RUNNING = "running"
    UNREACHABLE = "unreachable"  # the server does not answer; the job may well be running


@dataclass(frozen=True, slots=True)
class Timing:
    """Poll intervals and limits in seconds; the defaults are the turnstile document's."""

    unload_timeout: float = 60.0
    unload_poll: float = 0.5
    unload_resend: float = 10.0
    history_poll: float = 1.0
    job_timeout: float = 900.0
    free_timeout: float = 30.0
    warm_timeout: float = 120.0
    call_timeout: float = 5.0
    idle_timeout: float | None = None  # how long a release waits for work of others to end; None = unload_timeout


class Engine(Protocol):
    kind: ClassVar[str]
    mode: ClassVar[Mode]
    url: str  # base URL without a trailing slash

    def __init__(self, url: str, http: httpx.AsyncClient, timing: Timing) -> None: ...

    async def probe(self) -> Probe:
        """One look, bounded by `timing.call_timeout`, never raises."""
        ...

    async def loaded(self) -> tuple[Loaded, ...] | None:
        """What holds memory in the engine, by its own word; None = it could not be asked or does not say."""
        ...

    async def busy(self) -> bool | None:
        """Whether it works on something, whoever sent it; None = unknown (callers treat it as busy)."""
        ...

    async def release(self) -> Release:
        """Give the card's memory back without stopping the server; bounded by the timing, never raises.

        No outcome proves the memory back: that is the card's word (gpu/settle).
        """
        ...


class Tracker(Protocol):
    """An engine whose work outlives the answer to the request that began it (ComfyUI)."""

    async def track(self, job: str, on_phase: Callable[[JobPhase], None] | None = None) -> JobEnd:
        """Return when the job has ended, bounded by `timing.job_timeout`.

        `on_phase` is called on the loop whenever the phase changes.
        """
        ...


class Pulsed(Protocol):
    """An engine that shows whether it gets on with its work."""

    async def pulse(self) -> str | None:
        """Something that changes with every step of its work, whatever it is; None = it does not say now.

        Only meaningful while it is busy. Bounded by `timing.call_timeout`, never raises.
        """
        ...


class Readied(Protocol):
    """An engine that does not serve again by itself after a release (A1111, InvokeAI, koboldcpp, TabbyAPI).

    Whoever gives it the card calls `admit` first, also when it was not released from here: it changes nothing in a
    server that is ready.
    """

    async def admit(self) -> Probe:
        """Make it ready for work: READY once a request may be sent, else why not.

        It may load a model. Bounded by `timing.warm_timeout`, never raises.
        """
        ...


class Sleeper(Protocol):
    """An engine that can give the card back and keep its process (vLLM, SGLang). Nothing here raises.

    `level`: 1 keeps the weights in main memory; 2 drops them and reads them again. Limits are seconds, for all of it.
    Sleeping cuts off whatever runs: whoever calls has drained it.
    """

    async def probe(self) -> Probe: ...

    async def busy(self) -> bool | None: ...

    def keeps_weights(self, level: int) -> bool: ...

    async def sleep(self, level: int, limit: float) -> str | None:
        """None = it says that it has let go of the card; else what went wrong. The proof is the card's."""
        ...

    async def wake(self, level: int, limit: float) -> str | None:
        """None = it says that it serves again; else what went wrong: it may hold anything, or be gone."""
        ...

    async def sleeping(self) -> bool | None:
        """None = it does not say."""
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """One of an engine's slots. `tokens`: how many of a conversation it remembers; None = it does not say."""

    number: int
    busy: bool
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of a slot's save or restore. `tokens` and `size` (bytes) as the engine tells them.

    `problem` is empty when it went well. `late`: nothing was heard in time. `lost`: the connection broke, the engine
    may be gone. `unable`: it has no such call, or not with this model: asking again is of no use.
    """

    tokens: int = 0
    size: int = 0
    problem: str = ""
    late: bool = False
    lost: bool = False
    unable: bool = False


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt tokens since the engine started: read anew, in how many seconds, and taken from its cache."""

    tokens: int
    seconds: float
    cached: int | None  # None = it does not count them


class Slotted(Protocol):
    """An engine whose conversations can be put into files and taken back (llama-server). Nothing here raises.

    `file` is a plain name in the folder the engine was started with; limits are seconds.
    """

    async def build(self, limit: float) -> str | None:
        """What distinguishes the program and the model it has loaded from any other; None = it does not say."""
        ...

    async def slots(self, limit: float) -> tuple[Slot, ...] | None:
        """What each slot holds; None = it could not be asked."""
        ...

    async def save_slot(self, number: int, file: str, limit: float) -> Moved: ...

    async def restore_slot(self, number: int, file: str, limit: float) -> Moved: ...

    async def prefill(self, limit: float) -> Prefill | None:
        """None = it keeps no such figures."""
        ...
