"""x @ weight.T for 1 to 16 rows: reads each weight once, at the speed of the memory.

Owns the kernels and their launch. A program has MT tiles of 16 rows of the weight; each of its NW warps takes every
NW-th chunk of 64 columns: the warps are the batch of a three-dimensional dot, so that none waits for another before the
end. The codes are exact in the dot, the scale multiplies its float32 result. Rows of x come in TT blocks of 8, and what
one row gives depends on no other. SPLITS programs may share K: each writes its sums, and `combine` adds them in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from edgelm.kernels.activation.triton import gated_values as gated
from edgelm.kernels.choice import interpreting
from edgelm.kernels.gate import Gate
from edgelm.kernels.layout import CHUNK, TILE, PackedWeight, Weight, layout_constants
from edgelm.kernels.matmul.configs import Config, candidates, in_float32, key
from edgelm.kernels.matmul.reference import Norm
from edgelm.kernels.matmul.step.triton import load_words, load_x, multiply
from edgelm.kernels.target import kwidth
from edgelm.kernels.tuning import TABLE

# -- what follows the product ------------------------------------------------------------------------------------------


@triton.jit
def with_bias(y, bias, n, N: tl.constexpr):
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    return y


@triton.jit
def store_rows(y, out, residual, residual_stride, row, n, mask, WIDTH: tl.constexpr):
    if residual is not None:
        y += tl.load(residual + row.to(tl.int64) * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * WIDTH + n, y.to(out.dtype.element_ty), mask=mask)


# -- kernels -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def decode(
    x,
    codes,
    high,
    scales,
    offsets,
    supers,
    bias,
    residual,
    norm,
    out,
    partial,  # [SPLITS, 16, rows of the weight, padded], or None
    partial_squares,  # [SPLITS, 16], or None
    x_stride,
    residual_stride,
    rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,  # of a tile in the planes, with the padding
    BITS: tl.constexpr,  # 16: dense rows
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    BOOK: tl.constexpr,
    GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    DTYPE: tl.constexpr,  # of the dot
    NW: tl.constexpr,
    MT: tl.constexpr,
    TT: tl.constexpr,
    SPLITS: tl.constexpr,
    PF: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply MT tiles with all rows of x, over one of SPLITS parts of K."""
    pid = tl.program_id(0)
    split = tl.program_id(1)  # 0 too is asked for: a loop of known length would be unrolled
    NORM: tl.constexpr = norm is not None
    FULL: tl.constexpr = K // 64 // NW  # steps in which no warp looks at a border
    EACH: tl.constexpr = (FULL + SPLITS - 1) // SPLITS
    acc: tl.tuple = ()
    for _ in tl.static_range(MT * TT):
        acc += (tl.zeros([NW, 16, 8], tl.float32),)
    squares: tl.tuple = ()
    COLUMNS: tl.constexpr = 16 if x.dtype.element_ty == tl.float32 else 32  # that are loaded together
    if NORM:
        for _ in tl.static_range(TT):
            squares += (tl.zeros([NW * 8, COLUMNS], tl.float32),)
    first = split * EACH
    last = tl.minimum(first + EACH, FULL)
    if FULL > 0:
        if PF:
            words = load_words(codes, high, pid, tl.minimum(first, FULL - 1), N, K, CHUNKS, BITS, NW, MT, False)
        if PDL:
            gdc_wait()
        for step in range(first, last):
            if PF:
                now = words
                words = load_words(codes, high, pid, tl.minimum(step + 1, last - 1), N, K, CHUNKS, BITS, NW, MT, False)
            else:
                now = load_words(codes, high, pid, step, N, K, CHUNKS, BITS, NW, MT, False)
            b, squares = load_x(x, norm, x_stride, rows, step, squares, K, GROUP, NORM, DTYPE, NW, TT, KW, False)
            acc = multiply(
                acc, now, b, scales, offsets, supers, pid, step, N, K, CHUNKS, BITS, GROUP, SCALE, CODE, ZERO,
                OFFSET, BOOK, DTYPE, NW, MT, TT, KW, ASM, False,
            )  # fmt: skip
    elif PDL:
        gdc_wait()
    if K % (64 * NW) == 0:
        pass
    elif split == SPLITS - 1:
        now = load_words(codes, high, pid, FULL, N, K, CHUNKS, BITS, NW, MT, True)
        b, squares = load_x(x, norm, x_stride, rows, FULL, squares, K, GROUP, NORM, DTYPE, NW, TT, KW, True)
        acc = multiply(
            acc, now, b, scales, offsets, supers, pid, FULL, N, K, CHUNKS, BITS, GROUP, SCALE, CODE, ZERO,
            OFFSET, BOOK, DTYPE, NW, MT, TT, KW, ASM, True,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    WIDTH: tl.constexpr = N // 2 if GATE is not None else N
    PADDED: tl.constexpr = (N + 15) // 16 * 16
    lane = tl.arange(0, 16)[:, None]
    for tt in tl.static_range(TT):
        row = tt * 8 + tl.arange(0, 8)[None, :]
        if NORM:
            total = tl.sum(tl.sum(tl.reshape(squares[tt], [NW, 8, COLUMNS]), 2), 0)
            if SPLITS > 1 and pid == 0:
                tl.store(partial_squares + split * 16 + tt * 8 + tl.arange(0, 8), total)
            factor = tl.rsqrt(total / K + eps)[None, :]
        for mt in tl.static_range(MT):
            y = tl.sum(acc[mt * TT + tt], 0)  # [16, 8]
            n = (pid * MT + mt) * 16 + lane
            if SPLITS > 1:
                tl.store(partial + (split * 16 + row) * PADDED + n, y, mask=(row < rows) & (n < N))
            else:
                if NORM:
                    y *= factor
                y = with_bias(y, bias, n, N)
                if GATE is None:
                    store_rows(y, out, residual, residual_stride, row, n, (row < rows) & (n < N), WIDTH)
                elif mt % 2 == 0:
                    before = y
                else:
                    n = (pid * MT + mt) // 2 * 16 + lane
                    y = gated(before, y, GATE, LIMIT, ALPHA)
                    store_rows(y, out, residual, residual_stride, row, n, (row < rows) & (n < WIDTH), WIDTH)


@triton.jit
def combine(
    partial,
    partial_squares,
    bias,
    residual,
    out,
    residual_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the parts of K of one row, and do what follows the product."""
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = N // 2 if GATE is not None else N
    PADDED: tl.constexpr = (N + 15) // 16 * 16
    mask = n < WIDTH
    at = n // 16 * 32 + n % 16 if GATE is not None else n
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    y = tl.zeros([BLOCK], tl.float32)
    up = y
    total = 0.0
    for split in tl.static_range(SPLITS):
        part = partial + (split * 16 + row) * PADDED + at
        y += tl.load(part, mask=mask, other=0.0)
        if GATE is not None:
            up += tl.load(part + 16, mask=mask, other=0.0)
        if NORM:
            total += tl.load(partial_squares + split * 16 + row)
    if NORM:
        factor = tl.rsqrt(total / K + eps)
        y *= factor
        up *= factor
    y = with_bias(y, bias, at, N)
    if GATE is not None:
        y = gated(y, with_bias(up, bias, at + 16, N), GATE, LIMIT, ALPHA)
    store_rows(y, out, residual, residual_stride, row, n, mask, WIDTH)


# -- launch ------------------------------------------------------------------------------------------------------------

# The interpreter's dot takes the bits of bfloat16 for integers; in float32 its result is the same.
DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if interpreting() else tl.bfloat16,
    torch.float32: tl.float32,
}


def launch(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    norm: Norm | None,
    out_dtype: torch.dtype,
    config: Config | None = None,
    pdl: bool = False,
) -> Tensor:
    """Run the kernels; the arguments are those of `matmul`, which has checked them."""
    planes, constants = described(weight, operand_type(x.dtype, norm is not None, out_dtype))
    if config is None:
        paired = gate is not None
        config = TABLE.best("matmul", key(weight, paired), lambda: candidates(weight, paired))
        if constants["DTYPE"] is tl.float32 and not interpreting():
            config = in_float32(config, paired)
    assert gate is None or config.tiles % 2 == 0
    rows = x.shape[0]
    blocks = 1 if rows <= 8 else 2
    norm_weight = None if norm is None else norm.weight
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x.index_select(1, weight.order)
        norm_weight = None if norm_weight is None else norm_weight.index_select(0, weight.order)
    if x.stride(1) != 1:
        x = x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    width = weight.rows // 2 if gate else weight.rows
    out = torch.empty((rows, width), dtype=out_dtype, device=x.device)
    partial = squares = None
    tiles = -(-weight.rows // TILE)
    if config.splits > 1:
        partial = torch.empty((config.splits, 16, tiles * TILE), dtype=torch.float32, device=x.device)
        squares = torch.empty((config.splits, 16), dtype=torch.float32, device=x.device)
    after = {
        "GATE": gate.kind if gate else None,
        "LIMIT": gate.limit if gate else 0.0,
        "ALPHA": gate.alpha if gate else 0.0,
        "PDL": pdl,
    }
    eps = norm.eps if norm else 0.0
    residual_stride = 0 if residual is None else residual.stride(0)
    options = {"enable_fp_fusion": True} | ({"launch_pdl": True} if pdl else {})
    decode[(-(-tiles // config.tiles), config.splits)](
        x, *planes, bias, residual, norm_weight, out, partial, squares, x.stride(0), residual_stride, rows, eps,
        N=weight.rows, K=weight.columns, **constants, **after, NW=config.warps, MT=config.tiles,
        TT=blocks, SPLITS=config.splits, PF=config.prefetch, KW=kwidth(),
        num_warps=config.warps, num_stages=1, **options,
    )  # fmt: skip
    if config.splits > 1:
        combine[(-(-width // 128), rows)](
            partial, squares, bias, residual, out, residual_stride, eps, N=weight.rows, K=weight.columns, **after,
            NORM=norm is not None, SPLITS=config.splits, BLOCK=128, num_warps=4, **options,
        )  # fmt: skip
    return out


def operand_type(x: torch.dtype, normed: bool, out: torch.dtype) -> torch.dtype:
    """Return what x is multiplied as: its own type, but where a residual stream is normed, the type of the result."""
    return out if normed and x == torch.float32 else x


def described(weight: Weight, dtype: torch.dtype) -> tuple[tuple[Tensor | None, ...], dict[str, object]]:
    """Return the planes as `decode` takes them, and the constants that say what they mean."""
    if not isinstance(weight, PackedWeight):
        # what two types of 16 bits have in common is float32: slow, and exact
        common = dtype if weight.data.dtype == dtype else torch.float32
        constants = layout_constants(None) | {"CHUNKS": -(-weight.columns // CHUNK)} | numbers(common)
        return (weight.data, None, None, None, None), constants
    layout = weight.layout
    planes = (
        weight.codes,
        weight.high,
        _entries(weight.scales),
        None if weight.offsets is None else _entries(weight.offsets),
        None if weight.supers is None else _entries(weight.supers),
    )
    return planes, layout_constants(layout) | {"CHUNKS": weight.codes.shape[-2]} | numbers(dtype)


def numbers(dtype: torch.dtype) -> dict[str, object]:
    """Return the type of the numbers that are multiplied, and whether assembly makes them: only those of 16 bits."""
    return {"DTYPE": DTYPES[dtype], "ASM": not interpreting() and dtype != torch.float32}


def _entries(plane: Tensor) -> Tensor:
    """Return scales as one word an entry, where it has several and they fit into 32 bits."""
    assert plane.is_contiguous()
    width = plane.shape[-1] * plane.element_size()
    if plane.shape[-1] == 1 or width > 4:
        return plane
    return plane.flatten(-2).view(torch.int16 if width == 2 else torch.int32)  # a stack keeps its stride
