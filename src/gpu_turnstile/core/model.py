"""The words of the scheduler: what it is told (events), what it answers (effects), what it keeps (state).

Everything here is a frozen value: no I/O, no clock, no behaviour beyond reading itself. Times are seconds on
whatever monotonic clock the caller uses; sizes are GB. Names are the field's words and are spelled the same in
code, API, logs and metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Mode(StrEnum):
    """The kind of tenant that holds the card. `IDLE` means nobody does."""

    LLM = "llm"
    COMFYUI = "comfyui"
    TRAIN = "train"
    IDLE = "idle"


class Phase(StrEnum):
    """What the scheduler is doing with the card right now."""

    IDLE = "idle"  # nobody holds it, nobody is coming
    SERVING = "serving"  # a tenant holds it and is granted leases
    DRAINING = "draining"  # somebody else is next; leases of the victims run out
    SWAPPING = "swapping"  # victims are going, the target is coming; nobody is granted anything


class Sized(StrEnum):
    """Where a footprint comes from, best first."""

    DECLARED = "declared"  # somebody wrote it down
    LEARNED = "learned"  # measured on this card at the last load
    COMPUTED = "computed"  # from the model's header and the context: rather too much than too little


class Code(StrEnum):
    """Why a ticket was refused. The text is the seeds' error code, the gateway turns it into a status."""

    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_ROUTE = "unknown_route"
    LOCKED = "locked"
    MODEL_UNAVAILABLE = "model_unavailable"
    SERVICE_INACTIVE = "service_inactive"
    SWAP_FAILED = "swap_failed"
    BUSY = "busy"
    SHUTTING_DOWN = "shutting_down"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A preset as the scheduler sees it.

    `exclusive`: each of its leases is alone on the card (one ComfyUI job at a time).
    `rank`: the priority class; a waiting ticket of a higher rank stops new grants of a lower one.
    `drain_grace`: seconds its leases may hold a swap off; None = for ever (engines somebody else runs).
    `linger`: seconds it may stay on the card with nothing to do; 0 = leave at once, None = for ever.
    `single`: it is evicted after each of its leases, even if the next one waits (one `/free` per image job).
    `footprint`: GB it needs on the card; 0 = unknown. `sized`: how that is known.
    `revision`: anything that changes when the preset changes, so that a changed resident is noticed.
    """

    name: str
    mode: Mode
    footprint: float = 0.0
    sized: Sized = Sized.DECLARED
    exclusive: bool = False
    rank: int = 0
    drain_grace: float | None = 60.0
    linger: float | None = None
    single: bool = False
    revision: str = ""

    @property
    def size(self) -> str:
        """For a person: how much of the card it needs, and how that is known."""
        return f"{self.footprint:g} GB ({self.sized})"


# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Request:
    """A ticket: somebody wants the card for one of `wants`, best first.

    `in_place`: any of `wants` serves it as well (an alias chain, a capability), so it may be granted on a
    resident that is being drained. `visit`: bring the tenant in, but take no lease (a mode switch).
    `wait`: seconds it may wait before it is refused as busy; None = until the client leaves; 0 = never waits.
    `owner`: whom it says it belongs to, for locks; `token`: the lock it believes it holds (fencing).
    """

    ticket: int
    wants: tuple[str, ...]
    in_place: bool = False
    visit: bool = False
    wait: float | None = None
    client: str = ""
    owner: str | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client of a waiting ticket has left."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Release:
    """The work of a lease has ended. A lease has the number of its ticket."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SwapSucceeded:
    """`refill`: seconds of prefill the target's clients will pay again because their contexts did not survive."""

    swap: int
    refill: float = 0.0


@dataclass(frozen=True, slots=True)
class SwapFailed:
    """A swap or an unload did not end as ordered.

    `residents`: who is on the card and serves, re-derived from the engines and runtimes, never remembered.
    `stuck`: who may still hold memory but cannot serve (an uncertain release); evicted before anybody comes.
    `code`: what the waiters are told; only SWAP_FAILED counts against the target.
    """

    swap: int
    reason: str
    residents: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    code: Code = Code.SWAP_FAILED


@dataclass(frozen=True, slots=True)
class EngineLost:
    """A resident is gone without having been asked to go (crash, kill from outside)."""

    tenant: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wedged:
    """A resident is alive and gets nowhere: its leases end, and it is started again when somebody wants it."""

    tenant: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lock:
    """Pin `tenant` (None = the resident) for `owner`, for `ttl` seconds of silence; answered by an Answer."""

    ticket: int
    owner: str
    tenant: str | None
    ttl: float
    wait: bool = False
    token: int | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class Unlock:
    """Take `owner` off the lock and out of its queue; None = everybody off the lock. `leave`: only out of the queue.

    `caller`: who asks, where it says so; `peer`: where from; `reason`: what those who lose by it are told.
    """

    ticket: int
    owner: str | None
    caller: str | None = None
    token: int | None = None
    force: bool = False
    open_unlock: bool = False
    leave: bool = False
    peer: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Renew:
    """The heartbeat of a holder or of a waiter; `ttl` None keeps what it has."""

    ticket: int
    owner: str
    ttl: float | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class SetMode:
    """Bring `tenant` in with no work attached (`POST /mode`). Answered like a ticket that takes no lease."""

    ticket: int
    tenant: str
    wait: float | None = None
    client: str = ""
    owner: str | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Unload:
    """Empty the card (after draining it). Waiting tickets are served afterwards."""


@dataclass(frozen=True, slots=True)
class Break:
    """Somebody breaks the glass: every lease ends now, whoever holds it. `client`: who; `peer`: where from."""

    reason: str
    client: str = ""
    peer: str = ""


@dataclass(frozen=True, slots=True)
class PresetsChanged:
    """The whole new table of tenants. Removed and changed residents drain and leave; nobody else is touched."""

    tenants: tuple[Tenant, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Refuse whoever waits or comes; let the leases run out."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A timer that was asked for has run out."""


Event = (
    Request
    | Cancel
    | Release
    | SwapSucceeded
    | SwapFailed
    | EngineLost
    | Wedged
    | Lock
    | Unlock
    | Renew
    | SetMode
    | Unload
    | Break
    | PresetsChanged
    | Shutdown
    | Tick
)

# --------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Grant:
    """The ticket is a lease on `tenant` now (or, for a visit, an answer and no lease)."""

    ticket: int
    tenant: str
    owner: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the lock book says to a Lock, Unlock or Renew. What it says is to be durable before it is told."""

    ticket: int
    answer: Any


@dataclass(frozen=True, slots=True)
class Refuse:
    """`retry_after`: seconds after which asking again makes sense; None = it does not by itself."""

    ticket: int
    code: Code
    message: str
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class StartSwap:
    """Evict `evict`, prove their memory back, then admit `target`.

    `cut`: leases that are ended by force because the drain grace ran out; they need no Release any more. `coming`: an
    earlier gate has started the target, which still loads: nothing is to be done but to wait for it.
    """

    swap: int
    target: str
    evict: tuple[str, ...] = ()
    cut: tuple[int, ...] = ()
    coming: bool = False


@dataclass(frozen=True, slots=True)
class StartUnload:
    swap: int
    evict: tuple[str, ...]
    cut: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """These leases ended because their engine is gone, or by force; they need no Release any more."""

    tickets: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send a Tick at `at`; replaces the timer set before. None = no timer is needed."""

    at: float | None


@dataclass(frozen=True, slots=True)
class Persist:
    """What must survive a restart has changed; `state` is the whole of it, JSON-able."""

    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person may want to know: a line in the log, an item in `/events`."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


Effect = Grant | Answer | Refuse | StartSwap | StartUnload | Cut | SetTimer | Persist | Note

# ---------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting ticket as people see it. `position` counts from 1 in the order it would be served."""

    ticket: int
    wants: tuple[str, ...]
    client: str
    since: float
    position: int


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as people see it."""

    ticket: int
    tenant: str
    client: str
    since: float
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A tenant that has the card for itself: in its turn, or for a client that is expected back."""

    tenant: str
    until: float
    cost: float  # seconds it took to bring in, with what its clients had to read again
    idle: bool  # nothing runs: a client is expected back


@dataclass(frozen=True, slots=True)
class War:
    """Presets that take the card from each other.

    `since`, `last`: its first and its last swap. `presets`: each with the clients it is brought in for.
    `per_hour`: seconds an hour that swaps cost, and contexts that are read again. `would_help`: for a person.
    """

    since: float
    last: float
    presets: dict[str, tuple[str, ...]]
    swaps: int
    per_hour: float
    would_help: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of the scheduler that anybody outside may read. A read never gates a change."""

    phase: Phase
    mode: Mode
    residents: tuple[str, ...]
    stuck: tuple[str, ...]
    name: str | None  # the resident, or the last one: kept when its engine is lost or unloaded
    target: str | None  # who is coming, while draining or swapping
    drain_deadline: float | None  # when the swap is forced; None = never
    leases: tuple[Held, ...]
    waiting: tuple[Waiting, ...]
    locks: Any  # a locks.Standing: who pins which preset, and who waits for a lock
    kept: Kept | None = None  # whom those who wait, wait for
    war: War | None = None
