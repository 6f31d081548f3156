"""How people write values in configuration: durations, sizes, addresses, URLs, lists. Settings and presets share it.

Every function takes the text and returns the value, or raises `ValueError` whose message continues a sentence that
begins with the value ("… is not a duration"). Pure; it knows no setting and no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from urllib.parse import urlsplit

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_PLAIN_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")
_DURATION_PART = re.compile(r"([0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})(ns|us|µs|μs|ms|s|m|h)")
_MICRO = Fraction(1, 10**6)
_SECONDS = {
    "ns": Fraction(1, 10**9),
    "us": _MICRO,
    "µs": _MICRO,  # the micro sign
    "μs": _MICRO,  # the Greek letter
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
_LONGEST = 2**63 // 10**9  # seconds; Go's own limit, 292 years
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(B|kB|MB|GB|KiB|MiB|GiB)?", re.IGNORECASE)
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_ON = ("on", "true", "yes", "1")
_OFF = ("off", "false", "no", "0")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener binds. `host` has no brackets; an empty one means every interface. Port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A client that may use the gate. `name` is who it is in logs, history and locks."""

    name: str
    key: str = field(repr=False)


def duration(text: str) -> float:
    """Seconds, from Go's notation: `500ms`, `1m30s`, `1.5h`, `0`."""
    if text in ("0", "+0"):
        return 0.0
    unsigned = text.removeprefix("+")
    parts = _DURATION_PART.findall(unsigned)
    if not parts or "".join(number + unit for number, unit in parts) != unsigned:
        hint = f'has no unit; did you mean "{text}s"?' if _PLAIN_NUMBER.fullmatch(text) else "is not a duration"
        raise ValueError(f"{hint} (valid: 500ms, 30s, 1m30s, 1h, 0)")
    seconds = sum(Fraction(number) * _SECONDS[unit] for number, unit in parts)
    if seconds >= _LONGEST:
        raise ValueError("is longer than 292 years")
    return float(seconds)


def seconds(text: str) -> float:
    """Seconds, from a plain number or Go's notation: the swap document's settings."""
    return duration(text + "s" if _PLAIN_NUMBER.fullmatch(text) else text)


def size(text: str) -> int:
    """Bytes, from a plain number or one with kB, MB, GB (powers of 1000) or KiB, MiB, GiB (powers of 1024)."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("is not a size (valid: 65536, 64KiB, 256MiB, 1GB)")
    return int(Fraction(match[1]) * _BYTES[(match[2] or "").lower()])


def gigabytes(text: str) -> float:
    if not _PLAIN_NUMBER.fullmatch(text):
        raise ValueError("is not a number of GB (valid: 32, 23.5)")
    return float(text)


def switch(text: str) -> bool:
    """On or off; also what Go and shells call it."""
    if text.lower() not in _ON + _OFF:
        raise ValueError("is neither on nor off (valid: on, off, true, false, 1, 0)")
    return text.lower() in _ON


def address(text: str) -> Address | None:
    """A listener's address as Go writes it: `:11434`, `127.0.0.1:11434`, `[::1]:8188`. None: no listener."""
    if text.lower() in ("", "off"):
        return None
    if re.fullmatch(r"[0-9]{1,5}", text):
        raise ValueError(f'is not an address; did you mean ":{text}"?')
    match = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ValueError("is not an address (valid: :11434, 127.0.0.1:11434, [::1]:8188, off)")
    if match[1] is not None:
        return Address(_ip(IPv6Address, match[1]), int(match[3]))
    return Address(_host(match[2]) if match[2] else "", int(match[3]))


def http_url(text: str) -> str:
    """The base URL of an engine, without a slash at its end."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,100}(:[0-9]{1,5})?", text):
        raise ValueError(f'is not a URL; did you mean "http://{text}"?')
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("is not a URL (valid: http://127.0.0.1:11435)") from None
    if parts.scheme == "https":
        raise ValueError("asks for TLS, which the gate does not speak to engines yet; use http://")
    if parts.scheme != "http" or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("is not a URL the gate can use (valid: http://127.0.0.1:11435)")
    if "@" in parts.netloc or "?" in text or "#" in text:
        raise ValueError("must be http://host:port and at most a path: no user, no query, no fragment")
    if not host or port == 0:
        raise ValueError("names no host or no usable port (valid: http://127.0.0.1:11435)")
    _ip(IPv6Address, host) if ":" in host else _host(host)
    return f"http://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _host(text: str) -> str:
    if re.fullmatch(r"[0-9.]+", text):
        return _ip(IPv4Address, text)
    if not _HOST.fullmatch(text):
        raise ValueError("has a host name with characters that cannot be in one")
    return text.lower()


def _ip(version: type[IPv4Address] | type[IPv6Address], text: str) -> str:
    try:
        return str(version(text))
    except ValueError:
        raise ValueError("has an IP address that cannot exist") from None


def upstream(text: str) -> str | None:
    """An engine's URL; None where it is switched off."""
    return None if text.lower() in ("", "off") else http_url(text)


def web_url(text: str) -> str:
    """Any web address, kept as it is."""
    if not re.fullmatch(r"https?://[^\s/]+\S*", text):
        raise ValueError("is not a URL (valid: https://host/owner/repository)")
    return text.rstrip("/")


def zero_or_at_least(least: float, parse: Callable[[str], float]) -> Callable[[str], float]:
    """The same kind of value, which is either 0 or not less than `least`."""

    def parse_bounded(text: str) -> float:
        value = parse(text)
        if value and value < least:
            raise ValueError(f"must be 0 or at least {least:g}")
        return value

    return parse_bounded


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same kind of value, or None where nothing is written."""
    return lambda text: parse(text) if text else None


def more_than_zero(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse_positive(text: str) -> Any:
        value = parse(text)
        if value <= 0:
            raise ValueError("must be more than 0")
        return value

    return parse_positive


def whole(low: int, high: int) -> Callable[[str], int]:
    def parse_whole(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
            raise ValueError(f"is not a whole number from {low} to {high}")
        return int(text)

    return parse_whole


def one_of(*choices: str, **also: str) -> Callable[[str], str]:
    def parse_choice(text: str) -> str:
        word = also.get(text.lower(), text.lower())
        if word not in choices:
            raise ValueError(f"is not one of {', '.join(choices)}")
        return word

    return parse_choice


def text_or_none(text: str) -> str | None:
    return text or None


def gpu(text: str) -> str:
    """How the card's memory is read."""
    if text.startswith("sim:") and len(text) > len("sim:"):
        return text
    if text.lower() not in ("auto", "none", "nvml", "sysfs"):
        raise ValueError("is not one of auto, none, nvml, sysfs, sim:PATH")
    return text.lower()


def _items(text: str) -> Iterator[str]:
    return (item for item in (part.strip() for part in text.split(",")) if item)


def hosts(text: str) -> tuple[str, ...]:
    """Host names without a port, spelled as a `Host` header spells them: small letters, IPv6 in brackets."""
    return tuple(f"[{_ip(IPv6Address, item.strip('[]'))}]" if ":" in item else _host(item) for item in _items(text))


def origins(text: str) -> tuple[str, ...]:
    """`Origin` headers, in small letters."""
    for item in _items(text):
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/]+", item):
            raise ValueError("holds something that is not an origin (valid: http://localhost:3000, no path)")
    return tuple(item.lower() for item in _items(text))


def api_keys(text: str) -> tuple[ApiKey, ...]:
    """`name:key` pairs. No message repeats a key."""
    keys: list[ApiKey] = []
    for number, item in enumerate(_items(text), 1):
        name, colon, key = item.partition(":")
        if not colon or not re.fullmatch(r"[A-Za-z0-9._@-]+", name) or not re.fullmatch(r"[!-~]+", key):
            raise ValueError(f"item {number} is not name:key (name: letters, digits, ._@-; key: no blanks)")
        if any(key == other.key for other in keys):
            raise ValueError(f"item {number} ({name}) has the same key as another name")
        keys.append(ApiKey(name, key))
    return tuple(keys)
