"""Matmul in Triton for 1 to ROWS rows: reads each weight once, at the speed of the memory. More rows go elsewhere.

Owns the kernels and their launch; configs.py divides the work. A program has MT tiles of 16 rows of the weight. Each of
its NW warps takes every NW-th chunk of 64 columns: the warps are the batch of a three-dimensional dot, so no warp waits
for another before the end. The codes are exact in the dot; the scale multiplies its float32 result. Rows of x come in
TT blocks of 8, and the result of a row depends on no other row. Where there are more blocks than a program has
registers for, programs that run side by side share them, so the second one finds the weights in the cache. SPLITS
programs may share K: each writes its sums, and `combine_kernel` adds them in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.activation import Gate
from edgelm.kernels.activation.kernel import gate_constants, gated_values
from edgelm.kernels.choice import interpreting
from edgelm.kernels.dequant_gemm import dequant_gemm
from edgelm.kernels.dequant_gemm import launch_kind as prompt_kind
from edgelm.kernels.gpu_target import kwidth
from edgelm.kernels.layout import TILE, PackedWeight, Weight
from edgelm.kernels.matmul import ROWS
from edgelm.kernels.matmul.configs import (
    Config,
    candidates,
    float32_config,
    max_registers,
    most_blocks,
    row_blocks,
    scales_apart,
    steps_ahead,
    tiles_of_program,
    tuning_key,
)
from edgelm.kernels.matmul.operands import operand_type, planes_and_constants
from edgelm.kernels.matmul.reference import Norm
from edgelm.kernels.matmul.scaling_kernel import inverse_roots, scale_rows
from edgelm.kernels.matmul.step_kernel import load_weights, load_x, multiply, sum_of_squares
from edgelm.kernels.norm import rms_norm
from edgelm.kernels.pdl import begin_dependent, let_next_begin, uses_pdl, wait_for_earlier
from edgelm.kernels.tuning import TABLE


@triton.jit
def with_bias(y, bias, n, N: tl.constexpr):
    """Add the bias of the rows n of a weight of N rows."""
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    return y


@triton.jit
def store_rows(y, out, residual, residual_stride, row, n, mask, WIDTH: tl.constexpr):
    """Add the residual to y and write it to out [rows, WIDTH]."""
    if residual is not None:
        y += tl.load(residual + row.to(tl.int64) * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * WIDTH + n, y.to(out.dtype.element_ty), mask=mask)


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
    norm,  # float32 [K], or None
    out,  # [rows, N], with a gate [rows, N / 2]
    partial,  # float32 [rows, SPLITS, N padded to tiles], or None
    partial_squares,  # float32 [rows, SPLITS], or None; without `norm` and parts of K: of a scaled x
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
    NORM: tl.constexpr = norm is not None
    SCALED: tl.constexpr = norm is None and partial_squares is not None and SPLITS == 1
    STEPS: tl.constexpr = (K + 64 * NW - 1) // (64 * NW)
    EVEN: tl.constexpr = K // 64 // NW // 2 * 2  # steps of the loop, in pairs; in the rest warps may reach the border
    EACH: tl.constexpr = (EVEN // 2 + SPLITS - 1) // SPLITS * 2
    acc: tl.tuple = ()
    for _ in tl.static_range(MT * TT):
        acc += (tl.zeros([NW, 16, 8], tl.float32),)
    squares: tl.tuple = ()
    COLUMNS: tl.constexpr = 16 if x.dtype.element_ty == tl.float32 else 32  # loaded together
    if NORM:
        for _ in tl.static_range(TT):
            squares += (tl.zeros([NW * 8, COLUMNS], tl.float32),)
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
        wait_for_earlier(launch_pdl)  # weights are no results of a kernel, so the first are under way by now
        roots = inverse_roots(partial_squares, first_row, rows, eps, K, TT, SCALED)
        for step in range(first, last, 2):
            b, squares = load_x(x, norm, x_stride, left, step, squares, K, GROUP, NORM, DTYPE, NW, TT, KW, False)
            acc = multiply(
                acc, even, b, step, K, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, DTYPE, NW, MT, TT, KW,
                ASM, False,
            )  # fmt: skip
            even = load_weights(
                codes, high, scales, offsets, supers, pid, tl.minimum(step + 2, end), N, K, CHUNKS, BITS, GROUP,
                SCALE, OFFSET, NW, MT, ASM, False,
            )  # fmt: skip
            b, squares = load_x(x, norm, x_stride, left, step + 1, squares, K, GROUP, NORM, DTYPE, NW, TT, KW, False)
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
        wait_for_earlier(launch_pdl)
        roots = inverse_roots(partial_squares, first_row, rows, eps, K, TT, SCALED)
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
            b, squares = load_x(x, norm, x_stride, left, step, squares, K, GROUP, NORM, DTYPE, NW, TT, KW, False)
            acc = multiply(
                acc, now, b, step, K, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, DTYPE, NW, MT, TT, KW,
                ASM, False,
            )  # fmt: skip
    else:
        wait_for_earlier(launch_pdl)
        roots = inverse_roots(partial_squares, first_row, rows, eps, K, TT, SCALED)
    if STEPS > EVEN:
        for step in range(EVEN if split == SPLITS - 1 else STEPS, STEPS):
            now = load_weights(
                codes, high, scales, offsets, supers, pid, step, N, K, CHUNKS, BITS, GROUP,
                SCALE, OFFSET, NW, MT, ASM, True,
            )  # fmt: skip
            b, squares = load_x(x, norm, x_stride, left, step, squares, K, GROUP, NORM, DTYPE, NW, TT, KW, True)
            acc = multiply(
                acc, now, b, step, K, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, DTYPE, NW, MT, TT, KW,
                ASM, True,
            )  # fmt: skip
    WIDTH: tl.constexpr = N // 2 if GATE is not None else N
    PADDED: tl.constexpr = (N + 15) // 16 * 16
    lane = tl.arange(0, 16)[:, None]
    for tt in tl.static_range(TT):
        row = first_row + tt * 8 + tl.arange(0, 8)[None, :]
        if NORM:
            total = sum_of_squares(squares[tt], NW, COLUMNS)
            if SPLITS > 1 and pid == 0:
                at = first_row + tt * 8 + tl.arange(0, 8)
                tl.store(partial_squares + at * SPLITS + split, total, mask=at < rows)
            factor = tl.rsqrt(total / K + eps)[None, :]
        if SCALED:
            factor = roots[tt]
        for mt in tl.static_range(MT):
            y = tl.sum(acc[mt * TT + tt], 0)  # [16, 8]
            n = (pid * MT + mt) * 16 + lane
            if SPLITS > 1:
                tl.store(partial + (row * SPLITS + split) * PADDED + n, y, mask=(row < rows) & (n < N))
            else:
                if NORM or SCALED:
                    y *= factor
                y = with_bias(y, bias, n, N)
                if GATE is None:
                    store_rows(y, out, residual, residual_stride, row, n, (row < rows) & (n < N), WIDTH)
                elif mt % 2 == 0:
                    gate_rows = y
                else:
                    n = (pid * MT + mt) // 2 * 16 + lane
                    y = gated_values(gate_rows, y, GATE, LIMIT, ALPHA)
                    store_rows(y, out, residual, residual_stride, row, n, (row < rows) & (n < WIDTH), WIDTH)


@triton.jit
def combine_kernel(
    partial,  # float32 [rows, SPLITS, N padded to tiles]
    partial_squares,  # float32 [rows, SPLITS]
    bias,
    residual,
    out,  # [rows, N], with a gate [rows, N / 2]
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
    total = 0.0
    for split in tl.static_range(SPLITS):
        part = partial + (row * SPLITS + split) * PADDED + at
        y += tl.load(part, mask=mask, other=0.0)
        if GATE is not None:
            up += tl.load(part + 16, mask=mask, other=0.0)
        if NORM:
            total += tl.load(partial_squares + row * SPLITS + split)
    if NORM:
        factor = tl.rsqrt(total / K + eps)
        y *= factor
        up *= factor
    y = with_bias(y, bias, at, N)
    if GATE is not None:
        y = gated_values(y, with_bias(up, bias, at + 16, N), GATE, LIMIT, ALPHA)
    store_rows(y, out, residual, residual_stride, row, n, mask, WIDTH)


def matmul(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    norm: Norm | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply by the kernel for the number of rows: up to ROWS the one below, more by `dequant_gemm`."""
    # The decode kernel divides by the root at the end. Until then float16 cannot hold x times the norm's weight.
    operand = operand_type(x.dtype, norm is not None, out_dtype)
    if norm is not None and (x.shape[0] > ROWS or operand == torch.float16):
        x = rms_norm(x, norm.weight, norm.eps, out_dtype=operand, implementation="triton")
        norm = None
    if x.shape[0] <= ROWS:
        return decode(x, weight, bias, residual, gate, norm, out_dtype, out=out)
    result = dequant_gemm(x, weight, bias, residual, gate, out_dtype, implementation="triton")
    return result if out is None else out.copy_(result)


def launch_kind(rows: int) -> object:
    """Return the kind of the launches with so many rows: two numbers with one kind use the same compiled kernels."""
    return -(-rows // 8) if rows <= ROWS else ("prompt", prompt_kind(rows))


def decode(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    gate: Gate | None,
    norm: Norm | None,
    out_dtype: torch.dtype,
    config: Config | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply 1 to ROWS rows."""
    operand = operand_type(x.dtype, norm is not None, out_dtype)
    planes, constants = planes_and_constants(weight, operand)
    if config is None:
        paired = gate is not None
        config = TABLE.best("matmul", tuning_key(weight, paired), lambda: candidates(weight, paired))
        if constants["DTYPE"] is tl.float32 and not interpreting():
            config = float32_config(config, paired)
    assert gate is None or config.tiles % 2 == 0
    rows = x.shape[0]
    scaled = norm is not None and scales_apart(x, operand)
    blocks, shares = row_blocks(rows, most_blocks(weight, operand, norm is not None and not scaled, config.warps))
    tiles_each = tiles_of_program(config, blocks, weight, gate is not None)
    norm_weight = None if norm is None else norm.weight
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x.index_select(1, weight.order)
        norm_weight = None if norm_weight is None else norm_weight.index_select(0, weight.order)
    if x.stride(1) != 1:
        x = x.contiguous()
    partial = squares = None
    if norm_weight is not None and scaled:
        x, squares = scale_rows(x, norm_weight, config, torch.float32 if constants["DTYPE"] is tl.float32 else operand)
        norm_weight = None
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    width = weight.rows // 2 if gate else weight.rows
    if out is None:
        out = torch.empty((rows, width), dtype=out_dtype, device=x.device)
    tiles = -(-weight.rows // TILE)
    if config.splits > 1:
        partial = torch.empty((rows, config.splits, tiles * TILE), dtype=torch.float32, device=x.device)
        if squares is None:
            squares = torch.empty((rows, config.splits), dtype=torch.float32, device=x.device)
    epilogue = gate_constants(gate)
    eps = norm.eps if norm else 0.0
    residual_stride = 0 if residual is None else residual.stride(0)
    decode_kernel[(shares, -(-tiles // tiles_each), config.splits)](
        x, *planes, bias, residual, norm_weight, out, partial, squares, x.stride(0), residual_stride, rows, eps,
        N=weight.rows, K=weight.columns, **constants, **epilogue, NW=config.warps, MT=tiles_each,
        TT=blocks, SPLITS=config.splits, PF=steps_ahead(config, blocks, tiles_each), KW=kwidth(),
        num_warps=config.warps, num_stages=1, enable_fp_fusion=True, launch_pdl=uses_pdl(),
        maxnreg=max_registers(
            blocks, operand, packed=isinstance(weight, PackedWeight), normed=norm_weight is not None
        ),
    )  # fmt: skip
    if config.splits > 1:
        combine_kernel[(-(-width // 128), rows)](
            partial, squares, bias, residual, out, residual_stride, eps, N=weight.rows, K=weight.columns, **epilogue,
            NORM=norm is not None, SPLITS=config.splits, BLOCK=128, num_warps=4, enable_fp_fusion=True,
            launch_pdl=uses_pdl(),
        )  # fmt: skip
    return out
