"""Products of a group of four warps on sm_90: wgmma, its descriptors of shared memory, its fence and its waits.

Owns where a descriptor's matrix lies. Each of the four warps computes its 16 of 64 rows, when the product is waited
for, as late as PTX allows: it reads its registers and shared memory only then.
"""

from __future__ import annotations

import re

import numpy as np

from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.fragments import (
    accumulators,
    elements,
    left_matrix,
    read_words,
    spread_accumulators,
    write_words,
)
from tests.kernels.ptx.group import Group, Lanes
from tests.kernels.ptx.memory import load
from tests.kernels.ptx.parse import Instruction
from tests.kernels.ptx.values import Array, Mask, Step, constant
from tests.kernels.ptx.warps import require_whole_warps

SHAPE = re.compile(r"m64n(\d+)k16")
SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}  # bytes of a row, and the bits of it that are exchanged
WORD = np.dtype(np.uint16)


def addresses_of(descriptor: int, rows: Array, size: int, transposed: bool) -> Array:
    """Return the addresses in shared memory of a descriptor's 16-bit matrix, [rows, size].

    `transposed`: neighbours along the rows lie side by side ("MN-major"), else neighbours along K do.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise EmulatorError(f"a descriptor with a base offset: {descriptor:#x}")
    width, bits = SWIZZLES[descriptor >> 62]
    row, k = rows[:, None], np.arange(size)[None, :]
    if transposed:
        if not bits:
            raise EmulatorError(f"a transposed matrix that is not swizzled: {descriptor:#x}")
        offset = row // (width // 2) * leading + k // 8 * stride + k % 8 * width + row % (width // 2) * 2
    elif bits:
        offset = row // 8 * stride + row % 8 * width + k * 2
    else:
        offset = row // 8 * stride + row % 8 * 16 + k // 8 * leading + k % 8 * 2
    address = start + offset
    return address ^ (address >> 7 & bits) << 4


def build_wgmma(instruction: Instruction, group: Group) -> Step:
    """Bind wgmma's instructions."""
    name = instruction.parts[1]
    if name == "fence":
        return group.fences.fence if group.fences is not None else lambda mask: None
    if name == "commit_group":
        return group.products.commit
    if name == "wait_group":
        num_open = int(instruction.operands[0])

        def wait(mask: Mask) -> None:
            group.products.wait(mask, num_open)

        return wait
    return _build_product(instruction, group)


def _build_product(instruction: Instruction, group: Group) -> Step:
    parts = instruction.parts
    shape = SHAPE.fullmatch(parts[4]) if len(parts) == 8 else None
    if (
        shape is None
        or parts[1:4] != ["mma_async", "sync", "aligned"]
        or parts[5] != "f32"
        or parts[6] not in ("f16", "bf16")
        or parts[7] != parts[6]
    ):
        raise EmulatorError(f"unknown {instruction}")
    kind, num_columns = parts[6], int(shape[1])
    registers, num_lanes = group.registers, len(group.ctas)
    sums_text, left_text, right_text, kept_text, *signs = instruction.operands
    if len(signs) != (3 if left_text.startswith("{") else 4) or signs[:2] != ["1", "1"]:
        raise EmulatorError(f"unknown {instruction}")
    names = registers.names(sums_text)
    targets = [registers.target(name, "f32") for name in names]
    sums = [registers.source(name, "f32") for name in names]
    left = [registers.source(name, "b32") for name in registers.names(left_text)] if left_text.startswith("{") else None
    left_descriptor = registers.source(left_text, "b64") if left is None else constant("0", "b64")
    right_descriptor = registers.source(right_text, "b64")
    kept = registers.source(kept_text, "pred")
    left_transposed, right_transposed = len(signs) == 4 and signs[2] == "1", signs[-1] == "1"
    if len(names) != num_columns // 2 or (left is not None and len(left) != 4):
        raise EmulatorError(f"unknown {instruction}")

    def start(mask: Mask) -> None:
        require_whole_warps(mask, instruction)
        lanes = np.ones(num_lanes, bool) if mask is None else mask
        first = np.arange(0, num_lanes, 32)[lanes[::32]]  # the first lane of each warp that runs
        right = _of_warps(right_descriptor, first, num_lanes, lanes, instruction)
        tiles = [addresses_of(value, np.arange(num_columns), 16, right_transposed) for value in right]
        left_tiles: list[Array] = []
        if left is None:
            others = _of_warps(left_descriptor, first, num_lanes, lanes, instruction)
            rows = [16 * (warp % 4) + np.arange(16) for warp in (group.threads[first] // 32).tolist()]
            left_tiles = [addresses_of(value, r, 16, left_transposed) for value, r in zip(others, rows, strict=True)]
        keeps = np.broadcast_to(kept, num_lanes)[first].copy()
        reads: list[Array] = []
        if group.races is not None:
            for at, lane in enumerate(first):
                of_warp = [tiles[at], *([left_tiles[at]] if left_tiles else [])]
                reads.append(group.races.start_product(group, lane, of_warp, instruction))

        def finish(ready: Lanes) -> None:
            chosen = ready[first]
            at = np.flatnonzero(chosen)
            b = _read_tiles(group, [tiles[i] for i in at], first[chosen], kind, instruction)  # [warp, columns, 16]
            if left is None:
                a = _read_tiles(group, [left_tiles[i] for i in at], first[chosen], kind, instruction)
            else:
                a = left_matrix(read_words(left, num_lanes, ready), kind)
            product = a @ b.swapaxes(1, 2)
            before = accumulators(read_words(sums, num_lanes, ready)).astype(np.float64)
            after = np.where(keeps[chosen][:, None, None], product + before, product)
            write_words(targets, spread_accumulators(after.astype(np.float32)), ready)
            if group.fences is not None:
                group.fences.hold(instruction, ready, -1)
            if group.races is not None:
                for i in at:
                    group.races.finish_product(reads[i])

        if group.fences is not None:
            group.fences.hold(instruction, mask, 1)
        group.products.start(mask, finish)

    return start


def _of_warps(values: Array, first: Array, num_lanes: int, lanes: Lanes, instruction: Instruction) -> list[int]:
    """Return a descriptor of each warp; its lanes must agree."""
    everywhere = np.broadcast_to(values, num_lanes)
    if (everywhere.reshape(-1, 32)[lanes[::32]] != everywhere[first][:, None]).any():
        raise EmulatorError(f"lanes of a warp have different descriptors: {instruction}")
    return [int(value) for value in everywhere[first]]


def _read_tiles(group: Group, tiles: list[Array], first: Array, kind: str, instruction: Instruction) -> Array:
    """Read 16-bit matrices of warps from shared memory, [warp, rows, columns]."""
    addresses = np.stack(tiles)
    ctas = np.repeat(group.ctas[first], addresses[0].size)
    words = load(group.shared, addresses.ravel(), ctas, WORD, 1, instruction)
    return elements(words, kind).reshape(addresses.shape)
