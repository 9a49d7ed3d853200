"""Grouped matmul in Triton: pairs are sorted by expert on the device, then multiplied block by block.

Owns the planner, the kernel for few pairs of each expert, the weighted sum, and their launches. Knows nothing of
prompts: where experts have many pairs, the kernel of `edgelm.kernels.dequant_gemm` multiplies them by a similar plan.

In the kernel for few pairs a program multiplies one tile of a matrix (or one of gate and one of up) by up to 8 pairs.
Its warps share the chunks of K, so no warp needs what another one reads. Codes are multiplied as exact integers, and
their scales follow in float32. A column of a dot does not depend on the others: hence the one numerics class.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.activation import Gate
from edgelm.kernels.activation.kernel import gate_constants, gated_values
from edgelm.kernels.choice import interpreting
from edgelm.kernels.dequant_gemm.configs import Shape, shape_for
from edgelm.kernels.dequant_gemm.kernel import Groups, launch
from edgelm.kernels.dequantize.kernel import rounded
from edgelm.kernels.gpu_target import kwidth
from edgelm.kernels.grouped import reference
from edgelm.kernels.grouped.reference import Plan, max_blocks
from edgelm.kernels.layout import TILE, DenseWeight, PackedWeight, Weight
from edgelm.kernels.matmul import ROWS
from edgelm.kernels.matmul.finish_kernel import with_bias
from edgelm.kernels.matmul.operands import planes_and_constants
from edgelm.kernels.matmul.step_kernel import load_weights, load_x, multiply
from edgelm.kernels.pdl import begin_dependent, uses_pdl

PAIRS = 8  # pairs of a program
NUM_WARPS = 4
PLAN_PAIRS = 8192  # torch sorts more pairs than this: the planner compares every pair with every other
SUM_BYTES = 256 << 20  # maximum size of the float32 rows that are summed


def grouped_matmul(
    x: Tensor,
    weight: Weight,
    experts: Tensor,
    bias: Tensor | None,
    gate: Gate | None,
    route: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply rows by the matrices of their experts."""
    tokens, k = experts.shape
    width = weight.rows // 2 if gate is not None else weight.rows
    if route is None:
        return multiply_pairs(x, weight, experts, bias, gate, out_dtype)
    out = torch.empty((tokens, width), dtype=out_dtype, device=x.device)
    step = tokens_of_sum(k, width)
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        rows = x[part] if len(x) == tokens else x[start * k : (start + step) * k]
        y = multiply_pairs(rows, weight, experts[part], bias, gate, torch.float32)
        weighted_sums(y, route[part], None if residual is None else residual[part], out[part])
    return out


def multiply_pairs(
    x: Tensor, weight: Weight, experts: Tensor, bias: Tensor | None, gate: Gate | None, dtype: torch.dtype
) -> Tensor:
    """Return a row for each pair, [tokens * k, N_out]."""
    tokens, k = experts.shape
    pairs = tokens * k
    out = torch.empty((pairs, weight.rows // 2 if gate is not None else weight.rows), dtype=dtype, device=x.device)
    if pairs == 0:
        return out
    if isinstance(weight, PackedWeight) and weight.order is not None:
        rows = x if len(x) == pairs else x.repeat_interleave(k, 0)
        x = rows.gather(1, weight.order[experts.flatten().clamp(0, weight.num_matrices - 1)])
    shared = pairs // len(x)
    shape = shape_of(tokens, k, weight, x.dtype)
    if shape is None:
        multiply_few(x, weight, make_plan(experts, weight.num_matrices, PAIRS), shared, bias, gate, out)
    else:
        groups = Groups(*make_plan(experts, weight.num_matrices, shape.rows), shared)
        launch(x, weight, out, bias, None, gate, shape, groups)
    return out


def shape_of(tokens: int, k: int, weight: Weight, dtype: torch.dtype) -> Shape | None:
    """Return the shape of a prompt's programs, for x of this type; None: experts have few pairs."""
    pairs = tokens * k
    mixed = isinstance(weight, DenseWeight) and weight.data.dtype != dtype  # multiplied in float32
    if mixed or tokens <= ROWS or pairs <= PAIRS * weight.num_matrices:
        return None
    return shape_for(pairs // weight.num_matrices, dtype)  # as many rows as an expert has on average


def tokens_of_sum(k: int, width: int) -> int:
    """Return how many tokens have their rows summed at a time; parts begin at a multiple of 16 bytes."""
    return max(SUM_BYTES // (4 * k * width) // 16 * 16, ROWS)


def part_of(pairs: int) -> int | None:
    """Return how many pairs a program of the planner places; None: torch sorts them."""
    if pairs > PLAN_PAIRS:
        return None
    return 32 if pairs <= 256 else 128


def launch_kinds(tokens: int, k: int, weight: Weight, dtype: torch.dtype, *, summed: bool) -> set[object]:
    """Return the kinds of launches of `grouped_matmul`: two numbers of tokens with one kind use the same kernels."""
    step = tokens_of_sum(k, weight.rows) if summed else tokens
    sizes = {min(tokens, step), tokens % step or step}
    return {(shape_of(size, k, weight, dtype), part_of(size * k)) for size in sizes}


def make_plan(experts: Tensor, num_experts: int, block: int) -> Plan:
    """Sort pairs by expert and cut them into blocks, in one launch."""
    pairs = experts.numel()
    part = part_of(pairs)
    if part is None:
        return reference.make_plan(experts, num_experts, block)
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    blocks = torch.empty((max_blocks(pairs, num_experts, block), 3), dtype=torch.int32, device=experts.device)
    plan_kernel[(1 + triton.cdiv(pairs, part),)](
        experts.contiguous(),
        order,
        blocks,
        pairs,
        num_experts,
        len(blocks),
        BLOCK=block,
        IDS=triton.next_power_of_2(num_experts + 1),
        PART=part,
        SEEN=32,
        launch_pdl=uses_pdl(),
    )
    return Plan(order, blocks)


def multiply_few(
    x: Tensor, weight: Weight, plan: Plan, shared: int, bias: Tensor | None, gate: Gate | None, out: Tensor
) -> None:
    """Multiply pairs, up to 8 of one expert at a time."""
    planes, constants = planes_and_constants(weight, x.dtype)
    tiles = 1 if gate is None else 2
    # blocks of one expert are neighbours, so the second one finds the weights in the cache
    few_pairs_kernel[(len(plan.blocks), triton.cdiv(weight.rows, tiles * TILE))](
        x.contiguous(),
        *planes,
        None if bias is None else bias.contiguous(),
        out,
        plan.blocks,
        plan.order,
        weight.num_matrices,
        *(0 if plane is None else plane.stride(0) for plane in planes),
        N=weight.rows,
        K=weight.columns,
        **constants,
        SHARED=shared,
        NW=NUM_WARPS,
        MT=tiles,
        **gate_constants(gate),
        KW=kwidth(),
        enable_fp_fusion=True,
        num_warps=NUM_WARPS,
        num_stages=1,
        launch_pdl=uses_pdl(),
    )


def weighted_sums(y: Tensor, route: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """Write the weighted sum of each token's rows, plus the residual, to `out`."""
    tokens, k = route.shape
    width = out.shape[1]
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    block = min(1024, triton.next_power_of_2(width))
    weighted_sum_kernel[(tokens, triton.cdiv(width, block))](
        y,
        route.contiguous(),
        residual,
        out,
        residual.stride(0) if residual is not None else 0,
        width=width,
        K=k,
        COLUMNS=block,
        ASM=not interpreting(),
        enable_fp_fusion=False,
        launch_pdl=uses_pdl(),
    )


@triton.jit
def few_pairs_kernel(
    x,  # [pairs / SHARED, K]
    codes,  # planes of a stack
    high,
    scales,
    offsets,
    supers,
    bias,  # [matrices, N]
    out,  # [pairs, WIDTH]
    blocks,  # int32 [blocks, 3]: matrix, first and end in `order`
    order,  # int32 [pairs]
    matrices,
    codes_stride,  # strides from matrix to matrix
    high_stride,
    scales_stride,
    offsets_stride,
    supers_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CODE: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    BOOK: tl.constexpr,
    DTYPE: tl.constexpr,  # of the dot's operands
    SHARED: tl.constexpr,  # pairs that share a row of x
    NW: tl.constexpr,  # warps
    MT: tl.constexpr,  # tiles of a program
    GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    KW: tl.constexpr,
    ASM: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Multiply MT tiles of one matrix by the rows of one block. Grid: blocks, tiles."""
    begin_dependent(launch_pdl)
    block = blocks + tl.program_id(0) * 3
    matrix = tl.load(block)
    if matrix < 0:
        return
    first = tl.load(block + 1)
    count = tl.load(block + 2) - first
    real = matrix < matrices
    start = tl.where(real, matrix, 0).to(tl.int64)
    codes += start * codes_stride
    scales = scales if scales is None else scales + start * scales_stride
    high = high if high is None else high + start * high_stride
    offsets = offsets if offsets is None else offsets + start * offsets_stride
    supers = supers if supers is None else supers + start * supers_stride

    pid = tl.program_id(1)
    i = tl.arange(0, NW * 8)[:, None] % 8
    pair = tl.load(order + first + i, mask=i < count, other=0)
    x_row = x + (pair // SHARED).to(tl.int64) * K  # [NW * 8, 1]
    zeros = tl.zeros([NW, 16, 8], tl.float32)
    acc = (zeros, zeros) if MT == 2 else (zeros,)
    FULL: tl.constexpr = K // 64 // NW  # steps in which no warp reaches the border
    for step in range(tl.where(real, FULL, 0)):
        weights = load_weights(
            codes, high, scales, offsets, supers, pid, step, N, K, CHUNKS, BITS, GROUP, SCALE, OFFSET, NW, MT,
            ASM, False,
        )  # fmt: skip
        b = load_x(x_row, 0, count, step, K, GROUP, DTYPE, NW, 1, KW, False)
        acc = multiply(
            acc, weights, b, step, K, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, DTYPE, NW, MT, 1, KW, ASM, False,
        )  # fmt: skip
    if K % (64 * NW) != 0:
        weights = load_weights(
            codes, high, scales, offsets, supers, pid, FULL, N, K, CHUNKS, BITS, GROUP, SCALE, OFFSET, NW, MT,
            ASM, True,
        )  # fmt: skip
        b = load_x(x_row, 0, count, FULL, K, GROUP, DTYPE, NW, 1, KW, True)
        acc = multiply(
            acc, weights, b, FULL, K, BITS, GROUP, SCALE, CODE, ZERO, OFFSET, BOOK, DTYPE, NW, MT, 1, KW, ASM, True,
        )  # fmt: skip

    WIDTH: tl.constexpr = N // MT
    row = tl.arange(0, 8)[None, :]
    n = pid * (MT * 16) + tl.arange(0, 16)[:, None]
    y = tl.sum(acc[0], 0)  # [16, 8]
    if bias is not None:
        y = with_bias(y, bias + start * N, n, N)
    if MT == 2:
        up = tl.sum(acc[MT - 1], 0)
        if bias is not None:
            up = with_bias(up, bias + start * N, n + 16, N)
        y = gated_values(y, up, GATE, LIMIT, ALPHA)
        n = pid * 16 + tl.arange(0, 16)[:, None]
    y = tl.where(real, y, 0.0)
    pair = tl.load(order + first + row, mask=row < count, other=0).to(tl.int64)
    y = rounded(y, out.dtype.element_ty, ASM).to(out.dtype.element_ty)
    tl.store(out + pair * WIDTH + n, y, mask=(n < WIDTH) & (row < count))


@triton.jit(do_not_specialize=["pairs", "num_blocks"])  # of a step: a prompt of another length compiles nothing
def plan_kernel(
    experts,  # int32 [pairs]
    order,  # int32 [pairs]
    blocks,  # int32 [num_blocks, 3]
    pairs,
    num_experts,
    num_blocks,
    BLOCK: tl.constexpr,  # pairs of a block
    IDS: tl.constexpr,  # a power of two above num_experts
    PART: tl.constexpr,  # pairs that a program places
    SEEN: tl.constexpr,  # pairs that are read together
    launch_pdl: tl.constexpr = False,
):
    """Make a plan: program 0 cuts the blocks, each other program places PART pairs in `order`."""
    begin_dependent(launch_pdl)
    pid = tl.program_id(0)
    index = tl.arange(0, SEEN)
    if pid == 0:
        ids = tl.arange(0, IDS)
        counts = tl.zeros([IDS], tl.int32)
        for start in range(0, pairs, SEEN):
            other = _expert_ids(experts, start + index, pairs, num_experts)
            counts += tl.sum((other[None, :] == ids[:, None]).to(tl.int32), 1)
        needed = (counts + BLOCK - 1) // BLOCK
        firsts = tl.cumsum(counts, 0) - counts
        places = tl.cumsum(needed, 0) - needed
        for turn in range(tl.max(needed, 0)):
            valid = (turn < needed) & (ids <= num_experts)
            at = blocks + (places + turn) * 3
            first = firsts + turn * BLOCK
            tl.store(at, ids, mask=valid)
            tl.store(at + 1, first, mask=valid)
            tl.store(at + 2, tl.minimum(first + BLOCK, firsts + counts), mask=valid)
        for start in range(tl.sum(needed, 0), num_blocks, SEEN):
            for field in tl.static_range(3):
                tl.store(blocks + (start + index) * 3 + field, -1, mask=start + index < num_blocks)
    else:
        mine = (pid - 1) * PART + tl.arange(0, PART)
        own = _expert_ids(experts, mine, pairs, num_experts)
        place = tl.zeros([PART], tl.int32)
        for start in range(0, pairs, SEEN):
            pair = start + index
            other = _expert_ids(experts, pair, pairs, num_experts)
            earlier = (other[None, :] == own[:, None]) & (pair[None, :] < mine[:, None])
            place += tl.sum(((other[None, :] < own[:, None]) | earlier).to(tl.int32), 1)
        tl.store(order + place, mine, mask=mine < pairs)


@triton.jit
def _expert_ids(experts, index, pairs, num_experts):
    """Return the expert ids of pairs: num_experts for ids outside of the stack, far above it beyond the last pair."""
    ids = tl.load(experts + index, mask=index < pairs, other=0)
    ids = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    return tl.where(index < pairs, ids, 0x7FFFFFFF)


@triton.jit
def weighted_sum_kernel(
    y,  # float32 [tokens * k, width]
    route,  # float32 [tokens, k]
    residual,  # [tokens, width]
    out,  # [tokens, width]
    residual_stride,
    width: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Add the rows of one token's experts, times their weights, in the order of the experts; then the residual."""
    begin_dependent(launch_pdl)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(K):
        weight = tl.load(route + token * K + j)
        total = tl.fma(tl.load(y + (token * K + j) * width + column, mask=inside, other=0.0), weight, total)
    if residual is not None:
        total += tl.load(residual + token * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    total = rounded(total, out.dtype.element_ty, ASM).to(out.dtype.element_ty)
    tl.store(out + token * width + column, total, mask=inside)
