"""kernels/matmul: both implementations against float64, with bias, gate, norm, residual; rows are independent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from edgelm.kernels.activation import Gate
from edgelm.kernels.choice import NoKernelError
from edgelm.kernels.layout import DenseWeight, PackedWeight, Weight, dequantize, fuse_gated, planes
from edgelm.kernels.matmul import Lengths, Norm, matmul, matmul_and_norm, operands, reference
from edgelm.kernels.matmul import kernel as matmul_kernel
from edgelm.kernels.matmul.configs import Config, row_blocks
from edgelm.kernels.matmul.kernel import Ahead, decode
from tests.kernels.cases.matmul import LAYOUTS, random_dense, random_weight
from tests.kernels.seeds import SEED, generator

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
CONFIGS = (Config(2, 2, 2, 1), Config(1, 1, 0, 2), Config(4, 4, 1, 1), Config(1, 2, 2, 3), Config(1, 1, 2, 1))
ROWS = (1, 3, 9, 16, 17, 40)
GATES = (Gate("silu"), Gate("gelu"), Gate("gelu_tanh"), Gate("swiglu_oai", limit=0.5, alpha=1.3))


@pytest.fixture(autouse=True)
def _nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, so that elements which a kernel forgets to write are seen."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.dtype.is_floating_point else tensor

    monkeypatch.setattr(torch, "empty", filled)


def parts(weight: Weight) -> Tensor:
    """Return for each value the sum of the sizes of its terms, float64: rounding errors are relative to it."""
    if isinstance(weight, DenseWeight) or weight.layout.offset == "none":
        return dequantize(weight).double().abs()
    low, top = (
        dequantize(
            replace(
                weight,
                codes=torch.full_like(weight.codes, bits),
                high=None if weight.high is None else torch.full_like(weight.high, bits),
            )
        ).double()
        for bits in (0, -1)
    )
    return low.abs() + top.abs() + (top - low).abs()


def exact(
    x: Tensor, weight: Weight, bias: Tensor | None = None, lengths: Lengths | None = None
) -> tuple[Tensor, Tensor]:
    """Return the product in float64, and the largest error that rounding causes in a correct kernel."""
    wide = x.double()
    order = weight.order if isinstance(weight, PackedWeight) else None
    unit = 0.0
    if lengths is not None:
        wide = wide * torch.rsqrt(lengths.squares.double().sum(-1, keepdim=True) / x.shape[1] + lengths.eps)
        unit = 2.0**-20  # the root is good to some last bits
    if order is not None:
        wide = wide[:, order]
    size = wide.abs() @ parts(weight).T
    y = wide @ dequantize(weight).double().T
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    # A sum of n float32 terms in any order is off by at most n roundings of the sum of their sizes.
    return y, size * ((x.shape[1] + 32) * 2.0**-24 + unit)


def with_rounding(dtype: torch.dtype, expected: Tensor, error: Tensor) -> Tensor:
    """Return the largest error of a correct result of this type."""
    return error + UNIT[dtype] * (expected.abs() + error) + 2.0**-25


def assert_within(y: Tensor, expected: Tensor, error: Tensor) -> None:
    assert y.shape == expected.shape
    off = (y.double() - expected).abs() - with_rounding(y.dtype, expected, error)
    assert bool((off <= 0).all()), f"off by {off.max()} too much (NaN: {int(y.isnan().sum())})"


def weight_named(name: str, rows: int, columns: int, g: torch.Generator) -> Weight:
    if name.startswith("dense"):
        return random_dense(rows, columns, getattr(torch, name.removeprefix("dense_")), g)
    return random_weight(LAYOUTS[name], rows, columns, g, ordered=name in ("gptq", "awq"))


NAMES = (*LAYOUTS, "dense_float16", "dense_bfloat16", "dense_float32")


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("at", range(len(NAMES)), ids=NAMES)
def test_every_format_equals_float64(at: int, seed: int):
    g = generator(seed)
    weight = weight_named(NAMES[at], 21, 203, g)
    choice = seed + at
    x = torch.randn(ROWS[choice % len(ROWS)], 203, generator=g).to(DTYPES[choice % 3])
    y, error = exact(x, weight)
    assert_within(matmul(x, weight, out_dtype=torch.float32, implementation="reference"), y, error)
    assert_within(decode(x, weight, None, None, None, None, torch.float32, CONFIGS[choice % 5]), y, error)


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("at", range(len(NAMES)), ids=NAMES)
def test_every_format_has_the_same_bits_for_any_number_of_rows(at: int, seed: int):
    g = generator(seed)
    choice = seed + at
    columns = 100 if choice % 2 else 128  # with a border, or whole chunks
    weight = weight_named(NAMES[at], 21, columns, g)
    x = torch.randn(64, columns, generator=g).to(DTYPES[choice % 3])
    y, error = exact(x, weight)
    config = CONFIGS[0]
    together = decode(x, weight, None, None, None, None, torch.float32, config)
    assert_within(together, y, error)
    first, count = ((0, 1), (10, 5), (3, 16), (47, 17), (20, 40), (0, 63))[choice % 6]
    part = decode(x[first : first + count], weight, None, None, None, None, torch.float32, config)
    assert torch.equal(part, together[first : first + count])


@pytest.mark.parametrize("most", [2, 4])
def test_programs_share_the_blocks_of_rows_equally(most: int):
    for rows in range(1, 65):
        blocks, shares = row_blocks(rows, most)
        assert 1 <= blocks <= most
        assert 8 * blocks * (shares - 1) < rows <= 8 * blocks * shares  # none is without work
    assert [row_blocks(rows, 4) for rows in (8, 16, 24, 32, 48, 64)] == [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (4, 2)]


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("name", ["q4_1", "q6_k", "q8_0", "dense_float16"])
def test_either_order_of_columns(name: str, seed: int, monkeypatch: pytest.MonkeyPatch):
    """Triton 3.6 wants another order than 3.9; without a GPU there is only one."""
    monkeypatch.setattr(matmul_kernel, "kwidth", lambda: 4)
    weight = weight_named(name, 16, 203, generator(seed))
    x = torch.randn(3, 203, generator=generator(seed)).half()
    y, error = exact(x, weight)
    for rows in (x, x.float()):
        assert_within(decode(rows, weight, None, None, None, None, torch.float32, Config(2, 2, 2, 1)), y, error)


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 64), (48, 128), (33, 65), (15, 63), (16, 320)])
@pytest.mark.parametrize("name", ["q4_1", "dense_float16"])
def test_odd_sizes(name: str, n: int, k: int, seed: int):
    g = generator(seed)
    weight = weight_named(name, n, k, g)
    x = torch.randn(2, k, generator=g).half()
    y, error = exact(x, weight)
    assert_within(matmul(x, weight), y, error)
    assert_within(decode(x, weight, None, None, None, None, torch.float32, Config(2, 2, 2, 2)), y, error)


class Surrounded(NamedTuple):
    """The arguments of a product with lengths, bias, gate and residual; its values in float64, their largest error."""

    arguments: tuple[Tensor, Weight, Tensor, Tensor, Gate, Lengths]
    expected: Tensor
    error: Tensor


def surrounded(kind: Gate, rows: int, dtype: torch.dtype, g: torch.Generator) -> Surrounded:
    gate, up = (random_weight(LAYOUTS["q4_1"], 32, 150, g) for _ in range(2))
    scaled = replace(gate, order=torch.randperm(150, generator=g))
    weight = fuse_gated(scaled, replace(up, order=scaled.order))
    x = (3 * torch.randn(rows, 150, generator=g)).to(dtype)
    lengths = Lengths(200 * torch.rand(rows, 10, generator=g), 0.3)
    bias = torch.randn(64, generator=g).to(dtype)
    residual = torch.randn(x.shape[0], 50, generator=g)[:, 3:35]
    pairs, errors = exact(x, weight, bias, lengths)
    both, errors = pairs.reshape(-1, 2, 2, 16), errors.reshape(-1, 2, 2, 16)
    first, second = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
    expected = _gated64(first, second, kind) + residual.double()
    # No gate is steeper than 1.2 in its first argument, for each unit of the second; 1e-6: exp and its like.
    slope = 1.2 * errors[:, :, 0].flatten(1) * (second.abs() + 1 + errors[:, :, 1].flatten(1))
    error = (
        slope + errors[:, :, 1].flatten(1) * first.abs() + 1e-6 * (expected.abs() + first.abs() * (second.abs() + 1))
    )
    return Surrounded((x, weight, bias, residual, kind, lengths), expected, error + 1e-6 * residual.abs())


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("at", range(4), ids=[gate.kind for gate in GATES])
def test_lengths_bias_gate_and_residual(at: int, splits: int, seed: int):
    given = surrounded(GATES[at], ROWS[(seed + at + splits) % len(ROWS)], DTYPES[(seed + at) % 3], generator(seed))
    arguments, expected, error = given
    assert_within(decode(*arguments, torch.float32, Config(1, 2, 2, splits)), expected, error)
    x, weight, bias, residual, gate, lengths = arguments
    options = {"bias": bias, "residual": residual, "gate": gate, "lengths": lengths}
    result = matmul(x, weight, implementation="reference", **options)
    assert result.dtype == torch.float32
    assert_within(result, expected, error)


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("splits", [1, 2])
def test_lengths_of_rows_of_more_columns_than_a_program_adds_at_once(splits: int, seed: int):
    """256 sums of 16 squares."""
    g = generator(seed)
    weight = weight_named("dense_bfloat16", 16, 4200, g)
    x = torch.randn(9, 4200, generator=g).bfloat16()
    lengths = Lengths(torch.rand(9, 263, generator=g) * torch.linspace(0, 300, 263), 0.3)
    y, error = exact(x, weight, None, lengths)
    result = decode(x, weight, None, None, None, lengths, torch.float32, Config(4, 1, 2, splits))
    assert_within(result, y, error)


def _gated64(gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
    if kind.kind == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if kind.kind == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    if kind.kind == "gelu_tanh":
        return gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return gate / (1 + torch.exp(-kind.alpha * gate)) * (up + 1)


class WithNorm(NamedTuple):
    """The arguments of a product with the norm of its rows; its values in float64, and their largest error."""

    arguments: tuple[Tensor, Weight, Tensor, Tensor]  # x, weight, bias, residual
    norm: Norm
    expected: Tensor
    error: Tensor


def with_norm(name: str, rows: int, columns: int, width: int, g: torch.Generator) -> WithNorm:
    weight, bias = weight_named(name, width, columns, g), torch.randn(width, generator=g)
    x = torch.randn(rows, columns, generator=g).bfloat16()
    residual = 1e3 * torch.randn(rows, width + 9, generator=g)[:, 4 : 4 + width]
    y, error = exact(x, weight, bias)
    expected = y + residual.double()
    norm = Norm(torch.rand(width, generator=g) + 0.5, 1e-5)
    return WithNorm((x, weight, bias, residual), norm, expected, error + 2.0**-24 * expected.abs())


def assert_scaled(results: tuple[Tensor, Tensor, Tensor], given: WithNorm) -> None:
    """Assert that these are y, y times the norm's weight, and the sums of 16 squares of y."""
    y, scaled, squares = results
    assert_within(y, given.expected, given.error)
    factored = given.expected * given.norm.weight.double()
    truncated = UNIT[torch.bfloat16] * factored.abs()  # which the interpreter does instead of rounding
    assert_within(scaled, factored, given.error * given.norm.weight.double() + truncated)
    assert_within(squares, *sums_of_squares(given.expected, given.error))


def sums_of_squares(y: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the squares of 16 columns each, and their largest error."""
    pairs = (y.square(), (2 * y.abs() + error) * error)
    sums, errors = (pad(values, (0, -y.shape[1] % 16)).view(len(y), -1, 16).sum(2) for values in pairs)
    return sums, errors + 2.0**-20 * sums


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("name", "width"), [("q4_k", 64), ("gptq", 37), ("dense_bfloat16", 144)])
def test_a_product_and_the_norm_of_its_rows(name: str, width: int, splits: int, seed: int):
    g = generator(seed)
    given = with_norm(name, ROWS[seed % 4], 203, width, g)
    x, weight, bias, residual = given.arguments
    assert_scaled(reference.matmul_scaled(*given.arguments, given.norm.weight, torch.bfloat16), given)
    scaled = torch.empty(len(x), width, dtype=torch.bfloat16)
    squares = torch.empty(len(x), -(-width // 16))
    ahead = Ahead(given.norm.weight, scaled, squares)
    config = Config(2, 2, 2, splits)
    y = decode(x, weight, bias, residual, None, None, torch.float32, config, ahead=ahead)
    assert_scaled((y, scaled, squares), given)


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(("rows", "dtype"), [(2, torch.bfloat16), (3, torch.float16), (70, torch.bfloat16)])
def test_a_matmul_finishes_the_norm_of_another(rows: int, dtype: torch.dtype, implementation: str, seed: int):
    """Few rows in bfloat16 are divided by their lengths at the end of the second product, others before it."""
    g = generator(seed)
    given = with_norm("q4_0", rows, 203, 64, g)
    (x, weight, bias, residual), norm = given.arguments, given.norm
    second = weight_named("q6_k", 24, 64, g)
    y, normed, lengths = matmul_and_norm(
        x.to(dtype), weight, norm, bias=bias, residual=residual, dtype=dtype, implementation=implementation
    )
    assert (lengths is not None) == (rows <= 64 and dtype == torch.bfloat16)
    result = matmul(normed, second, lengths=lengths, out_dtype=torch.float32, implementation=implementation)
    wide = y.double()
    wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + norm.eps) * norm.weight.double()
    expected = wide @ dequantize(second).double().T
    sizes = wide.abs() @ parts(second).T
    unit = UNIT[dtype] * (2 if rows > 64 else 1)  # of a prompt, weights are rounded too
    assert_within(result, expected, sizes * (1.01 * unit + 2.0**-16))


@pytest.mark.parametrize("name", ["q4_0", "q6_k", "q8_0", "fp8", "mxfp4", "dense_float16"])
def test_on_a_gpu_assembly_makes_the_operands_of_16_bits_only(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operands, "interpreting", lambda: False)
    weight = weight_named(name, 16, 64, generator(1))
    for dtype in DTYPES:
        mixed = isinstance(weight, DenseWeight) and weight.data.dtype != dtype
        assert operands.planes_and_constants(weight, dtype)[1]["ASM"] == (dtype != torch.float32 and not mixed)


@pytest.mark.parametrize("seed", [SEED])
def test_planes_of_a_stack_keep_their_strides(seed: int):
    """`multiply_few` steps by them from matrix to matrix."""
    for layout in LAYOUTS.values():
        one = random_weight(layout, 20, 300, generator(seed))
        stack = replace(one, **{name: torch.stack([plane] * 3) for name, plane in planes(one).items()})
        both = (operands.planes_and_constants(weight, torch.float16)[0] for weight in (one, stack))
        for single, stacked in zip(*both, strict=True):
            assert (single is None) == (stacked is None)
            assert single is None or stacked.stride(0) == single.numel()


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize(
    ("name", "config", "num_rows"),
    [
        ("q4_k", Config(2, 2, 2, 1), 40),
        ("q4_k", Config(1, 2, 0, 2), 40),
        ("q6_k", Config(2, 2, 0, 1), 16),
        ("awq", Config(1, 2, 1, 2), 16),
        ("dense_bfloat16", Config(2, 2, 2, 1), 24),
    ],
)
def test_a_row_depends_on_no_other(name: str, config: Config, num_rows: int, seed: int):
    g = generator(seed)
    dtype = torch.bfloat16 if name == "dense_bfloat16" else torch.float16
    weight = weight_named(name, 20, 203, g)
    squares = torch.rand(num_rows, 13, generator=g) if name == "q4_k" else None
    x = torch.randn(num_rows, 203, generator=g).to(dtype)

    def product(first: int, end: int) -> Tensor:
        lengths = None if squares is None else Lengths(squares[first:end], 1e-5)
        return decode(x[first:end], weight, None, None, None, lengths, torch.float32, config)

    together = product(0, num_rows)
    for row in (7, num_rows - 1):
        assert torch.equal(product(row, row + 1)[0], together[row])
    assert torch.equal(product(5, 14), together[5:14])
    x[:7] = x[8:] = float("nan")
    assert torch.equal(product(0, num_rows)[7], together[7])


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("config", [Config(2, 2, 2, 1), Config(1, 1, 1, 2)])
def test_the_norm_of_a_row_depends_on_no_other(config: Config, seed: int):
    g = generator(seed)
    (x, weight, bias, residual), norm, _, _ = with_norm("q5_k", 19, 203, 40, g)
    second = weight_named("q4_0", 20, 40, g)

    def product(chosen: list[int]) -> list[Tensor]:
        scaled, squares = torch.empty(len(chosen), 40, dtype=torch.bfloat16), torch.empty(len(chosen), 3)
        ahead = Ahead(norm.weight, scaled, squares)
        y = decode(x[chosen], weight, bias, residual[chosen], None, None, torch.float32, config, ahead=ahead)
        lengths = Lengths(squares, norm.eps)
        return [y, scaled, squares, decode(scaled, second, None, None, None, lengths, torch.float32, config)]

    together = product(list(range(19)))
    for row in (0, 7, 8, 18):
        assert all(torch.equal(one[0], many[row]) for one, many in zip(product([row]), together, strict=True))


@pytest.mark.parametrize("seed", [SEED])
def test_prefetching_and_tiles_change_no_bit(seed: int):
    g = generator(seed)
    weight = weight_named("q5_1", 36, 270, g)
    x = torch.randn(3, 270, generator=g).half()
    results = [
        decode(x, weight, None, None, None, None, torch.float32, Config(1, tiles, prefetch, 1))
        for tiles, prefetch in ((1, 0), (2, 2), (4, 1))
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("seed", [SEED])
def test_padding_is_never_read_as_a_number(seed: int):
    clean = random_weight(LAYOUTS["q4_k"], 21, 203, generator(seed), garbage=False)
    dirty = random_weight(LAYOUTS["q4_k"], 21, 203, generator(seed))
    assert not torch.equal(clean.codes, dirty.codes)
    assert dirty.supers is not None
    assert bool(dirty.supers.isnan().any())
    x = torch.randn(2, 203, generator=generator(seed)).half()
    config = Config(2, 2, 2, 1)
    one, other = (decode(x, weight, None, None, None, None, torch.float32, config) for weight in (clean, dirty))
    assert torch.equal(one, other)


def test_scales_of_e8m0_reach_down_to_subnormal_numbers():
    weight = random_weight(LAYOUTS["mxfp4"], 16, 64, generator(1))
    x = torch.ones(1, 64)
    for byte, scale in ((0, 2.0**-128), (1, 2.0**-127), (2, 2.0**-126), (255, 2.0**127)):
        scaled = replace(weight, scales=torch.full_like(weight.scales, byte))
        y = decode(x / 64, scaled, None, None, None, None, torch.float32, Config(1, 1, 0, 1))
        codes = dequantize(replace(weight, scales=torch.full_like(weight.scales, 128)))
        assert torch.equal(
            y.double()[0], codes.double().sum(1) * (scale / 64)
        )  # small integers: exact but for y's type


@pytest.mark.parametrize("seed", [SEED])
def test_views_of_larger_tensors(seed: int):
    g = generator(seed)
    weight = weight_named("q8_0", 20, 70, g)
    large = torch.randn(3, 4, 100, generator=g).half()
    x = large[:, 1, 5:75]
    y, error = exact(x, weight)
    assert_within(matmul(x, weight), y, error)
    turned = torch.randn(70, 3, generator=g).half().T
    y, error = exact(turned, weight)
    assert_within(matmul(turned, weight), y, error)


@pytest.mark.parametrize("seed", [SEED])
def test_a_prompt_has_the_same_formula(seed: int):
    g = generator(seed)
    weight = weight_named("q4_0", 20, 70, g)
    x = torch.randn(65, 70, generator=g)
    bias = torch.randn(20, generator=g)
    y, error = exact(x, weight, bias)
    assert_within(matmul(x, weight, bias=bias), y, error)
    assert matmul(x[:0], weight).shape == (0, 20)


def test_a_type_is_the_residuals_else_that_of_x():
    weight = DenseWeight(torch.ones(16, 16))
    x, residual = torch.ones(1, 16, dtype=torch.bfloat16), torch.ones(1, 16)
    for implementation in ("triton", "reference"):
        assert matmul(x, weight, implementation=implementation).dtype == torch.bfloat16
        assert matmul(x, weight, residual=residual, implementation=implementation).dtype == torch.float32
        y = matmul(x, weight, residual=residual, out_dtype=torch.float16, implementation=implementation)
        assert y.dtype == torch.float16


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("rows", [3, 65])
def test_a_result_goes_where_it_is_asked_for(rows: int, implementation: str):
    g = generator(SEED)
    weight = weight_named("q4_0", 20, 330, g)
    x = torch.randn(rows, 330, generator=g).half()
    place = torch.full((rows + 1, 20), torch.nan)
    got = matmul(x, weight, out=place[:rows], implementation=implementation)
    assert got.data_ptr() == place.data_ptr()
    assert torch.equal(place[:rows], matmul(x, weight, out_dtype=torch.float32, implementation=implementation))
    assert place[rows].isnan().all()


def test_a_place_of_another_shape_or_type_is_refused():
    x, weight = torch.ones(2, 16), DenseWeight(torch.ones(16, 16))
    for place in (torch.empty(1, 16), torch.empty(2, 32)[:, ::2]):
        with pytest.raises(AssertionError):
            matmul(x, weight, out=place)
    with pytest.raises(AssertionError):
        matmul(x, weight, out=torch.empty(2, 16), out_dtype=torch.float16)


def test_a_declined_call_gives_the_reason():
    x = torch.ones(1, 64, dtype=torch.float64)
    weight = random_weight(LAYOUTS["q4_0"], 16, 64, generator(1))
    with pytest.raises(NoKernelError, match=r"triton: x is torch\.float64"):
        matmul(x, weight, implementation="triton")
    narrow = random_weight(LAYOUTS["q4_k"], 16, 64, generator(1))
    narrow = replace(narrow, codes=narrow.codes[:, :1])
    with pytest.raises(NoKernelError, match="not padded to 256"):
        matmul(x.float(), narrow, implementation="triton")
    with pytest.raises(NoKernelError, match="none is named cuda"):
        matmul(x.float(), weight, implementation="cuda")
