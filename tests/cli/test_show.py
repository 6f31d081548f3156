"""What a person reads, in 80 columns."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from gpu_turnstile.cli import show

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "uptime_s": 7500.0,
    "mode": "llm",
    "phase": "draining",
    "model": "qwen3-coder-30b",
    "residents": ["qwen3-coder-30b"],
    "target": "comfyui",
    "locks": {
        "preset": "qwen3-coder-30b",
        "owners": {"loop-7": {"expires_in": 845.2, "ttl": 900.0, "held": 54.8}},
        "queue": [],
        "entitled": None,
    },
    "stuck": [],
    "drain_deadline_in_s": 41.0,
    "inflight": [
        {"tenant": "qwen3-coder-30b", "client": "10.0.0.7 OpenAI/Python 1.99 a very long agent", "age_s": 8.2}
    ],
    "queue": [{"position": 1, "wants": ["comfyui"], "client": "open-webui", "waited_s": 19.0}],
    "card": {
        "kind": "nvml",
        "name": "NVIDIA GeForce RTX 5090",
        "limit_gb": 32.0,
        "reserve_gb": 6.0,
        "total_gb": 31.8,
        "used_gb": 22.4,
        "free_gb": 9.4,
        "holders": [{"pid": 4711, "name": "llama-server", "used_gb": 21.9}, {"pid": 9, "name": "x", "used_gb": None}],
    },
    "jobs": [{"prompt_id": "0b7c2f9e-1234-5678-9abc-def012345678", "phase": "running", "age_s": 12.0}],
    "presets": {"count": 3, "error": None},
    "engines": [
        {
            "name": "qwen3-coder-30b",
            "mode": "llm",
            "kind": "llama-server",
            "runtime": "process",
            "owned": True,
            "url": "http://127.0.0.1:41234",
            "on_card": True,
        },
        {
            "name": "comfyui",
            "mode": "comfyui",
            "kind": "comfyui",
            "runtime": "external",
            "owned": False,
            "url": "http://127.0.0.1:8189",
            "on_card": False,
        },
    ],
    "counters": {"requests": 1234, "died_midstream": 2, "unreachable": 0, "malformed": 0},
    "swaps": {
        "done": 4,
        "failed": 1,
        "last": {"ok": True, "target": "qwen3-coder-30b", "evicted": ["x"], "seconds": 6.4},
    },
    "contexts": {
        "bytes": 60914724,
        "saved": 3,
        "restored": 2,
        "tokens_reused": 5230,
        "seconds_saved": 58.4,
        "failures": 1,
    },
    "places": {"presets": "/etc/turnstile/presets", "state": "/var/lib/turnstile", "config": None},
    "warnings": ["something looks odd"],
}


def printed(what: Any, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(what)
    return out.getvalue()


def test_status_fits_80_columns_and_says_everything() -> None:
    text = printed(show.status(STATUS, "http://127.0.0.1:11434"))
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "up 2 h 5 min",
        "draining  llm  qwen3-coder-30b",
        "comfyui, by force in 41 s",
        "22.4 of 31.8 GB used: llama-server (4711) 21.9 GB, x (9)",
        "held by loop-7 for 14 min",
        "1234 requests, 2 died midstream",
        "to qwen3-coder-30b in 6.4 s, evicted x (4 done, 1 failed)",
        "open-webui",
        "! something looks odd",
    ):
        assert part in " ".join(text.split()) or part in text, part


def test_an_idle_gate_shows_no_empty_tables() -> None:
    idle = {
        **STATUS,
        "mode": "idle",
        "phase": "idle",
        "residents": [],
        "target": None,
        "locks": {},
        "inflight": [],
        "queue": [],
        "jobs": [],
        "warnings": [],
        "card": {**STATUS["card"], "total_gb": None},
        "swaps": {"done": 0, "failed": 1, "last": {"ok": False, "target": "x", "reason": "no file"}},
    }
    text = printed(show.status(idle, "http://127.0.0.1:11434"))
    assert "nobody (last: qwen3-coder-30b)" in text
    assert "not readable; 32 GB by the settings" in text
    assert "to x FAILED: no file" in text
    for title in ("in flight", "waiting", "image jobs", "next", "lock"):
        assert title not in text


def test_names_from_outside_cannot_colour_or_move_anything() -> None:
    evil = {**STATUS, "queue": [{"position": 1, "wants": ["[red]x[/red]"], "client": "\x1b[2Ja\nb", "waited_s": 1.0}]}
    text = printed(show.status(evil, "u"))
    assert "\x1b" not in text
    assert "[red]x[/red]" in text


def test_an_event_is_one_line() -> None:
    text = printed(
        show.event(
            {
                "id": 3,
                "time": "2026-01-02T03:04:05.678Z",
                "kind": "swapped",
                "fields": {"target": "two", "evicted": ["one"], "seconds": 1.23456, "reason": None},
            }
        )
    )
    assert text == "03:04:05.678  swapped       target=two evicted=one seconds=1.23 reason=-\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (12, "12 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7500, "2 h 5 min"),
        (1e6, "11 d 13 h"),
    ],
)
def test_times_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert show.ago(seconds) == text
