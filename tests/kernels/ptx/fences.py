"""Registers that wgmma uses: whether wgmma.fence stands between an instruction that writes one and the product.

Owns which registers have been written since the last fence. Products in a row need no fence for their sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.kernels.ptx.errors import RaceError
from tests.kernels.ptx.parse import Instruction, Program
from tests.kernels.ptx.values import Mask, Step

NO_TARGET = {"st", "red", "bra", "ret", "exit", "bar", "barrier", "fence", "stmatrix", "cp", "wgmma"}


def names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").replace("|", ",").split(",")]


class Fences:
    """By register, the lanes that have written it since their last wgmma.fence; at first all need one."""

    def __init__(self, used: Sequence[str], num_lanes: int) -> None:
        self.number = {name: number for number, name in enumerate(dict.fromkeys(used))}
        self.written = np.ones((len(self.number), num_lanes), bool)

    @classmethod
    def of(cls, program: Program, num_lanes: int) -> Fences | None:
        """Return a watch over the registers of the program's products; None where it has none."""
        products = [instruction for instruction in program.instructions if instruction.opcode.startswith("wgmma.mma")]
        used = [name for instruction in products for operand in instruction.operands[:2] if operand[0] == "{" for name in names(operand)]
        return cls(used, num_lanes) if used else None

    def reset(self) -> None:
        self.written.fill(True)

    def fence(self, mask: Mask) -> None:
        """Order what was written before."""
        self.written[:, slice(None) if mask is None else mask] = False

    def watched(self, instruction: Instruction, step: Step) -> Step:
        """Return a step that notes the registers it writes, or requires the fence."""
        if instruction.opcode.startswith("wgmma.mma"):
            return self._requiring(instruction, step)
        if instruction.parts[0] in NO_TARGET or not instruction.operands:
            return step
        numbers = [self.number[name] for name in names(instruction.operands[0]) if name in self.number]
        if not numbers:
            return step

        def noting(mask: Mask) -> None:
            step(mask)
            for number in numbers:
                self.written[number, slice(None) if mask is None else mask] = True

        return noting

    def _requiring(self, instruction: Instruction, step: Step) -> Step:
        used = [name for operand in instruction.operands[:2] if operand[0] == "{" for name in names(operand)]
        numbers = [self.number[name] for name in used]

        def requiring(mask: Mask) -> None:
            lanes = self.written[numbers] if mask is None else self.written[numbers] & mask
            if lanes.any():
                register = used[int(lanes.any(1).argmax())]
                thread = int(lanes.any(0).argmax())
                raise RaceError(f"no wgmma.fence between a write of {register} (thread {thread}) and {instruction}")
            step(mask)

        return requiring
