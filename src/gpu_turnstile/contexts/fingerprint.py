"""What must be the same for a saved conversation to mean the same: pure text, nothing is looked up here.

A slot file holds the numbers one model computed with one arrangement of its cache. Some differences an engine finds
out itself, and answers 400; others it does not: the same architecture with other weights, a LoRA, another RoPE scale
give wrong words without an error. So everything counts that is not known to be harmless.

Invariant: two engines with equal fingerprints may read each other's files. Traits have names, so that a person can be
told what changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence

Traits = dict[str, str]

_NAMES = {  # spellings of what has a trait of its own
    "-ctk": "KV type K",
    "--cache-type-k": "KV type K",
    "-ctv": "KV type V",
    "--cache-type-v": "KV type V",
    "-fa": "flash attention",
    "--flash-attn": "flash attention",
    "--swa-full": "SWA",
    "-np": "slots",
    "--parallel": "slots",
    "-kvu": "unified KV",
    "--kv-unified": "unified KV",
    "-no-kvu": "unified KV",
    "--no-kv-unified": "unified KV",
}
_VARIABLES = {
    "LLAMA_ARG_CACHE_TYPE_K": "KV type K",
    "LLAMA_ARG_CACHE_TYPE_V": "KV type V",
    "LLAMA_ARG_FLASH_ATTN": "flash attention",
    "LLAMA_ARG_SWA_FULL": "SWA",
    "LLAMA_ARG_N_PARALLEL": "slots",
    "LLAMA_ARG_KV_UNIFIED": "unified KV",
}
# Where it listens, how fast it is, how large its cache, what it prints and samples. The model has a trait of its own.
_HARMLESS_WORDS = """
-m --model --hf-repo --hf-file --host --port --api-key --timeout -to -a --alias
-c --ctx-size -b --batch-size -ub --ubatch-size -t --threads -tb --threads-batch --threads-http --mlock --no-mmap
--slot-save-path --cache-ram -cram --cache-reuse --metrics --slots --props --no-ui --no-webui --no-warmup
-v --verbose -lv --verbosity --log-verbosity --log-file
-n --predict --n-predict --temp --top-k --top-p --min-p -s --seed
--jinja --chat-template --chat-template-file --reasoning-format
"""
_HARMLESS = frozenset(_HARMLESS_WORDS.split())
_HARMLESS_VARIABLES = ("THREADS", "PORT", "HOST", "CTX_SIZE", "BATCH", "METRICS", "IDLE_SLOTS", "CACHE_RAM", "ALIAS")


def traits(argv: Sequence[str], env: Mapping[str, str]) -> Traits:
    """What the command line and the variables of a llama-server say about the numbers in its cache."""
    found: Traits = {}
    rest: list[str] = []
    for name, value in sorted(env.items()):
        if name in _VARIABLES:
            found[_VARIABLES[name]] = value
        elif not name.startswith("LLAMA_ARG_") or not name.endswith(_HARMLESS_VARIABLES):
            rest.append(f"{name}={value}")
    for flag, value in _flags(argv):
        if flag in _NAMES:
            found[_NAMES[flag]] = value or flag.lstrip("-")
        elif flag not in _HARMLESS:
            rest.append(f"{flag} {value}")
    found["other flags"] = hashlib.sha256("\n".join(sorted(rest)).encode()).hexdigest()[:16]
    return found


def flag_value(argv: Sequence[str], name: str) -> str | None:
    """What a flag was given, the last one counting; None = it is not there."""
    return next((value for flag, value in reversed(list(_flags(argv))) if flag == name), None)


def named(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """The words behind these flags."""
    return [word for flag, value in _flags(argv) if flag in names for word in value.split()]


def files_behind(argv: Sequence[str]) -> list[str]:
    """What flags that count may name files with: an adapter's place says nothing about what lies there now."""
    values = [value for flag, value in _flags(argv) if flag not in _HARMLESS and flag not in _NAMES]
    words = [word for value in values for word in value.replace(",", " ").split()]
    return [part for word in words for part in (word, word.rpartition(":")[0]) if part]


def differing(saved: Traits, now: Traits) -> list[str]:
    """The names of what is not the same, in one order."""
    return sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(flag, value) of a command line; what stands before the first flag is the program."""
    flag = ""
    values: list[str] = []
    for word in argv:
        if _is_flag(word):
            if flag:
                yield flag, " ".join(values)
            flag, joined, value = word.partition("=")
            values = [value] if joined else []
        elif flag:
            values.append(word)
    if flag:
        yield flag, " ".join(values)


def _is_flag(word: str) -> bool:
    """A number may begin with a dash as well."""
    return word.startswith("-") and not word.lstrip("-")[:1].isdigit()
