"""How a job ended, from sightings alone: every end, and the looks that prove too little."""

from __future__ import annotations

import msgspec
import pytest

from gpu_turnstile.engines.base import JobEnd
from gpu_turnstile.engines.comfyui_job import HistoryEntry, JobWatch, Sighting, Where, end_of


def look(where, *connections):
    return Sighting(where, connections=frozenset(connections))


QUEUED, RUNNING, GONE = look(Where.QUEUED), look(Where.RUNNING), look(Where.GONE)
SILENT, CUT, REFUSED = look(Where.SILENT), look(Where.CUT), look(Where.REFUSED)
PATIENCE = 3.0


def end_after(*sightings):
    """The end, which only the last sighting may bring; there is one a second."""
    watch = JobWatch(PATIENCE)
    ends = [watch.see(sighting, float(now)) for now, sighting in enumerate(sightings)]
    assert ends[:-1] == [None] * (len(ends) - 1)
    return ends[-1]


@pytest.mark.parametrize(
    ("sightings", "end"),
    [
        ([Sighting(Where.ENDED, JobEnd.SUCCESS)], JobEnd.SUCCESS),
        ([QUEUED, RUNNING, Sighting(Where.ENDED, JobEnd.ERROR)], JobEnd.ERROR),
        ([QUEUED, GONE, GONE], JobEnd.DELETED),
        ([QUEUED, RUNNING, GONE, GONE], JobEnd.CLEARED),
        ([GONE, GONE], JobEnd.LOST),
        ([QUEUED, CUT, GONE, GONE], JobEnd.LOST),
        ([RUNNING, CUT, SILENT, GONE, GONE], JobEnd.LOST),
        ([RUNNING, REFUSED, GONE, GONE], JobEnd.LOST),
        ([RUNNING, REFUSED, REFUSED, REFUSED, REFUSED], JobEnd.LOST),
        ([QUEUED, CUT, REFUSED, REFUSED, REFUSED, REFUSED], JobEnd.LOST),
        ([QUEUED, SILENT, GONE, GONE], JobEnd.DELETED),
        ([CUT, QUEUED, GONE, GONE], JobEnd.DELETED),
        ([RUNNING, CUT, RUNNING, Sighting(Where.ENDED, JobEnd.SUCCESS)], JobEnd.SUCCESS),
        ([QUEUED, GONE, Sighting(Where.ENDED, JobEnd.SUCCESS)], JobEnd.SUCCESS),
    ],
)
def test_the_end_follows_from_what_was_seen(sightings, end):
    assert end_after(*sightings) is end


@pytest.mark.parametrize("between", [SILENT, CUT, RUNNING, REFUSED])
def test_looks_that_do_not_follow_each_other_do_not_agree(between):
    assert end_after(RUNNING, GONE, between, GONE) is None


@pytest.mark.parametrize("between", [SILENT, CUT, RUNNING, QUEUED])
def test_a_server_is_given_up_only_if_nobody_listened_there_all_the_time(between):
    assert end_after(RUNNING, REFUSED, REFUSED, REFUSED, between, REFUSED, REFUSED, REFUSED) is None


@pytest.mark.parametrize("trouble", [SILENT, CUT])
def test_a_server_that_is_silent_or_out_of_reach_keeps_its_job(trouble):
    assert end_after(RUNNING, *[trouble] * 100) is None


def test_a_new_connection_on_a_server_that_keeps_them_means_a_restart():
    seen = [look(Where.QUEUED, "a"), look(Where.QUEUED, "a")]
    assert end_after(*seen, look(Where.GONE, "b"), look(Where.GONE, "b")) is JobEnd.LOST
    assert end_after(*seen, look(Where.GONE, "a"), look(Where.GONE, "a")) is JobEnd.DELETED
    assert end_after(*seen, look(Where.GONE, "b"), look(Where.GONE, "a")) is JobEnd.DELETED


def test_new_connections_say_nothing_on_a_server_that_closes_them():
    seen = [look(Where.QUEUED, "a"), look(Where.QUEUED, "b")]
    assert end_after(*seen, look(Where.GONE, "c"), look(Where.GONE, "d")) is JobEnd.DELETED


def test_a_job_that_runs_for_days_is_remembered_in_bounded_memory():
    watch = JobWatch(PATIENCE)
    for n in range(10_000):
        watch.see(look(Where.RUNNING, str(n)), float(n))
    assert len(watch._known) <= 32


INTERRUPTED = [["execution_start", {"prompt_id": "x"}], ["execution_interrupted", {"node_id": "2"}]]
FAILED = [["execution_start", {"prompt_id": "x"}], ["execution_error", {"exception_type": "torch.OutOfMemoryError"}]]


@pytest.mark.parametrize(
    ("entry", "end"),
    [
        ({"outputs": {}, "status": {"status_str": "success", "completed": True, "messages": []}}, JobEnd.SUCCESS),
        ({"status": {"status_str": "error", "completed": False, "messages": INTERRUPTED}}, JobEnd.INTERRUPTED),
        ({"status": {"status_str": "error", "completed": False, "messages": FAILED}}, JobEnd.ERROR),
        ({"status": {"status_str": "error", "completed": False}}, JobEnd.ERROR),
        ({"prompt": [1, "x", {}], "outputs": {"9": {}}}, JobEnd.SUCCESS),
        ({"status": None}, JobEnd.SUCCESS),
        ({"status": {"status_str": "success", "completed": True, "messages": [[]]}}, JobEnd.SUCCESS),
        ({"status": {"status_str": "working", "completed": False}}, None),
    ],
)
def test_a_history_entry_says_how_it_ended(entry, end):
    assert end_of(msgspec.json.decode(msgspec.json.encode(entry), type=HistoryEntry)) is end
