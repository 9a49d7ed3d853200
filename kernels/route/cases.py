"""The shapes and kinds that the router is tested and compiled with.

Owns the cases and their tolerance. Knows nothing of how they are run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.compile_case import CompileCase
from edgelm.kernels.route import RouteKind
from edgelm.kernels.route.reference import TINY


class Case(NamedTuple):
    """Tokens that choose k of some experts."""

    tokens: int
    experts: int
    k: int
    kind: RouteKind
    bias: bool = False
    normalise: bool = False
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        options = [name for name in ("bias", "normalise") if getattr(self, name)]
        return " ".join((f"{self.kind} {self.tokens}x{self.experts}x{self.k}", *options))


CASES = (
    Case(7, 8, 2, "softmax"),
    Case(5, 64, 8, "softmax", normalise=True),
    Case(4, 60, 4, "softmax", scale=2.5, dtype=torch.bfloat16),
    Case(5, 32, 4, "topk_softmax"),
    Case(3, 128, 4, "topk_softmax", dtype=torch.float16),
    Case(6, 16, 1, "topk_softmax", bias=True),
    Case(3, 256, 8, "sigmoid", bias=True, normalise=True, scale=2.5),
    Case(4, 33, 33, "sigmoid"),
    Case(4, 10, 3, "softmax", bias=True),
    Case(3, 1, 1, "sigmoid"),
    Case(0, 8, 2, "softmax"),
)

# A weight is an exp, a sum over the experts and two roundings: a few units in the last place.
TOLERANCE = 2e-6


def make_inputs(case: Case, generator: Generator) -> tuple[Tensor, Tensor | None]:
    """Return logits, many of which are equal, and a bias that is a multiple of 1/4, so that sums stay far apart."""
    logits = torch.randint(-6, 7, (case.tokens, case.experts + 3), generator=generator).to(case.dtype) / 2
    logits[:, case.experts :] = float("nan")
    bias = torch.randint(-8, 9, (case.experts,), generator=generator).float() / 4 if case.bias else None
    return logits[:, : case.experts], bias


def compile_cases() -> list[CompileCase]:
    """List each kind with the numbers of experts of known models."""
    from edgelm.kernels.route import triton as kernels

    cases = []
    for kind, experts, k in (("softmax", 128, 8), ("topk_softmax", 32, 4), ("sigmoid", 256, 8)):
        constants: dict[str, object] = {
            "KIND": kind,
            "BIAS": kind == "sigmoid",
            "NORMALISE": kind != "topk_softmax",
            "TINY": TINY,
            "K": k,
            "BLOCK_K": k,
            "BLOCK": experts,
        }
        kinds = {"logits_ptr": "*bf16", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "ids_ptr": "*i32", "scale": "fp32"}
        signature = {
            name: "constexpr" if name in constants else kinds.get(name, "i32")
            for name in kernels.route_kernel.arg_names
        }
        divisible = tuple(name for name in signature if name.endswith(("_ptr", "_stride")))
        name = f"route {kind} {experts}"
        cases.append(CompileCase(name, kernels.route_kernel, signature, constants, divisible, num_warps=1))
    return cases
