"""What a preset will take of the card: declared, else learned, else computed from a header that may be anything."""

from __future__ import annotations

import os
import random
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_turnstile.core.model import Sized
from gpu_turnstile.presets import gguf as gguf_module
from gpu_turnstile.presets.estimate import DRIVER, GB, computed, estimate
from gpu_turnstile.presets.files import model_files
from gpu_turnstile.presets.gguf import NotGguf, read_header
from gpu_turnstile.presets.learned import LEAST, Learned
from tests.presets.build import parse

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_tiny_gguf.py"
MASK = 4 * 512  # bytes for each token of the context
U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key, kind, value):
    """One key and its value; an array is (kind, [values])."""
    if kind == STRING:
        return text(key) + struct.pack("<I", kind) + text(value)
    if kind != ARRAY:
        return (
            text(key)
            + struct.pack("<I", kind)
            + struct.pack({U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q"}[kind], value)
        )
    inner, items = value
    body = b"".join(text(i) if inner == STRING else struct.pack({U32: "<I", BOOL: "<?"}[inner], i) for i in items)
    return text(key) + struct.pack("<IIQ", kind, inner, len(items)) + body


def gguf(*pairs, version=3, tensors=0, weights=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(pairs)) + b"".join(pairs) + b"\0" * weights


def model(arch="llama", layers=4, *more, weights=1000, **numbers):
    shape = {"block_count": layers, "embedding_length": 64, "attention.head_count": 4, "context_length": 8192}
    shape |= {key.replace("__", "."): value for key, value in numbers.items()}
    pairs = [pair(f"{arch}.{key}", U32, value) for key, value in shape.items()]
    return gguf(pair("general.architecture", STRING, arch), *pairs, *more, weights=weights)


def preset(path, runtime="", engine="llama-server", model_more=""):
    return parse(
        f'engine = "{engine}"\n[model]\npath = "{path}"\n{model_more}\n'
        f'[runtime]\nkind = "process"\ncommand = ["x", "{{port}}"]\n{runtime}'
    )


@pytest.fixture
def written(tmp_path):
    def write(data, name="m.gguf"):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pytest.importorskip("gguf")
    out = tmp_path_factory.mktemp("model") / "tiny.gguf"
    subprocess.run([sys.executable, TOOL, out], check=True, timeout=60)
    return out


def cache_of(file, runtime="context = 8192", **others):
    """The bytes of the KV cache: what is computed with this context, less the same with a context of one token."""
    whole = computed(preset(file, runtime, **others))
    one = computed(preset(file, runtime.replace("8192", "1", 1), **others))
    return (whole - one - MASK * 8191) * 8192 / 8191


# ------------------------------------------------------------------------------------------------- the header


def test_a_real_header_is_read(tiny):
    header = read_header(tiny)
    assert header.architecture == "llama"
    assert header.number("block_count") == 2
    assert header.number("context_length") == 32768
    assert header.each("attention.head_count_kv") == (2, 2)
    assert header.lengths["tokenizer.ggml.tokens"] == 312 == header.number("vocab_size")
    assert header.tensors == 3 + 2 * 9
    assert header.size == tiny.stat().st_size


def test_every_kind_of_value_is_read_and_long_tables_are_only_counted(written):
    many = [0] * (gguf_module.KEPT_ARRAY + 1)
    data = gguf(
        pair("a", U32, 7),
        pair("b", F32, 0.5),
        pair("c", BOOL, True),
        pair("d", STRING, "größe"),
        pair("e", ARRAY, (BOOL, [True, False])),
        pair("f", ARRAY, (STRING, ["x", "yy"])),
        pair("g", ARRAY, (U32, many)),
        pair("h", U64, 1 << 40),
        version=2,
    )
    header = read_header(written(data))
    assert header.values == {"a": 7, "b": 0.5, "c": True, "d": "größe", "e": (True, False), "h": 1 << 40}
    assert header.lengths == {"e": 2, "f": 2, "g": len(many)}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"GGU", "ends in the middle"),
        (b"ggml" + bytes(100), "does not begin with GGUF"),
        (gguf(version=1), "version 1 is none"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is none"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "pairs are more than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors are more than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "bytes of a text are more than"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1000), "ends in the middle"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 13), "unknown kind"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "unknown kind"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 50), "elements of k"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 20), "ends in the middle"),
        (gguf(pair("k", U32, 1), pair("k", U32, 2)), "k is there twice"),
    ],
)
def test_a_broken_header_says_what_is_wrong_and_is_no_estimate(written, data, why):
    file = written(data)
    with pytest.raises(NotGguf, match=why):
        read_header(file)
    assert estimate(preset(file, "context = 4096")) is None


def test_a_header_cut_or_changed_anywhere_raises_nothing_else(written):
    whole = model("llama", 4, pair("x", ARRAY, (STRING, ["a", "b"])), pair("y", ARRAY, (U32, [1, 2, 3])), weights=0)
    for length in range(len(whole)):
        with pytest.raises(NotGguf):
            read_header(written(whole[:length]))
    dice = random.Random(1)
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        file = written(data)
        try:
            read_header(file)
        except NotGguf:
            pass
        estimate(preset(file, "context = 4096"))


# --------------------------------------------------------------------------------------------- the arithmetic


def test_weights_cache_and_overhead_of_a_real_model_add_up(tiny):
    needed = computed(preset(tiny, "context = 8192"))
    cache = 2 * 2 * (16 + 16) * 2 * 8192  # layers, heads, key and value widths, f16, tokens
    computing = 4 * 512 * (312 + 8 * 64 + 2 * 128) + MASK * 8192
    assert needed == tiny.stat().st_size + cache + computing + DRIVER
    assert estimate(preset(tiny, "context = 8192")).gb == round(needed / GB, 2)


@pytest.mark.parametrize(
    ("runtime", "bytes_per_element"),
    [
        ("context = 8192", 2),
        ('context = 8192\nargs = ["-ctk", "q8_0", "--cache-type-v=q8_0"]', 34 / 32),
        ('context = 8192\nargs = ["-ctk", "f32", "-ctk", "q4_0", "-ctv", "q4_0"]', 18 / 32),
        ('context = 8192\nenv = { LLAMA_ARG_CACHE_TYPE_K = "f32", LLAMA_ARG_CACHE_TYPE_V = "f32" }', 4),
        ('args = ["-c", "8192"]', 2),
        ('args = ["--ctx-size=8192"]', 2),
        ('env = { LLAMA_ARG_CTX_SIZE = "8192" }', 2),
    ],
)
def test_the_cache_has_the_size_of_its_type_and_context_wherever_they_are_written(tiny, runtime, bytes_per_element):
    assert cache_of(tiny, runtime) == pytest.approx(2 * 2 * 32 * 8192 * bytes_per_element, rel=1e-3)


def test_arguments_win_over_keys_and_the_model_decides_where_nothing_is_said(tiny):
    assert computed(preset(tiny, 'context = 1\nargs = ["-c", "8192"]')) == computed(preset(tiny, "context = 8192"))
    assert computed(preset(tiny)) == computed(preset(tiny, "context = 32768"))
    assert computed(preset(tiny, 'args = ["-c", "0"]')) == computed(preset(tiny, "context = 32768"))


def test_layers_may_differ_in_their_heads(written):
    heads = pair("x.attention.head_count_kv", ARRAY, (U32, [0, 2, 0, 4]))
    assert cache_of(written(model("x", 4, heads))) == pytest.approx((2 + 4) * 32 * 2 * 8192, rel=1e-3)


def test_layers_with_a_window_keep_no_more_than_it(written):
    windows = {"attention__sliding_window": 512, "attention__head_count_kv": 1}
    kept = 2 * (512 + 512)  # two slots, the window and one batch
    runtime = "context = 8192\nparallel = 2"

    def tokens(file, runtime):
        more = computed(preset(file, runtime)) - computed(preset(file, runtime.replace("8192", "1", 1)))
        return (more - MASK * 8191) / (32 * 2)

    gemma = written(model("gemma3", 6, **windows))
    assert tokens(gemma, runtime) == 8192 + 5 * kept - 6
    assert tokens(gemma, runtime + '\nargs = ["--swa-full"]') == 6 * 8191
    pattern = pair("new.attention.sliding_window_pattern", ARRAY, (BOOL, [True, False, False, True]))
    assert tokens(written(model("new", 4, pattern, **windows)), runtime) == 2 * 8192 + 2 * kept - 4
    assert computed(preset(written(model("unknown", 4, **windows)), runtime)) is None


def test_only_every_nth_layer_of_a_hybrid_keeps_the_context(written):
    file = written(model("qwen3next", 8, full_attention_interval=4, attention__head_count_kv=1))
    assert cache_of(file) == pytest.approx(2 * 32 * 2 * 8192, rel=1e-3)


def test_without_flash_attention_every_head_needs_room_for_the_whole_context(written):
    file = written(model())
    more = computed(preset(file, 'context = 8192\nargs = ["-fa", "off"]')) - computed(preset(file, "context = 8192"))
    assert more == 4 * 512 * 4 * 8192


@pytest.mark.parametrize(
    "args", ['"-ngl", "3"', '"--n-cpu-moe", "4"', '"-ot", "x=CPU"', '"-nkvo"', '"-ctk", "new"', '"--device=none"']
)
def test_where_a_guess_would_be_far_off_there_is_none(written, args):
    assert computed(preset(written(model()), f"context = 8192\nargs = [{args}]")) is None


@pytest.mark.parametrize("args", ['"-ngl", "99"', '"-ngl", "auto"', '"--gpu-layers=all"'])
def test_all_layers_on_the_card_are_no_hindrance(written, args):
    assert computed(preset(written(model()), f"args = [{args}]"))


def test_other_engines_and_missing_files_have_no_figure(written, tmp_path):
    file = written(model())
    assert computed(preset(file, engine="vllm")) is None
    assert computed(preset(tmp_path / "none.gguf")) is None


# ------------------------------------------------------------------------------------------------- the files


def test_all_parts_and_the_projector_count_and_a_missing_part_is_no_estimate(written):
    parts = pair("split.count", U32, 3)
    first = written(model("llama", 4, parts), "m-00001-of-00003.gguf")
    others = [written(b"x" * 5000, f"m-0000{n}-of-00003.gguf") for n in (2, 3)]
    projector = written(b"y" * 700, "mmproj.gguf")
    whole = preset(first, model_more=f'mmproj = "{projector}"')
    assert model_files(whole) == (first, *others, projector)
    weights = sum(file.stat().st_size for file in (first, *others, projector))
    assert (
        computed(whole)
        == computed(preset(written(model("llama", 4, parts[:0] + pair("n", U32, 3)))))
        - len(model("llama", 4, pair("n", U32, 3)))
        + weights
    )
    others[0].unlink()
    projector.unlink()
    assert computed(whole) is None


def test_files_of_a_container_are_found_through_its_mounts(tmp_path, written):
    written(model(), "m.gguf")
    container = parse(
        'engine = "llama-server"\n[model]\npath = "/models/m.gguf"\n[runtime]\nkind = "docker"\nimage = "i"\n'
        f'mounts = ["/elsewhere:/mod", "{tmp_path}:/models:ro"]'
    )
    assert model_files(container) == (tmp_path / "m.gguf",)
    assert estimate(container).how is Sized.COMPUTED


def test_files_of_a_repository_are_found_in_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--m" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for name in ("m.gguf", "model-1.safetensors", "model-2.safetensors", "README.md"):
        (folder / name).write_bytes(b"x")
    runtime = '[runtime]\nkind = "process"\ncommand = ["x", "{port}"]\n'
    one = parse(f'engine = "llama-server"\n[model]\nrepo = "org/m"\nfile = "m.gguf"\n{runtime}')
    assert model_files(one) == (folder / "m.gguf",)
    whole = parse(f'engine = "vllm"\n[model]\nrepo = "org/m"\n{runtime}')
    assert model_files(whole) == (folder / "model-1.safetensors", folder / "model-2.safetensors")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    assert model_files(one) == ()


# ----------------------------------------------------------------------------------------------- what was learned


def test_declared_wins_over_learned_and_learned_over_computed(written, tmp_path):
    learned = Learned(tmp_path / "state" / "learned.json")
    file = written(model())
    plain = preset(file)
    assert estimate(plain, learned).how is Sized.COMPUTED
    learned.note(plain.name, plain.revision, 5 * GB)
    assert (estimate(plain, learned).gb, estimate(plain, learned).how) == (5.0, Sized.LEARNED)
    declared = preset(file, "vram_gb = 3.5")
    assert (estimate(declared, learned).gb, estimate(declared, learned).how) == (3.5, Sized.DECLARED)
    assert estimate(preset(file, "context = 16"), learned).how is Sized.COMPUTED  # another preset now


def test_what_was_learned_survives_a_restart_and_only_its_owner_reads_it(tmp_path):
    file = tmp_path / "state" / "learned.json"
    Learned(file).note("p", "r1", 5 * GB)
    Learned(file).note("q", "r1", 6 * GB)
    again = Learned(file)
    assert (again.of("p", "r1"), again.of("q", "r1"), again.of("p", "r2"), again.of("x", "r1")) == (
        5 * GB,
        6 * GB,
        None,
        None,
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == [file.name]


def test_what_is_too_little_to_be_true_is_not_learned(tmp_path):
    learned = Learned(tmp_path / "learned.json")
    learned.note("p", "r", 5 * GB)
    learned.note("p", "r", LEAST - 1)
    assert learned.of("p", "r") == 5 * GB


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"p": 3}', b'{"p": {"revision": 1}}', b"\xff"])
def test_a_broken_store_is_begun_anew_and_one_that_cannot_be_written_still_serves(tmp_path, data):
    file = tmp_path / "learned.json"
    file.write_bytes(data)
    learned = Learned(file)
    assert learned.of("p", "r") is None
    learned.note("p", "r", GB)
    assert Learned(file).of("p", "r") == GB
    nowhere = Learned(file / "below")
    nowhere.note("p", "r", GB)
    assert nowhere.of("p", "r") == GB
