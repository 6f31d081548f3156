"""What the control API may see of the running gate. The composition root fills it; nothing here does anything."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gpu_turnstile.arbiter import Arbiter
from gpu_turnstile.contexts.book import Book
from gpu_turnstile.gateway.server import Gateway
from gpu_turnstile.gpu.gauge import Gauge
from gpu_turnstile.journal.history import History
from gpu_turnstile.journal.lookout import Lookout
from gpu_turnstile.presets.schema import Preset
from gpu_turnstile.presets.store import PresetStore
from gpu_turnstile.settings import Settings
from gpu_turnstile.sleepers import Dorm


@dataclass
class House:
    """`started`: wall clock, seconds since the epoch.

    `refresh`: reads the preset folder again and tells the arbiter; called before a listing.
    `register`, `remove`: an ephemeral preset comes or goes; the first raises PresetError.
    `jobs`: the ComfyUI jobs that are followed now: dicts with `prompt_id`, `phase`, `since` (the arbiter's clock).
    `image_jobs`: how many jobs ended how (`JobEnd` -> count), counted by whoever follows them.
    `bypass`: work sent past the gate: dicts with `tenant`, `what`, `age_s`.
    `suspects`: engines that may be stuck: dicts with `tenant`, `seconds` without progress. `restarts`: how many were.
    `gauge`: the card, where one can be read. `http`: asks the external Ollama for its models; None = it is not asked.
    `contexts`: what is known of saved conversations; None = none are saved. `dorm`: who sleeps.
    """

    settings: Settings
    store: PresetStore
    arbiter: Arbiter
    gateway: Gateway
    state_dir: Path
    refresh: Callable[[], Awaitable[None]]
    register: Callable[[dict[str, Any]], Awaitable[Preset]]
    remove: Callable[[str], Awaitable[bool]]
    started: float = field(default_factory=time.time)
    jobs: Callable[[], list[dict[str, Any]]] = list
    bypass: Callable[[], list[dict[str, Any]]] = list
    image_jobs: dict[str, int] = field(default_factory=dict)
    gauge: Gauge | None = None
    history: History | None = None
    lookout: Lookout | None = None
    http: httpx.AsyncClient | None = None
    suspects: Callable[[], list[dict[str, Any]]] = list
    restarts: Callable[[], int] = int
    contexts: Book | None = None
    dorm: Dorm | None = None
