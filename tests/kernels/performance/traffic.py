"""Count the memory accesses of a launch: some CTAs of the real grid run in the PTX emulator.

Owns the counts by instruction of the PTX: executions, sectors of 32 bytes, first touches, wavefronts of shared memory.
Knows nothing of machine code and of time. Products (mma, wgmma) are not computed: no address depends on one.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from tests.kernels.performance.launch import Launch
from tests.kernels.ptx import accesses
from tests.kernels.ptx.fences import Fences
from tests.kernels.ptx.group import Group
from tests.kernels.ptx.instructions import OF_GROUPS
from tests.kernels.ptx.launch import bits_of, num_together
from tests.kernels.ptx.machine import Fragments, Machine
from tests.kernels.ptx.memory import Memory, SharedMemory
from tests.kernels.ptx.parse import Instruction, Program, parse
from tests.kernels.ptx.races import Kind, Races
from tests.kernels.ptx.values import Step

SECTOR = 32  # bytes
SAMPLE = 16  # CTAs
VARIED = 128  # CTAs, where they do not all execute the same
RECENT = 128  # instructions of the PTX: about the latency of a load, while nothing has used its result
REGISTER = re.compile(r"%\w+")
SEED = 30
CTA_BITS = 14  # of a sector's key: the number of a CTA, or of a warp
Integers = NDArray[np.int64]


@dataclass(slots=True)
class Accesses:
    """The accesses of one PTX instruction in all CTAs that ran."""

    instruction: Instruction
    shared: bool
    writes: bool
    tensor: str = ""
    requests: int = 0  # of warps
    sectors: int = 0  # global memory: of the L1 cache
    misses: int = 0  # sectors that the CTA touches for the first time
    pending: int = 0  # sectors that it touched so recently that they are still on their way
    repeats: int = 0  # of the misses, sectors that another of the CTAs has touched before
    wavefronts: int = 0  # shared memory: at least one for each request, more with bank conflicts
    num_bytes: int = 0


@dataclass(slots=True)
class Traffic:
    """The counts of the CTAs that ran, of `num_ctas` in the grid."""

    program: Program
    num_ctas: int
    ctas: list[int]
    executed: Integers  # warps that executed an instruction, [ctas, instructions]
    accesses: dict[int, Accesses] = field(default_factory=dict)
    bytes_of: dict[str, int] = field(default_factory=dict)  # size of each tensor's memory

    def dram_share(self, access: Accesses, warm: frozenset[str]) -> float:
        """Return the part of an instruction's misses that no CTA before had brought into the L2 cache."""
        if access.shared or access.tensor in warm:
            return 0.0
        misses = sum(other.misses for other in self.accesses.values() if other.tensor == access.tensor)
        whole = misses * SECTOR * self.num_ctas / len(self.ctas)
        return min(1.0, self.bytes_of.get(access.tensor, 0) / whole) if whole else 0.0

    def dram_bytes(self, warm: frozenset[str]) -> float:
        """Return the bytes that the whole launch reads from DRAM."""
        scale = self.num_ctas / len(self.ctas)
        return scale * sum(
            access.misses * SECTOR * self.dram_share(access, warm)
            for access in self.accesses.values()
            if not access.writes
        )


class Recorder(Races):
    """Stands where races are looked for, and counts accesses."""

    def __init__(
        self, program: Program, num_ctas: int, num_warps: int, shared: SharedMemory, starts: dict[int, str]
    ) -> None:
        super().__init__(program, num_ctas, num_warps, shared)
        self.starts = starts  # address of each tensor's memory
        self.accesses: dict[int, Accesses] = {}
        self.clock = 0  # instructions that were executed
        self.used: dict[int, int] = {}  # by load: when an instruction last used its result
        self._seen: dict[int, tuple[int, int]] = {}  # sectors by CTA: when they were touched, and by which instruction
        self._of_all: set[int] = set()  # sectors that any CTA has touched
        self._copy_ends = False

    def new_ctas(self, numbers: Sequence[int]) -> None:
        self._seen.clear()

    def access(
        self,
        kind: Kind,
        memory: Memory,
        addresses: Any,
        ctas: Integers,
        threads: Integers,
        num_bytes: int,
        instruction: Instruction,
        values: Any = None,
    ) -> None:
        shared = isinstance(memory, SharedMemory)
        found = self.accesses.get(instruction.index)
        if kind is Kind.COPY:
            self._copy_ends = False
            return  # its source is counted when it is read
        if self._copy_ends and instruction.parts[0] == "cp":
            return  # the emulator reads the source again at the end, for races
        if found is None:
            writes = kind in (Kind.WRITE, Kind.ATOMIC)
            found = self.accesses[instruction.index] = Accesses(instruction, shared, writes)
            if not shared:
                found.tensor = self._tensor(int(addresses[0]))
        warps = ctas * self.num_warps + threads // 32
        found.num_bytes += len(addresses) * num_bytes
        found.requests += len(unique(warps))
        if shared:
            found.wavefronts += wavefronts(addresses, warps, threads % 32, num_bytes)
            return
        each = max(1, num_bytes // SECTOR)
        sectors = (addresses[:, None] // SECTOR + np.arange(each)).ravel()
        found.sectors += len(unique(sectors << CTA_BITS | np.repeat(warps, each)))
        seen, of_all, now = self._seen, self._of_all, self.clock
        for key in unique(sectors << CTA_BITS | np.repeat(ctas, each)).tolist():
            if key in seen:
                found.pending += self._on_its_way(*seen[key])
                continue
            seen[key] = now, instruction.index
            found.misses += 1
            sector = key >> CTA_BITS
            if sector in of_all:
                found.repeats += 1
            else:
                of_all.add(sector)

    def _on_its_way(self, touched: int, by: int) -> bool:
        """Return whether a sector has not arrived yet: it was touched a short time ago, and nothing has used it."""
        return self.clock - touched < RECENT and self.used.get(by, -1) < touched

    def _tensor(self, address: int) -> str:
        return self.starts[max(start for start in self.starts if start <= address)]

    def arrive(self, barrier: int, ctas: Integers, warps: Integers) -> None: ...

    def leave(self, barrier: int, ctas: Integers, warps: Integers) -> None: ...

    def proxy_fence(self, ctas: Integers, warps: Integers) -> None: ...

    def finish_write(self, *_: Any) -> None:
        self._copy_ends = True

    def start_product(self, group: Group, lane: int, tiles: Any, instruction: Instruction) -> Any:
        return np.zeros(0, np.int64)

    def finish_product(self, units: Any) -> None: ...


def loads_used(program: Program) -> dict[int, list[int]]:
    """Return the loads from global memory whose results each instruction uses; a move only passes them on."""
    loads: dict[str, set[int]] = defaultdict(set)  # by register
    for instruction in program.instructions:
        if _is_load(instruction):
            for name in REGISTER.findall(instruction.operands[0]):
                loads[name].add(instruction.index)
    moves = [one for one in program.instructions if one.parts[0] == "mov"]
    changed = bool(loads)
    while changed:
        changed = False
        for move in moves:
            passed = set().union(*(loads[name] for name in _names(move.operands[1:]) if name in loads))
            for name in REGISTER.findall(move.operands[0]):
                if passed - loads[name]:
                    loads[name] |= passed
                    changed = True
    used: dict[int, list[int]] = {}
    for instruction in program.instructions:
        if instruction.parts[0] == "mov":
            continue
        results = 0 if instruction.operands and instruction.operands[0].startswith("[") else 1
        names = {*_names(instruction.operands[results:]), instruction.guard}
        if found := set().union(*(loads[name] for name in names if name in loads)):
            used[instruction.index] = sorted(found)
    return used


def _names(operands: Sequence[str]) -> list[str]:
    return [name for operand in operands for name in REGISTER.findall(operand)]


def _is_load(instruction: Instruction) -> bool:
    return instruction.parts[0] == "ld" and not re.search(r"\.(?:param|shared)\b", instruction.opcode)


def unique(values: Integers) -> Integers:
    """Return sorted values without repetitions; np.unique hashes, which takes many times longer."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])]


def wavefronts(addresses: Integers, warps: Integers, lanes: Integers, num_bytes: int) -> int:
    """Return the passes through shared memory that accesses need: 32 banks of 4 bytes, 128 bytes a pass.

    Accesses of 8 and 16 bytes are served by halves and quarters of a warp.
    """
    width = max(num_bytes, 4)
    parts = max(width // 4, 1)
    groups = warps * parts + lanes // (32 // parts)
    units = unique(groups << 24 | addresses % (1 << 24) // width)
    counts = np.bincount((units >> 24) * 32 + units % (32 // parts))
    return int(np.pad(counts, (0, -len(counts) % 32)).reshape(-1, 32).max(1).sum())


class TracingMachine(Machine):
    """A machine that counts what each CTA executes."""

    def __init__(
        self, program: Program, num_warps: int, num_ctas: int, shared_bytes: int, starts: dict[int, str]
    ) -> None:
        self._starts = starts
        self.executed = np.zeros((len(program.instructions), num_ctas), np.int64)
        self._loads_used = loads_used(program)
        super().__init__(program, num_warps, num_ctas, shared_bytes, "least", True)

    def watch(self) -> Recorder:
        return Recorder(self.program, self.num_ctas, self.num_warps, self.shared, self._starts)

    def _fragments(self, warps: range) -> Fragments:
        # one machine: the order of an atomic operation changes nothing, and there are no products to be fenced
        ordered = patch.object(accesses, "SCOPES", accesses.SCOPES | {"acq_rel", "acquire", "release"})
        unfenced = patch.object(Fences, "of", lambda *_: None)
        with patch.dict(OF_GROUPS, dict.fromkeys(("mma", "wgmma"), _nothing)), ordered, unfenced:
            fragments = super()._fragments(warps)
        ctas = fragments.group.ctas[::32]
        for operation in fragments.operations:
            if operation.step is not None:
                operation.step = self._counted(operation.instruction.index, operation.step, ctas)
        return fragments

    def _counted(self, index: int, step: Any, ctas: Integers) -> Any:
        row = self.executed[index]

        loads = self._loads_used.get(index, ())
        recorder = self.races
        assert isinstance(recorder, Recorder)

        def counted(mask: Any) -> None:
            recorder.clock += 1
            for load in loads:
                recorder.used[load] = recorder.clock
            if mask is None:
                np.add.at(row, ctas, 1)
            else:
                np.add.at(row, ctas[mask.reshape(-1, 32).any(1)], 1)
            step(mask)

        return counted


def _nothing(instruction: Instruction, group: Group) -> Step:
    return lambda mask: None


def chosen_ctas(total: int, most: int) -> list[int]:
    """Return CTAs of a grid, at random: a fixed distance could meet one column of the grid only."""
    if total <= most:
        return list(range(total))
    return sorted(np.random.default_rng(SEED).choice(total, most, replace=False).tolist())


def trace(launch: Launch) -> Traffic:
    """Run some CTAs of a launch: few if all execute the same."""
    traffic = run(launch, SAMPLE)
    executed = traffic.executed.sum(1)
    return run(launch, VARIED) if executed.max() > 1.1 * executed.min() else traffic


def run(launch: Launch, most: int) -> Traffic:
    """Run at most so many CTAs of a launch."""
    compiled = launch.compiled
    program = parse(compiled.asm["ptx"])
    signature = {name: str(kind) for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    values = [launch.args[name] for name in signature]
    starts: dict[int, str] = {}
    sizes: dict[str, int] = {}
    for name, value in launch.args.items():
        if torch.is_tensor(value):
            storage = value.untyped_storage()
            sizes[name] = storage.nbytes()
            starts.setdefault(storage.data_ptr(), name)
    total = math.prod(launch.grid)
    ctas = chosen_ctas(total, most)
    num_warps = compiled.metadata.num_warps
    together = num_together(num_warps, 0, len(ctas))
    executed = []
    machine = TracingMachine(program, num_warps, together, compiled.metadata.shared, starts)
    bits = [bits_of(value, kind) for value, kind in zip(values, signature.values(), strict=True)]
    tensors = [value for value in values if torch.is_tensor(value)]
    for first in range(0, len(ctas), together):
        some = ctas[first : first + together]
        machine.executed.fill(0)
        machine.run(tensors, bits, launch.grid, 0, some)
        executed.append(machine.executed[:, : len(some)].T.copy())
    assert isinstance(machine.races, Recorder)
    return Traffic(program, total, ctas, np.concatenate(executed), machine.races.accesses, sizes)
