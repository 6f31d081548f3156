"""What nobody could beat: the least total wait of a short trace for somebody who knows the future.

The trace is fixed: who asked when, and what it took (arrivals that depend on earlier answers are taken as they came
in the run the trace is from). Every order is a sequence of two choices, made when something happens: serve what the
resident has waiting, or bring somebody else in once its work is done. All of them are tried, with what cannot lead to
less cut off; so it is exact, and only for small traces. Contexts that are lost are read again here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_turnstile.simulate.outcome import Outcome
from gpu_turnstile.simulate.workload import Workload
from gpu_turnstile.simulate.world import LOST

LIMIT = 14  # requests; the search is exponential


class TooLong(Exception):
    """The trace has more requests than can be tried in every order."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when, of which client, for which preset, and what it takes. `context`: if it has to be read again"""

    at: float
    client: str
    preset: str
    work: float
    context: float = 0.0


def trace(workload: Workload, outcome: Outcome) -> list[Asked]:
    """The requests of a run that were answered, as they came. Raises TooLong."""
    contexts = {client.name: client.context for client in workload.clients}
    restores = {preset.name: preset.restore for preset in workload.presets}
    found = []
    for name, at, work in outcome.asked:
        preset = outcome.clients[name].preset
        context = contexts[name] if outcome.context == LOST else min(contexts[name], restores[preset])
        found.append(Asked(at, name, preset, work, context))
    if len(found) > LIMIT:
        raise TooLong(f"{len(found)} requests; the best possible order is found for {LIMIT} at most")
    return sorted(found, key=lambda asked: (asked.at, asked.client))


def least_wait(workload: Workload, requests: Sequence[Asked]) -> float:
    """Seconds that all of them wait together, in the best order there is."""
    search = _Search(workload, requests)
    search.go(0.0, None, 0.0, (1 << len(requests)) - 1, frozenset(), 0.0)
    return search.best


class _Search:
    def __init__(self, workload: Workload, requests: Sequence[Asked]) -> None:
        self._presets = {preset.name: preset for preset in workload.presets}
        self._requests = requests
        self.best = float("inf")
        self._seen: dict[tuple[object, ...], list[tuple[float, float, float]]] = {}

    def go(self, now: float, resident: str | None, busy: float, left: int, warm: frozenset[str], wait: float) -> None:
        """`busy`: until when the resident works. `left`: who was not served, as bits. `warm`: clients whose context is
        in the engine, with an asterisk in front of those who have lost it. `wait`: what was waited so far.
        """
        if self._known(now, resident, busy, left, warm, wait):
            return
        if not left:
            self.best = min(self.best, wait)
        while left:
            waited = wait + sum(max(0.0, now - r.at) for i, r in enumerate(self._requests) if left >> i & 1)
            if waited >= self.best:
                return
            self._choose(now, resident, busy, left, warm, wait)
            moments = [r.at for i, r in enumerate(self._requests) if left >> i & 1 and r.at > now]
            moments += [busy] if busy > now else []
            if not moments:
                return
            now = min(moments)

    def _choose(
        self, now: float, resident: str | None, busy: float, left: int, warm: frozenset[str], wait: float
    ) -> None:
        came = [i for i, r in enumerate(self._requests) if left >> i & 1 and r.at <= now]
        mine = [i for i in came if self._requests[i].preset == resident]
        if mine:
            self._serve(now, resident, busy, left, warm, wait, mine)
        for preset in sorted({self._requests[i].preset for i in came} - {resident}):
            ready = max(now, busy) + self._presets[preset].swap
            lost = frozenset("*" + client.lstrip("*") for client in warm)
            self.go(ready, preset, ready, left, lost, wait)

    def _serve(
        self,
        now: float,
        resident: str | None,
        busy: float,
        left: int,
        warm: frozenset[str],
        wait: float,
        mine: list[int],
    ) -> None:
        """One that is alone runs first come, first served; others run side by side."""
        exclusive = self._presets[resident or ""].exclusive
        if exclusive and busy > now:
            return
        for i in mine[:1] if exclusive else mine:
            request = self._requests[i]
            lost = "*" + request.client in warm
            busy = max(busy, now + request.work + (request.context if lost else 0.0))
            warm = warm - {"*" + request.client} | {request.client}
            left &= ~(1 << i)
            wait += now - request.at
        self.go(now, resident, busy, left, warm, wait)

    def _known(
        self, now: float, resident: str | None, busy: float, left: int, warm: frozenset[str], wait: float
    ) -> bool:
        """Whether the same was reached before, no later and with no more waiting."""
        seen = self._seen.setdefault((resident, left, warm), [])
        if any(n <= now and b <= busy and w <= wait for n, b, w in seen):
            return True
        seen.append((now, busy, wait))
        return False
