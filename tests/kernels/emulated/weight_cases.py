"""The emulated cases of the ops that read weights: matmul, dequant_gemm, dequantize, embedding, grouped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from edgelm.kernels import layout
from edgelm.kernels.activation import Gate
from edgelm.kernels.dequant_gemm import fused
from edgelm.kernels.dequant_gemm.configs import Split
from edgelm.kernels.dequant_gemm.kernel import dequant_gemm as split_gemm
from edgelm.kernels.dequantize import dequantize
from edgelm.kernels.embedding import embedding
from edgelm.kernels.layout import PackedWeight
from edgelm.kernels.matmul import ROWS, Norm, matmul
from edgelm.kernels.matmul import kernel as matmul_kernel
from edgelm.kernels.matmul.configs import Config, float32_config
from edgelm.kernels.matmul.kernel import decode
from edgelm.kernels.matmul.operands import operand_type, planes_and_constants
from tests.kernels import test_dequant_gemm, test_grouped
from tests.kernels.cases import dequant_gemm as gemm_cases
from tests.kernels.cases import dequantize as dequantize_cases
from tests.kernels.cases import embedding as embedding_cases
from tests.kernels.cases import grouped as grouped_cases
from tests.kernels.cases.dequant_gemm import GemmCase
from tests.kernels.cases.dequantize import Case, random_weight
from tests.kernels.cases.grouped import GroupedCase
from tests.kernels.cases.matmul import LAYOUTS
from tests.kernels.emulated.case import CAPABILITIES, EmulatedCase
from tests.kernels.emulated.outcome import Outcome, equal, within, worst
from tests.kernels.error_bounds import rounded_bound
from tests.kernels.seeds import generator
from tests.kernels.test_matmul import GATES, NAMES, UNIT, exact, surrounded, weight_named, with_rounding

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# few rows of x, their type, the columns (two whole steps and a part of one), and the config
FEW = (
    (3, F16, 600, Config(2, 1, 2, 1)),
    (11, BF16, 330, Config(2, 2, 2, 2)),
    (29, BF16, 330, Config(2, 1, 2, 1)),  # a program takes four blocks of 8 rows
    (50, F16, 330, Config(2, 1, 0, 2)),  # programs share the blocks
)
# rows that a kernel before scales by their norm's weight
SCALED = (
    ("q4_k", F32, Config(4, 1, 2, 1)),
    ("q4_k", BF16, Config(8, 2, 1, 1)),
    ("q6_k", F32, Config(4, 1, 2, 2)),
    ("dense_bfloat16", F32, Config(16, 1, 0, 2)),
)
MAIN_FORMATS = ("q4_k", "q6_k", "q8_0", "mxfp4")
MAIN_OF_FORMAT = {name: (CAPABILITIES[at],) for at, name in enumerate(MAIN_FORMATS)}


def cases() -> Iterator[EmulatedCase]:
    """Yield the cases of all ops that read weights."""
    yield from _matmul_cases()
    yield from _gemm_cases()
    for case in dequantize_cases.CASES:
        main = (86,) if case.name == "q5_k-3x33x40" else ()
        yield EmulatedCase("dequantize", case.layout, case.rows, case.name, partial(_dequantize, case), main=main)
    for case in embedding_cases.CASES:
        main = (120,) if case.name in ("q4_k-37x80", "bfloat16-7x33") else ()
        yield EmulatedCase("embedding", case.layout, 9, case.name, partial(_embedding, case), main=main)
    yield from _grouped_cases()


# -- matmul ------------------------------------------------------------------------------------------------------------


def _matmul_cases() -> Iterator[EmulatedCase]:
    for name in NAMES:
        for rows, dtype, columns, config in FEW:
            main = MAIN_OF_FORMAT.get(name, ()) if rows == 3 else (90,) if (name, rows) == ("q5_k", 50) else ()
            run = partial(_decode, name, rows, dtype, columns, config)
            yield EmulatedCase("matmul", name, rows, f"{_short(dtype)} K={columns} {tuple(config)}", run, main=main)
    for name in ("q4_0", "q6_k", "dense_float32"):
        run = partial(_decode, name, 3, F32, 330, float32_config(Config(4, 1, 2, 1), False))
        yield EmulatedCase("matmul", name, 3, "float32", run)
    for at, gate in enumerate(GATES):
        for splits in (1, 2):
            rows, dtype = (16, 5)[splits - 1], (BF16, F16)[at % 2]
            run = partial(_surrounded, gate, rows, dtype, Config(1, 2, 2, splits))
            main = (90,) if gate.kind == "silu" and splits == 2 else ()
            yield EmulatedCase(
                "matmul", "q4_1", rows, f"norm bias {gate.kind} residual splits={splits}", run, main=main
            )
    for name in ("q4_k", "dense_bfloat16"):
        for rows in (2, 35, 70):
            run = partial(_stream, name, rows)
            main = (89,) if name == "q4_k" and rows != 35 else ()
            yield EmulatedCase("matmul", name, rows, "normed stream", run, main=main)
    for name, dtype, config in SCALED:
        run = partial(_scaled, name, dtype, config)
        main = CAPABILITIES if (name, dtype) == ("q6_k", F32) else ()
        yield EmulatedCase("matmul", name, 11, f"scaled {_short(dtype)} {tuple(config)}", run, main=main)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _decode(name: str, rows: int, dtype: torch.dtype, columns: int, config: Config, seed: int) -> Outcome:
    g = generator(seed)
    weight = weight_named(name, 36, columns, g)
    if planes_and_constants(weight, dtype)[1]["ASM"] is False:  # multiplied in float32
        config = float32_config(config, False)._replace(splits=config.splits)
    x = torch.randn(rows, columns, generator=g).to(dtype)
    y, error = exact(x, weight)
    got = decode(x, weight, None, None, None, None, F32, config)
    return within(got, y, with_rounding(F32, y, error))


def _surrounded(gate: Gate, rows: int, dtype: torch.dtype, config: Config, seed: int) -> Outcome:
    arguments, expected, error = surrounded(gate, rows, dtype, generator(seed))
    return within(decode(*arguments, F32, config), expected, with_rounding(F32, expected, error))


def _stream(name: str, rows: int, seed: int) -> Outcome:
    """Multiply a float32 stream that is normed, as a decoder does: few rows in one kernel, more after another norm."""
    g = generator(seed)
    weight = weight_named(name, 36, 330, g)
    x, norm = torch.randn(rows, 330, generator=g), Norm(torch.rand(330, generator=g) + 0.5, 1e-5)
    y, _ = exact(x, weight, None, norm)
    operand = operand_type(x.dtype, True, BF16)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True)) * norm.weight.double()
    sizes = normed.abs() @ layout.dequantize(weight).double().abs().T
    rounding = UNIT[operand] * (2 + UNIT[operand]) * sizes  # of x, and in a prompt of the weights too
    got = matmul(x, weight, norm=norm, out_dtype=BF16, implementation="triton")
    return within(got, y, rounded_bound(y, rounding + exact(x, weight)[1], BF16))


def _scaled(name: str, dtype: torch.dtype, config: Config, seed: int) -> Outcome:
    """Compare rows of a large batch with the same rows alone: the result, and with parts of K their sums of squares."""
    g = generator(seed)
    columns = (5 * config.splits * config.warps + 2) * 64  # whole steps, and one in which some warps have nothing
    weight = weight_named(name, 36, columns, g)
    x, norm = torch.randn(11, columns, generator=g).to(dtype), Norm(torch.rand(columns, generator=g) + 0.5, 1e-5)
    combine = matmul_kernel.combine_kernel
    squares: list[torch.Tensor] = []

    class Kept:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def launch(*args: Any, **options: Any) -> object:
                squares.append(args[1].clone())
                return combine[grid](*args, **options)

            return launch

    def product(rows: torch.Tensor) -> torch.Tensor:
        return decode(rows, weight, None, None, None, norm, F32 if dtype == BF16 else BF16, config)

    with patch.object(matmul_kernel, "combine_kernel", Kept()):
        together, alone = product(x)[[0, 10]], torch.cat([product(x[:1]), product(x[10:])])
    if squares:
        together = torch.cat([together, squares[0][[0, 10]]], 1)
        alone = torch.cat([alone, torch.cat(squares[1:])], 1)
    return equal(together, alone)


# -- dequant_gemm ------------------------------------------------------------------------------------------------------


def _gemm_cases() -> Iterator[EmulatedCase]:
    # loops of several chunks, which are loaded ahead; tiles of 32, 64 and 128 rows
    long = [GemmCase(Case(name, 20, 330), 17, (F16, BF16)[at % 2]) for at, name in enumerate(LAYOUTS)]
    long += [GemmCase(Case(name, 70, 330), 50, (F16, BF16)[at % 2]) for at, name in enumerate(MAIN_FORMATS)]
    long += [GemmCase(Case(name, 150, 500), 130, (BF16, F16)[at % 2]) for at, name in enumerate(MAIN_FORMATS)]
    for case in (*gemm_cases.CASES, *long):
        main = (90,) if case == long[-4] else (80,) if case.gate == "silu" and case.rows == 33 else ()
        columns = case.weight.columns
        detail = f"{case.weight.name} {_short(case.dtype)} {case.gate or 'plain'} K={columns}"
        yield EmulatedCase("dequant_gemm", case.weight.layout, case.rows, detail, partial(_gemm, case), main=main)

    for name in ("q4_k", "q8_0", "float16"):
        case = GemmCase(Case(name, 36, 600), 19, F16, bias=True, residual=True)
        yield EmulatedCase("dequant_gemm", name, 19, "parts of K, apart and together", partial(_gemm_parts, case))


def _gemm_parts(case: GemmCase, seed: int) -> Outcome:
    """Sum parts of K by programs of their own, and by one: both in the same order."""
    inputs = test_dequant_gemm.Inputs(case, seed)
    args = (inputs.x, inputs.weight, inputs.bias, inputs.residual, inputs.gate, case.out_dtype)
    apart, together = (split_gemm(*args, split=Split(2, way)) for way in (True, False))
    y, bound = inputs.exact()
    return worst([equal(apart, together), within(apart, y, bound)])


def _gemm(case: GemmCase, seed: int) -> Outcome:
    inputs = test_dequant_gemm.Inputs(case, seed)
    got = fused(inputs.x, inputs.weight, **inputs.surroundings, implementation="triton")
    y, bound = inputs.exact()
    return within(got, y, rounded_bound(y, bound, got.dtype))


# -- dequantize, embedding ---------------------------------------------------------------------------------------------


def _dequantize(case: Case, seed: int) -> Outcome:
    weight = random_weight(case, generator(seed))
    values = layout.dequantize(weight)
    return worst([equal(dequantize(weight, d, implementation="triton"), values.to(d)) for d in (F32, F16, BF16)])


def _embedding(case: Case, seed: int) -> Outcome:
    g = generator(seed)
    weight = random_weight(case, g)
    ids = torch.randint(0, case.rows, (9,), generator=g, dtype=torch.int32)
    rows = layout.dequantize(weight)[ids.long()]
    if isinstance(weight, PackedWeight) and weight.order is not None:
        rows = rows[:, weight.order.argsort()]
    outside = torch.tensor([-1, case.rows, 2**31 - 1, -(2**31), 0], dtype=torch.int32)
    zeros = embedding(outside, weight, implementation="triton")[:4]
    scaled = embedding(ids, weight, scale=50.6, out_dtype=BF16, implementation="triton")
    answers = torch.cat((ids.long(), torch.tensor([-1, case.rows])))[:, None].expand(-1, 24).contiguous()
    order = torch.randperm(len(ids), generator=g)
    unread = torch.cat((-1 - order, torch.tensor([-1 - len(ids), -2 - len(ids), -3 - len(ids), -(2**31)]))).int()
    unread[: len(ids) : 4] = ids[order[::4]]  # some are known
    read = embedding(unread, weight, last=answers[:, 1], implementation="triton")
    first = embedding(torch.zeros(1, dtype=torch.int32), weight, implementation="triton")
    return worst(
        [
            equal(embedding(ids, weight, implementation="triton"), rows),
            equal(read, torch.cat((rows[order], first, torch.zeros(3, weight.columns)))),
            equal(scaled, (rows * 50.6).to(BF16)),
            equal(zeros, torch.zeros_like(zeros)),
        ]
    )


# -- grouped -----------------------------------------------------------------------------------------------------------


def _grouped_cases() -> Iterator[EmulatedCase]:
    # whole steps of four chunks, and a rest
    long = [
        GroupedCase(Case(name, 20, 600, 3), 5, 2, (F16, BF16)[at % 2], summed=at % 2 == 0)
        for at, name in enumerate(LAYOUTS)
    ]
    # so many pairs that the kernel of `dequant_gemm` multiplies them
    long += [
        GroupedCase(Case("q4_k", 32, 330, 2, gated=True), 70, 1, F16, gate="silu", bias=True, summed=True),
        GroupedCase(Case("q6_k", 20, 40, 2), 66, 1, BF16, "outside", bias=True, per_pair=True),
        GroupedCase(Case("mxfp4", 20, 72, 2), 70, 1, F32, "one"),
        GroupedCase(Case("float16", 20, 70, 2), 66, 2, F16, "all", bias=True),
        GroupedCase(Case("q8_0", 36, 330, 3), 70, 2, BF16, summed=True),
    ]
    for case in (*grouped_cases.CASES, *long):
        many = case.tokens > ROWS
        main = (90,) if many and case.weight.layout == "q4_k" else (89,) if case.gate == "swiglu_oai" else ()
        run = partial(_grouped, case)
        yield EmulatedCase("grouped", case.weight.layout, case.tokens, case.name, run, main=main)


def _grouped(case: GroupedCase, seed: int) -> Outcome:
    inputs = test_grouped.Inputs(case, seed)
    got = inputs.run("triton")
    y, bound = inputs.exact(rounded=case.tokens > ROWS)
    return within(got, y, rounded_bound(y, bound, got.dtype))
