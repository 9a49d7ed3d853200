"""Facts of models of any shape, without a file: names, types and sizes of tensors."""

from __future__ import annotations

import math

from edgelm.checkpoints.summary import ModelFacts, ModelSummary, TensorFacts

BLOCK_BYTES = {"Q4_0": 18 / 32, "Q8_0": 34 / 32, "Q6_K": 210 / 256, "F16": 2, "F32": 4}  # a number


def dense_model(
    *,
    layers: int = 16,
    width: int = 2048,
    heads: int = 32,
    kv_heads: int = 8,
    head_len: int = 64,
    ffn: int = 8192,
    vocab_size: int = 32_000,
    context: int = 32_768,
    kind: str = "Q4_0",
    tied: bool = False,
    experts: int = 0,
    experts_used: int = 0,
) -> ModelFacts:
    """Return the facts of a llama or, with experts, of a mixture of them."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (width, vocab_size), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (width, vocab_size)
    for i in range(layers):
        shapes[f"blk.{i}.attn_norm.weight"] = (width,)
        shapes[f"blk.{i}.attn_q.weight"] = (width, heads * head_len)
        shapes[f"blk.{i}.attn_k.weight"] = (width, kv_heads * head_len)
        shapes[f"blk.{i}.attn_v.weight"] = (width, kv_heads * head_len)
        shapes[f"blk.{i}.attn_output.weight"] = (heads * head_len, width)
        for name, rows, columns in (("gate", ffn, width), ("up", ffn, width), ("down", width, ffn)):
            if experts:
                shapes[f"blk.{i}.ffn_{name}_exps.weight"] = (columns, rows, experts)
            else:
                shapes[f"blk.{i}.ffn_{name}.weight"] = (columns, rows)
    tensors = tuple(_tensor(name, shape, kind) for name, shape in shapes.items())
    summary = ModelSummary(
        name="a model",
        architecture="llama",
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        quantization=kind,
        nbytes=sum(tensor.nbytes for tensor in tensors),
        context=context,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=[kv_heads] * layers,
        key_lens=[head_len] * layers,
        value_lens=[head_len] * layers,
        sliding_window=0,
        vocab_size=vocab_size,
    )
    return ModelFacts(summary=summary, tensors=tensors, experts=experts, experts_used=experts_used)


def _tensor(name: str, shape: tuple[int, ...], kind: str) -> TensorFacts:
    kind = "F32" if len(shape) == 1 else kind
    return TensorFacts(name, kind, shape, int(math.prod(shape) * BLOCK_BYTES[kind]))
