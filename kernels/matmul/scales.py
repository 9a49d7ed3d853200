"""Scales of a decode matmul: loaded as they are stored, entry by entry, and made into numbers when they are needed.

An entry has the scales of a chunk of 64 columns, or of the group that holds the chunk, for one row of the weight.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_number(word, I: tl.constexpr, KIND: tl.constexpr):
    """Return scale I of an entry as float32, from the word that holds all scales of the entry, or only this one."""
    if KIND == "f32":
        return word
    elif word.dtype.is_floating():
        return word.to(tl.float32)
    elif KIND == "f16":
        return (word >> (16 * I)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "bf16":
        return (word >> (16 * I)).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    elif KIND == "i8":
        return ((word.to(tl.int32) << (24 - 8 * I)) >> 24).to(tl.float32)
    else:
        byte = (word.to(tl.int32) >> (8 * I)) & 255
        if KIND == "e8m0":  # 2 ** (byte - 128)
            # The byte becomes the exponent; for the two smallest, which are subnormal, the second term is larger.
            return tl.maximum((byte << 23) - (1 << 23), (byte << 21) + (1 << 21)).to(tl.float32, bitcast=True)
        else:
            return byte.to(tl.float32)


@triton.jit
def load_entries(
    plane,
    step,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    NW: tl.constexpr,
    ASM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the entries of a step's chunks as they are stored, WORDS times [NW, 16]; SHARED chunks have one entry."""
    warp = tl.arange(0, NW)[:, None]
    lane = tl.arange(0, 16)[None, :]
    columns = (step * NW + warp) * 64
    if NW % SHARED == 0:
        at = plane + (warp // SHARED * 16 + lane) * WORDS + step * (NW // SHARED * 16 * WORDS)
    else:
        at = plane + ((step * NW + warp) // SHARED * 16 + lane) * WORDS
    out: tl.tuple = ()
    for i in tl.static_range(WORDS):
        word = tl.load(at + i, mask=columns + i * GROUP < K, other=0) if MASKED else tl.load(at + i)
        if ASM and word.dtype.primitive_bitwidth == 16:
            # Opaque to the compiler, which would carry two of these in one register and wait for both to join them.
            half = word.to(tl.int16, bitcast=True)
            word = tl.inline_asm_elementwise("cvt.u32.u16 $0, $1;", "=r,h", [half], tl.int32, is_pure=True, pack=1)
        out += (word,)
    return out


@triton.jit
def entry_scales(
    words, FIRST: tl.constexpr, columns, K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr
):
    """Return the scales of entries, which begin at word FIRST: a float32 [NW, 16] for each group, 0 beyond K."""
    PER: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    SIZE: tl.constexpr = 4 if KIND == "f32" else 2 if KIND == "f16" or KIND == "bf16" else 1
    TOGETHER: tl.constexpr = PER > 1 and PER * SIZE <= 4
    out: tl.tuple = ()
    for i in tl.static_range(PER):
        value = scale_number(words[FIRST], i, KIND) if TOGETHER else scale_number(words[FIRST + i], 0, KIND)
        out += (tl.where(columns + i * GROUP < K, value, 0.0) if MASKED else value,)
    return out


@triton.jit
def times(values, factor):
    """Multiply each tensor of a tuple."""
    out: tl.tuple = ()
    for i in tl.static_range(len(values)):
        out += (values[i] * factor,)
    return out
