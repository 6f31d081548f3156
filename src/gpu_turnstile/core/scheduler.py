"""The scheduler: a pure state machine that knows who holds the card and decides who is next.

`handle(event, now)` is the only way anything changes. It never blocks, never looks at a clock, never does I/O; the
same events give the same effects. Whoever calls it carries the effects out and tells it what happened.

How it works. Tickets that cannot be granted at once wait in the line. After every event `_advance` asks the policy
for the one ticket that must be served next:

    it can run on a resident      -> grant it, ask again
    it must wait for a lease      -> wait (an exclusive lease is alone)
    its tenant is not on the card -> it is the target: the victims drain, that is, nobody is granted anything on them
                                     any more, except what an alias can still serve in place; when their leases, or
                                     their grace, have run out, the swap starts

The target of a drain is not a decision of its own: it is whoever the policy names now, so a client that leaves, or a
more urgent one that comes, needs no special case. During a swap nothing is decided at all. A completed swap first
serves the waiters it was made for; only then may anything drain the newcomer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from gpu_turnstile.core import budget
from gpu_turnstile.core.card import Card, Drain, Resident, Swap
from gpu_turnstile.core.failures import Failures
from gpu_turnstile.core.line import Line
from gpu_turnstile.core.locks import TTL, LockBook
from gpu_turnstile.core.model import (
    Answer,
    Break,
    Cancel,
    Code,
    Cut,
    Effect,
    EngineLost,
    Event,
    Grant,
    Lock,
    Mode,
    Note,
    Persist,
    Phase,
    PresetsChanged,
    Refuse,
    Release,
    Renew,
    Request,
    SetMode,
    SetTimer,
    Shutdown,
    Sized,
    Snapshot,
    StartSwap,
    StartUnload,
    SwapFailed,
    SwapSucceeded,
    Tenant,
    Tick,
    Unload,
    Unlock,
    Wedged,
)
from gpu_turnstile.core.pins import Pins
from gpu_turnstile.core.policy import Rules
from gpu_turnstile.core.turns import Turns

WHOM = 20  # names of clients that are told of when all work was cut


class Scheduler:
    """See the module's docstring. `residents` is what was found on the card at the start, never remembered; `coming`
    what was found loading: from the first event on, a Tick, it is waited for as in any swap.
    """

    def __init__(
        self,
        tenants: Iterable[Tenant],
        rules: Rules | None = None,
        *,
        now: float = 0.0,
        residents: Iterable[str] = (),
        stuck: Iterable[str] = (),
        coming: str | None = None,
        name: str | None = None,
        locks: dict[str, Any] | None = None,
        lock_ttl: float = TTL,
    ) -> None:
        """`odd` tells afterwards what in `locks` made no sense."""
        self.rules = rules or Rules()
        self._tenants = {t.name: t for t in tenants}
        self._card = Card()
        self._residents, self._leases = self._card.residents, self._card.leases
        self._line = Line()
        self._swap: Swap | None = None
        self._swaps = 0
        self._drain: Drain | None = None
        self._unload = False
        self._closing = False
        self._restore: str | None = None  # who comes back when nobody else wants the card after a failed swap
        self._away = False  # the tenant that is at home on the card had to leave for somebody else
        self._emptied = now  # when the card was left to nobody, or bringing somebody home failed
        self._failures = Failures(self.rules)
        self._armed: float | None = None
        self._name = name if name in self._tenants else None
        self._locks, self.odd = LockBook.recover(locks or {}, now, lock_ttl)
        self._pins = Pins(self._locks, self._line, self._card, self._persist)
        self._turns = Turns(self.rules, self._line, self._card, self._locks)
        self._gone = self._locks.keep_presets(self._tenants, now)  # told with the first event
        for found in residents:
            self._settle(found, self._tenants.get(found), now)
        for found in stuck:
            self._settle(found, self._tenants.get(found), now, stuck=True)
        self._away = self.rules.home is not None and self.rules.home not in self._residents
        self._resumes = self._tenants.get(coming or "")
        self._handlers: dict[type[Any], Callable[[Any, float, list[Effect]], None]] = {
            Request: self._on_request,
            Cancel: self._on_cancel,
            Release: self._on_release,
            SwapSucceeded: self._on_swap_succeeded,
            SwapFailed: self._on_swap_failed,
            EngineLost: self._on_engine_lost,
            Wedged: self._on_wedged,
            Lock: self._on_lock,
            Unlock: self._on_unlock,
            Renew: self._on_renew,
            SetMode: self._on_set_mode,
            Unload: self._on_unload,
            Break: self._on_break,
            PresetsChanged: self._on_presets_changed,
            Shutdown: self._on_shutdown,
            Tick: self._on_tick,
        }

    # ------------------------------------------------------------------------------------------ the door

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at time `now` (seconds, never going back); returns what must be done, in order."""
        out: list[Effect] = []
        self._handlers[type(event)](event, now, out)
        return out

    # ------------------------------------------------------------------------------------------- tickets

    def _on_request(self, event: Request, now: float, out: list[Effect]) -> None:
        if self._closing:
            out.append(Refuse(event.ticket, Code.SHUTTING_DOWN, "the gate is shutting down"))
            return
        known = event.wants
        for want in known:
            if want not in self._tenants:
                known = tuple(w for w in known if w in self._tenants)
                break
        if not known:
            out.append(Refuse(event.ticket, Code.UNKNOWN_MODEL, f"no preset is called {event.wants[0]!r}"))
            return
        self._turns.came(event.client, known, now)
        owner = event.owner
        if self._locks or event.token is not None:
            self._pins.lapse(now, out)
            if not self._pins.admit(event, known, now, out):
                return
            if event.token is not None:
                owner = self._locks.owner_of(event.token)
            if self._locks.preset is not None:
                known = (self._locks.preset,)
        if self.rules.capacity and any(self._too_big(want) for want in known):
            fitting = tuple(want for want in known if not self._too_big(want))
            if not fitting:
                out.append(self._unfit(event.ticket, self._tenants[known[0]]))
                return
            known = fitting
        if self._failures and self._card.serving(known) is None:
            able = tuple(want for want in known if not self._failures.hold_back(want, now))
            if not able:
                out.append(self._failures.refusal(event.ticket, known[0], now))
                return
            known = able
        if not self._line and self._swap is None and not self._unload:
            resident = self._card.serving(known)
            if resident is not None and self._card.compatible(resident):
                self._grant(resident, event.ticket, event.visit, event.client, owner, now, out)
                return
        self._line.join(event, known, self._tenants[known[0]].rank, now, owner)
        self._advance(now, out)
        if event.wait == 0 and event.ticket in self._line and not self._coming(known):
            self._line.leave(event.ticket)
            out.append(self._busy(event.ticket, "the card is in use"))
            self._advance(now, out)

    def _on_set_mode(self, event: SetMode, now: float, out: list[Effect]) -> None:
        self._on_request(
            Request(event.ticket, (event.tenant,), False, True, event.wait, event.client, event.owner, event.token),
            now,
            out,
        )

    def _on_cancel(self, event: Cancel, now: float, out: list[Effect]) -> None:
        if event.ticket in self._line:
            self._line.leave(event.ticket)
            self._advance(now, out)

    def _on_release(self, event: Release, now: float, out: list[Effect]) -> None:
        resident = self._leases.pop(event.ticket, None)
        if resident is None:  # cut before: the swap or the crash has settled it
            return
        client, since, owner = resident.leases.pop(event.ticket)
        if not resident.leases:
            resident.idle_since = now
        self._turns.left(resident, client, since, now)
        if self._locks:
            self._touch(resident, owner, now, out)
        if (
            self._line
            or self._unload
            or (not resident.leases and (self._away or resident.stale or resident.tenant.linger is not None))
        ):
            self._advance(now, out)

    def _grant(
        self,
        resident: Resident,
        ticket: int,
        visit: bool,
        client: str,
        owner: str | None,
        now: float,
        out: list[Effect],
    ) -> None:
        if not visit:
            self._card.lease(resident, ticket, client, owner, now)
            if self._locks:
                self._touch(resident, owner, now, out)
        elif not resident.leases:
            resident.idle_since = now
            self._rearm(now, out)
        out.append(Grant(ticket, resident.tenant.name, owner))

    def _cut(self, residents: Collection[Resident], now: float) -> tuple[int, ...]:
        self._pins.work_ended(residents, now)
        return self._card.cut(residents, now)

    def _busy(self, ticket: int, why: str) -> Refuse:
        return Refuse(ticket, Code.BUSY, why, self.rules.retry_after)

    def _too_big(self, name: str) -> bool:
        """Whether the budget has no room for it. One that was measured on this card has shown that it fits."""
        tenant = self._tenants[name]
        return tenant.sized is not Sized.LEARNED and not budget.fits((tenant.footprint,), self.rules.capacity, 0.0)

    def _unfit(self, ticket: int, tenant: Tenant) -> Refuse:
        message = f"{tenant.name!r} needs {tenant.size} of the card, and presets may use {self.rules.capacity:g} GB"
        why = "LLMC_VRAM_LIMIT_GB less LLMC_VRAM_RESERVE_GB"
        if tenant.sized is Sized.COMPUTED:
            why += "; if the computed figure is wrong, write vram_gb into the preset"
        return Refuse(ticket, Code.MODEL_UNAVAILABLE, f"{message} ({why})")

    # ------------------------------------------------------------------------------------------ decision

    def _advance(self, now: float, out: list[Effect]) -> None:
        """Decide until nothing more can be decided. Nothing is decided during a swap."""
        self._expire(now, out)
        while self._swap is None and self._step(now, out):
            pass
        for resident in self._residents.values():
            resident.fresh = resident.fresh and not resident.begun
        self._rearm(now, out)

    def _step(self, now: float, out: list[Effect]) -> bool:
        """One decision; True when there may be another one."""
        self._turns.held = None
        if self._unload:
            return self._make_room(None, dict(self._residents), now, out)
        if not self._line:
            return self._leave(now, out)
        waits_for_turn: int | None = None  # the rank of whoever waits until a turn ends
        for queue, resident, head in self._turns.heads(now):
            if waits_for_turn is not None and queue.rank < waits_for_turn:
                break
            if resident is not None:
                self._end_drain(out)
                if not self._card.compatible(resident):
                    return False
                ticket = self._line.leave(queue.head.number)
                self._grant(resident, ticket.number, ticket.visit, ticket.client, ticket.owner, now, out)
                return True
            target = self._tenants[self._turns.wanted(queue)]
            victims = self._victims(target)
            if self._turns.must_wait(head, victims.values(), now):
                waits_for_turn = queue.rank
                continue
            if self._make_room(target, victims, now, out):
                return True
            self._grant_in_place(now, out)
            return False
        self._end_drain(out)
        return False

    def _coming(self, wants: tuple[str, ...]) -> bool:
        return self._swap is not None and self._swap.name in wants

    def _victims(self, target: Tenant) -> dict[str, Resident]:
        """Who has to leave for `target`: whoever cannot serve, and as many others as the budget says."""
        healthy = {n: r.tenant.footprint for n, r in self._residents.items() if r.admits and n != target.name}
        leaving = set(budget.plan_eviction(healthy, target.footprint, self.rules.capacity, self.rules.colocate))
        return {n: r for n, r in self._residents.items() if n in leaving or not r.admits}

    def _make_room(self, target: Tenant | None, victims: dict[str, Resident], now: float, out: list[Effect]) -> bool:
        """Start the swap if the victims are drained or out of grace, else let them drain. True = decided."""
        if target is None and not victims:
            self._unload = False
            return True
        inflight = sum(len(r.leases) for r in victims.values())
        if inflight:
            name, names = target.name if target else None, tuple(victims)
            if self._drain is None:
                out.append(Note("drain", {"target": name, "victims": list(names), "inflight": inflight}))
            self._drain = Drain(self._drain.since if self._drain else now, name, names)
            deadline = self._drain.deadline(self._residents)
            if deadline is None or now < deadline:
                return False
        self._begin(target, victims, now, out)
        return True

    def _begin(
        self,
        target: Tenant | None,
        victims: dict[str, Resident],
        now: float,
        out: list[Effect],
        *,
        coming: bool = False,
    ) -> None:
        cut = self._cut(victims.values(), now)
        for name in victims:
            del self._residents[name]
        self._swaps += 1
        self._swap = Swap(self._swaps, target, victims, now)
        self._drain = None
        if cut:
            out.append(Note("forced", {"target": self._swap.name, "cut": len(cut), "victims": list(victims)}))
        evict = tuple(victims)
        if target is None:
            out.append(StartUnload(self._swaps, evict, cut))
        else:
            out.append(StartSwap(self._swaps, target.name, evict, cut, coming))

    def _grant_in_place(self, now: float, out: list[Effect]) -> None:
        """While the residents drain, serve what an alias or capability can still be served with.

        Only on residents whose drain is bounded, else a stream of such requests could hold the target off for ever;
        and never past a waiting ticket of a higher rank.
        """
        queues = self._line.queues()
        top = max(queue.rank for queue in queues)
        for queue in [q for q in queues if q.in_place and q.rank == top]:
            resident = self._card.serving(queue.wants)
            if resident is None or resident.tenant.drain_grace is None or not self._card.compatible(resident):
                continue
            while queue.entries:
                ticket = self._line.leave(queue.head.number)
                self._grant(resident, ticket.number, ticket.visit, ticket.client, ticket.owner, now, out)
                if resident.tenant.exclusive:
                    break

    def _end_drain(self, out: list[Effect]) -> None:
        """Whoever the card was to be emptied for does not want it any more, or got it without."""
        if self._drain is not None:
            self._drain = None
            out.append(Note("drain_end", {}))

    def _leave(self, now: float, out: list[Effect]) -> bool:
        """Nobody waits. Residents whose preset is gone, or who lingered long enough, leave."""
        stale = {n: r for n, r in self._residents.items() if r.stale}
        if stale:
            return self._make_room(None, stale, now, out)
        self._end_drain(out)
        if self._restore is not None and not self._residents and not self._closing:
            back, self._restore = self._tenants.get(self._restore), None
            if back is not None and self._locks.allows((back.name,)):
                out.append(Note("rollback", {"target": back.name}))
                self._begin(back, {}, now, out)
                return True
        for name, resident in self._residents.items():
            leaves = self._leaves_at(resident)
            if leaves is not None and leaves <= now:
                self._begin(None, {name: resident}, now, out)
                return True
        return self._bring_home(now, out)

    def _bring_home(self, now: float, out: list[Effect]) -> bool:
        """The card has had nothing to do for long enough: the tenant that is at home on it comes back."""
        due = self._home_at()
        if due is None or due > now:
            return False
        home = self._tenants[self.rules.home or ""]
        out.append(Note("restore", {"target": home.name}))
        self._begin(home, self._victims(home), now, out)
        return True

    def _home_at(self) -> float | None:
        """When it comes back by itself; None = not as things are.

        Not after somebody emptied the card or it left because nobody wanted it, not past a lock, and never at the
        cost of work: training may go on with no request open.
        """
        home = self._tenants.get(self.rules.home or "")
        if home is None or not self._away or self._closing or not self._locks.allows((home.name,)):
            return None
        since = self._emptied
        for name, resident in self._residents.items():
            if name == home.name or resident.leases or resident.stuck or resident.tenant.mode is Mode.TRAIN:
                return None
            since = max(since, resident.idle_since)
        return max(since + self.rules.home_after, self._failures.not_before(home.name, since))

    def _leaves_at(self, resident: Resident) -> float | None:
        name, linger = resident.tenant.name, resident.tenant.linger
        if linger is None or resident.leases or resident.stuck or self._locks.preset == name:
            return None
        return resident.idle_since + linger

    # --------------------------------------------------------------------------------------------- swaps

    def _on_swap_succeeded(self, event: SwapSucceeded, now: float, out: list[Effect]) -> None:
        swap = self._end_swap(event.swap)
        if swap is None:
            return
        self._restore = None
        self._emptied = now
        if swap.target is not None:
            self._away = self.rules.home is not None and swap.target.name != self.rules.home
            self._failures.forget(swap.target.name)
            self._settle(swap.target.name, swap.target, now, cohort=self._line.seq)
        fields = {"target": swap.name, "evicted": list(swap.victims), "seconds": now - swap.since}
        out.append(Note("swapped", fields | ({"refill": event.refill} if event.refill else {})))
        if swap.target is not None:
            out += self._turns.swapped(swap, swap.target, event.refill, self._tenants, now)
        self._persist(now, out)
        self._advance(now, out)

    def _on_swap_failed(self, event: SwapFailed, now: float, out: list[Effect]) -> None:
        swap = self._end_swap(event.swap)
        if swap is None:
            return
        self._emptied = now
        known = {n: r.tenant for n, r in swap.victims.items()}
        if swap.target is not None:
            known[swap.target.name] = swap.target
        for name in (*event.residents, *event.stuck):
            if name not in self._residents:
                self._settle(name, known.get(name) or self._tenants.get(name), now, stuck=name in event.stuck)
        out.append(Note("swap_failed", {"target": swap.name, "reason": event.reason, "stuck": list(event.stuck)}))
        if swap.target is not None and event.code is Code.SWAP_FAILED:
            self._failures.add(swap.target.name, event.reason, now)
            self._restore = self._who_left(swap) if self.rules.rollback else None
        if swap.target is not None and swap.name not in event.residents:
            for ticket in self._line.tickets(lambda q: self._turns.wanted(q) == swap.name):
                self._line.leave(ticket)
                out.append(Refuse(ticket, event.code, event.reason, self.rules.retry_after))
        self._persist(now, out)
        self._advance(now, out)

    def _who_left(self, swap: Swap) -> str | None:
        """Whoever had to leave for a target that failed and is not gone by itself soon anyway."""
        for name, resident in swap.victims.items():
            if resident.serves and resident.tenant.linger != 0 and name != swap.name and name in self._tenants:
                return name
        return None

    def _end_swap(self, number: int) -> Swap | None:
        swap = self._swap
        if swap is None or swap.number != number:
            return None
        self._swap = None
        if swap.target is None:
            self._unload = False
        return swap

    def _settle(self, name: str, tenant: Tenant | None, now: float, *, cohort: int = 0, stuck: bool = False) -> None:
        """`name` is on the card now, as `tenant`. One that no table knows can only be stuck."""
        if tenant is None:
            tenant, stuck = Tenant(name, Mode.IDLE), True
        current = self._tenants.get(name)
        stale = not stuck and (current is None or current.revision != tenant.revision)
        self._residents[name] = Resident(tenant, now, now, cohort=cohort, fresh=cohort > 0, stale=stale, stuck=stuck)
        if not stuck and current is not None:
            self._name = name

    def _on_engine_lost(self, event: EngineLost, now: float, out: list[Effect]) -> None:
        resident = self._residents.pop(event.tenant, None)
        if resident is None:  # going or coming: the swap's own end tells
            return
        tickets = self._cut((resident,), now)
        self._emptied = now
        out.append(Note("engine_lost", {"tenant": event.tenant, "reason": event.reason, "cut": len(tickets)}))
        if tickets:
            out.append(Cut(tickets, event.reason))
        self._persist(now, out)
        self._advance(now, out)

    def _on_wedged(self, event: Wedged, now: float, out: list[Effect]) -> None:
        resident = self._residents.get(event.tenant)
        if resident is None or not resident.serves:
            return
        tickets = self._cut((resident,), now)
        resident.stale = True
        out.append(Note("wedged", {"tenant": event.tenant, "reason": event.reason, "cut": len(tickets)}))
        if tickets:
            out.append(Cut(tickets, event.reason))
        self._advance(now, out)

    # ------------------------------------------------------------------------------------ people's wishes

    def _on_unload(self, event: Unload, now: float, out: list[Effect]) -> None:
        self._unload = True
        self._restore = None
        self._away = False
        self._advance(now, out)

    def _on_break(self, event: Break, now: float, out: list[Effect]) -> None:
        worked = {client for resident in self._residents.values() for client, _, _ in resident.leases.values()}
        tickets = self._cut(self._residents.values(), now)
        gone = self._locks.break_glass(now, _blamed(event.client or event.peer, event.reason))
        who = {"client": event.client, "peer": event.peer, "cut": len(tickets)}
        whom = {"clients": sorted(worked)[:WHOM], "owners": list(gone.owners)}
        out.append(Note("released", {"reason": event.reason} | who | whom))
        self._pins.ended(gone.cut, now, out)
        if tickets:
            out.append(Cut(tickets, event.reason))
        self._advance(now, out)

    def _on_presets_changed(self, event: PresetsChanged, now: float, out: list[Effect]) -> None:
        before, self._tenants = self._tenants, {t.name: t for t in event.tenants}
        self._failures.presets_changed(before, self._tenants)
        for name, resident in self._residents.items():
            fresh = self._tenants.get(name)
            if fresh is not None and fresh.revision == resident.tenant.revision:
                resident.tenant = fresh
            elif not resident.stuck:
                resident.stale = True
        for ticket in self._line.resort(lambda name: self._tenants[name].rank if name in self._tenants else None):
            gone = self._line.queue_of(ticket).wants[0]
            self._line.leave(ticket)
            out.append(Refuse(ticket, Code.UNKNOWN_MODEL, f"the preset {gone!r} was removed"))
        if self._name not in self._tenants:
            self._name = None
        self._pins.ended(self._locks.keep_presets(self._tenants, now), now, out)
        out.append(Note("presets", {"tenants": list(self._tenants)}))
        self._advance(now, out)

    def _on_shutdown(self, event: Shutdown, now: float, out: list[Effect]) -> None:
        self._closing = True
        for ticket in self._line.tickets():
            self._line.leave(ticket)
            out.append(Refuse(ticket, Code.SHUTTING_DOWN, "the gate is shutting down"))
        self._persist(now, out)
        self._advance(now, out)

    # --------------------------------------------------------------------------------------------- locks

    def _on_lock(self, event: Lock, now: float, out: list[Effect]) -> None:
        self._expire(now, out)
        tenant = event.tenant if event.tenant is not None else self.resident
        if tenant is None:
            out.append(Refuse(event.ticket, Code.SERVICE_INACTIVE, "nothing is on the card that could be locked"))
        elif tenant not in self._tenants:
            out.append(Refuse(event.ticket, Code.UNKNOWN_MODEL, f"no preset is called {tenant!r}"))
        else:
            answer = self._locks.lock(
                tenant, event.owner, event.ttl, now, wait=event.wait, token=event.token, client=event.client
            )
            self._answered(event.ticket, answer, now, out)

    def _on_unlock(self, event: Unlock, now: float, out: list[Effect]) -> None:
        self._expire(now, out)
        answer = self._locks.unlock(
            event.owner,
            now,
            caller=event.caller,
            token=event.token,
            force=event.force,
            open_unlock=event.open_unlock,
            leave=event.leave,
            by=_blamed(event.caller or event.peer, event.reason),
        )
        who = {"caller": event.caller, "peer": event.peer, "force": event.force}
        why = {"reason": event.reason} if event.reason else {}
        self._answered(event.ticket, answer, now, out, **who, **why)

    def _on_renew(self, event: Renew, now: float, out: list[Effect]) -> None:
        self._expire(now, out)
        self._answered(event.ticket, self._locks.renew(event.owner, event.ttl, now, token=event.token), now, out)

    def _answered(self, ticket: int, answer: object, now: float, out: list[Effect], **who: Any) -> None:
        self._pins.answered(answer, now, out, **who)
        out.append(Answer(ticket, answer))
        self._advance(now, out)

    def _touch(self, resident: Resident, owner: str | None, now: float, out: list[Effect]) -> None:
        self._pins.touch(resident.tenant.name, owner, now, out)
        self._rearm(now, out)

    # -------------------------------------------------------------------------------------------- timers

    def _on_tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        self._armed = None
        gone, self._gone = self._gone, ()
        self._pins.ended(gone, now, out)
        coming, self._resumes = self._resumes, None
        if coming is not None:
            self._begin(coming, {}, now, out, coming=True)
        self._advance(now, out)

    def _expire(self, now: float, out: list[Effect]) -> None:
        for entry in self._line.expired(now):
            out.append(self._busy(entry.number, f"waited {now - entry.since:.0f} s for the card, the longest allowed"))
        self._pins.lapse(now, out)

    def _rearm(self, now: float, out: list[Effect]) -> None:
        """Ask for a Tick at the next moment that matters. One that comes too early does no harm."""
        due = min(self._moments(), default=None)
        if due is not None and (self._armed is None or due < self._armed):
            self._armed = due
            out.append(SetTimer(due))

    def _moments(self) -> Iterator[float]:
        for moment in (self._line.next_deadline, self._locks.next_moment):
            if moment is not None:
                yield moment
        if self._swap is not None:
            return
        if self._turns.held is not None:
            yield self._turns.held
        if self._drain is not None:
            deadline = self._drain.deadline(self._residents)
            if deadline is not None:
                yield deadline
        elif not self._line:
            home = self._home_at()
            if home is not None:
                yield home
            for resident in self._residents.values():
                leaves = self._leaves_at(resident)
                if leaves is not None:
                    yield leaves

    def _persist(self, now: float, out: list[Effect]) -> None:
        out.append(
            Persist({"mode": self.mode.value, "model": self._name, "lock": self._locks.save(now, self._pins.busy())})
        )

    # ------------------------------------------------------------------------------------------- reading

    @property
    def mode(self) -> Mode:
        """The kind of tenant on the card, or on its way to it."""
        first = self._card.first
        if first is not None:
            return first.tenant.mode
        return self._swap.target.mode if self._swap is not None and self._swap.target is not None else Mode.IDLE

    @property
    def phase(self) -> Phase:
        if self._swap is not None:
            return Phase.SWAPPING
        if self._drain is not None:
            return Phase.DRAINING
        return Phase.SERVING if self._card.first is not None else Phase.IDLE

    @property
    def inflight(self) -> int:
        """How many leases there are."""
        return len(self._leases)

    def leases_of(self, tenant: str) -> int:
        resident = self._residents.get(tenant)
        return len(resident.leases) if resident is not None else 0

    @property
    def resident(self) -> str | None:
        """The tenant that serves now; with several, the one that came first."""
        first = self._card.first
        return first.tenant.name if first is not None else None

    @property
    def locked(self) -> bool:
        """Whether a preset is pinned."""
        return self._locks.preset is not None

    @property
    def nominal(self) -> str | None:
        """The resident, or the one that was there last: what a request without a model means."""
        return self.resident or self._name

    def snapshot(self, now: float) -> Snapshot:
        """Everything a person may see. Costs time in proportion to leases and waiters: not for the hot path."""
        return Snapshot(
            phase=self.phase,
            mode=self.mode,
            residents=tuple(n for n, r in self._residents.items() if r.serves),
            stuck=tuple(n for n, r in self._residents.items() if r.stuck),
            name=self.nominal,
            target=self._bound_for,
            drain_deadline=self._drain.deadline(self._residents) if self._drain else None,
            leases=tuple(self._card.held()),
            waiting=tuple(self._line.view(self._bound_for)),
            locks=self._locks.standing(now),
            kept=self._turns.kept(now) if self._drain is None else None,
            war=self._turns.war(now),
        )

    def lock_view(self, now: float) -> dict[str, Any]:
        """The lock book as it is persisted, without marking it as saved."""
        return self._locks.view(now, self._pins.busy())

    @property
    def _bound_for(self) -> str | None:
        if self._swap is not None:
            return self._swap.name
        return self._drain.target if self._drain else None


def _blamed(who: str, reason: str) -> str:
    """Who took a lock away and why, as its owner is told."""
    return f"{who} ({reason})" if who and reason else who or reason
