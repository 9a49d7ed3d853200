"""Writes a GGUF model of random weights, to check and time the engines without a real model.

Owns the file's contents: a Llama, Gemma 2 or Qwen 3.5 of any shape, each matrix in the next quantization type, and a
vocabulary of 320 tokens. Knows nothing of the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter, TokenType
from gguf import GGMLQuantizationType as Quant
from numpy.typing import NDArray

NUM_TOKENS = 320
HEAD_LEN = 64
DELTA_LEN, WINDOW = 128, 4  # of the heads and of the convolutions of gated delta nets
MIB = 2**20
Family = Literal["llama", "gemma2", "qwen35"]

# Byte offsets of a block's fp16 scales, each with its factor; the second scale roughly centres the weights.
SCALES: dict[Quant, tuple[tuple[int, float], ...]] = {
    Quant.Q4_0: ((0, 1),),
    Quant.Q4_1: ((0, 1), (2, -7.5)),
    Quant.Q5_0: ((0, 0.5),),
    Quant.Q5_1: ((0, 0.5), (2, -7.5)),
    Quant.Q8_0: ((0, 1 / 16),),
    Quant.Q2_K: ((80, 1 / 3), (82, 1 / 2)),
    Quant.Q3_K: ((108, 1 / 16),),
    Quant.Q4_K: ((0, 1 / 40), (2, 1 / 5)),
    Quant.Q5_K: ((0, 1 / 80), (2, 1 / 5)),
    Quant.Q6_K: ((208, 1 / 300),),
    Quant.IQ4_NL: ((0, 1 / 16),),
    Quant.IQ4_XS: ((0, 1 / 300),),
}
ALL_QUANTS = (*SCALES, Quant.MXFP4, Quant.F16, Quant.BF16)


def write_random_gguf(
    path: Path,
    *,
    layers: int,
    width: int,
    ffn: int,
    kv_heads: int,
    quants: Sequence[Quant],
    experts: int = 0,
    family: Family = "llama",
) -> None:
    """Write a model whose matrices use the `quants` in turn; `width` and `ffn` are multiples of 256.

    With `experts` each layer has so many, two of which compute a token, and only their matrices use the `quants`, the
    others Q8_0. With `family` "qwen35", every second layer attends, and the others are gated delta nets.
    """
    assert width % 256 == 0 == ffn % 256
    rng = np.random.default_rng(0)
    kinds = cycle(quants)
    writer = GGUFWriter(path, family)
    _add_sizes(writer, layers=layers, width=width, ffn=ffn, kv_heads=kv_heads, experts=experts)
    add_vocabulary(writer, NUM_TOKENS)

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = Quant.Q8_0 if experts else next(kinds)
        writer.add_tensor(name, random_matrix(rng, kind, rows, columns), raw_dtype=kind)

    def stack(name: str, rows: int, columns: int) -> None:
        kind = next(kinds)
        data = random_matrix(rng, kind, experts * rows, columns)
        writer.add_tensor(name, data.reshape(experts, rows, -1), raw_dtype=kind)

    def norm(name: str, length: int = width) -> None:
        writer.add_tensor(name, np.ones(length, np.float32))

    def attention(block: str) -> None:
        gated = 1 + (family == "qwen35")
        matrix(f"{block}.attn_q.weight", gated * width, width)
        matrix(f"{block}.attn_k.weight", kv_heads * HEAD_LEN, width)
        matrix(f"{block}.attn_v.weight", kv_heads * HEAD_LEN, width)
        matrix(f"{block}.attn_output.weight", width, width)
        if family == "qwen35":
            norm(f"{block}.attn_q_norm.weight", HEAD_LEN)
            norm(f"{block}.attn_k_norm.weight", HEAD_LEN)

    def delta_net(block: str) -> None:
        heads, channels = width // DELTA_LEN, 2 * width
        matrix(f"{block}.attn_qkv.weight", channels, width)
        matrix(f"{block}.attn_gate.weight", width, width)
        numbers = {"conv1d.weight": (channels, WINDOW), "beta.weight": (heads, width), "alpha.weight": (heads, width)}
        for name, shape in numbers.items():
            writer.add_tensor(f"{block}.ssm_{name}", rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32))
        writer.add_tensor(f"{block}.ssm_a", np.full(heads, -0.5, np.float32))
        writer.add_tensor(f"{block}.ssm_dt.bias", np.zeros(heads, np.float32))
        norm(f"{block}.ssm_norm.weight", DELTA_LEN)
        matrix(f"{block}.ssm_out.weight", width, width)

    matrix("token_embd.weight", NUM_TOKENS, width)
    for layer in range(layers):
        norm(f"blk.{layer}.attn_norm.weight")
        if family == "qwen35" and layer % 2 == 0:
            delta_net(f"blk.{layer}")
        else:
            attention(f"blk.{layer}")
        norm(f"blk.{layer}.{'post_attention_norm' if family == 'qwen35' else 'ffn_norm'}.weight")
        if family == "gemma2":
            norm(f"blk.{layer}.post_attention_norm.weight")
            norm(f"blk.{layer}.post_ffw_norm.weight")
        if experts:
            router = rng.normal(0, 4 * width**-0.5, (experts, width))
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router.astype(np.float32))
            stack(f"blk.{layer}.ffn_gate_exps.weight", ffn, width)
            stack(f"blk.{layer}.ffn_up_exps.weight", ffn, width)
            stack(f"blk.{layer}.ffn_down_exps.weight", width, ffn)
        else:
            matrix(f"blk.{layer}.ffn_gate.weight", ffn, width)
            matrix(f"blk.{layer}.ffn_up.weight", ffn, width)
            matrix(f"blk.{layer}.ffn_down.weight", width, ffn)
    norm("output_norm.weight")
    matrix("output.weight", NUM_TOKENS, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: GGUFWriter, *, layers: int, width: int, ffn: int, kv_heads: int, experts: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(width // HEAD_LEN)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_LEN)
    if writer.arch == "qwen35":
        writer.add_key_length(HEAD_LEN)
        writer.add_value_length(HEAD_LEN)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_uint32(f"{writer.arch}.full_attention_interval", 2)
        writer.add_ssm_conv_kernel(WINDOW)
        writer.add_ssm_inner_size(width)
        writer.add_ssm_state_size(DELTA_LEN)
        writer.add_ssm_time_step_rank(width // DELTA_LEN)
        writer.add_ssm_group_count(width // DELTA_LEN // 2)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)


def random_matrix(rng: np.random.Generator, kind: Quant, rows: int, columns: int) -> NDArray[np.uint8]:
    """Return a matrix with weights of about 1 / sqrt(columns) as bytes: [rows, row_bytes]."""
    scale = columns**-0.5 / 4
    if kind in (Quant.F16, Quant.BF16):
        weights = rng.normal(0, 4 * scale, (rows, columns)).astype(np.float32)
        if kind is Quant.F16:
            return weights.astype(np.float16).view(np.uint8)
        return (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    num_blocks = rows * columns // block_len
    random_blocks = min(num_blocks, MIB // block_bytes)  # the rest are copies: that is faster
    blocks = rng.integers(0, 256, (random_blocks, block_bytes), dtype=np.uint8)
    if kind is Quant.MXFP4:  # its scale is one byte, a power of two
        blocks[:, 0] = 127 + round(float(np.log2(scale)))
    else:
        for offset, factor in SCALES[kind]:
            blocks[:, offset : offset + 2] = np.array([scale * factor], np.float16).view(np.uint8)
    return np.resize(blocks, (num_blocks, block_bytes)).reshape(rows, -1)


def add_vocabulary(writer: GGUFWriter, count: int) -> None:
    """Add a SentencePiece vocabulary: three control tokens, all bytes, and words up to `count`."""
    specials = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    tokens = specials + [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    tokens += [(f"\N{LOWER ONE EIGHTH BLOCK}w{n}", TokenType.NORMAL) for n in range(count - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(n) for n in range(len(tokens))])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
