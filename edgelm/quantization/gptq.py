"""GPTQ: rounding column by column, where the columns that follow compensate the error of those before.

Frantar and others, GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (2022): the
update in section 3.1, the damping and the Cholesky factor in section 3.3, its algorithm 1. The order of the columns by
their inputs (act-order) is of the authors' code; scales are fixed before it, so that no file has to state the order.
Knows nothing of files and models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelm.quantization.int4 import Codes, Int4Format, fit, quantize_plainly, rounded

DAMPING = 0.01  # of the mean of the Hessian's diagonal
MAX_DAMPING = 1.0
BLOCK = 128  # columns whose errors are applied to those after them together


def compensated(weight: Tensor, hessian: Tensor, form: Int4Format, *, ordered: bool = True) -> Codes | None:
    """Return codes for a matrix [rows, columns], from the Hessian X^T X of its inputs X [tokens, columns].

    With `ordered`, columns with large inputs come first, and the scales are those of the matrix before any
    compensation; else the scales of a group are found when its first column comes. None: the Hessian is singular.
    """
    factor, order = _factor(hessian, ordered=ordered)
    if factor is None:
        return None
    importance = hessian.diagonal().view(-1, form.group)
    weight = weight.to(factor.dtype)
    groups = weight.unflatten(1, (-1, form.group))
    scales, zeros = (part.squeeze(-1) for part in fit(groups, form, importance))  # [rows, groups]
    columns = weight[:, order].clone()
    codes = torch.empty_like(columns)
    group_of = (order // form.group).tolist()
    block = -(-BLOCK // form.group) * form.group
    for start in range(0, columns.shape[1], block):
        end = min(start + block, columns.shape[1])
        errors = torch.empty_like(columns[:, start:end])
        for j in range(start, end):
            index = group_of[j]
            if not ordered and j % form.group == 0:
                span = slice(j, j + form.group)
                scale, zero = fit(columns[:, span], form, importance[index])
                scales[:, index], zeros[:, index] = scale.squeeze(-1), zero.squeeze(-1)
            scale, zero = scales[:, index], zeros[:, index]
            codes[:, j] = rounded(columns[:, j], scale, zero)
            error = (columns[:, j] - scale * (codes[:, j] - zero)) / factor[j, j]
            columns[:, j:end] -= error[:, None] * factor[j, j:end]
            errors[:, j - start] = error
        columns[:, end:] -= errors @ factor[start:end, end:]
    in_order = torch.empty_like(codes)
    in_order[:, order] = codes
    return Codes(in_order.to(torch.uint8), scales.to(form.scale_dtype), zeros.to(torch.uint8))


def compensated_or_plain(weight: Tensor, hessian: Tensor, form: Int4Format) -> Codes:
    """Return codes for a matrix, plainly rounded ones where the Hessian is singular with any damping."""
    codes = compensated(weight, hessian, form)
    return quantize_plainly(weight, form, hessian.diagonal()) if codes is None else codes


def _factor(hessian: Tensor, *, ordered: bool) -> tuple[Tensor | None, Tensor]:
    """Return the upper Cholesky factor of the damped Hessian's inverse, and the order of its columns."""
    diagonal = hessian.diagonal()
    order = torch.arange(len(diagonal), device=diagonal.device)
    if ordered:
        order = torch.argsort(diagonal, descending=True, stable=True)
    hessian = hessian[order][:, order].clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1  # an input that was always zero: its column is rounded, and compensates nothing
    mean = float(diagonal.mean())
    damping = DAMPING
    while damping <= MAX_DAMPING:
        damped = hessian + damping * mean * torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper, order
        damping *= 10
    return None, order
