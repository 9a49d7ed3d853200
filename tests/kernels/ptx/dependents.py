"""Programmatic dependent launch: what the threads of a launch may do before griddepcontrol.wait.

The launch before may still run until then. So a thread must wait before it writes a tensor, before it reads one that is
no constant, and before it ends: the end of a launch stands for the end of all launches before it (kernels/pdl.py).

Owns this rule, for the lanes of one group, and which constants kernels read before they wait.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.errors import DependenceError
from tests.kernels.ptx.memory import GlobalMemory
from tests.kernels.ptx.parse import Instruction
from tests.kernels.ptx.values import Array, Mask

# by kernel: the parameters whose tensors it may read before its wait, since nothing writes weights after loading
# the planes of a weight, and the weight of a norm
READ_EARLY = {"decode_kernel": frozenset({"codes", "high", "scales", "offsets", "supers", "next_weight"})}


class Weights(NamedTuple):
    """The addresses of storages that a launch may read before it waits, and of those that it must not write."""

    read_early: frozenset[int] = frozenset()
    unwritten: frozenset[int] = frozenset()


NO_WEIGHTS = Weights()


class Dependence:
    """Which lanes of a group have not waited yet, and what they may do."""

    def __init__(self, num_lanes: int) -> None:
        self.early: NDArray[np.bool_] = np.zeros(num_lanes, bool)  # lanes that have not waited
        self.weights = NO_WEIGHTS
        self._any_early = False

    def reset(self, lanes: NDArray[np.bool_]) -> None:
        """Begin with other CTAs, which are on these lanes."""
        self.early = lanes.copy()
        self._any_early = bool(lanes.any())

    def wait(self, mask: Mask) -> None:
        """Let lanes wait."""
        self.early &= False if mask is None else ~mask
        self._any_early = bool(self.early.any())

    def read(self, memory: GlobalMemory, addresses: Array, mask: Mask, instruction: Instruction) -> None:
        """Check that lanes may read addresses, one for each lane that runs."""
        if not self._any_early:
            return
        early = self.early if mask is None else self.early[mask]
        for number, part, _, _ in memory.split(addresses[early], addresses[early], 1, instruction):
            if part.start not in self.weights.read_early:
                raise DependenceError(f"tensor {number} is read before griddepcontrol.wait: {instruction}")

    def write(self, memory: GlobalMemory, addresses: Array, mask: Mask, instruction: Instruction) -> None:
        """Check that lanes may write to addresses."""
        if self._any_early and (self.early if mask is None else self.early[mask]).any():
            raise DependenceError(f"a tensor is written before griddepcontrol.wait: {instruction}")
        if self.weights.unwritten:
            for number, part, _, _ in memory.split(addresses, addresses, 1, instruction):
                if part.start in self.weights.unwritten:
                    raise DependenceError(f"tensor {number} is a weight, which is not to be written: {instruction}")

    def end(self, lanes: NDArray[np.bool_]) -> None:
        """Check that lanes may end."""
        if self._any_early and self.early[lanes].any():
            raise DependenceError("a thread ends without griddepcontrol.wait")
