"""Matmul in Triton for 1 to ROWS rows: reads each weight once, at the speed of the memory. More rows go elsewhere.

Owns the kernels and their launch; configs.py divides the work. A program has MT tiles of 16 rows of the weight. Each of
its NW warps takes every NW-th chunk of 64 columns: the warps are the batch of a three-dimensional dot, so no warp waits
for another before the end. The codes are exact in the dot; the scale multiplies its float32 result. Rows of x come in
TT blocks of 8, and the result of a row depends on no other row. Where there are more blocks than a program has
registers for, programs that run side by side share them, so the second one finds the weights in the cache. SPLITS
programs may share K: each writes its sums, and `combine_kernel` adds them in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.activation import Gate
from edgelm.kernels.activation.kernel import gate_constants, gated_values
from edgelm.kernels.choice import interpreting
from edgelm.kernels.dequant_gemm import dequant_gemm
from edgelm.kernels.dequant_gemm import launch_kind as prompt_kind
from edgelm.kernels.gpu_target import has_hbm, kwidth, num_sms
from edgelm.kernels.layout import TILE, PackedWeight, Weight
from edgelm.kernels.matmul import ROWS
from edgelm.kernels.matmul.configs import (
    Config,
    candidates,
    float32_config,
    max_registers,
    most_blocks,
    row_blocks,
    steps_ahead,
    tiles_of_program,
    tuning_key,
)
from edgelm.kernels.matmul.finish_kernel import (
    factor_at,
    factors_of,
    inverse_lengths,
    residual_at,
    sums_of_squares,
    surroundings,
    with_bias,
)
from edgelm.kernels.matmul.operands import planes_and_constants
from edgelm.kernels.matmul.reference import Lengths
from edgelm.kernels.matmul.step_kernel import load_weights, load_x, multiply
from edgelm.kernels.pdl import begin_dependent, let_next_begin, uses_pdl, wait_for_earlier
from edgelm.kernels.tuning import TABLE


@triton.jit(do_not_specialize=["rows"])
def decode_kernel(
    x,  # [rows, K]
    codes,
    high,
    scales,
    offsets,
    supers,
    bias,
    residual,
    squares,  # float32 [rows, ceil(K / 16)]: of the rows that x was made of, times a norm's weight; or None
    next_weight,  # float32 [N], of the next norm, or None
    out,  # [rows, N], with a gate [rows, N / 2]
    scaled,  # [rows, N], with `next_weight`
    next_squares,  # float32 [rows, ceil(N / 16)], with `next_weight`
    partial,  # float32 [rows, SPLITS, N padded to tiles], or None
    x_stride,
    residual_stride,
    rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,  # of a tile in the planes, padding included
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
    DTYPE: tl.constexpr,  # of the dot's operands
    NW: tl.constexpr,
    MT: tl.constexpr,
    TT: tl.constexpr,
    SPLITS: tl.constexpr,
    PF: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Multiply MT tiles by TT blocks of rows of x, over one of SPLITS parts of K. Grid: row blocks, tiles, parts."""
    let_next_begin(launch_pdl)
    first_row = tl.program_id(0) * (TT * 8)
    pid = tl.program_id(1)
    split = tl.program_id(2)  # never a constant 0: a loop of known length would be unrolled
    x += first_row.to(tl.int64) * x_stride
    left = rows - first_row  # rows from the first one on
    STEPS: tl.constexpr = (K + 64 * NW - 1) // (64 * NW)
    EVEN: tl.constexpr = K // 64 // NW // 2 * 2  # steps of the loop, in pairs; in the rest warps may reach the border
    EACH: tl.constexpr = (EVEN // 2 + SPLITS - 1) // SPLITS * 2
    acc: tl.tuple = ()
    for _ in tl.static_range(MT * TT):
        acc += (tl.zeros([NW, 16, 8], tl.float32),)
    first = split * EACH
    last = tl.minimum(first + EACH, EVEN)
    end = tl.maximum(last - 1, 0)  # beyond it nothing is loaded ahead: the last step is loaded again
    if PF == 2 and EVEN > 0:
        # What is loaded overwrites what was just used, so no register is moved: a move would wait for the load.
        even = load_weights(
            codes, high, scales, offsets, supers, pid, tl.minimum(first, end), N, K, CHUNKS, BITS, GROUP,
            SCALE, OFFSET, NW, MT, ASM, False,
        )  # fmt: skip
        odd = load_weights(
            codes, high, scales, offsets, supers, pid, tl.minimum(first + 1, end), N, K, CHUNKS, BITS, GROUP,
            SCALE, OFFSET, NW, MT, ASM, False,
        )  # fmt: skip
        factors = factors_of(next_weight, pid * MT, N, MT, SPLITS)
        wait_for_earlier(launch_pdl)  # weights are no results of a kernel, so the first are under way by now
        added, lengths = surroundings(
            residual, residual_stride, squares, first_row, rows, pid * MT, eps, N, K, MT, TT, GATE is not None, SPLITS,
        )  # fmt: skip
        for step in range(first, last, 2):
            b = load_x(x, x_stride, left, step, K, GROUP, DTYPE, NW, TT, KW, False)
            acc = multiply(
                acc, even, b, step, K, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, DTYPE, NW, MT, TT, KW,
                ASM, False,
            )  # fmt: skip
            even = load_weights(
                codes, high, scales, offsets, supers, pid, tl.minimum(step + 2, end), N, K, CHUNKS, BITS, GROUP,
                SCALE, OFFSET, NW, MT, ASM, False,
            )  # fmt: skip
            b = load_x(x, x_stride, left, step + 1, K, GROUP, DTYPE, NW, TT, KW, False)
            acc = multiply(
                acc, odd, b, step + 1, K, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, DTYPE, NW, MT, TT, KW,
                ASM, False,
            )  # fmt: skip
            odd = load_weights(
                codes, high, scales, offsets, supers, pid, tl.minimum(step + 3, end), N, K, CHUNKS, BITS, GROUP,
                SCALE, OFFSET, NW, MT, ASM, False,
            )  # fmt: skip
    elif EVEN > 0:
        if PF == 1:
            ahead = load_weights(
                codes, high, scales, offsets, supers, pid, tl.minimum(first, end), N, K, CHUNKS, BITS, GROUP,
                SCALE, OFFSET, NW, MT, ASM, False,
            )  # fmt: skip
        factors = factors_of(next_weight, pid * MT, N, MT, SPLITS)
        wait_for_earlier(launch_pdl)
        added, lengths = surroundings(
            residual, residual_stride, squares, first_row, rows, pid * MT, eps, N, K, MT, TT, GATE is not None, SPLITS,
        )  # fmt: skip
        for step in range(first, last):
            if PF == 1:
                now = ahead
                ahead = load_weights(
                    codes, high, scales, offsets, supers, pid, tl.minimum(step + 1, end), N, K, CHUNKS, BITS, GROUP,
                    SCALE, OFFSET, NW, MT, ASM, False,
                )  # fmt: skip
            else:
                now = load_weights(
                    codes, high, scales, offsets, supers, pid, step, N, K, CHUNKS, BITS, GROUP,
                    SCALE, OFFSET, NW, MT, ASM, False,
                )  # fmt: skip
            b = load_x(x, x_stride, left, step, K, GROUP, DTYPE, NW, TT, KW, False)
            acc = multiply(
                acc, now, b, step, K, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, DTYPE, NW, MT, TT, KW,
                ASM, False,
            )  # fmt: skip
    else:
        factors = factors_of(next_weight, pid * MT, N, MT, SPLITS)
        wait_for_earlier(launch_pdl)
        added, lengths = surroundings(
            residual, residual_stride, squares, first_row, rows, pid * MT, eps, N, K, MT, TT, GATE is not None, SPLITS,
        )  # fmt: skip
    if STEPS > EVEN:
        for step in range(EVEN if split == SPLITS - 1 else STEPS, STEPS):
            now = load_weights(
                codes, high, scales, offsets, supers, pid, step, N, K, CHUNKS, BITS, GROUP,
                SCALE, OFFSET, NW, MT, ASM, True,
            )  # fmt: skip
            b = load_x(x, x_stride, left, step, K, GROUP, DTYPE, NW, TT, KW, True)
            acc = multiply(
                acc, now, b, step, K, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, DTYPE, NW, MT, TT, KW,
                ASM, True,
            )  # fmt: skip
    PADDED: tl.constexpr = (N + 15) // 16 * 16
    lane = tl.arange(0, 16)[:, None]
    for tt in tl.static_range(TT):
        row = first_row + tt * 8 + tl.arange(0, 8)[None, :]
        for mt in tl.static_range(MT):
            y = tl.sum(acc[mt * TT + tt], 0)  # [16, 8]
            n = (pid * MT + mt) * 16 + lane
            if SPLITS > 1:
                tl.store(partial + (row * SPLITS + split) * PADDED + n, y, mask=(row < rows) & (n < N))
            else:
                if squares is not None:
                    y *= lengths[tt]
                y = with_bias(y, bias, n, N)
                if GATE is None:
                    y += added[tt * MT + mt]
                    place = row.to(tl.int64) * N + n
                    inside = (row < rows) & (n < N)
                    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)
                    if next_weight is not None:
                        tl.store(scaled + place, (y * factors[mt]).to(scaled.dtype.element_ty), mask=inside)
                        part = pid * MT + mt
                        end = tl.where(part * 16 < N, rows, 0)
                        total = tl.sum(tl.where(n < N, y * y, 0.0), 0)[None, :]
                        tl.store(next_squares + row * (PADDED // 16) + part, total, mask=row < end)
                elif mt % 2 == 0:
                    gate_rows = y
                else:
                    n = (pid * MT + mt) // 2 * 16 + lane
                    inside = (row < rows) & (n < N // 2)
                    y = gated_values(gate_rows, y, GATE, LIMIT, ALPHA)
                    y += residual_at(residual, residual_stride, row, n, inside)
                    tl.store(out + row.to(tl.int64) * (N // 2) + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    partial,  # float32 [rows, SPLITS, N padded to tiles]
    bias,
    residual,
    squares,  # as in `decode_kernel`
    next_weight,
    out,  # [rows, N], with a gate [rows, N / 2]
    scaled,
    next_squares,
    residual_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Add the parts of K of one row, then apply norm, bias, gate and residual."""
    begin_dependent(launch_pdl)
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = N // 2 if GATE is not None else N
    PADDED: tl.constexpr = (N + 15) // 16 * 16
    mask = n < WIDTH
    at = n // 16 * 32 + n % 16 if GATE is not None else n
    y = tl.zeros([BLOCK], tl.float32)
    up = y
    for split in tl.static_range(SPLITS):
        part = partial + (row * SPLITS + split) * PADDED + at
        y += tl.load(part, mask=mask, other=0.0)
        if GATE is not None:
            up += tl.load(part + 16, mask=mask, other=0.0)
    if squares is not None:
        sums = sums_of_squares(squares, row + tl.zeros([1], tl.int32), row + 1, K)
        factor = tl.max(inverse_lengths(sums, eps, K))
        y *= factor
        up *= factor
    y = with_bias(y, bias, at, N)
    if GATE is not None:
        y = gated_values(y, with_bias(up, bias, at + 16, N), GATE, LIMIT, ALPHA)
    y += residual_at(residual, residual_stride, row, n, mask)
    place = row.to(tl.int64) * WIDTH + n
    factors = factor_at(next_weight, n, WIDTH)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)
    if next_weight is not None:
        tl.store(scaled + place, (y * factors).to(scaled.dtype.element_ty), mask=mask)
        total = tl.sum(tl.reshape(tl.where(mask, y * y, 0.0), [BLOCK // 16, 16]), 1)
        part = tl.program_id(0) * (BLOCK // 16) + tl.arange(0, BLOCK // 16)
        tl.store(next_squares + row * (PADDED // 16) + part, total, mask=part * 16 < N)


def matmul(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    lengths: Lengths | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply by the kernel for the number of rows: up to ROWS the one below, more by `dequant_gemm`."""
    if x.shape[0] <= ROWS:
        return decode(x, weight, bias, residual, gate, lengths, out_dtype, out=out)
    assert lengths is None
    result = dequant_gemm(x, weight, bias, residual, gate, out_dtype, implementation="triton")
    return result if out is None else out.copy_(result)


def matmul_scaled(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, factors: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply up to ROWS rows, for a norm with the weight `factors`."""
    rows, width = x.shape[0], weight.rows
    scaled = torch.empty((rows, width), dtype=dtype, device=x.device)
    squares = torch.empty((rows, -(-width // TILE)), dtype=torch.float32, device=x.device)
    ahead = Ahead(factors, scaled, squares)
    return decode(x, weight, bias, residual, None, None, torch.float32, ahead=ahead), scaled, squares


def launch_kind(rows: int) -> object:
    """Return the kind of the launches with so many rows: two numbers with one kind use the same compiled kernels."""
    return -(-rows // 8) if rows <= ROWS else ("prompt", prompt_kind(rows))


class Ahead(NamedTuple):
    """What a product reads and writes for the norm of its rows: see `matmul_scaled`."""

    factors: Tensor | None = None  # float32 [N]
    scaled: Tensor | None = None  # [rows, N]
    squares: Tensor | None = None  # float32 [rows, ceil(N / TILE)]


NO_NORM = Ahead()


def decode(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    lengths: Lengths | None,
    out_dtype: torch.dtype,
    config: Config | None = None,
    out: Tensor | None = None,
    ahead: Ahead = NO_NORM,
) -> Tensor:
    """Multiply 1 to ROWS rows."""
    planes, constants = planes_and_constants(weight, x.dtype)
    if config is None:
        paired = gate is not None
        config = TABLE.best("matmul", tuning_key(weight, paired), lambda: candidates(weight, paired))
        if constants["DTYPE"] is tl.float32 and not interpreting():
            config = float32_config(config, paired)
    assert gate is None or (config.tiles % 2 == 0 and ahead.factors is None)
    rows = x.shape[0]
    blocks, shares = row_blocks(rows, most_blocks(weight, x.dtype, config.warps))
    tiles_each = config.tiles  # in float32 more tiles spill: see `float32_config`
    if constants["DTYPE"] is not tl.float32 or interpreting():
        tiles_each = tiles_of_program(config, blocks, weight, gate is not None, num_sms(x.device))
    layout = weight.layout if isinstance(weight, PackedWeight) else None
    steps = steps_ahead(config, blocks, tiles_each, layout, hbm=has_hbm())
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x.index_select(1, weight.order)
    if x.stride(1) != 1:
        x = x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    squares, eps = (None, 0.0) if lengths is None else lengths
    width = weight.rows // 2 if gate else weight.rows
    if out is None:
        out = torch.empty((rows, width), dtype=out_dtype, device=x.device)
    partial = None
    tiles = -(-weight.rows // TILE)
    if config.splits > 1:
        partial = torch.empty((rows, config.splits, tiles * TILE), dtype=torch.float32, device=x.device)
    epilogue = gate_constants(gate)
    residual_stride = 0 if residual is None else residual.stride(0)
    decode_kernel[(shares, -(-tiles // tiles_each), config.splits)](
        x, *planes, bias, residual, squares, ahead.factors, out, ahead.scaled, ahead.squares, partial, x.stride(0),
        residual_stride, rows, eps, N=weight.rows, K=weight.columns, **constants, **epilogue, NW=config.warps,
        MT=tiles_each, TT=blocks, SPLITS=config.splits, PF=steps, KW=kwidth(),
        num_warps=config.warps, num_stages=1, enable_fp_fusion=True, launch_pdl=uses_pdl(),
        maxnreg=max_registers(blocks, x.dtype, packed=isinstance(weight, PackedWeight)),
    )  # fmt: skip
    if config.splits > 1:
        combine_kernel[(-(-width // 128), rows)](
            partial, bias, residual, squares, ahead.factors, out, ahead.scaled, ahead.squares, residual_stride, eps,
            N=weight.rows, K=weight.columns, **epilogue, SPLITS=config.splits, BLOCK=128, num_warps=4,
            enable_fp_fusion=True, launch_pdl=uses_pdl(),
        )  # fmt: skip
    return out
