"""The PTX instructions of our inline assembly, on numpy arrays: tests run the assembly without a GPU.

Owns the instructions as the PTX manual defines them. Knows nothing of the code that uses them. Arithmetic on halves is
done in float64 and rounded once: for two 16-bit floats all products are exact there, and so are the sums of the tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Registers = dict[str, NDArray[np.generic]]


def run(text: str, inputs: Sequence[Words], num_outputs: int) -> list[NDArray[np.uint16]]:
    """Run assembly on words and return its 16-bit outputs $0, $1, ...; the inputs are the operands after them."""
    registers: Registers = {f"${num_outputs + at}": words for at, words in enumerate(inputs)}
    for instruction in text.strip().removeprefix("{").removesuffix("}").split(";"):
        if (line := instruction.strip()) and not line.startswith(".reg"):
            name, operands = line.split(None, 1)
            parts = [operand.strip() for operand in re.findall(r"\{[^}]*\}|[^,]+", operands)]
            _step(name, parts, registers)
    return [registers[f"${at}"].astype(np.uint16) for at in range(num_outputs)]


def _step(name: str, operands: list[str], registers: Registers) -> None:
    target, *sources = operands
    if target.startswith("{"):
        low, high = target.strip("{}").split(",")
        word = _value(sources[0], registers)
        registers[low.strip()], registers[high.strip()] = (
            (word & 0xFFFF).astype(np.uint16),
            (word >> 16).astype(np.uint16),
        )
        return
    if name == "cvt.f32.f16":
        registers[target] = registers[sources[0]].astype(np.uint16).view(np.float16).astype(np.float32)
        return
    if name == "cvt.rn.bf16x2.f32":
        high, low = (_to_bf16(registers[source].astype(np.float64)) for source in sources)
        registers[target] = low | high << 16
        return
    registers[target] = _result(name, [_value(source, registers) for source in sources])


def _value(text: str, registers: Registers) -> Words:
    return np.uint32(int(text, 0)) * np.ones((), np.uint32) if text[0].isdigit() else registers[text].astype(np.uint32)


def _result(name: str, sources: list[Words]) -> Words:
    first = sources[0]
    match name.split("."):
        case ["mov", "b32"]:
            return first
        case ["and", "b32"]:
            return first & sources[1]
        case ["or", "b32"]:
            return first | sources[1]
        case ["xor", "b32"]:
            return first ^ sources[1]
        case ["shr", "u32"]:
            return first >> sources[1]
        case ["shl", "b32"]:
            return first << sources[1]
        case ["lop3", "b32"]:
            return _lop3(*sources)
        case ["prmt", "b32"]:
            return _prmt(*sources)
        case ["add" | "mul" | "fma" as op, "rn", "f16x2" | "bf16x2" as kind]:
            return _halves(op, kind == "bf16x2", sources)
    raise NotImplementedError(name)


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Look up each bit: bit 4 * a + 2 * b + c of the table."""
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for case in range(8):
        if int(table) >> case & 1:
            out |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return out


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    """Select one of the eight bytes of a and b by each nibble, whose top bit (it repeats a sign) is not supported."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint32)
    for at in range(4):
        chosen = selector >> np.uint32(4 * at) & np.uint32(15)
        assert np.all(chosen < 8)
        byte = both >> (8 * chosen).astype(np.uint64) & np.uint64(255)
        out |= byte.astype(np.uint32) << np.uint32(8 * at)
    return out


def _halves(op: str, bf16: bool, sources: list[Words]) -> Words:
    out = np.zeros(np.broadcast_shapes(*(source.shape for source in sources)), np.uint32)
    for shift in (np.uint32(0), np.uint32(16)):
        bits = [(source >> shift & np.uint32(0xFFFF)).astype(np.uint32) for source in sources]
        if bf16:
            values = [(half << np.uint32(16)).view(np.float32).astype(np.float64) for half in bits]
        else:
            values = [half.astype(np.uint16).view(np.float16).astype(np.float64) for half in bits]
        result = values[0] + values[1] if op == "add" else values[0] * values[1]
        if op == "fma":
            result = result + values[2]
        rounded = _to_bf16(result) if bf16 else result.astype(np.float16).view(np.uint16).astype(np.uint32)
        out |= rounded << shift
    return out


def _to_bf16(values: NDArray[np.float64]) -> Words:
    """Round to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
