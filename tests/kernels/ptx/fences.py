"""Registers that wgmma uses: it reads and writes them while the warp goes on.

Owns two rules of the PTX manual. wgmma.fence stands between an instruction that writes such a register and the product;
products in a row need none for their sums. Until a product is waited for, no instruction reads its sums or writes any
of its registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.kernels.ptx.errors import RaceError
from tests.kernels.ptx.parse import Instruction, Program
from tests.kernels.ptx.values import Mask, Step

NO_TARGET = {"st", "red", "bra", "ret", "exit", "bar", "barrier", "fence", "stmatrix", "cp", "wgmma"}


def names(operand: str) -> list[str]:
    """Return the registers of an operand: `{%r1, %r2}`, `%p1|%p2`, `[%rd1+16]`, or one."""
    return [name.strip().partition("+")[0] for name in operand.strip("{}[] ").replace("|", ",").split(",")]


class Fences:
    """By register and lane: written since the last wgmma.fence (at first all are), and products that still use it."""

    def __init__(self, used: Sequence[str], num_lanes: int) -> None:
        self.number = {name: number for number, name in enumerate(dict.fromkeys(used))}
        shape = (len(self.number), num_lanes)
        self.written = np.ones(shape, bool)
        self.summing = np.zeros(shape, np.int32)
        self.reading = np.zeros(shape, np.int32)

    @classmethod
    def of(cls, program: Program, num_lanes: int) -> Fences | None:
        """Return a watch over the registers of the program's products; None where it has none."""
        products = [instruction for instruction in program.instructions if instruction.opcode.startswith("wgmma.mma")]
        used = [name for instruction in products for part in _used(instruction) for name in part]
        return cls(used, num_lanes) if used else None

    def reset(self) -> None:
        """Begin with other CTAs."""
        self.written.fill(True)
        self.summing.fill(0)
        self.reading.fill(0)

    def fence(self, mask: Mask) -> None:
        """Order what was written before."""
        self.written[:, _lanes(mask)] = False

    def hold(self, instruction: Instruction, mask: Mask, change: int) -> None:
        """Note that a product begins (1) or ends (-1)."""
        for table, part in zip((self.summing, self.reading), _used(instruction), strict=True):
            for name in part:
                table[self.number[name], _lanes(mask)] += change

    def watched(self, instruction: Instruction, step: Step) -> Step:
        """Return a step that notes the registers it writes, and requires what the rules require."""
        if instruction.opcode.startswith("wgmma.mma"):
            return self._requiring_fence(instruction, step)
        if not instruction.operands or instruction.parts[0] == "wgmma":
            return step
        has_target = instruction.parts[0] not in NO_TARGET
        of_operands = [
            [self.number[name] for name in names(text) if name in self.number] for text in instruction.operands
        ]
        targets = of_operands[0] if has_target else []
        touched = [number for numbers in of_operands for number in numbers]
        if not touched:
            return step

        def watching(mask: Mask) -> None:
            lanes = _lanes(mask)
            if self.summing[touched][:, lanes].any() or (targets and self.reading[targets][:, lanes].any()):
                raise RaceError(f"wgmma still uses a register, and is not waited for: {instruction}")
            step(mask)
            for number in targets:
                self.written[number, lanes] = True

        return watching

    def _requiring_fence(self, instruction: Instruction, step: Step) -> Step:
        used = [name for part in _used(instruction) for name in part]
        numbers = [self.number[name] for name in used]

        def requiring(mask: Mask) -> None:
            lanes = self.written[numbers] if mask is None else self.written[numbers] & mask
            if lanes.any():
                register = used[int(lanes.any(1).argmax())]
                thread = int(lanes.any(0).argmax())
                raise RaceError(f"no wgmma.fence between a write of {register} (thread {thread}) and {instruction}")
            step(mask)

        return requiring


def _used(product: Instruction) -> tuple[list[str], list[str]]:
    """Return the registers of a product's sums and of its left operand, if that is in registers."""
    sums, left = product.operands[:2]
    return names(sums), names(left) if left.startswith("{") else []


def _lanes(mask: Mask) -> slice | np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return slice(None) if mask is None else mask
