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
from edgelm.kernels.attention.schedule.triton import MOST
from edgelm.kernels.attention.triton import FEW, attend_chunks, combine_chunks
from edgelm.kernels.cache import BLOCK_LEN, GROUP, LayerCache
from edgelm.kernels.choice import interpreting
from edgelm.kernels.target import kwidth, num_sms

VERIFY_LEN: int = FEW.value  # rows of a sequence, at most, that attend_chunks takes
MAX_GROUPS = 4  # of 32 dimensions, whose sums fit the registers
MAX_REGISTERS = 255  # else the assembler may spill a few to get below a number that it prefers
CODE_REGISTERS = 240  # of attend_chunks on codes: with more, the assembler moves so many loads up that it spills
WAVES = 4  # programs for each multiprocessor, about
AT_MOST_TILES = 4  # of a chunk, that programs share where there are more programs than chunks
MAX_SCRATCH = 256 << 20  # bytes, of the sums of attend_chunks: beyond, some sequences after the others
MOST_SEQUENCES: int = MOST.value  # of a launch
SPLIT_PROGRAMS = 256  # that the tiles of prompts become on a long context, on any GPU: rows do not depend on which
MIN_SPLIT = 512  # positions of the table, at least, for each part
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


def registers_of(cache: LayerCache) -> int:
    """Return how many registers a thread of attend_chunks may have."""
    return MAX_REGISTERS if cache.format.key is None else CODE_REGISTERS


def words(plane: Tensor) -> Tensor:
    """Return a plane of codes as int32 [...]; 16-bit values as they are."""
    return plane.view(torch.int32) if plane.dtype == torch.uint8 else plane


class Launch(NamedTuple):
    """What both ways are given: some sequences of a call of `attention`, and where its rows go."""

    q: Tensor
    cache: LayerCache
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None
    max_query: int
    out: Tensor

    @property
    def sequences(self) -> int:
        return self.tables.shape[0]

    @property
    def siblings(self) -> int:
        return self.q.shape[1] // self.cache.kv_heads

    def rows(self, of_each: int) -> int:
        """Return how many rows there are at most, if a sequence has so many."""
        return min(self.q.shape[0], min(self.max_query, of_each) * self.sequences)


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
    if q.numel() == 0 or tables.numel() == 0:
        return
    chunks = num_chunks(tables.shape[1] * BLOCK_LEN)
    bytes_of_row = q.shape[1] * chunks * (cache.width + 2) * 4
    step = at_once(bytes_of_row, q.shape[0], min(max_query, VERIFY_LEN), tables.shape[0])
    for begin in range(0, tables.shape[0], step):
        end = begin + step
        some = (tables[begin:end], starts[begin : end + 1], lengths[begin:end])
        launch = Launch(q, cache, *some, scale, window, softcap, sinks, max_query, out)
        _run_few(launch, chunks)
        if min(max_query, q.shape[0]) > VERIFY_LEN:
            _run_many(launch)


def at_once(bytes_of_row: int, tokens: int, rows_of_each: int, sequences: int) -> int:
    """Return how many of the sequences have their scratch at the same time; MAX_SCRATCH holds it, but for one alone."""
    most = min(sequences, MOST_SEQUENCES)
    room = max(MAX_SCRATCH // bytes_of_row, 1)  # rows
    if room >= min(tokens, most * rows_of_each):
        return most
    fit = max(room // rows_of_each, 1)
    return fit // 4 * 4 or fit  # their lengths and tables are then aligned to 16 bytes, as in the first launch


def scratch(launch: Launch, parts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return memory for the sums of parts of the context and for their stats."""
    shape = (parts, launch.cache.kv_heads, rows * launch.siblings)
    sums = torch.empty(*shape, launch.cache.width, dtype=torch.float32, device=launch.q.device)
    return sums, torch.empty(*shape, 2, dtype=torch.float32, device=launch.q.device)


def num_splits(tiles: int, kv_heads: int, positions: int) -> int:
    """Return into how many parts the contexts of prompts are cut: as many as make SPLIT_PROGRAMS programs."""
    return max(min(SPLIT_PROGRAMS // (tiles * kv_heads), positions // MIN_SPLIT), 1)


def num_tiles(launch: Launch, rows: int) -> int:
    """Return how many tiles prompts have at most: each may end in one that is not full."""
    tokens = launch.rows(launch.max_query)
    return tokens * launch.siblings // rows + min(launch.sequences, tokens // (VERIFY_LEN + 1))


def planes(cache: LayerCache, other: Tensor) -> tuple[Tensor, ...]:
    """Return the planes of a cache in the kernels' order; `other` stands for those that it does not have."""
    return (
        words(cache.keys),
        other if cache.key_high is None else cache.key_high,
        words(cache.values),
        other if cache.key_scales is None else cache.key_scales,
        other if cache.value_scales is None else cache.value_scales,
    )


def _run_few(launch: Launch, chunks: int) -> None:
    q, cache, tables = launch.q, launch.cache, launch.tables
    rows = launch.rows(VERIFY_LEN)
    sums, stats = scratch(launch, chunks, rows)
    parts = parts_of(cache)
    programs = triton.cdiv(WAVES * num_sms(q.device), cache.kv_heads * parts)
    attend_chunks[parts * min(launch.sequences * chunks * AT_MOST_TILES, programs), cache.kv_heads](
        q,
        *planes(cache, stats),
        tables,
        launch.starts,
        launch.lengths,
        sums,
        stats,
        launch.scale,
        launch.softcap,
        launch.window,
        q.shape[0],
        launch.sequences,
        tables.shape[1],
        launch.max_query,
        rows * launch.siblings,
        PARTS=parts,
        ROTATED=cache.format.rotated,
        WINDOWED=launch.window > 0,
        CAPPED=launch.softcap > 0,
        KW=kwidth(),
        **constants(cache, q.shape[1], dot_dtype(q, cache)),
        num_warps=4,
        num_stages=1,
        maxnreg=registers_of(cache),
        enable_fp_fusion=False,
    )
    _combine(launch, sums, stats, rows, 0)


def _combine(launch: Launch, sums: Tensor, stats: Tensor, rows: int, splits: int) -> None:
    """Add up chunks, or with `splits` the parts of prompts."""
    cache, heads = launch.cache, launch.q.shape[1]
    combine_chunks[rows, heads](
        sums,
        stats,
        stats if launch.sinks is None else launch.sinks,
        launch.starts,
        launch.lengths,
        launch.out,
        launch.window,
        launch.q.shape[0],
        launch.sequences,
        launch.tables.shape[1],
        launch.max_query,
        rows * launch.siblings,
        splits,
        KV_HEADS=cache.kv_heads,
        SIBLINGS=launch.siblings,
        HEAD_DIM=cache.head_dim,
        GROUPS=cache.width // GROUP,
        PADDED=triton.next_power_of_2(cache.width),
        PROMPTS=splits > 0,
        ROTATED=cache.format.rotated,
        WINDOWED=launch.window > 0,
        SINKS=launch.sinks is not None,
        AT_ONCE=AT_ONCE,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _run_many(launch: Launch) -> None:
    q, cache, tables = launch.q, launch.cache, launch.tables
    rows = launch.rows(launch.max_query)
    tile = tile_of(cache.width // GROUP)
    tiles = num_tiles(launch, tile.rows)
    splits = num_splits(tiles, cache.kv_heads, tables.shape[1] * BLOCK_LEN)
    sums, stats = scratch(launch, splits, rows) if splits > 1 else (q, q)
    attend_tiles[tiles, cache.kv_heads, splits](
        q,
        *planes(cache, q),
        q if launch.sinks is None else launch.sinks,
        tables,
        launch.starts,
        launch.lengths,
        launch.out,
        sums,
        stats,
        launch.scale,
        launch.softcap,
        launch.window,
        q.shape[0],
        launch.sequences,
        tables.shape[1],
        launch.max_query,
        rows * launch.siblings,
        ALL=triton.next_power_of_2(cache.width // GROUP),
        ROTATED=cache.format.rotated,
        WINDOWED=launch.window > 0,
        CAPPED=launch.softcap > 0,
        SINKS=launch.sinks is not None,
        SPLIT=splits > 1,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        **constants(cache, q.shape[1], dot_dtype(q, cache)),
        num_warps=tile.num_warps,
        num_stages=1,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )
    if splits > 1:
        _combine(launch, sums, stats, rows, splits)
