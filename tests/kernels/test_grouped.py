"""kernels/grouped: results are exact up to rounding, and independent of the rest of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from edgelm.kernels import layout
from edgelm.kernels.activation import Gate, gated_values
from edgelm.kernels.choice import NoKernelError
from edgelm.kernels.grouped import grouped_matmul, kernel, reference
from edgelm.kernels.layout import PackedWeight
from edgelm.kernels.matmul import ROWS
from edgelm.kernels.matmul.reference import gate_and_up
from tests.counts import Count
from tests.kernels.cases.dequantize import Case, random_weight
from tests.kernels.cases.grouped import CASES, GroupedCase, random_experts
from tests.kernels.error_bounds import assert_within, gated_bound, product_bound

PLANS = Count(test=4, soak=1000)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Inputs:
    """Random tensors of a case, the exact result for them in float64, and its error bound."""

    def __init__(self, case: GroupedCase, seed: int | None = None) -> None:
        self.seed = int(torch.randint(2**31, ())) if seed is None else seed
        generator = torch.Generator().manual_seed(self.seed)
        self.case = case
        self.weight = random_weight(case.weight, generator)
        self.experts = random_experts(case, generator)
        matrices, rows, columns = case.weight.matrices, case.weight.rows, case.weight.columns
        rows_of_x = case.tokens * case.k if case.per_pair else case.tokens
        self.x = torch.randn((rows_of_x, columns), generator=generator).to(case.dtype)
        self.gate = Gate(case.gate) if case.gate else None
        width = rows // 2 if self.gate else rows
        self.bias = torch.randn((matrices, rows), generator=generator) if case.bias else None
        self.route = torch.rand((case.tokens, case.k), generator=generator) if case.summed else None
        self.residual = torch.randn((case.tokens, width), generator=generator) if case.summed else None

    def run(self, implementation: str) -> Tensor:
        return grouped_matmul(
            self.x,
            self.weight,
            self.experts,
            bias=self.bias,
            gate=self.gate,
            route=self.route,
            residual=self.residual,
            out_dtype=self.case.out_dtype,
            implementation=implementation,
        )

    def exact(self, *, rounded: bool) -> tuple[Tensor, Tensor]:
        """Return values and bounds, pair by pair; `rounded`: the weights may be rounded to the type of x."""
        case, k = self.case, self.case.k
        pairs = [self._pair(token * k + j, rounded) for token in range(case.tokens) for j in range(k)]
        y, bound = (torch.stack(each) for each in zip(*pairs, strict=True))
        if self.route is None:
            return y, bound
        y, bound = (each.reshape(case.tokens, k, -1) for each in (y, bound))
        route = self.route.double()[:, :, None]
        bound = (bound * route + y.abs() * route * 2.0**-22 * k).sum(1)
        return (y * route).sum(1) + self.residual.double(), bound + 2.0**-23 * self.residual.abs()

    def _pair(self, pair: int, rounded: bool) -> tuple[Tensor, Tensor]:
        expert = int(self.experts.flatten()[pair])
        width = self.case.weight.rows // (2 if self.gate else 1)
        if not 0 <= expert < self.case.weight.matrices:
            return torch.zeros(width).double(), torch.zeros(width).double()
        x = self.x[pair if self.case.per_pair else pair // self.case.k][None]
        offsets = False
        if isinstance(self.weight, PackedWeight):
            x = x if self.weight.order is None else x[:, self.weight.order[expert]]
            offsets = self.weight.layout.offset != "none"
        matrix = layout.dequantize(self.weight)[expert]
        y = x.double() @ matrix.double().T
        bound = product_bound(x, matrix, offsets=offsets, rounded_to=x.dtype if rounded else None)
        if self.bias is not None:
            y = y + self.bias[expert].double()
        if self.gate is None:
            return y[0], bound[0]
        (gate, up), (gate_bound, up_bound) = (gate_and_up(rows) for rows in (y, bound))
        bound = gated_bound(gate, up, gate_bound, up_bound, self.gate)
        return gated_values(gate, up, self.gate).double()[0], bound[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_products_are_exact_up_to_rounding(case: GroupedCase, implementation: str) -> None:
    inputs = Inputs(case)
    got = inputs.run(implementation)
    assert got.dtype == case.out_dtype
    assert_within(got, *inputs.exact(rounded=implementation == "triton" and case.tokens > ROWS))


@pytest.mark.parametrize("name", ["q4_k", "bfloat16"])
def test_a_token_has_the_same_bits_alone_and_among_many(name: str) -> None:
    case = GroupedCase(Case(name, 16, 320, 3), ROWS, 2, torch.bfloat16, summed=True, bias=True)
    inputs = Inputs(case)
    together = inputs.run("triton")
    whole = inputs.x, inputs.experts, inputs.route, inputs.residual
    for token in (0, 11, ROWS - 1):
        inputs.x, inputs.experts, inputs.route, inputs.residual = (part[token : token + 1] for part in whole)
        assert torch.equal(inputs.run("triton")[0], together[token]), f"seed {inputs.seed}, token {token}"


def test_a_sum_is_made_in_the_order_of_the_experts() -> None:
    case = GroupedCase(Case("q4_0", 16, 64, 4), 2, 4, torch.float32, "all", summed=True)
    inputs = Inputs(case)
    inputs.route = torch.tensor([[2.0**27, 1.0, -(2.0**27), 1.0]] * 2)  # the first small one is lost, the last is left
    inputs.residual = torch.zeros_like(inputs.residual)
    inputs.weight = replace(
        inputs.weight, **{n: p[:1].expand_as(p).contiguous() for n, p in layout.planes(inputs.weight).items()}
    )
    inputs.experts = torch.arange(4, dtype=torch.int32).repeat(2, 1)
    for implementation in ("triton", "reference"):
        parts = grouped_matmul(inputs.x, inputs.weight, inputs.experts, implementation=implementation)
        assert torch.equal(inputs.run(implementation), parts.reshape(2, 4, 16)[:, 3])


def test_a_residual_may_be_a_view_of_any_strides() -> None:
    inputs = Inputs(GroupedCase(Case("q4_0", 16, 64, 3), 3, 2, torch.float16, summed=True))
    plain = inputs.run("triton")
    inputs.residual = inputs.residual.T.contiguous().T
    assert torch.equal(inputs.run("triton"), plain), f"seed {inputs.seed}"


def test_sums_do_not_depend_on_the_slices_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(GroupedCase(Case("q4_0", 16, 64, 9), ROWS + 2, 1, torch.float16, summed=True))
    whole = inputs.run("triton")
    monkeypatch.setattr(kernel, "SUM_BYTES", 1)  # slices of ROWS tokens
    assert torch.equal(inputs.run("triton"), whole), f"seed {inputs.seed}"


def test_plans_are_those_of_the_reference() -> None:
    for _ in range(PLANS):
        tokens, k, num, block = (int(torch.randint(1, most, ())) for most in (40, 5, 12, 20))
        experts = torch.randint(-1, num + 1, (tokens, k), dtype=torch.int32)
        got, exact = kernel.make_plan(experts, num, block), reference.make_plan(experts, num, block)
        assert torch.equal(got.order, exact.order), experts
        assert torch.equal(got.blocks, exact.blocks), experts


def test_blocks_of_a_plan_hold_each_pair_once() -> None:
    for _ in range(PLANS):
        tokens, k, num, block = (int(torch.randint(1, most, ())) for most in (40, 5, 12, 20))
        experts = torch.randint(-1, num + 1, (tokens, k), dtype=torch.int32)
        order, blocks = reference.make_plan(experts, num, block)
        seen = []
        for expert, first, end in blocks.tolist():
            if expert < 0:
                continue
            members = order[first:end].long()
            assert 0 < len(members) <= block
            assert experts.flatten()[members].tolist() == [expert] * len(members) or expert == num
            seen += members.tolist()
        assert sorted(seen) == list(range(tokens * k))


@pytest.mark.parametrize(
    ("pairs", "num", "block", "most"), [(1, 8, 8, 1), (128, 128, 8, 128), (16, 4, 8, 6), (9, 0, 8, 2)]
)
def test_no_routing_needs_more_blocks_than_a_plan_has(pairs: int, num: int, block: int, most: int) -> None:
    assert reference.max_blocks(pairs, num, block) == most


def test_many_pairs_are_sorted_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(GroupedCase(Case("q4_0", 16, 64, 3), 5, 2, torch.float32))
    planned = inputs.run("triton")
    monkeypatch.setattr(kernel, "PLAN_PAIRS", 0)
    assert torch.equal(inputs.run("triton"), planned), f"seed {inputs.seed}"


def test_no_tokens_have_no_products() -> None:
    weight = random_weight(Case("q4_0", 16, 64, 2), torch.Generator())
    experts = torch.empty((0, 2), dtype=torch.int32)
    for implementation in ("triton", "reference"):
        assert grouped_matmul(torch.zeros(0, 64), weight, experts, implementation=implementation).shape == (0, 16)


def test_a_type_that_no_kernel_multiplies_is_declined_with_the_reason() -> None:
    weight = random_weight(Case("q4_0", 16, 64, 2), torch.Generator())
    with pytest.raises(NoKernelError, match=r"x is torch\.float64"):
        grouped_matmul(
            torch.zeros(1, 64, dtype=torch.float64),
            weight,
            torch.zeros((1, 1), dtype=torch.int32),
            implementation="triton",
        )
