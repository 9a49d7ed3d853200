"""The types of PTX as numpy arrays: views of registers, constants, and the rounding of numbers.

Owns how bits become values and values become bits. Knows nothing of instructions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.errors import EmulatorError

Array = NDArray[Any]
Mask = NDArray[np.bool_] | None  # the lanes that run; None: all of them
Step = Callable[[Mask], None]  # one instruction, bound to the registers of a machine

DTYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_, "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64,
    "f16x2": np.uint32, "bf16x2": np.uint32, "f32x2": np.uint64,
    **{f"{sign}{bits}": getattr(np, f"uint{bits}") for sign in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)},
}  # fmt: skip
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NUMBER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+)U?")


def dtype_of(kind: str) -> np.dtype[Any]:
    """Return the dtype of a type of PTX; bf16 and packed types are their bits."""
    if kind not in DTYPES:
        raise EmulatorError(f"unknown type .{kind}")
    return np.dtype(DTYPES[kind])


def is_number(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None


def constant(text: str, kind: str) -> Array:
    """Return an immediate operand, [1]."""
    match = NUMBER.fullmatch(text)
    assert match is not None, text
    digits = match[2]
    is_float = digits[:2].lower() in ("0f", "0d")  # followed by its bits
    bits = int(f"0x{digits[2:]}" if is_float else digits, 0)
    bits = -bits if match[1] else bits
    dtype = dtype_of(kind)
    if kind == "pred":
        return np.array([bits != 0])
    if kind == "f32" and digits[:2].lower() == "0d":
        return np.array([bits], np.uint64).view(np.float64).astype(np.float32)
    return np.array([bits % (1 << 8 * dtype.itemsize)], UNSIGNED[dtype.itemsize]).view(dtype)


def view(register: Array, kind: str) -> Array:
    """View a register as a type of its width, or as its low part."""
    dtype = dtype_of(kind)
    if register.dtype == dtype:
        return register
    if kind == "pred" or register.dtype == np.bool_ or dtype.itemsize > register.dtype.itemsize:
        raise EmulatorError(f"a register of {register.dtype} is used as .{kind}")
    return register.view(dtype)[:: register.dtype.itemsize // dtype.itemsize]


def from_bf16(bits: Array) -> Array:
    """Return float32 values of bf16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: Array) -> Array:
    """Round float32 or float64 values to bf16, to nearest, ties to even."""
    bits = odd_float32(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), 0x7FFF, rounded).astype(np.uint16)


def odd_float32(values: Array) -> Array:
    """Round float64 values to float32 so that a second rounding, to a shorter type, gives the nearest one (to odd)."""
    if values.dtype != np.float64:
        return np.ascontiguousarray(values, np.float32)
    near = values.astype(np.float32)
    bits = near.view(np.uint32)
    back = near.astype(np.float64)
    inexact = (back != values) & np.isfinite(near)
    return (
        (np.where(inexact, (bits - (np.abs(back) > np.abs(values))) | np.uint32(1), bits))
        .astype(np.uint32)
        .view(np.float32)
    )


def flushed(values: Array) -> Array:
    """Replace subnormal float32 numbers by zeros of their sign (.ftz)."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0), values), values)


def halves_of(words: Array, kind: str) -> tuple[Array, Array]:
    """Return the lower and the upper number of f16x2, bf16x2 (as float64) or f32x2 (as float32)."""
    if kind == "f32x2":
        return words.astype(np.uint32).view(np.float32), (words >> np.uint64(32)).astype(np.uint32).view(np.float32)
    low, high = (words & np.uint32(0xFFFF)).astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)
    if kind == "bf16x2":
        return from_bf16(low).astype(np.float64), from_bf16(high).astype(np.float64)
    return low.view(np.float16).astype(np.float64), high.view(np.float16).astype(np.float64)


def packed(low: Array, high: Array, kind: str) -> Array:
    """Round two numbers and pack them: the inverse of `halves_of`."""
    if kind == "f32x2":
        words = [np.asarray(half, np.float32).view(np.uint32).astype(np.uint64) for half in (low, high)]
        return words[0] | words[1] << np.uint64(32)
    if kind == "bf16x2":
        bits = [to_bf16(half).astype(np.uint32) for half in (low, high)]
    else:
        bits = [half.astype(np.float16).view(np.uint16).astype(np.uint32) for half in (low, high)]
    return bits[0] | bits[1] << np.uint32(16)


class Target:
    """A register that an instruction writes; a wider register gets the value extended by the sign of the type."""

    __slots__ = ("view", "wide")

    def __init__(self, register: Array | None, kind: str) -> None:
        self.view: Array | None = None
        self.wide: Array | None = None
        if register is None:
            return
        dtype = dtype_of(kind)
        if register.dtype == dtype or (register.dtype.itemsize == dtype.itemsize and kind != "pred"):
            self.view = register.view(dtype)
        elif register.dtype.itemsize > dtype.itemsize:
            signed = {2: np.int16, 4: np.int32, 8: np.int64}[register.dtype.itemsize]
            self.wide = register.view(signed) if kind[0] == "s" else register
            if kind[0] not in "sub":
                raise EmulatorError(f"a .{kind} is written to a wider register")
        else:
            raise EmulatorError(f"a .{kind} is written to a register of {register.dtype}")

    def put(self, values: Array, mask: Mask) -> None:
        """Write the lanes of the mask."""
        out = self.view if self.view is not None else self.wide
        if out is None:
            return
        if mask is None:
            out[...] = values
        else:
            np.copyto(out, values, casting="unsafe", where=mask)

    def put_running(self, values: Array, mask: Mask) -> None:
        """Write the lanes of the mask; `values` has only those."""
        out = self.view if self.view is not None else self.wide
        if out is None:
            return
        if mask is None:
            out[...] = values
        else:
            out[mask] = values
