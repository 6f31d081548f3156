"""How people write values: what is understood, and what a mistake is answered with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_turnstile.presets import values as v
from gpu_turnstile.presets.values import Address

VALUES: list[tuple[Callable[[str], Any], str, Any]] = [
    (v.duration, "0", 0),
    (v.duration, "1h15m30.918s", 4530.918),
    (v.duration, "+5s", 5),
    (v.duration, "100µs", 0.0001),
    (v.duration, "100μs", 0.0001),
    (v.duration, ".5s", 0.5),
    (v.duration, "7ms", 0.007),
    (v.address, "[::1]:9000", Address("::1", 9000)),
    (v.address, "0.0.0.0:80", Address("0.0.0.0", 80)),
    (v.address, "localhost:0", Address("localhost", 0)),
    (v.address, "off", None),
    (v.address, "", None),
    (v.http_url, "HTTP://GPU/api/", "http://gpu/api"),
    (v.http_url, "http://[fd00::1]:11435", "http://[fd00::1]:11435"),
    (v.seconds, "2m", 120),
    (v.size, "1.5 MiB", 1_572_864),
    (v.size, "512kb", 512_000),
]


@pytest.mark.parametrize(("parse", "text", "value"), VALUES)
def test_a_value_is_understood(parse: Callable[[str], Any], text: str, value: object) -> None:
    assert parse(text) == value


MISTAKES: list[tuple[Callable[[str], Any], str, str]] = [
    (v.duration, "-5s", "500ms"),
    (v.duration, "5 s", "not a duration"),
    (v.duration, "1d", "not a duration"),
    (v.duration, "١s", "not a duration"),
    (v.duration, "9999999h", "292 years"),
    (v.duration, "9" * 5000 + "s", "not a duration"),
    (v.address, "localhost", "127.0.0.1:11434"),
    (v.address, ":70000", "not an address"),
    (v.address, "::1:80", "not an address"),
    (v.address, "300.1.1.1:80", "IP address"),
    (v.address, "[zz]:80", "IP address"),
    (v.address, "a b:80", "host name"),
    (v.http_url, "https://gpu:11435", "TLS"),
    (v.http_url, "ftp://gpu", "not a URL"),
    (v.http_url, "http://", "no host"),
    (v.http_url, "http://:11435", "no host"),
    (v.http_url, "http://gpu:99999", "not a URL"),
    (v.http_url, "http://gpu:0", "port"),
    (v.http_url, "http://[::1", "not a URL"),
    (v.http_url, "http://u:p@gpu", "no user"),
    (v.http_url, "http://gpu/?a=1", "no query"),
    (v.http_url, "http://a b", "not a URL"),
    (v.hosts, "a/b", "host name"),
]


@pytest.mark.parametrize(("parse", "text", "hint"), MISTAKES)
def test_a_mistake_is_answered_with_what_would_be_valid(parse: Callable[[str], Any], text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(hint)):
        parse(text)


@given(st.integers(0, 10**8), st.sampled_from(["ms", "s", "m"]))
def test_a_duration_of_one_unit_is_exact(number: int, unit: str) -> None:
    assert v.duration(f"{number}{unit}") == {"ms": number / 1000, "s": number, "m": number * 60}[unit]


@pytest.mark.parametrize("text", [":11434", "127.0.0.1:80", "[::1]:8188", "gpu-box:1"])
def test_an_address_is_shown_as_it_was_written(text: str) -> None:
    assert str(v.address(text)) == text
