"""How attention is launched: the constants of its kernels, their scratch and their grids.

Owns these choices, none of which reads the device. Knows nothing of what the kernels do with them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.attention.prefill.triton import attend_tiles
from edgelm.kernels.attention.triton import attend_chunks, combine_chunks
from edgelm.kernels.cache import BLOCK_LEN, GROUP, LayerCache
from edgelm.kernels.choice import interpreting
from edgelm.kernels.target import kwidth, num_sms

VERIFY_LEN = 16  # queries of a sequence, at most, that attend_chunks takes
MAX_GROUPS = 4  # of 32 dimensions, whose sums fit the registers
MAX_REGISTERS = 255  # else the assembler may spill a few to get below a number that it prefers
WAVES = 4  # programs for each multiprocessor, about
MAX_SCRATCH = 256 << 20  # bytes, of the sums of attend_chunks: beyond, some sequences after the others
AT_ONCE = 16  # chunks that combine_chunks loads at a time
DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if interpreting() else tl.bfloat16,  # the interpreter has no dot of bfloat16
    torch.float32: tl.float32,
}


class Tile(NamedTuple):
    """What a program of attend_tiles holds at a time."""

    rows: int
    tokens: int
    num_warps: int


def tile_of(groups: int) -> Tile:
    """Return the tile for heads of so many groups of 32 dimensions: sums and operands have to fit the registers."""
    if interpreting():
        return Tile(32, 64, 4)
    if groups <= 2:
        return Tile(64, 64, 4)
    return Tile(64, 32, 8) if groups <= MAX_GROUPS else Tile(32, 32, 8)


def num_chunks(length: int) -> int:
    """Return how many chunks the first `length` positions have: chunk_of(length - 1) + 1 of triton.py."""
    octave, start = 0, 0
    while length - 1 >= start + (8192 << octave):
        start += 8192 << octave
        octave += 1
    return 32 * octave + (length - 1 - start >> (8 + octave)) + 1


def dot_dtype(q: Tensor, cache: LayerCache) -> torch.dtype:
    """Return what is multiplied: q's float32, else what a cache of 16 bits stores; codes are exact in float16."""
    if q.dtype == torch.float32 or cache.keys.dtype == torch.float32:
        return torch.float32
    return torch.float16 if cache.format.key else cache.keys.dtype


def constants(cache: LayerCache, heads: int, dtype: torch.dtype) -> dict[str, object]:
    """Return the constexprs that name a cache and what is made of it."""
    return {
        "KV_HEADS": cache.kv_heads,
        "SIBLINGS": heads // cache.kv_heads,
        "HEAD_DIM": cache.head_dim,
        "GROUPS": cache.width // GROUP,
        "KEY": cache.format.key or "f16",
        "VALUE": cache.format.value or "f16",
        "DOT": DTYPES[dtype],
        "ASM": not interpreting() and dtype != torch.float32,
    }


def parts_of(cache: LayerCache) -> int:
    """Return how many programs of attend_chunks share a head's values; keys of 16 and 6 bits take most registers."""
    groups = cache.width // GROUP
    if groups <= MAX_GROUPS:
        return 2 if groups == MAX_GROUPS and cache.format.key is None else 1
    return 2 if cache.format.key in ("int8", "fp8") else groups // 2


def words(plane: Tensor) -> Tensor:
    """Return a plane of codes as int32 [...]; 16-bit values as they are."""
    return plane.view(torch.int32) if plane.dtype == torch.uint8 else plane


def run(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    max_query: int,
    out: Tensor,
) -> None:
    """Write the attention of each row into `out`, [tokens, heads, head_dim].

    Sequences with up to VERIFY_LEN rows go one way and longer ones the other, in whatever step they are.
    """
    assert q.is_contiguous()
    assert tables.is_contiguous()
    if q.numel() == 0 or tables.shape[0] == 0:
        return
    args = (q, cache, tables, starts, lengths, scale, window, softcap, sinks, max_query, out)
    _run_few(*args)
    if max_query > VERIFY_LEN:
        _run_many(*args)


def _run_few(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    max_query: int,
    out: Tensor,
) -> None:
    """Run both kernels for as many sequences at a time as their scratch allows."""
    rows = min(max_query, VERIFY_LEN) * (q.shape[1] // cache.kv_heads)
    chunks = num_chunks(max(tables.shape[1], 1) * BLOCK_LEN)
    sequences = at_once(cache.kv_heads * chunks * rows * (cache.width + 2) * 4, tables.shape[0])
    shape = (sequences, cache.kv_heads, chunks, rows)
    sums = torch.empty(*shape, cache.width, dtype=torch.float32, device=q.device)
    stats = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    for begin in range(0, tables.shape[0], sequences):
        end = begin + sequences
        of_some = (tables[begin:end], starts[begin : end + 1], lengths[begin:end])
        _run_some(q, cache, *of_some, scale, window, softcap, sinks, max_query, out, sums, stats)


def at_once(bytes_each: int, sequences: int) -> int:
    """Return how many of the sequences have their scratch at the same time."""
    most = max(MAX_SCRATCH // max(bytes_each, 1), 1)
    if most >= sequences:
        return sequences
    return most // 4 * 4 or most  # their lengths and tables are then aligned to 16 bytes, as in the first launch


def _run_some(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    max_query: int,
    out: Tensor,
    sums: Tensor,
    stats: Tensor,
) -> None:
    sequences, table_len = tables.shape
    heads, groups = q.shape[1], cache.width // GROUP
    siblings = heads // cache.kv_heads
    dtype = dot_dtype(q, cache)
    named = constants(cache, heads, dtype)
    rotated = cache.format.rotated
    chunks, rows = sums.shape[2:4]
    parts = parts_of(cache)
    programs = min(chunks, triton.cdiv(WAVES * num_sms(q.device), sequences * cache.kv_heads))
    attend_chunks[parts * programs, cache.kv_heads, sequences](
        q,
        words(cache.keys),
        stats if cache.key_high is None else cache.key_high,
        words(cache.values),
        stats if cache.key_scales is None else cache.key_scales,
        stats if cache.value_scales is None else cache.value_scales,
        tables,
        starts,
        lengths,
        sums,
        stats,
        scale,
        softcap,
        window,
        table_len,
        chunks,
        rows,
        PARTS=parts,
        ROTATED=rotated,
        WINDOWED=window > 0,
        CAPPED=softcap > 0,
        KW=kwidth(),
        **named,
        num_warps=4,
        num_stages=1,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )
    combine_chunks[min(max_query, VERIFY_LEN), heads, sequences](
        sums,
        stats,
        stats if sinks is None else sinks,
        starts,
        lengths,
        out,
        window,
        chunks,
        rows,
        KV_HEADS=cache.kv_heads,
        SIBLINGS=siblings,
        HEAD_DIM=cache.head_dim,
        GROUPS=groups,
        PADDED=triton.next_power_of_2(cache.width),
        ROTATED=rotated,
        WINDOWED=window > 0,
        SINKS=sinks is not None,
        AT_ONCE=AT_ONCE,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _run_many(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    max_query: int,
    out: Tensor,
) -> None:
    sequences, table_len = tables.shape
    siblings = q.shape[1] // cache.kv_heads
    dtype = dot_dtype(q, cache)
    tile = tile_of(cache.width // GROUP)
    attend_tiles[triton.cdiv(max_query * siblings, tile.rows), cache.kv_heads, sequences](
        q,
        words(cache.keys),
        q if cache.key_high is None else cache.key_high,
        words(cache.values),
        q if cache.key_scales is None else cache.key_scales,
        q if cache.value_scales is None else cache.value_scales,
        q if sinks is None else sinks,
        tables,
        starts,
        lengths,
        out,
        scale,
        softcap,
        window,
        table_len,
        ALL=triton.next_power_of_2(cache.width // GROUP),
        ROTATED=cache.format.rotated,
        WINDOWED=window > 0,
        CAPPED=softcap > 0,
        SINKS=sinks is not None,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        FEWEST=VERIFY_LEN + 1,
        **constants(cache, q.shape[1], dtype),
        num_warps=tile.num_warps,
        num_stages=1,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )
