"""The feed and its stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from gpu_turnstile.control.events import text
from gpu_turnstile.control.feed import QUEUE, RING, Event, Feed, Lost
from tests.control.fakes import run


class Source:
    """An arbiter, as far as a feed is concerned."""

    def __init__(self) -> None:
        self.watchers: list[Callable[[str, dict[str, Any]], None]] = []

    def watch(self, watcher: Callable[[str, dict[str, Any]], None]) -> Callable[[], None]:
        self.watchers.append(watcher)
        return lambda: self.watchers.remove(watcher)

    def tell(self, kind: str, **fields: Any) -> None:
        for watcher in self.watchers:
            watcher(kind, fields)


def feed() -> tuple[Source, Feed]:
    source = Source()
    return source, Feed(source)  # type: ignore[arg-type]


async def taken(items: Any, count: int) -> list[Any]:
    return [await anext(items) for _ in range(count)]


def ids(items: list[Any]) -> list[Any]:
    return [item.id if isinstance(item, Event) else item for item in items]


def test_a_subscriber_gets_what_comes_after_it_came() -> None:
    async def scenario() -> None:
        source, made = feed()
        source.tell("before")
        with made.subscribe() as items:
            source.tell("drain", target="two")
            (event,) = await taken(items, 1)
            assert (event.id, event.kind, event.fields) == (2, "drain", {"target": "two"})
            assert event.time.endswith("Z")
        assert made.subscribers == 0

    run(scenario())


def test_a_replay_and_what_follows_leave_no_gap_and_no_double() -> None:
    async def scenario() -> None:
        source, made = feed()
        for _ in range(5):
            source.tell("note")
        with made.subscribe(since=2) as items:
            source.tell("note")
            assert ids(await taken(items, 4)) == [3, 4, 5, 6]

    run(scenario())


def test_a_replay_reaches_back_as_far_as_the_ring_and_says_what_is_missing() -> None:
    source, made = feed()
    for _ in range(RING + 10):
        source.tell("note")
    found = made.since(5)
    assert found[0] == Lost(5)
    assert ids(found[1:]) == list(range(11, RING + 11))


def test_an_id_from_before_a_restart_means_everything() -> None:
    source, made = feed()
    source.tell("note")
    assert ids(made.since(900)) == [1]


def test_a_slow_subscriber_loses_the_oldest_and_is_told() -> None:
    async def scenario() -> None:
        source, made = feed()
        with made.subscribe() as slow, made.subscribe() as other:
            for _ in range(QUEUE + 3):
                source.tell("note")
            assert ids(await taken(slow, 3)) == [Lost(3), 4, 5]
            source.tell("note")
            assert ids(await taken(slow, QUEUE - 1))[-1] == QUEUE + 4
            assert await anext(other) == Lost(4)

    run(scenario())


def test_silence_is_told_and_closing_ends_every_stream_after_what_was_said() -> None:
    async def scenario() -> None:
        source, made = feed()
        with made.subscribe(pause=0.01) as items:
            assert await anext(items) is None
            source.tell("last")
            made.close()
            made.close()
            assert ids([item async for item in items]) == [1]
        assert source.watchers == []

    run(scenario())


def test_closing_wakes_who_waits() -> None:
    async def scenario() -> None:
        _, made = feed()
        with made.subscribe() as items:
            waiting = asyncio.create_task(anext(items, "ended"))
            await asyncio.sleep(0)
            made.close()
            assert await waiting == "ended"

    run(scenario())


def test_who_is_leaving_and_how_the_last_swap_went_is_remembered() -> None:
    source, made = feed()
    source.tell("evicting", tenant="one")
    assert made.leaving == {"one"}
    source.tell("evicted", tenant="one")
    assert made.leaving == set()
    source.tell("swapped", target="two", evicted=["one"], seconds=1.5)
    assert made.swaps.last is not None
    assert (made.swaps.done, made.swaps.last["ok"], made.swaps.last["target"]) == (1, True, "two")
    source.tell("swap_failed", target="one", reason="no file")
    assert (made.swaps.failed, made.swaps.last["reason"]) == (1, "no file")


def test_an_event_on_the_wire_has_id_kind_and_one_line_of_json() -> None:
    event = Event(7, "2026-01-02T03:04:05.678Z", "evicted", {"detail": "a\nb", "seconds": 1.5})
    lines = text(event).split("\n")
    assert lines[:2] == ["id: 7", "event: evicted"]
    assert json.loads(lines[2].removeprefix("data: ")) == {
        "id": 7,
        "time": "2026-01-02T03:04:05.678Z",
        "kind": "evicted",
        "fields": {"detail": "a\nb", "seconds": 1.5},
    }
    assert lines[3:] == ["", ""]
    assert text(None).startswith(": ")
    assert 'data: {"lost": 3}' in text(Lost(3))
