"""What is measured: one `BenchCase` for each op, shape, number of rows and format.

Owns the description and the list of all ops' cases. Knows nothing of clocks (timing.py) or results (bench.py).

An op's cases come from `bench_cases(tiny) -> list[BenchCase]` of its cases.py, and of the modules beside this one.
`tiny`: shapes that the interpreter gets through in seconds, of every kind of case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.compile_case import op_names

ENTRIES = ("of_cache", "of_rows", "of_weights")


class Work(NamedTuple):
    """Something to be timed. `make` runs with its generator's device as torch's default device."""

    make: Callable[[Generator], Any]  # inputs: tensors, or tuples and dataclasses with tensors in them
    run: Callable[[Any, str], Any]  # (inputs, implementation) -> result


def all_of_it(_inputs: Any, result: Any) -> Any:
    """Compare what an op returns, and nothing else."""
    return result


class BenchCase(NamedTuple):
    """An op on one shape in one format, what it must agree with and what it is compared with."""

    op: str  # its folder
    shape: str  # "14336x4096"
    rows: int
    format: str  # "q4_k", or a dtype
    work: Work
    moved_bytes: Callable[[Any], int]  # of the inputs: what a call must read and write at the least
    tolerance: float = 0.0  # largest difference from the reference, in units of its largest value; of integers 0
    compared: Callable[[Any, Any], Any] = all_of_it  # (inputs, result) -> tensors: what the reference must give too
    rival: Work | None = None  # torch's bfloat16 matmul of the same shape; its implementation is not read

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape} {self.format} rows={self.rows}"


def bench_cases(ops: list[str] | None, tiny: bool) -> list[BenchCase]:
    """Return the cases of some ops, or of all, an op after the other."""
    modules = [f"edgelm.kernels.{op}.cases" for op in op_names()]
    modules += [f"edgelm.kernels.benchmark.{name}" for name in ENTRIES]
    lists = [getattr(import_module(module), "bench_cases", None) for module in modules]
    cases = [case for listed in lists if listed is not None for case in listed(tiny)]
    return sorted((case for case in cases if ops is None or case.op in ops), key=lambda case: case.op)


def made(work: Work, device: torch.device, seed: int) -> Any:
    """Return new inputs on a device."""
    with torch.device(device):
        return work.make(Generator(device).manual_seed(seed))


def tensors_of(inputs: Any) -> list[Tensor]:
    """Return all tensors in some inputs."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if is_dataclass(inputs):
        inputs = tuple(getattr(inputs, field.name) for field in fields(inputs))
    return [tensor for part in inputs for tensor in tensors_of(part)] if isinstance(inputs, (tuple, list)) else []


def cloned(inputs: Any) -> Any:
    """Return inputs with tensors of their own, with the same strides; what is no tensor is shared."""
    if isinstance(inputs, Tensor):
        return torch.empty_strided(inputs.shape, inputs.stride(), dtype=inputs.dtype, device=inputs.device).copy_(
            inputs
        )
    if is_dataclass(inputs) and not isinstance(inputs, type):
        made = [field.name for field in fields(inputs) if field.init]
        return replace(inputs, **{name: cloned(getattr(inputs, name)) for name in made})
    if isinstance(inputs, tuple):
        parts = [cloned(part) for part in inputs]
        return type(inputs)(*parts) if hasattr(inputs, "_fields") else tuple(parts)
    return [cloned(part) for part in inputs] if isinstance(inputs, list) else inputs


def nbytes_of(inputs: Any) -> int:
    """Return the bytes of all tensors in some inputs."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(inputs))
