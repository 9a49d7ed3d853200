"""GGUFs of random weights in the shapes of real models, for speed: weights cost the same whatever they are.

Owns the shapes. Weights are made by edgelm/backends/llama/random_gguf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFReader, GGUFWriter, TokenType

from edgelm.backends.llama.random_gguf import add_vocabulary, random_matrix


class Shape(NamedTuple):
    """A llama."""

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int = 131_072

    @property
    def weights(self) -> int:
        """Weights that are read for a token: all but the embedding."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.ffn) + self.vocab * self.width


SHAPES = {
    "llama-8b": Shape(32, 4096, 14336, 32, 8, 128, 128_256),
    "llama-1b": Shape(16, 2048, 8192, 32, 8, 64, 128_256),
    "smol-135m": Shape(30, 576, 1536, 9, 3, 64, 49_152, 8192),
    "llama-4m": Shape(4, 256, 768, 4, 2, 64, 1024),
    "tiny": Shape(2, 256, 512, 4, 2, 64, 320, 1024),
}


def write_model(
    path: Path,
    shape: Shape,
    quant: Quant,
    tokenizer: dict[str, Any] | None = None,
    template: str = "",
    others: Mapping[str, Quant] = MappingProxyType({}),
) -> None:
    """Write a model whose matrices are all of one type, but for `others`; its output matrix is one of its own.

    `tokenizer` are the keys `tokenizer.ggml.…` of another model; they are filled up to the shape's vocabulary.
    """
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500_000.0)
    if tokenizer:
        _add_tokenizer(writer, tokenizer, shape.vocab)
    else:
        add_vocabulary(writer, shape.vocab)
    if template:
        writer.add_chat_template(template)

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = others.get(name, quant)
        writer.add_tensor(f"{name}.weight", random_matrix(rng, kind, rows, columns), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape.width, np.float32))

    matrix("token_embd", shape.vocab, shape.width)
    for i in range(shape.layers):
        norm(f"blk.{i}.attn_norm")
        matrix(f"blk.{i}.attn_q", shape.heads * shape.head_dim, shape.width)
        matrix(f"blk.{i}.attn_k", shape.kv_heads * shape.head_dim, shape.width)
        matrix(f"blk.{i}.attn_v", shape.kv_heads * shape.head_dim, shape.width)
        matrix(f"blk.{i}.attn_output", shape.width, shape.heads * shape.head_dim)
        norm(f"blk.{i}.ffn_norm")
        matrix(f"blk.{i}.ffn_gate", shape.ffn, shape.width)
        matrix(f"blk.{i}.ffn_up", shape.ffn, shape.width)
        matrix(f"blk.{i}.ffn_down", shape.width, shape.ffn)
    norm("output_norm")
    matrix("output", shape.vocab, shape.width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_of(reader: GGUFReader) -> dict[str, Any]:
    """Return the tokenizer of a GGUF, for `write_model`."""
    prefix = "tokenizer.ggml."
    return {key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if prefix in key}


def _add_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], count: int) -> None:
    tokens = [*tokenizer["tokens"], *(f"<{number}>" for number in range(len(tokenizer["tokens"]), count))]
    writer.add_tokenizer_model(tokenizer["model"])
    writer.add_tokenizer_pre(tokenizer["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([*tokenizer["token_type"], *[TokenType.NORMAL] * (count - len(tokenizer["tokens"]))])
    writer.add_token_merges(tokenizer["merges"])
    writer.add_bos_token_id(tokenizer["bos_token_id"])
    writer.add_eos_token_id(tokenizer["eos_token_id"])
    writer.add_add_bos_token(False)
