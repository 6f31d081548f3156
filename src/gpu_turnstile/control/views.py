"""The running gate -> the shapes people see. Reads only; one snapshot per answer, so its numbers agree."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal

from gpu_turnstile import __version__
from gpu_turnstile.control import locks, shapes
from gpu_turnstile.control.feed import Feed
from gpu_turnstile.control.house import House
from gpu_turnstile.core.model import Mode, Phase, Snapshot

GB = 1 << 30
CARD_TIMEOUT = 0.25  # seconds a reading may take

State = Literal["idle", "llm", "image"]


def mode_of(house: House, tenant: str) -> Mode:
    seat = house.arbiter.seat(tenant)
    return seat.tenant.mode if seat is not None else Mode.IDLE


def modes_held(house: House, snapshot: Snapshot) -> list[Mode]:
    """The mode of every lease."""
    return [mode_of(house, lease.tenant) for lease in snapshot.leases]


def state(house: House, snapshot: Snapshot, leaving: Iterable[str]) -> State:
    """The turnstile document's three states.

    `image`: a job holds the card, or ComfyUI is coming for one, or has not given its memory back yet. Training counts
    as `image` too: the document knows only these three, and the card is in use. Idle means nothing in flight.
    """
    held = modes_held(house, snapshot)
    coming = [snapshot.target] if snapshot.phase is Phase.SWAPPING and snapshot.target else []
    moving = [mode_of(house, tenant) for tenant in (*coming, *leaving)]
    if any(mode is not Mode.LLM for mode in held) or Mode.COMFYUI in moving:
        return "image"
    return "llm" if held else "idle"


def healthz(house: House, feed: Feed) -> shapes.Healthz:
    snapshot = house.arbiter.snapshot()
    return shapes.Healthz(
        state=state(house, snapshot, feed.leaving),
        llm_inflight=modes_held(house, snapshot).count(Mode.LLM),
        image_pending=any(mode_of(house, ticket.wants[0]) is Mode.COMFYUI for ticket in snapshot.waiting),
    )


def health(house: House, feed: Feed) -> shapes.Health:
    return shapes.Health(**healthz(house, feed).model_dump(), version=__version__, uptime_s=_uptime(house))


def mode(house: House) -> shapes.ModeAnswer:
    return _mode(house.arbiter.snapshot())


def _mode(snapshot: Snapshot) -> shapes.ModeAnswer:
    return shapes.ModeAnswer(
        mode=snapshot.mode,
        phase=snapshot.phase,
        model=snapshot.name,
        residents=list(snapshot.residents),
        target=snapshot.target,
        locks=locks.standing(snapshot.locks),
    )


async def status(house: House, feed: Feed) -> shapes.Status:
    card = await _card(house)
    snapshot, now = house.arbiter.snapshot(), house.arbiter.now
    counts = house.gateway.counts
    deadline = snapshot.drain_deadline
    return shapes.Status(
        **_mode(snapshot).model_dump(),
        version=__version__,
        uptime_s=_uptime(house),
        stuck=list(snapshot.stuck),
        drain_deadline_in_s=None if deadline is None else _ago(deadline, now),
        turn=_turn(snapshot, now),
        war=_war(snapshot, now),
        inflight=[
            shapes.Held(tenant=lease.tenant, client=lease.client, age_s=_ago(now, lease.since))
            for lease in snapshot.leases
        ],
        queue=[
            shapes.Waiting(
                position=ticket.position,
                wants=list(ticket.wants),
                client=ticket.client,
                waited_s=_ago(now, ticket.since),
            )
            for ticket in snapshot.waiting
        ],
        card=card,
        jobs=[
            shapes.Job(prompt_id=str(job["prompt_id"]), phase=str(job["phase"]), age_s=_ago(now, job["since"]))
            for job in house.jobs()
        ],
        bypass=[shapes.Bypass(**item) for item in house.bypass()],
        presets=shapes.Presets(
            count=len(house.store.catalogue.presets), error=str(house.store.error) if house.store.error else None
        ),
        engines=_engines(house, snapshot),
        counters=shapes.Counters(
            requests=counts.requests,
            died_midstream=counts.died_midstream,
            unreachable=counts.unreachable,
            malformed=counts.malformed,
        ),
        swaps=shapes.Swaps(done=feed.swaps.done, failed=feed.swaps.failed, last=feed.swaps.last),
        contexts=_kept(house),
        places=shapes.Places(
            presets=str(house.store.folder),
            state=str(house.state_dir),
            config=str(house.settings.file) if house.settings.file else None,
        ),
        warnings=_warnings(house, snapshot),
    )


def _turn(snapshot: Snapshot, now: float) -> shapes.Turn | None:
    kept = snapshot.kept
    if kept is None:
        return None
    return shapes.Turn(tenant=kept.tenant, for_s=_ago(kept.until, now), cost_s=round(kept.cost, 1), idle=kept.idle)


def _war(snapshot: Snapshot, now: float) -> shapes.War | None:
    war = snapshot.war
    if war is None:
        return None
    return shapes.War(
        presets={preset: list(clients) for preset, clients in war.presets.items()},
        swaps=war.swaps,
        since_s=_ago(now, war.since),
        lost_s_per_hour=round(war.per_hour, 1),
        would_help=list(war.would_help),
    )


async def _card(house: House) -> shapes.Card:
    gauge, settings = house.gauge, house.settings
    card = shapes.Card(
        kind=gauge.card.kind if gauge else None,
        name=gauge.card.name if gauge else None,
        limit_gb=settings.llmc_vram_limit_gb,
        reserve_gb=settings.llmc_vram_reserve_gb,
    )
    reading = await gauge.read(CARD_TIMEOUT) if gauge else None
    if reading is not None:
        card.total_gb, card.used_gb, card.free_gb = _gb(reading.total), _gb(reading.used), _gb(reading.free)
        if reading.holders is not None:
            card.holders = [
                shapes.Holder(pid=h.pid, name=h.name, used_gb=None if h.used is None else _gb(h.used))
                for h in reading.holders
            ]
    return card


def _engines(house: House, snapshot: Snapshot) -> list[shapes.EngineInfo]:
    return [
        shapes.EngineInfo(
            name=name,
            mode=seat.tenant.mode,
            kind=seat.engine.kind,
            runtime=seat.runtime.kind,
            owned=seat.owned,
            url=seat.engine.url,
            on_card=name in snapshot.residents,
            away=name in house.gateway.away and not seat.owned,
            asleep=seat.asleep,
            vram_gb=seat.tenant.footprint or None,
            vram_from=seat.tenant.sized if seat.tenant.footprint else None,
        )
        for name, seat in house.arbiter.seats.items()
    ]


def _kept(house: House) -> shapes.Kept | None:
    if house.contexts is None:
        return None
    counts = house.contexts.counts
    return shapes.Kept(
        bytes=house.contexts.store.size,
        saved=counts.saved,
        restored=counts.restored,
        tokens_reused=counts.tokens_reused,
        seconds_saved=round(counts.seconds_saved, 2),
        failures=sum(counts.failures.values()),
    )


def _warnings(house: House, snapshot: Snapshot) -> list[str]:
    """Everything a person should know that is not an error of one request."""
    found = [*house.settings.warnings, *house.store.catalogue.notes]
    if house.store.error is not None:
        found.append(f"presets were not reloaded, the last good state is in force: {house.store.error}")
    home = house.settings.llmc_idle_restore
    if home is not None and home not in house.arbiter.seats:
        found.append(f"LLMC_IDLE_RESTORE: no preset is called {home}, so nothing is brought back")
    for suspect in house.suspects():
        found.append(f"{suspect['tenant']} may be stuck: no progress was seen for {suspect['seconds']:.0f} s")
    for name in sorted(filter(house.gateway.is_external, house.gateway.away)):
        found.append(
            f"{name} did not take the last connection: requests for it are tried again, and keep nobody from the card"
        )
    for name in snapshot.stuck:
        found.append(f"{name} may still hold memory on the card but cannot serve; it is evicted before anybody comes")
    for row in house.contexts.saved() if house.contexts else ():
        if row["useless"]:
            found.append(f"{row['preset']}: conversations are not saved any more: {row['useless']}")
    return found


def _uptime(house: House) -> float:
    return round(max(0.0, time.time() - house.started), 1)


def _ago(later: float, earlier: float) -> float:
    return round(max(0.0, later - earlier), 1)


def _gb(size: int) -> float:
    return round(size / GB, 2)
