"""Rounding of cached values to codes, and the rotation before it: the specification to the last bit, in plain torch.

Owns the arithmetic of every code format. Knows nothing of where codes are stored. All arithmetic is float32, each
operation is rounded to nearest even, and no multiplication is fused with an addition:

    int8   scale = f16(largest * f32(1/127))     code = round(x * (1 / scale)), -127 to 127      scale * code
    fp8    scale = f16(largest * f32(1/448))     code = e4m3(x * (1 / scale)), at most 448       scale * code
    int6   scale = f16(extreme * -1/32)          code = round(x * (1 / scale)) + 32, 0 to 63     scale * (code - 32)
    int4   scale = f16(extreme * -1/8)           code = round(x * (1 / scale)) + 8, 0 to 15      scale * (code - 8)

`largest` is the largest magnitude of the group; `extreme` is the value with that magnitude (the positive one of two).
The extreme gets code 0, so that all 16 or 64 codes are used. A group is 32 dimensions, of fp8 the whole head: a float's
own exponent does the rest. If the scale of a group rounds to 0, its codes stand for 0.

The Hadamard rotation spreads an outlier over its whole group of 32. The matrix is orthonormal and symmetric, so the
rotation is its own inverse: 32 ** -0.5 at (i, j), negative where i & j has an odd number of ones.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GROUP = 32
CodeKind = Literal["int8", "fp8", "int6", "int4"]
ZERO = {"int6": 32, "int4": 8}
ROTATION_FACTOR = 32**-0.5  # multiplied last, as a float32
FP8_MAX = 448.0


def num_groups(width: int, kind: CodeKind) -> int:
    """Return the number of scales of one head of one token."""
    return 1 if kind == "fp8" else width // GROUP


def encode(x: Tensor, kind: CodeKind) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8 [..., width], and scales, float16 [..., groups], of x float32 [..., width]."""
    groups = num_groups(x.shape[-1], kind)
    grouped = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    high, low = grouped.amax(-1, keepdim=True), -grouped.amin(-1, keepdim=True)
    if kind in ZERO:
        zero = ZERO[kind]
        scale = (torch.where(high >= low, high, -low) * (-1 / zero)).half()
        code = torch.round((grouped * _inverse(scale)).clamp(-zero, zero - 1)) + zero
        codes = code.to(torch.uint8)
    elif kind == "int8":
        scale = (torch.maximum(high, low) * (1 / 127)).half()
        codes = torch.round((grouped * _inverse(scale)).clamp(-127, 127)).to(torch.int8).view(torch.uint8)
    else:
        scale = (torch.maximum(high, low) * (1 / FP8_MAX)).half()
        scaled = (grouped * _inverse(scale)).clamp(-FP8_MAX, FP8_MAX)
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(-2), scale.squeeze(-1)


def decode(codes: Tensor, scales: Tensor, kind: CodeKind) -> Tensor:
    """Return the values, float32 [..., width], of codes and scales that `encode` returned."""
    if kind == "int8":
        plain = codes.view(torch.int8).float()
    elif kind == "fp8":
        plain = codes.view(torch.float8_e4m3fn).float()
    else:
        plain = codes.float() - ZERO[kind]
    grouped = plain.reshape(*scales.shape, plain.shape[-1] // scales.shape[-1])
    return (grouped * scales.float().unsqueeze(-1)).flatten(-2)


def rotate(x: Tensor) -> Tensor:
    """Rotate the groups of the last dimension, float32 [..., 32 * n]: sums and differences 16, 8, 4, 2 and 1 apart."""
    shape = x.shape
    for stride in (16, 8, 4, 2, 1):
        pairs = x.reshape(*shape[:-1], shape[-1] // (2 * stride), 2, stride)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([first + second, first - second], -2)
    return x.reshape(shape) * ROTATION_FACTOR


def _inverse(scale: Tensor) -> Tensor:
    wide = scale.float()
    return torch.where(wide == 0, 0.0, 1.0 / wide)
