"""The sizes of a decoder, from a GGUF's metadata or from a config.json.

Owns the limits, and the sizes that both formats state. The keys of a config.json with their aliases and defaults are
in config_json.py. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgelm.checkpoints.values import Values

MAX_LAYERS = 512  # llama.cpp aborts above it
MAX_HEADS = 2**16
MAX_HEAD_LEN = 2**16
MAX_HIDDEN_SIZE = 2**20
MAX_CONTEXT = 2**27
MAX_VOCAB = 2**20
MAX_EXPERTS = 2**16
MAX_WINDOW = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder. A list has one entry for each layer."""

    num_layers: int
    hidden_size: int
    num_heads: list[int]  # 0: the layer has no attention
    num_kv_heads: list[int]
    key_len: int  # of one head
    value_len: int  # of one head; 0: values are a view of the keys (latent attention)
    context: int  # trained; 0: not stated


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in a layer."""

    count: int  # 0: not a mixture
    used: list[int]  # by each token, for each layer


def gguf_shape(values: Values) -> Shape:
    """Read the sizes of a GGUF. Raises ModelError where they are missing or cannot be true."""
    num_layers = values.integer("block_count", low=1, high=MAX_LAYERS)
    hidden_size = values.integer("embedding_length", low=1, high=MAX_HIDDEN_SIZE)
    num_heads = values.per_layer("attention.head_count", num_layers=num_layers, high=MAX_HEADS) or [0] * num_layers
    num_kv_heads = values.per_layer("attention.head_count_kv", num_layers=num_layers, high=MAX_HEADS) or num_heads
    require_shared_heads(values, num_heads, num_kv_heads)
    head_len = max(1, hidden_size // max(1, *num_heads))
    return Shape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_len=values.integer("attention.key_length", low=1, high=MAX_HEAD_LEN, default=head_len),
        value_len=values.integer("attention.value_length", low=1, high=MAX_HEAD_LEN, default=head_len),
        context=values.integer("context_length", low=1, high=MAX_CONTEXT, default=0),
    )


def gguf_experts(values: Values, num_layers: int) -> Experts:
    """Read the experts of a GGUF. Raises ModelError where they cannot be true."""
    count = values.integer("expert_count", high=MAX_EXPERTS, default=0)
    used = values.per_layer("expert_used_count", num_layers=num_layers, high=MAX_EXPERTS)
    return Experts(count, used or [0] * num_layers)


def gguf_windows(values: Values, num_layers: int) -> list[int]:
    """Read the sliding window of each layer of a GGUF; 0: none."""
    windows = values.per_layer("attention.sliding_window", num_layers=num_layers, high=MAX_WINDOW)
    return windows or [0] * num_layers


def require_shared_heads(values: Values, num_heads: list[int], num_kv_heads: list[int]) -> None:
    """Refuse query heads that cannot be divided among the key-value heads."""
    for query, kv in zip(num_heads, num_kv_heads, strict=True):
        if query and kv and query % kv:
            raise values.damaged(f"{query} attention heads cannot share {kv} key-value heads")
