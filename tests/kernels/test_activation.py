"""The gates and the soft cap against float64, in plain torch and as kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor

from edgelm.kernels.activation import Gate, gated, gated_values, softcap
from edgelm.kernels.choice import interpreting
from tests.kernels.cases.activation import CASES, GATES, TOLERANCE, Case, make_input

# The interpreter computes with numpy, which warns of values that a GPU passes on as inf or NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]

IMPLEMENTATIONS = "reference", "triton"

# Half a unit in the last place, relative; the interpreter cuts off what does not fit bfloat16.
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7 if interpreting() else 2.0**-8}


def exact(gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
    """Return the gated values by their textbook formulas."""
    gate, up = gate.double(), up.double()
    match kind.kind:
        case "silu":
            return gate / (1 + (-gate).exp()) * up
        case "gelu":
            return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
        case "gelu_tanh":
            return gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    gate = gate.clamp(max=kind.limit)
    return gate / (1 + (-kind.alpha * gate).exp()) * (up.clamp(-kind.limit, kind.limit) + 1)


def bound_of(gate: Tensor, up: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    return TOLERANCE * ((gate.double() * up.double()).abs() + 1) + ROUNDING[dtype] * want.abs()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gates_equal_float64(case: Case, implementation: str, generator: Generator) -> None:
    x = make_input(case, generator)
    gate, up = x.chunk(2, 1)
    want = exact(gate, up, case.gate)
    got = gated(x, case.gate, implementation=implementation)
    assert got.dtype == case.dtype
    assert got.shape == want.shape
    assert bool(((got.double() - want).abs() <= bound_of(gate, up, want, case.dtype)).all())


@pytest.mark.parametrize("kind", GATES)
def test_gates_of_extreme_values(kind: Gate) -> None:
    gate = torch.tensor([[-1e4, 1e4, 0.0, -0.0, 88.0, -104.0, math.nan, 1.0]])
    up = torch.tensor([[1.0, -2.0, 3.0, 1e4, -1e4, 1.0, 1.0, math.nan]])
    want = gated_values(gate, up, kind)
    assert want.isnan()[0].tolist() == [False] * 6 + [True] * 2
    got = gated(torch.cat((gate, up), 1), kind, implementation="triton")
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
def test_softcap_equals_float64(cap: float, implementation: str, generator: Generator) -> None:
    x = torch.cat((torch.randn(2000, generator=generator) * cap, torch.linspace(-9, 9, 333).exp(), torch.zeros(1)))
    x = torch.stack((x, -x), 1).t()  # two long rows, not contiguous: a row is a program of the kernel
    assert not x.is_contiguous()
    got = softcap(x, cap, implementation=implementation)
    assert got.shape == x.shape
    assert torch.allclose(got.double(), cap * torch.tanh(x.double() / cap), rtol=5e-7, atol=0)
    half = softcap(x.half(), cap, implementation=implementation)
    assert half.dtype == torch.float16
    assert torch.allclose(half.double(), cap * torch.tanh(x.half().double() / cap), rtol=2.0**-11 * 1.01, atol=2.0**-25)
    place = x.contiguous()
    assert softcap(place, cap, out=place, implementation=implementation) is place
    assert torch.equal(place, got)
    ends = softcap(torch.tensor([math.inf, -math.inf, math.nan]), cap, implementation=implementation)
    assert ends[:2].tolist() == [cap, -cap]
    assert ends[2].isnan()
