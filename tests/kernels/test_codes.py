"""kernels/codes: words become exact numbers, by the plain functions and by the assembly, which is interpreted here."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import TensorHandle

from edgelm.kernels.codes import triton as codes
from edgelm.kernels.layout import pack_codes
from edgelm.kernels.matmul.cases import IQ4, MXFP4
from tests.kernels.seeds import SEED, generator

Words = NDArray[np.uint32]
DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}


# -- a small part of PTX, on arrays of registers -----------------------------------------------------------------------


def _pairs(word: Words, bf16: bool) -> NDArray[np.float64]:
    """Return both halves of each word as numbers, [words, 2]."""
    halves = np.stack([word & 0xFFFF, word >> 16], -1)
    if bf16:
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return halves.astype(np.uint16).view(np.float16).astype(np.float64)


def _joined(pairs: NDArray[np.float64], bf16: bool) -> Words:
    """Round pairs of numbers to 16 bits, once, and put them into words."""
    if bf16:
        rounded = torch.from_numpy(pairs).to(torch.bfloat16)  # exact in float64, so this rounds once
        halves = rounded.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    else:
        halves = pairs.astype(np.float16).view(np.uint16).astype(np.uint32)
    return halves[..., 0] | halves[..., 1] << 16


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    both = np.concatenate([a[:, None].view(np.uint8), b[:, None].view(np.uint8)], 1)
    picked = [np.take_along_axis(both, (selector >> 4 * i & 7)[:, None].astype(np.int64), 1)[:, 0] for i in range(4)]
    assert not any((selector >> 4 * i & 8).any() for i in range(4)), "a replicated sign is not needed"
    return sum((byte.astype(np.uint32) << 8 * i for i, byte in enumerate(picked)), np.zeros_like(a))


OPERATIONS: dict[str, Callable[..., Words]] = {
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": _prmt,
    "add.rn.f16x2": lambda a, b: _joined(_pairs(a, False) + _pairs(b, False), False),
    "mul.rn.f16x2": lambda a, b: _joined(_pairs(a, False) * _pairs(b, False), False),
    "fma.rn.f16x2": lambda a, b, c: _joined(_pairs(a, False) * _pairs(b, False) + _pairs(c, False), False),
    "fma.rn.bf16x2": lambda a, b, c: _joined(_pairs(a, True) * _pairs(b, True) + _pairs(c, True), True),
}


def run_ptx(text: str, outputs: int, inputs: list[Words]) -> list[NDArray[np.uint16]]:
    """Return the 16-bit outputs of inline assembly."""
    size = len(inputs[0])
    registers: dict[str, NDArray[np.uint32]] = {f"${outputs + i}": word for i, word in enumerate(inputs)}

    def value(name: str) -> Words:
        return registers[name] if name in registers else np.full(size, int(name, 0), np.uint32)

    for statement in re.sub(r"\.reg [^;]*;", "", text.strip("{} ")).split(";"):
        if not statement.strip():
            continue
        name, rest = statement.split(None, 1)
        target, *given = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if name == "mov.b32" and target.startswith("{"):
            low, high = target.strip("{}").split(",")
            registers[low], registers[high] = value(given[0]) & 0xFFFF, value(given[0]) >> 16
        elif name == "mov.b32":
            registers[target] = value(given[0])
        elif name == "lop3.b32":
            both = value(given[0]) & value(given[1])
            registers[target] = {"0xea": both | value(given[2]), "0x6a": both ^ value(given[2])}[given[3]]
        elif name == "cvt.f32.f16":
            registers[target] = value(given[0]).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        elif name == "cvt.rn.bf16x2.f32":
            both = [value(each).view(np.float32).astype(np.float64) for each in reversed(given)]
            registers[target] = _joined(np.stack(both, -1), True)
        else:
            registers[target] = OPERATIONS[name](*map(value, given))
    return [registers[f"${i}"].astype(np.uint16) for i in range(outputs)]


# -- the same by the plain functions -----------------------------------------------------------------------------------


@triton.jit
def numbers(
    words,
    high,
    out,
    bits: tl.constexpr,
    code: tl.constexpr,
    zero: tl.constexpr,
    book: tl.constexpr,
    dtype: tl.constexpr,
    size: tl.constexpr,
    asm: tl.constexpr,
):
    i = tl.arange(0, size)
    if bits == 8:
        found = codes.byte_numbers(tl.load(words + i), code, zero, dtype, asm)
    else:
        found = codes.nibble_numbers(tl.load(words + i), tl.load(high + i), bits, zero, book, dtype, asm)
    for j in tl.static_range(4 if bits == 8 else 8):
        tl.store(out + j * size + i, found[j])


def packed_book(values: tuple[int, ...]) -> int:
    return sum((value & 255) << 8 * i for i, value in enumerate(values))


KINDS = [(4, "", 0, 0), (4, "", 8, 0), (4, "", 0, packed_book(IQ4)), (4, "", 0, packed_book(MXFP4)), (5, "", 16, 0)]
KINDS += [(5, "", 0, 0), (6, "", 32, 0), (6, "", 0, 0), (8, "unsigned", 0, 0), (8, "unsigned", 128, 0)]
KINDS += [(8, "signed", 0, 0), (8, "fp8", 0, 0)]


def expected_numbers(words: Words, high: Words, bits: int, code: str, zero: int, book: int) -> NDArray[np.float64]:
    """Return what the documentation of the layout says, [4 or 8, words]."""
    if bits == 8:
        raw = np.stack([words >> 8 * i & 255 for i in range(4)])
        if code == "signed":
            return raw.astype(np.uint8).view(np.int8).astype(np.float64)
        if code == "fp8":
            return torch.from_numpy(raw.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
        return raw.astype(np.float64) - zero
    each = []
    for i in range(8):
        s, h = divmod(i, 2)
        raw = words >> (4 * s + 16 * h) & 15
        if bits == 5:
            raw = raw | (high >> (s + 16 * h) & 1) << 4
        elif bits == 6:
            raw = raw | (high >> (2 * s + 16 * h) & 3) << 4
        each.append(raw)
    table = np.array([(book >> 8 * i & 255 ^ 128) - 128 for i in range(16)], np.float64)
    stacked = np.stack(each)
    return table[stacked] if book else stacked.astype(np.float64) - zero


def random_words(seed: int, code: str) -> Words:
    words = torch.randint(0, 2**32, (256,), generator=generator(seed)).numpy().astype(np.uint32)
    every = np.arange(256, dtype=np.uint32)
    words[:256:2] = (every | every << 8 | (255 - every) << 16 | (every ^ 85) << 24)[:128]
    words[1:256:2] = (every | every << 8 | (255 - every) << 16 | (every ^ 85) << 24)[128:]
    if code == "fp8":
        mask = np.zeros_like(words)
        for i in range(4):
            nan = (words >> 8 * i & 127) == 127
            mask |= np.where(nan, 1 << 8 * i, 0).astype(np.uint32)
        words ^= mask
    return words


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "code", "zero", "book"), KINDS)
def test_plain_functions_give_the_exact_numbers(bits: int, code: str, zero: int, book: int, dtype: str, seed: int):
    words, high = random_words(seed, code), random_words(seed + 1, "")
    out = torch.full((4 if bits == 8 else 8, 256), float("nan"), dtype=getattr(torch, dtype))
    given = [torch.from_numpy(each.view(np.int32)) for each in (words, high)]
    numbers[(1,)](*given, out, bits, code, zero, book, DTYPES[dtype], 256, False)
    assert np.array_equal(out.double().numpy(), expected_numbers(words, high, bits, code, zero, book))


def emulated(
    asm: object, constraints: object, args: list[tl.tensor], dtype: tuple[tl.dtype, ...], **_: object
) -> object:
    """Stand in for tl.inline_asm_elementwise, which the interpreter does not have."""
    text, operands = (str(getattr(each, "value", each)) for each in (asm, constraints))
    given = [np.broadcast_to(each.handle.data, args[0].shape).ravel().view(np.uint32) for each in args]
    assert len(given) == operands.split(",").count("r")
    kind = np.uint16 if dtype[0] == tl.bfloat16 else np.float16  # the interpreter has the bits of bfloat16
    found = [each.view(kind).reshape(args[0].shape) for each in run_ptx(text, len(dtype), given)]
    return tuple(tl.tensor(TensorHandle(each, dtype[0]), tl.block_type(dtype[0], args[0].shape)) for each in found)


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("bits", "code", "zero", "book"), KINDS)
def test_assembly_gives_the_exact_numbers(
    bits: int, code: str, zero: int, book: int, dtype: str, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tl, "inline_asm_elementwise", emulated)
    words, high = random_words(seed, code), random_words(seed + 1, "")
    out = torch.full((4 if bits == 8 else 8, 256), float("nan"), dtype=getattr(torch, dtype))
    given = [torch.from_numpy(each.view(np.int32)) for each in (words, high)]
    numbers[(1,)](*given, out, bits, code, zero, book, DTYPES[dtype], 256, True)
    assert np.array_equal(out.double().numpy(), expected_numbers(words, high, bits, code, zero, book))


def test_a_codebook_of_short_numbers_needs_no_sum():
    """What has two bits behind the first one is the upper byte of a float16; -128 to 127 may need seven."""
    short = (0, 1, -1, 2, 3, 5, 7, -6, 80, 96, 112, -112, 64, -128, 20, 14)
    upper = np.array(short, np.float16).view(np.uint16) >> 8
    assert codes.upper_bytes(packed_book(short)) == sum(int(byte) << 8 * i for i, byte in enumerate(upper))
    assert codes.upper_bytes(packed_book((*short[:15], 9))) == 0
    assert codes.upper_bytes(packed_book((*short[:15], -121))) == 0


# -- the order of a fragment -------------------------------------------------------------------------------------------


@triton.jit
def dot_of_chunk(words, high, x, out, bits: tl.constexpr, kw: tl.constexpr, apart: tl.constexpr):
    """Multiply one chunk of 16 rows with 8 rows of 64 columns."""
    i, j = tl.arange(0, 8)[:, None], tl.arange(0, 32)[None, :]
    if apart:
        at = x + i * 64 + tl.arange(0, 16)[None, :] // 4 * 8 + tl.arange(0, 16)[None, :] % 4
        low = codes.joined_x_fragment(tl.load(at), tl.load(at + 4), 1, kw)
        top = codes.joined_x_fragment(tl.load(at + 32), tl.load(at + 36), 1, kw)
    else:
        low = codes.x_fragment(tl.load(x + i * 64 + j), 1, kw)
        top = codes.x_fragment(tl.load(x + i * 64 + 32 + j), 1, kw)
    at = tl.arange(0, 128)[None, :]
    if bits == 16:
        rows = codes.row_fragment(tl.load(words + i * 64 + j), tl.load(words + (i + 8) * 64 + j), 1, kw)
        y = tl.dot(rows, low, input_precision="ieee")
        rows = codes.row_fragment(tl.load(words + i * 64 + 32 + j), tl.load(words + (i + 8) * 64 + 32 + j), 1, kw)
        y = tl.dot(rows, top, y, input_precision="ieee")
    elif bits == 8:
        u = codes.byte_numbers(codes.arrange_words(tl.load(words + at), 1, 2), "unsigned", 0, tl.float32, False)
        v = codes.byte_numbers(codes.arrange_words(tl.load(words + 128 + at), 1, 2), "unsigned", 0, tl.float32, False)
        y = tl.dot(codes.fragment(u[0], u[1], u[2], u[3], 1, kw), low, input_precision="ieee")
        y = tl.dot(codes.fragment(v[0], v[1], v[2], v[3], 1, kw), top, y, input_precision="ieee")
    else:
        w = codes.arrange_words(tl.load(words + at), 1, 2)
        more = w
        if bits > 4:
            size: tl.constexpr = 32 * (bits - 4)
            more = codes.high_words(tl.load(high + tl.arange(0, size)[None, :]), bits, 1, 2)
        u = codes.nibble_numbers(w, more, bits, 0, 0, tl.float32, False)
        y = tl.dot(codes.fragment(u[0], u[1], u[2], u[3], 1, kw), low, input_precision="ieee")
        y = tl.dot(codes.fragment(u[4], u[5], u[6], u[7], 1, kw), top, y, input_precision="ieee")
    tl.store(out + tl.arange(0, 16)[:, None] * 8 + tl.arange(0, 8)[None, :], tl.reshape(y, [16, 8]))


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("kw", [2, 4])
@pytest.mark.parametrize(("bits", "apart"), [(4, True), (4, False), (5, False), (6, False), (8, False), (16, False)])
def test_both_operands_have_one_order_of_columns(bits: int, apart: bool, kw: int, seed: int):
    raw = torch.randint(0, 1 << min(bits, 8), (16, 64), generator=generator(seed)).to(torch.uint8)
    words, high = (raw.float(), None) if bits == 16 else pack_codes(raw, bits)  # 16: rows of numbers
    x = torch.randint(-50, 50, (8, 64), generator=generator(seed)).float()
    out = torch.full((16, 8), float("nan"))
    dot_of_chunk[(1,)](words, words if high is None else high, x, out, bits, kw, apart)
    assert torch.equal(out, raw.float() @ x.T)  # integers: exact
