"""The decoder that all families are: blocks of attention and feed-forward around one residual stream.

Owns the order of the ops and the type of what flows between them. Knows nothing of files, formats of weights, requests
or who fills the cache. Nothing here reads what is on the device: with fixed sizes a CUDA graph can replay it.

    stream -> [norm, qkv] -> [head norms, rotation, store] -> [attention] -> [out, + stream] -> feed-forward -> stream
    feed-forward: [norm, gate and up, gated] -> [down, + stream], or the experts of moe.py

Each bracket is one kernel while a step has few rows: matmul computes the norm before it and the sum behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from edgelm.kernels.activation import gated, softcap
from edgelm.kernels.attention import attention
from edgelm.kernels.cache import LayerCache
from edgelm.kernels.embedding import embedding
from edgelm.kernels.gate import Gate
from edgelm.kernels.layout import Weight
from edgelm.kernels.matmul import ROWS, Norm, matmul
from edgelm.kernels.norm import add_rms_norm, rms_norm
from edgelm.kernels.rope import Rope
from edgelm.kernels.store import store
from edgelm.models.batch import Batch
from edgelm.models.config import ModelConfig
from edgelm.models.moe import Experts, mixture


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A matrix with its bias; or several matrices by rows, of `sizes`, in one."""

    weight: Weight
    bias: Tensor | None = None  # float32 [rows]
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Attention:
    """Self-attention of one layer. `qkv` has the rows of q, k and v in as few matrices as their formats allow."""

    norm: Norm
    qkv: tuple[Linear, ...]
    out: Linear
    rope: Rope | None
    window: int
    q_norm: Tensor | None = None  # float32 [head_dim]
    k_norm: Tensor | None = None
    sinks: Tensor | None = None  # float32 [heads]
    post_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FeedForward:
    """The gated network of one layer. `gate_up` is one matrix, of `fuse_gated`, or gate and up one after the other."""

    norm: Norm
    gate_up: tuple[Linear, ...]
    down: Linear
    post_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One block of each kind."""

    attention: Attention
    feed: FeedForward | Experts


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Weights:
    """All that a model has learned, on one device."""

    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Norm
    output: Linear


class Stream(NamedTuple):
    """What flows from block to block."""

    residual: Tensor  # float32 [tokens, width]
    x: Tensor  # what the next block reads
    norm: Norm | None  # what it applies to x first; None: x has it


class Decoder:
    """One model, ready to run. Activations are of `dtype`, the residual stream is float32."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, implementation: str) -> None:
        """Take weights that are loaded; `implementation` is that of every op: "triton" or "reference"."""
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.implementation = implementation
        feeds = [layer.feed.norm for layer in weights.layers]
        attentions = [layer.attention.norm for layer in weights.layers]
        self._first_norm = attentions[0]
        self._norms = list(zip(feeds, [*attentions[1:], weights.norm], strict=True))  # after attention, after feed

    @property
    def vocab_size(self) -> int:
        return self.weights.output.weight.rows

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def forward(self, ids: Tensor, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """Run tokens, int32 [tokens], storing their keys and values; return float32 [tokens, width], normed.

        `caches` has one for each layer. Rows that belong to no sequence give anything.
        """
        residual = embedding(
            ids, self.weights.embedding, scale=self.config.embedding_scale, implementation=self.implementation
        )
        stream = self._entering(residual, self._first_norm)
        for layer, cache, (feed_norm, next_norm) in zip(self.weights.layers, caches, self._norms, strict=True):
            stream = self._attend(layer.attention, stream, batch, cache, feed_norm)
            stream = self._feed(layer.feed, stream, next_norm)
        return self._normed(stream, torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [rows, vocab_size] for rows of what `forward` returned."""
        output = self.weights.output
        logits = self._linear(hidden.to(self.dtype), output, out_dtype=torch.float32)
        cap = self.config.final_softcap
        return softcap(logits, cap, implementation=self.implementation) if cap else logits

    def _attend(self, layer: Attention, stream: Stream, batch: Batch, cache: LayerCache, next_norm: Norm) -> Stream:
        config = self.config
        fused = [self._linear(stream.x, each, norm=stream.norm) for each in layer.qkv]
        q, k, v = (
            part.view(part.shape[0], -1, config.head_dim)
            for wide, each in zip(fused, layer.qkv, strict=True)
            for part in torch.split(wide, list(each.sizes), 1)
        )
        q = store(
            q,
            k,
            v,
            batch.positions,
            batch.slots,
            cache,
            rope=layer.rope,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.norm_eps,
            implementation=self.implementation,
        )
        heads = attention(
            q,
            cache,
            batch.tables,
            batch.starts,
            batch.lengths,
            scale=config.attention_scale,
            window=layer.window,
            softcap=config.attention_softcap,
            sinks=layer.sinks,
            max_query=batch.max_query,
            implementation=self.implementation,
        )
        return self._joined(stream, heads.flatten(1), layer.out, layer.post_norm, next_norm)

    def _feed(self, layer: FeedForward | Experts, stream: Stream, next_norm: Norm) -> Stream:
        gate = self.config.gate
        if isinstance(layer, Experts):
            x = self._normed(stream, self.dtype)
            residual = mixture(x, layer, gate, stream.residual, self.implementation)
            return self._entering(residual, next_norm)
        if len(layer.gate_up) == 1:
            inner = self._linear(stream.x, layer.gate_up[0], norm=stream.norm, gate=gate)
        else:  # two formats: one kernel cannot read both
            halves = [self._linear(stream.x, each, norm=stream.norm) for each in layer.gate_up]
            inner = gated(torch.cat(halves, 1), gate, implementation=self.implementation)
        return self._joined(stream, inner, layer.down, layer.post_norm, next_norm)

    def _joined(self, stream: Stream, x: Tensor, linear: Linear, post_norm: Tensor | None, next_norm: Norm) -> Stream:
        """Add a block's result to the stream, with the norm that follows it where the family has one."""
        if post_norm is None:
            residual = self._linear(x, linear, residual=stream.residual)
            return self._entering(residual, next_norm)
        normed, residual = add_rms_norm(
            self._linear(x, linear),
            stream.residual,
            next_norm.weight,
            next_norm.eps,
            post_weight=post_norm,
            out_dtype=self.dtype,
            implementation=self.implementation,
        )
        return Stream(residual, normed, None)

    def _entering(self, residual: Tensor, norm: Norm) -> Stream:
        """Return the stream before a block: of few rows that block's matmul computes the norm, of more a kernel."""
        if residual.shape[0] <= ROWS:
            return Stream(residual, residual, norm)
        return Stream(residual, self._normed(Stream(residual, residual, norm), self.dtype), None)

    def _normed(self, stream: Stream, dtype: torch.dtype) -> Tensor:
        if stream.norm is None:
            return stream.x.to(dtype)
        weight, eps = stream.norm
        return rms_norm(stream.x, weight, eps, out_dtype=dtype, implementation=self.implementation)

    def _linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: Norm | None = None,
        gate: Gate | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return matmul(
            x,
            linear.weight,
            bias=linear.bias,
            residual=residual,
            gate=gate,
            norm=norm,
            out_dtype=torch.float32 if residual is not None else out_dtype or self.dtype,
            implementation=self.implementation,
        )
