"""The `llama-server` command line over xllamacpp: llama.cpp's own server core, from a wheel, without a compiler.

    python tools/llama_server.py -m MODEL.gguf --port 8080 -c 8192 -np 2 …

It takes llama-server's flags by their own names, and their LLAMA_ARG_… variables where a flag is not given. What a
flag means is the core's business: each is a row in a table that says which parameter it sets.

Two things differ from the binary: there is no router mode (a model is required), and SIGTERM ends at once with 0
instead of waiting for open responses.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

STOP = {signal.SIGTERM, signal.SIGINT}


@dataclass(frozen=True)
class Flag:
    """An option with a value: its spellings, the parameter it sets (a dot goes into a member), how it is read."""

    names: str
    target: str
    read: Callable[[str], Any] = str
    variable: str | None = None


@dataclass(frozen=True)
class Switch:
    """An option without a value: what it sets its parameter to."""

    names: str
    target: str
    value: Any
    variable: str | None = None  # sets a parameter that is true or false


class UsageError(Exception):
    pass


def _words(text: str) -> list[str]:
    return text.split(",")


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _folder(path: str) -> str:
    return os.path.join(path, "")  # the core appends file names to it as it is


def _layers(text: str) -> int:
    return {"auto": -1, "all": -2}.get(text) or int(text)


# Enums are read as the name of a member; `apply` looks it up where the parameter is.


def _cache_type(word: str) -> str:
    return f"GGML_TYPE_{word.upper()}"


def _flash_attention(word: str) -> str:
    member = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[word]
    return f"LLAMA_FLASH_ATTN_TYPE_{member}"


def _reasoning(word: str) -> str:
    return f"COMMON_REASONING_FORMAT_{word.upper().replace('-', '_')}"


FLAGS: tuple[Flag | Switch, ...] = (
    Flag("-m --model", "model.path", str, "LLAMA_ARG_MODEL"),
    Flag("-a --alias", "model_alias", lambda text: set(_words(text)), "LLAMA_ARG_ALIAS"),
    Flag("--host", "hostnames", _words, "LLAMA_ARG_HOST"),
    Flag("--port", "port", int, "LLAMA_ARG_PORT"),
    Flag("--api-key", "api_keys", _words, "LLAMA_API_KEY"),
    Flag("-c --ctx-size", "n_ctx", int, "LLAMA_ARG_CTX_SIZE"),
    Flag("-np --parallel", "n_parallel", int, "LLAMA_ARG_N_PARALLEL"),
    Flag("-n --predict --n-predict", "n_predict", int, "LLAMA_ARG_N_PREDICT"),
    Flag("-b --batch-size", "n_batch", int, "LLAMA_ARG_BATCH"),
    Flag("-ub --ubatch-size", "n_ubatch", int, "LLAMA_ARG_UBATCH"),
    Flag("-t --threads", "cpuparams.n_threads", int, "LLAMA_ARG_THREADS"),
    Flag("-tb --threads-batch", "cpuparams_batch.n_threads", int, "LLAMA_ARG_THREADS_BATCH"),
    Flag("--threads-http", "n_threads_http", int, "LLAMA_ARG_THREADS_HTTP"),
    Flag("-ngl --gpu-layers --n-gpu-layers", "n_gpu_layers", _layers, "LLAMA_ARG_N_GPU_LAYERS"),
    Flag("-fa --flash-attn", "flash_attn_type", _flash_attention, "LLAMA_ARG_FLASH_ATTN"),
    Flag("-ctk --cache-type-k", "cache_type_k", _cache_type, "LLAMA_ARG_CACHE_TYPE_K"),
    Flag("-ctv --cache-type-v", "cache_type_v", _cache_type, "LLAMA_ARG_CACHE_TYPE_V"),
    Flag("-mm --mmproj", "mmproj.path", str, "LLAMA_ARG_MMPROJ"),
    Flag("--chat-template", "chat_template", str, "LLAMA_ARG_CHAT_TEMPLATE"),
    Flag("--chat-template-file", "chat_template", _text),
    Switch("--jinja", "use_jinja", True),
    Switch("--no-jinja", "use_jinja", False),
    Flag("--reasoning-format", "reasoning_format", _reasoning, "LLAMA_ARG_THINK"),
    Flag("--slot-save-path", "slot_save_path", _folder, "LLAMA_ARG_SLOT_SAVE_PATH"),
    Flag("--cache-reuse", "n_cache_reuse", int, "LLAMA_ARG_CACHE_REUSE"),
    Flag("-cram --cache-ram", "cache_ram_mib", int, "LLAMA_ARG_CACHE_RAM"),
    Flag("-ctxcp --ctx-checkpoints", "n_ctx_checkpoints", int, "LLAMA_ARG_CTX_CHECKPOINTS"),
    Switch("--cache-idle-slots", "cache_idle_slots", True, "LLAMA_ARG_CACHE_IDLE_SLOTS"),
    Switch("--no-cache-idle-slots", "cache_idle_slots", False),
    Switch("-kvu --kv-unified", "kv_unified", True),
    Switch("-no-kvu --no-kv-unified", "kv_unified", False),
    Switch("--swa-full", "swa_full", True),
    Flag("--sleep-idle-seconds", "sleep_idle_seconds", int, "LLAMA_ARG_SLEEP_IDLE_SECONDS"),
    Switch("--metrics", "endpoint_metrics", True, "LLAMA_ARG_ENDPOINT_METRICS"),
    Switch("--props", "endpoint_props", True),
    Switch("--slots", "endpoint_slots", True),
    Switch("--no-slots", "endpoint_slots", False),
    Switch("--embedding --embeddings", "embedding", True),
    Switch("--no-warmup", "warmup", False),
    Switch("--no-ui --no-webui", "ui", False),
    Switch("--no-mmap", "load_mode", "LLAMA_LOAD_MODE_NONE"),
    Switch("--mlock", "load_mode", "LLAMA_LOAD_MODE_MLOCK"),
    Flag("-s --seed", "sampling.seed", int),
    Flag("--temp", "sampling.temp", float),
    Flag("--top-k", "sampling.top_k", int),
    Flag("--top-p", "sampling.top_p", float),
    Flag("--min-p", "sampling.min_p", float),
    Switch("-v --verbose", "verbosity", 99),
    Flag("-lv --verbosity --log-verbosity", "verbosity", int, "LLAMA_LOG_VERBOSITY"),
)


def options(argv: list[str], environment: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """(parameter, value) in the order in which they apply: variables first, then the flags, the last one winning."""
    for flag in FLAGS:
        text = environment.get(flag.variable) if flag.variable else None
        if text and isinstance(flag, Flag):
            yield flag.target, _value(flag, flag.variable or "", text)
        elif text:
            yield flag.target, text in ("1", "on", "true", "enabled")
    known = {name: flag for flag in FLAGS for name in flag.names.split()}
    words = iter(argv)
    for word in words:
        if word not in known:
            raise UsageError(f"invalid argument: {word}")
        flag = known[word]
        if isinstance(flag, Switch):
            yield flag.target, flag.value
            continue
        text = next(words, None)
        if text is None:
            raise UsageError(f"expected value for argument: {word}")
        yield flag.target, _value(flag, word, text)


def _value(flag: Flag, name: str, text: str) -> Any:
    try:
        return flag.read(text)
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(f"argument {name}: {text!r}: {error}") from error


def apply(params: Any, target: str, value: Any) -> None:
    *members, name = target.split(".")
    for member in members:
        params = getattr(params, member)
    now = getattr(params, name)
    if isinstance(now, Enum):
        if value not in type(now).__members__:
            raise UsageError(f"{name} cannot be {value}")
        value = type(now)[value]
    setattr(params, name, value)


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__, *(f"  {flag.names.replace(' ', ', ')}" for flag in FLAGS), sep="\n")
        return 0
    # Before the core starts its threads: they inherit the mask, and only sigwait below takes the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        import xllamacpp
    except ImportError as error:
        print(f"error: xllamacpp is not installed ({error})", file=sys.stderr)
        return 1
    params = xllamacpp.CommonParams()
    params.port = 8080
    try:
        for target, value in options(argv, os.environ):
            apply(params, target, value)
        if not params.model.path:
            raise UsageError("a model is required: -m FILE")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        server = xllamacpp.Server(params)
    except Exception as error:  # the core says in its log what was wrong
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"server is listening on {server.listening_address}", file=sys.stderr, flush=True)
    signal.sigwait(STOP)
    sys.stderr.flush()
    os._exit(0)  # the core's threads have no stop of their own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
