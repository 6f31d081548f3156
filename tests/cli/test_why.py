"""Why somebody waits, from what the gate tells: nothing here needs a gate."""

from __future__ import annotations

from datetime import UTC, datetime

from gpu_turnstile.cli import top, why
from tests.cli.test_show import STATUS, printed

NOW = datetime(2026, 1, 2, 3, 5, 0, tzinfo=UTC)
METRICS = "# TYPE x\ngpu_turnstile_swap_seconds_count 4.0\ngpu_turnstile_swap_seconds_sum 10.0\n"
FREE = {"preset": None, "owners": {}, "queue": [], "entitled": None}
SWAPS = {**STATUS["swaps"], "last": {**STATUS["swaps"]["last"], "time": "2026-01-02T03:04:00.000Z"}}
FOUND = {**STATUS, "swaps": SWAPS}


def text(found, client, **more):
    return "\n".join(why.lines(why.explain(found, METRICS, client, NOW, **more)))


def test_a_request_that_waits_for_a_drain():
    said = text({**FOUND, "locks": FREE}, "open-webui")
    assert "waiting: open-webui, a request for comfyui, position 1, for 19 s" in said
    assert "the card: draining, qwen3-coder-30b, since 60 s; comfyui is next" in said
    assert "what would help: what is in flight ends (1 requests and 1 image jobs); the swap is forced in 41 s" in said
    assert "a swap takes 2.5 s on average" in said


def test_a_swap_under_way_says_how_long_they_take():
    said = text({**FOUND, "locks": FREE, "phase": "swapping"}, "open-webui")
    assert "comfyui is on its way; a swap takes 2.5 s on average" in said


def test_work_past_the_gate_and_engines_that_are_off_are_told_of():
    past = [{"tenant": "comfyui", "what": "1 job(s) sent past the gate", "age_s": 3.0}]
    engines = [{**engine, "away": engine["name"] == "comfyui"} for engine in FOUND["engines"]]
    said = text({**FOUND, "bypass": past, "engines": engines}, "nobody")
    assert "  comfyui: 1 job(s) sent past the gate, for 3.0 s" in said
    assert "  comfyui did not take the last connection: requests for it are tried again, without the card" in said
    assert "did not take the last connection" not in text(FOUND, "nobody")


def test_who_waits_for_nothing_is_told_what_the_lock_does_to_it():
    said = text(FOUND, "nobody")
    assert "nobody waits for nothing" in said
    assert "refused with 422 until qwen3-coder-30b is unlocked" in said
    assert "turnstile run --preset" in said


def test_without_a_name_everybody_who_waits_is_told_of():
    assert "waiting: open-webui" in text(FOUND, "me@host:1", everybody=True)


def test_an_owner_is_told_what_it_has():
    assert "loop-7 has the lock on qwen3-coder-30b" in text(FOUND, "loop-7")


def test_behind_a_head_that_does_not_come():
    places = [
        {"owner": name, "preset": "b", "position": at, "expires_in": 42.0, "waited": 5.0}
        for at, name in enumerate(("gone", "me"), 1)
    ]
    locks = {**FREE, "queue": places, "entitled": "gone"}
    said = text({**FOUND, "locks": locks, "queue": []}, "me")
    assert "the lock: free, and gone is next" in said
    assert "ahead: gone, the lock on b, position 1" in said
    assert "gone takes the lock with its next call, or loses its place in 42 s" in said


def test_no_swap_yet_is_no_expected_time():
    assert why.mean_swap("gpu_turnstile_swap_seconds_count 0.0\ngpu_turnstile_swap_seconds_sum 0.0\n") is None
    assert why.mean_swap("") is None


def test_names_from_outside_cannot_move_the_cursor():
    evil = {**FOUND, "queue": [{"position": 1, "wants": ["x"], "client": "\x1b[2Ja", "waited_s": 1.0}]}
    assert "\x1b" not in text(evil, "", everybody=True)


def test_the_top_screen_is_plain_text_in_80_columns():
    event = {"id": 3, "time": "2026-01-02T03:04:05.678Z", "kind": "swapped", "fields": {"target": "t" * 90}}
    said = printed(top.screen(FOUND, [event], "http://gate", 80, "no gate answers"))
    assert max(map(len, said.splitlines())) <= 80
    for part in (
        "draining  llm  qwen3-coder-30b  then comfyui, by force in 41 s",
        "[#####################.........]  22.4 of 31.8 GB",
        "qwen3-coder-30b is locked by loop-7",
        "! no gate answers; what follows is the last that was known",
        "open-webui",
        "03:04:05.678  swapped",
    ):
        assert part in said, part


def test_a_turn_and_a_swap_war_are_explained():
    kept = {"tenant": "coder", "for_s": 40.0, "cost_s": 68.0, "idle": True}
    war = {
        "presets": {"coder": ["ann"], "chat": ["bob", "cleo"]},
        "swaps": 9,
        "since_s": 600.0,
        "lost_s_per_hour": 1800.0,
        "would_help": ["the clients use one preset: then nothing swaps"],
    }
    said = text({**FOUND, "locks": FREE, "turn": kept, "war": war}, "open-webui")
    assert "the card is kept for coder for 40 s at most, for a client that usually comes back at once" in said
    assert "a swap war: coder (for ann), chat (for bob, cleo); 9 swaps in 10 min, it costs 30 min of every hour" in said
    assert "the clients use one preset" in said
