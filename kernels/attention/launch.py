"""The launch of attention: the constants of its kernels, their scratch and their grids.

Owns these choices; none of them reads the device. Knows nothing of the arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.attention import decode_kernel, operands
from edgelm.kernels.attention.decode_kernel import attend_chunks, combine_chunks
from edgelm.kernels.attention.prefill_kernel import attend_tiles
from edgelm.kernels.cache import BLOCK_LEN, GROUP, LayerCache
from edgelm.kernels.choice import interpreting
from edgelm.kernels.gpu_target import has_wgmma, kwidth, num_sms, stages_of_products, triton_has_faults
from edgelm.kernels.pdl import uses_pdl

VERIFY_LEN: int = decode_kernel.VERIFY_LEN.value  # rows of a sequence, at most, that attend_chunks takes
MAX_SEQS: int = operands.MAX_SEQS.value  # of a launch
MAX_GROUPS = 4  # of 32 dimensions, whose sums fit the registers
MAX_REGISTERS = 255  # with a lower limit, the assembler may spill a few registers to reach it
CODE_REGISTERS = 240  # of attend_chunks on codes: with more, the assembler moves so many loads up that it spills
WAVES = 4  # programs per multiprocessor, about
MAX_TILE_PROGRAMS = 4  # that share the tiles of a chunk, if there are more programs than chunks
MAX_SCRATCH = 256 << 20  # bytes, of the sums of attend_chunks: beyond it, groups of sequences run one after another
SPLIT_PROGRAMS = 256  # target for prompts on a long context; the same on every GPU, so that the results are too
MIN_SPLIT = 512  # positions of the block table, at least, for each part
AT_ONCE = 32  # chunks that combine_chunks loads at a time
DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if interpreting() else tl.bfloat16,  # the interpreter has no dot of bfloat16
    torch.float32: tl.float32,
}


class Tile(NamedTuple):
    """The work of a program of attend_tiles: its rows, and the tokens that it reads at a time."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int = 1


def tile_of(cache: LayerCache, dtype: torch.dtype, *, wgmma: bool) -> Tile:
    """Return the tile for operands of a type: sums and operands have to fit the registers.

    With wgmma, four warps multiply 64 rows at a time, and two programs share a multiprocessor; codes would spill
    registers then. All tiles for a head have the same number of rows, so contexts are split in the same way.
    """
    groups = cache.width // GROUP
    if interpreting():
        return Tile(32, 64, 4)
    if groups <= 2:
        return Tile(64, 64, 4)
    if groups <= MAX_GROUPS and wgmma and cache.format.key is None and dtype != torch.float32:
        return Tile(64, 32, 4, 2)
    if groups > 2 * MAX_GROUPS and cache.format.key:
        return Tile(32, 16, 8)
    return Tile(64, 32, 8) if groups <= MAX_GROUPS else Tile(32, 32, 8)


def num_chunks(length: int) -> int:
    """Return the number of chunks of the first `length` positions: decode_kernel.chunk_of(length - 1) + 1."""
    octave, start = 0, 0
    while length - 1 >= start + (16384 << octave):
        start += 16384 << octave
        octave += 1
    return 64 * octave + (length - 1 - start >> (8 + octave)) + 1


def dot_dtype(q: Tensor, cache: LayerCache) -> torch.dtype:
    """Return the type of dot operands: float32 with a float32 input, else that of a 16-bit cache; float16 for codes.

    All codes are exact in float16.
    """
    if q.dtype == torch.float32 or cache.keys.dtype == torch.float32:
        return torch.float32
    return torch.float16 if cache.format.key else cache.keys.dtype


def constants(cache: LayerCache, num_heads: int, dtype: torch.dtype) -> dict[str, object]:
    """Return the constexprs that describe the cache, the heads and the dot operands."""
    return {
        "KV_HEADS": cache.num_kv_heads,
        "QUERIES_PER_KV": num_heads // cache.num_kv_heads,
        "HEAD_DIM": cache.head_dim,
        "GROUPS": cache.width // GROUP,
        "KEY": cache.format.key or "f16",
        "VALUE": cache.format.value or "f16",
        "DOT": DTYPES[dtype],
        "ASM": not interpreting() and dtype != torch.float32,
    }


def parts_of(cache: LayerCache) -> int:
    """Return how many programs of attend_chunks share a head's values; 16-bit and 6-bit keys take most registers."""
    groups = cache.width // GROUP
    if groups <= MAX_GROUPS:
        return 2 if groups == MAX_GROUPS and cache.format.key is None else 1
    return 2 if cache.format.key in ("int8", "fp8") and groups <= 2 * MAX_GROUPS else groups // 2


def registers_of(cache: LayerCache) -> int:
    """Return the maximum of registers per thread of attend_chunks.

    Keys of 6 bits in long heads spill with Triton before 3.9, and the less the more registers there are.
    """
    long_keys = cache.format.key == "int6" and cache.width // GROUP > MAX_GROUPS and triton_has_faults()
    return MAX_REGISTERS if cache.format.key is None or long_keys else CODE_REGISTERS


def kwidth_of(cache: LayerCache) -> int:
    """Return the neighbours along K that a thread holds of an operand; 16-bit keys and values are loaded as such.

    For those every Triton takes 2: with the 4 that releases before 3.8 take for codes, each dot would need shuffles.
    """
    return 2 if cache.format.key is None else kwidth()


class Launch(NamedTuple):
    """The arguments of `attention` for some of its sequences; `out` has the rows of all."""

    q: Tensor
    cache: LayerCache
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None
    max_query_len: int
    out: Tensor
    only_prompts: bool

    @property
    def num_seqs(self) -> int:
        return self.block_tables.shape[0]

    @property
    def queries_per_kv(self) -> int:
        return self.q.shape[1] // self.cache.num_kv_heads

    def max_rows(self, query_len: int) -> int:
        """Return the largest possible number of rows, if every sequence has at most `query_len`."""
        return min(self.q.shape[0], min(self.max_query_len, query_len) * self.num_seqs)


def run(
    q: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    max_query_len: int,
    out: Tensor,
    *,
    only_prompts: bool = False,
) -> None:
    """Write the attention of each row into `out`, [tokens, num_heads, head_dim].

    Sequences with up to VERIFY_LEN rows always use the decode kernel, longer ones the prefill kernel, in any step.
    """
    assert q.is_contiguous()
    assert block_tables.is_contiguous()
    if q.numel() == 0 or block_tables.numel() == 0:
        return
    chunks = num_chunks(block_tables.shape[1] * BLOCK_LEN)
    row_bytes = q.shape[1] * chunks * (cache.width + 2) * 4
    step = seqs_per_launch(row_bytes, q.shape[0], min(max_query_len, VERIFY_LEN), block_tables.shape[0])
    for begin in range(0, block_tables.shape[0], step):
        end = begin + step
        some = (block_tables[begin:end], query_start_loc[begin : end + 1], seq_lens[begin:end])
        launch = Launch(q, cache, *some, scale, window, softcap, sinks, max_query_len, out, only_prompts)
        _run_decode(launch, chunks)
        if min(max_query_len, q.shape[0]) > VERIFY_LEN:
            _run_prefill(launch)


def seqs_per_launch(row_bytes: int, num_tokens: int, query_len: int, num_seqs: int) -> int:
    """Return how many sequences a launch takes: their scratch fits MAX_SCRATCH, unless it is a single sequence.

    The step of the most tokens, and of the most sequences, has the most scratch of all: loading runs it to allocate.
    """
    most = min(num_seqs, MAX_SEQS)
    fitting = MAX_SCRATCH // row_bytes
    max_rows = fitting // (4 * VERIFY_LEN) * 4 * VERIFY_LEN or fitting // VERIFY_LEN * VERIFY_LEN or max(fitting, 1)
    if max_rows >= min(num_tokens, most * query_len):
        return most
    fit = max(max_rows // query_len, 1)
    return fit // 4 * 4 or fit  # so that seq_lens and block_tables stay aligned to 16 bytes in later launches


def num_splits(tiles: int, num_kv_heads: int, positions: int) -> int:
    """Return the number of parts of each prompt's context: about SPLIT_PROGRAMS programs in all."""
    return max(min(SPLIT_PROGRAMS // (tiles * num_kv_heads), positions // MIN_SPLIT), 1)


def num_tiles(tokens: int, num_seqs: int, queries_per_kv: int, tile_rows: int) -> int:
    """Return the largest possible number of tiles of prompts: the last tile of each may not be full."""
    return tokens * queries_per_kv // tile_rows + min(num_seqs, tokens // (VERIFY_LEN + 1))


def launch_kind(tokens: int, cache: LayerCache, num_heads: int, context: int) -> object:
    """Return the kind of the launches for a prompt: two lengths with one kind use the same compiled kernels."""
    if tokens <= VERIFY_LEN:
        return "decode"
    queries_per_kv, tile = num_heads // cache.num_kv_heads, tile_of(cache, torch.float16, wgmma=False)
    return num_splits(num_tiles(tokens, 1, queries_per_kv, tile.rows), cache.num_kv_heads, context) > 1


def _scratch(launch: Launch, parts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return memory for the sums and the stats of parts of contexts."""
    shape = (parts, launch.cache.num_kv_heads, rows * launch.queries_per_kv)
    sums = torch.empty(*shape, launch.cache.width, dtype=torch.float32, device=launch.q.device)
    return sums, torch.empty(*shape, 2, dtype=torch.float32, device=launch.q.device)


def _planes(cache: LayerCache, placeholder: Tensor) -> tuple[Tensor, ...]:
    """Return the planes of a cache in the kernels' order, with `placeholder` for those that it does not have."""
    return (
        _words(cache.keys),
        placeholder if cache.key_high is None else cache.key_high,
        _words(cache.values),
        placeholder if cache.key_scales is None else cache.key_scales,
        placeholder if cache.value_scales is None else cache.value_scales,
    )


def _words(plane: Tensor) -> Tensor:
    """Return a plane of codes as int32; a plane of 16-bit values stays as it is."""
    return plane.view(torch.int32) if plane.dtype == torch.uint8 else plane


def _run_decode(launch: Launch, chunks: int) -> None:
    q, cache, block_tables = launch.q, launch.cache, launch.block_tables
    rows = launch.max_rows(VERIFY_LEN)
    sums, stats = _scratch(launch, chunks, rows)
    if launch.only_prompts:
        return  # with the scratch allocated, so that the largest step of loading has the memory of any other
    parts = parts_of(cache)
    programs = triton.cdiv(WAVES * num_sms(q.device), cache.num_kv_heads * parts)
    attend_chunks[cache.num_kv_heads, parts * min(launch.num_seqs * chunks * MAX_TILE_PROGRAMS, programs)](
        q,
        *_planes(cache, stats),
        block_tables,
        launch.query_start_loc,
        launch.seq_lens,
        sums,
        stats,
        launch.scale,
        launch.softcap,
        launch.window,
        q.shape[0],
        launch.num_seqs,
        block_tables.shape[1],
        launch.max_query_len,
        rows * launch.queries_per_kv,
        PARTS=parts,
        ROTATED=cache.format.rotated,
        WINDOWED=launch.window > 0,
        CAPPED=launch.softcap > 0,
        KW=kwidth_of(cache),
        **constants(cache, q.shape[1], dot_dtype(q, cache)),
        num_warps=4,
        num_stages=1,
        maxnreg=registers_of(cache),
        enable_fp_fusion=False,
        launch_pdl=uses_pdl(),
    )
    _combine(launch, sums, stats, rows, 0)


def _combine(launch: Launch, sums: Tensor, stats: Tensor, rows: int, splits: int) -> None:
    """Add up the chunks of contexts, or with `splits` the parts of prompts' contexts."""
    cache, num_heads = launch.cache, launch.q.shape[1]
    combine_chunks[rows, num_heads, cache.width // GROUP](
        sums,
        stats,
        stats if launch.sinks is None else launch.sinks,
        launch.query_start_loc,
        launch.seq_lens,
        launch.out,
        launch.window,
        launch.q.shape[0],
        launch.num_seqs,
        launch.block_tables.shape[1],
        launch.max_query_len,
        rows * launch.queries_per_kv,
        splits,
        KV_HEADS=cache.num_kv_heads,
        QUERIES_PER_KV=launch.queries_per_kv,
        HEAD_DIM=cache.head_dim,
        GROUPS=cache.width // GROUP,
        PROMPTS=splits > 0,
        ROTATED=cache.format.rotated,
        WINDOWED=launch.window > 0,
        SINKS=launch.sinks is not None,
        AT_ONCE=AT_ONCE,
        num_warps=1,  # more would have to meet at a barrier
        enable_fp_fusion=True,
        launch_pdl=uses_pdl(),
    )


def _run_prefill(launch: Launch) -> None:
    q, cache, block_tables = launch.q, launch.cache, launch.block_tables
    rows = launch.max_rows(launch.max_query_len)
    dtype = dot_dtype(q, cache)
    tile = tile_of(cache, dtype, wgmma=has_wgmma())
    tiles = num_tiles(rows, launch.num_seqs, launch.queries_per_kv, tile.rows)
    splits = num_splits(tiles, cache.num_kv_heads, block_tables.shape[1] * BLOCK_LEN)
    sums, stats = _scratch(launch, splits, rows) if splits > 1 else (q, q)
    attend_tiles[tiles, cache.num_kv_heads, splits](
        q,
        *_planes(cache, q),
        q if launch.sinks is None else launch.sinks,
        block_tables,
        launch.query_start_loc,
        launch.seq_lens,
        launch.out,
        sums,
        stats,
        launch.scale,
        launch.softcap,
        launch.window,
        q.shape[0],
        launch.num_seqs,
        block_tables.shape[1],
        launch.max_query_len,
        rows * launch.queries_per_kv,
        ALL=triton.next_power_of_2(cache.width // GROUP),
        ROTATED=cache.format.rotated,
        WINDOWED=launch.window > 0,
        CAPPED=launch.softcap > 0,
        SINKS=launch.sinks is not None,
        SPLIT=splits > 1,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        **constants(cache, q.shape[1], dtype),
        num_warps=tile.num_warps,
        num_stages=stages_of_products(tile.num_stages),
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
        launch_pdl=uses_pdl(),
    )
    if splits > 1:
        _combine(launch, sums, stats, rows, splits)
