"""A Llama in plain torch, float32: for trials that change its weights and look at its predictions.

Owns reading the weights of a GGUF, the forward pass, and the statistics of what each matrix is multiplied with.
Knows nothing of quantization.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclass
class Seen:
    """The inputs of a matrix, by column."""

    squares: Tensor  # the sum of the squares, [columns]
    largest: Tensor  # the largest magnitude, [columns]
    rows: int = 0

    @property
    def mean_square(self) -> Tensor:
        return self.squares / max(self.rows, 1)


class PlainLlama:
    """The weights by their names in the GGUF, and the forward pass over them."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.weights = {
            tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
            for tensor in reader.tensors
        }
        self.stored_bytes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
        self.layers = self._field(reader, "block_count")
        self.heads = self._field(reader, "attention.head_count")
        self.kv_heads = self._field(reader, "attention.head_count_kv")
        self.eps = reader.fields["llama.attention.layer_norm_rms_epsilon"].contents()
        self.base = reader.fields["llama.rope.freq_base"].contents()
        self.seen: dict[str, Seen] | None = None  # filled by the forward pass where it is a dict

    @staticmethod
    def _field(reader: gguf.GGUFReader, name: str) -> int:
        return int(reader.fields[f"llama.{name}"].contents())

    def matrices(self) -> list[str]:
        """Return the names of the matrices in the blocks: all but the embedding."""
        return [f"blk.{layer}.{name}.weight" for layer in range(self.layers) for name in MATRICES]

    @torch.no_grad()
    def log_probs(self, tokens: list[int], changed: dict[str, Tensor] | None = None) -> Tensor:
        """Return ln p of the token after each: [tokens, vocab]. `changed` has other weights for some names."""
        weights = self.weights | (changed or {})
        x = weights["token_embd.weight"][torch.tensor(tokens)]
        cos, sin = self._angles(len(tokens), weights["blk.0.attn_q.weight"].shape[0] // self.heads)
        for layer in range(self.layers):
            x = x + self._attention(weights, f"blk.{layer}.", x, cos, sin)
            x = x + self._ffn(weights, f"blk.{layer}.", x)
        x = F.rms_norm(x, x.shape[-1:], weights["output_norm.weight"], self.eps)
        head = weights.get("output.weight", weights["token_embd.weight"])
        return F.linear(x, head).log_softmax(-1)

    def _attention(self, weights: dict[str, Tensor], block: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], weights[f"{block}attn_norm.weight"], self.eps)
        q, k, v = (self._linear(weights, f"{block}attn_{name}.weight", h) for name in "qkv")
        q, k, v = (part.unflatten(-1, (-1, 2 * cos.shape[-1])).transpose(0, 1) for part in (q, k, v))
        repeat = self.heads // self.kv_heads
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin).repeat_interleave(repeat, 0)
        mixed = F.scaled_dot_product_attention(q, k, v.repeat_interleave(repeat, 0), is_causal=True)
        return self._linear(weights, f"{block}attn_output.weight", mixed.transpose(0, 1).flatten(-2))

    def _ffn(self, weights: dict[str, Tensor], block: str, x: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], weights[f"{block}ffn_norm.weight"], self.eps)
        gate, up = (self._linear(weights, f"{block}ffn_{name}.weight", h) for name in ("gate", "up"))
        return self._linear(weights, f"{block}ffn_down.weight", F.silu(gate) * up)

    def _linear(self, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        if self.seen is not None:
            seen = self.seen.setdefault(name, Seen(torch.zeros(x.shape[-1]), torch.zeros(x.shape[-1])))
            seen.squares += x.square().sum(0)
            seen.largest = torch.maximum(seen.largest, x.abs().amax(0))
            seen.rows += len(x)
        return F.linear(x, weights[name])

    def _angles(self, num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
        rates = self.base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(num_tokens, dtype=torch.float64)[:, None] * rates
        return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours, as llama.cpp's Llama does. x: [heads, tokens, dim]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
