"""Which function builds which instruction, and the program bound to a group of warps.

Owns the table. An instruction that is not in it, or has a part that its function does not know, raises EmulatorError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from tests.kernels.ptx import accesses, arithmetic, conversions, fragments, moves, warps, wgmma
from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.fences import Fences
from tests.kernels.ptx.group import Group
from tests.kernels.ptx.parse import Instruction, Program
from tests.kernels.ptx.registers import Registers
from tests.kernels.ptx.values import Array, Mask, Step


class Control(Enum):
    BRANCH = auto()
    EXIT = auto()
    BARRIER = auto()


BRANCH, EXIT, BARRIER = Control.BRANCH, Control.EXIT, Control.BARRIER

OF_REGISTERS: dict[str, Callable[[Instruction, Registers], Step]] = {
    **dict.fromkeys(arithmetic.ARITHMETIC, arithmetic.build_arithmetic),
    **dict.fromkeys(arithmetic.BITWISE, arithmetic.build_bitwise),
    **dict.fromkeys(arithmetic.OF_BITS, arithmetic.build_of_bits),
    "mad": arithmetic.build_arithmetic, "shl": arithmetic.build_shift, "shr": arithmetic.build_shift,
    "shf": arithmetic.build_funnel_shift, "bfe": arithmetic.build_field, "bfi": arithmetic.build_field_insert,
    "lop3": arithmetic.build_lop3, "prmt": arithmetic.build_permute, "cvt": conversions.build_cvt,
    "setp": moves.build_setp, "selp": moves.build_select, "mov": moves.build_move, "cvta": moves.build_move,
    "shfl": warps.build_shuffle, "redux": warps.build_reduction, "vote": warps.build_vote, "elect": warps.build_elect,
    "activemask": warps.build_activemask,
}  # fmt: skip
OF_GROUPS: dict[str, Callable[[Instruction, Group], Step]] = {
    "ld": accesses.build_load, "st": accesses.build_store, "atom": accesses.build_atomic, "red": accesses.build_atomic,
    "cp": accesses.build_copy, "createpolicy": accesses.build_policy, "mma": fragments.build_mma,
    "ldmatrix": fragments.build_load_matrix, "stmatrix": fragments.build_store_matrix, "wgmma": wgmma.build_wgmma,
}  # fmt: skip


@dataclass(slots=True)
class Operation:
    """An instruction, bound: a step, or control. `target` is where a branch goes, or the number of a barrier."""

    instruction: Instruction
    guard: Array | None = None
    negated: bool = False
    step: Step | None = None
    control: Control | None = None
    target: int = 0
    waits: bool = True
    num_threads: int = 0  # that a barrier waits for; 0: all of the CTA


def bind(program: Program, group: Group) -> list[Operation]:
    """Bind all instructions to a group's registers and memory."""
    if group.races is not None:
        group.fences = Fences.of(program, len(group.ctas))
    return [_bound(instruction, program, group) for instruction in program.instructions]


def _bound(instruction: Instruction, program: Program, group: Group) -> Operation:
    operation = Operation(instruction)
    if instruction.guard:
        operation.guard = group.registers.guard(instruction.guard)
        operation.negated = instruction.negated
    name, *parts = instruction.parts
    if name == "bra":
        operation.control, operation.target = BRANCH, program.labels[instruction.operands[0]]
    elif name in ("ret", "exit"):
        operation.control = EXIT
    elif name in ("bar", "barrier") and "warp" not in parts:
        _bind_barrier(operation, parts, group)
    else:
        step = _step(instruction, group)
        operation.step = step if group.fences is None else group.fences.watched(instruction, step)
    return operation


def _bind_barrier(operation: Operation, parts: list[str], group: Group) -> None:
    numbers = [group.registers.known(operand) for operand in operation.instruction.operands]
    if not numbers or None in numbers or set(parts) - {"aligned", "cta"} not in ({"sync"}, {"arrive"}):
        raise EmulatorError(f"unknown {operation.instruction}")
    operation.control = BARRIER
    operation.waits = "sync" in parts
    operation.target, operation.num_threads = [*(number or 0 for number in numbers), 0][:2]
    if not operation.waits and not operation.num_threads:
        raise EmulatorError(f"unknown {operation.instruction}")


def _step(instruction: Instruction, group: Group) -> Step:
    name = instruction.parts[0]
    if name in OF_REGISTERS:
        return OF_REGISTERS[name](instruction, group.registers)
    if name in OF_GROUPS:
        return OF_GROUPS[name](instruction, group)
    if instruction.opcode == "bar.warp.sync":
        return lambda mask: warps.require_whole_warps(mask, instruction)
    if name in ("fence", "membar"):
        return _fence(instruction, group)
    if name == "griddepcontrol":
        return _dependence(instruction, group)
    raise EmulatorError(f"unknown {instruction}")


def _dependence(instruction: Instruction, group: Group) -> Step:
    """Bind griddepcontrol: launches run one after another here, so only the check of what is done before has a wait."""
    if instruction.opcode not in ("griddepcontrol.wait", "griddepcontrol.launch_dependents"):
        raise EmulatorError(f"unknown {instruction}")
    if instruction.opcode == "griddepcontrol.wait" and group.dependence is not None:
        return group.dependence.wait
    return lambda mask: None


def _fence(instruction: Instruction, group: Group) -> Step:
    """Bind a fence; between warps of a CTA only one for the async proxy has an effect that a barrier has not."""
    if instruction.opcode != "fence.proxy.async.shared::cta" and instruction.opcode != "fence.proxy.async":
        raise EmulatorError(f"unknown {instruction}")
    races = group.races

    def step(mask: Mask) -> None:
        if races is not None:
            chosen = np.ones(len(group.ctas) // 32, bool) if mask is None else mask.reshape(-1, 32).any(1)
            races.proxy_fence(group.ctas[::32][chosen], group.threads[::32][chosen] // 32)

    return step
