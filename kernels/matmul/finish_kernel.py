"""What surrounds a product in the decode kernels: bias, residual, the norm before it, and the norm behind it.

A norm is a product with its weight and a division by a row's length. Who writes a row multiplies it by the weight, and
leaves the sums of its squares, 16 columns each; who reads it divides its own results by the length.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def with_bias(y, bias, n, N: tl.constexpr):
    """Add the bias of the rows n of a weight of N rows."""
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    return y


@triton.jit
def residual_at(residual, residual_stride, row, n, mask):
    """Return the residual of rows and columns, float32; 0 if there is none."""
    if residual is not None:
        return tl.load(residual + row.to(tl.int64) * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def factor_at(next_weight, n, N: tl.constexpr):
    """Return the weight of the next norm for columns; 0 if there is none."""
    if next_weight is not None:
        return tl.load(next_weight + n, mask=n < N, other=0.0)
    else:
        return 0.0


@triton.jit
def sums_of_squares(squares, row, rows, K: tl.constexpr):
    """Return sums of the squares of the rows `row`, a vector, in BLOCK parts each, from the sums of 16 squares."""
    PARTS: tl.constexpr = (K + 15) // 16
    BLOCK: tl.constexpr = 256
    at = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([row.shape[0], BLOCK], tl.float32)
    for start in tl.static_range(0, PARTS, BLOCK):
        inside = (row < rows)[:, None] & (start + at < PARTS)
        total += tl.load(squares + row[:, None] * PARTS + start + at, mask=inside, other=0.0)
    return total


@triton.jit
def inverse_lengths(sums, eps, K: tl.constexpr):
    """Return 1 / sqrt(mean of squares + eps) of rows, from the parts of `sums_of_squares`."""
    return tl.rsqrt(tl.sum(sums, 1) / K + eps)


@triton.jit
def factors_of(next_weight, first_tile, N: tl.constexpr, MT: tl.constexpr, SPLITS: tl.constexpr):
    """Return the factors of the next norm for each of MT tiles, [16, 1]; nothing for a part of K."""
    factors: tl.tuple = ()
    if SPLITS == 1:
        for mt in tl.static_range(MT):
            factors += (factor_at(next_weight, (first_tile + mt) * 16 + tl.arange(0, 16)[:, None], N),)
    return factors


@triton.jit
def surroundings(
    residual,
    residual_stride,
    squares,
    first_row,
    rows,
    first_tile,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    MT: tl.constexpr,
    TT: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return what the end of a program needs of earlier kernels, so that it does not wait for memory then.

    That is the residual for each of TT blocks of 8 rows and MT tiles, [16, 8], and the inverse lengths for each block,
    [1, 8]; nothing for a part of K. The residual of a gate has other columns, and is read at the end.
    """
    lengths: tl.tuple = ()
    sums: tl.tuple = ()
    added: tl.tuple = ()
    for tt in tl.static_range(TT):
        row = first_row + tt * 8 + tl.arange(0, 8)
        if SPLITS == 1:
            if not GATED:
                for mt in tl.static_range(MT):
                    n = (first_tile + mt) * 16 + tl.arange(0, 16)[:, None]
                    inside = (row < rows)[None, :] & (n < N)
                    added += (residual_at(residual, residual_stride, row[None, :], n, inside),)
            if squares is not None:
                sums += (sums_of_squares(squares, row, rows, K),)
    if SPLITS == 1 and squares is not None:
        for tt in tl.static_range(TT):  # behind all loads: each waits for the L2 cache
            lengths += (inverse_lengths(sums[tt], eps, K)[None, :],)
    return added, lengths
