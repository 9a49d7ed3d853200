"""Instructions on registers, against Python's integers, exact fractions, and torch's types."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.handwritten import compute

WORD = 1 << 32
EDGES = (0, 1, 2, 31, 32, 33, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7F800000, 0x7FC00000, 0x3F800000, 0x00000001)
words = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, WORD - 1)), min_size=8, max_size=8)


def signed(word: int) -> int:
    return word - WORD if word >> 31 else word


def permute(a: int, b: int, selector: int) -> int:
    pool = [(a | b << 32) >> 8 * at & 255 for at in range(8)]
    chosen = [pool[selector >> 4 * at & 7] for at in range(4)]
    signs = [selector >> 4 * at & 8 for at in range(4)]
    return sum(
        (255 * (byte >> 7) if sign else byte) << 8 * at
        for at, (byte, sign) in enumerate(zip(chosen, signs, strict=True))
    )


def field(a: int, start: int, length: int) -> int:
    return (a >> (start & 255)) & ((1 << (length & 255)) - 1)


def signed_field(a: int, start: int, length: int) -> int:
    start, length = start & 255, length & 255
    bits = [a >> min(at, start + length - 1, 31) & 1 for at in range(start, start + 32)] if length else [0] * 32
    return sum((bits[at] if at < length else bits[length - 1] if length else 0) << at for at in range(32))


def table(a: int, b: int, c: int) -> int:
    return sum((0x6A >> (4 * (a >> at & 1) + 2 * (b >> at & 1) + (c >> at & 1)) & 1) << at for at in range(32))


def quotient(a: int, b: int) -> int:
    return int(Fraction(signed(a), signed(b))) if b else -1


INTEGERS: dict[str, Callable[[int, int, int], int]] = {
    "add.s32 %r3, %r0, %r1": lambda a, b, c: a + b,
    "sub.s32 %r3, %r0, %r1": lambda a, b, c: a - b,
    "mul.lo.s32 %r3, %r0, %r1": lambda a, b, c: a * b,
    "mul.hi.u32 %r3, %r0, %r1": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 %r3, %r0, %r1": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mad.lo.s32 %r3, %r0, %r1, %r2": lambda a, b, c: a * b + c,
    "min.s32 %r3, %r0, %r1": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 %r3, %r0, %r1": lambda a, b, c: max(a, b),
    "min.relu.s32 %r3, %r0, %r1": lambda a, b, c: max(0, min(signed(a), signed(b))),
    "div.s32 %r3, %r0, %r1": lambda a, b, c: quotient(a, b),
    "rem.s32 %r3, %r0, %r1": lambda a, b, c: signed(a) - quotient(a, b) * signed(b) if b else signed(a),
    "shl.b32 %r3, %r0, %r1": lambda a, b, c: a << min(b, 32),
    "shr.u32 %r3, %r0, %r1": lambda a, b, c: a >> min(b, 32),
    "shr.s32 %r3, %r0, %r1": lambda a, b, c: signed(a) >> min(b, 31),
    "shf.l.wrap.b32 %r3, %r0, %r1, %r2": lambda a, b, c: ((b << 32 | a) << c % 32) >> 32,
    "shf.r.wrap.b32 %r3, %r0, %r1, %r2": lambda a, b, c: (b << 32 | a) >> c % 32,
    "bfe.u32 %r3, %r0, %r1, %r2": field,
    "bfe.s32 %r3, %r0, %r1, %r2": signed_field,
    "prmt.b32 %r3, %r0, %r1, %r2": permute,
    "lop3.b32 %r3, %r0, %r1, %r2, 0x6a": table,
    "not.b32 %r3, %r0": lambda a, b, c: ~a,
    "neg.s32 %r3, %r0": lambda a, b, c: -signed(a),
    "popc.b32 %r3, %r0": lambda a, b, c: a.bit_count(),
    "clz.b32 %r3, %r0": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %r3, %r0": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "setp.lt.s32 %p0, %r0, %r1; selp.b32 %r3, %r2, 7, %p0": lambda a, b, c: c if signed(a) < signed(b) else 7,
    "cvt.s8.s32 %r3, %r0": lambda a, b, c: ((a & 255) ^ 128) - 128,
    "cvt.u16.u32 %rs0, %r0; cvt.u32.u16 %r3, %rs0": lambda a, b, c: a & 0xFFFF,
    "mov.b32 {%rs0, %rs1}, %r0; mov.b32 %r3, {%rs1, %rs0}": lambda a, b, c: a >> 16 | a << 16,
}


@pytest.mark.parametrize("text", INTEGERS)
@given(a=words, b=words, c=words)
@settings(max_examples=15)
def test_integers(text: str, a: list[int], b: list[int], c: list[int]):
    arrays = {f"%r{number}": np.array(values, np.uint32) for number, values in enumerate((a, b, c))}
    expected = [INTEGERS[text](*values) % WORD for values in zip(a, b, c, strict=True)]
    assert compute(f"{text};", arrays, "%r3").tolist() == expected


def test_products_of_64_bits():
    a, b = np.array([0xFFFFFFFF, 3, 0x80000000], np.uint32), np.array([0xFFFFFFFF, 5, 2], np.uint32)
    unsigned = compute("mul.wide.u32 %rd3, %r0, %r1;", {"%r0": a, "%r1": b}, "%rd3")
    assert unsigned.tolist() == [0xFFFFFFFF**2, 15, 1 << 32]
    text = "mov.b64 %rd4, 100; mad.wide.s32 %rd3, %r0, %r1, %rd4;"
    assert compute(text, {"%r0": a, "%r1": b}, "%rd3").view(np.int64).tolist() == [101, 115, 100 - (1 << 32)]


def test_fma_rounds_once():
    a = np.array([1 + 2**-23, 3.0, 1e-30, 2.0**127], np.float32)
    c = np.array([-1 - 2**-22, 1e-9, 1e-38, -(2.0**127)], np.float32)
    result = compute("fma.rn.f32 %r3, %r0, %r0, %r1;", {"%r0": a, "%r1": c}, "%r3").view(np.float32)
    for x, z, y in zip(a[:3], c[:3], result[:3], strict=True):
        exact = Fraction(float(x)) ** 2 + Fraction(float(z))
        neighbours = [np.nextafter(y, np.float32(at)) for at in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(y)) - exact) <= abs(Fraction(float(other)) - exact) for other in neighbours)
    assert np.isinf(result[3])


halves = st.lists(st.integers(0, 0xFFFF), min_size=16, max_size=16)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize(("kind", "dtype"), [("f16x2", torch.float16), ("bf16x2", torch.bfloat16)])
@given(a=halves, b=halves, c=halves)
@settings(max_examples=15)
def test_pairs_of_halves(kind: str, dtype: torch.dtype, name: str, a: list[int], b: list[int], c: list[int]):
    """An exact result is rounded once; where float64 is not exact, at most by the other neighbour's half."""
    numbers = [np.array(values, np.uint16) for values in (a, b, c)]
    third = ", %r2" if name == "fma" else ""
    arrays = {f"%r{at}": values.view(np.uint32) for at, values in enumerate(numbers)}
    result = compute(f"{name}.rn.{kind} %r3, %r0, %r1{third};", arrays, "%r3")
    x, y, z = (torch.from_numpy(values.view(np.int16)).view(dtype).double() for values in numbers)
    exact = {"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + z}[name]
    got = torch.from_numpy(result.view(np.int16).copy()).view(dtype)
    for value, number in zip(got.tolist(), exact.tolist(), strict=True):
        assert (math.isnan(value) and math.isnan(number)) or value == nearest(number, dtype)


def nearest(number: float, dtype: torch.dtype) -> float:
    """Round float64 to a half by comparing with its neighbours; ties to even."""
    if math.isnan(number) or math.isinf(number):
        return number
    start = torch.tensor(number, dtype=torch.float64).to(dtype)
    bits = int(start.view(torch.int16)) & 0xFFFF
    around = [bits, (bits & 0x8000) | ((bits & 0x7FFF) + 1), (bits & 0x8000) | max((bits & 0x7FFF) - 1, 0)]
    values = torch.tensor(around, dtype=torch.int32).to(torch.int16).view(dtype).double().tolist()
    limit = 2 * torch.finfo(dtype).max - values_below(torch.finfo(dtype).max, dtype)
    finite = [
        (math.copysign(limit, value) if math.isinf(value) else value, value, code)
        for value, code in zip(values, around, strict=True)
    ]
    usable = [entry for entry in finite if not math.isnan(entry[1])]
    return min(usable, key=lambda entry: (abs(Fraction(entry[0]) - Fraction(number)), entry[2] & 1))[1]


def values_below(number: float, dtype: torch.dtype) -> float:
    return float((torch.tensor(number, dtype=dtype).view(torch.int16) - 1).view(dtype))


@given(values=st.lists(st.floats(width=32), min_size=8, max_size=8))
@settings(max_examples=40)
def test_conversions(values: list[float]):
    x = np.array(values, np.float32)
    t = torch.from_numpy(x)
    given_ = {"%r0": x, "%r1": x[::-1].copy()}
    packed = compute("cvt.rn.bf16x2.f32 %r3, %r0, %r1;", given_, "%r3")
    low = (torch.from_numpy((packed & 0xFFFF).astype(np.uint16).view(np.int16))).view(torch.bfloat16)
    assert torch.equal(low.nan_to_num(7), t.flip(0).bfloat16().nan_to_num(7))
    half = compute("cvt.rn.f16.f32 %rs0, %r0;", given_, "%rs0").view(np.float16)
    assert np.array_equal(half, t.half().numpy(), equal_nan=True)
    whole = compute("cvt.rzi.s32.f32 %r3, %r0;", given_, "%r3").view(np.int32)
    assert whole.tolist() == [0 if math.isnan(v) else int(max(-(2.0**31), min(v, 2.0**31 - 1))) for v in x.tolist()]


def test_comparisons_with_nan():
    a, b = np.array([1, np.nan, 2], np.float32), np.array([1, 1, np.nan], np.float32)
    for name, expected in {
        "eq": [1, 0, 0],
        "equ": [1, 1, 1],
        "ne": [0, 0, 0],
        "neu": [0, 1, 1],
        "nan": [0, 1, 1],
    }.items():
        assert compute(f"setp.{name}.f32 %p3, %r0, %r1;", {"%r0": a, "%r1": b}, "%p3").tolist() == expected, name


@pytest.mark.parametrize(
    "text", ["add.rp.f32 %r1, %r0, %r0", "cvt.rn.tf32.f32 %r1, %r0", "prmt.f4e.b32 %r1, %r0, %r0, %r0"]
)
def test_an_unknown_form_fails(text: str):
    with pytest.raises(EmulatorError, match="unknown"):
        compute(f"{text};", {"%r0": np.zeros(1, np.uint32)}, "%r1")
