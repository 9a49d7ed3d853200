"""The numbers of a model that a GGUF's metadata gives, read with their types and ranges checked.

Owns the difference between one number for all layers and an array of one for each. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from edgelm.errors import ModelError
from edgelm.weights.gguf import GGUF
from edgelm.weights.gguf_parse import Array, Scalar
from edgelm.weights.mapped import DOWNLOAD

MAX_LAYERS = 512  # llama.cpp aborts above it
MAX_HEADS = 2**16
MAX_HEAD_LEN = 2**16
MAX_WIDTH = 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the decoder. A list has one number for each layer; a head count is 0 where a layer has no attention."""

    layers: int
    width: int
    heads: list[int]
    kv_heads: list[int]
    key_len: int  # numbers of a key of one head
    value_len: int


def read_shape(gguf: GGUF) -> Shape:
    """Read the sizes. Raises ModelError for what cannot be."""
    layers = number(gguf, "block_count", 1, MAX_LAYERS)
    width = number(gguf, "embedding_length", 1, MAX_WIDTH)
    heads = per_layer(gguf, "attention.head_count", layers, MAX_HEADS) or [0] * layers
    kv_heads = per_layer(gguf, "attention.head_count_kv", layers, MAX_HEADS) or heads
    for query, kv in zip(heads, kv_heads, strict=True):
        if query and kv and query % kv:
            raise damaged(gguf, f"{query} attention heads cannot share {kv} key-value heads")
    head_len = max(1, width // max(1, *heads))
    key_len = number(gguf, "attention.key_length", 1, MAX_HEAD_LEN, head_len)
    value_len = number(gguf, "attention.value_length", 1, MAX_HEAD_LEN, head_len)
    return Shape(layers, width, heads, kv_heads, key_len, value_len)


def number(gguf: GGUF, suffix: str, low: int, high: int, default: int | None = None) -> int:
    """Return an integer key of the architecture. Raises ModelError where it is missing and has no default."""
    value = gguf.get(suffix)
    if value is None and default is not None:
        return default
    if value is None:
        raise damaged(gguf, f"{gguf.architecture}.{suffix} is missing")
    if not is_integer(value) or not low <= value <= high:
        raise damaged(gguf, f"{gguf.architecture}.{suffix} is {said(value)}, where {low:,} to {high:,} are possible")
    return value


def per_layer(gguf: GGUF, suffix: str, layers: int, high: int) -> list[int] | None:
    """Return a key that is one number for all layers, or an array; None where it is missing."""
    value = gguf.get(suffix)
    if value is None:
        return None
    if not isinstance(value, Array):
        return [number(gguf, suffix, 0, high)] * layers
    if len(value) < layers:
        raise damaged(gguf, f"{gguf.architecture}.{suffix} has {len(value):,} entries for {layers} layers")
    entries = []
    for entry in value[:layers]:
        if not is_integer(entry) or not 0 <= entry <= high:
            raise damaged(gguf, f"{gguf.architecture}.{suffix} holds {said(entry)}, where 0 to {high:,} are possible")
        entries.append(entry)
    return entries


def is_integer(value: object) -> TypeGuard[int]:
    """Tell whether a value is a number without a fraction; a truth value is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def said(value: Scalar | Array) -> str:
    """Return how a value looks in an error message."""
    if isinstance(value, str):
        return "a text"
    if isinstance(value, Array):
        return "an array"
    return f"{value:,}" if is_integer(value) else str(value)


def damaged(gguf: GGUF, what: str) -> ModelError:
    """Return the error for metadata that cannot be true."""
    return ModelError(f"{gguf.name} is damaged or wrongly converted: {what}", DOWNLOAD)
