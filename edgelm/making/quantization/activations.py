"""The inputs of a layer's matrices on calibration text: one layer at a time runs over all sequences.

Owns the residual streams of the sequences, which go from layer to layer. Memory holds these (float32, tokens x hidden
size), one layer in float32, and a Hessian (columns x columns) for each input within it. The ops are the decoder's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from edgelm.kernels import delta
from edgelm.kernels.activation import Gate, gated
from edgelm.kernels.cache import BLOCK_LEN, FORMATS, LayerCache, allocate
from edgelm.kernels.delta import StateCache
from edgelm.kernels.embedding import embedding
from edgelm.kernels.grouped import grouped_matmul
from edgelm.kernels.layout import DenseWeight, Weight, dequantize
from edgelm.kernels.matmul import Lengths
from edgelm.making.quantization.int4_layer import Place, Statistics
from edgelm.models.config import ModelConfig
from edgelm.models.decoder import (
    Attention,
    Batch,
    Decoder,
    DeltaNet,
    DenseAndExperts,
    Feed,
    FeedForward,
    Layer,
    Linear,
    NextNorm,
    SharedAndExperts,
    Stream,
    Weights,
)
from edgelm.models.moe import Experts, Stack, routing

BATCH_TOKENS = 2048
OPS = "reference"  # plain torch, on any device
T = TypeVar("T", Linear, Stack)
F = TypeVar("F", FeedForward, Experts)


class Calibration:
    """Sequences of one length on their way through the layers of a model."""

    def __init__(self, config: ModelConfig, ids: Tensor, embeddings: Weight, device: torch.device) -> None:
        """Take token ids [sequences, length] and the embedding of the model."""
        self._config = config
        self._device = device
        num, self.length = ids.shape
        self._residuals = torch.stack(
            [embedding(row, embeddings, scale=config.stream_scale, implementation=OPS) for row in ids]
        )
        self._cache: LayerCache | None = None
        self._states: StateCache | None = None
        self._per_batch = max(1, min(num, BATCH_TOKENS // self.length))
        self._batch = self._prepared(self._per_batch)

    def observe(self, layer: Layer) -> dict[Place, Statistics]:
        """Run a layer; return the statistics of the inputs of its matrices. The streams stay before the layer."""
        statistics: dict[Place, Statistics] = {}
        runner = _Runner(self._config, layer, statistics)
        for part in self._parts():
            self._run(runner, part)
        return statistics

    def advance(self, layer: Layer) -> None:
        """Run a layer, and keep its results as the streams before the next one."""
        runner = _Runner(self._config, layer, None)
        for part in self._parts():
            self._residuals[part] = self._run(runner, part)

    def _run(self, runner: _Runner, part: slice) -> Tensor:
        streams = self._residuals[part]
        batch = self._batch
        if len(streams) < self._per_batch:  # the last one
            batch = self._prepared(len(streams))
        mixer = runner.layer.attention
        cache = self._cache_of(mixer, batch) if isinstance(mixer, Attention) else self._states_of(mixer)
        with torch.no_grad():
            result = runner.run(streams.flatten(0, 1).to(self._device), batch, cache)
        return result.view_as(streams).to(streams.device)

    def _parts(self) -> list[slice]:
        return [slice(start, start + self._per_batch) for start in range(0, len(self._residuals), self._per_batch)]

    def _cache_of(self, layer: Attention, batch: Batch) -> LayerCache:
        """Return the cache of a batch's keys and values; layers of one kind share the last one."""
        heads, num_blocks = (layer.num_kv_heads, layer.head_dim), batch.block_tables.numel()
        if (
            self._cache is None
            or (self._cache.num_kv_heads, self._cache.head_dim) != heads
            or (self._cache.num_blocks < num_blocks)
        ):
            self._cache = allocate(FORMATS["f16"], num_blocks, *heads, self._device, torch.float32)
        return self._cache

    def _states_of(self, layer: DeltaNet) -> StateCache:
        """Return a state for each sequence of a batch, which all layers share: none is read before it is written."""
        if self._states is None:
            self._states = delta.allocate(layer.sizes, self._per_batch, self._device, torch.float32)
        return self._states

    def _prepared(self, num: int) -> Batch:
        """Return a batch of whole sequences."""
        length, blocks = self.length, -(-self.length // BLOCK_LEN)
        positions = torch.arange(length, dtype=torch.int32, device=self._device).repeat(num)
        starts = torch.arange(num + 1, dtype=torch.int32, device=self._device)
        first_slots = (starts[:num].long() * blocks * BLOCK_LEN).repeat_interleave(length)
        return Batch(
            positions=positions,
            slot_mapping=first_slots + positions,
            block_tables=torch.arange(num * blocks, dtype=torch.int32, device=self._device).view(num, blocks),
            query_start_loc=starts * length,
            seq_lens=torch.full((num,), length, dtype=torch.int32, device=self._device),
            max_query_len=length,
            states=torch.tensor([[k, 0, length] for k in range(num)], dtype=torch.int32, device=self._device),
        )


def dense(layer: Layer) -> Layer:
    """Return a layer whose quantized matrices are plain numbers, so that they are unpacked once."""
    mixer, feed = layer.attention, layer.feed
    if isinstance(mixer, Attention):
        mixer = replace(mixer, qkv=_dense_all(mixer.qkv), out=_dense(mixer.out))
    else:
        mixer = replace(mixer, inputs=_dense_all(mixer.inputs), out=_dense(mixer.out))
    assert not isinstance(feed, DenseAndExperts), "int4_plan refuses these"
    plain: Feed
    if isinstance(feed, FeedForward):
        plain = _dense_feed(feed)
    elif isinstance(feed, SharedAndExperts):
        plain = replace(feed, shared=_dense_feed(feed.shared), experts=_dense_feed(feed.experts))
    else:
        plain = _dense_feed(feed)
    return Layer(mixer, plain)


def _dense_feed(feed: F) -> F:
    return replace(feed, gate_up=_dense_all(feed.gate_up), down=_dense(feed.down))


def _dense_all(parts: Sequence[T]) -> tuple[T, ...]:
    return tuple(_dense(part) for part in parts)


def _dense(part: T) -> T:
    return replace(part, weight=DenseWeight(dequantize(part.weight), gated=part.weight.gated))


class _Runner(Decoder):
    """A decoder of one layer, which records the inputs of its matrices."""

    def __init__(self, config: ModelConfig, layer: Layer, statistics: dict[Place, Statistics] | None) -> None:
        nothing = DenseWeight(torch.empty(0, config.hidden_size))
        ends = Weights(embedding=nothing, layers=(layer,), norm=layer.feed.norm, output=Linear(nothing))
        super().__init__(config, ends, torch.float32, OPS)
        self.layer = layer
        self._statistics = statistics
        mixer = layer.attention
        self._places: dict[Linear, Place] = {  # if they are several, they have the same input
            (mixer.qkv if isinstance(mixer, Attention) else mixer.inputs)[0]: Place("attention_in"),
            mixer.out: Place("attention_out"),
        }
        feed = layer.feed.shared if isinstance(layer.feed, SharedAndExperts) else layer.feed
        if isinstance(feed, FeedForward):
            self._places[feed.gate_up[0]] = Place("feed_in")
            self._places[feed.down] = Place("feed_out")

    def run(self, residual: Tensor, batch: Batch, cache: LayerCache | StateCache) -> Tensor:
        """Return the residual stream after the layer, float32 [tokens, hidden_size]."""
        after = NextNorm(self.layer.feed.norm, fused=False)
        mixer = self.layer.attention
        stream = Stream(residual, mixer.norm)
        if isinstance(mixer, Attention):
            assert isinstance(cache, LayerCache)
            stream = self._attend(mixer, stream, batch, cache, after)
        else:
            assert isinstance(cache, StateCache)
            stream = self._recur(mixer, stream, batch, cache, after)
        return self._feed(self.layer.feed, stream, after).residual

    def _linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        lengths: Lengths | None = None,
        gate: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if linear in self._places:
            self._record(self._places[linear], x)
        return super()._linear(x, linear, lengths=lengths, gate=gate, residual=residual)

    def _feed(self, layer: Feed, stream: Stream, next_norm: NextNorm) -> Stream:
        experts = layer.experts if isinstance(layer, SharedAndExperts) else layer
        if isinstance(experts, Experts) and self._statistics is not None:
            self._record_experts(experts, self._normed(stream, self.dtype))
        return super()._feed(layer, stream, next_norm)

    def _record(self, place: Place, x: Tensor) -> None:
        if self._statistics is None:
            return
        if place not in self._statistics:
            self._statistics[place] = Statistics(x.shape[1], x.device)
        self._statistics[place].add(x)

    def _record_experts(self, layer: Experts, x: Tensor) -> None:
        """Record the tokens of each expert; one without a token has statistics of no rows."""
        _, ids = routing(x, layer, OPS)
        for expert in range(layer.down.weight.num_matrices):
            rows = x[(ids == expert).any(1)]
            self._record(Place("feed_in", expert), rows)
            if not len(rows):
                self._record(Place("feed_out", expert), x.new_empty(0, layer.down.weight.columns))
                continue
            own = torch.full((len(rows), 1), expert, dtype=torch.int32, device=x.device)
            gate = self.config.gate if len(layer.gate_up) == 1 else None
            halves = [
                grouped_matmul(rows, stack.weight, own, bias=stack.bias, gate=gate, implementation=OPS)
                for stack in layer.gate_up
            ]
            inner = halves[0] if gate else gated(torch.cat(halves, 1), self.config.gate, implementation=OPS)
            self._record(Place("feed_out", expert), inner)
