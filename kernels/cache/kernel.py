"""Device code of the cache's formats: the rotation and the rounding that edgelm.kernels.cache.quantize defines.

Owns the arithmetic in Triton. It is bit-equal to the reference if a kernel is compiled without fusing multiplications
with additions (enable_fp_fusion=False). Knows nothing of planes, or of its callers. Tiles are [ROWS, P]: ROWS heads,
and P dimensions of a head, a power of 2 of at least 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelm.kernels.gpu_target import triton_has_faults

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds a float32 to a whole number, half to even
FACTOR = tl.constexpr(32**-0.5)
E4M3_ROUNDER = tl.constexpr(16384.0)  # float32 has steps of 2**-9 above it, as e4m3 has below 2**-6
E4M3_ROUNDER_BITS = tl.constexpr(0x46800000)
# Triton 3.6 reduces over the wrong lanes where the bits of a lane's number that count along the axis are not side by
# side, as in its layout for the keys of k6v4 (triton-lang/triton, pull request 9219). An axis of two has one bit.
IN_PAIRS = tl.constexpr(triton_has_faults())


@triton.jit
def hadamard(x, ROWS: tl.constexpr, P: tl.constexpr):
    """Rotate each group of 32 of x, float32 [ROWS, P]; the same additions as `quantize.rotate`."""
    for step in tl.static_range(5):
        x = _butterfly(x, 16 >> step, ROWS, P)
    return x * FACTOR


@triton.jit
def _butterfly(x, STRIDE: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr):
    """Return sums and differences of the columns STRIDE apart: float32 [ROWS, P]."""
    pairs = tl.permute(tl.reshape(x, [ROWS, P // (2 * STRIDE), 2, STRIDE]), [0, 1, 3, 2])
    first, second = tl.split(pairs)
    pairs = tl.permute(tl.join(first + second, first - second), [0, 1, 3, 2])
    return tl.reshape(pairs, [ROWS, P])


@triton.jit
def quantize(x, KIND: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr):
    """Return the codes of x, int32 [ROWS, P] (signed for int8), and its scales, float16 [ROWS, groups]."""
    GROUPS: tl.constexpr = 1 if KIND == "fp8" else P // 32
    grouped = tl.reshape(x, [ROWS, GROUPS, P // GROUPS])
    high = _largest(grouped)
    low = _largest(-grouped)
    if KIND == "int8":
        scale = tl.maximum(high, low) * (1 / 127)
    elif KIND == "fp8":
        scale = tl.maximum(high, low) * (1 / 448)
    elif KIND == "int6":
        scale = tl.where(high >= low, high, -low) * (-1 / 32)
    else:
        scale = tl.where(high >= low, high, -low) * (-1 / 8)
    stored = scale.to(tl.float16)
    wide = stored.to(tl.float32)
    one = tl.full(wide.shape, 1.0, tl.float32)
    inverse = tl.where(wide == 0, 0.0, tl.div_rn(one, tl.where(wide == 0, 1.0, wide)))
    scaled = grouped * inverse[:, :, None]
    if KIND == "int8":
        codes = _rounded(scaled, -127.0, 127.0)
    elif KIND == "int6":
        codes = _rounded(scaled, -32.0, 31.0) + 32
    elif KIND == "int4":
        codes = _rounded(scaled, -8.0, 7.0) + 8
    else:
        codes = _e4m3(scaled)
    return tl.reshape(codes, [ROWS, P]), stored


@triton.jit
def _largest(x):
    """Return the maxima over the last axis of [ROWS, groups, N]; N is a power of 2, at most 256."""
    if IN_PAIRS:
        for _ in tl.static_range(8):
            if x.shape[2] > 1:
                x = tl.max(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]), 3)
        return tl.reshape(x, [x.shape[0], x.shape[1]])
    else:
        return tl.max(x, 2)


@triton.jit
def _rounded(x, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """Return x clamped and rounded to whole numbers, half to even: int32 of the same shape."""
    return ((tl.minimum(tl.maximum(x, LOWEST), HIGHEST) + ROUNDER) - ROUNDER).to(tl.int32)


@triton.jit
def _e4m3(x):
    """Return x rounded to e4m3, half to even, as bits in int32; GPUs before sm_89 have no instruction for it."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + E4M3_ROUNDER).to(tl.int32, bitcast=True) - E4M3_ROUNDER_BITS
    return tl.where(tl.abs(x) < 0.015625, small, normal) | ((bits >> 24) & 128)
