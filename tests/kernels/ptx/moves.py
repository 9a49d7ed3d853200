"""Instructions that compare, select and copy registers: setp, selp, mov, cvta.

Owns what they compute, as the PTX manual defines it.
"""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx.arithmetic import BITWISE, PACKED, Function
from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.parse import Instruction
from tests.kernels.ptx.registers import Registers
from tests.kernels.ptx.values import Array, Mask, Step, dtype_of, flushed, from_bf16, halves_of

COMPARISONS: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _compare(name: str, a: Array, b: Array) -> Array:
    """Compare; with NaN the ordered comparisons are false and the unordered ones (equ, ltu, ...) true."""
    if a.dtype.kind != "f":
        return np.asarray(COMPARISONS[name](a, b))
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return unordered if name == "nan" else ~unordered
    result = COMPARISONS[name.removesuffix("u")](a, b)
    return result | unordered if name.endswith("u") else result & ~unordered


def build_setp(instruction: Instruction, registers: Registers) -> Step:
    """Bind setp: one predicate, or one for each half (f16x2), perhaps combined with another predicate."""
    _, name, *flags, kind = instruction.parts
    names, a, b, *other = instruction.operands
    targets = [registers.target(target.strip(), "pred") for target in names.split("|")]
    combine = next((BITWISE[flag] for flag in flags if flag in BITWISE), None)
    ftz = "ftz" in flags
    if (
        set(flags) - set(BITWISE) - {"ftz"}
        or (combine is None) != (not other)
        or name.removesuffix("u") not in (*COMPARISONS, "num", "nan")
    ):
        raise EmulatorError(f"unknown {instruction}")
    read = f"u{kind[1:]}" if kind[0] == "b" and kind not in ("bf16", "bf16x2") else kind
    x, y = registers.source(a, read), registers.source(b, read)
    third = registers.source(other[0].removeprefix("!"), "pred") if other else None

    def values(operand: Array) -> tuple[Array, ...]:
        if kind in PACKED:
            return halves_of(operand, kind)
        operand = from_bf16(operand) if kind == "bf16" else operand
        return (flushed(operand) if ftz else operand,)

    def step(mask: Mask) -> None:
        results = [_compare(name, first, second) for first, second in zip(values(x), values(y), strict=True)]
        if combine is not None and third is not None:
            results = [combine(result, ~third if other[0][0] == "!" else third) for result in results]
        if len(targets) > len(results):
            results.append(~results[0])
        for target, result in zip(targets, results, strict=True):
            target.put(result, mask)

    return step


def build_select(instruction: Instruction, registers: Registers) -> Step:
    """Bind selp."""
    _, kind = instruction.parts
    target, a, b, predicate = instruction.operands
    kind = f"b{dtype_of(kind).itemsize * 8}"
    return registers.computing(
        lambda x, y, p: np.where(p, x, y), target, kind, [(a, kind), (b, kind), (predicate, "pred")]
    )


def build_move(instruction: Instruction, registers: Registers) -> Step:
    """Bind mov and cvta: a copy, or the parts of a register to or from a vector."""
    kind = instruction.parts[-1]
    target, source = instruction.operands
    if kind == "pred":
        return registers.computing(lambda x: x, target, kind, [(source, kind)])
    bits = dtype_of(kind).itemsize * 8
    if target.startswith("{"):
        names = registers.names(target)
        part = f"b{bits // len(names)}"
        targets, word = [registers.target(name, part) for name in names], registers.source(source, f"b{bits}")
        shifts = [word.dtype.type(at * bits // len(names)) for at in range(len(names))]
        narrow = dtype_of(part)

        def unpack(mask: Mask) -> None:
            for out, values in zip(targets, [(word >> shift).astype(narrow) for shift in shifts], strict=True):
                out.put(values, mask)

        return unpack
    if source.startswith("{"):
        names = registers.names(source)
        parts = [(name, f"b{bits // len(names)}") for name in names]
        whole = dtype_of(f"b{bits}").type

        def join(*values: Array) -> Array:
            out = values[0].astype(whole)
            for at, value in enumerate(values[1:], 1):
                out = out | value.astype(whole) << whole(at * bits // len(names))
            return out

        return registers.computing(join, target, f"b{bits}", parts)
    return registers.computing(lambda x: x, target, f"b{bits}", [(source, f"b{bits}")])
