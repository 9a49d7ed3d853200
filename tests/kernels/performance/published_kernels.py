"""Plain versions of the kernels that published timings were taken with, for comparing the performance model with them.

Owns the kernels, written from the published descriptions of the algorithms. None of them is used by edgelm. Imported
only where Triton is installed, by tests/kernels/performance/published_builds.py; never run, only compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nothing(out):
    pass


@triton.jit
def vector_add(x, y, out, count, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    start = tl.program_id(0)
    if WIDE:
        start = start.to(tl.int64)
    at = start * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def row_softmax(x, out, columns, BLOCK: tl.constexpr):
    """One row a program, held in registers."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=float("-inf")).to(tl.float32)
    raised = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + at, (raised / tl.sum(raised, 0)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def two_pass_softmax(x, out, columns, BLOCK: tl.constexpr):
    """One row a program, read twice: for its maximum and sum, then for its output."""
    row = tl.program_id(0).to(tl.int64)
    largest = float("-inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(values - higher), 0)
        largest = higher
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        share = tl.exp(values - largest) / total
        tl.store(out + row * columns + at, share.to(out.dtype.element_ty), mask=at < columns)


@triton.jit
def layer_norm(x, out, weight, bias, means, scales, columns, eps, BLOCK: tl.constexpr):
    """One row a program; its mean and scale are stored for the backward pass."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / columns
    centred = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, (centred * scale * w + b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm(x, out, weight, scales, columns, eps, BLOCK: tl.constexpr, STATS: tl.constexpr):
    """One row a program; with STATS its scale is stored for the backward pass."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / columns + eps)
    if STATS:
        tl.store(scales + row, scale)
    w = tl.load(weight + at, mask=inside, other=0.0)
    normed = (values * scale).to(out.dtype.element_ty) * w
    tl.store(out + row * columns + at, normed, mask=inside)


@triton.jit
def _turn(heads, cosine, sine, HEADS: tl.constexpr, HALF: tl.constexpr):
    at = heads + tl.arange(0, HEADS)[:, None] * 2 * HALF + tl.arange(0, HALF)[None, :]
    left = tl.load(at).to(tl.float32)
    right = tl.load(at + HALF).to(tl.float32)
    tl.store(at, (left * cosine - right * sine).to(heads.dtype.element_ty))
    tl.store(at + HALF, (right * cosine + left * sine).to(heads.dtype.element_ty))


@triton.jit
def rotate(q, k, cosines, sines, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotary positions in place: one position a program, all its heads; the halves of a head are a pair."""
    row = tl.program_id(0).to(tl.int64)
    at = row * 2 * HALF + tl.arange(0, HALF)
    cosine = tl.load(cosines + at).to(tl.float32)[None, :]
    sine = tl.load(sines + at).to(tl.float32)[None, :]
    _turn(q + row * Q_HEADS * 2 * HALF, cosine, sine, Q_HEADS, HALF)
    _turn(k + row * K_HEADS * 2 * HALF, cosine, sine, K_HEADS, HALF)


@triton.jit
def _tile(m, n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of this program's tile: GROUP rows of tiles go together, column by column, for the L2 cache."""
    program = tl.program_id(0)
    across = tl.cdiv(n, BN)
    band = program // (GROUP * across)
    height = min(tl.cdiv(m, BM) - band * GROUP, GROUP)
    within = program % (GROUP * across)
    return band * GROUP + within % height, within // height


@triton.jit
def matmul(
    a, b, c, m, n, k, a_row, b_row, c_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    HALF_SUM: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """C = A @ B, both by rows; rows beyond the end wrap around, the last piece of k is masked."""
    row, column = _tile(m, n, BM, BN, GROUP)
    rows = (row * BM + tl.arange(0, BM)) % m
    columns = (column * BN + tl.arange(0, BN)) % n
    inner = tl.arange(0, BK)
    a_at = a + rows[:, None] * a_row + inner[None, :]
    b_at = b + inner[:, None] * b_row + columns[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float16 if HALF_SUM else tl.float32)
    for step in range(tl.cdiv(k, BK)):
        x = tl.load(a_at, mask=inner[None, :] < k - step * BK, other=0.0)
        y = tl.load(b_at, mask=inner[:, None] < k - step * BK, other=0.0)
        total = tl.dot(x, y, total, out_dtype=total.dtype, input_precision="tf32" if TF32 else "ieee")
        a_at += BK
        b_at += BK * b_row
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * c_row + columns[None, :], total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def scaled_matmul(
    a, b, c, a_scale, b_scale, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C = A @ B.T in 8 bits: A has a scale for each row and BK values of k, B one for each BN x BK values."""
    row, column = _tile(m, n, BM, BN, GROUP)
    rows = (row * BM + tl.arange(0, BM)) % m
    columns = (column * BN + tl.arange(0, BN)) % n
    inner = tl.arange(0, BK)
    pieces = tl.cdiv(k, BK)
    a_at = a + rows[:, None] * k + inner[None, :]
    b_at = b + columns[None, :] * k + inner[:, None]
    a_scale_at = a_scale + rows * pieces
    b_scale_at = b_scale + columns // BN * pieces
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(pieces):
        x = tl.load(a_at, mask=inner[None, :] < k - step * BK, other=0.0)
        y = tl.load(b_at, mask=inner[:, None] < k - step * BK, other=0.0)
        total += tl.dot(x, y) * tl.load(a_scale_at + step)[:, None] * tl.load(b_scale_at + step)[None, :]
        a_at += BK
        b_at += BK
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def packed_matmul(
    a, b, c, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C = A @ B of signed 4-bit values, two in a byte along k: low and high halves are multiplied apart, as floats."""
    row, column = _tile(m, n, BM, BN, GROUP)
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    half = k // 2
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, half, BK // 2):
        inner = start + tl.arange(0, BK // 2)
        a_inside = (rows[:, None] < m) & (inner[None, :] < half)
        b_inside = (inner[:, None] < half) & (columns[None, :] < n)
        x = tl.load(a + rows[:, None] * half + inner[None, :], mask=a_inside, other=0).to(tl.int8)
        y = tl.load(b + inner[:, None] * n + columns[None, :], mask=b_inside, other=0).to(tl.int8)
        total += tl.dot(((x << 4) >> 4).to(tl.float32), ((y << 4) >> 4).to(tl.float32))
        total += tl.dot((x >> 4).to(tl.float32), (y >> 4).to(tl.float32))
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], total, mask=inside)


@triton.jit
def _attend(
    total, largest, weight, query, k_head, v_head, rows, low, high, length,
    D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Go through the keys from low to high; with DIAGONAL a query sees no later key."""
    inner = tl.arange(0, D)
    for start in range(low, high, BN):
        keys = start + tl.arange(0, BN)
        inside = (keys < length)[:, None]
        key = tl.load(k_head + keys[:, None] * D + inner[None, :], mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key))
        seen = (keys < length)[None, :]
        if DIAGONAL:
            seen = seen & (rows[:, None] >= keys[None, :])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        keep = tl.exp2(largest - higher)
        weight = weight * keep + tl.sum(shares, 1)
        value = tl.load(v_head + keys[:, None] * D + inner[None, :], mask=inside, other=0.0)
        total = tl.dot(shares.to(value.dtype), value, total * keep[:, None])
        largest = higher
    return total, largest, weight


@triton.jit
def attention(
    q, k, v, out, length, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Attention of one head for BM queries; a causal one goes through the keys before the diagonal without a mask."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * length * D
    rows = block * BM + tl.arange(0, BM)
    inner = tl.arange(0, D)
    inside = (rows < length)[:, None]
    place = head + rows[:, None] * D + inner[None, :]
    query = (tl.load(q + place, mask=inside, other=0.0) * (scale * 1.44269504)).to(q.dtype.element_ty)
    total = tl.zeros((BM, D), dtype=tl.float32)
    largest = tl.full((BM,), -1e30, dtype=tl.float32)
    weight = tl.zeros((BM,), dtype=tl.float32)
    middle = (block * BM) // BN * BN if CAUSAL else length
    total, largest, weight = _attend(
        total, largest, weight, query, k + head, v + head, rows, 0, middle, length, D, BN, False
    )
    if CAUSAL:
        total, largest, weight = _attend(
            total, largest, weight, query, k + head, v + head, rows, middle, (block + 1) * BM, length, D, BN, True
        )
    tl.store(out + place, (total / weight[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def decode_by_token(
    out, query, keys, values, tables, lengths, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of one query head to a cache in pages, one key after the other: bound by the latency of each step."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    inner = tl.arange(0, D)
    place = (row * HEADS + head) * D + inner
    q = tl.load(query + place)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((D,), dtype=tl.float32)
    weight = 0.0
    largest = -1e10
    for start in range(0, PAGES * PAGE, BLOCK):
        if start < length:
            scores = tl.full((BLOCK,), -1e10, dtype=tl.float32)
            for lane in range(BLOCK):
                token = start + lane
                if token < length:
                    page = tl.load(tables + row * PAGES + token // PAGE)
                    if page >= 0:
                        at = ((page * PAGE + token % PAGE) * (HEADS // GROUP) + head // GROUP) * D + inner
                        scores = tl.where(lanes == lane, tl.sum(q * tl.load(keys + at), 0) * scale, scores)
            higher = tl.maximum(largest, tl.max(scores, 0))
            keep = tl.exp(largest - higher)
            shares = tl.exp(scores - higher)
            total *= keep
            weight *= keep
            for lane in range(BLOCK):
                token = start + lane
                if token < length:
                    page = tl.load(tables + row * PAGES + token // PAGE)
                    if page >= 0:
                        at = ((page * PAGE + token % PAGE) * (HEADS // GROUP) + head // GROUP) * D + inner
                        share = tl.sum(tl.where(lanes == lane, shares, 0.0), 0)
                        total += share * tl.load(values + at)
                        weight += share
            largest = higher
    tl.store(out + place, (total / weight).to(out.dtype.element_ty))


@triton.jit
def decode_by_block(
    out, query, keys, values, tables, lengths, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The same, a block of keys at a time; each key's page is looked up by its own thread."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    inner = tl.arange(0, D)
    place = (row * HEADS + head) * D + inner
    q = tl.load(query + place)
    total = tl.zeros((D,), dtype=tl.float32)
    weight = 0.0
    largest = -1e10
    for start in range(0, PAGES * PAGE, BLOCK):
        if start < length:
            tokens = start + tl.arange(0, BLOCK)
            page = tl.load(tables + row * PAGES + tokens // PAGE, mask=tokens < length, other=-1)
            seen = page >= 0
            slots = tl.where(seen, page, 0).to(tl.int64) * PAGE + tokens % PAGE
            at = (slots * (HEADS // GROUP) + head // GROUP)[None, :] * D + inner[:, None]
            key = tl.load(keys + at, mask=seen[None, :], other=0.0).to(tl.float32)
            scores = tl.where(seen, tl.sum(q[:, None] * key, 0) * scale, -1e10)
            higher = tl.maximum(largest, tl.max(scores, 0))
            keep = tl.exp(largest - higher)
            shares = tl.where(seen, tl.exp(scores - higher), 0.0)
            value = tl.load(values + at, mask=seen[None, :], other=0.0).to(tl.float32)
            total = total * keep + tl.sum(shares[None, :] * value, 1)
            weight = weight * keep + tl.sum(shares, 0)
            largest = higher
    tl.store(out + place, (total / weight).to(out.dtype.element_ty))


@triton.jit
def stream_read(x, out, BLOCK: tl.constexpr):
    """Read a number a thread; what is written depends on it, and never is."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(out + at, value, mask=value == 123.0)
