"""kernels/embedding: the values have the reference's bits, for any ids."""

from __future__ import annotations

import pytest
import torch

from edgelm.kernels import layout
from edgelm.kernels.embedding import embedding
from edgelm.kernels.layout import PackedWeight
from tests.kernels.cases.dequantize import Case, random_weight
from tests.kernels.cases.embedding import CASES
from tests.kernels.seeds import SEED, generator

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_have_the_bits_of_the_layout(case: Case) -> None:
    g = generator(SEED)
    weight = random_weight(case, g)
    ids = torch.randint(0, case.rows, (9,), generator=g, dtype=torch.int32)
    exact = layout.dequantize(weight)[ids.long()]
    if isinstance(weight, PackedWeight) and weight.order is not None:
        exact = exact[:, weight.order.argsort()]
    for implementation in ("reference", "triton"):
        got = embedding(ids, weight, implementation=implementation)
        assert torch.equal(got, exact), f"{implementation}, seed {SEED}"


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_scaled_row_is_rounded_once(dtype: torch.dtype, implementation: str) -> None:
    g = generator(SEED)
    weight = random_weight(Case("q4_k", 20, 70), g)
    ids = torch.tensor([3, 19, 0], dtype=torch.int64)
    exact = (layout.dequantize(weight)[ids] * 50.6).to(dtype)
    got = embedding(ids, weight, scale=50.6, out_dtype=dtype, implementation=implementation)
    assert torch.equal(got, exact), f"seed {SEED}"


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("name", ["q6_k", "float16"])
def test_an_id_outside_of_the_vocabulary_reads_nothing(name: str, implementation: str) -> None:
    weight = random_weight(Case(name, 20, 70), generator(SEED))
    ids = torch.tensor([-1, 20, 2**31 - 1, -(2**31), 5], dtype=torch.int32)
    got = embedding(ids, weight, implementation=implementation)
    assert not got[:4].any()
    assert torch.equal(got[4], layout.dequantize(weight)[5])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["q6_k", "gptq", "bfloat16"])
def test_an_id_below_0_names_a_token_that_the_device_knows(name: str, dtype: torch.dtype, implementation: str) -> None:
    weight = random_weight(Case(name, 20, 70), generator(SEED))
    answers = torch.full((4, 3), 9)
    answers[:, 1] = torch.tensor([7, -1, 19, 20])
    last = answers[:, 1]
    ids = torch.tensor([-3, 5, -1, -2, -4, -5, -(2**31), 20], dtype=dtype)
    known = torch.tensor([19, 5, 7, 0, 20, 20, 20, 20], dtype=dtype)  # 20: no row
    got = embedding(ids, weight, last=last, implementation=implementation)
    assert torch.equal(got, embedding(known, weight, implementation=implementation))
    assert got[:4].any(1).all()
    assert not got[4:].any()
    none = embedding(ids, weight, last=last[:0], implementation=implementation)
    assert torch.equal(none, embedding(ids, weight, implementation=implementation))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_no_tokens_have_no_rows(implementation: str) -> None:
    weight = random_weight(Case("q4_0", 20, 70), generator(SEED))
    got = embedding(torch.empty(0, dtype=torch.int32), weight, implementation=implementation)
    assert got.shape == (0, 70)
