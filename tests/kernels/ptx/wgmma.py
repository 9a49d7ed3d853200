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
from tests.kernels.ptx.values import Array, Mask, Step
from tests.kernels.ptx.warps import require_whole_warps

SHAPE = re.compile(r"m64n(\d+)k(\d+)")
SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}  # bytes of a row, and the bits of it that are exchanged
WORDS = {"f16": np.dtype(np.uint16), "bf16": np.dtype(np.uint16), "tf32": np.dtype(np.uint32)}


def addresses_of(descriptor: int, rows: Array, size: int, transposed: bool, itemsize: int = 2) -> Array:
    """Return the addresses in shared memory of a descriptor's matrix, [rows, size], of numbers of `itemsize` bytes.

    `transposed`: neighbours along the rows lie side by side ("MN-major"), else neighbours along K do. Only matrices of
    16 bits can be.
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
        offset = row // 8 * stride + row % 8 * width + k * itemsize
    else:
        offset = row // 8 * stride + row % 8 * 16 + k * itemsize // 16 * leading + k * itemsize % 16
    address: Array = start + offset
    swizzled: Array = address ^ (address >> 7 & bits) << 4
    return swizzled


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
    return _Product(instruction, group).start


class _Product:
    """wgmma.mma_async with float32 sums; the left operand is in registers or in shared memory."""

    def __init__(self, instruction: Instruction, group: Group) -> None:
        self.instruction, self.group = instruction, group
        registers = group.registers
        self.kind, self.num_columns = _shape(instruction)
        sums, left, right, kept, *signs = instruction.operands
        in_registers = left.startswith("{")
        names, left_names = registers.names(sums), registers.names(left) if in_registers else []
        itemsize = WORDS[self.kind].itemsize
        self.depth = 32 // itemsize
        num_transposed = 0 if itemsize == 4 else 2 - in_registers  # tf32 has no such flags
        if signs[:2] != ["1", "1"] or len(signs) != 2 + num_transposed or len(names) != self.num_columns // 2:
            raise EmulatorError(f"unknown {instruction}")
        if in_registers and len(left_names) != 4:
            raise EmulatorError(f"unknown {instruction}")
        self.targets = [registers.target(name, "f32") for name in names]
        self.sums = [registers.source(name, "f32") for name in names]
        self.left = [registers.source(name, "b32") for name in left_names]
        self.left_descriptor = None if in_registers else registers.source(left, "b64")
        self.right_descriptor = registers.source(right, "b64")
        self.kept = registers.source(kept, "pred")
        flags = [flag == "1" for flag in signs[2:]]
        self.left_transposed, self.right_transposed = num_transposed == 2 and flags[0], num_transposed > 0 and flags[-1]

    def start(self, mask: Mask) -> None:
        """Take down where the operands are, and let the product begin."""
        group, instruction = self.group, self.instruction
        require_whole_warps(mask, instruction)
        lanes = np.ones(len(group.ctas), bool) if mask is None else mask
        first = np.arange(0, len(lanes), 32)[lanes[::32]]  # the first lane of each warp that runs
        columns, depth, size = np.arange(self.num_columns), self.depth, WORDS[self.kind].itemsize
        descriptors = _of_warps(self.right_descriptor, first, lanes, instruction)
        right = [addresses_of(value, columns, depth, self.right_transposed, size) for value in descriptors]
        left: list[Array] = []
        if self.left_descriptor is not None:
            descriptors = _of_warps(self.left_descriptor, first, lanes, instruction)
            for value, warp in zip(descriptors, (group.threads[first] // 32).tolist(), strict=True):
                rows = 16 * (warp % 4) + np.arange(16)
                left.append(addresses_of(value, rows, depth, self.left_transposed, size))
        keeps = np.broadcast_to(self.kept, len(lanes))[first].copy()
        reads: list[Array] = []
        if group.races is not None:
            for at, lane in enumerate(first):
                of_warp = [right[at], *left[at : at + 1]]
                reads.append(group.races.start_product(group, lane, of_warp, instruction))
        if group.fences is not None:
            group.fences.hold(instruction, mask, 1)

        def finish(ready: Lanes) -> None:
            chosen = np.flatnonzero(ready[first])
            self._compute(
                ready, first[chosen], [left[i] for i in chosen if left], [right[i] for i in chosen], keeps[chosen]
            )
            for i in chosen if reads else ():
                assert group.races is not None
                group.races.finish_product(reads[i])

        group.products.start(mask, finish)

    def _compute(self, ready: Lanes, first: Array, left: list[Array], right: list[Array], keeps: Array) -> None:
        group = self.group
        b = _read_tiles(group, right, first, self.kind, self.instruction)  # [warp, columns, depth]
        if left:
            a = _read_tiles(group, left, first, self.kind, self.instruction)
        else:
            a = left_matrix(read_words(self.left, len(ready), ready), self.kind)
        product = a @ b.swapaxes(1, 2)
        before = accumulators(read_words(self.sums, len(ready), ready)).astype(np.float64)
        after = np.where(keeps[:, None, None], product + before, product)
        write_words(self.targets, spread_accumulators(after.astype(np.float32)), ready)
        if group.fences is not None:
            group.fences.hold(self.instruction, ready, -1)


def _shape(instruction: Instruction) -> tuple[str, int]:
    """Return the type of a product's operands and its number of columns."""
    parts = instruction.parts
    shape = SHAPE.fullmatch(parts[4]) if len(parts) == 8 else None
    if shape is None or parts[1:4] != ["mma_async", "sync", "aligned"] or parts[5] != "f32":
        raise EmulatorError(f"unknown {instruction}")
    if parts[6] not in WORDS or parts[7] != parts[6] or int(shape[2]) * WORDS[parts[6]].itemsize != 32:
        raise EmulatorError(f"unknown {instruction}")
    return parts[6], int(shape[1])


def _of_warps(values: Array, first: Array, lanes: Lanes, instruction: Instruction) -> list[int]:
    """Return a descriptor of each warp; its lanes must agree."""
    everywhere = np.broadcast_to(values, len(lanes))
    if (everywhere.reshape(-1, 32)[lanes[::32]] != everywhere[first][:, None]).any():
        raise EmulatorError(f"lanes of a warp have different descriptors: {instruction}")
    return [int(value) for value in everywhere[first]]


def _read_tiles(group: Group, tiles: list[Array], first: Array, kind: str, instruction: Instruction) -> Array:
    """Read matrices of warps from shared memory, [warp, rows, columns]."""
    addresses = np.stack(tiles)
    ctas = np.repeat(group.ctas[first], addresses[0].size)
    words = load(group.shared, addresses.ravel(), ctas, WORDS[kind], 1, instruction)
    return elements(words, kind).reshape(addresses.shape)
