"""kernels/dequantize: the values have the reference's bits, and nothing else is written."""

from __future__ import annotations

import pytest
import torch

from edgelm.kernels import layout
from edgelm.kernels.choice import NoKernelError
from edgelm.kernels.dequantize import dequantize
from tests.kernels.cases.dequantize import CASES, Case, random_weight
from tests.kernels.seeds import SEED, generator


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_have_the_bits_of_the_layout(case: Case) -> None:
    g = generator(SEED)
    weight = random_weight(case, g)
    exact = layout.dequantize(weight)
    out = torch.full_like(exact, float("nan"))
    assert dequantize(weight, torch.float32, out=out, implementation="triton") is out
    assert torch.equal(out, exact), f"seed {SEED}"
    assert torch.equal(dequantize(weight, torch.float32, implementation="reference"), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["q4_k", "bfloat16"])
def test_values_are_rounded_once_to_16_bits(dtype: torch.dtype, name: str) -> None:
    g = generator(SEED)
    weight = random_weight(Case(name, 20, 70), g)
    exact = layout.dequantize(weight).to(dtype)
    assert torch.equal(dequantize(weight, dtype, implementation="triton"), exact), f"seed {SEED}"
    assert torch.equal(dequantize(weight, dtype, implementation="reference"), exact)


def test_nothing_beside_the_output_is_written() -> None:
    g = generator(SEED)
    weight = random_weight(Case("q4_0", 20, 70), g)
    around = torch.full((40, 70), float("nan"))
    dequantize(weight, torch.float32, out=around[10:30], implementation="triton")
    assert torch.equal(around[10:30], layout.dequantize(weight)), f"seed {SEED}"
    assert around[:10].isnan().all()
    assert around[30:].isnan().all()


def test_an_order_of_columns_is_not_applied() -> None:
    g = generator(SEED)
    weight = random_weight(Case("awq", 16, 64, ordered=True), g)
    got = dequantize(weight, torch.float32, implementation="triton")
    assert torch.equal(got, layout.dequantize(weight)), f"seed {SEED}"


def test_a_type_that_no_kernel_writes_is_declined_with_the_reason() -> None:
    weight = random_weight(Case("q4_0", 16, 64), generator(SEED))
    with pytest.raises(NoKernelError, match=r"not torch\.float64"):
        dequantize(weight, torch.float64, implementation="triton")
