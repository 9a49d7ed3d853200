"""Which sequence a program works for, and which of its rows: everything that a launch reads of starts and lengths.

Owns what may be written: a row counts only where the launch has room for it, whatever starts and lengths hold. Knows
nothing of what an item is: a chunk of a context, a tile of rows, a row.

Items of all sequences stand in one line, so that a program finds work wherever there is some, and a launch with many
sequences or rows that are not there (a CUDA graph has room for the most) has as few idle programs as one without.
"""

from __future__ import annotations

import triton
import triton.language as tl

# integers of a launch that differ from step to step: a kernel must not be compiled anew for some of their values
SIZES = ("window", "tokens", "sequences", "table_len", "max_query", "max_rows")
MOST = tl.constexpr(32)  # sequences of a launch: one for each lane of a warp, so that sums over them are shuffles


@triton.jit
def rows_of(starts, lengths, sequence, sequences, tokens, table_len, max_query):
    """Return the first row of a sequence (or of several), its position, and how many rows there are to work on.

    Rows count up to `max_query` of a sequence, as far as q and its table reach; with fewer positions than rows, none.
    """
    there = sequence < sequences
    first = tl.load(starts + sequence, mask=there, other=0)
    count = tl.load(starts + sequence + 1, mask=there, other=0) - first
    start = tl.load(lengths + sequence, mask=there, other=0) - count
    rows = tl.minimum(tl.minimum(count, max_query), tl.minimum(tokens - first, table_len * 32 - start))
    return first, start, tl.where((start < 0) | (first < 0), 0, tl.maximum(rows, 0))


@triton.jit
def owner_of(item, ends):
    """Return whose an item is, and how many come before that one's; `ends`: items of each sequence and all before."""
    before = ends <= item
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)
