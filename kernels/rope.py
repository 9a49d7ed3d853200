"""Rotary position embedding: the angles, and the rotation in plain torch.

Owns the angles. Knows nothing of how a model scales its frequencies (linear, dynamic, llama3, yarn, longrope): every
scheme results in frequencies and one scale, which are all that a `Rope` has.

Angles are not float32 products: at position 100,000 such a product is off by up to 0.004. A frequency is kept in turns,
as a 64-bit fraction, so that the integer position * turns, without its overflow, is the angle to 2**-40 of a turn.
The sine and cosine are float32 polynomials, so that reference and kernel agree in every bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import factorial, pi

import torch
from torch import Tensor

# Taylor series at 0, used up to pi / 4; the first omitted term is 2e-9 of the sine and 1e-10 of the cosine there
SINE = tuple((-1) ** n / factorial(2 * n + 1) for n in range(5))
COSINE = tuple((-1) ** n / factorial(2 * n) for n in range(6))
RADIANS = 2 * pi / 2**32  # per unit of the upper half of the fraction


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """The rotation of the first 2 * half dimensions of a head, in pairs (i, i + half), or interleaved (2i, 2i + 1)."""

    frequencies: Tensor  # float32 [half], radians per position
    scale: float = 1.0  # of the sine and the cosine
    interleaved: bool = False
    growth: Tensor | None = None  # float32 [spans]: the factor of queries in each span of positions; None: 1
    span: int = 1  # positions; after the last span, its factor holds
    turns: Tensor = field(init=False)  # int64 [half]: turns per position times 2**64, without whole turns

    def __post_init__(self) -> None:
        turns = self.frequencies.double() / (2 * pi)
        object.__setattr__(self, "turns", ((turns - torch.round(turns)) * 2.0**64).to(torch.int64))

    @property
    def rotated_dim(self) -> int:
        return 2 * self.frequencies.shape[0]

    def to(self, device: torch.device | str) -> Rope:
        growth = None if self.growth is None else self.growth.to(device)
        return replace(self, frequencies=self.frequencies.to(device), growth=growth)


def sine_cosine(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sine and the cosine of each angle times the scale, float32 [tokens, half]."""
    top = (positions.to(torch.int64)[:, None] * rope.turns) >> 32  # turns * 2**32, -2**31 to 2**31 - 1
    quadrant = (top + 2**29) >> 30  # -2 to 2
    x = (top - (quadrant << 30)).to(torch.int32).float() * RADIANS  # within pi / 4
    square = x * x
    sine, cosine = torch.full_like(x, SINE[-1]), torch.full_like(x, COSINE[-1])
    for coefficient in SINE[-2::-1]:
        sine = sine * square + coefficient
    for coefficient in COSINE[-2::-1]:
        cosine = cosine * square + coefficient
    sine = sine * x
    odd = quadrant & 1 == 1
    sine, cosine = torch.where(odd, cosine, sine), torch.where(odd, sine, cosine)
    sine = torch.where(quadrant & 2 == 2, -sine, sine)
    cosine = torch.where((quadrant + 1) & 2 == 2, -cosine, cosine)
    return sine * rope.scale, cosine * rope.scale


def growth_at(rope: Rope, positions: Tensor) -> Tensor:
    """Return the factor of queries at `positions` [tokens]: float32 [tokens]."""
    if rope.growth is None:
        return torch.ones(positions.shape, device=positions.device)
    return rope.growth[(positions.long() // rope.span).clamp(max=len(rope.growth) - 1)]


def apply_rope(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotate x [tokens, num_heads, head_dim] by the angles at `positions` [tokens]; the result is float32."""
    x = x.float()
    sine, cosine = (part[:, None, :] for part in sine_cosine(rope, positions))
    rotated, rest = x[..., : rope.rotated_dim], x[..., rope.rotated_dim :]
    if rope.interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, -1)
    pair = first * cosine - second * sine, second * cosine + first * sine
    rotated = torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)
    return torch.cat([rotated, rest], -1)
