"""Which implementation of an op runs: the first that does not decline.

Owns the rule and its error. Knows nothing of what any op computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch


class NoKernelError(Exception):
    """No implementation of an op takes these arguments; the message lists why each declined."""


class Implementation(NamedTuple):
    """One way to compute an op. Both functions take the op's own arguments."""

    name: str
    declines: Callable[..., str | None]  # the reason why it cannot compute these arguments
    run: Callable[..., object]


def choose(op: str, implementations: Sequence[Implementation], wanted: str | None, /, *args: object) -> Implementation:
    """Return the first implementation that takes `args`, or the one that is `wanted`.

    Raises NoKernelError where none does: an op never falls back in silence.
    """
    reasons = []
    for each in implementations:
        if wanted not in (None, each.name):
            continue
        reason = each.declines(*args)
        if reason is None:
            return each
        reasons.append(f"{each.name}: {reason}")
    raise NoKernelError(f"no implementation of {op} takes this: {'; '.join(reasons) or f'none is named {wanted}'}")


@cache
def interpreting() -> bool:
    """Whether Triton runs its kernels in its interpreter, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").casefold() in ("1", "true", "yes", "on")


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def declines_triton(tensor: torch.Tensor) -> str | None:
    """Return why no Triton kernel can run on this tensor: what every kernel declines first."""
    if not has_triton():
        return "triton is not installed"
    if tensor.is_cuda:
        if interpreting():
            return "TRITON_INTERPRET is set, and the tensors are on a GPU"
        if torch.cuda.get_device_capability(tensor.device) < (8, 0):
            return "the GPU is older than sm_80"
        return None
    return None if interpreting() else f"the tensors are on {tensor.device.type}"


def declines_reference(tensor: torch.Tensor, wanted: str | None) -> str | None:
    """Return why the plain torch version should not run: on a GPU it must be asked for, being many times slower."""
    if tensor.is_cuda and wanted != "reference":
        return "the tensors are on a GPU, where it runs only when it is named"
    return None
