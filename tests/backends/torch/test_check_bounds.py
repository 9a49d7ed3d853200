"""The bounds of the self-check: one wrong column, row or element is found, and rounding is no fault."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgelm.backends.torch.check_bounds import bounds_of
from edgelm.backends.torch.self_check import LIMIT, difference_of
from edgelm.kernels import layout
from edgelm.kernels.activation import Gate
from edgelm.kernels.cache import FORMATS
from edgelm.kernels.grouped import reference as grouped
from edgelm.kernels.layout import PackedWeight
from edgelm.kernels.matmul import Norm, reference
from tests.counts import Count
from tests.kernels import test_attention
from tests.kernels.cases import attention as attention_cases
from tests.kernels.cases.dequantize import Case, random_weight
from tests.kernels.seeds import SEED, generator
from tests.kernels.test_matmul import NAMES, weight_named

SEEDS = range(SEED, SEED + Count(test=1, soak=40))
TYPES = (torch.float16, torch.bfloat16)


def shuffled(x: Tensor, values: Tensor, g: torch.Generator) -> Tensor:
    """Return x @ values.T with its terms in another order, and in four parts."""
    order = torch.randperm(x.shape[1], generator=g)
    parts = zip(x[:, order].chunk(4, 1), values[:, order].chunk(4, 1), strict=True)
    total = torch.zeros(len(x), len(values))
    for one, other in parts:
        total += one @ other.T
    return total


def as_a_kernel(
    x: Tensor, weight: layout.Weight, norm: Norm | None, dtype: torch.dtype, out: torch.dtype, g: torch.Generator
) -> Tensor:
    """Multiply numbers that are rounded to 16 bits."""
    x = x.float()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x[:, weight.order]
    return shuffled(x.to(dtype).float(), layout.dequantize(weight).to(dtype).float(), g).to(out)


def is_right(op: str, chosen: tuple[object, ...], got: Tensor, want: Tensor, run: tuple[object, ...] = ()) -> bool:
    (bound,) = bounds_of(op, chosen, run, [want]) or [None]
    assert bound is not None
    return difference_of(got, want, bound).within


def largest_column(y: Tensor) -> int:
    """Return a column that is unlike its neighbour: the weights of some formats have rows of almost nothing."""
    return int(y.float().square().sum(0).argmax())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("at", range(len(NAMES)), ids=NAMES)
def test_a_product_with_one_wrong_column_row_or_element_is_found(at: int, seed: int) -> None:
    g = generator(seed + at)
    dtype = TYPES[(seed + at) % 2]
    weight = weight_named(NAMES[at], 48, (96, 330, 700)[at % 3], g)
    normed = bool(at % 2)
    x = torch.randn(5, weight.columns, generator=g) * torch.exp(torch.randn(weight.columns, generator=g))
    norm = Norm(torch.rand(weight.columns, generator=g) + 0.5, 1e-5) if normed else None
    x = x if normed else x.to(dtype)
    chosen = (x, weight, None, None, None, norm, dtype)
    want = reference.matmul(*chosen)
    got = as_a_kernel(x, weight, norm, dtype, dtype, g)
    assert is_right("matmul", chosen, got, want)
    for change in ("column", "row", "element"):
        wrong = got.clone()
        if change == "column":
            column = largest_column(want)
            wrong[:, column] = got[:, column - 1]
        elif change == "row":
            wrong[2] = got[3]
        else:
            spot = divmod(int(want.abs().argmax()), want.shape[1])
            wrong[spot] *= 0 if at % 3 else 1.5
        assert not is_right("matmul", chosen, wrong, want), change


def test_a_small_fault_in_one_of_thousands_of_columns_is_found() -> None:
    """All columns together are as good as they have to be: only its own bound finds it."""
    g = generator(27)
    weight = weight_named("q8_0", 4096, 256, g)
    x = torch.randn(5, 256, generator=g).half()
    chosen = (x, weight, None, None, None, None, torch.float16)
    want = reference.matmul(*chosen)
    wrong = as_a_kernel(x, weight, None, torch.float16, torch.float16, g)
    wrong[:, 1000] *= 1.05
    difference = difference_of(wrong, want, (bounds_of("matmul", chosen, (), [want]) or [None])[0])
    assert difference.largest <= LIMIT[0]
    assert difference.mean <= LIMIT[1]
    assert not difference.within


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_one_wrong_column_of_gated_experts_is_found(kind: str, seed: int) -> None:
    g = generator(seed)
    stack = random_weight(Case("q4_k", 64, 256, 3, gated=True), g)
    experts = torch.randint(0, 3, (6, 2), generator=g, dtype=torch.int32)
    bias = torch.randn(3, 64, generator=g)
    gate = Gate(kind, limit=7.0, alpha=1.7)
    route = torch.rand(6, 2, generator=g)
    x = torch.randn(6, 256, generator=g).bfloat16()
    chosen = (x, stack, experts, bias, gate, route, None, torch.bfloat16)
    want = grouped.grouped_matmul(*chosen)
    near = x.float() * (1 + 2.0**-8 * (2 * torch.rand(x.shape, generator=g) - 1))
    got = grouped.grouped_matmul(near, stack, experts, bias, gate, route, None, torch.bfloat16)
    assert is_right("grouped_matmul", chosen, got, want)
    wrong, column = got.clone(), largest_column(want)
    wrong[:, column] = got[:, column - 1]
    assert not is_right("grouped_matmul", chosen, wrong, want)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FORMATS)
def test_attention_with_a_wrong_head_is_found(name: str, seed: int) -> None:
    case = attention_cases.Case(name, 32, 2, 1, (1, 3), (45, 20), sinks=True, dtype=torch.float16)
    given = attention_cases.inputs(case, generator(seed))
    want, got = (test_attention.run(case, given, kind)[:4] for kind in ("reference", "triton"))
    run = (
        given.q[:4], given.cache, given.block_tables, given.query_start_loc, given.seq_lens,
        case.head_dim**-0.5, 0, 0.0, given.sinks, 3, want,
    )  # fmt: skip
    assert is_right("attention", (), got, want, run)
    wrong = got.clone()
    wrong[1, 1] = got[1, 0]
    assert not is_right("attention", (), wrong, want, run)


@pytest.mark.parametrize("op", ["rms_norm", "embedding", "gated"])
def test_one_wrong_element_of_a_row_is_found(op: str) -> None:
    want = torch.randn(4, 3000, generator=generator(27)).bfloat16()
    near = (want.float() * (1 + 2.0**-9)).bfloat16()
    assert is_right(op, (), near, want)
    near[2, 77] += 0.03 * want.abs().max()
    assert not is_right(op, (), near, want)
