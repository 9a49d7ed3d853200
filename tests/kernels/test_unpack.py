"""kernels/unpack.py: words become exact values, by the plain functions and by the assembly, run as its PTX would be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import TensorHandle

from edgelm.kernels import unpack
from edgelm.kernels.layout import pack_codes
from tests.kernels.cases.matmul import IQ4, MXFP4
from tests.kernels.ptx.instructions import OF_REGISTERS
from tests.kernels.ptx.parse import parse
from tests.kernels.ptx.registers import Registers
from tests.kernels.seeds import SEED, generator

Words = NDArray[np.uint32]
DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}


@triton.jit
def unpack_words(
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
        values = unpack.unpack_bytes(tl.load(words + i), code, zero, dtype, asm)
    else:
        values = unpack.unpack_nibbles(tl.load(words + i), tl.load(high + i), bits, zero, book, dtype, asm)
    for j in tl.static_range(4 if bits == 8 else 8):
        tl.store(out + j * size + i, values[j])


def packed_book(values: tuple[int, ...]) -> int:
    return sum((value & 255) << 8 * i for i, value in enumerate(values))


def run_assembly(text: str, inputs: Sequence[Words], num_outputs: int) -> list[NDArray[np.uint16]]:
    """Run assembly on words and return its 16-bit outputs $0, $1, ...; the inputs are the operands after them."""
    names = [f"${num_outputs + at}" for at in range(len(inputs))]
    body = f".reg .b16 $<{num_outputs}>; .reg .b32 {', '.join(names)}; {text}"
    program = parse(f".visible .entry assembly() {{ {body} ret; }}")
    registers = Registers(program, len(inputs[0]), {})
    for name, words in zip(names, inputs, strict=True):
        registers.array(name)[:] = words
    for instruction in program.instructions[:-1]:
        OF_REGISTERS[instruction.parts[0]](instruction, registers)(None)
    return [registers.array(f"${at}") for at in range(num_outputs)]


KINDS = [(4, "", 0, 0), (4, "", 8, 0), (4, "", 0, packed_book(IQ4)), (4, "", 0, packed_book(MXFP4)), (5, "", 16, 0)]
KINDS += [(5, "", 0, 0), (6, "", 32, 0), (6, "", 0, 0), (8, "unsigned", 0, 0), (8, "unsigned", 128, 0)]
KINDS += [(8, "signed", 0, 0), (8, "fp8", 0, 0)]


def expected_values(words: Words, high: Words, bits: int, code: str, zero: int, book: int) -> NDArray[np.float64]:
    """Return the values that the documentation of the layout defines, [4 or 8, words]; NaN of e4m3 is 480."""
    if bits == 8:
        raw = np.stack([words >> 8 * i & 255 for i in range(4)])
        if code == "signed":
            return raw.astype(np.uint8).view(np.int8).astype(np.float64)
        if code == "fp8":
            values = torch.from_numpy(raw.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
            return np.where(np.isnan(values), np.where(raw < 128, 480.0, -480.0), values)
        return raw.astype(np.float64) - zero
    codes = []
    for i in range(8):
        s, h = divmod(i, 2)
        raw = words >> (4 * s + 16 * h) & 15
        if bits == 5:
            raw = raw | (high >> (s + 16 * h) & 1) << 4
        elif bits == 6:
            raw = raw | (high >> (2 * s + 16 * h) & 3) << 4
        codes.append(raw)
    table = np.array([(book >> 8 * i & 255 ^ 128) - 128 for i in range(16)], np.float64)
    stacked = np.stack(codes)
    return table[stacked] if book else stacked.astype(np.float64) - zero


def random_words(seed: int) -> Words:
    """Return 256 random words, and 256 that have each value of each byte once."""
    words = torch.randint(0, 2**32, (256,), generator=generator(seed)).numpy().astype(np.uint32)
    every = np.arange(256, dtype=np.uint32)
    return np.concatenate([words, every | every << 8 | (255 - every) << 16 | (every ^ 85) << 24])


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "code", "zero", "book"), KINDS)
def test_plain_functions_give_the_exact_values(bits: int, code: str, zero: int, book: int, dtype: str, seed: int):
    words, high = random_words(seed), random_words(seed + 1)
    out = torch.full((4 if bits == 8 else 8, 512), float("nan"), dtype=getattr(torch, dtype))
    words_and_high = [torch.from_numpy(plane.view(np.int32)) for plane in (words, high)]
    unpack_words[(1,)](*words_and_high, out, bits, code, zero, book, DTYPES[dtype], 512, False)
    assert np.array_equal(out.double().numpy(), expected_values(words, high, bits, code, zero, book))


def emulated(
    asm: object, constraints: object, args: list[tl.tensor], dtype: tuple[tl.dtype, ...], **_: object
) -> object:
    """Stand in for tl.inline_asm_elementwise, which the interpreter does not have."""
    text, operands = (str(getattr(argument, "value", argument)) for argument in (asm, constraints))
    words = [np.broadcast_to(tensor.handle.data, args[0].shape).ravel().view(np.uint32) for tensor in args]
    assert len(words) == operands.split(",").count("r")
    kind = np.uint16 if dtype[0] == tl.bfloat16 else np.float16  # the interpreter keeps bfloat16 as its bits
    outputs = [bits.view(kind).reshape(args[0].shape) for bits in run_assembly(text, words, len(dtype))]
    return tuple(tl.tensor(TensorHandle(data, dtype[0]), tl.block_type(dtype[0], args[0].shape)) for data in outputs)


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("bits", "code", "zero", "book"), KINDS)
def test_assembly_gives_the_exact_values(
    bits: int, code: str, zero: int, book: int, dtype: str, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tl, "inline_asm_elementwise", emulated)
    words, high = random_words(seed), random_words(seed + 1)
    out = torch.full((4 if bits == 8 else 8, 512), float("nan"), dtype=getattr(torch, dtype))
    words_and_high = [torch.from_numpy(plane.view(np.int32)) for plane in (words, high)]
    unpack_words[(1,)](*words_and_high, out, bits, code, zero, book, DTYPES[dtype], 512, True)
    assert np.array_equal(out.double().numpy(), expected_values(words, high, bits, code, zero, book))


def test_a_codebook_of_short_numbers_needs_no_sum():
    """A number with two bits after its first one is the upper byte of a float16; -128 to 127 may need seven."""
    short = (0, 1, -1, 2, 3, 5, 7, -6, 80, 96, 112, -112, 64, -128, 20, 14)
    upper = np.array(short, np.float16).view(np.uint16) >> 8
    assert unpack.upper_bytes(packed_book(short)) == sum(int(byte) << 8 * i for i, byte in enumerate(upper))
    assert unpack.upper_bytes(packed_book((*short[:15], 9))) == 0
    assert unpack.upper_bytes(packed_book((*short[:15], -121))) == 0


@triton.jit
def dot_of_groups(words, high, x, out, bits: tl.constexpr, kw: tl.constexpr):
    """Multiply one chunk of 16 rows by 8 rows of 64 columns, which are four groups."""
    w = unpack.arrange_words(tl.load(words + tl.arange(0, 128)[None, :]), 1, 2)
    more = w
    if bits == 6:
        more = unpack.high_words(tl.load(high + tl.arange(0, 64)[None, :]), bits, 1, 2)
    u = unpack.unpack_nibbles(w, more, bits, 0, 0, tl.float32, False)
    line, lane = tl.arange(0, 16)[:, None], tl.arange(0, 8)[None, :]
    for group in tl.static_range(4):
        columns = tl.load(x + tl.arange(0, 8)[:, None] * 64 + group * 16 + tl.arange(0, 16)[None, :])
        left = unpack.group_fragment(u[2 * group], u[2 * group + 1], 1, kw)
        y = tl.dot(left, unpack.group_x_fragment(columns, 1, kw), input_precision="ieee")
        tl.store(out + group * 128 + line * 8 + lane, tl.reshape(y, [16, 8]))


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("kw", [2, 4])
@pytest.mark.parametrize("bits", [4, 6])
def test_a_slot_of_a_word_is_a_group_of_16_columns(bits: int, kw: int, seed: int):
    raw = torch.randint(0, 1 << bits, (16, 64), generator=generator(seed)).to(torch.uint8)
    words, high = pack_codes(raw, bits, 16)
    x = torch.randint(-50, 50, (8, 64), generator=generator(seed)).float()
    out = torch.full((4, 16, 8), float("nan"))
    dot_of_groups[(1,)](words, words if high is None else high, x, out, bits, kw)
    for group, columns in enumerate(range(0, 64, 16)):
        part = slice(columns, columns + 16)
        assert torch.equal(out[group], raw[:, part].float() @ x[:, part].T)  # integers: exact


@triton.jit
def dot_of_chunk(words, high, x, out, bits: tl.constexpr, kw: tl.constexpr, apart: tl.constexpr):
    """Multiply one chunk of 16 rows by 8 rows of 64 columns."""
    i, j = tl.arange(0, 8)[:, None], tl.arange(0, 32)[None, :]
    if apart:
        at = x + i * 64 + tl.arange(0, 16)[None, :] // 4 * 8 + tl.arange(0, 16)[None, :] % 4
        low = unpack.joined_x_fragment(tl.load(at), tl.load(at + 4), 1, kw)
        top = unpack.joined_x_fragment(tl.load(at + 32), tl.load(at + 36), 1, kw)
    else:
        low = unpack.x_fragment(tl.load(x + i * 64 + j), 1, kw)
        top = unpack.x_fragment(tl.load(x + i * 64 + 32 + j), 1, kw)
    at = tl.arange(0, 128)[None, :]
    if bits == 16:
        rows = unpack.row_fragment(tl.load(words + i * 64 + j), tl.load(words + (i + 8) * 64 + j), 1, kw)
        y = tl.dot(rows, low, input_precision="ieee")
        rows = unpack.row_fragment(tl.load(words + i * 64 + 32 + j), tl.load(words + (i + 8) * 64 + 32 + j), 1, kw)
        y = tl.dot(rows, top, y, input_precision="ieee")
    elif bits == 8:
        u = unpack.unpack_bytes(unpack.arrange_words(tl.load(words + at), 1, 2), "unsigned", 0, tl.float32, False)
        v = unpack.unpack_bytes(unpack.arrange_words(tl.load(words + 128 + at), 1, 2), "unsigned", 0, tl.float32, False)
        y = tl.dot(unpack.fragment(u[0], u[1], u[2], u[3], 1, kw), low, input_precision="ieee")
        y = tl.dot(unpack.fragment(v[0], v[1], v[2], v[3], 1, kw), top, y, input_precision="ieee")
    else:
        w = unpack.arrange_words(tl.load(words + at), 1, 2)
        more = w
        if bits > 4:
            size: tl.constexpr = 32 * (bits - 4)
            more = unpack.high_words(tl.load(high + tl.arange(0, size)[None, :]), bits, 1, 2)
        u = unpack.unpack_nibbles(w, more, bits, 0, 0, tl.float32, False)
        y = tl.dot(unpack.fragment(u[0], u[1], u[2], u[3], 1, kw), low, input_precision="ieee")
        y = tl.dot(unpack.fragment(u[4], u[5], u[6], u[7], 1, kw), top, y, input_precision="ieee")
    tl.store(out + tl.arange(0, 16)[:, None] * 8 + tl.arange(0, 8)[None, :], tl.reshape(y, [16, 8]))


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("kw", [2, 4])
@pytest.mark.parametrize(("bits", "apart"), [(4, True), (4, False), (5, False), (6, False), (8, False), (16, False)])
def test_both_operands_have_one_order_of_columns(bits: int, apart: bool, kw: int, seed: int):
    raw = torch.randint(0, 1 << min(bits, 8), (16, 64), generator=generator(seed)).to(torch.uint8)
    words, high = (raw.float(), None) if bits == 16 else pack_codes(raw, bits, 32)  # 16: rows of numbers
    x = torch.randint(-50, 50, (8, 64), generator=generator(seed)).float()
    out = torch.full((16, 8), float("nan"))
    dot_of_chunk[(1,)](words, words if high is None else high, x, out, bits, kw, apart)
    assert torch.equal(out, raw.float() @ x.T)  # integers: exact
