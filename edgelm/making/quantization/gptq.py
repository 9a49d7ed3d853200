"""GPTQ: rounding column by column, where the columns that follow compensate the error of those before.

Frantar and others, GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (2022): the
update in section 3.1, the damping and the Cholesky factor in section 3.3, its algorithm 1. Columns keep their order, so
that no file has to state another one. Knows nothing of files and models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.making.quantization.int4 import Codes, Int4Format, fit, quantize_plainly, rounded

DAMPING = 0.01  # of the mean of the Hessian's diagonal
MAX_DAMPING = 1.0
BLOCK = 128  # columns whose errors are applied to those after them together


def compensated(weight: Tensor, hessian: Tensor, form: Int4Format) -> Codes | None:
    """Return codes for a matrix [rows, columns], from the Hessian X^T X of its inputs X [tokens, columns].

    The scale of a group is found when its first column comes. None: the Hessian is singular with any damping.
    """
    factor = _factor(hessian)
    if factor is None:
        return None
    columns = weight.to(factor.dtype, copy=True)
    codes = torch.empty_like(columns)
    scales, zeros = [], []
    block = -(-BLOCK // form.group) * form.group
    for start in range(0, columns.shape[1], block):
        end = min(start + block, columns.shape[1])
        errors = torch.empty_like(columns[:, start:end])
        for j in range(start, end):
            if j % form.group == 0:
                span = slice(j, j + form.group)
                scale, zero = (part.squeeze(-1) for part in fit(columns[:, span], form, hessian.diagonal()[span]))
                scales.append(scale)
                zeros.append(zero)
            codes[:, j] = rounded(columns[:, j], scales[-1], zeros[-1])
            error = (columns[:, j] - scales[-1] * (codes[:, j] - zeros[-1])) / factor[j, j]
            columns[:, j:end] -= error[:, None] * factor[j, j:end]
            errors[:, j - start] = error
        columns[:, end:] -= errors @ factor[start:end, end:]
    return Codes(
        codes.to(torch.uint8), torch.stack(scales, 1).to(form.scale_dtype), torch.stack(zeros, 1).to(torch.uint8)
    )


def compensated_or_plain(weight: Tensor, hessian: Tensor, form: Int4Format) -> Codes:
    """Return codes for a matrix, plainly rounded ones where the Hessian is singular with any damping."""
    codes = compensated(weight, hessian, form)
    return quantize_plainly(weight, form, hessian.diagonal()) if codes is None else codes


def _factor(hessian: Tensor) -> Tensor | None:
    """Return the upper Cholesky factor of the damped Hessian's inverse."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1  # an input that was always zero: its column is rounded, and compensates nothing
    mean = float(diagonal.mean())
    upper: Tensor
    damping = DAMPING
    while damping <= MAX_DAMPING:
        damped = hessian + damping * mean * torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10
    return None
