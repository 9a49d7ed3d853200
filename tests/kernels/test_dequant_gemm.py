"""The matmul of many rows: fused and by a scratch, against the reference and against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgelm.kernels import dequant_gemm, layout
from edgelm.kernels.activation import Gate, gated_values
from edgelm.kernels.choice import NoKernelError
from edgelm.kernels.dequant_gemm import SCRATCH_ROWS, by_scratch, fused, kernel, launch_kind
from edgelm.kernels.dequant_gemm.configs import Split, parts_of, split_of
from edgelm.kernels.gpu_target import num_sms
from edgelm.kernels.layout import DenseWeight, PackedWeight, Weight, slice_rows
from tests.kernels.cases.dequant_gemm import CASES, GemmCase
from tests.kernels.cases.dequantize import Case, random_weight
from tests.kernels.error_bounds import assert_within, gated_bound, product_bound

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Inputs:
    """Random tensors of a case, the exact result for them in float64, and its error bound."""

    def __init__(self, case: GemmCase, seed: int | None = None) -> None:
        self.seed = int(torch.randint(2**31, ())) if seed is None else seed
        generator = torch.Generator().manual_seed(self.seed)
        self.weight: Weight = random_weight(case.weight, generator)
        rows, columns = case.weight.rows, case.weight.columns
        self.x = torch.randn((case.rows, columns), generator=generator).to(case.dtype)
        self.gate = Gate(case.gate) if case.gate else None
        width = rows // 2 if self.gate else rows
        self.bias = torch.randn(rows, generator=generator) if case.bias else None
        self.residual = torch.randn((case.rows, width), generator=generator) if case.residual else None
        self.surroundings = {
            "bias": self.bias,
            "residual": self.residual,
            "gate": self.gate,
            "out_dtype": case.out_dtype,
        }

    def exact(self) -> tuple[Tensor, Tensor]:
        x = self.x
        if isinstance(self.weight, PackedWeight) and self.weight.order is not None:
            x = x[:, self.weight.order]
        matrix = layout.dequantize(self.weight)
        y = x.double() @ matrix.double().T + (0 if self.bias is None else self.bias.double())
        bound = product_bound(x, matrix, rounded_to=x.dtype)
        if self.gate is not None:
            halves = y.reshape(len(y), -1, 2, 16), bound.reshape(len(y), -1, 2, 16)
            (gate, up), (gate_bound, up_bound) = ((half[:, :, 0], half[:, :, 1]) for half in halves)
            bound = gated_bound(gate, up, gate_bound, up_bound, self.gate).flatten(1)
            y = gated_values(gate, up, self.gate).double().flatten(1)
        return (y if self.residual is None else y + self.residual.double()), bound


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_fused_products_are_exact_up_to_rounding(case: GemmCase, implementation: str) -> None:
    inputs = Inputs(case)
    got = fused(inputs.x, inputs.weight, **inputs.surroundings, implementation=implementation)
    assert got.dtype == case.out_dtype
    assert_within(got, *inputs.exact())


@pytest.mark.parametrize("case", [*CASES[:3], *CASES[-7:]], ids=lambda case: case.name)
def test_products_by_a_scratch_are_exact_up_to_rounding(case: GemmCase) -> None:
    inputs = Inputs(case)
    for limit_bytes in (1, 1 << 20):  # slices of two tiles, and one slice
        got = by_scratch(
            inputs.x, inputs.weight, *inputs.surroundings.values(), implementation="reference", limit_bytes=limit_bytes
        )
        assert_within(got, *inputs.exact())


def test_slices_of_a_scratch_are_the_rows_of_the_weight() -> None:
    weight = random_weight(Case("q5_k", 70, 40), torch.Generator().manual_seed(int(torch.randint(2**31, ()))))
    for start, end in ((0, 32), (32, 64), (64, 70), (16, 17)):
        part = slice_rows(weight, start, end)
        assert part.rows == end - start
        assert torch.equal(layout.dequantize(part), layout.dequantize(weight)[start:end])


def test_the_scratch_stays_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(GemmCase(Case("q4_0", 200, 64), 20, torch.float16))
    sizes = []
    dequantize = dequant_gemm.dequantize

    def recorded(part: Weight, dtype: torch.dtype, *, out: Tensor, implementation: str | None) -> Tensor:
        sizes.append((out.data_ptr(), out.numel() * out.element_size()))
        return dequantize(part, dtype, out=out, implementation=implementation)

    monkeypatch.setattr(dequant_gemm, "dequantize", recorded)
    by_scratch(inputs.x, inputs.weight, *inputs.surroundings.values(), limit_bytes=9000, implementation="reference")
    assert len({pointer for pointer, _ in sizes}) == 1  # one scratch, used again
    assert [size for _, size in sizes] == [64 * 64 * 2] * 3 + [8 * 64 * 2]


@pytest.mark.parametrize(
    ("rows", "dense", "scratch"),
    [(17, False, False), (SCRATCH_ROWS - 1, False, False), (SCRATCH_ROWS, False, True), (17, True, True)],
)
def test_the_size_chooses_the_way(monkeypatch: pytest.MonkeyPatch, rows: int, dense: bool, scratch: bool) -> None:
    ways = []
    monkeypatch.setattr(dequant_gemm, "by_scratch", lambda x, *_, **__: ways.append(True) or x)
    monkeypatch.setattr(dequant_gemm, "fused", lambda x, *_, **__: ways.append(False) or x)
    weight = random_weight(Case("float16" if dense else "q4_0", 16, 64), torch.Generator())
    dequant_gemm.dequant_gemm(torch.zeros(rows, 64, dtype=torch.float16), weight)
    assert ways == [scratch]


def test_a_residual_may_be_a_view_of_any_strides() -> None:
    inputs = Inputs(GemmCase(Case("q4_0", 16, 64), 17, torch.float16, residual=True))
    plain = fused(inputs.x, inputs.weight, **inputs.surroundings, implementation="triton")
    inputs.surroundings["residual"] = inputs.residual.T.contiguous().T
    turned = fused(inputs.x, inputs.weight, **inputs.surroundings, implementation="triton")
    assert torch.equal(turned, plain), f"seed {inputs.seed}"


def test_torch_writes_float32_from_2_8_on() -> None:
    versions = {"2.6.0": False, "2.7.1+cu128": False, "2.8.0a0": True, "2.13.0": True, "3.0.0": True}
    assert {version: dequant_gemm._writes_float32(version) for version in versions} == versions


def test_no_rows_have_no_products() -> None:
    weight = random_weight(Case("q4_0", 20, 64), torch.Generator())
    assert fused(torch.zeros(0, 64), weight, implementation="triton").shape == (0, 20)


def test_a_dense_weight_of_another_type_is_declined_with_the_reason() -> None:
    weight = DenseWeight(torch.zeros(16, 64, dtype=torch.float16))
    with pytest.raises(NoKernelError, match=r"the weight is torch\.float16, x is torch\.bfloat16"):
        fused(torch.zeros(17, 64, dtype=torch.bfloat16), weight, implementation="triton")


@pytest.mark.parametrize(
    "case",
    [
        GemmCase(Case("q4_k", 20, 600), 17, torch.float16, bias=True, residual=True),
        GemmCase(Case("q6_k", 64, 500, gated=True), 130, torch.bfloat16, gate="silu", bias=True, residual=True),
        GemmCase(Case("float16", 20, 500), 3, torch.float16),
    ],
    ids=lambda case: case.name,
)
def test_parts_of_k_give_the_same_bits_apart_and_together(case: GemmCase) -> None:
    inputs = Inputs(case)
    args = (inputs.x, inputs.weight, inputs.bias, inputs.residual, inputs.gate, case.out_dtype)
    assert parts_of(inputs.weight) == 2
    apart, together = (kernel.dequant_gemm(*args, split=Split(2, way)) for way in (True, False))
    assert torch.equal(apart, together), f"seed {inputs.seed}"
    assert_within(apart, *inputs.exact())


def test_a_row_does_not_depend_on_other_rows() -> None:
    inputs = Inputs(GemmCase(Case("q4_k", 20, 600), 300, torch.float16))
    sms = num_sms(inputs.x.device)
    assert [split_of(rows, inputs.weight, sms) for rows in (65, 300)] == [Split(2, True), Split(2, False)]
    few, many = (fused(inputs.x[:rows], inputs.weight, implementation="triton") for rows in (65, 300))
    assert torch.equal(few, many[:65]), f"seed {inputs.seed}"


def test_k_is_split_where_programs_are_few() -> None:
    weights = {rows: DenseWeight(torch.empty(rows, 4096, device="meta")) for rows in (1024, 4096, 16384)}
    assert {rows: parts_of(weight) for rows, weight in weights.items()} == {1024: 16, 4096: 4, 16384: 1}
    split = {(rows, sms): split_of(rows, weights[4096], sms).apart for rows in (128, 256, 511) for sms in (82, 128)}
    assert split == {
        (128, 82): True, (128, 128): True, (256, 82): False, (256, 128): True, (511, 82): True, (511, 128): False,
    }  # fmt: skip
    assert not split_of(511, weights[1024], 36).apart  # a sixteenth less is less than adding takes
    assert launch_kind(65) == launch_kind(128) != launch_kind(129)
    assert launch_kind(SCRATCH_ROWS) == launch_kind(10 * SCRATCH_ROWS)
