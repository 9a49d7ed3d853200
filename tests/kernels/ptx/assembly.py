"""Inline assembly on numpy arrays: tests run it without a kernel around it.

Knows nothing of the code that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.instructions import OF_REGISTERS
from tests.kernels.ptx.parse import parse
from tests.kernels.ptx.registers import Registers

Words = NDArray[np.uint32]


def run(text: str, inputs: Sequence[Words], num_outputs: int) -> list[NDArray[np.uint16]]:
    """Run assembly on words and return its 16-bit outputs $0, $1, ...; the inputs are the operands after them."""
    names = [f"${num_outputs + at}" for at in range(len(inputs))]
    body = f".reg .b16 $<{num_outputs}>; .reg .b32 {', '.join(names)}; {text}"
    program = parse(f".visible .entry assembly() {{ {body} ret; }}")
    registers = Registers(program, len(inputs[0]), {})
    for name, words in zip(names, inputs, strict=True):
        registers.array(name)[:] = words
    for instruction in program.instructions[:-1]:
        OF_REGISTERS[instruction.parts[0]](instruction, registers)(None)
    return [registers.array(f"${at}") for at in range(num_outputs)]
