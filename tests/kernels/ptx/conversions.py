"""The instruction cvt: between integers and numbers of all widths, and two numbers packed into a word.

Owns its rounding and clamping. Knows nothing of other instructions.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.parse import Instruction
from tests.kernels.ptx.registers import Registers
from tests.kernels.ptx.values import Array, Step, dtype_of, flushed, from_bf16, packed, to_bf16

ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
FLAGS = {"rn", "rz", "rna", "sat", "satfinite", "ftz", "relu", *ROUNDED}
FP8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}
INTEGERS = "sub"


def build_cvt(instruction: Instruction, registers: Registers) -> Step:
    """Bind cvt."""
    _, *flags, to, of = instruction.parts
    if set(flags) - FLAGS:
        raise EmulatorError(f"unknown {instruction}")
    target, *sources = instruction.operands
    if to in FP8 and of == "f32":
        return registers.computing(
            lambda high, low: _to_fp8(low, high, to), target, "b16", [(source, "f32") for source in sources]
        )
    if of in FP8 and to == "f16x2":
        return registers.computing(lambda pair: _from_fp8(pair, of), target, "b32", [(sources[0], "u16")])
    if to in ("f16x2", "bf16x2") and of == "f32" and len(sources) == 2:
        relu = "relu" in flags

        def pack(high: Array, low: Array) -> Array:
            low, high = (np.maximum(half, np.float32(0)) if relu else half for half in (low, high))
            return packed(low, high, to)

        _require_rounding(instruction, flags, {"rn", "relu"})
        return registers.computing(pack, target, "b32", [(source, "f32") for source in sources])
    if len(sources) != 1 or {to, of} & {"tf32", *FP8, "f16x2", "bf16x2"}:
        raise EmulatorError(f"unknown {instruction}")
    if to[0] in INTEGERS and to != "bf16":
        if of[0] in INTEGERS and of != "bf16":
            return registers.computing(lambda x: _integer(x, to, "sat" in flags), target, to, [(sources[0], of)])
        how = next((flag for flag in flags if flag in ROUNDED), None)
        if how is None:
            raise EmulatorError(f"no rounding in {instruction}")
        return registers.computing(lambda x: _to_integer(_number(x, of), to, how), target, to, [(sources[0], of)])
    _require_rounding(instruction, flags, {"rn", "ftz", "sat", "relu", *ROUNDED})
    return registers.computing(lambda x: _to_number(_number(x, of), to, flags), target, to, [(sources[0], of)])


def _require_rounding(instruction: Instruction, flags: list[str], allowed: set[str]) -> None:
    if set(flags) - allowed:
        raise EmulatorError(f"unknown {instruction}")


def _number(x: Array, kind: str) -> Array:
    return from_bf16(x) if kind == "bf16" else x


def _integer(x: Array, to: str, saturate: bool) -> Array:
    """Convert integers: sign-extend, cut off, or clamp."""
    dtype = dtype_of(to)
    if saturate:
        info = np.iinfo(dtype)
        if x.dtype == np.uint64 or dtype == np.uint64:
            raise EmulatorError("cvt.sat of 64 bits without a sign")
        return np.clip(x.astype(np.int64), info.min, info.max).astype(dtype)
    return x.astype(dtype)


def _to_integer(x: Array, to: str, how: str) -> Array:
    """Round numbers to integers and clamp them; NaN gives 0."""
    dtype = dtype_of(to)
    info = np.iinfo(dtype)
    rounded = np.nan_to_num(ROUNDED[how](x.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
    inside = np.where((rounded >= float(info.min)) & (rounded < float(info.max) + 1), rounded, 0).astype(dtype)
    if info.bits == 64:
        inside = np.where(rounded >= float(info.max), dtype.type(info.max), inside)
    inside = np.where(rounded > float(info.max), dtype.type(info.max), inside)
    return np.where(rounded < float(info.min), dtype.type(info.min), inside)


def _to_number(x: Array, to: str, flags: list[str]) -> Array:
    """Round numbers or integers to a shorter or longer number."""
    whole = next((ROUNDED[flag] for flag in flags if flag in ROUNDED), None)
    if whole is not None:
        x = whole(x)
    if "ftz" in flags and x.dtype == np.float32:
        x = flushed(x)
    if "relu" in flags:
        x = np.maximum(x, np.zeros((), x.dtype))
    if "sat" in flags:
        x = np.where(np.isnan(x), np.zeros((), x.dtype), np.clip(x, 0, 1))
    if to == "bf16":
        return to_bf16(x if x.dtype == np.float32 else x.astype(np.float64))
    if to == "f16" and x.dtype.kind != "f":
        return x.astype(np.float64).astype(np.float16)
    return x.astype(dtype_of(to))


def _to_fp8(low: Array, high: Array, kind: str) -> Array:
    """Round two numbers to 8 bits, clamped to the largest finite one (.satfinite)."""
    limit = float(torch.finfo(FP8[kind]).max)
    codes = []
    for half in (low, high):
        inside = np.where(np.isnan(half), half, np.clip(half, -limit, limit)).astype(np.float32)
        codes.append(torch.from_numpy(inside).to(FP8[kind]).view(torch.uint8).numpy().astype(np.uint16))
    return codes[0] | codes[1] << np.uint16(8)


def _from_fp8(pair: Array, kind: str) -> Array:
    halves = [(pair >> np.uint16(shift) & np.uint16(255)).astype(np.uint8) for shift in (0, 8)]
    low, high = (torch.from_numpy(half).view(FP8[kind]).float().numpy() for half in halves)
    return packed(low, high, "f16x2")
