"""Write a GGUF model of the Llama kind with random weights: a real model for a real engine, without a download.

    python tools/make_tiny_gguf.py OUT.gguf [--embd 64] [--layers 2] [--ff 128] [--seed 0]

The same options give the same file. It speaks letters and blanks only and never ends by itself, so `max_tokens` is
exactly what it says. The default is half a megabyte; `--embd 512 --layers 8 --ff 2048` is about 127 MB and slow
enough for a prefill that can be seen.
"""

from __future__ import annotations

import argparse
import string
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

HEADS = 4
KV_HEADS = 2
CONTEXT = 32768  # tokens
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece spells one

CONTROLS = (
    ("<unk>", gguf.TokenType.UNKNOWN),
    ("<s>", gguf.TokenType.CONTROL),
    ("</s>", gguf.TokenType.CONTROL),
)
BYTES = tuple((f"<0x{i:02X}>", gguf.TokenType.BYTE) for i in range(256))
LETTERS = tuple(
    (text, gguf.TokenType.NORMAL)
    for text in (BLANK, *string.ascii_lowercase, *(BLANK + c for c in string.ascii_lowercase))
)
VOCABULARY = CONTROLS + BYTES + LETTERS
SILENT = len(CONTROLS) + len(BYTES)  # tokens before this one are read, never written

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Shape:
    embd: int = 64
    layers: int = 2
    ff: int = 128
    seed: int = 0


def write(out: Path, shape: Shape = Shape()) -> None:
    """Write the model file. ValueError if the heads don't divide the embedding."""
    if shape.embd % (HEADS * 2):
        raise ValueError(f"embd must be a multiple of {HEADS * 2}")
    writer = gguf.GGUFWriter(out, "llama")
    _describe(writer, shape)
    _vocabulary(writer)
    for name, tensor in _tensors(shape).items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name("tiny random letters")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.embd)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(shape.embd // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCABULARY))


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in VOCABULARY])
    writer.add_token_types([kind for _, kind in VOCABULARY])
    writer.add_token_scores([0.0] * SILENT + [-float(i) for i in range(len(LETTERS))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(shape: Shape) -> dict[str, np.ndarray]:
    random = np.random.default_rng(shape.seed)

    def weights(rows: int, columns: int) -> np.ndarray:
        matrix: np.ndarray = random.standard_normal((rows, columns)) / np.sqrt(columns)
        return matrix.astype(np.float32)

    norm = np.ones(shape.embd, np.float32)
    kv = shape.embd // HEADS * KV_HEADS
    output = weights(len(VOCABULARY), shape.embd) * np.float32(12)  # far apart, so that one letter is likely
    output[:SILENT] = 0
    tensors = {
        "token_embd": weights(len(VOCABULARY), shape.embd),
        "output": output,
        "output_norm": norm,
    }
    for layer in range(shape.layers):
        block = {
            "attn_norm": norm,
            "attn_q": weights(shape.embd, shape.embd),
            "attn_k": weights(kv, shape.embd),
            "attn_v": weights(kv, shape.embd),
            "attn_output": weights(shape.embd, shape.embd),
            "ffn_norm": norm,
            "ffn_gate": weights(shape.ff, shape.embd),
            "ffn_up": weights(shape.ff, shape.embd),
            "ffn_down": weights(shape.embd, shape.ff),
        }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a tiny GGUF model with random weights.")
    parser.add_argument("out", type=Path)
    for option, default, text in (
        ("--embd", Shape.embd, "width of the embedding"),
        ("--layers", Shape.layers, "number of blocks"),
        ("--ff", Shape.ff, "width of the feed-forward part"),
        ("--seed", Shape.seed, "other weights"),
    ):
        parser.add_argument(option, type=int, default=default, help=f"{text} (default {default})")
    options = parser.parse_args()
    try:
        write(options.out, Shape(options.embd, options.layers, options.ff, options.seed))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
