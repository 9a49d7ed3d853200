"""Cases of the ops over the cache of keys and values: the heads of Llama-8B, one sequence of growing length."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.attention import attention
from edgelm.kernels.benchmark import BenchCase, Work, nbytes_of
from edgelm.kernels.cache import BLOCK_LEN, FORMATS, KVFormat, LayerCache, allocate
from edgelm.kernels.rope import Rope
from edgelm.kernels.store import store

LENGTHS = (1024, 8192, 32768, 131072)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128

# float16 results, and probabilities and values rounded to float16 before they are multiplied: half a unit in the last
# place (2 ** -11) of each of the three, on either side. fp8 and k6v4 multiply rescaled values: one rounding more.
TOLERANCE = 8 * 2.0**-11
_CODE_SCALE = {"int8": 1 / 64, "fp8": 1 / 128, "int6": 1 / 16, "int4": 1 / 4}


class Heads(NamedTuple):
    """How many heads there are, and how wide."""

    queries: int = HEADS
    keys: int = KV_HEADS
    dim: int = HEAD_DIM


class Look(NamedTuple):
    """Inputs of `attention`: one sequence."""

    q: Tensor  # float16 [rows, heads, head_dim]
    cache: LayerCache
    tables: Tensor
    starts: Tensor
    lengths: Tensor


class Fresh(NamedTuple):
    """Inputs of `store`."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    slots: Tensor
    cache: LayerCache
    rope: Rope


def bench_cases(tiny: bool) -> list[BenchCase]:
    """Return the cases of attention and store."""
    heads = Heads(4, 2, 64) if tiny else Heads()
    lengths = (45, 130) if tiny else LENGTHS
    rows = (1, 3) if tiny else (1, 8)
    cases = [_attention(FORMATS[name], heads, length, n) for name in FORMATS for length in lengths for n in rows]
    return cases + [_store(FORMATS[name], heads, n) for name in FORMATS for n in ((1, 3) if tiny else (1, 8, 512))]


def random_cache(kv_format: KVFormat, num_blocks: int, heads: Heads, generator: Generator) -> LayerCache:
    """Return blocks full of random entries of about 1 in size."""
    cache = allocate(kv_format, num_blocks, heads.keys, heads.dim, generator.device)
    for name, plane in cache.planes.items():
        kind = kv_format.key if name.startswith("key") else kv_format.value
        if name.endswith("scales"):
            plane.copy_((torch.rand(plane.shape, generator=generator) + 0.5) * _CODE_SCALE[kind or ""])
        elif plane.dtype == torch.int32:
            plane.random_(-(2**31), 2**31, generator=generator)
        elif plane.dtype == torch.uint8:
            plane.random_(0, 256, generator=generator)
            if kind == "fp8":
                plane.bitwise_and_(0xF7)  # exponent and mantissa are never all ones: no NaN
        else:
            plane.normal_(generator=generator)
    return cache


def _attention(kv_format: KVFormat, heads: Heads, length: int, rows: int) -> BenchCase:
    def run(given: Look, how: str) -> Any:
        tables, starts, lengths = given.tables, given.starts, given.lengths
        scale = heads.dim**-0.5
        return attention(given.q, given.cache, tables, starts, lengths, scale=scale, max_query=rows, implementation=how)

    per_token = kv_format.bytes_per_token(heads.keys, heads.dim)
    return BenchCase(
        op="attention",
        shape=f"{heads.queries}:{heads.keys}x{heads.dim} len={length}",
        rows=rows,
        format=kv_format.name,
        work=Work(partial(_look, kv_format, heads, length, rows), run),
        moved_bytes=lambda given: length * per_token + 2 * nbytes_of(given.q),
        tolerance=TOLERANCE,
    )


def _look(kv_format: KVFormat, heads: Heads, length: int, rows: int, generator: Generator) -> Look:
    num_blocks = -(-length // BLOCK_LEN)
    return Look(
        q=torch.randn(rows, heads.queries, heads.dim, generator=generator).half(),
        cache=random_cache(kv_format, num_blocks, heads, generator),
        tables=torch.randperm(num_blocks, generator=generator, dtype=torch.int32).unsqueeze(0),
        starts=torch.tensor([0, rows], dtype=torch.int32),
        lengths=torch.tensor([length], dtype=torch.int32),
    )


def _store(kv_format: KVFormat, heads: Heads, rows: int) -> BenchCase:
    def run(given: Fresh, how: str) -> Any:
        return store(
            given.q, given.k, given.v, given.positions, given.slots, given.cache, rope=given.rope, implementation=how
        )

    return BenchCase(
        op="store",
        shape=f"{heads.queries}:{heads.keys}x{heads.dim}",
        rows=rows,
        format=kv_format.name,
        work=Work(partial(_fresh, kv_format, heads, rows), run),
        moved_bytes=lambda given: (
            2 * nbytes_of(given.q)
            + nbytes_of((given.k, given.v))
            + rows * kv_format.bytes_per_token(heads.keys, heads.dim)
        ),
        tolerance=TOLERANCE,
        compared=lambda given, q: (q, *_floats(given.cache)),
    )


def _floats(cache: LayerCache) -> list[Tensor]:
    """Return the planes that are not codes: where those lie on a boundary, a rounding makes them differ by one."""
    return [plane for plane in cache.planes.values() if plane.is_floating_point()]


def _fresh(kv_format: KVFormat, heads: Heads, rows: int, generator: Generator) -> Fresh:
    num_blocks = max(4, -(-rows // BLOCK_LEN))
    fused = torch.randn(rows, heads.queries + 2 * heads.keys, heads.dim, generator=generator).half()
    q, k, v = fused.tensor_split([heads.queries, heads.queries + heads.keys], 1)
    slots = torch.randperm(num_blocks * BLOCK_LEN, generator=generator)[:rows]
    positions = torch.randint(0, 8192, (rows,), generator=generator, dtype=torch.int32)
    frequencies = 500_000.0 ** -(torch.arange(0, heads.dim, 2, dtype=torch.float32) / heads.dim)
    cache = allocate(kv_format, num_blocks, heads.keys, heads.dim, generator.device)
    return Fresh(q, k, v, positions, slots, cache, Rope(frequencies))
