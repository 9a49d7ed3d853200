"""Instructions that read and write memory: ld, st, atom, red, cp.async.

Owns their forms. A copy (cp.async) reads and writes when its group is waited for, as late as PTX allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.group import Group, Lanes
from tests.kernels.ptx.memory import load, require_aligned, store
from tests.kernels.ptx.parse import Instruction
from tests.kernels.ptx.races import Kind
from tests.kernels.ptx.values import Array, Mask, Step, dtype_of, view

HINTS = {"L1", "L2", "evict_first", "evict_last", "evict_normal", "no_allocate", "unchanged", "cache_hint", "nc"}
HINTS |= {"ca", "cg", "cs", "cv", "lu", "wb", "wt", "weak", "128B", "256B", "64B", "evict_unchanged"}
COPY_PARTS = {*HINTS, "shared", "global", "cta", "commit_group", "wait_group", "wait_all"}
SCOPES = {"gpu", "sys", "cta"}
COUNTS = {"v2": 2, "v4": 4, "v8": 8}
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda old, new: old + new, "min": min, "max": max, "exch": lambda old, new: new,
    "and": lambda old, new: old & new, "or": lambda old, new: old | new, "xor": lambda old, new: old ^ new,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Form:
    shared: bool
    count: int
    kind: str


def _form(instruction: Instruction) -> _Form:
    _, *parts, kind = instruction.opcode.replace("::", ".").split(".")
    space = {"global", "shared"} & set(parts)
    counts = [COUNTS[part] for part in parts if part in COUNTS]
    rest = set(parts) - HINTS - set(COUNTS) - {"global", "shared"} - ({"cta"} if "shared" in space else set())
    if (
        len(space) != 1
        or rest
        or kind not in ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
    ):
        raise EmulatorError(f"unknown {instruction}")
    return _Form("shared" in space, sum(counts) or 1, kind)


def build_load(instruction: Instruction, group: Group) -> Step:
    """Bind ld."""
    registers = group.registers
    if instruction.parts[1] == "param":
        return _build_parameter(instruction, group)
    form = _form(instruction)
    names = registers.names(instruction.operands[0])
    if len(names) != form.count:
        raise EmulatorError(f"unknown {instruction}")
    targets = [registers.target(name, form.kind) for name in names]
    base, offset = registers.address(instruction.operands[1])
    dtype = dtype_of(form.kind)
    num_bytes = form.count * dtype.itemsize

    def step(mask: Mask) -> None:
        addresses = group.addresses(base, offset, mask)
        ctas, threads = group.running(mask)
        require_aligned(addresses, num_bytes, instruction)
        memory = group.space(form.shared)
        if group.dependence is not None and not form.shared:
            group.dependence.read(group.memory, addresses, mask, instruction)
        values = load(memory, addresses, ctas, dtype, form.count, instruction)
        if group.races is not None:
            group.races.access(Kind.READ, memory, addresses, ctas, threads, num_bytes, instruction)
        for at, target in enumerate(targets):
            target.put_running(values[:, at], mask)

    return step


def _build_parameter(instruction: Instruction, group: Group) -> Step:
    kind = instruction.parts[-1]
    name = instruction.operands[1].strip("[] ")
    if len(instruction.parts) != 3 or name not in group.parameters:
        raise EmulatorError(f"unknown {instruction}")
    target = group.registers.target(instruction.operands[0], kind)
    value = view(group.parameters[name], kind)

    def step(mask: Mask) -> None:
        target.put(value, mask)

    return step


def build_store(instruction: Instruction, group: Group) -> Step:
    """Bind st."""
    form = _form(instruction)
    registers = group.registers
    base, offset = registers.address(instruction.operands[0])
    sources = [registers.source(name, form.kind) for name in registers.names(instruction.operands[1])]
    if len(sources) != form.count:
        raise EmulatorError(f"unknown {instruction}")
    num_bytes = form.count * dtype_of(form.kind).itemsize

    def step(mask: Mask) -> None:
        addresses = group.addresses(base, offset, mask)
        ctas, threads = group.running(mask)
        require_aligned(addresses, num_bytes, instruction)
        memory = group.space(form.shared)
        if group.dependence is not None and not form.shared:
            group.dependence.write(group.memory, addresses, mask, instruction)
        everywhere = [np.broadcast_to(source, len(group.ctas)) for source in sources]
        values = np.stack(everywhere if mask is None else [array[mask] for array in everywhere], 1)
        if group.races is not None:
            group.races.access(Kind.WRITE, memory, addresses, ctas, threads, num_bytes, instruction, values)
        store(memory, addresses, ctas, values, instruction)

    return step


def build_atomic(instruction: Instruction, group: Group) -> Step:
    """Bind atom and red: one lane after the other."""
    name, *parts, kind = instruction.opcode.replace("::", ".").split(".")
    operation = next((part for part in parts if part in (*OPERATIONS, "cas")), None)
    rest = set(parts) - SCOPES - {"relaxed", "global", "shared", operation}
    if (
        operation is None
        or rest
        or ("shared" not in parts and "global" not in parts)
        or kind in ("f16x2", "bf16x2", "bf16")
    ):
        raise EmulatorError(f"unknown {instruction}")
    registers = group.registers
    target = registers.target(instruction.operands[0] if name == "atom" else "_", kind)
    at, *given = instruction.operands[name == "atom" :]
    base, offset = registers.address(at)
    sources = [registers.source(operand, kind) for operand in given]
    dtype = dtype_of(kind)

    def step(mask: Mask) -> None:
        addresses = group.addresses(base, offset, mask)
        ctas, threads = group.running(mask)
        require_aligned(addresses, dtype.itemsize, instruction)
        memory = group.space("shared" in parts)
        if group.dependence is not None and "shared" not in parts:
            group.dependence.write(group.memory, addresses, mask, instruction)
        if group.races is not None:
            group.races.access(Kind.ATOMIC, memory, addresses, ctas, threads, dtype.itemsize, instruction)
        everywhere = [np.broadcast_to(source, len(group.ctas)) for source in sources]
        values = everywhere if mask is None else [array[mask] for array in everywhere]
        old = np.empty(len(addresses), dtype)
        for _, part, chosen, where in memory.split(addresses, ctas, dtype.itemsize, instruction):
            cells = part.view(dtype)
            lanes = np.arange(len(addresses))[chosen]
            for lane, cell in zip(lanes.tolist(), (where // dtype.itemsize).tolist(), strict=True):
                old[lane] = before = cells[cell]
                if operation == "cas":
                    cells[cell] = values[1][lane] if before == values[0][lane] else before
                else:
                    cells[cell] = OPERATIONS[operation](before, values[0][lane])
        target.put_running(old, mask)

    return step


def build_copy(instruction: Instruction, group: Group) -> Step:
    """Bind cp.async from global to shared memory, its commit_group and its waits."""
    parts = instruction.opcode.replace("::", ".").split(".")
    if parts[1] != "async" or set(parts[2:]) - COPY_PARTS:
        raise EmulatorError(f"unknown {instruction}")
    if parts[2:] == ["commit_group"]:
        return group.copies.commit
    if parts[2:] in (["wait_group"], ["wait_all"]):
        num_open = int(instruction.operands[0]) if parts[2] == "wait_group" else None

        def wait(mask: Mask) -> None:
            group.copies.wait(mask, num_open)

        return wait
    return _Copy(instruction, group).start


class _Copy:
    """cp.async: copy bytes, or write zeros where the size of the source is 0."""

    def __init__(self, instruction: Instruction, group: Group) -> None:
        if len(instruction.operands) not in (3, 4):
            raise EmulatorError(f"unknown {instruction}")
        self.instruction, self.group = instruction, group
        registers = group.registers
        (self.to, self.to_offset), (self.of, self.of_offset) = map(registers.address, instruction.operands[:2])
        self.num_bytes = int(instruction.operands[2], 0)
        size = instruction.operands[3] if len(instruction.operands) == 4 else instruction.operands[2]
        self.size = registers.source(size, "u32")

    def start(self, mask: Mask) -> None:
        """Take down where the bytes are, and let the copy begin."""
        group, num_bytes, num_lanes = self.group, self.num_bytes, len(self.group.ctas)
        targets = np.broadcast_to(self.to, num_lanes).astype(np.int64) + self.to_offset
        sources = np.broadcast_to(self.of, num_lanes).astype(np.int64) + self.of_offset
        chosen = np.ones(num_lanes, bool) if mask is None else mask
        sizes = np.broadcast_to(self.size, num_lanes)
        if ((sizes != 0) & (sizes != num_bytes))[chosen].any():
            raise EmulatorError(f"a copy of a part: {self.instruction}")
        reading = chosen & (sizes > 0)
        require_aligned(targets[chosen], num_bytes, self.instruction)
        require_aligned(sources[reading], num_bytes, self.instruction)
        if group.dependence is not None and reading.any():
            group.dependence.read(group.memory, sources[reading], reading, self.instruction)
        if group.races is not None:
            group.races.access(
                Kind.COPY, group.shared, targets[chosen], *group.running(chosen), num_bytes, self.instruction
            )
            self._check_sources(sources, reading)
        group.copies.start(mask, lambda ready: self._finish(ready, targets, sources, reading))

    def _check_sources(self, sources: Array, reading: Lanes) -> None:
        group = self.group
        if group.races is not None and reading.any():
            ctas, threads = group.running(reading)
            group.races.access(
                Kind.READ, group.memory, sources[reading], ctas, threads, self.num_bytes, self.instruction
            )

    def _finish(self, ready: Lanes, targets: Array, sources: Array, reading: Lanes) -> None:
        group, now = self.group, ready & reading
        ctas, threads = group.running(ready)
        values = np.zeros((len(ctas), self.num_bytes), np.uint8)
        if now.any():
            found = load(group.memory, sources[now], group.ctas[now], values.dtype, self.num_bytes, self.instruction)
            values[reading[ready]] = found
        store(group.shared, targets[ready], ctas, values, self.instruction)
        if group.races is not None:
            group.races.finish_write(group.shared, targets[ready], ctas, threads, self.num_bytes)
            self._check_sources(sources, now)


def build_policy(instruction: Instruction, group: Group) -> Step:
    """Bind createpolicy: how a cache treats an access changes no result."""
    target = group.registers.target(instruction.operands[0], "b64")
    nothing: Array = np.zeros(1, np.uint64)

    def step(mask: Mask) -> None:
        target.put(nothing, mask)

    return step
