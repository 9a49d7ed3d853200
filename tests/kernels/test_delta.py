"""The gated delta net and the gate of heads: plain torch and kernels agree, and going back costs no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from edgelm.kernels.choice import NoKernelError
from edgelm.kernels.delta import RING, gated_delta
from edgelm.kernels.delta_sizes import DeltaSizes
from edgelm.kernels.head_gate import gate_heads
from tests.kernels.cases.delta import CASES, SMALL, Case, Inputs, Run, inputs

IMPLEMENTATIONS = "reference", "triton"
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def copied(given: Inputs) -> Inputs:
    cache = given.cache
    planes = {name: plane.clone() for name, plane in cache.planes.items()}
    return given._replace(cache=type(cache)(cache.sizes, planes["states"], planes["inputs"]))


def run(given: Inputs, implementation: str) -> Tensor:
    lengths = given.query_start_loc.diff()
    out = gated_delta(*given, max_query_len=int(lengths.max()), implementation=implementation)
    return out[: int(given.query_start_loc[-1])]


def part(given: Inputs, begin: int, rows: int, state: int, goal: int) -> Inputs:
    """Return some rows of the only sequence of a case that begins at position 0."""
    return given._replace(
        qkv=given.qkv[begin : begin + rows],
        beta=given.beta[begin : begin + rows],
        alpha=given.alpha[begin : begin + rows],
        spans=torch.tensor([[0, state, goal]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, rows], dtype=torch.int32),
        seq_lens=torch.tensor([begin + rows], dtype=torch.int32),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_equal_the_reference(case: Case, generator: Generator) -> None:
    given = inputs(case, generator)
    other = copied(given)
    want, got = run(given, "reference"), run(other, "triton")
    assert float((got - want).abs().max()) < 2e-6 * float(want.abs().max() + 1)
    assert torch.equal(given.cache.inputs, other.cache.inputs)
    assert float((given.cache.states - other.cache.states).abs().max()) < 5e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rejected_drafts_leave_no_bit(implementation: str, generator: Generator) -> None:
    """Steps that verify drafts, some of them wrong, end with the states of steps of one token each.

    PyTorch computes what does not fill a vector of the processor by other code: on some the reference is off by a bit.
    """
    tolerance = {"reference": 1e-6, "triton": 0.0}[implementation]
    tokens = 15
    case = Case("", SMALL, (Run(0, 0, tokens, 0, tokens),), torch.bfloat16)
    plain = inputs(case, generator)
    drafted = copied(plain)
    want = torch.cat([run(part(plain, at, 1, at, at + 1), implementation) for at in range(tokens)])
    rows = []
    at = state = 0
    for accepted, rejected in ((2, 3), (0, 2), (4, 0), (1, 1), (2, 0), (0, 0)):  # drafts behind the certain token
        given = part(drafted, at, 1 + accepted + rejected, state, at + 1)
        for name in ("qkv", "beta", "alpha"):
            tensor: Any = getattr(given, name)
            wrong = torch.cat([tensor[: 1 + accepted], torch.full_like(tensor[: len(tensor) - 1 - accepted], 7.0)])
            given = given._replace(**{name: wrong})
        given = given._replace(
            query_start_loc=torch.tensor([0, len(given.qkv)], dtype=torch.int32),
            seq_lens=torch.tensor([at + len(given.qkv)], dtype=torch.int32),
        )
        rows.append(run(given, implementation)[: 1 + accepted])
        state, at = at + 1, at + 1 + accepted
    assert at == tokens
    torch.testing.assert_close(torch.cat(rows), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(drafted.cache.states[0], plain.cache.states[0], rtol=tolerance, atol=tolerance)


def test_a_prompt_in_parts(generator: Generator) -> None:
    case = Case("", SMALL, (Run(0, 0, 40, 0, 40),))
    whole = inputs(case, generator)
    parts = copied(whole)
    want = run(whole, "reference")
    got = torch.cat(
        [run(part(parts, at, rows, at, at + rows), "reference") for at, rows in ((0, 19), (19, 1), (20, 20))]
    )
    assert float((got - want).abs().max()) < 1e-6 * float(want.abs().max() + 1)
    assert float((whole.cache.states - parts.cache.states).abs().max()) < 1e-6


def test_what_no_kernel_takes_is_told(generator: Generator) -> None:
    case = Case("", DeltaSizes(1, 1, 24, 24, 4, alternating=False), (Run(0, 0, 1, 0, 1),))
    with pytest.raises(NoKernelError, match="heads of 24 and 24"):
        run(inputs(case, generator), "triton")
    assert RING % 16 == 0


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gates_of_heads(norm: bool, implementation: str, generator: Generator) -> None:
    x = torch.randn(3, 4, 80, generator=generator)
    gate = 3 * torch.randn(3, 6, 160, generator=generator)[:, 1:5, 80:]
    weight = torch.randn(80, generator=generator) if norm else None
    got = gate_heads(x, gate, weight, 1e-6, out_dtype=torch.float32, implementation=implementation)
    exact_x, exact_gate = x.double(), gate.double()
    want = exact_x * torch.sigmoid(exact_gate)
    if weight is not None:
        want = want * exact_gate * weight / (exact_x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert float((got - want).abs().max()) < 3e-6 * float(want.abs().max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_gate_of_a_row(implementation: str, generator: Generator) -> None:
    """The gate of an expert that all tokens use: the row's width is no power of two."""
    x = torch.randn(5, 3, 32, generator=generator)
    gate = 3 * torch.randn(5, 2, generator=generator)[:, 1:, None]
    got = gate_heads(x, gate, out_dtype=torch.float32, implementation=implementation)
    want = x.double() * torch.sigmoid(gate.double())
    assert float((got - want).abs().max()) < 3e-6 * float(want.abs().max())
