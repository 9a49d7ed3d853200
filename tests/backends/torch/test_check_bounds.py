"""The bounds of the self-check: one wrong column, row or element is found, and rounding is no fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from edgelm.backends.torch.check_bounds import bounds_of
from edgelm.backends.torch.self_check import LIMIT, difference_of
from edgelm.kernels import layout
from edgelm.kernels.activation import Gate
from edgelm.kernels.cache import BLOCK_LEN, FORMATS, read
from edgelm.kernels.grouped import reference as grouped
from edgelm.kernels.layout import PackedWeight
from edgelm.kernels.matmul import Lengths, reference
from edgelm.kernels.route import route
from tests.counts import Count
from tests.kernels import attention_bounds, test_attention, test_attention_bounds, test_write_kv
from tests.kernels.cases import attention as attention_cases
from tests.kernels.cases import write_kv as write_cases
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
    x: Tensor, weight: layout.Weight, lengths: Lengths | None, dtype: torch.dtype, out: torch.dtype, g: torch.Generator
) -> Tensor:
    """Multiply numbers that are rounded to 16 bits."""
    x = x.float()
    if lengths is not None:
        x = x * reference.inverse_lengths(lengths, x.shape[1])
    if isinstance(weight, PackedWeight) and weight.order is not None:
        x = x[:, weight.order]
    return shuffled(x.to(dtype).float(), layout.dequantize(weight).to(dtype).float(), g).to(out)


def is_right(op: str, chosen: tuple[object, ...], got: Tensor, want: Tensor, run: tuple[object, ...] = ()) -> bool:
    (bound,) = bounds_of(op, chosen, run, [want]) or [None]
    assert bound is not None
    return difference_of(got, want, bound).within


def is_written_right(case: write_cases.Case, given: write_cases.Inputs, change: Callable[[Tensor], None]) -> bool:
    """Return whether keys and values are right after a change of the keys, [positions, heads, head_dim]."""
    test_write_kv.run(given, "reference")
    cache = given.cache
    blocks = torch.arange(cache.num_blocks)
    keys, values = read(cache, blocks, cache.num_blocks * BLOCK_LEN)
    run = given.q, given.k, given.v, given.positions, given.slot_mapping, cache
    bounds = bounds_of("write_kv", (), run, [given.q, keys, values])
    assert bounds is not None
    wrong = keys.clone()
    change(wrong)
    return difference_of(wrong, keys, bounds[1]).within and difference_of(values, values, bounds[2]).within


@pytest.mark.parametrize("name", FORMATS)
def test_written_keys_may_be_off_by_a_code_now_and_then(name: str) -> None:
    g = generator(SEED)
    case = write_cases.Case(name, 64, 8, 4, 9, dtype=torch.float16)
    given = write_cases.inputs(case, g)
    at = given.slot_mapping[given.slot_mapping >= 0]
    step = {"f16": 2.0**-10, "int8": 1 / 127, "fp8": 1 / 16, "k8v4": 1 / 127, "k6v4": 1 / 32 / 32**0.5}[name]

    def one(keys: Tensor) -> None:
        largest = keys[at[0], 1, :32].abs().argmax()
        keys[at[0], 1, largest] *= 1 + step

    def truncated(keys: Tensor) -> None:
        keys[at] -= 0.4 * step * keys[at].abs().amax(-1, keepdim=True) * torch.rand(keys[at].shape, generator=g)

    def token(keys: Tensor) -> None:
        keys[at[0]] = keys[at[1]]

    def dimension(keys: Tensor) -> None:
        keys[at, :, 3] = keys[at, :, 4]

    assert is_written_right(case, given, one)
    for change in (truncated, token, dimension):
        assert not is_written_right(case, given, change), change


def test_one_wrong_expert_or_weight_is_found() -> None:
    logits = torch.randn(512, 64, generator=generator(27))
    weights, ids = route(logits, 8, kind="softmax", normalise=True, implementation="reference")
    bounds = bounds_of("route", (logits,), (), [weights, ids])
    assert bounds is not None
    assert difference_of(weights * (1 + 2.0**-21), weights, bounds[0]).within
    off = weights.clone()
    off[77, 3] *= 1 + 2.0**-12
    assert not difference_of(off, weights, bounds[0]).within
    other = ids.clone()
    other[77, 3] += 1
    assert not difference_of(other, ids, bounds[1]).within


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
    squares = torch.rand(5, -(-weight.columns // 16), generator=g) if normed else None
    lengths = None if squares is None else Lengths(squares, 1e-5)
    x = x.to(dtype)
    chosen = (x, weight, None, None, None, lengths, dtype)
    want = reference.matmul(*chosen)
    got = as_a_kernel(x, weight, lengths, dtype, dtype, g)
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


def scaled_as_a_kernel(
    x: Tensor, weight: layout.Weight, residual: Tensor, factors: Tensor, g: torch.Generator
) -> list[Tensor]:
    """Multiply numbers that are rounded to 16 bits, for the norm of the rows."""
    y = as_a_kernel(x, weight, None, torch.bfloat16, torch.float32, g) + residual
    tiles = pad(y, (0, -y.shape[1] % 16)).view(len(y), -1, 16)[..., torch.randperm(16, generator=g)]
    return [y, (y * factors).bfloat16(), tiles.square().sum(-1)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("at", range(len(NAMES)), ids=NAMES)
def test_a_product_for_a_norm_with_one_wrong_column_row_or_sum_is_found(at: int, seed: int) -> None:
    g = generator(seed + at)
    weight = weight_named(NAMES[at], 150, (96, 330, 700)[at % 3], g)
    x = torch.randn(5, weight.columns, generator=g).bfloat16()
    size = (x.float() @ layout.dequantize(weight).float().T).square().mean().sqrt()
    residual = size * (1, 30)[(seed + at) % 2] * torch.randn(5, 150, generator=g)
    factors = torch.rand(150, generator=g) + 0.5
    chosen = (x, weight, None, residual, factors, torch.bfloat16)
    want = list(reference.matmul_scaled(*chosen))
    got = scaled_as_a_kernel(x, weight, residual, factors, g)
    bounds = bounds_of("matmul_scaled", chosen, (), want)
    assert bounds is not None
    for one, other, bound in zip(got, want, bounds, strict=True):
        assert difference_of(one, other, bound).within
        column = int((other - other.roll(1, -1)).float().square().sum(0).argmax())  # least like the one before it
        largest = divmod(int(other.abs().argmax()), other.shape[1])
        for change in ("column", "row", "element"):
            wrong = one.clone()
            if change == "column":
                wrong[:, column] = one[:, column - 1]
            elif change == "row":
                wrong[2] = one[3]
            else:
                wrong[largest] *= 1.5
            assert not difference_of(wrong, other, bound).within, change
    y, _, squares = got
    row, place = divmod(int(y.abs().argmax()), 150)
    without = squares.clone()
    without[row, place // 16] -= y[row, place] ** 2
    assert not difference_of(without, want[2], bounds[2]).within


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


def attention_run(case: attention_cases.Case, given: attention_cases.Inputs, want: Tensor) -> tuple[object, ...]:
    rows = int(given.query_start_loc[-1])
    return (
        given.q[:rows], given.cache, given.block_tables, given.query_start_loc, given.seq_lens,
        case.head_dim**-0.5, case.window, case.softcap, given.sinks, max(case.query_lens), want,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(SEED, SEED + Count(test=30, soak=3_000)))
def test_rounding_in_attention_is_no_fault_and_a_wrong_column_is_one(seed: int) -> None:
    g = generator(seed)
    case = test_attention_bounds.case_of(seed)._replace(dtype=TYPES[seed % 2])
    given = attention_cases.inputs(case, g)
    want = test_attention.run(case, given, "reference", out_dtype=case.dtype)
    run = attention_run(case, given, want)
    got = test_attention_bounds.as_a_kernel(case, given, g).to(case.dtype)
    assert is_right("attention", (), got, want, run)
    wrong = got.clone()
    column = int((want - want.roll(1, -1)).float().square().sum((0, 1)).argmax())  # least like the one before it
    wrong[..., column] = got[..., column - 1]
    assert not is_right("attention", (), wrong, want, run)


@pytest.mark.parametrize("name", FORMATS)
def test_attention_with_one_token_too_few_is_found(name: str) -> None:
    """A token of at least the average weight, in a row of 32 heads."""
    case = attention_cases.Case(name, 128, 32, 1, (1,), (200,), dtype=torch.float16)
    given = attention_cases.inputs(case, generator(SEED))
    want = test_attention.run(case, given, "reference", out_dtype=torch.float16)
    run = attention_run(case, given, want)
    (row,) = attention_bounds.rows_of(case, given)
    weights = attention_bounds.weighted(case, row)[1]
    for position in range(0, 200, 7):
        kept = [other for other in range(200) if other != position]
        short = row._replace(keys=row.keys[:, kept], values=row.values[:, kept])
        got = attention_bounds.shown(case, attention_bounds.weighted(case, short)[2])[None].half()
        assert float(weights[0, :, position].max()) > 1 / 200
        assert not is_right("attention", (), got, want, run), position


@pytest.mark.parametrize("op", ["rms_norm", "embedding", "gated"])
def test_one_wrong_element_of_a_row_is_found(op: str) -> None:
    want = torch.randn(4, 3000, generator=generator(27)).bfloat16()
    near = (want.float() * (1 + 2.0**-9)).bfloat16()
    assert is_right(op, (), near, want)
    near[2, 77] += 0.03 * want.abs().max()
    assert not is_right(op, (), near, want)
