"""A measurement counts only if it was alone on the card and somebody was watching. 0 to 100 is the window here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_turnstile.contention import (
    CONTAMINATED,
    GB,
    Certificate,
    Kind,
    Who,
    Window,
    as_json,
    certificate_text,
    covered,
    exit_code,
    from_json,
    judge,
)
from gpu_turnstile.journal.schema import Event, Holder, Lease, Record, Sample, Span

WINDOW = Window(0.0, 100.0)
ME = Who(frozenset({"me"}))
WATCHED = (Span(-1000.0, 1000.0),)
EMPTY_CARD = (Sample(-500.0, ()),)


def events(*told: tuple[float, str, dict[str, Any]]) -> tuple[Event, ...]:
    return tuple(Event(at, kind, fields, number) for number, (at, kind, fields) in enumerate(told))


def lease(since: float, until: float, owner: str | None = None, client: str = "c", tenant: str = "coder") -> Lease:
    return Lease(int(since * 10), tenant, client, owner, since, until)


def judged(*told: tuple[float, str, dict[str, Any]], leases: tuple[Lease, ...] = (), who: Who = ME) -> Certificate:
    return judge(WINDOW, who, Record(events(*told), leases, EMPTY_CARD, WATCHED))


def seen(certificate: Certificate) -> list[tuple[str, str, float, float | None]]:
    assert certificate.clean == (not certificate.findings)
    return [(str(f.kind), f.who, f.when, f.seconds) for f in certificate.findings]


MINE = lease(1, 99, "me")


@pytest.mark.parametrize(
    ("leases", "expected"),
    [
        ((), []),
        ((MINE,), []),
        ((lease(1, 99, None, "me"),), []),
        ((MINE, lease(-20, -10, "you"), lease(110, 120, "you")), []),
        ((MINE, lease(-20, 0, "you"), lease(100, 120, "you")), []),
        ((MINE, lease(10, 30, "you")), [("lease", "you", 10.0, 20.0)]),
        ((MINE, lease(-50, 150, "you")), [("lease", "you", 0.0, 100.0)]),
        ((lease(10, 10, "you"),), [("lease", "you", 10.0, 0.0)]),
        ((lease(10, 30, "you"), lease(20, 40, "you"), lease(90, 95, "you")), [("lease", "you", 10.0, 35.0)]),
        ((lease(10, 30, "you"), lease(5, 9, "they")), [("lease", "they", 5.0, 4.0), ("lease", "you", 10.0, 20.0)]),
        ((lease(10, 30, "you", "me"),), [("lease", "you", 10.0, 20.0)]),  # whose it says it is counts
        ((lease(10, 30, None, ""),), [("lease", "somebody unnamed", 10.0, 20.0)]),
    ],
)
def test_leases_of_others_in_the_window_are_findings(leases: tuple[Lease, ...], expected: list[Any]) -> None:
    assert seen(judged(leases=leases)) == expected


def test_without_an_owner_every_use_of_the_card_is_somebody_elses() -> None:
    assert seen(judged(leases=(MINE,), who=Who())) == [("lease", "me", 1.0, 98.0)]


def swap(at: float, leaves: str, comes: str, drain: float = 5.0) -> list[tuple[float, str, dict[str, Any]]]:
    """The notes of one swap: the drain, one second to evict, two to load."""
    return [
        (at, "drain", {"target": comes, "victims": [leaves], "inflight": 1}),
        (at + drain, "evicting", {"tenant": leaves}),
        (at + drain + 1, "evicted", {"tenant": leaves}),
        (at + drain + 1, "admitting", {"tenant": comes}),
        (at + drain + 3, "admitted", {"tenant": comes}),
        (at + drain + 3, "swapped", {"target": comes, "evicted": [leaves]}),
    ]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (swap(-50, "old", "coder"), []),
        (swap(10, "old", "coder"), [("drain", "old", 10.0, 6.0)]),
        (swap(10, "coder", "new"), [("drain", "coder", 10.0, 6.0), ("swap", "new", 16.0, 2.0)]),
        (swap(-3, "old", "coder"), [("drain", "old", 0.0, 3.0)]),
        (swap(98, "coder", "new"), [("drain", "coder", 98.0, 2.0)]),
        (swap(10, "old", "coder")[3:], []),  # what is measured comes onto an empty card
        (swap(10, "old", "coder", 0.0)[1:3], [("drain", "old", 10.0, 1.0)]),  # an unload
        ([*swap(10, "old", "coder")[:1], (14, "drain_end", {})], [("drain", "old", 10.0, 4.0)]),
        (swap(10, "old", "coder")[:1], [("drain", "old", 10.0, 90.0)]),  # still going on
        ([*swap(10, "old", "new")[3:4], (30, "swap_failed", {"target": "new"})], [("swap", "new", 16.0, 14.0)]),
        (
            [(10, "evicting", {"tenant": "old"}), (20, "evict_failed", {"tenant": "old"}), (20, "swap_failed", {})],
            [("drain", "old", 10.0, 10.0)],
        ),
    ],
)
def test_whoever_leaves_or_comes_disturbs_but_not_what_is_measured(told: Any, expected: list[Any]) -> None:
    assert seen(judged(*told, leases=(MINE,))) == expected


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("forced", {"target": "new", "cut": 2, "victims": ["coder"]}, ("forced", "coder")),
        ("lapsed", {"owner": "me", "preset": "coder", "cause": "silence"}, ("lapse", "me")),
        ("lapsed", {"owner": "you", "preset": "coder", "cause": "silence"}, None),
        ("unlocked", {"owners": ["me"], "cut": ["me"], "caller": "you", "force": True}, ("lapse", "me")),
        ("unlocked", {"owners": ["me"], "cut": [], "caller": "me"}, None),
        ("engine_lost", {"tenant": "coder", "reason": "it crashed", "cut": 1}, ("lost", "coder")),
        ("released", {"reason": "it hangs", "cut": 1, "client": "ann"}, ("released", "ann")),
        ("released", {"reason": "it hangs", "cut": 1}, ("released", "somebody unnamed")),
        ("started", {"residents": []}, ("restart", "the gate")),
        ("locked", {"owner": "you", "preset": "coder"}, None),
        ("renewed", {"owner": "me"}, None),
        ("job", {"prompt_id": "1", "tenant": "pictures", "phase": "running"}, None),
        ("warmed", {}, None),
    ],
)
def test_each_note_is_a_finding_or_nothing(kind: str, fields: dict[str, Any], expected: Any) -> None:
    for at, inside in ((-1.0, False), (0.0, True), (50.0, True), (100.0, True), (101.0, False)):
        found = seen(judged((at, kind, fields), leases=(MINE,)))
        assert found == ([(*expected, at, None)] if inside and expected else [])


def test_work_past_the_gate_lasts_from_its_note_to_its_end() -> None:
    begins = (-50.0, "bypass", {"tenant": "pictures", "what": "2 job(s) sent past the gate"})
    assert seen(judged(begins, (30.0, "bypass_end", {"tenant": "pictures"}))) == [("bypass", "pictures", 0.0, 30.0)]
    assert seen(judged(begins, (-30.0, "bypass_end", {"tenant": "pictures"}))) == []
    assert seen(judged(begins)) == [("bypass", "pictures", 0.0, 100.0)]
    more = (10.0, "bypass", {"tenant": "pictures", "what": "3 job(s) sent past the gate"})
    assert [f[2:] for f in seen(judged(begins, more))] == [(0.0, 10.0), (10.0, 90.0)]


WHISPER = Holder(42, "whisper", int(5.6 * GB), (42, 7, 1))


@pytest.mark.parametrize(
    ("samples", "who", "expected"),
    [
        ([Sample(-10, (WHISPER,))], ME, [("process", "whisper (42)", 0.0, 100.0)]),
        ([Sample(-10, (WHISPER,)), Sample(-5, ())], ME, []),
        ([Sample(-10, ()), Sample(20, (WHISPER,)), Sample(30, ())], ME, [("process", "whisper (42)", 20.0, 10.0)]),
        ([Sample(-10, (Holder(1, "Xorg", 150_000_000),))], ME, []),
        ([Sample(-10, (Holder(1, "wsl", None),))], ME, [("process", "wsl (1)", 0.0, 100.0)]),
        ([Sample(-10, (WHISPER,))], Who(frozenset({"me"}), allowed=frozenset({"whisper"})), []),
        ([Sample(-10, (WHISPER,))], Who(frozenset({"me"}), pids=frozenset({7})), []),
    ],
)
def test_processes_that_hold_memory_are_findings_unless_small_allowed_or_mine(
    samples: list[Sample], who: Who, expected: list[Any]
) -> None:
    certificate = judge(WINDOW, who, Record((), (MINE,), tuple(samples), WATCHED))
    assert seen(certificate) == expected
    assert certificate.notes == ()


@pytest.mark.parametrize("samples", [(), (Sample(-10, None),), (Sample(-10, None), Sample(40, ()))])
def test_a_card_that_does_not_say_who_holds_it_is_a_note_and_no_finding(samples: tuple[Sample, ...]) -> None:
    certificate = judge(WINDOW, ME, Record((), (MINE,), samples, WATCHED))
    assert certificate.clean
    assert "could not be seen" in certificate.notes[0]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], [(0.0, 100.0)]),
        ([(-10, 100)], []),
        ([(-10, 99.5)], []),
        ([(-10, 40), (60, 200)], [(40.0, 20.0)]),
        ([(20, 70)], [(0.0, 20.0), (70.0, 30.0)]),
        ([(-10, 60), (40, 200)], []),
        ([(60, 200), (-10, 59.9)], []),
    ],
)
def test_nothing_is_certified_that_nobody_watched(spans: list[Any], expected: list[Any]) -> None:
    record = Record((), (MINE,), EMPTY_CARD, tuple(Span(*span) for span in spans))
    assert [f[2:] for f in seen(judge(WINDOW, ME, record))] == expected


# ---------------------------------------------------------------------------------------------- incidents


def test_2026_09_08_a_bare_unlock_under_a_bench_contaminates_it() -> None:
    handed_over = [
        (40.0, "unlocked", {"owners": ["me"], "waiters": [], "cut": ["me"], "caller": None, "force": True}),
        *swap(45.0, "coder", "other"),
    ]
    found = judged(*handed_over, leases=(lease(0, 40, "me"), lease(53, 80, "loop", tenant="other")))
    assert [str(f.kind) for f in found.findings] == ["lapse", "drain", "swap", "lease"]
    assert found.findings[0].text == "the lock of me was taken away by somebody unnamed"
    assert exit_code(found) == CONTAMINATED


def test_2026_09_18_another_client_in_the_window_and_drain_overlap_contaminate_a_speed_probe() -> None:
    found = judged(*swap(-4.0, "old", "coder", 10.0), leases=(MINE, lease(-20, 6, "agent", tenant="old")))
    assert seen(found) == [("drain", "old", 0.0, 7.0), ("lease", "agent", 0.0, 6.0)]
    text = certificate_text(found)
    assert "CONTAMINATED" in text
    assert "agent used old: 1 request, 6.0 s of the window" in text


# --------------------------------------------------------------------------------------------- properties

times = st.floats(-200, 300, allow_nan=False)
names = st.text(max_size=12)
HARMLESS = ("locked", "renewed", "lock_queued", "lock_refused", "presets", "job", "job_end", "no_job", "warmed")
DISTURBING = ("drain", "evicting", "evicted", "admitting", "swapped", "forced", "bypass", "released", "engine_lost")


@st.composite
def records(draw: st.DrawFn, kinds: tuple[str, ...], owners: st.SearchStrategy[str | None]) -> Record:
    told = sorted(draw(st.lists(st.tuples(times, st.sampled_from(kinds), names), max_size=12)))
    leases = draw(st.lists(st.tuples(times, times, owners, names), max_size=12))
    return Record(
        events(*((at, kind, {"owner": name, "tenant": name, "victims": [name]}) for at, kind, name in told)),
        tuple(lease(min(a, b), max(a, b), owner, client) for a, b, owner, client in leases),
        EMPTY_CARD,
        WATCHED,
    )


@settings(max_examples=200, deadline=None)
@given(records(HARMLESS, st.just("me")))
def test_a_window_with_nothing_foreign_is_clean(record: Record) -> None:
    certificate = judge(WINDOW, ME, record)
    assert certificate == Certificate(True, 0.0, 100.0)
    assert exit_code(certificate) == 0


@settings(max_examples=200, deadline=None)
@given(records(HARMLESS + DISTURBING, st.sampled_from(["me", "you", None])))
def test_findings_lie_in_the_window_and_any_foreign_lease_in_it_is_one(record: Record) -> None:
    certificate = judge(WINDOW, ME, record)
    for finding in certificate.findings:
        assert 0.0 <= finding.when <= finding.when + (finding.seconds or 0.0) <= 100.0 + 1e-9
    foreign = [x for x in record.leases if not ME.owns(x) and x.since < 100.0 and x.until > 0.0]
    assert bool(foreign) <= (Kind.LEASE in {f.kind for f in certificate.findings})
    again = from_json(json.loads(json.dumps(as_json(certificate))))
    assert certificate_text(again) == certificate_text(certificate)
    assert all(line.isprintable() for line in certificate_text(certificate).split("\n"))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple)))
def test_covered_time_is_counted_once(spans: list[tuple[float, float]]) -> None:
    assert covered(spans) == len({n for begin, end in spans for n in range(int(begin), int(end))})


# ------------------------------------------------------------------------------------------- for people


def test_a_clean_certificate_says_so_in_one_line() -> None:
    assert certificate_text(judged()) == "clean: nothing else used the card (00:00:00 to 00:01:40 UTC, 100.0 s)"


def test_names_cannot_control_a_terminal() -> None:
    text = certificate_text(judged(leases=(lease(1, 2, "evil\x1b[2J\nclean:"),)))
    assert "\x1b" not in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(("clean", "command", "code"), [(True, 0, 0), (False, 0, 3), (True, 5, 5), (False, 5, 5)])
def test_the_exit_code_is_the_commands_else_three_when_contaminated(clean: bool, command: int, code: int) -> None:
    assert exit_code(Certificate(clean, 0, 1), command) == code


@pytest.mark.parametrize("found", [{}, [], None, {"clean": True}, {"clean": True, "findings": 5}])
def test_what_is_no_certificate_is_refused(found: Any) -> None:
    with pytest.raises(ValueError, match="certificate"):
        from_json(found)


def test_an_answer_that_contradicts_itself_is_not_clean() -> None:
    found = as_json(judged(leases=(lease(1, 2, "you"),))) | {"clean": True}
    assert not from_json(found).clean
