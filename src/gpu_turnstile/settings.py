"""Every setting of the gate: one table, read once at start from the environment and an .env file.

A setting is declared once, in `Settings`: kind, default as a person would write it, meaning. Its attribute is its
variable's name in small letters, always. Names and defaults of the two founding documents are kept to the letter;
what neither names is `TURNSTILE_…` (the whole gate) or `LLMC_…` (engines the gate owns).

Invariant: a `Settings` that `load` returns is complete and consistent; everything else is a `SettingsError`, one line
that says where, which key, what is wrong and what would be right. Secrets are in no message and no listing.
Attributes hold seconds (float), bytes (int) and GB (float).
"""

# ruff: noqa: RUF009 (`_setting` is `dataclasses.field` with a parser; every default is immutable)

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gpu_turnstile.core.policy import Order
from gpu_turnstile.core.routes import UnknownModel
from gpu_turnstile.presets import values as v
from gpu_turnstile.presets.values import Address, ApiKey

CONFIG_VARIABLE = "GPU_TURNSTILE_CONFIG"
FILE_NAME = "gpu-turnstile.env"
ALIASES = {"LOG_LEVEL": "LOGLEVEL"}
OWN_PREFIXES = ("LLMC_", "TURNSTILE_")

_KEY_VALUE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_.-]*)\s*=(.*)")
_QUOTES = ('"', "'")
_WILDCARDS = ("", "0.0.0.0", "::")
_LOOPBACKS = ("localhost", "127.0.0.1", "::1", *_WILDCARDS)


class SettingsError(Exception):
    """The start must stop. `str()` is one line for a person."""


class Row(NamedTuple):
    """One line of the list of settings. `value` is as it was written, secrets masked."""

    name: str
    value: str
    source: str
    default: str
    meaning: str


class Given(NamedTuple):
    """A setting that somebody set: as it was written, and where (`environment` or `file:line`)."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Spec:
    """What a setting is. `parse` raises ValueError with the rest of a sentence that begins with the value."""

    parse: Callable[[str], Any]
    default: str
    meaning: str
    secret: bool

    @property
    def accepts_empty(self) -> bool:
        """Whether an empty value means something. Where it does not, it is the same as no value at all."""
        try:
            self.parse("")
        except ValueError:
            return False
        return True


def _setting(parse: Callable[[str], Any], default: str, meaning: str, secret: bool = False) -> Any:
    return field(default=parse(default), metadata={"spec": Spec(parse, default, meaning, secret)})


# Kinds of values that several settings share.
_wait = v.duration
_time = v.more_than_zero(v.duration)
_seconds = v.seconds
_bytes = v.more_than_zero(v.size)
_count = v.whole(1, 1_000_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All settings. Built by `load`; a test or a tool may also name a few and get the defaults for the rest."""

    # The gate in front of externally run engines: the turnstile document.
    listen_ollama: Address | None = _setting(v.address, ":11434", "main listener (LLM, control); off = none")
    listen_comfy: Address | None = _setting(v.address, ":8188", "ComfyUI-facing listener; off = none")
    ollama_url: str | None = _setting(v.upstream, "http://127.0.0.1:11435", "the external Ollama; off = none")
    comfy_url: str | None = _setting(v.upstream, "http://127.0.0.1:8189", "the external ComfyUI; off = none")
    unload_timeout: float = _setting(_wait, "60s", "how long an unload may take until the memory is free")
    job_timeout: float = _setting(_time, "15m", "how long one ComfyUI job may take")
    llm_wait_timeout: float = _setting(_wait, "10m", "longest wait of an LLM request, then 503; 0 = no wait")
    llm_busy_mode: str = _setting(
        v.one_of("wait", "reject"), "wait", "a blocked LLM request is held (wait) or refused at once (reject)"
    )
    llm_busy_status: int = _setting(v.whole(400, 599), "503", "HTTP status of a refusal in reject mode")
    busy_retry_after: int = _setting(v.whole(0, 86_400), "30", "seconds in Retry-After of busy answers")
    warm_model: str | None = _setting(v.text_or_none, "", "Ollama model loaded again after an image job; empty = none")
    loglevel: str = _setting(
        v.one_of("debug", "info", "warn", "error", warning="warn"),
        "warn",
        "info logs every request, debug every lock transition; LOG_LEVEL is the same setting",
    )
    log_format: str = _setting(v.one_of("text", "json"), "text", "json = one JSON object per line")
    log_file: str | None = _setting(v.text_or_none, "", "append the log to this file; empty = standard error")
    unload_poll_interval: float = _setting(_time, "500ms", "pause between two looks at /api/ps while unloading")
    history_poll_interval: float = _setting(_time, "1s", "pause between two looks at /history while a job runs")
    probe_timeout: float = _setting(_time, "5s", "limit of the probe of each upstream at start")
    free_timeout: float = _setting(_time, "30s", "limit of the call to ComfyUI's /free after a job")
    warm_timeout: float = _setting(_time, "2m", "limit of the warm-up after an image job")
    shutdown_timeout: float = _setting(_wait, "10s", "how long open requests may run on at shutdown")
    backoff_initial: float = _setting(_time, "1s", "first pause before an upstream that refused is tried again")
    backoff_max: float = _setting(_time, "60s", "longest such pause; it doubles from try to try")
    prompt_capture_limit: int = _setting(_bytes, "65536", "bytes of the /prompt answer kept to find prompt_id")
    auto_update: bool = _setting(
        v.switch, "true", "no effect: this build has no key to check releases with, so nothing is fetched"
    )
    update_interval: float = _setting(_time, "6h", "no effect, as AUTO_UPDATE")
    update_repo: str = _setting(v.web_url, "https://git.rambossek.at/PUBLIC/gpu-turnstile", "no effect, as AUTO_UPDATE")
    update_asset: str = _setting(str, "gpu-turnstile.exe", "no effect, as AUTO_UPDATE")
    no_color: bool = _setting(bool, "", "any value switches colours off, also on a terminal")

    # Engines the gate owns: the swap document. A plain number is seconds.
    llmc_drain_grace_s: float = _setting(_seconds, "60", "seconds open requests may hold a swap off")
    llmc_health_timeout: float = _setting(v.more_than_zero(_seconds), "900", "seconds a started engine has to be ready")
    llmc_vram_limit_gb: float = _setting(v.more_than_zero(v.gigabytes), "32", "GB of the card")
    llmc_vram_reserve_gb: float = _setting(v.gigabytes, "6", "GB of it that presets may not use")
    llmc_vram_unknown: str = _setting(
        v.one_of("allow", "refuse"), "allow", "a swap on a card whose use cannot be read goes ahead, or is refused"
    )
    llmc_lock_ttl_s: float = _setting(v.more_than_zero(_seconds), "900", "seconds a lock or a place in its queue lives")
    llmc_idle_unload_s: float = _setting(_seconds, "0", "seconds without work until an engine is stopped; 0 = never")
    llmc_idle_restore: str | None = _setting(
        v.text_or_none, "", "preset brought back when another one has had nothing to do for a while; empty = none"
    )
    llmc_idle_restore_s: float = _setting(v.more_than_zero(_seconds), "120", "seconds of that while")
    llmc_watchdog_s: float = _setting(
        v.zero_or_at_least(10, _seconds),
        "300",
        "seconds without a byte or progress until a live engine is restarted as stuck; 0 = never",
    )
    llmc_open_unlock: bool = _setting(v.switch, "off", "anybody may end others' locks without force")
    llmc_prefetch: bool = _setting(
        v.switch, "on", "while a preset drains, the model files of the next one are read into the page cache"
    )
    llmc_context_save: bool = _setting(
        v.switch, "on", "conversations are saved before an engine leaves and given back; off also drops what is there"
    )
    llmc_context_dir: str | None = _setting(
        v.text_or_none, "", "where they are saved (transcripts: keep it private); empty = contexts in the state folder"
    )
    llmc_context_limit_gb: float = _setting(v.gigabytes, "20", "GB they may take, the oldest go first; 0 = no limit")
    llmc_context_max_age_s: float = _setting(_seconds, "86400", "seconds until one is removed; 0 = never")
    llmc_context_min_tokens: int = _setting(
        v.whole(1, 100_000_000), "1024", "tokens: shorter conversations are not saved"
    )
    llmc_context_budget_s: float = _setting(
        v.more_than_zero(_seconds), "10", "seconds a save, and a restore, may add to a swap at most"
    )
    llmc_sleep_ram_gb: float = _setting(
        v.gigabytes, "32", "GB of main memory that sleeping engines may hold, the longest asleep is ended; 0 = no limit"
    )
    llmc_sleep_timeout_s: float = _setting(
        v.more_than_zero(_seconds), "120", "seconds an engine may take to fall asleep, or to wake, before it is stopped"
    )
    llmc_rollback: bool = _setting(v.switch, "on", "after a failed swap the preset that had to leave for it comes back")
    llmc_unknown_model: UnknownModel = _setting(
        lambda text: UnknownModel(v.one_of("error", "resident")(text)),
        "error",
        "a model nobody knows is a 404 (error) or goes to the preset on the card (resident)",
    )

    # The card and how it is shared.
    turnstile_gpu: str = _setting(v.gpu, "auto", "how memory is read: auto, none, nvml, sysfs, or sim:PATH")
    turnstile_colocate: bool = _setting(v.switch, "off", "on = presets that fit together stay loaded together")
    turnstile_drain_grace: float | None = _setting(
        v.optional(v.duration), "", "how long requests may hold off a change from an external engine; empty = no limit"
    )
    turnstile_image_batch_max_wait: float = _setting(
        _wait, "60s", "image jobs run back to back until an LLM request waited this long; 0 = free after every job"
    )
    turnstile_policy: Order = _setting(
        lambda text: Order(v.one_of("amortised", "arrival")(text)),
        "amortised",
        "presets share the card in turns that are worth their swap, or whoever waits longest is next (arrival)",
    )
    turnstile_max_wait: float = _setting(_wait, "3m", "a request that waited this long ends the turn of another preset")
    turnstile_bypass: str = _setting(
        v.one_of("wait", "ignore"), "wait", "ComfyUI jobs sent past the gate are waited for, or only shown"
    )
    turnstile_bypass_poll: float = _setting(_wait, "5s", "pause between two looks for work past the gate; 0 = never")

    # The data plane.
    turnstile_body_limit: int = _setting(_bytes, "256MiB", "largest request body kept to find its model; 413 above")
    turnstile_head_limit: int = _setting(_bytes, "64KiB", "largest head of a request or answer")
    turnstile_max_headers: int = _setting(_count, "256", "most header fields in one head")
    turnstile_max_connections: int = _setting(_count, "10000", "most open client connections")
    turnstile_head_timeout: float = _setting(_time, "60s", "how long a client may take to send a request head")
    turnstile_idle_timeout: float = _setting(_time, "5m", "how long an idle client connection stays open")
    turnstile_body_timeout: float = _setting(_time, "2m", "longest pause inside a request body")
    turnstile_upstream_idle: float = _setting(_wait, "500ms", "how long an idle engine connection may be used again")
    turnstile_connect_timeout: float = _setting(_time, "10s", "limit of connecting to an engine")
    turnstile_keepalive_interval: float = _setting(
        _wait, "15s", "pause between signs of life to a streaming client that waits for the card; 0 = off"
    )
    turnstile_allowed_hosts: tuple[str, ...] = _setting(v.hosts, "", "Host names that are served; empty = any")
    turnstile_allowed_origins: tuple[str, ...] = _setting(v.origins, "", "Origins that are served; empty = any")
    turnstile_api_keys: tuple[ApiKey, ...] = _setting(
        v.api_keys, "", "name:key of every client, separated by commas; empty = open to all", secret=True
    )

    # Where all this came from.
    file: Path | None = None
    warnings: tuple[str, ...] = ()
    given: Mapping[str, Given] = field(default_factory=dict, repr=False)

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        program: str | Path | None = None,
    ) -> Settings:
        """Read the file (see `find_file`), then the environment, which wins. Raises SettingsError.

        `path`: what `--config` says. `program`: the executable whose folder is searched last.
        """
        environment = os.environ if environ is None else environ
        file, warnings = find_file(path, environment, sys.argv[0] if program is None else program)
        given: dict[str, Given] = {}
        values: dict[str, Any] = {}
        file_entries = _read(file, warnings) if file else iter(())
        for name, entry in (*file_entries, *_from_environment(environment, warnings)):
            if entry.text or SPECS[name].accepts_empty:
                values[name.lower()] = _parse(name, entry)
                given[name] = entry
        settings = cls(**values, file=file, given=given)
        return replace(settings, warnings=(*warnings, *_check(settings)))

    def source(self, name: str) -> str:
        """Who set it: `default`, `environment`, `path/to/file:7`, or `code` (built without `load`)."""
        if name in self.given:
            return self.given[name].source
        spec = SPECS[name]
        return "default" if getattr(self, name.lower()) == spec.parse(spec.default) else "code"

    def explain(self) -> tuple[Row, ...]:
        """Every setting, in the order of the table: for the log at start, `turnstile settings` and the docs."""
        return tuple(
            Row(name, self._shown(name, spec), self.source(name), spec.default, spec.meaning)
            for name, spec in SPECS.items()
        )

    def _shown(self, name: str, spec: Spec) -> str:
        value = getattr(self, name.lower())
        if spec.secret:
            return ", ".join(f"{item.name}:***" for item in value)
        source = self.source(name)
        if source == "code":
            return str(value)
        return spec.default if source == "default" else self.given[name].text


SPECS: Mapping[str, Spec] = {
    item.name.upper(): item.metadata["spec"] for item in fields(Settings) if "spec" in item.metadata
}


def find_file(
    path: str | Path | None, environ: Mapping[str, str], program: str | Path
) -> tuple[Path | None, list[str]]:
    """The one file to read: `path`, else GPU_TURNSTILE_CONFIG, else gpu-turnstile.env next to the executable.

    A missing file is fine; one that somebody named and that is missing is a warning besides.
    """
    named = path or environ.get(CONFIG_VARIABLE)
    file = Path(named) if named else Path(os.path.realpath(program)).parent / FILE_NAME
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None, [f"{file}: no such file; the environment and the defaults are used"] if named else []
    except OSError as problem:
        raise SettingsError(f"{file}: cannot be read: {problem.strerror}") from None
    return file, []


def _read(file: Path, warnings: list[str]) -> Iterator[tuple[str, Given]]:
    """The settings in the file. Other programs' keys are warned about, misspelt keys of our own are fatal."""
    seen: dict[str, int] = {}
    for number, key, text in parse_env(_text(file), str(file)):
        name = ALIASES.get(key, key)
        if name not in SPECS:
            _complain(key, f"{file}:{number}", warnings, fatal=True)
            continue
        if name in seen:
            warnings.append(f"{file}:{number}: {key} overrides line {seen[name]}")
        seen[name] = number
        yield name, Given(text, f"{file}:{number}")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SettingsError(f"{file}: is not UTF-8 text; save it as UTF-8") from None
    except OSError as problem:
        raise SettingsError(f"{file}: cannot be read: {problem.strerror}") from None


def parse_env(text: str, where: str) -> Iterator[tuple[int, str, str]]:
    """(line, key, value) of every `KEY=VALUE`. Values are taken as they are: no escapes, no `$`, one line each."""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _KEY_VALUE.fullmatch(line)
        if match is None:
            raise SettingsError(f"{where}:{number}: the line is neither KEY=VALUE nor a comment that begins with #")
        yield number, match[1], _value(match[2], f"{where}:{number}: {match[1]}")


def _value(raw: str, where: str) -> str:
    text = raw.strip()
    if not text.startswith(_QUOTES):
        return re.sub(r"\s#.*", "", raw).strip()
    value, quote, rest = text[1:].partition(text[0])
    if not quote:
        raise SettingsError(f"{where}: the quote {text[0]} is never closed; a value is one line")
    if rest.strip() and not rest.lstrip().startswith("#"):
        raise SettingsError(f"{where}: there is something after the closing quote; only a # comment may follow")
    return value


# Of commands and of simulators. TURNSTILE_API_KEY is not among them: whoever means TURNSTILE_API_KEYS must be told.
FOR_CLIENTS = frozenset(("TURNSTILE_URL", "TURNSTILE_OWNER", "TURNSTILE_LOCK", "TURNSTILE_SIM_CARD"))


def _from_environment(environ: Mapping[str, str], warnings: list[str]) -> Iterator[tuple[str, Given]]:
    """The settings in the environment; a name beats its alias. The environment also holds what clients of the gate
    are told, so an unknown name of ours is only warned about."""
    for key in environ:
        if key.startswith(OWN_PREFIXES) and key not in SPECS and key not in FOR_CLIENTS:
            _complain(key, "environment", warnings, fatal=False)
    for key, name in (*ALIASES.items(), *((name, name) for name in SPECS)):
        if key in environ:
            yield name, Given(environ[key].strip(), "environment")


def _complain(key: str, where: str, warnings: list[str], fatal: bool) -> None:
    close = get_close_matches(key.upper(), SPECS, n=1, cutoff=0.75)
    hint = f"; did you mean {close[0]}?" if close else ""
    message = f"{where}: {key} is not a setting{hint}"
    if fatal and key.upper().startswith(OWN_PREFIXES):
        raise SettingsError(message)
    warnings.append(message)


def _parse(name: str, given: Given) -> Any:
    spec = SPECS[name]
    try:
        return spec.parse(given.text)
    except ValueError as problem:
        value = "the value" if spec.secret else _quoted(given.text)
        raise SettingsError(f"{given.source}: {name}: {value} {problem}") from None


def _quoted(text: str) -> str:
    """What was written, fit for one line: short, no control characters, no password of a URL."""
    text = re.sub(r"[^/\s]+:[^/\s]*@", "***@", text)
    shown = text if len(text) <= 80 else text[:80] + "…"
    return '"' + "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown) + '"'


# --------------------------------------------------------------------------------- what settings ask of each other


def _check(settings: Settings) -> list[str]:
    """Raise where two settings cannot both be meant; return what only looks wrong."""
    if settings.backoff_max < settings.backoff_initial:
        raise _conflict(settings, "BACKOFF_MAX", "must not be less than BACKOFF_INITIAL")
    if settings.llmc_vram_reserve_gb >= settings.llmc_vram_limit_gb:
        raise _conflict(settings, "LLMC_VRAM_RESERVE_GB", "must be less than LLMC_VRAM_LIMIT_GB, or no preset fits")
    ollama, comfy = settings.listen_ollama, settings.listen_comfy
    if ollama is None and comfy is None:
        raise _conflict(settings, "LISTEN_OLLAMA", "is off and so is LISTEN_COMFY: there is nothing to listen on")
    if ollama and comfy and ollama.port and ollama.port == comfy.port and _meet(ollama.host, comfy.host):
        raise _conflict(settings, "LISTEN_COMFY", "is the same address as LISTEN_OLLAMA")
    return [*_loops(settings), *_without_effect(settings)]


def _without_effect(settings: Settings) -> Iterator[str]:
    """The turnstile document's own rule: a build without a key to check releases with never updates itself."""
    for name in SPECS:
        asked = (name == "AUTO_UPDATE" and settings.auto_update) or name.startswith("UPDATE_")
        if asked and settings.source(name) != "default":
            yield (
                f"{settings.source(name)}: {name} has no effect: this build has no key to check releases with, "
                "so it never updates itself; update it by hand, and say AUTO_UPDATE=off"
            )


def _conflict(settings: Settings, name: str, message: str) -> SettingsError:
    value = next(row.value for row in settings.explain() if row.name == name)
    return SettingsError(f"{settings.source(name)}: {name}: {_quoted(value)} {message}")


def _meet(one: str, other: str) -> bool:
    return one == other or one in _WILDCARDS or other in _WILDCARDS


def _loops(settings: Settings) -> Iterator[str]:
    """Upstreams that are the gate itself. Fatal where somebody wrote them; a default may yet go unused."""
    for name, url in (("OLLAMA_URL", settings.ollama_url), ("COMFY_URL", settings.comfy_url)):
        for listener in ("LISTEN_OLLAMA", "LISTEN_COMFY"):
            address = getattr(settings, listener.lower())
            if url is None or address is None or not _same_place(url, address):
                continue
            message = f"{name}: {url} is the gate's own {listener}; the engine needs another port"
            if settings.source(name) != "default":
                raise SettingsError(f"{settings.source(name)}: {message}")
            yield message


def _same_place(url: str, address: Address) -> bool:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if (parts.port or 80) != address.port or host not in _LOOPBACKS:
        return False
    return host == address.host or "localhost" in (host, address.host) or _meet(host, address.host)
