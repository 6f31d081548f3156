"""The log: one line per thing that happened, for people (text) or programs (JSON), on stderr or in a file.

Everything goes through one sink: the gate's own structured lines and what libraries say (warnings and worse). A line
is one line whatever a client puts into it, and a log that cannot be written never disturbs the service. A log file
that was moved away (logrotate) is opened anew.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from gpu_turnstile import __version__
from gpu_turnstile.settings import Settings, SettingsError

LEVELS = {"debug": 10, "info": 20, "warn": 30, "error": 40}
LOOK_EVERY = 1.0  # seconds between two looks whether the file is still the file

_RESET, _DIM, _BOLD, _RED, _GREEN, _YELLOW, _CYAN = (f"\x1b[{code}m" for code in (0, 2, 1, 31, 32, 33, 36))
_LEVEL_COLOUR = {"debug": _DIM, "info": _GREEN, "warn": _YELLOW, "error": _RED}
# What the arbiter tells and how loud it is; anything else is for LOGLEVEL=info.
_LOUD = {
    "swap_failed": "warn",
    "admit_failed": "warn",
    "evict_failed": "warn",
    "engine_lost": "warn",
    "forced": "warn",
    "context_lost": "warn",
    "sleep_failed": "warn",
    "wake_failed": "warn",
    "context_useless": "warn",
    "swap_war": "warn",
    "lapsed": "warn",
    "lock_refused": "info",
}
_LOUD_ENDS = frozenset(("lost", "timeout", "abandoned"))  # of jobs: nobody knows what became of it


def configure(level: str, format: str, file: str | Path | None, color: bool) -> None:
    """Send the log where the settings say. Raises SettingsError when the file cannot be opened.

    `level`: debug, info, warn or error. `format`: text or json. `file`: None = stderr.
    `color`: colours are wanted; they are used only for text on a terminal.
    """
    sink = Sink(file)
    renderer = _Json() if format == "json" else _Text(color and sink.is_terminal)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, _add_logger, _add_level, _add_time, _add_error, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *name: _Line(sink, name[0] if name else ""),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers[:] = [_Bridge()]
    root.setLevel(max(logging.WARNING, LEVELS[level]))
    logging.captureWarnings(True)


def announce(settings: Settings, presets: Path, state_dir: Path) -> None:
    """The lines at start: the version, every setting, and what looks wrong with them. Shown at every level."""
    say = structlog.wrap_logger(
        structlog.get_config()["logger_factory"]("start"), wrapper_class=structlog.make_filtering_bound_logger(0)
    )
    say.info(
        "starting",
        version=__version__,
        presets=str(presets),
        state=str(state_dir),
        config=str(settings.file) if settings.file else None,
    )
    rows = settings.explain()
    for row in rows:
        if row.source != "default":
            say.info("setting", name=row.name, value=row.value, source=row.source)
    say.info("settings_by_default", **{row.name: row.value for row in rows if row.source == "default"})
    for warning in settings.warnings:
        say.warning("setting_looks_wrong", reason=warning)


def narrate(kind: str, fields: dict[str, Any]) -> None:
    """A watcher for the arbiter: one line per step of a swap, per transition and per loss."""
    log = structlog.get_logger("arbiter")
    lost = fields.get("cut") or (kind == "job_end" and fields["end"] in _LOUD_ENDS)  # somebody lost work by it
    loud = _LOUD.get(kind) == "warn" or lost
    write = log.warning if loud else log.info
    write(kind, **{f"{name}_" if name == "event" else name: value for name, value in fields.items()})


class Sink:
    """Where lines go: stderr, or a file opened for appending. Never raises after it was opened."""

    def __init__(self, file: str | Path | None) -> None:
        self._path = Path(file) if file else None
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._stream: TextIO = sys.stderr
        self._told = False
        if self._path is not None:
            try:
                self._stream = self._open(self._path)
            except OSError as problem:
                raise SettingsError(f"LOG_FILE: {self._path}: cannot be opened: {problem.strerror}") from None

    @staticmethod
    def _open(path: Path) -> TextIO:
        return path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)

    @property
    def is_terminal(self) -> bool:
        return self._path is None and self._stream.isatty()

    def write(self, line: str) -> None:
        with self._lock:
            try:
                self._follow()
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError) as problem:  # full, gone, or closed by somebody
                self._complain(problem)

    def _follow(self) -> None:
        """Open the file anew if its name means another file by now, or none."""
        now = time.monotonic()
        if self._path is None or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        try:
            there, ours = os.stat(self._path), os.fstat(self._stream.fileno())
            moved = (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)
        except FileNotFoundError:
            moved = True
        if moved:
            fresh = self._open(self._path)
            self._stream.close()
            self._stream = fresh

    def _complain(self, problem: Exception) -> None:
        if self._path is not None and not self._told:
            self._told = True
            try:
                print(f"turnstile: the log cannot be written to {self._path}: {problem}", file=sys.stderr)
            except (OSError, ValueError):
                pass


class _Line:
    """What structlog calls a logger: it takes finished lines."""

    def __init__(self, sink: Sink, name: str) -> None:
        self.name = name
        self._sink = sink

    def msg(self, line: str) -> None:
        self._sink.write(line)

    debug = info = warning = warn = error = critical = exception = log = msg


class _Bridge(logging.Handler):
    """Lines of libraries that use the standard `logging`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            log = structlog.get_logger(record.name)
            level = min(max(record.levelno, logging.DEBUG), logging.ERROR) // 10 * 10
            log.log(level, record.getMessage(), exc_info=record.exc_info or None)
        except Exception:
            self.handleError(record)


# ------------------------------------------------------------------------------------------------ from event to line


def _add_logger(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    event["logger"] = logger.name
    return event


def _add_level(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    event["level"] = {"warning": "warn", "exception": "error", "critical": "error"}.get(method, method)
    return event


def _add_time(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    now = time.time()
    event["time"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    return event


def _add_error(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """The traceback of `exc_info`, as text."""
    return structlog.processors.format_exc_info(logger, method, event)


class _Json:
    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> str:
        first = {key: event.pop(key) for key in ("time", "level", "logger")}
        return json.dumps({**first, **event}, default=str, ensure_ascii=False)


class _Text:
    """`time level logger event key=value …`, with a traceback in lines of its own below."""

    def __init__(self, colours: bool) -> None:
        self._colours = colours

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> str:
        moment, level, name = event.pop("time"), event.pop("level"), event.pop("logger")
        what, traceback = str(event.pop("event", "")), event.pop("exception", None)
        parts = [
            self._paint(_DIM, moment),
            self._paint(_LEVEL_COLOUR[level], f"{level:5}"),
            self._paint(_DIM, name),
            self._paint(_arrow_colour(what, event.get("status")), plain(what)),
            *self._pairs(event),
        ]
        line = " ".join(part for part in parts if part)
        return line if traceback is None else f"{line}\n{traceback}"

    def _pairs(self, event: EventDict) -> Iterable[str]:
        for key, value in event.items():
            yield self._paint(_DIM, f"{key}=") + shown(value)

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_RESET}" if self._colours and text else text


def _arrow_colour(what: str, status: Any) -> str:
    """A request is cyan; an answer green, yellow or red by its class; everything else stands out a little."""
    if what.startswith("-->"):
        return _CYAN
    if not what.startswith("<--") or not isinstance(status, int):
        return _BOLD
    return _GREEN if status < 400 else _YELLOW if status < 500 else _RED


def plain(text: str) -> str:
    """Text that cannot break out of its line or colour the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: Any) -> str:
    """A value: bare where that is unambiguous, else in quotes."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else str(value)
    if isinstance(value, str) and (not text or any(c in text for c in ' "=') or not text.isprintable()):
        return json.dumps(text, ensure_ascii=not text.isprintable())
    return plain(text)
