"""Instructions by which the lanes of a warp exchange values: shfl, vote, redux, match, elect.

Owns them. Every lane that an instruction names must run it together with the others: the emulator runs the lanes of a
warp that have the same place in the program together, and what is missing then would be undefined on a GPU.
"""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.parse import Instruction
from tests.kernels.ptx.registers import Registers
from tests.kernels.ptx.values import Array, Mask, Step

LANE = np.arange(32)
REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def require_whole_warps(mask: Mask, instruction: Instruction) -> None:
    """Raise EmulatorError unless each warp runs an instruction with all lanes or with none."""
    if mask is not None:
        warps = mask.reshape(-1, 32)
        if (warps.any(1) != warps.all(1)).any():
            raise EmulatorError(f"a warp whose lanes are apart runs {instruction}")


def _require_members(members: Array, mask: Mask, instruction: Instruction) -> None:
    """Raise EmulatorError unless the lanes that run and the members are the same, by warp."""
    if mask is None and members.size == 1 and members[0] == 0xFFFFFFFF:
        return
    running = np.ones(0, bool) if mask is None else mask
    if mask is None:
        running = np.ones(members.size, bool)
    here = running.reshape(-1, 32)
    named = (np.broadcast_to(members, running.shape).reshape(-1, 32)[:, :, None] >> LANE.astype(np.uint32) & 1).astype(
        bool
    )
    if (here[:, :, None] & (named != here[:, None, :])).any():
        raise EmulatorError(f"lanes that a warp names are not there: {instruction}")


def build_shuffle(instruction: Instruction, registers: Registers) -> Step:
    """Bind shfl.sync."""
    parts = instruction.parts
    if len(parts) != 4 or parts[1] != "sync" or parts[2] not in ("up", "down", "bfly", "idx") or parts[3] != "b32":
        raise EmulatorError(f"unknown {instruction}")
    mode = parts[2]
    names, source, b, c, membermask = instruction.operands
    target, *inside = names.split("|")
    out = registers.target(target.strip(), "b32")
    valid = registers.target(inside[0].strip(), "pred") if inside else None
    values, distance, limits = registers.source(source, "b32"), registers.source(b, "u32"), registers.source(c, "u32")
    members = registers.source(membermask, "u32")
    lane = np.tile(LANE, registers.lanes // 32)
    first = np.arange(registers.lanes) - lane

    def step(mask: Mask) -> None:
        _require_members(members if mask is None else np.broadcast_to(members, mask.shape), mask, instruction)
        n = (distance & np.uint32(31)).astype(np.int64)
        clamp, segment = (
            (limits & np.uint32(31)).astype(np.int64),
            (limits >> np.uint32(8) & np.uint32(31)).astype(np.int64),
        )
        last = lane & segment | clamp & ~segment
        if mode == "up":
            other = lane - n
            ok = other >= last
        elif mode == "down":
            other = lane + n
            ok = other <= last
        elif mode == "bfly":
            other = lane ^ n
            ok = other <= last
        else:
            other = lane & segment | n & ~segment
            ok = other <= last
        picked = values[first + np.where(ok, other, lane)]
        out.put(picked, mask)
        if valid is not None:
            valid.put(ok, mask)

    return step


def build_reduction(instruction: Instruction, registers: Registers) -> Step:
    """Bind redux.sync of integers."""
    parts = instruction.parts
    if len(parts) != 4 or parts[1] != "sync" or parts[2] not in REDUCTIONS:
        raise EmulatorError(f"unknown {instruction}")
    name, kind = parts[2:]
    target, source, membermask = instruction.operands
    out, values, members = (
        registers.target(target, kind),
        registers.source(source, kind),
        registers.source(membermask, "u32"),
    )
    neutral = {"add": 0, "or": 0, "xor": 0, "and": 0xFFFFFFFF}

    def step(mask: Mask) -> None:
        _require_members(members if mask is None else np.broadcast_to(members, mask.shape), mask, instruction)
        given = np.broadcast_to(values, registers.lanes)
        if mask is not None:
            info = np.iinfo(values.dtype)
            rest = neutral.get(name, info.max if name == "min" else info.min)
            given = np.where(mask, given, values.dtype.type(rest))
        reduced = REDUCTIONS[name].reduce(given.reshape(-1, 32), axis=1, dtype=values.dtype)
        out.put(np.repeat(reduced, 32), mask)

    return step


def build_vote(instruction: Instruction, registers: Registers) -> Step:
    """Bind vote.sync."""
    parts = instruction.parts
    if len(parts) != 4 or parts[1] != "sync" or parts[2] not in ("any", "all", "uni", "ballot"):
        raise EmulatorError(f"unknown {instruction}")
    mode, kind = parts[2:]
    target, source, membermask = instruction.operands
    out = registers.target(target, kind)
    name = source.removeprefix("!")
    predicate, members = registers.source(name, "pred"), registers.source(membermask, "u32")

    def step(mask: Mask) -> None:
        _require_members(members if mask is None else np.broadcast_to(members, mask.shape), mask, instruction)
        votes = np.broadcast_to(~predicate if name != source else predicate, registers.lanes)
        here = np.ones(registers.lanes, bool) if mask is None else mask
        yes, voters = (votes & here).reshape(-1, 32), here.reshape(-1, 32)
        if mode == "ballot":
            result: Array = (yes.astype(np.uint32) << LANE.astype(np.uint32)).sum(1, dtype=np.uint32)
        elif mode == "any":
            result = yes.any(1)
        else:
            every = (yes == voters).all(1)
            result = every if mode == "all" else every | ~yes.any(1)
        out.put(np.repeat(result, 32), mask)

    return step


def build_elect(instruction: Instruction, registers: Registers) -> Step:
    """Bind elect.sync: the first lane is the leader."""
    names, membermask = instruction.operands
    target, leader = (name.strip() for name in names.split("|"))
    out, chosen = registers.target(target, "b32"), registers.target(leader, "pred")
    members = registers.source(membermask, "u32")

    def step(mask: Mask) -> None:
        _require_members(members if mask is None else np.broadcast_to(members, mask.shape), mask, instruction)
        here = np.ones((registers.lanes // 32, 32), bool) if mask is None else mask.reshape(-1, 32)
        first = np.repeat(here.argmax(1), 32)
        out.put(first.astype(np.uint32), mask)
        chosen.put(np.tile(LANE, registers.lanes // 32) == first, mask)

    return step


def build_activemask(instruction: Instruction, registers: Registers) -> Step:
    """Bind activemask."""
    out = registers.target(instruction.operands[0], "b32")

    def step(mask: Mask) -> None:
        here = np.ones((registers.lanes // 32, 32), bool) if mask is None else mask.reshape(-1, 32)
        out.put(np.repeat((here.astype(np.uint32) << LANE.astype(np.uint32)).sum(1, dtype=np.uint32), 32), mask)

    return step
