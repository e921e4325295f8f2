"""Writes small GGUF files of the llama architecture, real enough to be converted and to answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_alphabet() -> list[str]:
    """GPT-2's spelling of the 256 bytes, in order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (specials, bytes, a few merged ones) and merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ", "1 2", "Ċ Ċ"]
    return SPECIAL + byte_alphabet() + [merge.replace(" ", "") for merge in merges], merges


def quantized(
    random: np.random.Generator, kind: gguf.GGMLQuantizationType, rows: int, columns: int
) -> np.ndarray:
    """Random weights in the bytes of `kind`; K-quants, for which there is no quantizer in Python, are drawn
    as blocks.
    """
    if kind not in (gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K):
        return gguf.quants.quantize(random.normal(0, 0.2, (rows, columns)).astype(np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scales = {
        gguf.GGMLQuantizationType.Q4_K: ((0, 0.001), (2, 0.008)),
        gguf.GGMLQuantizationType.Q6_K: ((208, 0.0001),),
    }
    for at, scale in scales[kind]:
        data[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return data.reshape(rows, -1)


def write(
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F16,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    inner: int = 128,
    pre: str = "smollm",
    architecture: str = "llama",
    seed: int = 0,
    dequantize: bool = False,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A file at `path` with random weights of type `kind`, or with the same weights as F16 (`dequantize`)."""
    random = np.random.default_rng(seed)
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(1 if dequantize or kind is gguf.GGMLQuantizationType.F16 else 3)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    def matrix(name: str, rows: int, columns: int) -> None:
        data = quantized(random, kind, rows, columns)
        if dequantize:
            values = gguf.quants.dequantize(data, kind)
            writer.add_tensor(f"{name}.weight", values.astype(np.float16))
        else:
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def vector(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", random.uniform(0.5, 1.5, size).astype(np.float32))

    matrix("token_embd", len(tokens), hidden)
    for layer in range(layers):
        block = f"blk.{layer}"
        vector(f"{block}.attn_norm", hidden)
        vector(f"{block}.ffn_norm", hidden)
        matrix(f"{block}.attn_q", hidden, hidden)
        matrix(f"{block}.attn_k", hidden // heads * kv_heads, hidden)
        matrix(f"{block}.attn_v", hidden // heads * kv_heads, hidden)
        matrix(f"{block}.attn_output", hidden, hidden)
        matrix(f"{block}.ffn_gate", inner, hidden)
        matrix(f"{block}.ffn_up", inner, hidden)
        matrix(f"{block}.ffn_down", hidden, inner)
    vector("output_norm", hidden)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
