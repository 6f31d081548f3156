"""What the watchdog thinks of an engine, look by look."""

from __future__ import annotations

import pytest

from gpu_turnstile.engines.base import Health, Probe
from gpu_turnstile.watchdog import Look, judge

READY, DOWN = Probe(Health.READY), Probe(Health.SILENT, "no answer within 5 s")
LIMIT = 100.0


def thoughts(*looks: Look) -> list[str | None]:
    """The diagnosis after each look."""
    suspicion, found = None, []
    for look in looks:
        suspicion, diagnosis = judge(suspicion, look, LIMIT)
        found.append(diagnosis)
    return found


def waiting(at: float, busy: bool | None = True, pulse: str | None = None, probe: Probe = READY) -> Look:
    """A look at an engine that owes us an answer."""
    return Look(at, probe, busy, pulse, waits=True, held=True)


def left(at: float, busy: bool | None = True, pulse: str | None = None) -> Look:
    """A look at an engine whose only client has left."""
    return Look(at, READY, busy, pulse)


def test_an_engine_that_works_and_gets_nowhere_is_stuck_when_that_has_lasted():
    looks = [waiting(at, pulse="task 7, 2048 tokens") for at in (0, 50, 99, 100)]
    assert thoughts(*looks) == [None, None, None, "it works on something and has got nowhere for 100 s"]


def test_an_engine_that_gets_on_is_never_stuck_however_slow():
    looks = [waiting(at, pulse=f"token {at // 90}") for at in range(0, 5000, 10)]
    assert set(thoughts(*looks)) == {None}


def test_an_engine_that_has_a_request_and_works_on_nothing_is_stuck():
    assert thoughts(*(waiting(at, busy=False) for at in (0, 50, 100)))[-1] == (
        "it has had a request for 100 s and works on nothing"
    )


def test_silence_of_an_engine_that_does_not_show_what_it_does_proves_nothing():
    assert set(thoughts(*(waiting(at, busy=None) for at in range(0, 10_000, 50)))) == {None}
    assert set(thoughts(*(waiting(at, busy=True) for at in range(0, 10_000, 50)))) == {None}


def test_work_that_nobody_waits_for_any_more_must_get_on_or_end():
    assert set(thoughts(*(left(at, pulse=str(at)) for at in range(0, 1000, 10)))) == {None}
    assert thoughts(left(0), left(99), left(100))[-1] is not None
    assert set(thoughts(left(0), left(50, busy=False), left(60), left(150))) == {None}


@pytest.mark.parametrize("probe", [DOWN, Probe(Health.LOADING, "answered 503"), Probe(Health.BROKEN, "answered 500")])
def test_an_engine_that_does_not_serve_any_more_is_stuck_when_three_looks_agree(probe):
    assert thoughts(*(waiting(at, probe=probe) for at in (0, 1, 2)))[-1] == (
        f"it does not serve any more: {probe.detail}"
    )


def test_looks_that_find_no_answer_must_follow_each_other():
    ups_and_downs = [waiting(at, pulse=str(at), probe=DOWN if at % 3 else READY) for at in range(30)]
    assert set(thoughts(*ups_and_downs)) == {None}


def test_the_time_begins_anew_when_the_engine_gets_on():
    looks = [waiting(0, pulse="1"), waiting(90, pulse="1"), waiting(95, pulse="2"), waiting(190, pulse="2")]
    assert set(thoughts(*looks)) == {None}
    assert thoughts(*looks, waiting(195, pulse="2"))[-1] is not None
