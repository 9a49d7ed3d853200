"""The control bits of a machine instruction: how ptxas told the scheduler what to wait for.

Owns the encoding of sm_70 and later, 128 bits an instruction (Jia and others, "Dissecting the NVIDIA Volta GPU
architecture via microbenchmarking", 2018, section 2). Knows nothing of what an instruction does.
"""

from __future__ import annotations

from typing import NamedTuple

NONE = 7  # of a barrier's number
NUM_BARRIERS = 6


class Control(NamedTuple):
    """When the next instruction of the warp may issue, and which scoreboard barriers are set and waited for."""

    stall: int  # cycles until the next instruction of the warp
    yields: bool  # the scheduler should take another warp
    write_barrier: int | None  # released when the result is in the register
    read_barrier: int | None  # released when the operands were read
    wait: tuple[int, ...]  # barriers that must be released before this instruction issues


def decode(high: int) -> Control:
    """Return the control bits of an instruction, from the upper 64 of its 128 bits."""
    stall, yields = high >> 41 & 0xF, not high >> 45 & 1
    write, read = high >> 46 & 7, high >> 49 & 7
    mask = high >> 52 & 0x3F
    return Control(
        stall,
        yields,
        None if write == NONE else write,
        None if read == NONE else read,
        tuple(number for number in range(NUM_BARRIERS) if mask >> number & 1),
    )
