"""Where decisions meet the world: feeds events to the core, carries out its effects, keeps the timers.

The only caller of `Scheduler.handle`, and only from its own loop. The hot path, a tenant that holds the card and
nobody waiting, is one synchronous call: `acquire` returns a ticket that is a lease already. Everything slow (starting,
stopping, waiting for memory: `swaps.py`) happens in one task at a time, whose end is just another event.

Kept true here: every ticket given out is answered once, by its return value or by `on_answer`; a lease that was cut
is told by `on_cut`; what people may want to know goes to `watch`ers, and a watcher that fails disturbs nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from gpu_turnstile.core.model import (
    Answer,
    Break,
    Cancel,
    Cut,
    Effect,
    EngineLost,
    Event,
    Grant,
    Lock,
    Mode,
    Note,
    Persist,
    PresetsChanged,
    Refuse,
    Release,
    Renew,
    Request,
    SetMode,
    SetTimer,
    Shutdown,
    Snapshot,
    StartSwap,
    StartUnload,
    SwapFailed,
    Tick,
    Unload,
    Unlock,
    Wedged,
)
from gpu_turnstile.core.policy import Rules
from gpu_turnstile.core.scheduler import Scheduler
from gpu_turnstile.seats import Seat
from gpu_turnstile.swaps import Swaps
from gpu_turnstile.tally import Histogram

log = structlog.get_logger("arbiter")

LeaseRow = tuple[int, str, str, str | None, float, float, str]
Watcher = Callable[[str, dict[str, Any]], None]


class Ticket:
    """A request for the card. After `acquire` exactly one of `tenant` and `refusal` is, or will be, set."""

    __slots__ = ("_left", "client", "granted", "number", "on_answer", "on_cut", "owner", "refusal", "since", "tenant")

    def __init__(
        self,
        number: int,
        since: float,
        on_answer: Callable[[Ticket], None] | None,
        on_cut: Callable[[str], None] | None,
    ) -> None:
        self.number = number
        self.since = since
        self.tenant: str | None = None
        self.refusal: Refuse | None = None
        self.on_answer = on_answer
        self.on_cut = on_cut
        self._left = False
        self.client = ""
        self.owner: str | None = None
        self.granted: float | None = None  # when it became a lease


@dataclass(slots=True)
class Waits:
    """How long tickets waited until they were granted, by the mode of their tenant, in seconds."""

    llm: Histogram = field(default_factory=Histogram)
    image: Histogram = field(default_factory=Histogram)

    def of(self, mode: Mode) -> Histogram:
        return self.image if mode is Mode.COMFYUI else self.llm


class Arbiter:
    def __init__(
        self,
        seats: Iterable[Seat],
        rules: Rules,
        *,
        remember: Callable[[dict[str, Any]], None] = lambda state: None,
        remembered: dict[str, Any] | None = None,
        durable: Callable[[], object] = lambda: None,
        lock_ttl: float = 900.0,
        fail_closed: bool = False,
    ) -> None:
        """`remember` is given what must survive a restart; `remembered` is what it was given last time.

        `durable` blocks until what was given to `remember` is on disk, and returns False where it is not to be had; it
        is called in a thread. `lock_ttl` in seconds.
        `fail_closed`: nobody is started on a card that cannot be read.
        """
        self.waits = Waits()
        self.swaps = Swaps(seats, rules, self.tell, fail_closed=fail_closed)
        self._rules = rules
        self._remember = remember
        self._remembered = remembered or {}
        self._durable = durable
        self.saves = True  # whether the answer to the last lock call is on disk
        self._lock_ttl = lock_ttl
        self._calls: dict[int, asyncio.Future[Any]] = {}  # lock calls that wait for their answer
        self._clock = time.monotonic
        self._scheduler = Scheduler((s.tenant for s in self.seats.values()), rules)
        self._tickets: dict[int, Ticket] = {}
        self._number = 0
        self._effects: deque[Effect] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._swap: asyncio.Task[None] | None = None
        self._order: StartSwap | StartUnload | None = None  # what that task carries out
        self._watchers: list[Watcher] = []
        self.on_lease_end: Callable[[LeaseRow], None] | None = None  # hot: must not block or raise
        self.on_abandoned: Callable[[str], None] | None = None  # a client left in the middle of a tenant's work
        self._positions: dict[int, int] = {}
        self._positions_at = 0.0
        self._last_left = asyncio.Event()  # set, during shutdown, when no lease is left
        for seat in self.seats.values():
            self._adopt(seat)

    def _adopt(self, seat: Seat) -> None:
        name = seat.tenant.name
        seat.on_lost = lambda reason: self.lost(name, reason)

    # ------------------------------------------------------------------------------------------ beginning

    async def start(self) -> None:
        """Find out who holds the card, from the engines themselves, and begin."""
        found = await self.swaps.look_around()
        now = self._clock()
        self._scheduler = Scheduler(
            (s.tenant for s in self.seats.values()),
            self._rules,
            now=now,
            residents=found.residents[:1],
            stuck=(*found.residents[1:], *found.unready),
            coming=found.coming,
            name=self._remembered.get("model"),
            locks=self._remembered.get("lock"),
            lock_ttl=self._lock_ttl,
        )
        for oddity in self._scheduler.odd:
            log.warning("lock_state_ignored", reason=oddity)
        self.tell("started", {"residents": list(found.residents)})
        self._feed(Tick())

    @property
    def swapping(self) -> bool:
        return self._swap is not None and not self._swap.done()

    def has_leases(self, tenant: str) -> bool:
        return self._scheduler.leases_of(tenant) > 0

    async def _do_swap(self, order: StartSwap | StartUnload) -> None:
        self._feed(await self.swaps.carry_out(order))

    async def break_glass(self, reason: str, client: str = "", peer: str = "") -> list[dict[str, Any]]:
        """End every lock and every lease by force, and a swap that hangs; returns what was cut."""
        cut: list[dict[str, Any]] = [
            {"tenant": lease.tenant, "client": lease.client, "age_s": round(self.now - lease.since, 3)}
            for lease in self.snapshot().leases
        ]
        hanging = (self._swap, self._order) if self.swapping else (None, None)
        self._feed(Break(reason, client, peer))
        swap, order = hanging
        if swap is not None and order is not None:
            target = order.target if isinstance(order, StartSwap) else None
            cut.append({"tenant": target, "swap": True, "evict": list(order.evict)})
            swap.cancel()
            await asyncio.wait([swap])
            names = (*order.evict, *([target] if target else []))
            residents = await self.swaps.truth(names)
            stuck = tuple(n for n in names if n not in residents and n in self.swaps.seated)
            self._feed(SwapFailed(order.swap, reason, tuple(residents), stuck))
        return cut

    # -------------------------------------------------------------------------------------------- the door

    def acquire(
        self,
        wants: tuple[str, ...],
        *,
        in_place: bool = False,
        wait: float | None = None,
        client: str = "",
        owner: str | None = None,
        token: int | None = None,
        on_answer: Callable[[Ticket], None],
        on_cut: Callable[[str], None],
    ) -> Ticket:
        """Ask for the card. The ticket comes back answered, or `on_answer` is called with it later, once."""
        self._number += 1
        number = self._number
        now = self._clock()
        ticket = Ticket(number, now, None, on_cut)
        ticket.client = client
        self._tickets[number] = ticket
        self._feed(Request(number, wants, in_place, False, wait, client, owner, token))
        ticket.on_answer = on_answer
        return ticket

    def release(self, ticket: Ticket) -> None:
        """The work is done. Harmless for a lease that was cut."""
        if self._tickets.pop(ticket.number, None) is not None:
            self._lease_ended(ticket, "released")
            self._feed(Release(ticket.number))
            if not self._scheduler.inflight:
                self._last_left.set()

    def leave(self, ticket: Ticket) -> None:
        """The client has gone, whatever became of its ticket."""
        ticket._left = True
        ticket.on_answer = ticket.on_cut = None
        if ticket.tenant is not None:
            if self.on_abandoned is not None:
                self.on_abandoned(ticket.tenant)
            self.release(ticket)
        elif ticket.refusal is None:
            self._feed(Cancel(ticket.number))
            if ticket.tenant is None:
                self._tickets.pop(ticket.number, None)

    def lost(self, tenant: str, reason: str) -> None:
        """An engine is gone, or answers no more."""
        self._feed(EngineLost(tenant, reason))

    def wedged(self, tenant: str, reason: str) -> None:
        """An engine is alive and gets nowhere: end what waits for it and start it again when it is wanted."""
        if tenant in self.swaps.seated:
            self.swaps.seated[tenant].distrust()
        self._feed(Wedged(tenant, reason))

    def unload(self) -> None:
        self._feed(Unload())

    async def lock(
        self, owner: str, tenant: str | None, ttl: float, token: int | None, *, wait: bool = False, client: str = ""
    ) -> Any:
        """Pin a preset (None = the resident); the lock book's answer, or a Refuse. Durable when it returns."""
        return await self._call(lambda number: Lock(number, owner, tenant, ttl, wait, token, client))

    async def unlock(self, wish: Unlock) -> Any:
        """Let go, or take away; its ticket is given here. Durable when it returns."""
        return await self._call(lambda number: replace(wish, ticket=number))

    async def renew(self, owner: str, ttl: float | None, token: int | None) -> Any:
        return await self._call(lambda number: Renew(number, owner, ttl, token))

    async def _call(self, event: Callable[[int], Event]) -> Any:
        self._number += 1
        number = self._number
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._feed(event(number))
            found = await answer
            self.saves = await asyncio.to_thread(self._durable) is not False
            return found
        finally:
            del self._calls[number]

    async def set_mode(
        self,
        tenant: str,
        wait: float | None,
        client: str = "",
        *,
        owner: str | None = None,
        token: int | None = None,
    ) -> Refuse | None:
        """Bring `tenant` in with no work attached; returns why not, or None when it is on the card."""
        done: asyncio.Future[Refuse | None] = asyncio.get_running_loop().create_future()
        self._number += 1
        ticket = Ticket(self._number, self._clock(), None, None)
        self._tickets[ticket.number] = ticket

        def answered(answer: Ticket) -> None:
            if not done.done():
                done.set_result(answer.refusal)

        ticket.on_answer = answered
        self._feed(SetMode(ticket.number, tenant, wait, client, owner, token))
        try:
            return await done
        finally:
            if not ticket.tenant and not ticket.refusal:
                self.leave(ticket)
            self._tickets.pop(ticket.number, None)

    def presets_changed(self, seats: Iterable[Seat]) -> None:
        """A new table of tenants. Seats of unchanged presets are kept with all that runs in them."""
        table = {seat.tenant.name: seat for seat in seats}
        for name, seat in table.items():
            old = self.seats.get(name)
            if old is None or old.tenant.revision != seat.tenant.revision:
                self._adopt(seat)
            else:
                old.tenant = seat.tenant
                table[name] = old
        self.swaps.seats = table
        self._feed(PresetsChanged(tuple(seat.tenant for seat in table.values())))

    def snapshot(self) -> Snapshot:
        return self._scheduler.snapshot(self._clock())

    def position(self, number: int) -> int | None:
        """A waiting ticket's place in the line, from 1, as of a second ago at most; None = it does not wait."""
        if self._clock() - self._positions_at > 1.0:
            self._positions = {w.ticket: w.position for w in self.snapshot().waiting}
            self._positions_at = self._clock()
        return self._positions.get(number)

    @property
    def now(self) -> float:
        """Seconds on the clock that snapshots use."""
        return self._clock()

    @property
    def nominal(self) -> str | None:
        return self._scheduler.nominal

    @property
    def locked(self) -> bool:
        """Whether a preset is pinned."""
        return self._scheduler.locked

    @property
    def resident(self) -> str | None:
        return self._scheduler.resident

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher(kind, fields)` for everything people may want to know. Returns how to stop it."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    # ---------------------------------------------------------------------------------- events and effects

    def _feed(self, event: Event) -> None:
        """One event, and all that follows. Effects of events fed from a callback are carried out in their turn."""
        effects = self._effects
        effects.extend(self._scheduler.handle(event, self._clock()))
        if self._busy:
            return
        self._busy = True
        try:
            while effects:
                self._carry_out(effects.popleft())
        finally:
            self._busy = False

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Grant():
                self._grant(effect)
            case Answer(ticket, answer):
                self._tell_call(ticket, answer)
            case Refuse():
                self._refuse(effect)
            case StartSwap() | StartUnload():
                self._cut(effect.cut, "the card was needed and the drain grace is over")
                self._order = effect
                self._swap = asyncio.get_running_loop().create_task(self._do_swap(effect))
            case Cut(tickets, reason):
                self._cut(tickets, reason)
            case SetTimer(at):
                self._set_timer(at)
            case Persist(state):
                self._remember(state)
            case Note(kind, fields):
                self.tell(kind, fields)

    def _grant(self, grant: Grant) -> None:
        ticket = self._tickets.get(grant.ticket)
        if ticket is None:
            self._feed(Release(grant.ticket))
            return
        ticket.tenant, ticket.owner, ticket.granted = grant.tenant, grant.owner, self._clock()
        if ticket._left:
            self.release(ticket)
            return
        seat = self.seats.get(grant.tenant)
        if seat is not None:
            self.waits.of(seat.tenant.mode).observe(self._clock() - ticket.since)
        if ticket.on_answer is not None:
            ticket.on_answer(ticket)

    def _tell_call(self, number: int, answer: object) -> bool:
        call = self._calls.get(number)
        if call is not None and not call.done():
            call.set_result(answer)
        return call is not None

    def _refuse(self, refusal: Refuse) -> None:
        if self._tell_call(refusal.ticket, refusal):
            return
        ticket = self._tickets.pop(refusal.ticket, None)
        if ticket is None:
            return
        ticket.refusal = refusal
        if ticket.on_answer is not None:
            ticket.on_answer(ticket)

    def _cut(self, tickets: tuple[int, ...], reason: str) -> None:
        for number in tickets:
            ticket = self._tickets.pop(number, None)
            if ticket is not None:
                self._lease_ended(ticket, "cut")
            if ticket is not None and ticket.on_cut is not None:
                ticket.on_cut(reason)

    def _lease_ended(self, ticket: Ticket, how: str) -> None:
        if self.on_lease_end is not None and ticket.granted is not None and ticket.tenant is not None:
            row = (ticket.number, ticket.tenant, ticket.client, ticket.owner, ticket.granted, self._clock(), how)
            self.on_lease_end(row)

    def open_leases(self) -> list[LeaseRow]:
        """The leases of this moment, as far as they have come."""
        now = self._clock()
        return [(x.ticket, x.tenant, x.client, x.owner, x.since, now, "open") for x in self.snapshot().leases]

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            delay = max(0.0, at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._feed(Tick())

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        for watcher in tuple(self._watchers):
            try:
                watcher(kind, fields)
            except Exception:
                log.exception("a watcher failed", event_kind=kind)

    @property
    def seats(self) -> dict[str, Seat]:
        """By the names of the presets there are now."""
        return self.swaps.seats

    def seat(self, name: str) -> Seat | None:
        """What runs under a tenant's name now."""
        return self.swaps.seat(name)

    # ----------------------------------------------------------------------------------------------- end

    def hurry(self) -> None:
        """Do not wait for leases any longer."""
        self._last_left.set()

    async def shutdown(self, timeout: float) -> None:
        """Refuse whoever waits, let leases run out for `timeout` seconds, stop everything that was started."""
        self._feed(Shutdown())
        if self._scheduler.inflight:
            self._last_left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._last_left.wait()
        self._set_timer(None)
        held = tuple(lease.ticket for lease in self.snapshot().leases)
        self._cut(held, "the gate is shutting down")
        if self._swap is not None and not self._swap.done():
            self._swap.cancel()
            await asyncio.wait([self._swap])
        for seat in tuple(self.swaps.seated.values()):
            if seat.owned:
                seat.on_lost = None
                await seat.evict()
