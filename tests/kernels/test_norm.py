"""The norms, in plain torch and as kernels, against float64; no row depends on another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from edgelm.kernels.choice import interpreting
from edgelm.kernels.norm import add_rms_norm, rms_norm
from tests.kernels.cases.norm import CASES, TOLERANCE, Case, Inputs, make_inputs

EPS = 1e-5
pytestmark = pytest.mark.usefixtures("poisoned_memory")
IMPLEMENTATIONS = "reference", "triton"

# Half a unit in the last place, relative; the interpreter cuts off what does not fit bfloat16.
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7 if interpreting() else 2.0**-8}


def exact_rms(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def bound_of(dtype: torch.dtype, want: Tensor, scale: Tensor) -> Tensor:
    """Return the bound of float32 results, TOLERANCE of `scale`; of 16-bit ones with the rounding of the last place."""
    bound = TOLERANCE * scale + ROUNDING[dtype] * want.abs() * (1 + TOLERANCE)
    return bound + (torch.finfo(torch.float16).smallest_normal * 2**-11 if dtype == torch.float16 else 0.0)


def expect(got: Tensor, want: Tensor, scale: Tensor) -> None:
    assert got.shape == want.shape
    if got.numel():
        error, bound = (got.double() - want).abs(), bound_of(got.dtype, want, scale)
        assert bool((error <= bound).all()), float((error - bound).max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_norms_equal_float64(
    case: Case, out_dtype: torch.dtype | None, implementation: str, generator: Generator
) -> None:
    x, residual, weight, post_weight = make_inputs(case, generator)
    want = exact_rms(x, weight)
    got = rms_norm(x, weight, EPS, out_dtype=out_dtype, implementation=implementation)
    assert got.dtype == (out_dtype or case.dtype)
    expect(got, want, want.abs())

    for post, scale in ((None, 1.0), (post_weight, 1.0), (post_weight, 0.3)):
        options: dict[str, Any] = {"post_weight": post, "scale": scale, "out_dtype": out_dtype}
        normed, total = add_rms_norm(x, residual, weight, EPS, **options, implementation=implementation)
        added = x.double() if post is None else exact_rms(x, post)
        assert total.dtype == torch.float32
        expect(total, (residual.double() + added) * scale, (residual.double().abs() + added.abs()) * scale)
        want = exact_rms(total, weight)  # of the rounded sum, which the next layer reads
        expect(normed, want, want.abs())


@pytest.mark.parametrize("width", [576, 8200])
def test_a_row_is_the_same_among_any_others(width: int, generator: Generator) -> None:
    x, residual, weight, post_weight = make_inputs(Case(3, width), generator)
    together = results(Inputs(x, residual, weight, post_weight))
    for row in range(3):
        alone = results(Inputs(x[row : row + 1], residual[row : row + 1], weight, post_weight))
        assert all(torch.equal(a[row], b[0]) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("width", [40, 8200])
def test_some_rows_are_those_of_all(width: int, implementation: str, generator: Generator) -> None:
    x, _, weight, _ = make_inputs(Case(5, width, torch.float32), generator)
    some = torch.tensor([3, 0, 3, 4])
    for rows in (some, some[:1], some[:0]):
        got = rms_norm(x, weight, EPS, rows=rows, out_dtype=torch.float16, implementation=implementation)
        every = rms_norm(x, weight, EPS, out_dtype=torch.float16, implementation=implementation)
        assert torch.equal(got, every[rows])


def results(given: Inputs) -> tuple[Tensor, ...]:
    x, residual, weight, post_weight = given
    return (
        rms_norm(x, weight, EPS, implementation="triton"),
        *add_rms_norm(x, residual, weight, EPS, post_weight=post_weight, implementation="triton"),
    )


def test_leading_dimensions_and_inputs_are_kept(generator: Generator) -> None:
    x, residual, weight, _ = make_inputs(Case(6, 40, torch.float32), generator)
    x, residual = x.contiguous().view(2, 3, 40), residual.view(2, 3, 40)
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, EPS, implementation="triton")
    assert normed.shape == total.shape == x.shape
    flat = add_rms_norm(x.view(6, 40), residual.view(6, 40), weight, EPS, implementation="triton")
    assert torch.equal(normed.view(6, 40), flat[0])
    assert torch.equal(rms_norm(x[1], weight, EPS, implementation="triton"), rms_norm(x, weight, EPS)[1])
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_not_a_number_stays_in_its_row(implementation: str, generator: Generator) -> None:
    x, residual, weight, _ = make_inputs(Case(3, 100, torch.float32), generator)
    x[1, 17] = float("nan")
    for got in (
        rms_norm(x, weight, EPS, implementation=implementation),
        add_rms_norm(x, residual, weight, EPS, implementation=implementation)[0],
    ):
        assert got.isnan().all(1).tolist() == [False, True, False]
        assert not got[[0, 2]].isnan().any()
