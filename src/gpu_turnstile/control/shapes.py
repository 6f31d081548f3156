"""The JSON the control API answers with. Names are the scheduler's; ages and waits are seconds, sizes GB."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from gpu_turnstile.core.model import Mode, Phase, Sized


class Problem(BaseModel):
    """Every error; the header `X-Turnstile-Error` carries the same code."""

    error: str = Field(description="the code")
    message: str = Field(description="what happened and what can be done, for a person")


class Healthz(BaseModel):
    state: Literal["idle", "llm", "image"]
    llm_inflight: int
    image_pending: bool


class Health(Healthz):
    status: Literal["ok"] = "ok"
    version: str
    uptime_s: float


class Held(BaseModel):
    tenant: str
    client: str
    age_s: float


class Waiting(BaseModel):
    position: int = Field(description="1 is next")
    wants: list[str] = Field(description="presets that would do, best first")
    client: str
    waited_s: float


class Holder(BaseModel):
    pid: int
    name: str
    used_gb: float | None


class Card(BaseModel):
    """`used_gb`, `free_gb` and `total_gb` are null where the card cannot be read."""

    kind: str | None
    name: str | None
    limit_gb: float
    reserve_gb: float
    total_gb: float | None = None
    used_gb: float | None = None
    free_gb: float | None = None
    holders: list[Holder] | None = Field(None, description="null where processes cannot be told apart")


class Job(BaseModel):
    prompt_id: str
    phase: str
    age_s: float


class Presets(BaseModel):
    count: int
    error: str | None = Field(description="why the last reload failed; the last good state is in force")


class EngineInfo(BaseModel):
    name: str
    mode: Mode
    kind: str
    runtime: str
    owned: bool
    url: str
    on_card: bool
    away: bool = Field(False, description="it did not take the last connection; requests for it are tried again")
    asleep: bool = Field(False, description="its process is kept without the card, for a quick return")
    vram_gb: float | None = Field(None, description="what it needs of the card; null = not known")
    vram_from: Sized | None = Field(None, description="how that is known: declared, learned or computed")


class Counters(BaseModel):
    requests: int
    died_midstream: int
    unreachable: int
    malformed: int


class Swaps(BaseModel):
    """`last`: target, evicted, seconds or reason, time."""

    done: int
    failed: int
    last: dict[str, Any] | None


class Kept(BaseModel):
    """Conversations carried over swaps, since the gate started; `GET /v1/contexts` has more."""

    bytes: int
    saved: int
    restored: int
    tokens_reused: int
    seconds_saved: float
    failures: int


class Places(BaseModel):
    presets: str
    state: str
    config: str | None


class ModeAnswer(BaseModel):
    mode: Mode
    phase: Phase
    model: str | None = Field(description="the resident, or the last one: kept when its engine was lost or unloaded")
    residents: list[str]
    target: str | None = Field(description="who is coming, while draining or swapping")
    locks: dict[str, Any]


class Bypass(BaseModel):
    tenant: str
    what: str
    age_s: float


class Turn(BaseModel):
    """The card is kept for a tenant, and whoever waits, waits for that."""

    tenant: str
    for_s: float = Field(description="at most, as things are now")
    cost_s: float = Field(description="what it took to bring it in, with what its clients had to read again")
    idle: bool = Field(description="nothing runs; a client is expected back")


class War(BaseModel):
    """Presets that take the card from each other."""

    presets: dict[str, list[str]] = Field(description="each with the clients it is brought in for")
    swaps: int
    since_s: float
    lost_s_per_hour: float = Field(description="to swaps, and to contexts that are read again")
    would_help: list[str]


class Status(ModeAnswer):
    version: str
    uptime_s: float
    stuck: list[str] = Field(description="may still hold memory but cannot serve")
    drain_deadline_in_s: float | None = Field(description="when the swap is forced; null = not")
    turn: Turn | None
    war: War | None
    inflight: list[Held]
    queue: list[Waiting]
    card: Card
    jobs: list[Job]
    bypass: list[Bypass] = Field(description="work that somebody sent to an engine past the gate")
    presets: Presets
    engines: list[EngineInfo]
    counters: Counters
    swaps: Swaps
    contexts: Kept | None = Field(description="null: none are saved")
    places: Places
    warnings: list[str]


class ModeRequest(BaseModel):
    """`model` is a preset, an alias or a route; left out, the mode's own default is taken."""

    mode: Mode
    model: str | None = None


class ModelMeta(BaseModel):
    model_id: str | None = Field(description="the artifact's file name without its suffix")
    engine: str
    context: int | None
    reasoning: bool | None
    max_output: int | None
    vram_gb: float | None = Field(description="what it needs of the card; null = not known")
    vram_from: Sized | None = Field(description="how that is known: declared, learned at the last load, or computed")
    capabilities: list[str]
    aliases: list[str]
    loaded: bool
    ephemeral_of: str | None = Field(None, description="the preset on disk it is a variant of; null = it is on disk")


class ModelEntry(BaseModel):
    """One preset. Entries of the external Ollama are its own and have no `meta`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "gpu-turnstile"
    meta: ModelMeta


class PresetEntry(BaseModel):
    """One preset, whatever its mode."""

    name: str
    mode: Mode
    runtime: str
    meta: ModelMeta


class PresetList(BaseModel):
    presets: list[PresetEntry]
    error: str | None = Field(description="why the folder's last state is not in force; null = it is")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelEntry | dict[str, Any]]
