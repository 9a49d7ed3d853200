"""The units that a machine instruction occupies, and the latency of its result where that varies.

Owns the classes of instructions and their latencies. Those of fixed latency are in the control bits: ptxas has stalled
the next instruction for them. Knows nothing of warps.

Rates are those of the CUDA C++ programming guide's table of arithmetic throughput, by way of `Gpu`. Latencies of
instructions that set a scoreboard barrier are of Jia and others (2018, table 4.1) and of Abdelkhalik and others,
"Demystifying the Nvidia Ampere architecture through microbenchmarking", arXiv 2208.11174; the sources differ by a few
cycles, and instructions that neither has are assumed to take SLOW_LATENCY.
"""

from __future__ import annotations

import re
from enum import IntEnum, auto
from typing import NamedTuple

from tests.kernels.performance.code import Instruction
from tests.kernels.performance.gpus import Gpu

SLOW_LATENCY = 24
LATENCIES = {
    "SHFL": 24, "MUFU": 22, "S2R": 26, "S2UR": 26, "LDC": 38, "ULDC": 38, "POPC": 20, "FLO": 20, "BREV": 20, "VOTE": 12,
    "I2F": 20, "F2I": 20, "F2F": 20, "I2I": 20, "FRND": 20, "REDUX": 24, "DADD": 16, "DMUL": 16, "DFMA": 16, "R2UR": 12,
    "DSETP": 16, "MATCH": 30,
}  # fmt: skip


class Unit(IntEnum):
    NONE = auto()  # only an issue slot
    ALU = auto()
    FMA = auto()
    XU = auto()  # functions, conversions
    FP64 = auto()
    TENSOR = auto()
    GLOBAL = auto()  # global memory, through the L1 cache
    SHARED = auto()  # shared memory, shuffles
    COPY = auto()  # cp.async: global to shared memory
    STORE = auto()
    BARRIER = auto()
    COPY_GROUP = auto()  # LDGDEPBAR: closes a group of copies
    WAIT_GROUP = auto()  # DEPBAR: waits for all but some groups


class Timing(NamedTuple):
    """The unit, how many cycles it is occupied, and the cycles until a result (0: in the control bits)."""

    unit: Unit
    cycles: float
    latency: float


FMA = {"FFMA", "FMUL", "FADD", "FFMA2", "FADD2", "FMUL2"}
HALF = {"HADD2", "HMUL2", "HFMA2", "HSET2", "HSETP2", "HMNMX2"}
MAD = {"IMAD", "UIMAD"}
FUNCTIONS = {"MUFU", "I2F", "F2I", "F2F", "I2I", "FRND", "POPC", "FLO", "BREV"}
DOUBLE = {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX"}
FREE = {
    "NOP", "BRA", "EXIT", "BSSY", "BSYNC", "WARPSYNC", "CALL", "RET", "BREAK", "YIELD", "ERRBAR", "MEMBAR", "FENCE",
    "CCTL", "ACQBULK", "PREEXIT", "WARPGROUP", "BRX", "JMP", "DEPBAR", "CS2R", "S2R", "S2UR", "LDC", "ULDC",
    "NANOSLEEP", "VOTEU", "ELECT", "PLOP3", "LDCU", "R2UR", "CS2UR",
}  # fmt: skip
SHARED = {"LDS", "LDSM", "STS", "STSM", "ATOMS", "SHFL", "REDUX", "LDL", "STL"}
ACCESSES = {
    **dict.fromkeys(("LDG", "LD"), Unit.GLOBAL),
    **dict.fromkeys(("STG", "ST", "RED", "REDG", "ATOMG", "ATOM"), Unit.STORE),
    **dict.fromkeys(SHARED, Unit.SHARED),
    "LDGSTS": Unit.COPY,
}
WAITS = {"BAR": Unit.BARRIER, "LDGDEPBAR": Unit.COPY_GROUP}


def timing(instruction: Instruction, gpu: Gpu) -> Timing:
    """Return the units that an instruction occupies. The latency of memory depends on the data: see memory.py."""
    name = instruction.name
    if name in ("DEPBAR", "WARPGROUP") and ".LE" in instruction.opcode:
        return Timing(Unit.WAIT_GROUP, 0, 0)
    if name in WAITS:
        return Timing(WAITS[name], 0, 0)
    if name in ACCESSES:
        latency = LATENCIES.get(name, gpu.shared_latency) if name in SHARED else 0
        return Timing(ACCESSES[name], 1, latency)
    if name.endswith("MMA") and name[0] in "HIQD":
        return Timing(Unit.TENSOR, _tensor_cycles(instruction, gpu), 0)
    unit, cycles = _arithmetic(name, gpu)
    return Timing(unit, cycles, LATENCIES.get(name, SLOW_LATENCY))


def _arithmetic(name: str, gpu: Gpu) -> tuple[Unit, float]:
    """Return the unit of an instruction that touches no memory, and the cycles of a warp: 32 over its lanes."""
    if name in FREE or name.startswith("U"):
        return Unit.NONE, 0
    of_unit = (
        (FUNCTIONS, Unit.XU, 4.0),
        (DOUBLE, Unit.FP64, gpu.fp64_lanes),
        (FMA, Unit.FMA, gpu.fp32_lanes),
        (HALF, Unit.FMA, gpu.half2_lanes),
        (MAD, Unit.FMA, 16.0),
    )
    for names, unit, lanes in of_unit:
        if name in names:
            return unit, 32 / lanes
    return Unit.ALU, 32 / gpu.alu_lanes


def _tensor_cycles(instruction: Instruction, gpu: Gpu) -> float:
    """Return the cycles of a scheduler's tensor core: products over its rate."""
    opcode = instruction.opcode
    if opcode.startswith(("HGMMA", "IGMMA", "QGMMA")):
        match = re.search(r"\.64x(\d+)x(\d+)", opcode)
        assert match, opcode
        rate = gpu.tensor_macs_group * (1 if opcode.startswith("HG") else 2)
        return 16 * int(match[1]) * int(match[2]) / rate  # a warp has 16 of the 64 rows
    shape = re.search(r"\.(\d{2})(8)(\d{1,2})\b", opcode)
    depth = int(shape[3]) if shape else 16
    if opcode.startswith("DMMA"):
        return 16 * 8 * depth / (gpu.fp64_lanes * 4)
    rate = gpu.tensor_macs if opcode.startswith("HMMA") else gpu.tensor_macs_int8
    if ".F16" in opcode and ".F32" not in opcode and gpu.tensor_macs == 64:
        rate *= 2  # consumer GPUs halve the rate of sums in float32
    if "TF32" in opcode:
        rate /= 2
    return 16 * 8 * depth / rate
