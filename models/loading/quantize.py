"""Quantization of 16-bit weights to 4 bits while a model loads, without calibration data.

Owns the search for the scale and the min of each group: half-quadratic quantization (Badri & Shaji 2023). It separates
the errors of a few outliers, which may stay, and fits scale and min to the rest by least squares.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from edgelm.kernels.layout import Layout
from edgelm.models.loading.packed import Parts, Rows, StoredMatrix, Uploads

GROUP = 64
LEVELS = 15  # the highest code
INT4 = Layout("int4", 4, GROUP, "f16", offset="min")
NORM = 0.7  # the power of an error in the cost: below 1, few large errors cost less than many small ones
PULL = 10.0  # the strength with which outliers follow the errors, in units of a group's mean weight; grows each round
PULL_GROWTH = 1.05
NUM_ROUNDS = 20
MAX_HALF = 65504.0


def quantize_rows(values: Tensor) -> Parts:
    """Return codes, scales and mins for a matrix, float32 [rows, columns]. No group is worse than by `rounded`."""
    rows, columns = values.shape
    whole = pad(values.unsqueeze(0), (0, -columns % GROUP), mode="replicate")
    groups = whole.reshape(rows, -1, GROUP)
    scale, minimum = _best_fit(groups)
    codes = _codes(groups, scale, minimum).to(torch.uint8).reshape(rows, -1)[:, :columns]
    return Parts(codes, scale.squeeze(-1).half(), minimum.squeeze(-1).half())


def rounded(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the min that map a group's smallest and largest weight to the outermost codes."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    return _as_half((high - low) / LEVELS), _as_half(low)


def _best_fit(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best scale and min of the alternating steps: float16 numbers in float32 [.., groups, 1]."""
    scale, minimum = best = rounded(groups)
    least = torch.full_like(scale, torch.inf)
    # the paper's threshold is for weights of size 1; it scales with the size to the power 2 - NORM
    threshold = groups.abs().mean(-1, keepdim=True).pow(2 - NORM) / PULL
    for _ in range(NUM_ROUNDS):
        codes = _codes(groups, scale, minimum)
        error = groups - (codes * scale + minimum)
        size = error.abs()
        mean_error = size.mean(-1, keepdim=True)
        better = mean_error < least
        best = torch.where(better, scale, best[0]), torch.where(better, minimum, best[1])
        least = torch.where(better, mean_error, least)
        outlying = error.sign() * (size - threshold * (size + 1e-12).pow(NORM - 1)).clamp_min(0)
        scale, minimum = _least_squares(codes, groups - outlying, scale)
        threshold = threshold / PULL_GROWTH
    return best


def _least_squares(codes: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the min with which codes come closest to the target."""
    mean_code, mean = codes.mean(-1, keepdim=True), target.mean(-1, keepdim=True)
    deviation = codes - mean_code
    variance = deviation.square().sum(-1, keepdim=True)
    slope = (deviation * (target - mean)).sum(-1, keepdim=True) / variance.clamp_min(1e-6)
    scale = _as_half(torch.where(variance > 0, slope, scale))
    return scale, _as_half(mean - scale * mean_code)


def _codes(groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    step = torch.where(scale == 0, 1, scale)
    return ((groups - minimum) / step).round().clamp(0, LEVELS)


def _as_half(numbers: Tensor) -> Tensor:
    """Round to what float16 can store."""
    return numbers.clamp(-MAX_HALF, MAX_HALF).half().float()


class QuantizedMatrix:
    """A matrix of 16 or 32 bits that is read as 4-bit codes."""

    def __init__(self, plain: StoredMatrix) -> None:
        self._plain = plain
        self.name = plain.name
        self.shape = plain.shape
        self.kind: Layout | torch.dtype = INT4

    def read(self, rows: Rows, uploads: Uploads) -> Parts:
        values = self._plain.read(rows, uploads)
        assert isinstance(values, Tensor)
        return quantize_rows(values.float())

    def order(self) -> Tensor | None:
        return None

    def close(self) -> None:
        self._plain.close()
