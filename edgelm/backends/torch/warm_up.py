"""The steps that run before the first request: they compile every kernel, and allocate memory for all later steps.

Owns the choice of these steps, from the rules by which the ops choose their kernels. Knows nothing of how a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from edgelm.base.sampling import SamplingParams
from edgelm.engine.core import Chunk, Step
from edgelm.engine.core import Sequence as Seq
from edgelm.kernels.attention import VERIFY_LEN
from edgelm.kernels.attention.launch import launch_kind as attention_kind
from edgelm.kernels.cache import BLOCK_LEN, LayerCache
from edgelm.kernels.grouped.kernel import launch_kinds as grouped_kinds
from edgelm.kernels.matmul.kernel import launch_kind as matmul_kind
from edgelm.models.decoder import Decoder, DenseAndExperts, SharedAndExperts
from edgelm.models.moe import Experts

PARAMS = SamplingParams(repetition_penalty=1.1, logit_bias=((0, 0.0),), num_logprobs=1)  # all kernels of the sampler


class Limits(Protocol):
    """The limits of a step, and of a sequence (`context`)."""

    @property
    def context(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def max_sequences(self) -> int: ...


def warm_up_steps(decoder: Decoder, caches: Sequence[LayerCache], limits: Limits) -> Iterator[Step]:
    """Yield the steps, without meaning, on the first blocks of the cache."""
    yield from [_verification(limits, limits.max_tokens, limits.max_rows)] * 2  # with the logits of the step before
    for tokens in _first_of_each(lambda tokens: _step_kind(decoder, caches, limits.context, tokens), limits.max_tokens):
        if tokens <= limits.context:
            yield Step((_chunk(tokens),))
        else:
            yield _verification(limits, tokens, 1)
    most = min(limits.max_rows, limits.max_tokens, limits.max_sequences * VERIFY_LEN)
    for rows in _first_of_each(matmul_kind, most):  # of the output matrix
        yield _verification(limits, rows, rows)


def pass_lengths(head: Decoder, caches: Sequence[LayerCache], context: int, most: int) -> list[int]:
    """Return numbers of rows whose passes through a head that predicts ahead compile all of its kernels."""
    return _first_of_each(lambda rows: _step_kind(head, caches, context, rows), most)


def step_of_rows(rows: int, num_vocab: int) -> Step:
    """Return a step of one sequence with so many tokens, all of them sampled."""
    tokens = [token % num_vocab for token in range(rows)]
    return Step((replace(_chunk(rows, rows), tokens=tokens),))


def _first_of_each(kind: Callable[[int], object], most: int) -> list[int]:
    """Return the numbers from 1 to `most` that are the first of their kind."""
    firsts: dict[object, int] = {}
    for number in range(1, most + 1):
        firsts.setdefault(kind(number), number)
    return list(firsts.values())


def _step_kind(decoder: Decoder, caches: Sequence[LayerCache], context: int, tokens: int) -> object:
    """Return the kind of a step that runs a prompt: two lengths with one kind use the same compiled kernels."""
    positions = -(-context // BLOCK_LEN) * BLOCK_LEN  # of a block table
    heads = {(cache.num_kv_heads, cache.width): cache for cache in caches}.values()
    kinds: set[object] = {attention_kind(tokens, cache, decoder.config.num_heads, positions) for cache in heads}
    for layer in decoder.weights.layers:
        feed = layer.feed.experts if isinstance(layer.feed, DenseAndExperts | SharedAndExperts) else layer.feed
        if isinstance(feed, Experts):
            for stack in feed.gate_up:
                kinds |= grouped_kinds(tokens, feed.used, stack.weight, decoder.dtype, summed=False)
            kinds |= grouped_kinds(tokens, feed.used, feed.down.weight, decoder.dtype, summed=True)
    return matmul_kind(tokens), frozenset(kinds)


def _verification(limits: Limits, tokens: int, rows: int) -> Step:
    """Return a step that shares tokens and sampled rows among as many sequences as there can be."""
    count = min(limits.max_sequences, tokens)
    chunks, left, rows_left = [], min(tokens, count * limits.context), rows
    for index in range(count):
        share = -(-left // (count - index))
        sampled = min(-(-rows_left // (count - index)), share, VERIFY_LEN)
        chunks.append(_chunk(share, sampled))
        left, rows_left = left - share, rows_left - sampled
    return Step(tuple(chunks))


def _chunk(count: int, rows: int = 1) -> Chunk:
    return Chunk(Seq(-1, [0], 1, PARAMS), 0, [0] * count, rows, tuple(range(-(-count // BLOCK_LEN))))
