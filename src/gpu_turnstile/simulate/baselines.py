"""What others would have done: orders that the core does not have, behind the same door as the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gpu_turnstile.core.model import Effect, Event, Grant, Release, Request, StartSwap, SwapSucceeded, Tenant


class LlamaSwap:
    """The order of llama-swap's scheduler `fifo` (internal/router/scheduler/fifo.go), for one model at a time.

    What is ready is used at once, whoever waits for something else; a request for what is being loaded joins; anything
    else queues while the one that is there is busy or something is being loaded; else its load begins. After every
    load, and whenever the one that is there has nothing left to do, the queue is walked from its front. A running
    request is never cut. It has no bound on anybody's wait.
    """

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._exclusive = {tenant.name for tenant in tenants if tenant.exclusive}
        self._ready: str | None = None
        self._loading: tuple[int, str, list[int]] | None = None
        self._busy: Counter[str] = Counter()
        self._of: dict[int, str] = {}
        self._queue: list[tuple[int, str]] = []
        self._line: list[tuple[int, str]] = []  # inside an engine that does one job at a time
        self._swaps = 0

    def handle(self, event: Event, now: float) -> list[Effect]:
        out: list[Effect] = []
        match event:
            case Request(ticket, wants):
                if not self._place(ticket, wants[0], out):
                    self._queue.append((ticket, wants[0]))
            case Release(ticket):
                self._done(ticket, out)
            case SwapSucceeded():
                self._loaded(out)
            case _:
                pass
        return out

    def _place(self, ticket: int, model: str, out: list[Effect]) -> bool:
        if self._loading is not None:
            _, target, waiters = self._loading
            if target == model:
                waiters.append(ticket)
            return target == model
        if self._ready == model:
            self._grant(ticket, model, out)
            return True
        if self._ready is not None and self._busy[self._ready]:
            return False
        self._swaps += 1
        evict = () if self._ready is None else (self._ready,)
        self._ready, self._loading = None, (self._swaps, model, [ticket])
        out.append(StartSwap(self._swaps, model, evict))
        return True

    def _grant(self, ticket: int, model: str, out: list[Effect]) -> None:
        """The engine has it; one that does a job at a time keeps its own line."""
        self._busy[model] += 1
        self._of[ticket] = model
        if model in self._exclusive and self._busy[model] > 1:
            self._line.append((ticket, model))
        else:
            out.append(Grant(ticket, model))

    def _done(self, ticket: int, out: list[Effect]) -> None:
        model = self._of.pop(ticket)
        self._busy[model] -= 1
        if self._line:
            out.append(Grant(*self._line.pop(0)))
        elif not self._busy[model]:
            self._walk(out)

    def _loaded(self, out: list[Effect]) -> None:
        assert self._loading is not None
        _, self._ready, waiters = self._loading
        self._loading = None
        for ticket in waiters:
            self._grant(ticket, self._ready, out)
        self._walk(out)

    def _walk(self, out: list[Effect]) -> None:
        pending, self._queue = self._queue, []
        self._queue = [(ticket, model) for ticket, model in pending if not self._place(ticket, model, out)]
