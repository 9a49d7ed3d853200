"""Each instruction against a formula of its own: Python's integers and fractions, or torch's conversions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.kernels.ptx.errors import EmulatorError
from tests.kernels.ptx.snippets import Words, compute
from tests.kernels.seeds import SEED, generator

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = [0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0x80000001, M32 - 1, M32]
FLOAT_EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    0.5,
    2.5,
    3.5,
    -2.5,
    1e-40,
    -1e-40,
    3e38,
    -3e38,
    math.inf,
    -math.inf,
    math.nan,
    65504,
    65520,
    70000,
    1e-7,
    447,
    449,
    1e10,
    -1e10,
]


def words(num: int, seed: int, edges: list[int] = EDGES) -> Words:
    random = torch.randint(-(2**63), 2**63 - 1, (num,), generator=generator(seed)).numpy().view(np.uint64)
    return np.concatenate([np.array(edges, np.uint64), random])


def floats(num: int, seed: int) -> Words:
    """Return bits of float32 numbers of all sizes."""
    random = torch.randn(num, generator=generator(seed)) * 10 ** torch.randint(-6, 7, (num,), generator=generator(seed))
    edges = np.array(FLOAT_EDGES, np.float32)
    return np.concatenate([edges, random.numpy().astype(np.float32)]).view(np.uint32).astype(np.uint64)


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def permute(a: int, b: int, selector: int) -> int:
    pool = [(a | b << 32) >> 8 * at & 255 for at in range(8)]
    out = 0
    for at in range(4):
        nibble = selector >> 4 * at & 15
        byte = pool[nibble & 7]
        out |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * at
    return out


def field(a: int, at: int, length: int, is_signed: bool) -> int:
    at, length = at & 255, length & 255
    sign = 0 if not is_signed or length == 0 else a >> min(at + length - 1, 31) & 1
    out = 0
    for i in range(32):
        out |= (a >> at + i & 1 if i < length and at + i < 32 else sign) << i
    return out


def inserted(a: int, b: int, at: int, length: int) -> int:
    for i in range(length & 255):
        if (at & 255) + i < 32:
            bit = (at & 255) + i
            b = b & ~(1 << bit) | (a >> i & 1) << bit
    return b


INTEGERS: dict[str, tuple[int, Callable[..., int]]] = {
    "add.s32": (2, lambda a, b: a + b),
    "sub.u32": (2, lambda a, b: a - b),
    "mul.lo.s32": (2, lambda a, b: a * b),
    "mul.hi.u32": (2, lambda a, b: a * b >> 32),
    "mul.hi.s32": (2, lambda a, b: signed(a) * signed(b) >> 32),
    "mad.lo.s32": (3, lambda a, b, c: a * b + c),
    "min.s32": (2, lambda a, b: min(signed(a), signed(b))),
    "max.u32": (2, max),
    "max.s32": (2, lambda a, b: max(signed(a), signed(b))),
    "min.relu.s32": (2, lambda a, b: max(min(signed(a), signed(b)), 0)),
    "max.relu.s32": (2, lambda a, b: max(signed(a), signed(b), 0)),
    "div.u32": (2, lambda a, b: a // b if b else M32),
    "div.s32": (2, lambda a, b: divide(signed(a), signed(b)) if b else M32),
    "rem.u32": (2, lambda a, b: a % b if b else a),
    "rem.s32": (2, lambda a, b: signed(a) - divide(signed(a), signed(b)) * signed(b) if b else a),
    "neg.s32": (1, lambda a: -a),
    "abs.s32": (1, lambda a: abs(signed(a))),
    "not.b32": (1, lambda a: ~a),
    "and.b32": (2, lambda a, b: a & b),
    "xor.b32": (2, lambda a, b: a ^ b),
    "popc.b32": (1, lambda a: a.bit_count()),
    "clz.b32": (1, lambda a: 32 - a.bit_length()),
    "brev.b32": (1, lambda a: int(f"{a:032b}"[::-1], 2)),
    "shl.b32": (2, lambda a, n: a << n if n < 32 else 0),
    "shr.u32": (2, lambda a, n: a >> min(n, 32)),
    "shr.s32": (2, lambda a, n: signed(a) >> min(n, 32)),
    "shf.l.wrap.b32": (3, lambda a, b, n: (b << 32 | a) << (n & 31) >> 32),
    "shf.r.wrap.b32": (3, lambda a, b, n: (b << 32 | a) >> (n & 31)),
    "shf.r.clamp.b32": (3, lambda a, b, n: (b << 32 | a) >> min(n, 32)),
    "bfe.u32": (3, lambda a, at, n: field(a, at, n, False)),
    "bfe.s32": (3, lambda a, at, n: field(a, at, n, True)),
    "bfi.b32": (4, inserted),
    "prmt.b32": (3, permute),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    count, formula = INTEGERS[name]
    inputs = [words(400, SEED + at) & np.uint64(M32) for at in range(count)]
    inputs = [np.concatenate([given, np.roll(given[:14], at * 5)]) for at, given in enumerate(inputs)]
    if name.startswith(("sh", "bf")):
        inputs[-1][::2] %= np.uint64(40)  # half of the counts are about as large as the width
    if name.startswith("bf"):
        inputs[-2][: len(inputs[-2]) // 2] %= np.uint64(40)
    operands = ", ".join(f"%r{10 + at}" for at in range(count))
    results = compute(f"{name} %r30, {operands};", inputs, "b32")
    for *given, result in zip(*(array.tolist() for array in (*inputs, results)), strict=True):
        assert result == formula(*given) & M32, [hex(x) for x in given]


WIDE: dict[str, Callable[[int, int], int]] = {
    "add.s64 %rd30, %rd10, %rd11;": lambda a, b: a + b,
    "mul.lo.s64 %rd30, %rd10, %rd11;": lambda a, b: a * b,
    "mul.wide.u32 %rd30, %r10, %r11;": lambda a, b: (a & M32) * (b & M32),
    "mul.wide.s32 %rd30, %r10, %r11;": lambda a, b: signed(a) * signed(b),
    "mad.wide.s32 %rd30, %r10, %r11, %rd10;": lambda a, b: signed(a) * signed(b) + a,
    "mad.wide.u32 %rd30, %r10, %r11, %rd10;": lambda a, b: (a & M32) * (b & M32) + a,
    "shr.s64 %rd30, %rd10, 7;": lambda a, b: signed(a, 64) >> 7,
    "shl.b64 %rd30, %rd10, 60;": lambda a, b: a << 60,
    "min.s64 %rd30, %rd10, %rd11;": lambda a, b: min(signed(a, 64), signed(b, 64)),
    "bfe.u64 %rd30, %rd10, 35, 20;": lambda a, b: a >> 35 & 0xFFFFF,
    "popc.b64 %r30, %rd10; cvt.u64.u32 %rd30, %r30;": lambda a, b: a.bit_count(),
    "clz.b64 %r30, %rd10; cvt.u64.u32 %rd30, %r30;": lambda a, b: 64 - a.bit_length(),
    "cvt.s64.s32 %rd30, %r10;": lambda a, b: signed(a),
    "cvt.s8.s32 %r30, %r10; cvt.s64.s32 %rd30, %r30;": lambda a, b: signed(a, 8),
    "cvt.u16.u32 %rs19, %r10; cvt.u64.u16 %rd30, %rs19;": lambda a, b: a & 0xFFFF,
    "cvt.s32.s8 %r30, %r10; cvt.s64.s32 %rd30, %r30;": lambda a, b: signed(a, 8),
    "cvt.s16.s8 %rs19, %rs10; cvt.s64.s16 %rd30, %rs19;": lambda a, b: signed(a, 8),
    "mov.b64 {%r20, %r21}, %rd10; mov.b64 %rd30, {%r21, %r11};": lambda a, b: a >> 32 | (b & M32) << 32,
    "mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r30, {%rs2, %rs1}; cvt.u64.u32 %rd30, %r30;": lambda a, b: (
        a >> 16 & 0xFFFF | (a & 0xFFFF) << 16
    ),
    "lop3.b32 %r30, %r10, %r11, 0xF0F0F0F0, 0xCA; cvt.u64.u32 %rd30, %r30;": lambda a, b: (
        (a & b | ~a & 0xF0F0F0F0) & M32
    ),
    "lop3.b32 %r30, %r10, %r11, 0xF0F0F0F0, 0x6A; cvt.u64.u32 %rd30, %r30;": lambda a, b: (a & b ^ 0xF0F0F0F0) & M32,
    "setp.lt.s32 %p1, %r10, %r11; selp.b32 %r30, %r10, 7, %p1; cvt.u64.u32 %rd30, %r30;": lambda a, b: (
        a & M32 if signed(a) < signed(b) else 7
    ),
    "setp.lt.s64 %p1, %rd10, %rd11; selp.b64 %rd30, %rd10, %rd11, %p1;": lambda a, b: min(signed(a, 64), signed(b, 64)),
    "setp.lt.u32 %p1, %r10, %r11; @!%p1 bra $L1; mov.b64 %rd30, 5; bra $L2; $L1: mov.b64 %rd30, 6; $L2:": lambda a, b: (
        5 if (a & M32) < (b & M32) else 6
    ),
}


@pytest.mark.parametrize("text", WIDE)
def test_wide_integers(text: str) -> None:
    edges = [0, 1, M64, 1 << 63, (1 << 63) - 1, M32, 1 << 31]
    a, b = words(400, SEED, edges), words(400, SEED + 1, edges[::-1])
    for x, y, result in zip(a.tolist(), b.tolist(), compute(text, [a, b]).tolist(), strict=True):
        assert result == WIDE[text](x, y) & M64, (hex(x), hex(y))


def number(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def nearest_float32(exact: Fraction) -> float:
    """Round a fraction to float32: to nearest, ties to even."""
    if exact == 0:
        return 0.0
    exponent = max(math.frexp(float(abs(exact)))[1] - 24, -149)
    scaled = abs(exact) / Fraction(2) ** exponent
    whole = round(scaled)  # Python rounds ties to even
    return math.copysign(float(Fraction(whole) * Fraction(2) ** exponent), 1 if exact > 0 else -1)


def test_fused_multiply_add_rounds_once() -> None:
    inputs = [floats(300, SEED + at)[len(FLOAT_EDGES) :] for at in range(3)]
    results = compute("fma.rn.f32 %r30, %r10, %r11, %r12;", inputs, "b32")
    for *given, result in zip(*(array.tolist() for array in (*inputs, results)), strict=True):
        a, b, c = (Fraction(number(bits)) for bits in given)
        assert number(result) == nearest_float32(a * b + c)
    large, minus = (
        np.array([value], np.float32).view(np.uint32).astype(np.uint64) for value in (2.0**127, -(2.0**127))
    )
    assert np.isinf(number(int(compute("fma.rn.f32 %r30, %r10, %r10, %r11;", [large, minus], "b32")[0])))


NUMBERS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {  # type: ignore[type-arg]  # of float32
    "add.rn.f32": np.add,
    "sub.f32": np.subtract,
    "mul.rn.f32": np.multiply,
    "div.full.f32": np.divide,
    "max.f32": lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.maximum(a, b))),
    "min.f32": lambda a, b: np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.minimum(a, b))),
    "max.NaN.f32": np.maximum,
    "copysign.f32": lambda a, b: np.copysign(b, a),  # the sign is the first operand's
    "min.NaN.f32": np.minimum,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    a = np.repeat(floats(5, SEED), 28)
    b = np.tile(floats(5, SEED), 28)
    results = compute(f"{name} %r30, %r10, %r11;", [a, b], "b32").astype(np.uint32).view(np.float32)
    x, y = (array.astype(np.uint32).view(np.float32) for array in (a, b))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(results, NUMBERS[name](x, y).astype(np.float32))


def test_comparisons_of_numbers_with_nan() -> None:
    a = np.repeat(floats(5, SEED), 28)
    b = np.tile(floats(5, SEED), 28)
    pairs = [(number(x), number(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    plain = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for name, sign in plain.items():
        ordered = compute(f"setp.{name}.f32 %p1, %r10, %r11;", [a, b], "pred").tolist()
        either = compute(f"setp.{name}u.f32 %p1, %r10, %r11;", [a, b], "pred").tolist()
        for (x, y), first, second in zip(pairs, ordered, either, strict=True):
            expected = eval(f"x {sign} y", {"x": x, "y": y})
            assert (first, second) == (expected, expected or math.isnan(x) or math.isnan(y))
    for name, either in (("ne", False), ("neu", True)):
        differ = compute(f"setp.{name}.f32 %p1, %r10, %r11;", [a, b], "pred").tolist()
        assert differ == [either if math.isnan(x) or math.isnan(y) else x != y for x, y in pairs]
    unordered = compute("setp.nan.f32 %p1, %r10, %r11;", [a, b], "pred").tolist()
    assert unordered == [math.isnan(x) or math.isnan(y) for x, y in pairs]


def float_tensor(bits: Words) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves(kind: str, dtype: torch.dtype) -> None:
    a, b, c = (floats(200, SEED + at) for at in range(3))
    x, y, z = map(float_tensor, (a, b, c))
    codes = compute(f"cvt.rn.{kind}.f32 %rs19, %r10;", [a], "b16").astype(np.uint16)
    assert same(torch.from_numpy(codes).view(dtype), x.to(dtype))
    pair = torch.from_numpy(compute(f"cvt.rn.{kind}x2.f32 %r30, %r10, %r11;", [a, b], "b32").astype(np.uint32)).view(
        dtype
    )
    assert same(pair.view(-1, 2), torch.stack([y, x], 1).to(dtype))  # the first operand is the upper half
    back = compute(f"cvt.rn.{kind}.f32 %rs1, %r10; cvt.f32.{kind} %r30, %rs1;", [a], "b32")
    assert same(float_tensor(back), x.to(dtype).float())
    text = "".join(f"cvt.rn.{kind}x2.f32 %r{20 + at}, %r{10 + at}, %r{10 + at}; " for at in range(3))
    halves = [value.to(dtype).double() for value in (x, y, z)]
    for name, expected in (
        ("fma.rn", halves[0] * halves[1] + halves[2]),
        ("mul.rn", halves[0] * halves[1]),
        ("add.rn", halves[0] + halves[1]),
        ("sub.rn", halves[0] - halves[1]),
    ):
        operands = "%r20, %r21, %r22" if name == "fma.rn" else "%r20, %r21"
        out = compute(f"{text}{name}.{kind}x2 %r30, {operands};", [a, b, c], "b32").astype(np.uint32)
        low = torch.from_numpy(out).view(dtype).view(-1, 2)
        finite = expected.isfinite()
        nearest = exact_half(expected[finite], dtype)
        assert same(low[finite, 0], nearest)
        assert same(low[finite, 1], nearest)
        assert same(low[~finite, 0], expected[~finite].to(dtype))


def exact_half(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 numbers once: the nearest of the three neighbours of what torch gives, ties to even."""
    near = values.to(dtype)
    bits = near.view(torch.int16)
    best = near.clone()
    for step in (-1, 1):
        other = (bits + step).view(dtype)
        gap, old = (other.double() - values).abs(), (best.double() - values).abs()
        closer = (gap < old) | (gap == old) & ((bits + step) & 1 == 0)
        best = torch.where(
            closer & other.isfinite() & near.isfinite() & (other.signbit() == near.signbit()), other, best
        )
    return best


CONVERTED: dict[str, Callable[[float], int]] = {
    "cvt.rzi.s32.f32": math.trunc,
    "cvt.rni.s32.f32": round,
    "cvt.rmi.s32.f32": math.floor,
    "cvt.rpi.s32.f32": math.ceil,
}


@pytest.mark.parametrize("name", CONVERTED)
def test_numbers_to_integers_are_clamped(name: str) -> None:
    a = floats(300, SEED)
    for bits, result in zip(a.tolist(), compute(f"{name} %r30, %r10;", [a], "b32").tolist(), strict=True):
        x = number(bits)
        whole = 0 if math.isnan(x) else (2**31 if x > 0 else -(2**31)) if math.isinf(x) else CONVERTED[name](x)
        assert signed(result) == min(max(whole, -(2**31)), 2**31 - 1), x


def test_integers_to_numbers_round_to_nearest() -> None:
    a = words(300, SEED)
    for kind, width, is_signed in (("s32", 32, True), ("u32", 32, False), ("s64", 64, True), ("u64", 64, False)):
        register = "%r10" if width == 32 else "%rd10"
        results = compute(f"cvt.rn.f32.{kind} %r30, {register};", [a], "b32")
        for x, bits in zip(a.tolist(), results.tolist(), strict=True):
            value = signed(x, width) if is_signed else x & ((1 << width) - 1)
            assert number(bits) == nearest_float32(Fraction(value))


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_numbers_of_eight_bits(kind: str, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    a, b = floats(300, SEED), floats(300, SEED + 1)
    codes = compute(f"cvt.rn.satfinite.{kind}x2.f32 %rs19, %r10, %r11;", [a, b], "b16").astype(np.uint16)
    expected = torch.stack([float_tensor(b), float_tensor(a)], 1).clamp(-limit, limit).to(dtype)
    assert same(torch.from_numpy(codes).view(dtype).view(-1, 2).float(), expected.float())
    every = np.arange(256, dtype=np.uint64) | np.arange(256, dtype=np.uint64)[::-1] << np.uint64(8)
    halves = compute(f"cvt.rn.f16x2.{kind}x2 %r30, %rs10;", [every], "b32").astype(np.uint32)
    values = torch.from_numpy(every.astype(np.uint16)).view(dtype).half().view(-1, 2)
    assert same(torch.from_numpy(halves).view(torch.float16).view(-1, 2), values)


@pytest.mark.parametrize(
    "name", ["ex2.approx.ftz.f32", "lg2.approx.f32", "rcp.approx.ftz.f32", "rsqrt.approx.ftz.f32", "sqrt.rn.f32"]
)
def test_approximations_are_as_near_as_a_gpu(name: str) -> None:
    a = floats(400, SEED)
    x = float_tensor(a).double()
    x = torch.where(x.abs() < 2.0**-126, x * 0, x) if "ftz" in name else x
    y = {"ex2": torch.exp2, "lg2": torch.log2, "rcp": torch.reciprocal, "rsqrt": torch.rsqrt, "sqrt": torch.sqrt}[
        name.partition(".")[0]
    ](x)
    y = torch.where(y.abs() < 2.0**-126, y * 0, y) if "ftz" in name else y
    result = float_tensor(compute(f"{name} %r30, %r10;", [a], "b32")).double()
    assert torch.allclose(result, y.float().double(), rtol=2.0**-22, atol=1e-38, equal_nan=True)


@pytest.mark.parametrize(
    "text",
    [
        "frob.b32 %r30, %r10;",
        "add.odd.f32 %r30, %r10, %r10;",
        "add.rp.f32 %r30, %r10, %r10;",
        "cvt.rn.tf32.f32 %r30, %r10;",
        "prmt.f4e.b32 %r30, %r10, %r10, %r10;",
        "ld.local.b32 %r30, [%rd0];",
        "fence.acq_rel.gpu;",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 %r1, %r2, %r3, %r4;",
        "mov.u32 %r30, %clock;",
    ],
)
def test_an_unknown_instruction_is_an_error(text: str) -> None:
    with pytest.raises(EmulatorError, match="unknown"):
        compute(text, [words(4, SEED)], "b32")
