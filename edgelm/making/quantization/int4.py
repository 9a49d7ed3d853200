"""INT4 codes of a matrix: the scale and the zero point of each group of columns, rounding, and the packed words.

    value = scale * (code - zero)      code and zero: 0 to 15; without zero points, zero is 8

Owns the search for scales and the layout `pack-quantized` of compressed-tensors. Knows nothing of files and models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

HIGHEST = 15  # code
MIDDLE = 8  # the zero point of a symmetric group
PER_WORD = 8  # codes in an int32
# The search tries the range of a group, narrower ones that clip the largest weights, and wider ones: the whole range is
# 7.5 steps to each side, and of the symmetric codes one side has 7.
SHARES = (1.0, 15 / 14, 1.04, *(1 - step / 40 for step in range(1, 17)))
FEW_SHARES = (1.0, 15 / 14, 0.9)


@dataclass(frozen=True, slots=True)
class Int4Format:
    """The format of all quantized matrices of a folder."""

    group: int  # columns that share a scale
    symmetric: bool
    scale_dtype: torch.dtype


class Codes(NamedTuple):
    """A quantized matrix."""

    codes: Tensor  # uint8 [rows, columns]
    scales: Tensor  # [rows, groups] of the format's type
    zeros: Tensor  # uint8 [rows, groups]

    def values(self) -> Tensor:
        """Return the matrix that a reader computes, float32 [rows, columns]."""
        group = self.codes.shape[1] // self.scales.shape[1]
        scales, zeros = (part.float().repeat_interleave(group, 1) for part in (self.scales, self.zeros))
        return scales * (self.codes.float() - zeros)


def fit(
    groups: Tensor, form: Int4Format, importance: Tensor | None = None, shares: Sequence[float] = SHARES
) -> tuple[Tensor, Tensor]:
    """Return scale and zero point, [.., 1], of groups of weights, [.., group].

    The largest weight gets the outermost code. With `importance`, [.., group], weights may be clipped where that makes
    the sum of the squared errors, times the importance of their columns, smaller.
    """
    low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True).clamp_min(0)
    best = _grid(low, high, form)
    if importance is None:
        return best
    least = _error(groups, best, importance)
    for share in shares[1:]:
        grid = _grid(low * share, high * share, form)
        error = _error(groups, grid, importance)
        better = error < least
        best = torch.where(better, grid[0], best[0]), torch.where(better, grid[1], best[1])
        least = torch.where(better, error, least)
    return best


def rounded(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the codes, as floats, of values."""
    return (values / scale + zero).round().clamp(0, HIGHEST)


def quantize_plainly(
    weight: Tensor, form: Int4Format, importance: Tensor | None = None, shares: Sequence[float] = SHARES
) -> Codes:
    """Round each weight of a matrix, [rows, columns], to the nearest value; `importance`, [columns], is as in `fit`."""
    groups = weight.reshape(len(weight), -1, form.group)
    scale, zero = fit(groups, form, None if importance is None else importance.view(-1, form.group), shares)
    codes = rounded(groups, scale, zero).flatten(1)
    return Codes(codes.to(torch.uint8), scale.squeeze(-1).to(form.scale_dtype), zero.squeeze(-1).to(torch.uint8))


def pack_columns(codes: Tensor) -> Tensor:
    """Return int32 words [rows, columns / 8] of codes [rows, columns]: the first of eight in the lowest four bits."""
    rows, columns = codes.shape
    whole = torch.zeros(rows, -(-columns // PER_WORD) * PER_WORD, dtype=torch.int64, device=codes.device)
    whole[:, :columns] = codes
    shifts = torch.arange(0, 32, 4, device=codes.device)
    words = (whole.view(rows, -1, PER_WORD) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def packed(codes: Codes, form: Int4Format) -> dict[str, Tensor]:
    """Return the tensors of a matrix by their last name: zero points are packed along the rows."""
    tensors = {
        "weight_packed": pack_columns(codes.codes),
        "weight_scale": codes.scales,
        "weight_shape": torch.tensor(codes.codes.shape, dtype=torch.int64),
    }
    if not form.symmetric:
        tensors["weight_zero_point"] = pack_columns(codes.zeros.T).T.contiguous()
    return tensors


def _grid(low: Tensor, high: Tensor, form: Int4Format) -> tuple[Tensor, Tensor]:
    """Return scale and zero point for the range of a group, as compressed-tensors computes them."""
    if form.symmetric:
        scale = _stored(torch.maximum(-low, high) / (HIGHEST / 2), form)
        return scale, torch.full_like(scale, MIDDLE)
    scale = _stored((high - low) / HIGHEST, form)
    return scale, (-low / scale).round().clamp(0, HIGHEST)


def _stored(scale: Tensor, form: Int4Format) -> Tensor:
    """Round scales to what the file can hold; where that is zero, all weights are, and any scale gives zero."""
    limit = torch.finfo(form.scale_dtype).max
    scale = scale.clamp_max(limit).to(form.scale_dtype).to(scale.dtype)
    return torch.where(scale == 0, 1.0, scale)


def _error(groups: Tensor, grid: tuple[Tensor, Tensor], importance: Tensor) -> Tensor:
    scale, zero = grid
    values = scale * (rounded(groups, scale, zero) - zero)
    return ((values - groups).square() * importance).sum(-1, keepdim=True)
