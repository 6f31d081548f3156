"""A small world around the scheduler that plays engines and clients, and checks the invariants after every step.

It keeps its own books (who waits, who holds a lease, what swap is under way) from the effects alone, so that a
mistake of the scheduler's books shows. The numbers in `check` are those of the eight invariants in the design.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gpu_turnstile.core.model import (
    Answer,
    Break,
    Cancel,
    Cut,
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
from gpu_turnstile.core.policy import Order, Rules, held_back_for
from gpu_turnstile.core.scheduler import Scheduler

TENANTS = (
    Tenant("a", Mode.LLM, footprint=8.0, drain_grace=20.0),
    Tenant("b", Mode.LLM, footprint=9.0, drain_grace=5.0, linger=30.0),
    Tenant("c", Mode.LLM, footprint=14.0, drain_grace=0.0),
    Tenant("ollama", Mode.LLM, footprint=10.0, drain_grace=None),
    Tenant("comfyui", Mode.COMFYUI, footprint=12.0, exclusive=True, rank=1, drain_grace=None, linger=0.0),
    Tenant("train", Mode.TRAIN, exclusive=True, drain_grace=40.0),
    Tenant("forge", Mode.COMFYUI, exclusive=True, rank=1, single=True, linger=0.0, footprint=6.0),
)
RULES = tuple(
    replace(rules, order=order)
    for order in Order
    for rules in (
        Rules(patience=60.0, max_wait=90.0, rollback=True, hold_back=5.0),
        Rules(patience=None, max_wait=30.0, home="a", home_after=20.0),
        Rules(patience=0.0, max_wait=0.0),
        Rules(share=10.0, linger=10.0),
        Rules(colocate=True, capacity=24.0),
    )
)


@dataclass
class Waiter:
    request: Request
    wants: tuple[str, ...]  # those of its wants that have existed all the time
    since: float
    swaps_allowed: int | None = None  # set once it is overdue: how many swaps for others may still come first


@dataclass
class World:
    rules: Rules
    coming: str | None = None  # what is found loading at the beginning
    now: float = 0.0
    tickets: int = 0
    waiting: dict[int, Waiter] = field(default_factory=dict)
    leases: dict[int, str] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    swap: StartSwap | StartUnload | None = None
    alarm: float | None = None
    drain_since: float | None = None
    steps: int = 0
    calls: int = 0
    unanswered: set[int] = field(default_factory=set)  # lock calls
    disturbed: int = 0  # events that may cost a waiter an extra swap
    promised: dict[str, int] = field(default_factory=dict)  # newcomer -> newest ticket its swap was made for
    brought: dict[str, Tenant] = field(default_factory=dict)  # newcomer -> the preset it was started with
    failed: dict[str, tuple[int, float]] = field(default_factory=dict)  # failed swaps in a row, not tried before
    begun: set[str] = field(default_factory=set)  # who has served since it was brought in

    def __post_init__(self) -> None:
        self.tenants = {t.name: t for t in TENANTS}
        self.scheduler = Scheduler(TENANTS, self.rules, coming=self.coming)
        self._do(Tick())

    # ------------------------------------------------------------------------------------------- what happens

    def request(self, wants: tuple[str, ...], in_place: bool, visit: bool, wait: float | None) -> None:
        self.tickets += 1
        request = Request(self.tickets, wants, in_place, visit, wait, client=f"c{self.tickets % 3}")
        self.waiting[self.tickets] = Waiter(request, self._meant(wants), self.now)
        self._do(request)

    def set_mode(self, tenant: str) -> None:
        self.tickets += 1
        request = Request(self.tickets, (tenant,), visit=True)
        self.waiting[self.tickets] = Waiter(request, self._meant((tenant,)), self.now)
        self._do(SetMode(self.tickets, tenant))

    def cancel(self, ticket: int) -> None:
        if self.waiting.pop(ticket, None):
            self.answered.add(ticket)
        self._do(Cancel(ticket))

    def release(self, ticket: int) -> None:
        self.leases.pop(ticket, None)
        self._do(Release(ticket))

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.alarm is not None and self.alarm <= until:
            self.now, self.alarm = max(self.now, self.alarm), None
            self._do(Tick())
        self.now = until

    def swap_ends(
        self, well: bool, residents: tuple[str, ...] = (), stuck: tuple[str, ...] = (), refill: float = 0.0
    ) -> None:
        swap, self.swap = self.swap, None
        if swap is None:
            return
        if well:
            if isinstance(swap, StartSwap):
                for waiter in self.waiting.values():
                    if waiter.swaps_allowed is not None and swap.target not in waiter.wants:
                        waiter.swaps_allowed -= 1
            if isinstance(swap, StartSwap):
                self.promised[swap.target] = self.tickets
                self.failed.pop(swap.target, None)
                self.begun.discard(swap.target)
            self._do(SwapSucceeded(swap.swap, refill))
        else:
            if isinstance(swap, StartSwap):
                count = self.failed.get(swap.target, (0, 0.0))[0] + 1
                self.failed[swap.target] = (count, self.now + held_back_for(count, self.rules))
            self.begun.difference_update(residents)
            self._do(SwapFailed(swap.swap, "broken", residents, stuck))

    def engine_lost(self, tenant: str) -> None:
        self._do(EngineLost(tenant, "killed"))

    def lock(self, owner: str, tenant: str | None, ttl: float) -> None:
        self.disturbed += 1
        self._do(Lock(self._call(), owner, tenant, ttl, wait=ttl > 10))

    def unlock(self, owner: str | None) -> None:
        self._do(Unlock(self._call(), owner, force=True))

    def renew(self, owner: str, ttl: float) -> None:
        self._do(Renew(self._call(), owner, ttl))

    def _call(self) -> int:
        """The number of a lock call; negative, so that it is no ticket."""
        self.calls += 1
        self.unanswered.add(-self.calls)
        return -self.calls

    def unload(self) -> None:
        self._do(Unload())

    def wedged(self, tenant: str) -> None:
        self.disturbed += 1
        self._do(Wedged(tenant, "stuck"))

    def break_glass(self) -> None:
        self._do(Break("stuck"))

    def change_presets(self, dropped: str | None, changed: str | None) -> None:
        self.disturbed += 1
        table = [t for t in TENANTS if t.name != dropped]
        table = [replace(t, revision=str(self.steps)) if t.name == changed else t for t in table]
        before, self.tenants = self.tenants, {t.name: t for t in table}
        same = {n for n, t in self.tenants.items() if n in before and before[n].revision == t.revision}
        self.failed = {name: kept for name, kept in self.failed.items() if name in same}
        for waiter in self.waiting.values():
            waiter.wants = self._known(waiter.wants)
        self._do(PresetsChanged(tuple(table)))

    # ---------------------------------------------------------------------------------------- what it answers

    def _do(self, event: Event) -> None:
        self.steps += 1
        before, leases = self.scheduler.snapshot(self.now), dict(self.leases)
        for effect in self.scheduler.handle(event, self.now):
            self._take(effect, before)
        for ticket in self.leases.keys() - leases.keys():
            self.promised.pop(self.leases[ticket], None)
        self.check()

    def _take(self, effect: Any, before: Any) -> None:
        match effect:
            case Grant(ticket, tenant):
                self._granted(ticket, tenant)
            case Answer(ticket) | Refuse(ticket) if ticket < 0:
                self.unanswered.remove(ticket)
            case Refuse(ticket):
                self._answer(ticket)
            case Cut(tickets):
                for ticket in tickets:
                    del self.leases[ticket]
            case StartSwap() | StartUnload():
                self._swap_starts(effect, before)
            case SetTimer(at):
                self.alarm = at
            case Persist(state):
                self._reload(state)
            case Note():
                pass
            case _:
                raise AssertionError(effect)

    def _answer(self, ticket: int) -> Waiter:
        assert ticket not in self.answered, f"3: ticket {ticket} answered twice"
        self.answered.add(ticket)
        return self.waiting.pop(ticket)

    def _granted(self, ticket: int, tenant: str) -> None:
        assert self.swap is None, "1: granted during a swap"
        waiter = self._answer(ticket)
        assert tenant in waiter.wants
        if ticket > self.promised.get(tenant, 0):
            rank = self._rank(waiter.wants)
            higher = [w for w in self.waiting.values() if self._rank(w.wants) > rank and w.since < self.now]
            assert not higher, f"4: {ticket} granted while a higher class waits"
        if not waiter.request.visit:
            self.leases[ticket] = tenant
            self.begun.add(tenant)
        exclusive = [t for t in self.leases.values() if self._tenant(t).exclusive]
        assert not exclusive or len(self.leases) == 1, "4: an exclusive lease is not alone"

    def _swap_starts(self, swap: StartSwap | StartUnload, before: Any) -> None:
        assert self.swap is None, "1: two swaps at once"
        held = sorted(t for t, tenant in self.leases.items() if tenant in swap.evict)
        assert held == sorted(swap.cut), f"2: leases {held} on the victims, said {swap.cut}"
        for ticket in swap.cut:
            grace = self._tenant(self.leases[ticket]).drain_grace
            since = self.now if self.drain_since is None else self.drain_since
            assert grace is not None, "2: cut a lease that has no grace limit"
            assert self.now >= since + grace, f"2: cut {ticket} before its grace was over"
            del self.leases[ticket]
        locked = before.locks.preset
        if locked and self.scheduler.snapshot(self.now).locks.preset == locked:
            unasked = isinstance(swap, StartSwap) and swap.target != locked
            assert not (unasked and locked in swap.evict), "6: a locked preset is evicted"
        if isinstance(swap, StartSwap):
            if not locked:
                self._check_progress(swap)
            self.brought[swap.target] = self.tenants[swap.target]
        for name in swap.evict:
            self.promised.pop(name, None)
        self.swap = swap

    def _check_progress(self, swap: StartSwap) -> None:
        """5: whoever was brought in serves those it was brought in for before it has to leave for somebody else."""
        for name in swap.evict:
            waiting = [n for n, w in self.waiting.items() if n <= self.promised.get(name, 0) and w.wants == (name,)]
            replaced = self.tenants.get(name) != self.brought.get(name) or name == swap.target
            assert not waiting or replaced, f"5: {name} leaves for {swap.target} before it served {waiting}"

    def _reload(self, state: dict[str, Any]) -> None:
        again = Scheduler(self.tenants.values(), self.rules, now=self.now, name=state["model"], locks=state["lock"])
        there = again.snapshot(self.now)
        assert again.lock_view(self.now) == state["lock"], "7: the lock book does not survive"
        assert there.name == state["model"], "7: the resident's name does not survive"
        assert timeless(self.scheduler.lock_view(self.now)) == timeless(state["lock"]), (
            "7: something of the lock book was not persisted"
        )

    def _rank(self, wants: tuple[str, ...]) -> int:
        return self.tenants[wants[0]].rank if wants else 0

    def _meant(self, wants: tuple[str, ...]) -> tuple[str, ...]:
        """What a ticket that is drawn now waits for: what there is, and is not held back after failures."""
        view = self.scheduler.snapshot(self.now)
        if view.locks.preset in wants:
            wants = (view.locks.preset,)
        known = self._known(wants)
        spent = {name for name in self.begun if self._tenant(name).single}
        if any(name in view.residents and name not in spent for name in known):
            return known
        return tuple(name for name in known if self.now >= self.failed.get(name, (0, self.now))[1])

    def _known(self, wants: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(w for w in wants if w in self.tenants)

    @staticmethod
    def _tenant(name: str) -> Tenant:
        return next(t for t in TENANTS if t.name == name)

    # -------------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        view = self.scheduler.snapshot(self.now)
        assert not self.unanswered, "3: a lock call was not answered"
        assert {h.ticket: h.tenant for h in view.leases} == self.leases, "the books differ on leases"
        assert {w.ticket for w in view.waiting} == set(self.waiting), "3: a ticket was forgotten"
        self._check_card(view)
        self._check_waiting()
        if view.phase is not Phase.DRAINING:
            self.drain_since = None
        elif self.drain_since is None:
            self.drain_since = self.now
        if self.swap is None and view.phase is Phase.IDLE and not view.stuck:
            assert not self.waiting, "5: the card is empty and somebody waits for it"
        if self.waiting and self.swap is None and not self.leases:
            assert self.alarm is not None, "5: a card that is kept for somebody is kept for ever"
        timed = [w.since + w.request.wait for w in self.waiting.values() if w.request.wait]
        assert not timed or (self.alarm is not None and self.alarm <= min(timed)), "no timer for the end of a wait"

    def _check_card(self, view: Any) -> None:
        if self.rules.colocate:
            together = [self._tenant(n).footprint for n in view.residents]
            assert len(together) <= 1 or (all(together) and sum(together) <= self.rules.capacity), "1: too full"
        else:
            assert len(view.residents) + len(view.stuck) <= 1, "1: two tenants hold the card"
            if self.swap is not None:
                assert not view.residents, "1: a tenant serves during a swap"
                assert not self.leases, "1: a lease lives during a swap"

    def _check_waiting(self) -> None:
        """5: once a ticket is overdue, only older ones and what is already under way may still come first."""
        patience = self.rules.patience
        if patience is None:
            return
        if self.rules.order is Order.AMORTISED:
            patience = max(patience, self.rules.max_wait)
        for number, waiter in self.waiting.items():
            if waiter.swaps_allowed is None and self.now - waiter.since > patience:
                older = sum(1 for n in self.waiting if n < number)
                waiter.swaps_allowed = older + len(TENANTS) + self.disturbed
            assert waiter.swaps_allowed is None or waiter.swaps_allowed >= 0, f"5: {number} is overtaken for ever"

    def go_home(self) -> None:
        """Everybody leaves, the engines obey: nothing may be left over (8), and in bounded time (5)."""
        self.unlock(None)
        for _ in range(4 * len(self.waiting) + 60):
            if self.swap is not None:
                self.swap_ends(True, refill=30.0)
            elif self.leases:
                self.release(next(iter(self.leases)))
            elif self.waiting:
                self.pass_time(1000)
        assert not self.waiting, "5: somebody waits for ever"
        view = self.scheduler.snapshot(self.now)
        assert not view.leases, "8: a lease is left"
        assert not view.waiting, "8: a ticket is left"


def timeless(view: Any) -> Any:
    """A lock book's view without the seconds that run on: those are saved when they have added up."""
    if isinstance(view, dict):
        return {k: timeless(v) for k, v in view.items() if k not in ("left", "held", "waited", "ago")}
    return [timeless(item) for item in view] if isinstance(view, list) else view
