"""The choice of an op's implementation: the first one that does not decline.

Owns that rule and its error. Knows nothing of what an op computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


# Ops that are computed by their plain torch version in this process, since their kernel is wrong on this GPU; with PDL
# among them, no kernel begins before the end of the one before it.
PLAIN_OPS: set[str] = set()
PDL = "programmatic dependent launch"


class NoKernelError(Exception):
    """No implementation of an op takes these arguments; the message lists why each one declined."""


class Implementation(NamedTuple):
    """One way to compute an op. Both functions take the op's own arguments."""

    name: str
    declines: Callable[..., str | None]  # the reason why it cannot compute these arguments
    run: Callable[..., object]


Observer = Callable[[str, Implementation, Implementation, tuple[object, ...]], Implementation]
_observers: list[Observer] = []  # at most one


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Let `observer` replace the kernel of each op in the block.

    It gets the op's name, the kernel, the reference, and the arguments that they were chosen by.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def preferred(op: str, name: str | None) -> str | None:
    """Return the name of the implementation to choose, where `name` was asked for."""
    return "reference" if op in PLAIN_OPS else name


def choose(op: str, implementations: Sequence[Implementation], name: str | None, /, *args: object) -> Implementation:
    """Return the first implementation that takes `args`; with a `name`, only the one of that name is tried.

    Raises NoKernelError where all decline: an op never falls back silently.
    """
    reasons = []
    for candidate in implementations:
        if name not in (None, candidate.name):
            continue
        reason = candidate.declines(*args)
        if reason is None:
            if _observers and candidate.name == "triton":
                return _observers[-1](op, candidate, implementations[-1], args)
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    raise NoKernelError(f"no implementation of {op} takes this: {'; '.join(reasons) or f'none is named {name}'}")


def dispatch(
    op: str,
    package: str,
    reference: Callable[..., T],
    name: str | None,
    x: Tensor,
    *args: object,
    declined: str | None = None,
) -> T:
    """Run an op: the function `op` of `package`.kernel, or the reference; both take x and `args`.

    `declined` is the op's own reason why its kernel cannot take these arguments; None: it takes them. The kernel's
    module is imported here, on first use, since Triton is not installed everywhere.
    """
    name = preferred(op, name)

    def run_triton() -> T:
        return cast(T, getattr(import_module(f"{package}.kernel"), op)(x, *args))

    implementations = (
        Implementation("triton", lambda *_: declines_triton(x) or declined, run_triton),
        Implementation("reference", lambda *_: declines_reference(x, name), lambda: reference(x, *args)),
    )
    return cast(T, choose(op, implementations, name, x, *args).run())


@cache
def interpreting() -> bool:
    """Return whether Triton runs its kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").casefold() in ("1", "true", "yes", "on")


@cache
def has_triton() -> bool:
    """Return whether Triton can be imported."""
    return find_spec("triton") is not None


def declines_triton(tensor: Tensor) -> str | None:
    """Return why no Triton kernel can run on this tensor; every kernel checks this first."""
    if not has_triton():
        return "triton is not installed"
    if tensor.is_cuda:
        if interpreting():
            return "TRITON_INTERPRET is set, and the tensors are on a GPU"
        if torch.cuda.get_device_capability(tensor.device) < (8, 0):
            return "the GPU is older than sm_80"
        return None
    return None if interpreting() else f"the tensors are on {tensor.device.type}"


def declines_reference(tensor: Tensor, name: str | None) -> str | None:
    """Return why the plain torch version should not run: it is many times slower on a GPU, so it must be requested."""
    if tensor.is_cuda and name != "reference":
        return "the tensors are on a GPU, where it runs only when it is named"
    return None
