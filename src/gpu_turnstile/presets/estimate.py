"""How much of the card a preset will take: as its file says, else as was measured last, else as its model lets compute.

What is computed is meant to be a little too much, never too little: all weights, the whole KV cache, room for the
computing and for the driver. Where a guess would be far off (layers kept off the card by flags, attention patterns
that are not known, engines that take what they find), there is none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from gpu_turnstile.core.model import Sized
from gpu_turnstile.presets.files import model_files
from gpu_turnstile.presets.gguf import Header, NotGguf, read_header
from gpu_turnstile.presets.learned import Learned
from gpu_turnstile.presets.schema import Preset

GB = 1 << 30
DRIVER = GB // 2  # bytes a process holds on the card before it has done anything
SLOTS = 4  # llama-server's default
UBATCH = 512  # tokens computed at once, llama-server's default

# Bytes of one element of the KV cache, by llama-server's names.
CACHE_TYPES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
# Where every n-th layer sees everything and the others a window, and the file does not say so.
WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2}
OFF_THE_CARD = (
    *("-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor", "-nkvo", "--no-kv-offload"),
    *("-dev", "--device", "-ts", "--tensor-split", "-md", "--model-draft", "--rpc"),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    gb: float
    how: Sized


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a preset beyond its file. `context` in tokens, of all slots together."""

    size: Estimate | None = None
    context: int | None = None


def facts(preset: Preset, learned: Learned | None = None) -> Facts:
    """Looks at files; never raises."""
    return Facts(estimate(preset, learned), effective_context(preset))


def effective_context(preset: Preset) -> int | None:
    """Tokens: as it was told, else what the model was made for, where its file is here."""
    if preset.engine != "llama-server":
        return preset.runtime.context
    files = () if preset.runtime.context else model_files(preset)
    header = _header(files[0]) if files else None
    if header is not None:
        return _context(preset, header) or None
    return _told_context(preset) or None


def estimate(preset: Preset, learned: Learned | None = None) -> Estimate | None:
    """None: nothing is known. Looks at files; never raises."""
    if preset.runtime.vram_gb is not None:
        return Estimate(preset.runtime.vram_gb, Sized.DECLARED)
    measured = learned.of(preset.name, preset.revision) if learned is not None else None
    if measured is not None:
        return Estimate(round(measured / GB, 2), Sized.LEARNED)
    needed = computed(preset)
    return None if needed is None else Estimate(round(needed / GB, 2), Sized.COMPUTED)


def computed(preset: Preset) -> int | None:
    """Bytes, for a llama-server whose files are here; None: it cannot be told."""
    if preset.engine != "llama-server" or any(_flag(argument) in OFF_THE_CARD for argument in preset.runtime.args):
        return None
    files = model_files(preset)
    header = _header(files[0]) if files else None
    if header is None or not _takes_all_layers(preset, header) or len(files) < _parts_of(header):
        return None
    try:
        weights = sum(file.stat().st_size for file in files)
    except OSError:
        return None
    cache, computing = _kv_cache(preset, header), _computing(preset, header)
    return None if cache is None else weights + cache + computing + DRIVER


def _header(file: Path) -> Header | None:
    try:
        stat = file.stat()
        return _read_once(file, stat.st_mtime_ns, stat.st_size)
    except (OSError, NotGguf):
        return None


@functools.lru_cache(maxsize=64)
def _read_once(file: Path, changed: int, size: int) -> Header:
    return read_header(file)


def _parts_of(header: Header) -> int:
    parts = header.values.get("split.count", 1)
    return parts if isinstance(parts, int) else 1


def _takes_all_layers(preset: Preset, header: Header) -> bool:
    layers = _argument(preset, ("-ngl", "--gpu-layers", "--n-gpu-layers"), "LLAMA_ARG_N_GPU_LAYERS")
    if layers is None or not layers.isdecimal():
        return True  # "auto", "all": as many as there are
    return int(layers) > (header.layers or 0)


def _kv_cache(preset: Preset, header: Header) -> int | None:
    """Bytes. Every layer keeps its keys and values of the whole context, or of its window."""
    layers, context = header.layers, _context(preset, header)
    heads, width = header.number("attention.head_count"), header.number("embedding_length")
    kinds = [
        CACHE_TYPES.get(_argument(preset, (f"-ct{letter}", f"--cache-type-{letter}"), variable) or "f16")
        for letter, variable in (("k", "LLAMA_ARG_CACHE_TYPE_K"), ("v", "LLAMA_ARG_CACHE_TYPE_V"))
    ]
    if not layers or not context or None in kinds:
        return None
    heads_kv = header.each("attention.head_count_kv") or header.each("attention.head_count")
    lengths = _tokens_kept(preset, header, layers, context)
    each = width // heads if heads and width else None
    key, value = header.number("attention.key_length") or each, header.number("attention.value_length") or each
    if heads_kv is None or lengths is None or key is None or value is None:
        return None
    per_head = key * (kinds[0] or 0) + value * (kinds[1] or 0)
    return int(sum(tokens * count * per_head for tokens, count in zip(lengths, heads_kv, strict=True)))


def _tokens_kept(preset: Preset, header: Header, layers: int, context: int) -> tuple[int, ...] | None:
    """Per layer. None: there is a window, and it is not known where."""
    interval = header.number("full_attention_interval")
    if interval:  # the layers between keep a state of fixed size
        return tuple(context if layer % interval == interval - 1 else 0 for layer in range(layers))
    window = header.number("attention.sliding_window")
    if not window or "--swa-full" in preset.runtime.args:
        return (context,) * layers
    windowed = _windowed(header, layers)
    if windowed is None:
        return None
    told = _whole(_argument(preset, ("-np", "--parallel"), "LLAMA_ARG_N_PARALLEL", preset.runtime.parallel))
    slots = told or SLOTS
    kept = min(context, slots * (window + UBATCH))
    return tuple(kept if is_windowed else context for is_windowed in windowed)


def _windowed(header: Header, layers: int) -> tuple[bool, ...] | None:
    pattern = header.values.get(f"{header.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and len(pattern) == layers:
        return tuple(bool(item) for item in pattern)
    period = header.number("attention.sliding_window_pattern") or WINDOW_PERIODS.get(header.architecture)
    return None if not period else tuple(layer % period < period - 1 for layer in range(layers))


def _computing(preset: Preset, header: Header) -> int:
    """Bytes for one batch: its scores over the vocabulary, its activations, and what each token sees of the context.

    The last is one mask with flash attention, and a row for every head without.
    """
    vocabulary = header.number("vocab_size") or header.lengths.get("tokenizer.ggml.tokens", 0)
    width = header.number("embedding_length") or 0
    inner = max(header.each("feed_forward_length") or (0,))
    batch = _whole(_argument(preset, ("-ub", "--ubatch-size"), "LLAMA_ARG_UBATCH")) or UBATCH
    flash = (_argument(preset, ("-fa", "--flash-attn"), "LLAMA_ARG_FLASH_ATTN") or "auto").lower()
    rows = 1 if flash not in ("off", "0", "false") else 1 + (header.number("attention.head_count") or 0)
    return 4 * batch * (vocabulary + 8 * width + 2 * inner + rows * _context(preset, header))


def _context(preset: Preset, header: Header) -> int:
    """Tokens, of all slots together; 0 in the flags means what the model was made for."""
    return _told_context(preset) or header.number("context_length") or 0


def _told_context(preset: Preset) -> int | None:
    return _whole(_argument(preset, ("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE", preset.runtime.context))


def _argument(preset: Preset, flags: tuple[str, ...], variable: str, key: int | None = None) -> str | None:
    """What a flag was given in `args` (the last one wins), else the preset's own key, else its variable in `env`."""
    found = preset.runtime.env.get(variable) if key is None else str(key)
    arguments = preset.runtime.args
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in flags:
            found = value if equals else (arguments[index + 1] if index + 1 < len(arguments) else None)
    return found


def _flag(argument: str) -> str:
    return argument.partition("=")[0]


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
