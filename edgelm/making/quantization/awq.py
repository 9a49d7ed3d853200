"""AWQ: inputs that are large are divided by a scale and their columns multiplied by it, so that these round better.

Lin and others, AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration (2023): the scales
s = mean |x| ** alpha and the search for alpha in section 3.2, equations 4 and 5, with clipping of the weights. The
division is folded into the norm or the matrix before, so that the model computes the same without another op. Knows
nothing of files and models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgelm.making.quantization.int4 import FEW_SHARES, Int4Format, quantize_plainly

NUM_ALPHAS = 20
SMALLEST = 1e-4  # mean of an input's size
MAX_ROWS = 1024  # of a matrix, for the search


def best_scales(matrices: Sequence[tuple[Tensor, Tensor]], magnitude: Tensor, form: Int4Format) -> Tensor:
    """Return the factor of each column, [columns], with which matrices after one norm have the least output error.

    A matrix comes with the Hessian X^T X of its inputs X [tokens, columns]; `magnitude` is the mean of |X|. The error
    of its outputs, of all tokens, is the trace of E @ X^T X @ E^T.
    """
    sample = [(weight[:: -(-len(weight) // MAX_ROWS)], hessian) for weight, hessian in matrices]
    best, least = torch.ones_like(magnitude), torch.inf
    for step in range(NUM_ALPHAS):
        scales = magnitude.clamp_min(SMALLEST).pow(step / NUM_ALPHAS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = sum(float(_output_error(weight, scales, hessian, form)) for weight, hessian in sample)
        if error < least:
            best, least = scales, error
    return best


def exact_quotient(values: Tensor, scales: Tensor, dtype: torch.dtype, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Divide numbers of a file by scales; return what to store, and the scales that this really divides by.

    The file holds them as `dtype`, less `offset`. Rounding there changes the scale a little, and is no error then.
    """
    true = values.float() + offset
    stored = (true / scales - offset).to(dtype)
    divided = stored.float() + offset
    kept = (divided * true <= 0) & (true != 0)  # too small for the type
    stored = torch.where(kept, values.to(dtype), stored)
    return stored, torch.where(kept, 1.0, torch.where(true == 0, scales, true / torch.where(true == 0, 1.0, divided)))


def powers_of_two(scales: Tensor) -> Tensor:
    """Return the nearest powers of two, which change no digit of a number that they multiply."""
    return scales.log2().round().exp2()


def _output_error(weight: Tensor, scales: Tensor, hessian: Tensor, form: Int4Format) -> Tensor:
    importance = hessian.diagonal() / scales.square()
    error = quantize_plainly(weight * scales, form, importance, FEW_SHARES).values() / scales - weight
    return ((error @ hessian) * error).sum()
