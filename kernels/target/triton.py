"""A dot in the form in which the kernels have theirs; compiled, never launched."""

import triton
import triton.language as tl


@triton.jit
def dot_probe(words, x, out):
    """Multiply four chunks of 4-bit codes, 16 rows by 32 columns each, by 8 rows of x."""
    w = tl.reshape(tl.load(words + tl.arange(0, 512)), [4, 8, 4, 2, 2])
    w = tl.reshape(tl.permute(w, [0, 4, 1, 3, 2]), [4, 16, 8])
    low = tl.join(_nibbles(w, 0), _nibbles(w, 8))
    high = tl.join(_nibbles(w, 16), _nibbles(w, 24))
    a = tl.reshape(tl.permute(tl.join(low, high), [0, 1, 3, 2, 4]), [4, 16, 32])
    n = tl.arange(0, 32)
    v = tl.load(x + ((n // 8) * 64 + (n % 8) * 4096)[:, None] + tl.arange(0, 32)[None, :])
    v = tl.reshape(v, [4, 8, 4, 2, 2, 2])
    b = tl.reshape(tl.permute(v, [0, 3, 4, 2, 5, 1]), [4, 32, 8])
    row = tl.arange(0, 4)[:, None, None] * 128 + tl.arange(0, 16)[None, :, None] * 8
    tl.store(out + row + tl.arange(0, 8)[None, None, :], tl.dot(a, b))


@triton.jit
def _nibbles(w, shift: tl.constexpr):
    return ((w >> shift) & 15).to(tl.float16)
