"""The feed: what the arbiter tells, kept for a while and handed to everybody who listens.

It is one watcher of the arbiter. Memory is bounded on every side: a ring of the last events for replays, and a queue
per subscriber that loses its oldest events, and says so, when its reader is slower than the world.

It also remembers the two things a snapshot cannot know because they are over or on their way out: how the last swap
went, and who is leaving the card right now.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpu_turnstile.arbiter import Arbiter

RING = 1000  # events that a replay can reach back
QUEUE = 256  # events a subscriber may be behind


@dataclass(frozen=True, slots=True)
class Event:
    """`id` grows by one, from 1, for as long as the gate runs; `time` is wall time, ISO 8601 in UTC."""

    id: int
    time: str
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Lost:
    """A subscriber missed so many events here."""

    count: int


@dataclass(slots=True)
class SwapRecord:
    """How swaps went. `last`: the fields of the last one's note, with `time`, and `ok`."""

    done: int = 0
    failed: int = 0
    last: dict[str, Any] | None = None


class Subscription:
    """Events as they come: `with feed.subscribe() as items: async for item in items`.

    An item is an event, the number of events that were lost here, or None after `pause` seconds of silence.
    """

    def __init__(self, feed: Feed, replay: list[Event | Lost], pause: float) -> None:
        self._feed = feed
        self._replay = deque(replay)
        self._pause = pause
        self._queue: deque[Event] = deque(maxlen=QUEUE)
        self._lost = 0
        self._wake = asyncio.Event()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *error: object) -> None:
        self._feed.leave(self)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event | Lost | None:
        if self._replay:
            return self._replay.popleft()
        if not (self._queue or self._feed.closed):
            self._wake.clear()
            try:
                async with asyncio.timeout(self._pause):
                    await self._wake.wait()
            except TimeoutError:
                return None
        if self._lost:
            lost, self._lost = self._lost, 0
            return Lost(lost)
        if self._queue:
            return self._queue.popleft()
        raise StopAsyncIteration

    def put(self, event: Event) -> None:
        self._lost += len(self._queue) == QUEUE
        self._queue.append(event)
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()


class Feed:
    def __init__(self, arbiter: Arbiter, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.ring: deque[Event] = deque(maxlen=RING)
        self.swaps = SwapRecord()
        self.leaving: set[str] = set()  # tenants that are being taken off the card
        self._clock = clock
        self._last = 0
        self._subscribers: list[Subscription] = []
        self.closed = False
        self._unwatch = arbiter.watch(self.take)

    @property
    def subscribers(self) -> int:
        return len(self._subscribers)

    def take(self, kind: str, fields: dict[str, Any]) -> None:
        """One note of the arbiter."""
        self._last += 1
        time = self._clock().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event = Event(self._last, time, kind, fields)
        self.ring.append(event)
        self._remember(event)
        for subscriber in self._subscribers:
            subscriber.put(event)

    def _remember(self, event: Event) -> None:
        match event.kind:
            case "evicting":
                self.leaving.add(event.fields["tenant"])
            case "evicted" | "evict_failed":
                self.leaving.discard(event.fields["tenant"])
            case "swapped" | "swap_failed":
                self.leaving.clear()
                ok = event.kind == "swapped"
                self.swaps.done += ok
                self.swaps.failed += not ok
                self.swaps.last = {"time": event.time, "ok": ok, **event.fields}

    def since(self, last_seen: int) -> list[Event | Lost]:
        """What came after `last_seen`. An id from before a restart of the gate means everything that is there."""
        if last_seen > self._last:
            last_seen = 0
        found: list[Event | Lost] = [event for event in self.ring if event.id > last_seen]
        missing = self._last - last_seen - len(found)
        return [Lost(missing), *found] if missing > 0 else found

    def subscribe(self, since: int | None = None, pause: float = 15.0) -> Subscription:
        """Listen from now on, after a replay from `since`. Nothing is lost or told twice in between."""
        subscription = Subscription(self, [] if since is None else self.since(since), pause)
        self._subscribers.append(subscription)
        return subscription

    def leave(self, subscription: Subscription) -> None:
        if subscription in self._subscribers:
            self._subscribers.remove(subscription)

    def close(self) -> None:
        """End every stream; the gate is shutting down."""
        if self.closed:
            return
        self.closed = True
        self._unwatch()
        for subscriber in self._subscribers:
            subscriber.wake()
