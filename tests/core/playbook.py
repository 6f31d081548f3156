"""A test of the scheduler reads like a script: an event, the effects it must have, the next event.

    p = Playbook(A, B)
    p.do(req(1, "a")).see(StartSwap(1, "a"))
    p.at(5).do(SwapSucceeded(1)).see(Grant(1, "a"))
    p.end()

`see` must name every effect that does something, in order. Notes, timers and persisted state are asked for by name,
with `note`, `timer` and `persisted`.
"""

from __future__ import annotations

from typing import Any

from gpu_turnstile.core.model import (
    Answer,
    Effect,
    Event,
    Mode,
    Note,
    Persist,
    Refuse,
    Request,
    SetTimer,
    Tenant,
    Tick,
)
from gpu_turnstile.core.policy import Rules
from gpu_turnstile.core.scheduler import Scheduler

A = Tenant("a", Mode.LLM)
B = Tenant("b", Mode.LLM)
C = Tenant("c", Mode.LLM)
OLLAMA = Tenant("ollama", Mode.LLM, drain_grace=None)
COMFY = Tenant("comfyui", Mode.COMFYUI, exclusive=True, rank=1, drain_grace=None, linger=0.0)


def req(ticket: int, *wants: str, **more: Any) -> Request:
    return Request(ticket, wants, **more)


class Playbook:
    def __init__(self, *tenants: Tenant, rules: Rules | None = None, **found: Any) -> None:
        self.scheduler = Scheduler(tenants, rules, **found)
        self.now = 0.0
        self._pending: list[Effect] = []
        self.notes: list[Note] = []
        self.alarm: float | None = None
        self.state: dict[str, Any] = {}

    def at(self, now: float) -> Playbook:
        """Move the clock; a timer that was asked for runs out on the way."""
        assert now >= self.now
        while self.alarm is not None and self.alarm <= now:
            self.now, self.alarm = max(self.now, self.alarm), None
            self._take(Tick())
        self.now = now
        return self

    def do(self, event: Event) -> Playbook:
        assert not self._pending, f"nobody looked at {self._pending}"
        self._take(event)
        return self

    def _take(self, event: Event) -> None:
        for effect in self.scheduler.handle(event, self.now):
            match effect:
                case Note():
                    self.notes.append(effect)
                case SetTimer(at):
                    self.alarm = at
                case Persist(state):
                    self.state = state
                case _:
                    self._pending.append(effect)

    def see(self, *effects: Effect) -> Playbook:
        assert self._pending == list(effects)
        self._pending = []
        return self

    def take(self) -> list[Effect]:
        """What is there to see, for a test that looks at it itself."""
        pending, self._pending = self._pending, []
        return pending

    def see_refusal(self, ticket: int, code: Any) -> Playbook:
        """The next effect refuses that ticket, in whatever words."""
        effect = self._pending.pop(0)
        assert isinstance(effect, Refuse), effect
        assert (effect.ticket, effect.code) == (ticket, code)
        return self

    def answered(self, kind: type, **fields: Any) -> Any:
        """The next effect is the lock book's answer, of that kind and with these fields."""
        effect = self._pending.pop(0)
        assert isinstance(effect, Answer), effect
        assert isinstance(effect.answer, kind), effect.answer
        assert {name: getattr(effect.answer, name) for name in fields} == fields
        return effect.answer

    def note(self, kind: str, **fields: Any) -> Playbook:
        found = [n.fields for n in self.notes if n.kind == kind]
        assert any(fields.items() <= f.items() for f in found), f"no note {kind} {fields} in {self.notes}"
        return self

    def end(self) -> None:
        assert not self._pending, f"nobody looked at {self._pending}"

    @property
    def view(self) -> Any:
        return self.scheduler.snapshot(self.now)
