"""The shapes and kinds that the router is tested and compiled with, and their tolerance."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.route import RouteKind
from edgelm.kernels.route.reference import TINY
from tests.kernels.compile_case import CompileCase


class Case(NamedTuple):
    """A call of `route`."""

    tokens: int
    experts: int
    k: int
    kind: RouteKind
    normalise: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return f"{self.kind} {self.tokens}x{self.experts}x{self.k}{' normalise' if self.normalise else ''}"


CASES = (
    Case(7, 8, 2, "softmax"),
    Case(5, 64, 8, "softmax", normalise=True),
    Case(4, 60, 4, "softmax", dtype=torch.bfloat16),
    Case(5, 32, 4, "topk_softmax"),
    Case(3, 128, 4, "topk_softmax", dtype=torch.float16),
    Case(6, 16, 1, "topk_softmax"),
    Case(3, 256, 8, "softmax", normalise=True),
    Case(4, 33, 33, "topk_softmax", normalise=True),
    Case(3, 1, 1, "softmax"),
    Case(0, 8, 2, "softmax"),
)

# A weight is an exp, a sum over the experts and two roundings: a few units in the last place.
TOLERANCE = 2e-6


def make_logits(case: Case, generator: Generator) -> Tensor:
    """Return logits, many of them equal, a slice of wider rows with NaN between them."""
    logits = torch.randint(-6, 7, (case.tokens, case.experts + 3), generator=generator).to(case.dtype) / 2
    logits[:, case.experts :] = float("nan")
    return logits[:, : case.experts]


def compile_cases() -> list[CompileCase]:
    """Return each kind with the numbers of experts of real models."""
    from edgelm.kernels.route import kernel as kernels

    cases = []
    for kind, experts, k in (("softmax", 128, 8), ("topk_softmax", 32, 4)):
        constants: dict[str, object] = {
            "KIND": kind,
            "NORMALISE": kind != "topk_softmax",
            "TINY": TINY,
            "K": k,
            "BLOCK_K": k,
            "BLOCK": experts,
        }
        kinds = {"logits_ptr": "*bf16", "weights_ptr": "*fp32", "ids_ptr": "*i32"}
        signature = {
            name: "constexpr" if name in constants else kinds.get(name, "i32")
            for name in kernels.route_kernel.arg_names
        }
        divisible = tuple(name for name in signature if name.endswith(("_ptr", "_stride")))
        name = f"route {kind} {experts}"
        cases.append(CompileCase(name, kernels.route_kernel, signature, constants, divisible, num_warps=1))
    return cases
