"""The emulated cases of the ops that read weights: matmul, dequant_gemm, dequantize, embedding, grouped."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from edgelm.kernels import layout
from edgelm.kernels.activation import Gate
from edgelm.kernels.dequant_gemm import fused
from edgelm.kernels.dequant_gemm.configs import Split
from edgelm.kernels.dequant_gemm.kernel import dequant_gemm as split_gemm
from edgelm.kernels.dequantize import dequantize
from edgelm.kernels.embedding import embedding
from edgelm.kernels.layout import PackedWeight
from edgelm.kernels.matmul import ROWS, Lengths
from edgelm.kernels.matmul.configs import Config, float32_config
from edgelm.kernels.matmul.kernel import Ahead, decode
from edgelm.kernels.matmul.operands import planes_and_constants
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
from tests.kernels.test_matmul import (
    GATES,
    NAMES,
    exact,
    sums_of_squares,
    surrounded,
    weight_named,
    with_norm,
    with_rounding,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# few rows of x, their type, the columns (two whole steps and a part of one), and the config
FEW = (
    (3, F16, 600, Config(2, 1, 2, 1)),
    (11, BF16, 330, Config(2, 2, 2, 2)),
    (29, BF16, 330, Config(2, 1, 2, 1)),  # a program takes four blocks of 8 rows
    (50, F16, 330, Config(2, 1, 0, 2)),  # programs share the blocks
)
# products with the norm of their rows: columns of x, rows of the weight
FUSED = (
    ("q4_k", 330, 80, Config(4, 2, 2, 1)),
    ("q6_k", 704, 40, Config(8, 1, 1, 1)),
    ("q8_0", 640, 144, Config(2, 1, 2, 2)),
    ("dense_bfloat16", 330, 37, Config(2, 4, 0, 1)),
)
WIDE = "q8_0", 64, 4224, Config(4, 2, 0, 1)  # more sums of squares than a program adds at once
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
                "matmul", "q4_1", rows, f"lengths bias {gate.kind} residual splits={splits}", run, main=main
            )
    for (name, columns, width, config), rows in [*((case, rows) for case in FUSED for rows in (3, 19, 61)), (WIDE, 3)]:
        run = partial(_fused, name, rows, columns, width, config)
        main = (
            CAPABILITIES if (name, rows) == ("q6_k", 19) else (90,) if (name, width, rows) == ("q8_0", 144, 3) else ()
        )
        detail = f"and norm N={width} K={columns} {tuple(config)}"
        yield EmulatedCase("matmul", name, rows, detail, run, main=main)


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


def _fused(name: str, rows: int, columns: int, width: int, config: Config, seed: int) -> Outcome:
    """Compare a product, its norm and a second product that finishes it with float64, and rows with each row alone."""
    g = generator(seed)
    given = with_norm(name, rows, columns, width, g)
    (x, weight, bias, residual), norm, expected, error = given
    second = weight_named("q4_0", 36, width, g)

    def run(first: int, end: int) -> list[torch.Tensor]:
        scaled, squares = torch.empty(end - first, width, dtype=BF16), torch.empty(end - first, -(-width // 16))
        ahead = Ahead(norm.weight, scaled, squares)
        y = decode(x[first:end], weight, bias, residual[first:end], None, None, F32, config, ahead=ahead)
        lengths = Lengths(squares, norm.eps)
        return [y, scaled, squares, decode(scaled, second, None, None, None, lengths, F32, config)]

    together = run(0, rows)
    for row in (0, rows - 1):
        for one, many in zip(run(row, row + 1), together, strict=True):
            if not torch.equal(one[0], many[row]):
                return equal(one[0], many[row])
    y, scaled, squares, z = together
    factored = expected * norm.weight.double()
    sums, slack = sums_of_squares(expected, error)
    last, off = exact(scaled, second, None, Lengths(squares, norm.eps))
    wanted = ((expected, error), (factored, error * norm.weight.double()), (sums, slack), (last, off))
    return worst(
        [
            within(got, pair[0], with_rounding(got.dtype, *pair))
            for got, pair in zip((y, scaled, squares, z), wanted, strict=True)
        ]
    )


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
