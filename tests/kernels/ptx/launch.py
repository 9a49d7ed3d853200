"""Launches of the project's kernels, emulated on CPU tensors.

    with Emulated(90) as gpu: ...  # project code on CPU tensors

Owns the seam: inside of the context each launch goes through Triton's own binder and compiler for that capability, and
the PTX runs on the memory of the CPU tensors. ptxas does not run, which took a seventh of the compiler's time. Triton
must not interpret in this process. Knows nothing of instructions.
"""

from __future__ import annotations

import gc
import hashlib
import math
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import edgelm.kernels
from edgelm.kernels import choice, gpu_target
from edgelm.kernels.tuning import TABLE
from tests.kernels.ptx.dependents import READ_EARLY, Weights
from tests.kernels.ptx.errors import BoundsError, DeadlockError, EmulatorError, RaceError
from tests.kernels.ptx.machine import LANES_TOGETHER, Machine, Order
from tests.kernels.ptx.parse import parse
from tests.kernels.ptx.replay import Launches, digest_of
from tests.kernels.ptx.values import UNSIGNED

__all__ = ["BoundsError", "DeadlockError", "Emulated", "EmulatorError", "Launch", "RaceError"]
WATCHED_TOGETHER = 1 << 21
FLOATS: dict[str, type[np.floating[Any]]] = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch that was emulated. `instructions` counts instructions run, once for all threads that run together."""

    kernel: str
    grid: tuple[int, ...]
    instructions: int
    warps: int
    signature: tuple[tuple[str, str], ...]  # the parameters' names and types
    ptx_hash: str
    replayed: bool  # nothing ran: an equal launch did before
    dependent: bool  # with programmatic dependent launch


@dataclass(frozen=True, slots=True)
class _Driver:
    """Stands in for CUDA's driver. The capability is the device's number, so each has its own compiled kernels."""

    capability: int

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def set_current_device(self, device: int) -> None: ...


class Emulated:
    """Emulate the launches of Triton's kernels on a GPU of a compute capability (90: sm_90).

    `order` is the order of warps: the one with the least program counter first, at random, or one far ahead. `races`
    checks that accesses of the same bytes are ordered. `change` may alter the PTX (name, text) before it runs. `known`
    has the results of earlier launches: one that is equal to one of them does not run again. With `weights`, dependent
    launches may read only these before they wait, and write none of them.
    """

    def __init__(
        self,
        capability: int,
        *,
        order: Order = "least",
        seed: int = 0,
        races: bool = False,
        num_sms: int = 2,
        change: Callable[[str, str], str] | None = None,
        known: Launches | None = None,
        assembles: bool = False,
        weights: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.assembles = assembles  # whether ptxas runs, for those who need its code
        self.capability = capability
        self.order = order
        self.seed = seed
        self.races = races
        self.num_sms = num_sms
        self.change = change
        self.known = known
        self.weights = None if weights is None else frozenset(map(_address, weights))
        self.launches: list[Launch] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        assert not choice.interpreting(), "Triton interprets in this process: unset TRITON_INTERPRET"
        before = driver._active
        driver.set_active(_Driver(self.capability))
        self._stack.callback(lambda: setattr(driver, "_active", before))
        run = JITFunction.run

        def emulate(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            compiled = run(kernel, *args, grid=grid, warmup=True, **options)
            if not warmup:
                self._launch(kernel, compiled, args, options, grid)
            return compiled

        self._stack.enter_context(patch.object(JITFunction, "run", emulate))
        if not self.assembles:
            self._compile_without_ptxas()
        for module in pkgutil.walk_packages(edgelm.kernels.__path__, "edgelm.kernels."):
            import_module(module.name)  # a module that was first imported below would keep what is patched
        self._stack.enter_context(patch.object(choice, "interpreting", lambda: True))  # CPU tensors may pass
        # A configuration is chosen once in a process, and depends on the GPU.
        self._stack.enter_context(patch.object(TABLE, "_chosen", {}))
        self._replace("num_sms", gpu_target.num_sms, lambda _: self.num_sms)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _compile_without_ptxas(self) -> None:
        """Leave out the compiler's last stage, and change the key that its results are kept under on disk."""
        key = CUDABackend.hash
        self._stack.enter_context(patch.object(CUDABackend, "make_cubin", lambda *args: b""))
        self._stack.enter_context(patch.object(CUDABackend, "hash", lambda backend: f"{key(backend)}-without-ptxas"))

    def _replace(self, name: str, original: object, stand_in: object) -> None:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                self._stack.enter_context(patch.object(module, name, stand_in))

    def _launch(self, kernel: Any, compiled: Any, args: tuple[Any, ...], options: Mapping[str, Any], grid: Any) -> None:
        bound = bound_arguments(kernel, args, options)
        signature = {name: str(kind) for name, kind in compiled.src.signature.items() if kind != "constexpr"}
        ptx = compiled.asm["ptx"]
        if self.change is not None:
            ptx = self.change(kernel.__name__, ptx)
        shape = tuple(int(size) for size in (grid(bound) if callable(grid) else grid))
        metadata = compiled.metadata
        num_ctas = num_together(metadata.num_warps, metadata.shared if self.races else 0, math.prod(shape))
        values = [bound[name] for name in signature]
        bits = [bits_of(value, kind) for value, kind in zip(values, signature.values(), strict=True)]
        tensors = [value for value in values if torch.is_tensor(value)]
        weights = self._weights_of(kernel.__name__, dict(zip(signature, values, strict=True)))

        def run() -> int:
            size = metadata.num_warps, num_ctas, metadata.shared
            machine = machine_of(ptx, *size, self.order, self.races, metadata.launch_pdl)
            if not 0 <= len(machine.parameters) - len(bits) <= 2:  # Triton adds two pointers to memory of its own
                raise EmulatorError(f"{kernel.__name__} has {len(machine.parameters)} parameters, not {len(bits)}")
            return machine.run(tensors, bits, shape, self.seed, weights=weights)

        replayed = False
        if self.known is None:
            count = run()
        else:
            scalars = [None if torch.is_tensor(value) else bit for value, bit in zip(values, bits, strict=True)]
            marks = [[_address(tensor) in part for part in weights] for tensor in tensors]
            how = (metadata.num_warps, metadata.shared, self.order, self.seed, self.races, metadata.launch_pdl, marks)
            count, replayed = self.known.run(digest_of(ptx, (shape, scalars, how), tensors), tensors, run)
        digest = hashlib.sha256(ptx.encode()).hexdigest()[:16]
        types = tuple(signature.items())
        warps, dependent = metadata.num_warps, metadata.launch_pdl
        self.launches.append(Launch(kernel.__name__, shape, count, warps, types, digest, replayed, dependent))

    def _weights_of(self, kernel: str, values: Mapping[str, object]) -> Weights:
        """Return the storages among a launch's arguments that it may read early, and those that it must not write."""
        given = READ_EARLY.get(kernel, frozenset())
        early = frozenset(_address(value) for name, value in values.items() if name in given and torch.is_tensor(value))
        return Weights(early, early) if self.weights is None else Weights(early & self.weights, self.weights)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def bound_arguments(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a launch by name, with the kernel's defaults."""
    names = kernel.arg_names
    bound = dict(zip(names, args, strict=False)) | {name: options[name] for name in options if name in names}
    defaults = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default}
    return defaults | bound


def num_together(num_warps: int, watched_bytes: int, num_ctas: int) -> int:
    """Return how many CTAs run side by side; races need arrays as large as their shared memory times their warps."""
    room = WATCHED_TOGETHER // max(1, watched_bytes * num_warps)
    return max(1, min(LANES_TOGETHER // (32 * num_warps), room, num_ctas))


@lru_cache(maxsize=64)
def machine_of(
    ptx: str, num_warps: int, num_ctas: int, shared_bytes: int, order: Order, races: bool, dependent: bool
) -> Machine:
    """Return a machine for a kernel; the next launch of the same kernel takes the same one."""
    return Machine(parse(ptx), num_warps, num_ctas, shared_bytes, order, races, dependent)


def forget() -> None:
    """Give back the memory of all machines: they are cycles."""
    machine_of.cache_clear()
    gc.collect()


def bits_of(value: object, kind: str) -> int:
    """Return an argument as a parameter's bits."""
    if torch.is_tensor(value):
        return value.data_ptr()
    if kind in FLOATS:
        return int(np.array([value], FLOATS[kind]).view(UNSIGNED[np.dtype(FLOATS[kind]).itemsize])[0])
    assert isinstance(value, int), (value, kind)
    return value
