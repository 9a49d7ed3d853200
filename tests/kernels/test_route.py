"""The router, in plain torch and as a kernel, against one that sorts (logit, id) pairs in Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from edgelm.kernels.route import RouteKind, route
from tests.kernels.cases.route import CASES, TOLERANCE, Case, make_logits

# The interpreter computes with numpy, which warns of values that a GPU passes on as inf or NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]

IMPLEMENTATIONS = "reference", "triton"


def exact(logits: Tensor, case: Case) -> tuple[np.ndarray, list[list[int]]]:
    """Return weights and ids in float64."""
    weights, ids = [], []
    for row in logits.double().tolist():
        top = max(row)
        total = sum(math.exp(x - top) for x in row)
        chosen = sorted(range(len(row)), key=lambda i: (-row[i], i))[: case.k]
        values = [math.exp(row[i] - top) / total for i in chosen]
        if case.normalise or case.kind == "topk_softmax":
            values = [x / sum(values) for x in values]
        weights.append(values)
        ids.append(chosen)
    return np.array(weights).reshape(-1, case.k), ids


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_routes_equal_float64(case: Case, implementation: str, generator: Generator) -> None:
    logits = make_logits(case, generator)
    want, ids = exact(logits, case)
    weights, got = route(logits, case.k, kind=case.kind, normalise=case.normalise, implementation=implementation)
    assert weights.dtype == torch.float32
    assert got.dtype == torch.int32
    assert got.tolist() == ids
    np.testing.assert_allclose(weights.double().numpy(), want, rtol=TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["softmax", "topk_softmax"])
def test_of_equal_logits_the_lower_id_comes_first(kind: RouteKind, implementation: str) -> None:
    logits = torch.tensor([[0.0, -0.0, 1.0, 0.0, 1.0, -1.0], [50.0, 60.0, 70.0, 40.0, 70.0, 30.0]])
    ids = route(logits, 4, kind=kind, implementation=implementation)[1]
    assert ids.tolist() == [[2, 4, 0, 1], [2, 4, 1, 0]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["softmax", "topk_softmax"])
def test_ids_are_experts_whatever_the_logits(kind: RouteKind, implementation: str) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[nan] * 5, [-inf, 3.0, -inf, -inf, -inf], [1.0, nan, 2.0, 0.0, nan], [1.0, 2.0, 3.0, 4.0, 5.0]]
    )
    weights, ids = route(logits, 3, kind=kind, implementation=implementation)
    assert ids.tolist() == [[0, 1, 2], [1, 0, 2], [2, 0, 3], [4, 3, 2]]
    assert weights[0].isnan().all()
    assert weights[2].isnan().tolist() == [kind == "softmax"] * 3  # one NaN makes the whole softmax NaN
    assert not weights[[1, 3]].isnan().any()


def test_a_token_is_routed_the_same_among_any_others(generator: Generator) -> None:
    logits = torch.randn((6, 128), generator=generator)
    together = route(logits, 8, kind="softmax", normalise=True, implementation="triton")
    for i in range(6):
        alone = route(logits[i : i + 1], 8, kind="softmax", normalise=True, implementation="triton")
        assert torch.equal(alone[0][0], together[0][i])
        assert torch.equal(alone[1][0], together[1][i])
