"""The decoder of all families: blocks of attention and feed-forward around one residual stream.

Owns the order of the ops and the types between them, and the batch that a forward pass runs on. Knows nothing of files,
weight formats, requests or who fills the cache. Nothing here reads a tensor on the host: with fixed sizes, a CUDA graph
can replay it.

    stream -> [qkv] -> [head norms, rope, write_kv] -> [attention] -> [out, + stream, norm] -> feed-forward -> stream
    feed-forward: [gate and up, gated] -> [down, + stream, norm], or the experts of moe.py, or both beside each other

Each bracket is one kernel if a step has few rows: matmul fuses the sum and the norm after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from edgelm.kernels import cache as kv_cache
from edgelm.kernels import delta
from edgelm.kernels.activation import Gate, gated, softcap
from edgelm.kernels.attention import attention
from edgelm.kernels.cache import KVFormat, LayerCache
from edgelm.kernels.delta import StateCache, gated_delta
from edgelm.kernels.delta_sizes import DeltaSizes
from edgelm.kernels.embedding import embedding
from edgelm.kernels.head_gate import gate_heads
from edgelm.kernels.layout import Weight
from edgelm.kernels.matmul import Lengths, Norm, matmul, matmul_and_norm
from edgelm.kernels.norm import add_rms_norm, rms_norm
from edgelm.kernels.rope import Rope
from edgelm.kernels.write_kv import write_kv
from edgelm.models.config import ModelConfig
from edgelm.models.moe import Experts, mixture

GATED_NUMBERS = 256  # of a row, by one program of a kernel


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of a step, sequence after sequence. A CUDA graph fixes the sizes of these tensors, not their values."""

    positions: Tensor  # int32 [tokens]
    slot_mapping: Tensor  # int64 [tokens]: block * BLOCK_LEN + offset of the token's KV; below 0: not written
    block_tables: Tensor  # int32 [sequences, max_blocks]
    query_start_loc: Tensor  # int32 [sequences + 1]: the first row of each sequence, then the number of rows
    seq_lens: Tensor  # int32 [sequences]: positions in the cache, with those of this step; 0: no sequence
    max_query_len: int  # the most rows that a sequence has
    only_prompts: bool = False  # no sequence has 1 to VERIFY_LEN rows
    states: Tensor | None = None  # int32 [sequences, 3]: the `spans` of `gated_delta`; None: no layer has states

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A matrix with its bias; `sizes`: the rows of each part, if several matrices are fused."""

    weight: Weight
    bias: Tensor | None = None  # float32 [rows]
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Attention:
    """Self-attention of one layer. `qkv` fuses q, k and v into as few matrices as their formats allow.

    Without a matrix of v, the products of k are the values too.
    """

    norm: Norm
    qkv: tuple[Linear, ...]
    out: Linear
    rope: Rope | None
    window: int
    head_dim: int
    num_kv_heads: int
    q_norm: Tensor | None = None  # float32 [head_dim]
    k_norm: Tensor | None = None
    v_norm: Tensor | None = None
    sinks: Tensor | None = None  # float32 [num_heads]
    post_norm: Tensor | None = None  # float32 [hidden_size]
    gated: bool = False  # behind the query of each head is the gate of its result


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeltaNet:
    """The gated delta net of one layer. `inputs` has q, k and v in one part, z, beta, alpha, as fused as possible."""

    norm: Norm
    inputs: tuple[Linear, ...]
    conv: Tensor  # float32 [channels, window]
    decay: Tensor  # float32 [num_value_heads]
    bias: Tensor
    head_norm: Tensor  # float32 [value_dim]
    out: Linear
    sizes: DeltaSizes


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FeedForward:
    """The gated feed-forward of one layer. `gate_up` is one matrix, from `fuse_gated`, or gate and up separately."""

    norm: Norm
    gate_up: tuple[Linear, ...]
    down: Linear
    post_norm: Tensor | None = None
    scale: float = 1.0  # of the stream behind the layer


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DenseAndExperts:
    """A dense feed-forward and experts on the same stream. The sum of their post-norms has one of its own."""

    dense: FeedForward  # its post-norm is that of its own result
    experts: Experts
    router_norm: Tensor  # float32 [hidden_size], as the others
    expert_post_norm: Tensor
    post_norm: Tensor

    @property
    def norm(self) -> Norm:
        return self.dense.norm


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedAndExperts:
    """Experts, and one that all tokens use, with a gate for its whole result. All read one norm."""

    shared: FeedForward
    experts: Experts
    gate: Weight  # [1, hidden_size]

    @property
    def norm(self) -> Norm:
        return self.experts.norm


Feed = FeedForward | Experts | DenseAndExperts | SharedAndExperts


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The two blocks of a layer."""

    attention: Attention | DeltaNet
    feed: Feed


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Weights:
    """All weights of a model, on one device."""

    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Norm
    output: Linear


class Stream(NamedTuple):
    """The residual stream between two blocks, and the input of the next one."""

    residual: Tensor  # float32 [tokens, hidden_size]
    norm: Norm  # before the next block
    x: Tensor | None = None  # [tokens, hidden_size], the norm of the residual; None: not made yet
    lengths: Lengths | None = None  # by which x is still to be divided


class NextNorm(NamedTuple):
    """The norm behind a block."""

    norm: Norm
    fused: bool  # a matmul reads all rows behind it; else experts are routed first, or the output needs a few rows only


class Decoder:
    """One model, ready to run. Activations have the type `dtype`; the residual stream is float32."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, implementation: str) -> None:
        """Take loaded weights; `implementation` is that of every op, "triton" or "reference"."""
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.implementation = implementation
        self._first_norm = weights.layers[0].attention.norm
        after = [NextNorm(layer.attention.norm, fused=True) for layer in weights.layers[1:]]
        self._norms = [  # behind attention, behind the feed-forward
            (NextNorm(layer.feed.norm, isinstance(layer.feed, FeedForward)), behind)
            for layer, behind in zip(weights.layers, [*after, NextNorm(weights.norm, fused=False)], strict=True)
        ]

    @property
    def vocab_size(self) -> int:
        return self.weights.output.weight.rows

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def new_caches(
        self, kv_format: KVFormat, num_blocks: int, num_slots: int, dtype16: torch.dtype
    ) -> list[LayerCache | StateCache]:
        """Return the cleared cache of each layer: `num_slots` states, or blocks of keys and values.

        `dtype16` is what the format "f16" stores.
        """
        return [
            delta.allocate(layer.delta, num_slots, self.device, self.dtype)
            if layer.delta
            else kv_cache.allocate(kv_format, num_blocks, layer.num_kv_heads, layer.head_dim, self.device, dtype16)
            for layer in self.config.layers
        ]

    def forward(self, ids: Tensor, batch: Batch, caches: Sequence[LayerCache | StateCache]) -> Tensor:
        """Run token ids, int32 [tokens], and write their KV; return the last hidden states, after the final norm.

        They are float32 [tokens, hidden_size]. There is one cache per layer. Rows that belong to no sequence have
        arbitrary values.
        """
        return self._normed(self._blocks(ids, batch, caches), torch.float32)

    def forward_rows(
        self,
        ids: Tensor,
        batch: Batch,
        caches: Sequence[LayerCache | StateCache],
        rows: Tensor,
        last: Tensor | None = None,
    ) -> Tensor:
        """Do the same as `forward`; return only `rows`, int64 [rows], as `logits` takes them.

        With `last`, int64 [any number], the id -1 - i stands for the token last[i], which nothing but the embedding
        reads.
        """
        stream = self._blocks(ids, batch, caches, last)
        if stream.x is not None:
            return stream.x.index_select(0, rows)
        (weight, eps), implementation = stream.norm, self.implementation
        return rms_norm(stream.residual, weight, eps, rows=rows, out_dtype=self.dtype, implementation=implementation)

    def _blocks(
        self, ids: Tensor, batch: Batch, caches: Sequence[LayerCache | StateCache], last: Tensor | None = None
    ) -> Stream:
        """Return the stream behind the last layer."""
        residual = embedding(
            ids, self.weights.embedding, scale=self.config.stream_scale, last=last, implementation=self.implementation
        )
        return self._through(residual, batch, caches)

    def _through(self, residual: Tensor, batch: Batch, caches: Sequence[LayerCache | StateCache]) -> Stream:
        stream = Stream(residual, self._first_norm)
        stream = stream._replace(x=self._normed(stream, self.dtype))
        for layer, cache, (feed_norm, next_norm) in zip(self.weights.layers, caches, self._norms, strict=True):
            if isinstance(cache, StateCache):
                assert isinstance(layer.attention, DeltaNet)
                stream = self._recur(layer.attention, stream, batch, cache, feed_norm)
            else:
                assert isinstance(layer.attention, Attention)
                stream = self._attend(layer.attention, stream, batch, cache, feed_norm)
            stream = self._feed(layer.feed, stream, next_norm)
        return stream

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 [rows, vocab_size] for rows of the result of `forward`, or for that of `forward_rows`.

        They go to `out` if it is given, through the soft cap in place.
        """
        output = self.weights.output
        logits = matmul(
            hidden.to(self.dtype),
            output.weight,
            bias=output.bias,
            out_dtype=torch.float32,
            out=out,
            implementation=self.implementation,
        )
        cap = self.config.final_softcap
        return softcap(logits, cap, out=out, implementation=self.implementation) if cap else logits

    def _attend(self, layer: Attention, stream: Stream, batch: Batch, cache: LayerCache, next_norm: NextNorm) -> Stream:
        config = self.config
        x = self._normed(stream, self.dtype)
        products = [self._linear(x, linear, lengths=stream.lengths) for linear in layer.qkv]
        q, k, *rest = (
            part.view(part.shape[0], -1, layer.head_dim)
            for rows, linear in zip(products, layer.qkv, strict=True)
            for part in torch.split(rows, list(linear.sizes), 1)
        )
        gate = None
        if layer.gated:
            q, gate = torch.split(q.view(q.shape[0], -1, 2 * layer.head_dim), layer.head_dim, 2)
        q = write_kv(
            q,
            k,
            rest[0] if rest else k,
            batch.positions,
            batch.slot_mapping,
            cache,
            rope=layer.rope,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            v_norm=layer.v_norm,
            eps=config.norm_eps,
            implementation=self.implementation,
        )
        heads = attention(
            q,
            cache,
            batch.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            scale=config.attention_scale,
            window=layer.window,
            softcap=config.attention_softcap,
            sinks=layer.sinks,
            max_query_len=batch.max_query_len,
            only_prompts=batch.only_prompts,
            implementation=self.implementation,
        )
        if gate is not None:
            heads = gate_heads(heads, gate, out_dtype=self.dtype, implementation=self.implementation)
        return self._joined(stream, heads.flatten(1), layer.out, layer.post_norm, next_norm)

    def _recur(self, layer: DeltaNet, stream: Stream, batch: Batch, cache: StateCache, next_norm: NextNorm) -> Stream:
        assert batch.states is not None
        sizes = layer.sizes
        x = self._normed(stream, self.dtype)
        products = [self._linear(x, linear, lengths=stream.lengths) for linear in layer.inputs]
        qkv, z, beta, alpha = (
            part
            for rows, linear in zip(products, layer.inputs, strict=True)
            for part in torch.split(rows, list(linear.sizes), 1)
        )
        heads = gated_delta(
            qkv,
            beta,
            alpha,
            layer.conv,
            layer.decay,
            layer.bias,
            cache,
            batch.states,
            batch.query_start_loc,
            batch.seq_lens,
            max_query_len=batch.max_query_len,
            implementation=self.implementation,
        )
        gated_heads = gate_heads(
            heads,
            z.view(z.shape[0], -1, sizes.value_dim),
            layer.head_norm,
            self.config.norm_eps,
            out_dtype=self.dtype,
            implementation=self.implementation,
        )
        return self._joined(stream, gated_heads.flatten(1), layer.out, None, next_norm)

    def _feed(self, layer: Feed, stream: Stream, next_norm: NextNorm) -> Stream:
        if isinstance(layer, DenseAndExperts):
            return self._feed_both(layer, stream, next_norm)
        if isinstance(layer, SharedAndExperts):
            return self._feed_shared(layer, stream, next_norm)
        if isinstance(layer, Experts):
            assert stream.lengths is None, "experts are routed by rows of length 1"
            x = self._normed(stream, self.dtype)
            return Stream(mixture(x, layer, self.config.gate, stream.residual, self.implementation), next_norm.norm)
        return self._joined(stream, self._inner(layer, stream), layer.down, layer.post_norm, next_norm, layer.scale)

    def _inner(self, layer: FeedForward, stream: Stream) -> Tensor:
        """Return the gated rows between the matrices of a dense feed-forward."""
        x, lengths, gate = self._normed(stream, self.dtype), stream.lengths, self.config.gate
        if len(layer.gate_up) == 1:
            return self._linear(x, layer.gate_up[0], lengths=lengths, gate=gate)
        halves = [self._linear(x, linear, lengths=lengths) for linear in layer.gate_up]  # of two formats
        return gated(torch.cat(halves, 1), gate, implementation=self.implementation)

    def _feed_both(self, layer: DenseAndExperts, stream: Stream, next_norm: NextNorm) -> Stream:
        assert layer.dense.post_norm is not None
        ops, residual, eps = self.implementation, stream.residual, layer.norm.eps
        dense = self._linear(self._inner(layer.dense, stream), layer.dense.down)
        dense = rms_norm(dense, layer.dense.post_norm, eps, out_dtype=torch.float32, implementation=ops)
        x = rms_norm(residual, layer.experts.norm.weight, eps, out_dtype=self.dtype, implementation=ops)
        routed = rms_norm(residual, layer.router_norm, eps, out_dtype=self.dtype, implementation=ops)
        mixed = mixture(x, layer.experts, self.config.gate, None, ops, routed=routed)
        both, _ = add_rms_norm(
            mixed, dense, layer.post_norm, eps, post_weight=layer.expert_post_norm, implementation=ops
        )
        norm = next_norm.norm
        normed, residual = add_rms_norm(
            both, residual, norm.weight, norm.eps, scale=layer.dense.scale, out_dtype=self.dtype, implementation=ops
        )
        return Stream(residual, norm, normed)

    def _feed_shared(self, layer: SharedAndExperts, stream: Stream, next_norm: NextNorm) -> Stream:
        assert stream.lengths is None, "experts are routed by rows of length 1"
        x, ops = self._normed(stream, self.dtype), self.implementation
        inner = self._inner(layer.shared, stream._replace(x=x))
        gate = matmul(x, layer.gate, out_dtype=torch.float32, implementation=ops)  # [tokens, 1]
        parts = inner.view(inner.shape[0], -1, math.gcd(inner.shape[1], GATED_NUMBERS))
        inner = gate_heads(parts, gate.unsqueeze(2), out_dtype=self.dtype, implementation=ops).flatten(1)
        residual = self._linear(inner, layer.shared.down, residual=stream.residual)
        return Stream(mixture(x, layer.experts, self.config.gate, residual, ops), next_norm.norm)

    def _joined(
        self,
        stream: Stream,
        x: Tensor,
        linear: Linear,
        post_norm: Tensor | None,
        next_norm: NextNorm,
        scale: float = 1.0,
    ) -> Stream:
        """Add a block's result to the stream, after the post-norm if the family has one, and scale the sum."""
        (norm, fused), implementation = next_norm, self.implementation
        if post_norm is not None:
            normed, residual = add_rms_norm(
                self._linear(x, linear),
                stream.residual,
                norm.weight,
                norm.eps,
                post_weight=post_norm,
                scale=scale,
                out_dtype=self.dtype,
                implementation=implementation,
            )
            return Stream(residual, norm, normed)
        assert scale == 1, "families that scale a layer have post-norms"
        if not fused:
            return Stream(self._linear(x, linear, residual=stream.residual), norm)
        residual, scaled, lengths = matmul_and_norm(
            x,
            linear.weight,
            norm,
            bias=linear.bias,
            residual=stream.residual,
            dtype=self.dtype,
            implementation=implementation,
        )
        return Stream(residual, norm, scaled, lengths)

    def _normed(self, stream: Stream, dtype: torch.dtype) -> Tensor:
        """Return the input of the next block; if the stream has lengths, the block's matmul divides by them."""
        if stream.x is not None:
            return stream.x.to(dtype)
        weight, eps = stream.norm
        return rms_norm(stream.residual, weight, eps, out_dtype=dtype, implementation=self.implementation)

    def _linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        lengths: Lengths | None = None,
        gate: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return matmul(
            x,
            linear.weight,
            bias=linear.bias,
            residual=residual,
            gate=gate,
            lengths=lengths,
            out_dtype=torch.float32 if residual is not None else self.dtype,
            implementation=self.implementation,
        )
