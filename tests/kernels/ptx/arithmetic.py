"""Instructions that compute a register from registers, lane by lane; conversions are in conversions.py.

Owns what they compute, as the PTX manual defines it. Sums and products of 16-bit numbers, and fma of float32, are
computed in float64 and rounded to the shorter type: for fma of float32 about one result in 2**29 differs by one unit in
the last place. `approx` instructions are exact but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.parse import Instruction
from tests.kernels.ptx.registers import Registers
from tests.kernels.ptx.values import Array, Step, dtype_of, flushed, from_bf16, halves_of, packed, to_bf16

Function = Callable[..., Array]
IGNORED = {"rn", "approx", "full", "lo", "uni"}  # how a result is rounded: see above
PACKED = ("f16x2", "bf16x2", "f32x2")
BITWISE: dict[str, Function] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
}


def _fma(a: Array, b: Array, c: Array) -> Array:
    if a.dtype != np.float32:
        return a * b + c
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def _wide(x: Array) -> Array:
    """Return integers in their 64 bits, numbers as they are."""
    return x if x.dtype.kind == "f" else x.astype(np.int64 if x.dtype.kind == "i" else np.uint64)


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    quotient = np.abs(_wide(a)) // np.maximum(np.abs(_wide(b)), 1)
    quotient = np.where((a < 0) != (b < 0), -quotient, quotient) if a.dtype.kind == "i" else quotient
    return np.where(b == 0, -1 if a.dtype.kind == "i" else np.iinfo(a.dtype).max, quotient).astype(a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, a - _divide(a, b) * b).astype(a.dtype)


def _largest(a: Array, *others: Array) -> Array:
    for b in others:
        a = np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b)
    return a


def _least(a: Array, *others: Array) -> Array:
    for b in others:
        a = np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b)
    return a


def _rsqrt(a: Array) -> Array:
    return (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype)


def _reciprocal(a: Array) -> Array:
    return np.ones((), a.dtype) / a


def _tanh(a: Array) -> Array:
    return np.tanh(a)


def _copysign(sign: Array, a: Array) -> Array:
    return np.copysign(a, sign)


def _popc(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def _clz(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return (bits - np.ceil(np.log2(a.astype(np.float64) + 1))).astype(np.uint32) if bits < 64 else _clz64(a)


def _clz64(a: Array) -> Array:
    high, low = (a >> np.uint64(32)).astype(np.uint32), a.astype(np.uint32)
    return np.where(high > 0, _clz(high), _clz(low) + np.uint32(32)).astype(np.uint32)


def _reversed_bits(a: Array) -> Array:
    out = np.zeros_like(a)
    bits = 8 * a.dtype.itemsize
    for at in range(bits):
        out |= (a >> a.dtype.type(at) & a.dtype.type(1)) << a.dtype.type(bits - 1 - at)
    return out


ARITHMETIC: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": _fma, "neg": np.negative, "abs": np.abs,
    "max": _largest, "min": _least, "div": _divide, "rem": _remainder, "sqrt": np.sqrt, "rsqrt": _rsqrt,
    "rcp": _reciprocal, "ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": _tanh,
    "copysign": _copysign,
}  # fmt: skip
OF_BITS: dict[str, Function] = {"popc": _popc, "clz": _clz, "brev": _reversed_bits}


def build_arithmetic(instruction: Instruction, registers: Registers) -> Step:
    """Bind an instruction that computes numbers: add, fma, max, ex2, ..."""
    name, *flags, kind = instruction.parts
    if name in ("mul", "mad") and any(part in flags for part in ("lo", "hi", "wide")):
        return _integer_product(instruction, registers)
    function = ARITHMETIC[name]
    if kind in PACKED:
        function = partial(_of_halves, function, kind)
    elif kind == "bf16":
        function = partial(_of_bf16, function)
    elif kind == "f16":
        function = partial(_of_f16, function)
    mixed = flags[-1:] == ["f32"] and kind in ("f16", "bf16")  # add.f32.bf16: the last operand is float32
    if mixed:
        flags.pop()
        return _mixed(instruction, registers, ARITHMETIC[name], kind)
    for flag in flags:
        if flag == "ftz":
            function = partial(_flushing, function)
        elif flag == "relu":
            function = partial(_at_least_zero, function)
        elif flag == "sat":
            function = partial(_saturating, function)
        elif flag == "NaN":
            function = partial(_propagating_nan, function)
        elif flag not in IGNORED:
            raise EmulatorError(f"unknown .{flag} in {instruction}")
    target, *sources = instruction.operands
    return registers.computing(function, target, kind, [(source, kind) for source in sources])


def _of_halves(function: Function, kind: str, *words: Array) -> Array:
    low, high = zip(*(halves_of(word, kind) for word in words), strict=True)
    return packed(function(*low), function(*high), kind)


def _of_bf16(function: Function, *bits: Array) -> Array:
    return to_bf16(function(*(from_bf16(half).astype(np.float64) for half in bits)))


def _of_f16(function: Function, *halves: Array) -> Array:
    return function(*(half.astype(np.float64) for half in halves)).astype(np.float16)


def _flushing(function: Function, *values: Array) -> Array:
    return flushed(function(*(flushed(value) for value in values)))


def _at_least_zero(function: Function, *values: Array) -> Array:
    result = function(*values)
    return np.maximum(result, np.zeros((), result.dtype))


def _saturating(function: Function, *values: Array) -> Array:
    if values[0].dtype.kind == "f":
        result = function(*values)
        return np.where(np.isnan(result), np.zeros((), result.dtype), np.clip(result, 0, 1))
    info = np.iinfo(values[0].dtype)
    return np.clip(function(*(_wide(value) for value in values)), info.min, info.max).astype(values[0].dtype)


def _propagating_nan(function: Function, *values: Array) -> Array:
    any_nan = np.logical_or.reduce(np.broadcast_arrays(*(np.isnan(value) for value in values)))
    result = function(*values)
    return np.where(any_nan, result.dtype.type(np.nan), result)


def _mixed(instruction: Instruction, registers: Registers, function: Function, kind: str) -> Step:
    def compute(*values: Array) -> Array:
        parts = [(from_bf16(v) if kind == "bf16" else v).astype(np.float64) for v in values[:-1]]
        return function(*parts, values[-1].astype(np.float64)).astype(np.float32)

    target, *sources = instruction.operands
    kinds = [kind] * (len(sources) - 1) + ["f32"]
    return registers.computing(compute, target, "f32", list(zip(sources, kinds, strict=True)))


def _integer_product(instruction: Instruction, registers: Registers) -> Step:
    _name, part, kind = instruction.parts
    target, a, b, *added = instruction.operands
    bits = int(kind[1:])
    result = f"{kind[0]}{2 * bits}" if part == "wide" else kind
    dtype = dtype_of(result)
    if part == "hi" and bits == 64:
        raise EmulatorError(f"unknown {instruction}")

    def compute(x: Array, y: Array, *z: Array) -> Array:
        product: Array
        if part == "lo":
            product = x * y
        else:
            product = _wide(x) * _wide(y)
            product = (product >> product.dtype.type(bits) if part == "hi" else product).astype(dtype)
        return product + z[0] if z else product

    sources = [(a, kind), (b, kind), *((z, result) for z in added)]
    return registers.computing(compute, target, result, sources)


def build_bitwise(instruction: Instruction, registers: Registers) -> Step:
    """Bind and, or, xor, not."""
    name, kind = instruction.parts
    target, *sources = instruction.operands
    return registers.computing(BITWISE[name], target, kind, [(source, kind) for source in sources])


def build_of_bits(instruction: Instruction, registers: Registers) -> Step:
    """Bind popc, clz, brev."""
    name, kind = instruction.parts
    target, source = instruction.operands
    return registers.computing(OF_BITS[name], target, kind if name == "brev" else "u32", [(source, f"u{kind[1:]}")])


def build_shift(instruction: Instruction, registers: Registers) -> Step:
    """Bind shl and shr; a count beyond the width gives zeros, or signs."""
    name, kind = instruction.parts
    target, source, count = instruction.operands
    bits = int(kind[1:])
    as_type = dtype_of(kind).type
    function = np.left_shift if name == "shl" else np.right_shift

    def compute(x: Array, n: Array) -> Array:
        shifted: Array = function(x, np.minimum(n, bits - 1).astype(as_type))
        return shifted if kind[0] == "s" else np.where(n >= bits, as_type(0), shifted)

    kind = f"u{bits}" if name == "shl" else kind
    if (count_known := registers.known(count)) is not None and count_known < bits:
        fixed = np.array([count_known], dtype_of(kind))
        return registers.computing(lambda x: function(x, fixed), target, kind, [(source, kind)])
    return registers.computing(compute, target, kind, [(source, kind), (count, "u32")])


def build_funnel_shift(instruction: Instruction, registers: Registers) -> Step:
    """Bind shf: shift two words together and take the upper (.l) or the lower (.r) one."""
    _, direction, mode, _ = instruction.parts
    target, low, high, count = instruction.operands

    def compute(a: Array, b: Array, n: Array) -> Array:
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        shift = (n & np.uint32(31) if mode == "wrap" else np.minimum(n, np.uint32(32))).astype(np.uint64)
        return (both >> (np.uint64(32) - shift if direction == "l" else shift)).astype(np.uint32)

    return registers.computing(compute, target, "b32", [(low, "u32"), (high, "u32"), (count, "u32")])


def build_field(instruction: Instruction, registers: Registers) -> Step:
    """Bind bfe: extract a field of bits, extended by zeros or by its sign."""
    _, kind = instruction.parts
    target, source, start, length = instruction.operands
    bits = int(kind[1:])

    def compute(x: Array, position: Array, num_bits: Array) -> Array:
        at, width = (position & np.uint32(255)).astype(np.int64), (num_bits & np.uint32(255)).astype(np.int64)
        value = np.where(at < bits, x.astype(np.uint64) >> np.minimum(at, 63).astype(np.uint64), np.uint64(0))
        ones = (np.uint64(1) << np.minimum(width, 63).astype(np.uint64)) - np.uint64(1)
        ones = np.where(width >= 64, np.uint64(2**64 - 1), ones)
        value &= ones
        if kind[0] == "s":
            top = np.minimum(at + width - 1, bits - 1).astype(np.uint64)
            negative = (width > 0) & ((x.astype(np.uint64) >> top & np.uint64(1)) > 0)
            inside = np.clip(bits - at, 0, width)  # what lies beyond the word is filled with the sign too
            ones = np.where(
                inside >= 64, ones, (np.uint64(1) << np.minimum(inside, 63).astype(np.uint64)) - np.uint64(1)
            )
            value = np.where(negative, value | ~ones, value)
        return value.astype(dtype_of(f"u{bits}"))

    return registers.computing(compute, target, f"u{bits}", [(source, f"u{bits}"), (start, "u32"), (length, "u32")])


def build_field_insert(instruction: Instruction, registers: Registers) -> Step:
    """Bind bfi: replace a field of the second operand by the low bits of the first."""
    _, kind = instruction.parts
    target, source, base, start, length = instruction.operands
    bits = int(kind[1:])

    def compute(x: Array, y: Array, position: Array, num_bits: Array) -> Array:
        at, width = (position & np.uint32(255)).astype(np.uint64), (num_bits & np.uint32(255)).astype(np.uint64)
        ones = np.where(
            width >= 64, np.uint64(2**64 - 1), (np.uint64(1) << np.minimum(width, np.uint64(63))) - np.uint64(1)
        )
        field = np.where(at < bits, ones << np.minimum(at, np.uint64(63)), np.uint64(0))
        placed = x.astype(np.uint64) << np.minimum(at, np.uint64(63))
        return (placed & field | y.astype(np.uint64) & ~field).astype(dtype_of(kind))

    return registers.computing(compute, target, kind, [(source, kind), (base, kind), (start, "u32"), (length, "u32")])


def build_lop3(instruction: Instruction, registers: Registers) -> Step:
    """Bind lop3: look up each bit, number 4 * a + 2 * b + c of the table."""
    target, *sources, table_text = instruction.operands
    table = int(table_text.rstrip("U"), 0)

    def compute(a: Array, b: Array, c: Array) -> Array:
        out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for case in range(8):
            if table >> case & 1:
                out |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        return out

    return registers.computing(compute, target, "b32", [(source, "b32") for source in sources])


def build_permute(instruction: Instruction, registers: Registers) -> Step:
    """Bind prmt: each nibble selects a byte of two words, or repeats its sign."""
    if len(instruction.parts) != 2:
        raise EmulatorError(f"unknown {instruction}")
    target, low, high, selector = instruction.operands

    def compute(a: Array, b: Array, nibbles: Array) -> Array:
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        out = np.zeros(np.broadcast_shapes(both.shape, nibbles.shape), np.uint32)
        for at in range(4):
            chosen = nibbles >> np.uint32(4 * at) & np.uint32(15)
            byte = (both >> (8 * (chosen & np.uint32(7))).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            out |= np.where(chosen & np.uint32(8), sign, byte) << np.uint32(8 * at)
        return out

    return registers.computing(compute, target, "b32", [(low, "b32"), (high, "b32"), (selector, "b32")])
