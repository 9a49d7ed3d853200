"""Matrices that lie spread over the registers of a warp: ldmatrix, stmatrix, mma.

Owns which lane holds which element, as the PTX manual draws it. Products are summed in float64 and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.group import Group
from tests.kernels.ptx.memory import load, require_aligned, store
from tests.kernels.ptx.parse import Instruction
from tests.kernels.ptx.races import Kind
from tests.kernels.ptx.registers import Registers
from tests.kernels.ptx.values import Array, Mask, Step, Target, from_bf16
from tests.kernels.ptx.warps import LANE, require_whole_warps

ROW, QUAD = LANE // 4, LANE % 4  # a quad of lanes holds a row
HALF = np.dtype(np.uint16)
SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
BITS = {"f16": 16, "bf16": 16, "s8": 8, "u8": 8, "tf32": 32}


def read_words(sources: Sequence[Array], num_lanes: int, mask: Mask) -> Array:
    """Return the registers of the warps that run, [register, warp, lane]."""
    words = np.stack([np.broadcast_to(source, num_lanes) for source in sources]).reshape(len(sources), -1, 32)
    return words if mask is None else words[:, mask.reshape(-1, 32)[:, 0]]


def write_words(targets: Sequence[Target], words: Array, mask: Mask) -> None:
    """Set the registers of the warps that run, from [register, warp, lane]."""
    for target, values in zip(targets, words, strict=True):
        target.put_running(values.reshape(-1), mask)


def elements(words: Array, kind: str) -> Array:
    """Return the numbers that words hold, [..., elements of a word], in float64."""
    flat = np.ascontiguousarray(words)[..., None]
    if kind == "f16":
        return flat.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return from_bf16(flat.view(np.uint16)).astype(np.float64)
    if kind == "tf32":
        return (flat & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return flat.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)


def left_matrix(words: Array, kind: str) -> Array:
    """Assemble the left operand, 16 rows: [register, warp, lane] to [warp, 16, columns]."""
    values = elements(words, kind)  # [register, warp, lane, element]
    num_registers, num_warps, _, size = values.shape
    out = np.empty((num_warps, 16, num_registers * 2 * size))
    for register in range(num_registers):
        for element in range(size):
            columns = QUAD * size + element + register // 2 * 4 * size
            out[:, ROW + 8 * (register % 2), columns] = values[register, :, :, element]
    return out


def right_matrix(words: Array, kind: str) -> Array:
    """Assemble the right operand, 8 columns: [register, warp, lane] to [warp, rows, 8]."""
    values = elements(words, kind)
    num_registers, num_warps, _, size = values.shape
    out = np.empty((num_warps, num_registers * 4 * size, 8))
    for register in range(num_registers):
        for element in range(size):
            out[:, QUAD * size + element + register * 4 * size, ROW] = values[register, :, :, element]
    return out


def accumulators(words: Array) -> Array:
    """Assemble the sums, 16 rows of float32 or int32 words: [register, warp, lane] to [warp, 16, columns]."""
    out = np.empty((words.shape[1], 16, words.shape[0] * 2), words.dtype)
    for register in range(len(words)):
        out[:, ROW + 8 * (register // 2 % 2), register // 4 * 8 + QUAD * 2 + register % 2] = words[register]
    return out


def spread_accumulators(sums: Array) -> Array:
    """Return the words of the sums: the inverse of `accumulators`."""
    return np.stack(
        [
            sums[:, ROW + 8 * (register // 2 % 2), register // 4 * 8 + QUAD * 2 + register % 2]
            for register in range(sums.shape[2] // 2)
        ]
    )


def build_mma(instruction: Instruction, group: Group) -> Step:
    """Bind mma.sync of m16n8: 16-bit numbers, 8-bit integers, tf32."""
    parts = instruction.parts
    shape = SHAPE.fullmatch(parts[3]) if len(parts) == 10 else None
    if (
        shape is None
        or parts[1:3] != ["sync", "aligned"]
        or shape.group(1, 2) != ("16", "8")
        or parts[4:6] != ["row", "col"]
    ):
        raise EmulatorError(f"unknown {instruction}")
    to, left_kind, right_kind, of = parts[6:]
    sums_kind = "s32" if left_kind in ("s8", "u8") else "f32"
    operands = [group.registers.names(operand) for operand in instruction.operands]
    bits = BITS.get(left_kind, 0)
    sizes = (4, int(shape[3]) * bits // 64, int(shape[3]) * bits // 128, 4)
    if to != sums_kind or of != sums_kind or right_kind != left_kind or tuple(map(len, operands)) != sizes:
        raise EmulatorError(f"unknown {instruction}")
    registers, num_lanes = group.registers, len(group.ctas)
    targets = [registers.target(name, sums_kind) for name in operands[0]]
    left, right = ([registers.source(name, "b32") for name in names] for names in operands[1:3])
    added = [registers.source(name, sums_kind) for name in operands[3]]

    def step(mask: Mask) -> None:
        require_whole_warps(mask, instruction)
        a = left_matrix(read_words(left, num_lanes, mask), left_kind)
        b = right_matrix(read_words(right, num_lanes, mask), right_kind)
        c = accumulators(read_words(added, num_lanes, mask))
        sums = (a @ b + c).astype(np.float32) if sums_kind == "f32" else (a @ b).astype(np.int64) + c
        write_words(targets, spread_accumulators(sums), mask)

    return step


def _matrices(instruction: Instruction, registers: Registers, operand: str) -> tuple[list[str], bool]:
    """Return the registers of ldmatrix or stmatrix, and whether the matrices are transposed."""
    parts = instruction.opcode.replace("::", ".").split(".")
    names = registers.names(operand)
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "cta", "b16"}
    if set(parts[1:]) - known or f"x{len(names)}" not in parts or parts[-1] != "b16" or "m8n8" not in parts:
        raise EmulatorError(f"unknown {instruction}")
    return names, "trans" in parts


def _rows(addresses: Array, num_matrices: int) -> Array:
    """Return the addresses of the matrices' rows, [warp, matrix, row]: lane 8 * matrix + row has it."""
    return addresses.reshape(-1, 32)[:, : 8 * num_matrices].reshape(-1, num_matrices, 8)


def build_load_matrix(instruction: Instruction, group: Group) -> Step:
    """Bind ldmatrix: 8x8 matrices of 16 bits."""
    registers = group.registers
    names, transposed = _matrices(instruction, registers, instruction.operands[0])
    targets = [registers.target(name, "b32") for name in names]
    base, offset = registers.address(instruction.operands[1])

    def step(mask: Mask) -> None:
        require_whole_warps(mask, instruction)
        rows = _rows(group.addresses(base, offset, mask), len(names))
        require_aligned(rows, 16, instruction)
        ctas, threads = group.running(mask)
        ctas, threads = (_rows(array, len(names)).ravel() for array in (ctas, threads))
        values = load(group.shared, rows.ravel(), ctas, HALF, 8, instruction)
        if group.races is not None:
            group.races.access(Kind.READ, group.shared, rows.ravel(), ctas, threads, 16, instruction)
        matrices = values.reshape(-1, len(names), 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, len(names), 32)
        write_words(targets, words.swapaxes(0, 1), mask)

    return step


def build_store_matrix(instruction: Instruction, group: Group) -> Step:
    """Bind stmatrix: the inverse of ldmatrix."""
    registers, num_lanes = group.registers, len(group.ctas)
    names, transposed = _matrices(instruction, registers, instruction.operands[1])
    sources = [registers.source(name, "b32") for name in names]
    base, offset = registers.address(instruction.operands[0])

    def step(mask: Mask) -> None:
        require_whole_warps(mask, instruction)
        rows = _rows(group.addresses(base, offset, mask), len(names))
        require_aligned(rows, 16, instruction)
        words = np.ascontiguousarray(read_words(sources, num_lanes, mask).swapaxes(0, 1))  # [warp, matrix, lane]
        matrices = words.view(np.uint16).reshape(-1, len(names), 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        ctas, threads = (_rows(array, len(names)).ravel() for array in group.running(mask))
        values = np.ascontiguousarray(matrices).reshape(-1, 8)
        if group.races is not None:
            group.races.access(Kind.WRITE, group.shared, rows.ravel(), ctas, threads, 16, instruction, values)
        store(group.shared, rows.ravel(), ctas, values, instruction)

    return step
