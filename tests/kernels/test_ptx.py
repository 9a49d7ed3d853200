"""The inline assembly of kernels/codes gives what its plain twin gives, computed from the PTX manual's definitions."""

from __future__ import annotations

import numpy as np
import pytest

from edgelm.kernels.codes import triton as codes
from tests.kernels.ptx import run

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SEED = np.random.SeedSequence().entropy


def random_words(count: int = 20_000) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, 2**32, count, dtype=np.uint32)


def twice(bits: int) -> np.ndarray:
    return np.array(bits | bits << 16, np.uint32)


def numbers(halves: np.ndarray, bf16: bool) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32) if bf16 else halves.view(np.float16).astype(np.float32)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("bits", "zero"), [(4, 8), (4, 0), (5, 16), (5, 0), (6, 32), (6, 0)])
def test_nibbles(bits, zero, bf16):
    words, high = random_words(), random_words()[::-1].copy()
    whole, sixteenth = twice((0xC300 if bf16 else 0xE400) + zero), twice(0xD400 + 16 * zero)
    inputs = [words, whole, sixteenth] if bits == 4 else [words, high, whole, sixteenth]
    found = run(codes._nibbles(bits, bf16), inputs, 8)
    for slot in range(4):
        for h in range(2):
            code = words >> (4 * slot + 16 * h) & 15
            if bits > 4:
                width = bits - 4
                code = code | (high >> (width * slot + 16 * h) & ((1 << width) - 1)) << 4
            assert np.array_equal(numbers(found[2 * slot + h], bf16), code.astype(np.float32) - zero), SEED


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_bytes(signed, bf16):
    words, zero = random_words(), 0 if signed else 128
    found = run(codes._bytes(signed, bf16), [words, twice(0xE400 + (128 if signed else zero))], 4)
    for at in range(4):
        byte = (words >> 8 * at & 255).astype(np.uint8)
        expected = byte.view(np.int8).astype(np.float32) if signed else byte.astype(np.float32) - zero
        assert np.array_equal(numbers(found[at], bf16), expected), SEED


@pytest.mark.parametrize("bf16", [False, True])
def test_e4m3(bf16):
    words = random_words()
    found = run(codes._fp8(bf16), [words], 4)
    for at in range(4):
        byte = words >> 8 * at & 255
        half = ((byte & 0x80) << 8 | (byte & 0x7F) << 7).astype(np.uint16).view(np.float16)
        assert np.array_equal(numbers(found[at], bf16), half.astype(np.float32) * 256), SEED


@pytest.mark.parametrize("bf16", [False, True])
def test_codebook(bf16):
    words = random_words()
    book = sum((value + 128) << 8 * at for at, value in enumerate(IQ4))
    quarters = [np.array(book >> 32 * at & 0xFFFFFFFF, np.uint32) for at in range(4)]
    found = run(codes._codebook(bf16), [words, *quarters], 8)
    for slot in range(4):
        for h in range(2):
            expected = np.array(IQ4, np.float32)[words >> (4 * slot + 16 * h) & 15]
            assert np.array_equal(numbers(found[2 * slot + h], bf16), expected), SEED
