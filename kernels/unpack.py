"""Unpack quantized words into operands of tl.dot: device functions that several kernels share.

Owns the exact conversion of codes to float16, bfloat16 or float32, and the order of columns in a dot operand. Knows
nothing of scales or of where the words come from. kernels/layout.py draws the words.

The bits of a code are put into the mantissa of a constant: 0x6400 | q is the float16 1024 + q, and 0x4300 | q is the
bfloat16 128 + q. Inline assembly (ASM) converts two codes at once. Its plain twin has the same results: all are exact.

Dimensions have the names of the layout: l4, lm, rb, jb, g, p, h; slot s = 2 * g + p. A dot may contract over its
columns in any order, if both operands have the same order: KW is the order that the compiler wants (`kwidth`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Converts a pair of float16 in h to a pair of bfloat16.
_TO_BF16 = (
    "mov.b32 {h0,h1}, h; cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.rn.bf16x2.f32 h, f1, f0;"  # f1 is the upper half
)
_REGISTERS = ".reg .b32 w,t,h,m,k; .reg .b16 h0,h1; .reg .f32 f0,f1;"


def _nibbles(bits: int, bf16: bool) -> str:
    """Return PTX that unpacks a word of nibbles: $0..$7 are the outputs, a pair for each of the slots 0..3.

    The inputs: $8 the word, then with 5 or 6 bits the word of `high`, then two constants.
    """
    minus, minus_16th = ("$9", "$10") if bits == 4 else ("$10", "$11")
    lines = [_REGISTERS, f"mov.b32 m, {'0x43004300' if bf16 else '0x64006400'};"]
    lines.append(f"mov.b32 k, {'0x3f803f80' if bf16 else '0x2c002c00'};")  # 1, 1/16
    for slot in range(4):
        # float16 has room for a nibble at bit 4: its value is 16 times too large, but two slots need no shift
        at = 0 if bf16 else 4 * (slot % 2)
        shift = 4 * slot - at
        lines.append(f"shr.u32 w, $8, {shift};" if shift else "mov.b32 w, $8;")
        lines.append(f"lop3.b32 h, w, {0x000F000F << at:#x}, m, 0xea;")  # (w & mask) | m
        if bits > 4:
            up = at + 4 - (bits - 4) * slot
            lines.append(f"shl.b32 t, $9, {up};" if up >= 0 else f"shr.u32 t, $9, {-up};")
            lines.append(f"lop3.b32 h, t, {(0x00010001 if bits == 5 else 0x00030003) << (at + 4):#x}, h, 0xea;")
        if bf16:
            lines.append(f"fma.rn.bf16x2 h, h, k, {minus};")
        elif at:
            lines.append(f"fma.rn.f16x2 h, h, k, {minus_16th};")
        else:
            lines.append(f"add.rn.f16x2 h, h, {minus};")
        lines.append(f"mov.b32 {{${2 * slot},${2 * slot + 1}}}, h;")
    return "{" + " ".join(lines) + "}"


def _bytes(signed: bool, bf16: bool) -> str:
    """Return PTX that unpacks four bytes: $4 the word, $5 a constant; the outputs $0..$3 are the pairs p = 0, 1."""
    lines = [_REGISTERS, "mov.b32 m, 0x64646464;", f"xor.b32 w, $4, {'0x80808080' if signed else '0'};"]
    convert = f"add.rn.f16x2 h, h, $5; {_TO_BF16 if bf16 else ''}"
    if signed and bf16:
        lines[1:] = [_BYTE_CONSTANTS, "mov.b32 z, 0xc300c300; mov.b32 m, 0; mov.b32 w, $4;"]
        convert = _byte_to_bf16("0xea")
    for p in range(2):
        lines.append(f"prmt.b32 h, w, m, {(0x4140, 0x4342)[p]:#x}; {convert}")
        lines.append(f"mov.b32 {{${2 * p},${2 * p + 1}}}, h;")
    return "{" + " ".join(lines) + "}"


_BYTE_CONSTANTS = ".reg .b32 e,o,z; mov.b32 e, 0x3f803f80; mov.b32 o, 0x43004300;"  # 1, 128


def _byte_to_bf16(combine: str) -> str:
    """Return PTX that converts h, a pair of bytes: bfloat16 has room for 128 + seven bits; then subtract 128 or 256.

    The eighth bit of the byte chooses between the two. It is the last bit of the exponent of z: "0xea" sets it in
    z = -128 (signed bytes), "0x6a" flips it in z = -256 (bytes with 128 added).
    """
    lines = f"lop3.b32 t, h, 0x00800080, z, {combine}; lop3.b32 h, h, 0x007f007f, o, 0xea;"
    return f"{lines} fma.rn.bf16x2 h, h, e, t;"


def _fp8(bf16: bool) -> str:
    """Return PTX that unpacks four e4m3 bytes: $4 the word; the outputs $0..$3 are the pairs p = 0, 1."""
    # k corrects the difference between the exponents' biases: 2 ** 120, or 2 ** 8
    constants = "mov.b32 k, 0x7b807b80; mov.b32 w, 0x80008000;" if bf16 else "mov.b32 k, 0x5c005c00;"
    shift, mask = (4, "0x07f007f0") if bf16 else (1, "0x3f803f80")
    lines = [_REGISTERS, constants, "mov.b32 m, 0;"]
    for p in range(2):
        lines.append(f"prmt.b32 t, $4, m, {(0x1404, 0x3424)[p]:#x}; shr.u32 h, t, {shift}; and.b32 h, h, {mask};")
        scale = "fma.rn.bf16x2 h, h, k, w;" if bf16 else "mul.rn.f16x2 h, h, k;"  # adding w = -0 changes no product
        lines.append(f"lop3.b32 h, t, 0x80008000, h, 0xea; {scale}")
        lines.append(f"mov.b32 {{${2 * p},${2 * p + 1}}}, h;")
    return "{" + " ".join(lines) + "}"


def _codebook(bf16: bool, small: bool = False, short: bool = False) -> str:
    """Return PTX that looks up the nibbles of a word: $0..$7 are the outputs, a pair for each of the slots 0..3.

    The inputs: $8 the word, $9..$12 the 16 values plus 128, a byte each. With `small` they are the values plus 64, all
    below 128, for which bfloat16 has room; with `short` the upper bytes of the values as float16 (the lower are 0).
    """
    lines = [_REGISTERS, ".reg .b32 a,b,c,l,n;"]
    pairs = (0x4140, 0x4342)  # the lower byte of each half comes from w, the upper one from m
    if short:
        pairs, convert = (0x1404, 0x3424), ""
        lines.append("mov.b32 m, 0;")
    elif small:
        convert = "fma.rn.bf16x2 h, h, e, k;"
        lines.append(".reg .b32 e; mov.b32 m, 0x43434343; mov.b32 k, 0xc340c340; mov.b32 e, 0x3f803f80;")  # -192, 1
    elif bf16:
        convert = _byte_to_bf16("0x6a")
        lines.append(f"{_BYTE_CONSTANTS} mov.b32 z, 0xc380c380; mov.b32 m, 0;")
    else:
        convert = "add.rn.f16x2 h, h, k;"
        lines.append("mov.b32 m, 0x64646464; mov.b32 k, 0xe480e480;")  # -(1024 + 128)
    # prmt selects one of 8 bytes by a nibble; bit 3 of the code then chooses between the halves of the codebook
    lines.append("and.b32 a, $8, 0x77777777; shr.u32 b, $8, 1; mov.b32 c, 0x32103210;")
    lines.append("lop3.b32 b, b, 0x44444444, c, 0xea;")
    for half in "ln":
        lines.append(f"prmt.b32 t, $9, $10, a; prmt.b32 w, $11, $12, a; prmt.b32 {half}, t, w, b;")
        lines.append("shr.u32 a, a, 16; shr.u32 b, b, 16;" if half == "l" else "")
    for two in range(2):
        lines.append(f"prmt.b32 w, l, n, {(0x5140, 0x7362)[two]:#x};")
        for one in range(2):
            slot = 2 * two + one
            lines.append(f"prmt.b32 h, w, m, {pairs[one]:#x}; {convert}")
            lines.append(f"mov.b32 {{${2 * slot},${2 * slot + 1}}}, h;")
    return "{" + " ".join(lines) + "}"


NIBBLES_F16 = tl.constexpr({bits: _nibbles(bits, False) for bits in (4, 5, 6)})
NIBBLES_BF16 = tl.constexpr({bits: _nibbles(bits, True) for bits in (4, 5, 6)})
BYTES_F16 = tl.constexpr({signed: _bytes(signed, False) for signed in (False, True)})
BYTES_BF16 = tl.constexpr({signed: _bytes(signed, True) for signed in (False, True)})
FP8_F16 = tl.constexpr(_fp8(False))
FP8_BF16 = tl.constexpr(_fp8(True))
CODEBOOK_F16 = tl.constexpr({short: _codebook(False, short=short) for short in (False, True)})
CODEBOOK_BF16 = tl.constexpr({small: _codebook(True, small) for small in (False, True)})

EIGHT = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h")


@triton.jit
def twice(like, BITS: tl.constexpr):
    """Return an int32 tensor in the shape of `like` whose two halves are both the 16 BITS."""
    BOTH: tl.constexpr = BITS | (BITS << 16)
    return tl.full(like.shape, BOTH - (1 << 32) if BOTH >= (1 << 31) else BOTH, tl.int32)


@triton.jit
def book_word(like, BOOK: tl.constexpr, I: tl.constexpr, BIAS: tl.constexpr):
    """Return bytes 4 * I to 4 * I + 3 of a codebook, each plus BIAS (0, 64 or 128), as int32 in the shape of `like`."""
    WORD: tl.constexpr = ((BOOK >> (32 * I)) & (0x7F7F7F7F if BIAS == 64 else 0xFFFFFFFF)) ^ (BIAS * 0x01010101)
    return tl.full(like.shape, WORD - (1 << 32) if WORD >= (1 << 31) else WORD, tl.int32)


@triton.constexpr_function
def upper_bytes(book):
    """Return the upper bytes of a codebook's values as float16, as one number; 0 if some lower byte is not 0."""
    packed = 0
    for i in range(16):
        value = ((int(book) >> (8 * i) & 255) ^ 128) - 128
        size = -value if value < 0 else value
        exponent = 0
        while size >> exponent > 1:
            exponent += 1
        if size & (max(1 << exponent >> 2, 1) - 1) != 0:  # more than two bits of mantissa
            return 0
        if size != 0:
            byte = (exponent + 15) << 2 | (size << 2 >> exponent) & 3
            packed |= (byte | (128 if value < 0 else 0)) << (8 * i)
    return packed


@triton.jit
def unpack_nibbles(
    words, high, BITS: tl.constexpr, ZERO: tl.constexpr, BOOK: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):
    """Unpack words of nibbles into 8 tensors of DTYPE, in the shape of the words: number 2 * s + h.

    `high` comes from `high_words` (with 4 bits it is not read). BOOK is a codebook of 16 signed bytes as one number;
    with BOOK = 0 the value is the code minus ZERO.
    """
    if ASM and BOOK != 0:
        # bits 6 and 7 of each value are equal: all values are in -64 to 63
        SMALL: tl.constexpr = tl.bfloat16 == DTYPE and ((BOOK >> 1) ^ BOOK) & 0x40404040404040404040404040404040 == 0
        SHORT: tl.constexpr = 0 if tl.bfloat16 == DTYPE else upper_bytes(BOOK)
        BYTES: tl.constexpr = SHORT if SHORT != 0 else BOOK
        BIAS: tl.constexpr = 0 if SHORT != 0 else 64 if SMALL else 128
        b0 = book_word(words, BYTES, 0, BIAS)
        b1 = book_word(words, BYTES, 1, BIAS)
        b2 = book_word(words, BYTES, 2, BIAS)
        b3 = book_word(words, BYTES, 3, BIAS)
        return tl.inline_asm_elementwise(
            CODEBOOK_BF16[SMALL] if tl.bfloat16 == DTYPE else CODEBOOK_F16[SHORT != 0],
            EIGHT + ",r,r,r,r,r",
            [words, b0, b1, b2, b3],
            dtype=(tl.bfloat16,) * 8 if tl.bfloat16 == DTYPE else (tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    elif ASM:
        whole = twice(words, 0xC300 + ZERO if tl.bfloat16 == DTYPE else 0xE400 + ZERO)  # -(128 + zero), -(1024 + zero)
        sixteenth = twice(words, 0xD400 + 16 * ZERO)  # -(64 + zero), of float16
        return tl.inline_asm_elementwise(
            NIBBLES_BF16[BITS] if tl.bfloat16 == DTYPE else NIBBLES_F16[BITS],
            EIGHT + (",r,r,r" if BITS == 4 else ",r,r,r,r"),
            [words, whole, sixteenth] if BITS == 4 else [words, high, whole, sixteenth],
            dtype=(tl.bfloat16,) * 8 if tl.bfloat16 == DTYPE else (tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        return (
            unpack_nibble(words, high, 0, 0, BITS, ZERO, BOOK, DTYPE),
            unpack_nibble(words, high, 0, 1, BITS, ZERO, BOOK, DTYPE),
            unpack_nibble(words, high, 1, 0, BITS, ZERO, BOOK, DTYPE),
            unpack_nibble(words, high, 1, 1, BITS, ZERO, BOOK, DTYPE),
            unpack_nibble(words, high, 2, 0, BITS, ZERO, BOOK, DTYPE),
            unpack_nibble(words, high, 2, 1, BITS, ZERO, BOOK, DTYPE),
            unpack_nibble(words, high, 3, 0, BITS, ZERO, BOOK, DTYPE),
            unpack_nibble(words, high, 3, 1, BITS, ZERO, BOOK, DTYPE),
        )


@triton.jit
def unpack_nibble(
    words,
    high,
    SLOT: tl.constexpr,
    H: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    BOOK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    code = (words >> (4 * SLOT + 16 * H)) & 15
    if BITS == 5:
        code = code | (((high >> (SLOT + 16 * H)) & 1) << 4)
    elif BITS == 6:
        code = code | (((high >> (2 * SLOT + 16 * H)) & 3) << 4)
    if BOOK != 0:
        low = tl.where(code < 4, book_word(words, BOOK, 0, 0), book_word(words, BOOK, 1, 0))
        top = tl.where(code < 12, book_word(words, BOOK, 2, 0), book_word(words, BOOK, 3, 0))
        four = tl.where(code < 8, low, top)
        return ((four << (24 - 8 * (code & 3))) >> 24).to(tl.float32).to(DTYPE)
    else:
        return (code - ZERO).to(tl.float32).to(DTYPE)  # the interpreter cannot convert integers to bfloat16


@triton.jit
def unpack_bytes(words, CODE: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Unpack words of bytes into 4 tensors of DTYPE, in the shape of the words: number 2 * p + h.

    CODE is "unsigned" (the value is the byte minus ZERO), "signed" or "fp8" (e4m3, whose NaN becomes 480).
    """
    if ASM and CODE == "fp8":
        return tl.inline_asm_elementwise(
            FP8_BF16 if tl.bfloat16 == DTYPE else FP8_F16,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.bfloat16,) * 4 if tl.bfloat16 == DTYPE else (tl.float16,) * 4,
            is_pure=True,
            pack=1,
        )
    elif ASM:
        # a byte minus 128 is a signed byte with its first bit flipped; for bfloat16 the signed code is shorter
        FLIPPED: tl.constexpr = tl.bfloat16 == DTYPE and CODE == "unsigned" and ZERO == 128
        SIGNED: tl.constexpr = CODE == "signed" or FLIPPED
        whole = twice(words, 0xE400 + (128 if SIGNED else ZERO))
        return tl.inline_asm_elementwise(
            BYTES_BF16[SIGNED] if tl.bfloat16 == DTYPE else BYTES_F16[SIGNED],
            "=h,=h,=h,=h,r,r",
            [words ^ twice(words, 0x8080) if FLIPPED else words, whole],
            dtype=(tl.bfloat16,) * 4 if tl.bfloat16 == DTYPE else (tl.float16,) * 4,
            is_pure=True,
            pack=1,
        )
    else:
        return (
            unpack_byte(words, 0, CODE, ZERO, DTYPE),
            unpack_byte(words, 1, CODE, ZERO, DTYPE),
            unpack_byte(words, 2, CODE, ZERO, DTYPE),
            unpack_byte(words, 3, CODE, ZERO, DTYPE),
        )


@triton.jit
def unpack_byte(words, I: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr):
    if CODE == "signed":
        return ((words << (24 - 8 * I)) >> 24).to(tl.float32).to(DTYPE)
    elif CODE == "fp8":
        return e4m3_value(words >> (8 * I)).to(DTYPE)
    else:
        return (((words >> (8 * I)) & 255) - ZERO).to(tl.float32).to(DTYPE)


@triton.jit
def e4m3_value(byte):
    """Return the lowest byte of each int32 as an e4m3 number, in float32; NaN becomes 480.

    Integer arithmetic: GPUs before sm_89 have no conversion from e4m3.
    """
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)  # the float16 of value / 256
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def arrange_words(words, W: tl.constexpr, KW: tl.constexpr):
    """Arrange the words (lane, jb, rb) of W chunks, [W, 128], as [W, 16 rows, 8]."""
    words = tl.reshape(words, [W, 8, 4, 2, 2])  # l4, lm, jb, rb
    words = tl.permute(words, [0, 4, 1, 3, 2] if KW == 2 else [0, 4, 1, 2, 3])
    return tl.reshape(words, [W, 16, 8])


@triton.jit
def high_words(high, BITS: tl.constexpr, W: tl.constexpr, KW: tl.constexpr):
    """Arrange W chunks of the plane `high` as [W, 16 rows, 8]: element by element, the upper bits of the words.

    The lowest bits of each half belong to slot 0.
    """
    # Not tl.join: for joined words the compiler would choose another order of columns (KW) in these dots only.
    rb = tl.arange(0, 2)[None, None, None, None, :]
    if BITS == 5:
        jb = tl.arange(0, 2)[None, None, None, :, None]
        high = tl.reshape(high, [W, 8, 4, 1, 1]) >> (8 * jb + 4 * rb)
    else:
        high = tl.reshape(high, [W, 8, 4, 2, 1]) >> (8 * rb)
    return arrange_words(high, W, KW)


@triton.jit
def fragment(p0h0, p0h1, p1h0, p1h1, W: tl.constexpr, KW: tl.constexpr = 2):
    """Join the four values of each word, all [W, 16, 8 columns c], into the left operand [W, 16 rows, 32 columns].

    Its columns are in the order (p, c, h), with KW = 4 in the order (c, p, h).
    """
    parts = tl.join(tl.join(p0h0, p1h0), tl.join(p0h1, p1h1))  # [.., p, h]
    return tl.reshape(tl.permute(parts, [0, 1, 3, 2, 4]) if KW == 2 else parts, [W, 16, 32])


@triton.jit
def group_fragment(h0, h1, W: tl.constexpr, KW: tl.constexpr):
    """Join the two values of a slot, all [W, 16, 8 columns c], into the left operand [W, 16 rows, 16 columns].

    Its columns are in the order (jb, lm, h), with KW = 4 in the order (lm, jb, h).
    """
    pair = tl.join(h0, h1)
    if KW == 4:
        pair = tl.permute(tl.reshape(pair, [W, 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    return tl.reshape(pair, [W, 16, 16])


@triton.jit
def group_x_fragment(x, W: tl.constexpr, KW: tl.constexpr):
    """Turn 8 rows of x for each of W chunks, [W * 8, 16] as in memory, into the right operand of a `group_fragment`."""
    x = tl.reshape(x, [W, 8, 4, 2, 2])  # row, lm, jb, h
    x = tl.permute(x, [0, 3, 2, 4, 1] if KW == 2 else [0, 2, 3, 4, 1])
    return tl.reshape(x, [W, 16, 8])


@triton.jit
def x_fragment(x, W: tl.constexpr, KW: tl.constexpr):
    """Turn 8 rows of x for each of W chunks, [W * 8, 32] as in memory, into the right operand [W, 32, 8].

    The operand fits a `fragment` of words that were arranged with KW = 2, whose columns c are (jb, lm).
    """
    x = tl.reshape(x, [W, 8, 4, 2, 2, 2])  # row, lm, p, jb, h
    # an instruction reads jb = 0 and 1 of one p: they are neighbours in memory, so no register is moved
    x = tl.permute(x, [0, 3, 4, 2, 5, 1] if KW == 2 else [0, 4, 2, 3, 5, 1])
    return tl.reshape(x, [W, 32, 8])


@triton.jit
def joined_x_fragment(p0, p1, W: tl.constexpr, KW: tl.constexpr):
    """Return the operand of `x_fragment` from the columns with p = 0 and those with p = 1, each [W * 8, 16]."""
    x = tl.reshape(tl.join(p0, p1), [W, 8, 4, 2, 2, 2])  # row, lm, jb, h, p
    x = tl.permute(x, [0, 5, 3, 2, 4, 1] if KW == 2 else [0, 3, 2, 5, 4, 1])
    return tl.reshape(x, [W, 32, 8])


@triton.jit
def row_fragment(upper, lower, W: tl.constexpr, KW: tl.constexpr):
    """Turn rows as they lie in memory into the left operand [W, 16, 32].

    `upper` and `lower`, each [W * 8, 32], are rows 0 to 7 and rows 8 to 15 of each of W tiles.
    """
    rows = tl.join(tl.reshape(upper, [W, 8, 4, 2, 2, 2]), tl.reshape(lower, [W, 8, 4, 2, 2, 2]))
    rows = tl.permute(rows, [0, 6, 1, 3, 4, 2, 5] if KW == 2 else [0, 6, 1, 4, 2, 3, 5])  # from row, lm, p, jb, h, rb
    return tl.reshape(rows, [W, 16, 32])


@triton.jit
def dot_probe(words, x, out):
    """Multiply four chunks of 4-bit codes, 16 rows by 32 columns each, by 8 rows of x.

    `kwidth` compiles this dot, which has the form of those in the kernels, and never launches it.
    """
    w = tl.reshape(tl.load(words + tl.arange(0, 512)), [4, 8, 4, 2, 2])
    w = tl.reshape(tl.permute(w, [0, 4, 1, 3, 2]), [4, 16, 8])
    low = tl.join(_probe_nibbles(w, 0), _probe_nibbles(w, 8))
    high = tl.join(_probe_nibbles(w, 16), _probe_nibbles(w, 24))
    a = tl.reshape(tl.permute(tl.join(low, high), [0, 1, 3, 2, 4]), [4, 16, 32])
    n = tl.arange(0, 32)
    v = tl.load(x + ((n // 8) * 64 + (n % 8) * 4096)[:, None] + tl.arange(0, 32)[None, :])
    v = tl.reshape(v, [4, 8, 4, 2, 2, 2])
    b = tl.reshape(tl.permute(v, [0, 3, 4, 2, 5, 1]), [4, 32, 8])
    row = tl.arange(0, 4)[:, None, None] * 128 + tl.arange(0, 16)[None, :, None] * 8
    tl.store(out + row + tl.arange(0, 8)[None, None, :], tl.dot(a, b))


@triton.jit
def _probe_nibbles(w, shift: tl.constexpr):
    return ((w >> shift) & 15).to(tl.float16)
