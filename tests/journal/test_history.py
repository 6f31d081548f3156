"""The history: what was taken is there afterwards, whatever the disk does; and whatever it does, the gate goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from structlog.testing import capture_logs

from gpu_turnstile.gpu.base import Holder, Reading
from gpu_turnstile.journal import history as module
from gpu_turnstile.journal import schema
from gpu_turnstile.journal.history import History, HistoryError, LeaseRow, bundled
from gpu_turnstile.journal.lookout import Lookout, lineage, strangers
from gpu_turnstile.journal.schema import FILE_NAME, Event, Lease

T = TypeVar("T")
ALL = (0.0, 1e11)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 15))


def row(ticket: int, client: str = "somebody", owner: str | None = None, end: str = "released") -> LeaseRow:
    now = time.monotonic()
    return (ticket, "coder", client, owner, now - 1.0, now, end)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path / "state")
    history.start()
    yield history
    history.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.01)
    monkeypatch.setattr(module, "AGAIN", 0.03)


# ------------------------------------------------------------------------------------------------- keeping


def test_what_was_taken_is_read_in_its_order_with_wall_times(kept: History) -> None:
    before = time.time()
    kept.take("evicting", {"tenant": "one"})
    kept.take("locked", {"owner": "me", "preset": "one", "token": 7})
    kept.lease(row(1, owner="me"))
    events, leases = run(kept.events(*ALL)), run(kept.leases(*ALL))
    assert [(e.kind, e.tenant, e.client) for e in events] == [("evicting", "one", None), ("locked", "one", "me")]
    assert events[0].id < events[1].id
    assert events[1].fields == {"owner": "me", "preset": "one", "token": 7}
    assert before - 0.1 <= events[0].at <= time.time() + 0.1
    (lease,) = leases
    assert (lease.ticket, lease.tenant, lease.client, lease.owner, lease.end) == (
        1,
        "coder",
        "somebody",
        "me",
        "released",
    )
    assert lease.until - lease.since == pytest.approx(1.0, abs=0.01)


def test_questions_are_answered_for_their_window_and_kinds(kept: History) -> None:
    for kind in ("locked", "renewed", "locked"):
        kept.take(kind, {})
    kept.lease(row(1))
    now = time.time()
    assert [e.kind for e in run(kept.events(*ALL, kinds=["renewed"]))] == ["renewed"]
    assert run(kept.events(now + 5, now + 9)) == ()
    assert run(kept.leases(now - 100, now - 50)) == ()
    assert len(run(kept.leases(now - 0.5, now - 0.4))) == 1


def test_the_files_are_private(kept: History) -> None:
    kept.take("locked", {})
    run(kept.events(*ALL))
    names = sorted(os.listdir(kept.file.parent))
    assert names == [FILE_NAME, FILE_NAME + "-shm", FILE_NAME + "-wal"]
    assert {stat.S_IMODE((kept.file.parent / name).stat().st_mode) for name in names} == {0o600}
    assert stat.S_IMODE(kept.file.parent.stat().st_mode) == 0o700


def test_an_open_lease_is_there_as_far_as_it_was_seen_and_its_end_replaces_it(kept: History) -> None:
    kept.beat([row(5, end=schema.OPEN)])
    (seen,) = run(kept.leases(*ALL))
    assert seen.end == schema.OPEN
    kept.lease(row(5))
    (ended,) = run(kept.leases(*ALL))
    assert ended.end == "released"
    assert ended.until > seen.until


def test_ticket_numbers_of_another_run_are_other_leases(tmp_path: Path) -> None:
    for _ in range(2):
        history = History(tmp_path)
        history.start()
        history.lease(row(1))
        history.close()
    assert len(run(History(tmp_path).leases(*ALL))) == 2


def test_spans_say_when_the_gate_watched(tmp_path: Path) -> None:
    for _ in range(2):
        history = History(tmp_path)
        history.start()
        run(history.events(*ALL))
        history.beat(())
        history.close()
    spans = run(History(tmp_path).record(*ALL)).spans
    assert len(spans) == 2
    assert spans[0].began < spans[0].seen < spans[1].began < spans[1].seen


def test_a_silence_or_a_clock_that_was_set_begins_another_span(tmp_path: Path) -> None:
    history = History(tmp_path)
    connection = schema.open_file(history.file)
    spans = history._extend(connection, [(10.0, 1000.0, []), (20.0, 1010.0, [])], 0.0, 0.0)
    history._span, history._run = spans
    history._extend(connection, [(100.0, 1090.0, []), (101.0, 1091.0, []), (102.0, 5000.0, [])], 0.0, 0.0)
    found = connection.execute("SELECT began, seen FROM spans ORDER BY id").fetchall()
    assert found == [(1000.0, 1010.0), (1090.0, 1091.0), (5000.0, 5000.0)]
    connection.close()


@pytest.mark.parametrize("name", ["\ud800 half", "nul \0", "x" * 5000, "ünï"])
def test_every_name_a_client_can_have_is_stored(kept: History, name: str) -> None:
    kept.lease(row(1, client=name, owner=name))
    kept.take("lock_refused", {"owner": name, "odd": {1, 2}})
    assert len(run(kept.leases(*ALL))) == len(run(kept.events(*ALL))) == 1


def test_a_query_that_takes_too_long_is_ended(kept: History) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
    run(kept.events(*ALL))
    with pytest.raises(HistoryError, match=r"longer than 0\.05 s"):
        run(kept._read(lambda file: file.execute(endless).fetchall(), timeout=0.05))


def test_the_leases_of_the_measurement_come_as_one_for_each_tenant(kept: History) -> None:
    for ticket in range(50):
        kept.lease(row(ticket, owner="me"))
    kept.lease(row(50, client="me"))
    kept.lease(row(51, client="me", owner="you"))
    found = run(kept.record(*ALL, ["me"])).leases
    assert sorted(lease.owner or lease.client for lease in found) == ["me", "you"]


def test_more_events_than_one_reading_gives_leave_the_rest_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = filled(tmp_path, 100, float)
    monkeypatch.setattr(schema, "ROWS", 10)
    record = schema.select_record(connection, 0.0, 100.0, ())
    assert record.spans == (schema.Span(90.0, 100.0),)
    connection.close()


# ------------------------------------------------------------------------------------------------- pruning


def filled(tmp_path: Path, count: int, at: Callable[[int], float]) -> sqlite3.Connection:
    connection = schema.open_file(tmp_path / FILE_NAME)
    connection.execute("BEGIN")
    schema.add_events(connection, [Event(at(n), "note", {"text": "x" * 200}) for n in range(count)])
    schema.add_leases(connection, 1, [Lease(n, "t", "c" * 50, None, at(n) - 1, at(n)) for n in range(count)])
    schema.begin_span(connection, 0.0, at(count))
    connection.execute("COMMIT")
    return connection


def test_what_is_too_old_is_forgotten_and_no_longer_certified(tmp_path: Path) -> None:
    connection = filled(tmp_path, 100, float)
    schema.prune(connection, 100.0, max_age=10.0, max_bytes=10**9)
    assert [e.at for e in schema.select_events(connection, *ALL)] == [91.0 + n for n in range(9)]
    assert [x.until for x in schema.select_leases(connection, *ALL)] == [91.0 + n for n in range(9)]
    assert connection.execute("SELECT began, seen FROM spans").fetchall() == [(90.0, 100.0)]
    connection.close()


def test_a_file_that_is_too_large_loses_its_oldest_rows_and_its_bytes(tmp_path: Path) -> None:
    connection = filled(tmp_path, 5000, float)
    before = (tmp_path / FILE_NAME).stat().st_size + schema.size(connection)
    schema.prune(connection, 5000.0, max_age=1e9, max_bytes=300_000)
    events, leases = schema.select_events(connection, *ALL), schema.select_leases(connection, *ALL)
    assert schema.size(connection) <= 300_000
    assert (tmp_path / FILE_NAME).stat().st_size < min(before, 400_000)
    assert events[-1].at == leases[-1].until == 4999.0
    assert events[0].at == leases[0].until > 1000
    (began,) = connection.execute("SELECT began FROM spans").fetchone()
    assert began == events[0].at - 1
    connection.close()


def test_rows_of_one_moment_are_forgotten_too(tmp_path: Path) -> None:
    connection = filled(tmp_path, 3000, lambda n: 7.0)
    schema.prune(connection, 10.0, max_age=1e9, max_bytes=100_000)
    assert schema.size(connection) <= 100_000
    connection.close()


def test_the_thread_prunes_by_itself(tmp_path: Path) -> None:
    filled(tmp_path, 10, float).close()
    history = History(tmp_path)
    history.start()
    history.close()
    assert run(history.events(*ALL)) == ()


# ----------------------------------------------------------------------------------------------- bad disks


class Full:
    """A disk that is full until somebody makes room."""

    def __init__(self) -> None:
        self.full = True
        self.tries = 0

    def open(self, file: Path) -> sqlite3.Connection:
        self.tries += 1
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        return schema.open_file(file)


def test_a_full_disk_is_said_once_and_nothing_that_fits_the_queue_is_lost(tmp_path: Path) -> None:
    disk = Full()
    history = History(tmp_path, open_file=disk.open)
    with capture_logs() as lines:
        history.start()
        history.lease(row(1))
        until(lambda: disk.tries > 3)
        with pytest.raises(HistoryError):
            run(history.leases(*ALL))
        history.take("locked", {})
        disk.full = False
        until(lambda: not history._failing)
        assert len(run(history.leases(*ALL))) == len(run(history.events(*ALL))) == 1
        history.close()
    assert [line["event"] for line in lines] == ["history_not_written", "history_written_again"]
    assert history.lost == 0


def test_a_disk_that_fills_up_while_writing_keeps_what_was_committed(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.start()
    history.lease(row(1))
    run(history.leases(*ALL))
    pages = history._connection
    assert pages is not None

    class Filling:
        """Every writing fails; the connection itself is there."""

        def execute(self, query: str, *rest: Any) -> Any:
            if query.startswith("COMMIT"):
                raise sqlite3.OperationalError("database or disk is full")
            return pages.execute(query, *rest)

        def executemany(self, *rest: Any) -> Any:
            return pages.executemany(*rest)

        def close(self) -> None:
            pages.close()

    with capture_logs() as lines:
        history._connection = Filling()  # type: ignore[assignment]
        history.lease(row(2))
        until(lambda: [line["event"] for line in lines][-1:] == ["history_written_again"])
    assert sorted(lease.ticket for lease in run(history.leases(*ALL))) == [1, 2]
    history.close()


def test_the_oldest_are_dropped_and_counted_and_the_hole_is_written_down(tmp_path: Path) -> None:
    disk = Full()
    history = History(tmp_path, queue=10, open_file=disk.open)
    history.start()
    until(lambda: history._failing)
    for ticket in range(100):
        history.lease(row(ticket))
    disk.full = False
    until(lambda: not history._failing)
    kept = [lease.ticket for lease in run(history.leases(*ALL))]
    assert kept == list(range(90, 100))
    (hole,) = run(history.events(*ALL, kinds=["history_lost"]))
    assert history.lost >= 90
    assert hole.fields["count"] == history.lost
    assert hole.fields["since"] < hole.fields["until"]
    history.close()
    spans = run(history.record(*ALL)).spans
    assert all(not span.began < lease.until < span.seen for span in spans[:-1] for lease in run(history.leases(*ALL)))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_span_reaches_across_a_hole(tmp_path: Path, at: int) -> None:
    history = History(tmp_path)
    connection = schema.open_file(history.file)
    for batch in range(3):
        beats: list[Any] = [(20.0 * batch + n, 1000.0 + 20.0 * batch + n, []) for n in (0, 10)]
        history._span, history._run = history._extend(connection, beats, 0.0, 0.0, hole=batch == at)
    spans = [span for span in connection.execute("SELECT began, seen FROM spans") if span[0] < span[1]]
    whole = [(1000.0, 1030.0), (1020.0, 1050.0), (1040.0, 1050.0), (1000.0, 1010.0)]
    assert spans == {0: [whole[1]], 1: [whole[3], whole[2]], 2: [whole[0]]}[at]
    connection.close()


def test_a_disk_that_hangs_does_not_hold_the_loop_up(tmp_path: Path) -> None:
    hangs = module.threading.Event()

    def slow(file: Path) -> sqlite3.Connection:
        hangs.wait(10)
        return schema.open_file(file)

    history = History(tmp_path, queue=1000, open_file=slow)
    history.start()
    began = time.monotonic()
    for ticket in range(5000):
        history.lease(row(ticket))
    assert time.monotonic() - began < 1.0
    assert len(history._queue) <= 1000
    hangs.set()
    history.close()


def test_a_file_that_somebody_else_locks_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "BUSY", 0.02)
    other = schema.open_file(tmp_path / FILE_NAME)
    other.execute("BEGIN IMMEDIATE")
    with capture_logs() as lines:
        history = History(tmp_path)
        history.start()
        history.lease(row(1))
        until(lambda: history._failing)
        other.execute("ROLLBACK")
        until(lambda: not history._failing)
        assert len(run(history.leases(*ALL))) == 1
        history.close()
    assert [line["event"] for line in lines] == ["history_not_written", "history_written_again"]
    other.close()


@pytest.mark.parametrize("content", [b"this is no database" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_corrupt_file_is_put_aside_and_a_new_one_begun(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with capture_logs() as lines:
        history = History(tmp_path)
        history.start()
        history.lease(row(1))
        until(lambda: (tmp_path / (FILE_NAME + ".broken")).exists())
        until(lambda: history._connection)
        assert len(run(history.leases(*ALL))) == 1
        history.close()
    assert (tmp_path / (FILE_NAME + ".broken")).read_bytes() == content
    assert [line["event"] for line in lines] == ["history_broken"]


def test_a_file_that_rots_while_it_is_used_is_put_aside(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.start()
    history.lease(row(1))
    history.close()
    with open(tmp_path / FILE_NAME, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 20_000)
    again = History(tmp_path)
    again.start()
    again.lease(row(2))
    until(lambda: again._connection)
    assert [lease.ticket for lease in run(again.leases(*ALL))] == [2]
    again.close()


def test_a_file_of_another_version_is_put_aside(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    history = History(tmp_path)
    history.start()
    until(lambda: history._connection)
    history.close()
    assert (tmp_path / (FILE_NAME + ".broken")).exists()


def test_a_folder_that_cannot_be_written_does_not_stop_the_gate(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    with capture_logs() as lines:
        history = History(tmp_path / "state")
        history.start()
        history.lease(row(1))
        until(lambda: history._failing)
        with pytest.raises(HistoryError):
            run(history.leases(*ALL))
        history.close()
    assert [line["event"] for line in lines] == ["history_not_written"]


# --------------------------------------------------------------------------------------------------- kills

WRITER = """
import sys, time
from pathlib import Path
from gpu_turnstile.journal import history as module
module.EVERY = 0.005
history = module.History(Path(sys.argv[1]))
history.start()
ticket = 0
while True:
    ticket += 1
    history.lease((ticket, "coder", "somebody", None, time.monotonic(), time.monotonic(), "released"))
    if ticket % 50 == 0:
        history.beat(())
        history._flush(5.0)
        print(ticket, flush=True)  # these are in the file, whatever comes
"""


def test_a_kill_at_any_moment_loses_nothing_that_was_written_and_the_file_stays_whole(tmp_path: Path) -> None:
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    for round_ in range(10):
        folder = tmp_path / str(round_ // 5)  # five kills for each file
        before = len(run(History(folder).leases(*ALL))) if folder.exists() else 0
        process = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.003 * round_)
        os.kill(process.pid, signal.SIGKILL)
        said = [int(line) for line in process.stdout.read().split()]
        process.stdout.close()
        process.wait()
        connection = schema.open_file(folder / FILE_NAME)  # checks it
        leases = connection.execute("SELECT count(*) FROM leases").fetchone()[0]
        spans = connection.execute("SELECT count(*) FROM spans WHERE seen >= began").fetchone()[0]
        connection.close()
        assert leases - before >= max([50, *said])
        assert spans == round_ % 5 + 1
    assert not list(tmp_path.glob("*/*.broken"))


# ------------------------------------------------------------------------------------------------- looking


def pids(*known: int) -> Callable[[], Awaitable[frozenset[int]]]:
    async def ours() -> frozenset[int]:
        return frozenset(known)

    return ours


class Card:
    def __init__(self) -> None:
        self.holders: tuple[Holder, ...] | None = ()

    async def read(self) -> Reading | None:
        return Reading(32 << 30, 0, self.holders)


def test_strangers_on_the_card_are_written_down_when_they_change(kept: History) -> None:
    async def scenario() -> None:
        card = Card()
        lookout = Lookout(kept, read=card.read, ours=pids(999_999_901), leases=tuple)
        await lookout.look()
        engine = Holder(999_999_901, "llama-server", 7 << 30)
        gate = Holder(os.getpid(), "ours", 7 << 30)
        small = Holder(999_999_902, "Xorg", 10 << 20)
        whisper = Holder(999_999_903, "whisper", 5 << 30)
        for held in (whisper.used or 0, (whisper.used or 0) + (1 << 20), 6 << 30):
            card.holders = (engine, gate, small, Holder(whisper.pid, whisper.name, held))
            await lookout.look()
        card.holders = None
        await lookout.look()
        await lookout.look()
        samples = (await kept.record(*ALL)).samples
        assert [s.holders and [(h.name, (h.used or 0) >> 30) for h in s.holders] for s in samples] == [
            (),
            [("whisper", 5)],
            [("whisper", 6)],
            None,
        ]

    run(scenario())


def test_a_child_of_an_engine_is_ours_and_a_stranger_has_a_lineage() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        line = lineage(child.pid)
        assert line[:2] == (child.pid, os.getpid())
        holder = Holder(child.pid, "python", 5 << 30)
        assert strangers([holder], frozenset()) == {}
        assert lineage(999_999_999) == (999_999_999,)
    finally:
        child.communicate()


def test_a_card_that_cannot_be_read_does_not_hide_open_leases(kept: History) -> None:
    async def broken() -> Reading | None:
        raise RuntimeError("the driver is gone")

    async def scenario() -> None:
        lookout = Lookout(kept, read=broken, ours=pids(), leases=lambda: [row(3, end=schema.OPEN)], interval=0.01)
        lookout.rounds.start()
        while not (await kept.leases(*ALL)):  # noqa: ASYNC110 (`run` bounds it)
            await asyncio.sleep(0.005)
        await lookout.rounds.stop()

    with capture_logs():
        run(scenario())


def test_one_lease_costs_the_loop_next_to_nothing(kept: History) -> None:
    rows = [row(n) for n in range(20_000)]
    began = time.process_time()
    for item in rows:
        kept.lease(item)
    assert (time.process_time() - began) / len(rows) < 20e-6  # with the thread's own work in it


# ------------------------------------------------------------------------------------------------- crowds


def crowd(count: int, *clients: str, gap: float = 0.0) -> list[LeaseRow]:
    """Leases of 10 ms, each beginning `gap` after the one before it ended; the clients take turns."""
    begin = time.monotonic() - 100.0
    found = []
    for number in range(count):
        since = begin + number * (0.01 + gap)
        found.append((number, "coder", clients[number % len(clients)], None, since, since + 0.01, "released"))
    return found


def test_in_a_crowd_each_clients_leases_are_one_row_that_counts_them() -> None:
    rows = crowd(1000, "loop", "person")
    stored = bundled(rows, 0.0, set())
    assert [(x.client, x.requests) for x in stored] == [("loop", 500), ("person", 500)]
    assert (stored[0].since, stored[0].until) == (rows[0][4], rows[-2][5])


def test_a_pause_ends_a_bundle_and_few_leases_are_not_bundled() -> None:
    assert [x.requests for x in bundled(crowd(300, "loop", gap=1.0), 0.0, set())] == [1] * 300
    assert [x.requests for x in bundled(crowd(150, "loop"), 0.0, set())] == [1] * 150


def test_how_a_lease_ended_and_whose_it_was_is_never_mixed() -> None:
    rows = crowd(300, "loop")
    rows[100] = (*rows[100][:6], "cut")
    rows[200] = (*rows[200][:3], "me", *rows[200][4:])
    stored = bundled(rows, 0.0, set())
    assert sorted((x.end, x.owner or "", x.requests) for x in stored) == [
        ("cut", "", 1),
        ("released", "", 298),
        ("released", "me", 1),
    ]


def test_a_lease_that_was_stored_as_open_gets_its_own_end_also_in_a_crowd(tmp_path: Path) -> None:
    history = History(tmp_path / "state")  # no thread: every round is ours
    rows = crowd(1000, "loop")
    history.beat([(*rows[7][:6], schema.OPEN)])
    history._round(time.monotonic())
    for row in rows:
        history.lease(row)
    history._round(time.monotonic())
    with sqlite3.connect(history.file) as connection:
        found = dict(connection.execute("SELECT ticket, end FROM leases"))
        assert found == {0: "released", 7: "released"}
        assert connection.execute("SELECT sum(requests) FROM leases").fetchone() == (1000,)
    assert not history._open
    history._shut()
