"""Settings: names, defaults, precedence, and one clear line for every mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_turnstile.core.routes import UnknownModel
from gpu_turnstile.presets.values import Address, ApiKey
from gpu_turnstile.settings import SPECS, Settings, SettingsError, parse_env

DOCS = Path(__file__).parent.parent / "docs" / "settings.md"
NOWHERE = Path("/nonexistent/turnstile")


def load(environ: dict[str, str] | None = None, path: Path | None = None, program: Path = NOWHERE) -> Settings:
    return Settings.load(path, environ or {}, program)


def problem(environ: dict[str, str] | None = None, path: Path | None = None, program: Path = NOWHERE) -> str:
    with pytest.raises(SettingsError) as caught:
        load(environ, path, program)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    return tmp_path / "gpu-turnstile.env"


# ------------------------------------------------------------------------------------------------ names and defaults

DEFAULTS: dict[str, Any] = {
    "LISTEN_OLLAMA": Address("", 11434),
    "LISTEN_COMFY": Address("", 8188),
    "OLLAMA_URL": "http://127.0.0.1:11435",
    "COMFY_URL": "http://127.0.0.1:8189",
    "UNLOAD_TIMEOUT": 60,
    "JOB_TIMEOUT": 900,
    "LLM_WAIT_TIMEOUT": 600,
    "LLM_BUSY_MODE": "wait",
    "LLM_BUSY_STATUS": 503,
    "BUSY_RETRY_AFTER": 30,
    "WARM_MODEL": None,
    "LOGLEVEL": "warn",
    "LOG_FORMAT": "text",
    "LOG_FILE": None,
    "UNLOAD_POLL_INTERVAL": 0.5,
    "HISTORY_POLL_INTERVAL": 1,
    "PROBE_TIMEOUT": 5,
    "FREE_TIMEOUT": 30,
    "WARM_TIMEOUT": 120,
    "SHUTDOWN_TIMEOUT": 10,
    "BACKOFF_INITIAL": 1,
    "BACKOFF_MAX": 60,
    "PROMPT_CAPTURE_LIMIT": 65536,
    "AUTO_UPDATE": True,
    "UPDATE_INTERVAL": 21600,
    "UPDATE_REPO": "https://git.rambossek.at/PUBLIC/gpu-turnstile",
    "UPDATE_ASSET": "gpu-turnstile.exe",
    "NO_COLOR": False,
    "LLMC_DRAIN_GRACE_S": 60,
    "LLMC_HEALTH_TIMEOUT": 900,
    "LLMC_VRAM_LIMIT_GB": 32,
    "LLMC_VRAM_RESERVE_GB": 6,
    "LLMC_VRAM_UNKNOWN": "allow",
    "LLMC_LOCK_TTL_S": 900,
    "LLMC_IDLE_UNLOAD_S": 0,
    "LLMC_IDLE_RESTORE": None,
    "LLMC_IDLE_RESTORE_S": 120,
    "LLMC_WATCHDOG_S": 300,
    "LLMC_UNKNOWN_MODEL": UnknownModel.ERROR,
    "TURNSTILE_GPU": "auto",
    "TURNSTILE_COLOCATE": False,
    "TURNSTILE_DRAIN_GRACE": None,
    "TURNSTILE_IMAGE_BATCH_MAX_WAIT": 60,
    "TURNSTILE_POLICY": "amortised",
    "TURNSTILE_MAX_WAIT": 180,
    "LLMC_OPEN_UNLOCK": False,
    "LLMC_PREFETCH": True,
    "LLMC_CONTEXT_SAVE": True,
    "LLMC_CONTEXT_DIR": None,
    "LLMC_CONTEXT_LIMIT_GB": 20,
    "LLMC_CONTEXT_MAX_AGE_S": 86_400,
    "LLMC_CONTEXT_MIN_TOKENS": 1024,
    "LLMC_CONTEXT_BUDGET_S": 10,
    "LLMC_SLEEP_RAM_GB": 32,
    "LLMC_SLEEP_TIMEOUT_S": 120,
    "LLMC_ROLLBACK": True,
    "TURNSTILE_BYPASS": "wait",
    "TURNSTILE_BYPASS_POLL": 5.0,
    "TURNSTILE_BODY_LIMIT": 256 * 2**20,
    "TURNSTILE_HEAD_LIMIT": 64 * 2**10,
    "TURNSTILE_MAX_HEADERS": 256,
    "TURNSTILE_MAX_CONNECTIONS": 10_000,
    "TURNSTILE_HEAD_TIMEOUT": 60,
    "TURNSTILE_IDLE_TIMEOUT": 300,
    "TURNSTILE_BODY_TIMEOUT": 120,
    "TURNSTILE_UPSTREAM_IDLE": 0.5,
    "TURNSTILE_CONNECT_TIMEOUT": 10,
    "TURNSTILE_KEEPALIVE_INTERVAL": 15,
    "TURNSTILE_ALLOWED_HOSTS": (),
    "TURNSTILE_ALLOWED_ORIGINS": (),
    "TURNSTILE_API_KEYS": (),
}


def test_every_default_is_the_documented_one() -> None:
    settings = load()
    assert {name: getattr(settings, name.lower()) for name in SPECS} == DEFAULTS
    assert settings == Settings()
    assert settings.warnings == ()


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        load().loglevel = "debug"  # type: ignore[misc]


def test_the_documentation_lists_every_setting_with_its_default_and_meaning() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| (.*?) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name: (default.strip("`"), meaning) for name, default, meaning in rows}
    in_code = {name: (spec.default or "(empty)", spec.meaning) for name, spec in SPECS.items()}
    assert documented == in_code


# ------------------------------------------------------------------------------------------------------------ values

VALUES: list[tuple[str, str, Any]] = [
    ("UNLOAD_TIMEOUT", "1m30s", 90),
    ("JOB_TIMEOUT", "1.5h", 5400),
    ("UNLOAD_POLL_INTERVAL", "100us", 0.0001),
    ("UNLOAD_POLL_INTERVAL", " 20ns ", 2e-8),
    ("LISTEN_OLLAMA", "127.0.0.1:11434", Address("127.0.0.1", 11434)),
    ("OLLAMA_URL", "http://gpu_box:11435/", "http://gpu_box:11435"),
    ("OLLAMA_URL", "off", None),
    ("LLM_BUSY_MODE", "Reject", "reject"),
    ("LLM_BUSY_STATUS", "429", 429),
    ("LOGLEVEL", "DEBUG", "debug"),
    ("LOGLEVEL", "warning", "warn"),
    ("LOG_FILE", "C:\\ProgramData\\new.log", "C:\\ProgramData\\new.log"),
    ("AUTO_UPDATE", "False", False),
    ("NO_COLOR", "1", True),
    ("NO_COLOR", "", False),
    ("LLMC_DRAIN_GRACE_S", "2.5", 2.5),
    ("LLMC_HEALTH_TIMEOUT", "30", 30),
    ("LLMC_VRAM_LIMIT_GB", "23.5", 23.5),
    ("LLMC_UNKNOWN_MODEL", "resident", UnknownModel.RESIDENT),
    ("TURNSTILE_BODY_LIMIT", "1GB", 10**9),
    ("TURNSTILE_DRAIN_GRACE", "2m", 120),
    ("TURNSTILE_DRAIN_GRACE", "0", 0),
    ("TURNSTILE_GPU", "sim:/tmp/card", "sim:/tmp/card"),
    ("TURNSTILE_COLOCATE", "on", True),
    ("TURNSTILE_ALLOWED_HOSTS", "Gpu.Home, 10.0.0.2,::1", ("gpu.home", "10.0.0.2", "[::1]")),
    ("TURNSTILE_ALLOWED_ORIGINS", "http://localhost:3000,app://x", ("http://localhost:3000", "app://x")),
    ("TURNSTILE_API_KEYS", "ci:a:b, me:k", (ApiKey("ci", "a:b"), ApiKey("me", "k"))),
    ("UNLOAD_TIMEOUT", "", 60),
    ("LLM_BUSY_STATUS", "", 503),
]


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_a_value_is_read(name: str, text: str, value: object) -> None:
    assert getattr(load({name: text}), name.lower()) == value


MISTAKES: list[tuple[str, str, str]] = [
    ("UNLOAD_TIMEOUT", "60", 'did you mean "60s"'),
    ("UNLOAD_POLL_INTERVAL", "0", "more than 0"),
    ("LISTEN_OLLAMA", "11434", 'did you mean ":11434"'),
    ("OLLAMA_URL", "localhost:11435", 'did you mean "http://localhost:11435"'),
    ("LLM_BUSY_MODE", "waits", "wait, reject"),
    ("LLM_BUSY_STATUS", "200", "400 to 599"),
    ("LLM_BUSY_STATUS", "4_04", "400 to 599"),
    ("BUSY_RETRY_AFTER", "30s", "whole number"),
    ("LOGLEVEL", "loud", "debug, info, warn, error"),
    ("PROMPT_CAPTURE_LIMIT", "0", "more than 0"),
    ("AUTO_UPDATE", "maybe", "on, off"),
    ("LLMC_VRAM_LIMIT_GB", "nan", "32, 23.5"),
    ("LLMC_VRAM_LIMIT_GB", "0", "more than 0"),
    ("TURNSTILE_BODY_LIMIT", "10 apples", "256MiB"),
    ("TURNSTILE_GPU", "cuda", "nvml"),
    ("TURNSTILE_GPU", "sim:", "sim:PATH"),
    ("TURNSTILE_ALLOWED_ORIGINS", "localhost:3000", "origin"),
    ("TURNSTILE_ALLOWED_HOSTS", "http://x", "address"),
]


@pytest.mark.parametrize(("name", "text", "hint"), MISTAKES)
def test_a_mistake_stops_the_start_with_one_line_that_says_what_would_be_valid(name: str, text: str, hint: str) -> None:
    message = problem({name: text})
    assert message.startswith(f"environment: {name}: ")
    assert hint in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"LISTEN_OLLAMA": "off", "LISTEN_COMFY": ""}, ("LISTEN_OLLAMA", "LISTEN_COMFY")),
        ({"LISTEN_OLLAMA": "127.0.0.1:8188"}, ("LISTEN_COMFY", "LISTEN_OLLAMA")),
        ({"BACKOFF_MAX": "500ms"}, ("BACKOFF_MAX", "BACKOFF_INITIAL")),
        ({"LLMC_VRAM_LIMIT_GB": "6"}, ("LLMC_VRAM_RESERVE_GB", "LLMC_VRAM_LIMIT_GB")),
        ({"OLLAMA_URL": "http://localhost:11434"}, ("OLLAMA_URL", "LISTEN_OLLAMA", "another port")),
        ({"COMFY_URL": "http://127.0.0.1:11434"}, ("COMFY_URL", "LISTEN_OLLAMA")),
        ({"OLLAMA_URL": "http://127.0.0.1", "LISTEN_OLLAMA": ":80"}, ("OLLAMA_URL", "LISTEN_OLLAMA")),
    ],
)
def test_settings_that_contradict_each_other_are_refused(environ: dict[str, str], parts: tuple[str, ...]) -> None:
    message = problem(environ)
    assert all(part in message for part in parts)


def test_an_upstream_on_another_machine_or_address_may_have_the_listeners_port() -> None:
    load({"OLLAMA_URL": "http://gpu-box:11434"})
    load({"OLLAMA_URL": "http://127.0.0.1:11434", "LISTEN_OLLAMA": "10.0.0.5:11434"})


def test_a_default_upstream_that_is_the_gate_itself_is_only_a_warning() -> None:
    (warning,) = load({"LISTEN_OLLAMA": ":11435"}).warnings
    assert "OLLAMA_URL" in warning


@given(st.sampled_from(sorted(SPECS)), st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_at_all_is_either_a_value_or_one_line(name: str, text: str) -> None:
    message = ""
    try:
        load({name: text})
    except SettingsError as caught:
        message = str(caught)
    assert message.isprintable()


# ---------------------------------------------------------------------------------------------------------- the file

ENV_LINES: list[tuple[str, list[tuple[str, str]]]] = [
    ("A=1", [("A", "1")]),
    ("# A=1\n\n  # B=2\n", []),
    ("export A=1", [("A", "1")]),
    ("export = 1", [("export", "1")]),
    (" A = 1 2 ", [("A", "1 2")]),
    ("A=", [("A", "")]),
    ("A= # nothing", [("A", "")]),
    ("A=1 # one", [("A", "1")]),
    ("A=a#b", [("A", "a#b")]),
    ('A="x # y" # z', [("A", "x # y")]),
    ("A='say \"hi\"'", [("A", 'say "hi"')]),
    ('A="C:\\new"', [("A", "C:\\new")]),
    ("A=it's", [("A", "it's")]),
    ("A=$HOME", [("A", "$HOME")]),
    ("A=b=c", [("A", "b=c")]),
    ("A=1\r\nB=2\r\n", [("A", "1"), ("B", "2")]),
    ("A=x\x0by", [("A", "x\x0by")]),
]


@pytest.mark.parametrize(("text", "pairs"), ENV_LINES)
def test_an_env_file_is_read(text: str, pairs: list[tuple[str, str]]) -> None:
    assert [(key, value) for _, key, value in parse_env(text, "f")] == pairs


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("LOGLEVEL=warn\nnonsense", ":2: "),
        ("LOGLEVEL=warn\n\nUNLOAD_TIMEOUT=60", ":3: UNLOAD_TIMEOUT: "),
        ("=5", "KEY=VALUE"),
        ("1A=5", "KEY=VALUE"),
        ('LOGLEVEL="warn', "never closed"),
        ('LOGLEVEL="warn" info', "after the closing quote"),
        ("LLMC_DRAIN_GRACE=5", "did you mean LLMC_DRAIN_GRACE_S?"),
        ("TURNSTILE_BODYLIMIT=5", "did you mean TURNSTILE_BODY_LIMIT?"),
        ("turnstile_gpu=none", "did you mean TURNSTILE_GPU?"),
    ],
)
def test_a_malformed_file_is_fatal_and_the_line_is_named(env_file: Path, text: str, hint: str) -> None:
    env_file.write_text(text)
    message = problem(path=env_file)
    assert str(env_file) in message
    assert hint in message


def test_a_mistake_in_the_file_is_fatal_although_the_environment_overrides_it(env_file: Path) -> None:
    env_file.write_text("UNLOAD_TIMEOUT=soon")
    assert "UNLOAD_TIMEOUT" in problem({"UNLOAD_TIMEOUT": "5s"}, env_file)


@pytest.mark.parametrize("content", [b"\xff\xfeL\x00O\x00", b"LOG_FILE=\xe4.log"])
def test_a_file_that_is_not_utf_8_is_fatal(env_file: Path, content: bytes) -> None:
    env_file.write_bytes(content)
    assert "UTF-8" in problem(path=env_file)


def test_a_byte_order_mark_is_accepted(env_file: Path) -> None:
    env_file.write_bytes(b"\xef\xbb\xbfLOGLEVEL=info\r\n")
    assert load(path=env_file).loglevel == "info"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert "cannot be read" in problem(path=tmp_path)


def test_the_environment_overrides_the_file_and_both_are_named_as_source(env_file: Path) -> None:
    env_file.write_text("JOB_TIMEOUT=1m\nLLM_BUSY_MODE=reject\n")
    settings = load({"JOB_TIMEOUT": "2m"}, env_file)
    assert (settings.job_timeout, settings.llm_busy_mode) == (120, "reject")
    assert settings.source("JOB_TIMEOUT") == "environment"
    assert settings.source("LLM_BUSY_MODE") == f"{env_file}:2"
    assert settings.source("OLLAMA_URL") == "default"
    assert Settings(ollama_url="http://x").source("OLLAMA_URL") == "code"
    assert settings.file == env_file


def test_an_empty_variable_is_no_variable_where_empty_means_nothing(env_file: Path) -> None:
    env_file.write_text("JOB_TIMEOUT=1m\nWARM_MODEL=llama3\n")
    settings = load({"JOB_TIMEOUT": "", "WARM_MODEL": ""}, env_file)
    assert settings.job_timeout == 60
    assert settings.warm_model is None


def test_the_file_is_looked_for_in_the_documented_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {}
    for name, level in (("flag", "debug"), ("variable", "info"), ("bin", "error"), ("here", "warn")):
        (tmp_path / name).mkdir()
        files[name] = tmp_path / name / "gpu-turnstile.env"
        files[name].write_text(f"LOGLEVEL={level}")
    (tmp_path / "link").symlink_to(tmp_path / "bin" / "turnstile")
    (tmp_path / "bin" / "turnstile").touch()
    monkeypatch.chdir(tmp_path / "here")
    variable = {"GPU_TURNSTILE_CONFIG": str(files["variable"])}
    assert load(variable, files["flag"], tmp_path / "link").loglevel == "debug"
    assert load(variable, None, tmp_path / "link").loglevel == "info"
    assert load({}, None, tmp_path / "link").loglevel == "error"
    assert load({"GPU_TURNSTILE_CONFIG": ""}, None, tmp_path / "link").loglevel == "error"
    files["bin"].unlink()
    assert load({}, None, tmp_path / "link").file is None


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_named_file_that_is_missing_is_fine_but_is_said(env_file: Path, by_flag: bool) -> None:
    settings = load({}, env_file) if by_flag else load({"GPU_TURNSTILE_CONFIG": str(env_file)})
    assert settings.file is None
    assert str(env_file) in settings.warnings[0]


def test_other_programs_keys_in_a_shared_file_are_only_warned_about(env_file: Path) -> None:
    env_file.write_text("POSTGRES_DB=x\nJOB_TIMOUT=5s\n")
    first, second = load(path=env_file).warnings
    assert first == f"{env_file}:1: POSTGRES_DB is not a setting"
    assert second.endswith("did you mean JOB_TIMEOUT?")


def test_a_misspelt_variable_of_ours_in_the_environment_is_warned_about() -> None:
    (warning,) = load({"LLMC_LOCK_TTL": "5", "PATH": "/bin", "JOB_TIMOUT": "x"}).warnings
    assert "did you mean LLMC_LOCK_TTL_S?" in warning


def test_variables_of_commands_are_no_settings_and_no_mistakes() -> None:
    told = load(
        environ={"TURNSTILE_URL": "x", "TURNSTILE_OWNER": "me", "TURNSTILE_LOCK": "7", "TURNSTILE_API_KEY": "x"}
    )
    assert told.warnings == ("environment: TURNSTILE_API_KEY is not a setting; did you mean TURNSTILE_API_KEYS?",)


def test_a_key_that_is_there_twice_is_warned_about_and_the_last_one_counts(env_file: Path) -> None:
    env_file.write_text("JOB_TIMEOUT=1m\nJOB_TIMEOUT=2m")
    settings = load(path=env_file)
    assert settings.job_timeout == 120
    assert "line 1" in settings.warnings[0]


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({"LOG_LEVEL": "info"}, "info"),
        ({"LOG_LEVEL": "info", "LOGLEVEL": "debug"}, "debug"),
        ({"LOGLEVEL": "debug", "LOG_LEVEL": "info"}, "debug"),
    ],
)
def test_log_level_is_an_alias_and_the_name_beats_it(environ: dict[str, str], level: str) -> None:
    assert load(environ).loglevel == level


# ------------------------------------------------------------------------------------------------- explaining, secrets


def test_explain_lists_every_setting_with_value_source_default_and_meaning() -> None:
    rows = {row.name: row for row in load({"JOB_TIMEOUT": "2m"}).explain()}
    assert list(rows) == list(SPECS)
    assert rows["JOB_TIMEOUT"][1:4] == ("2m", "environment", "15m")
    assert rows["UNLOAD_TIMEOUT"][1:4] == ("60s", "default", "60s")
    assert all(row.meaning for row in rows.values())


def test_updates_are_plainly_said_to_do_nothing() -> None:
    assert all("no effect" in row.meaning for row in Settings().explain() if "UPDATE" in row.name)
    assert load({}).warnings == ()
    assert load({"AUTO_UPDATE": "off"}).warnings == ()
    for name, value in (("AUTO_UPDATE", "true"), ("UPDATE_INTERVAL", "1h"), ("UPDATE_ASSET", "x")):
        (warning,) = load({name: value}).warnings
        assert warning.startswith(f"environment: {name} has no effect")


@pytest.mark.parametrize("text", ["s3cret", "a:s3cret,b:s3cret", "me:s3cret x", "m e:s3cret"])
def test_a_secret_is_in_no_message(text: str) -> None:
    assert "s3cret" not in problem({"TURNSTILE_API_KEYS": text})


def test_a_secret_is_in_no_listing_but_its_owner_is() -> None:
    settings = load({"TURNSTILE_API_KEYS": "me:s3cret"})
    assert "s3cret" not in repr(settings)
    assert "s3cret" not in str(settings.explain())
    assert "me:***" in str(settings.explain())


def test_the_password_of_a_url_is_not_repeated() -> None:
    assert "s3cret" not in problem({"OLLAMA_URL": "http://me:s3cret@gpu"})


def test_a_malformed_line_is_not_repeated_because_it_may_hold_a_secret(env_file: Path) -> None:
    env_file.write_text("TURNSTILE_API_KEYS me:s3cret")
    assert "s3cret" not in problem(path=env_file)
