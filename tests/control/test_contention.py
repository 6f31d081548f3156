"""`GET /contention` on a real arbiter and a real history."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_turnstile.control import contention
from gpu_turnstile.control.contention import moment, window_of
from gpu_turnstile.control.problems import Refusal
from gpu_turnstile.gpu.base import Holder, Reading
from gpu_turnstile.journal.history import History
from gpu_turnstile.journal.lookout import Lookout
from tests.control.fakes import Stage, run, stage

NOW = 1_790_000_000.0


async def no_pids() -> tuple[int, ...]:
    return ()


@asynccontextmanager
async def watched(tmp: Path, holders: tuple[Holder, ...] | None = ()) -> AsyncIterator[Stage]:
    async def read() -> Reading:
        return Reading(32 << 30, 0, holders)

    history = History(tmp / "state")
    history.start()
    async with stage(tmp) as s:
        s.house.arbiter.watch(history.take)
        s.house.history = history
        s.house.lookout = Lookout(history, read=read, ours=no_pids, leases=tuple)
        if not any(getattr(route, "path", "") == "/contention" for route in s.app.routes):
            s.app.include_router(contention.router)
        await s.house.lookout.look()
        try:
            yield s
        finally:
            history.close()


async def ask(s: Stage, **query: Any) -> Any:
    reply = await s.http.get("/contention", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def used(s: Stage, owner: str, seconds: float) -> None:
    now = time.monotonic()
    s.house.history.lease((1, "one", "curl", owner, now - seconds, now, "released"))


def test_a_window_in_which_only_the_owner_worked_is_clean(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with watched(tmp_path) as s:
            began = time.time()
            used(s, "bench", 0.01)
            found = await ask(s, since=repr(began), owner="bench")
            assert found["clean"], found
            assert found["findings"] == found["notes"] == []
            assert found["since"].endswith("Z")

    run(scenario())


def test_the_lease_of_somebody_else_is_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with watched(tmp_path) as s:
            began = time.time()
            used(s, "loop", 0.01)
            (finding,) = (await ask(s, since=repr(began - 0.005), owner="bench"))["findings"]
            assert (finding["kind"], finding["who"]) == ("lease", "loop")
            assert (await ask(s, since=repr(began - 0.005), owner=["bench", "loop"]))["clean"]

    run(scenario())


def test_a_real_swap_in_the_window_is_found_and_one_before_it_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with watched(tmp_path) as s:
            began = time.time()
            lease = s.take("one")
            await s.settled()
            s.house.arbiter.release(lease)
            s.take("two")
            await s.settled()
            found = await ask(s, since=repr(began), owner="bench")
            assert [f["kind"] for f in found["findings"]] == ["swap", "drain", "swap"]
            assert (await ask(s, since=repr(time.time()), owner="bench"))["clean"]

    run(scenario())


def test_a_process_on_the_card_is_found_unless_it_is_allowed(tmp_path: Path) -> None:
    async def scenario() -> None:
        whisper = Holder(999_999_901, "whisper", 5 << 30)
        async with watched(tmp_path, (whisper,)) as s:
            began = repr(time.time())
            (finding,) = (await ask(s, since=began))["findings"]
            assert finding["text"].startswith("the process whisper (999999901) held 5.0 GB")
            assert (await ask(s, since=began, allow="whisper"))["clean"]
            assert (await ask(s, since=began, pid=999_999_901))["clean"]

    run(scenario())


def test_time_before_the_gate_watched_is_not_certified(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with watched(tmp_path) as s:
            found = await ask(s, since="-15m")
            assert [f["kind"] for f in found["findings"]] == ["unwatched"]

    run(scenario())


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({}, "since is missing"),
        ({"since": " "}, "since is missing"),
        ({"since": "yesterday"}, "'yesterday' is no time; give an ISO time"),
        ({"since": "-15"}, "no seconds since the epoch"),
        ({"since": "-15 m"}, "is no time"),
        ({"since": "nan"}, "no seconds since the epoch"),
        ({"since": "1789000000000"}, "look like milliseconds"),
        ({"since": "2026-13-01"}, "is no time"),
        ({"since": "now"}, "the window is empty"),
        ({"since": "-1m", "until": "-2m"}, "the window is empty"),
        ({"since": "-1m", "until": "2999-01-01"}, "in the future"),
        ({"since": "-1m", "pid": "x"}, "pid.0"),
        ({"since": "-1m", "owner": ["a"] * 40}, "owner is given 40 times"),
    ],
)
def test_what_cannot_be_understood_is_said(tmp_path: Path, query: dict[str, Any], says: str) -> None:
    async def scenario() -> None:
        async with watched(tmp_path) as s:
            reply = await s.http.get("/contention", params=query)
            assert (reply.status_code, reply.headers["X-Turnstile-Error"]) == (400, "bad_request")
            assert says in reply.json()["message"]

    run(scenario())


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("now", NOW),
        ("-90s", NOW - 90),
        ("-1.5m", NOW - 90),
        ("-2h", NOW - 7200),
        ("-1d", NOW - 86400),
        ("1789999000.5", NOW - 999.5),
        (datetime.fromtimestamp(NOW, UTC).isoformat(), NOW),
        (datetime.fromtimestamp(NOW, UTC).isoformat().replace("+00:00", "Z"), NOW),
        (datetime.fromtimestamp(NOW, UTC).isoformat().replace("+00:00", ""), NOW),
        ((datetime.fromtimestamp(NOW, UTC) + timedelta(hours=2)).isoformat().replace("+00:00", " 02:00"), NOW),
    ],
)
def test_times_have_many_forms(text: str, at: float) -> None:
    assert moment("since", text, NOW) == at


def test_an_end_a_little_ahead_of_our_clock_is_now() -> None:
    assert window_of("-1m", repr(NOW + 2), NOW).until == NOW
    with pytest.raises(Refusal):
        window_of("-1m", repr(NOW + 60), NOW)


def test_a_history_that_cannot_be_read_is_503(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with watched(tmp_path) as s:
            s.house.history.close()
            for part in (tmp_path / "state").glob("history.sqlite*"):
                part.unlink()
            reply = await s.http.get("/contention?since=-1m")
            assert (reply.status_code, reply.headers["X-Turnstile-Error"]) == (503, "history_unavailable")
            s.house.lookout = None
            assert (await s.http.get("/contention?since=-1m")).status_code == 503

    run(scenario())
