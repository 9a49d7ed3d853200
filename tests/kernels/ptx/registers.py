"""The registers of all lanes that run together, and what operands name: registers, constants, symbols, addresses.

Owns an array for each register of the program, with one element for each lane. Knows nothing of instructions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.parse import Program
from tests.kernels.ptx.values import Array, Mask, Step, Target, constant, is_number, view

RUBBISH = {"b16": 0xCDCD, "b32": 0xCDCDCDCD, "b64": 0xCDCDCDCDCDCDCDCD}
REGISTER_DTYPES = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
ADDRESS = re.compile(r"\[\s*([%$\w@]+)\s*(?:\+\s*(-?\w+))?\s*\]")
SHARED_BASE = 1024  # the first KiB of shared memory belongs to the system, as on sm_90


class Registers:
    """Registers of a number of lanes. `special` has %tid.x and its like."""

    def __init__(self, program: Program, lanes: int, special: Mapping[str, Array]) -> None:
        self.program = program
        self.lanes = lanes
        self.special = special
        self._arrays: dict[str, Array] = {}

    def fill_with_rubbish(self) -> None:
        """Forget all values."""
        for name, array in self._arrays.items():
            array.fill(RUBBISH.get(self.program.registers[name], True))

    def array(self, name: str) -> Array:
        """Return a register's array."""
        if name not in self._arrays:
            kind = self.program.registers.get(name)
            if kind is None:
                raise EmulatorError(f"unknown operand {name}")
            self._arrays[name] = np.full(self.lanes, RUBBISH.get(kind, True), REGISTER_DTYPES[kind])
        return self._arrays[name]

    def source(self, operand: str, kind: str) -> Array:
        """Return a view of what an operand names, as a type; constants are [1]."""
        if operand in self.special:
            return view(self.special[operand], kind)
        if is_number(operand):
            return constant(operand, kind)
        if operand in self.program.shared:
            return constant(str(SHARED_BASE + self.program.shared[operand]), kind)
        return view(self.array(operand), kind)

    def target(self, name: str, kind: str) -> Target:
        """Return the register that an instruction writes; `_` is none."""
        return Target(None if name == "_" else self.array(name), kind)

    def known(self, operand: str) -> int | None:
        """Return the value of a constant operand, else None."""
        return int(constant(operand, "u32")[0]) if is_number(operand) else None

    def computing(
        self, function: Callable[..., Array], target: str, kind: str, sources: Sequence[tuple[str, str]]
    ) -> Step:
        """Return a step that sets a register to a function of operands."""
        out = self.target(target, kind)
        arrays = [self.source(operand, type_) for operand, type_ in sources]
        if isinstance(function, np.ufunc) and out.view is not None:
            result = out.view

            def step_in_place(mask: Mask) -> None:
                if mask is None:
                    function(*arrays, out=result)
                else:
                    np.copyto(result, function(*arrays), where=mask)

            return step_in_place

        def step(mask: Mask) -> None:
            out.put(function(*arrays), mask)

        return step

    def address(self, operand: str) -> tuple[Array, int]:
        """Return the array and the offset of an address like `[%rd1+16]` or `[global_smem]`."""
        match = ADDRESS.fullmatch(operand)
        if match is None:
            raise EmulatorError(f"unknown address {operand}")
        name, offset = match.groups()
        wide = self.program.registers.get(name) == "b64"
        base = self.source(name, "s64" if wide else "u32")
        return base, int(offset, 0) if offset else 0

    def guard(self, name: str) -> Array:
        """Return the predicate that an instruction runs under."""
        return self.source(name, "pred")

    @staticmethod
    def names(vector: str) -> list[str]:
        """Return the names in `{%r1, %r2}`, or the one name."""
        return [name.strip() for name in vector.strip("{} ").split(",")]
