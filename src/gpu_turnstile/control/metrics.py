"""`/metrics`: the turnstile document's names and types, and what is needed to see a problem coming.

Nothing is counted here: a collector reads what the arbiter, the gateway and the job followers count anyway, at the
moment it is scraped. The registry is the app's own, so nothing else in the process shows up in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gpu_turnstile import __version__
from gpu_turnstile.contexts.book import FAILURES
from gpu_turnstile.control import views
from gpu_turnstile.control.feed import Feed
from gpu_turnstile.control.given import TheFeed, TheHouse
from gpu_turnstile.control.house import House
from gpu_turnstile.core.model import Mode
from gpu_turnstile.engines.base import JobEnd
from gpu_turnstile.sleepers import EVENTS
from gpu_turnstile.tally import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
P = "gpu_turnstile_"

router = APIRouter(tags=["observability"])


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(house: TheHouse, feed: TheFeed) -> Response:
    """Prometheus' text format, read at the moment of the scrape."""
    registry = CollectorRegistry()
    registry.register(_Collector(house, feed))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE)


class _Collector(Collector):
    def __init__(self, house: House, feed: Feed) -> None:
        self._house = house
        self._feed = feed

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance: the registry is made for one scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._card()
        yield from self._jobs()
        yield from self._times()
        yield from self._line()
        yield from self._locks()
        yield from self._contexts()
        yield from self._sleepers()
        yield from self._traffic()
        yield InfoMetricFamily(P[:-1], "The running program", {"version": __version__})

    def _card(self) -> Iterator[Metric]:
        snapshot = self._house.arbiter.snapshot()
        current = views.state(self._house, snapshot, self._feed.leaving)
        states = GaugeMetricFamily(P + "state", "1 for what the card is used for now", labels=["state"])
        for name in ("idle", "llm", "image"):
            states.add_metric([name], float(name == current))
        yield states
        inflight = views.modes_held(self._house, snapshot).count(Mode.LLM)
        yield GaugeMetricFamily(P + "llm_inflight", "LLM requests that hold the card", inflight)

    def _jobs(self) -> Iterator[Metric]:
        ended = self._house.image_jobs
        yield CounterMetricFamily(P + "image_jobs", "Image jobs that ended, however they did", sum(ended.values()))
        ends = CounterMetricFamily(P + "image_job_ends", "Image jobs by how they ended", labels=["end"])
        for end in dict.fromkeys((*map(str, JobEnd), *map(str, ended))):
            ends.add_metric([end], ended.get(end, 0))
        yield ends

    def _times(self) -> Iterator[Metric]:
        arbiter = self._house.arbiter
        wait = HistogramMetricFamily(
            P + "lock_wait_seconds", "How long granted requests had waited for the card", labels=["kind"]
        )
        _add(wait, ["llm"], arbiter.waits.llm)
        _add(wait, ["image"], arbiter.waits.image)
        yield wait
        unload = HistogramMetricFamily(P + "unload_seconds", "From the order to leave until the memory was free")
        _add(unload, [], arbiter.swaps.unload_seconds)
        yield unload
        swap = HistogramMetricFamily(P + "swap_seconds", "From the start of a swap until the newcomer answered")
        _add(swap, [], arbiter.swaps.swap_seconds)
        yield swap
        yield CounterMetricFamily(
            P + "unload_failures",
            "Times a tenant that was told to leave had not given its memory back in time",
            arbiter.swaps.unload_failures,
        )
        failed = self._feed.swaps.failed
        yield CounterMetricFamily(P + "swap_failures", "Swaps and unloads that failed", failed)

    def _line(self) -> Iterator[Metric]:
        waiting, now = self._house.arbiter.snapshot().waiting, self._house.arbiter.now
        yield GaugeMetricFamily(P + "queue_length", "Requests that wait for the card", len(waiting))
        oldest = max((now - ticket.since for ticket in waiting), default=0.0)
        yield GaugeMetricFamily(P + "queue_oldest_seconds", "How long the oldest of them has waited", oldest)

    def _locks(self) -> Iterator[Metric]:
        """One series for each owner of the moment, 256 at most: for an alarm before somebody's lock lapses."""
        locks = self._house.arbiter.snapshot().locks
        locked = GaugeMetricFamily(P + "locked", "1 for the preset that is pinned", labels=["preset"])
        if locks.preset is not None:
            locked.add_metric([locks.preset], 1.0)
        yield locked
        yield GaugeMetricFamily(P + "lock_owners", "Owners of the lock", len(locks.owners))
        left = GaugeMetricFamily(
            P + "lock_expires_seconds",
            "Silence that an owner's lock survives; not counted while it works",
            labels=["owner"],
        )
        for owner in locks.owners:
            left.add_metric([owner.owner], owner.expires_in)
        yield left
        yield GaugeMetricFamily(P + "lock_queue_length", "Owners that wait for the lock", len(locks.queue))
        oldest = max((waiter.waited for waiter in locks.queue), default=0.0)
        yield GaugeMetricFamily(P + "lock_queue_oldest_seconds", "How long the oldest of them has waited", oldest)

    def _contexts(self) -> Iterator[Metric]:
        """Absent where no conversations are saved."""
        book = self._house.contexts
        if book is None:
            return
        counts = book.counts
        yield GaugeMetricFamily(P + "context_bytes", "What saved conversations take on disk", book.store.size)
        yield CounterMetricFamily(P + "context_slots_saved", "Slots saved before an eviction", counts.saved)
        yield CounterMetricFamily(P + "context_slots_restored", "Slots given back after a start", counts.restored)
        yield CounterMetricFamily(P + "context_tokens_saved", "Tokens in saved slots", counts.tokens_saved)
        reused = "Tokens that answers after a restore took from the engine's cache, by its own word"
        yield CounterMetricFamily(P + "context_tokens_reused", reused, counts.tokens_reused)
        spared = "Seconds of reading prompts that restores spared, less what they and the saves took; may fall"
        yield GaugeMetricFamily(P + "context_seconds_saved", spared, counts.seconds_saved)
        failures = CounterMetricFamily(P + "context_failures", "What went wrong, by kind", labels=["kind"])
        for kind in FAILURES:
            failures.add_metric([kind], counts.failures[kind])
        yield failures

    def _sleepers(self) -> Iterator[Metric]:
        dorm = self._house.dorm
        if dorm is None:
            return
        yield GaugeMetricFamily(P + "asleep", "Engines that sleep", dorm.sleeping)
        yield GaugeMetricFamily(P + "asleep_ram_bytes", "Main memory that they hold", dorm.ram)
        events = CounterMetricFamily(P + "sleep_events", "What became of engines that can sleep", labels=["event"])
        for event in EVENTS:
            events.add_metric([event], dorm.counts[event])
        yield events

    def _traffic(self) -> Iterator[Metric]:
        gateway = self._house.gateway
        counts = gateway.counts
        yield CounterMetricFamily(P + "requests", "Requests of all kinds", counts.requests)
        yield CounterMetricFamily(P + "upstream_died_midstream", "Answers an engine broke off", counts.died_midstream)
        yield CounterMetricFamily(
            P + "upstream_unreachable", "Failed attempts to connect to an engine", counts.unreachable
        )
        yield CounterMetricFamily(
            P + "engine_restarts", "Engines that were alive, got nowhere and were ended", self._house.restarts()
        )
        yield GaugeMetricFamily(P + "connections", "Open client connections", len(gateway.connections))


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, list(histogram.cumulative()), histogram.total)
