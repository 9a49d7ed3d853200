"""INT4 codes: the packed layout, the search for scales, GPTQ and AWQ, each against a plain version of the formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from edgelm.making.quantization.awq import best_scales, exact_quotient
from edgelm.making.quantization.gptq import compensated
from edgelm.making.quantization.int4 import Codes, Int4Format, fit, packed, quantize_plainly
from tests.models.loading.packers import pack_quantized

SYMMETRIC = Int4Format(32, symmetric=True, scale_dtype=torch.float32)
WITH_ZEROS = Int4Format(32, symmetric=False, scale_dtype=torch.float32)
FORMATS = pytest.mark.parametrize("form", [SYMMETRIC, WITH_ZEROS], ids=["symmetric", "zeros"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated_inputs(tokens: int, columns: int) -> Tensor:
    """Inputs as real ones are: correlated, and a few columns much larger than the others."""
    x = random(tokens, columns) @ random(columns, columns, seed=1) / columns**0.5
    x[:, ::16] *= 8
    return x


def output_error(weight: Tensor, codes: Codes, x: Tensor) -> float:
    return float(((codes.values().double() - weight) @ x.T).square().sum())


@FORMATS
def test_the_layout_is_that_of_compressed_tensors(form: Int4Format) -> None:
    codes = quantize_plainly(random(24, 64).float(), form)
    zeros = None if form.symmetric else codes.zeros.numpy().astype(np.int64)
    expected = pack_quantized(codes.codes.numpy().astype(np.int64), codes.scales, zeros)
    tensors = packed(codes, form)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert form.symmetric == (codes.zeros == 8).all()


@FORMATS
def test_plain_rounding_takes_the_nearest_value(form: Int4Format) -> None:
    weight = random(16, 64).float()
    codes = quantize_plainly(weight, form)
    steps = codes.scales.repeat_interleave(32, 1)
    assert ((codes.values() - weight).abs() <= 0.501 * steps).all()


def test_a_group_without_weights_is_zero() -> None:
    codes = quantize_plainly(torch.zeros(16, 32), WITH_ZEROS)
    assert not codes.values().any()


@FORMATS
def test_importance_protects_columns(form: Int4Format) -> None:
    weight, importance = random(64, 32).float(), torch.ones(32)
    importance[5] = 1e4
    plain, searched = quantize_plainly(weight, form), quantize_plainly(weight, form, importance)
    errors = [(codes.values() - weight).square() for codes in (plain, searched)]
    assert errors[1][:, 5].sum() < 0.5 * errors[0][:, 5].sum()


@FORMATS
def test_gptq_is_the_algorithm_of_the_paper(form: Int4Format) -> None:
    """Column after column, with the inverse of the Hessian of the columns that are left, as the paper derives it."""
    x, weight = correlated_inputs(400, 160), random(8, 160, seed=2)
    hessian = x.T @ x
    codes = compensated(weight, hessian, form)
    assert codes is not None
    damped = (hessian + 0.01 * hessian.diagonal().mean() * torch.eye(160, dtype=torch.float64)).numpy()
    left, scale, zero = weight.clone(), None, None
    for j in range(160):
        if j % 32 == 0:
            scale, zero = fit(left[:, j : j + 32], form, hessian.diagonal()[j : j + 32])
        assert scale is not None
        assert zero is not None
        inverse = torch.from_numpy(np.linalg.inv(damped[j:, j:]))
        code = (left[:, j : j + 1] / scale + zero).round().clamp(0, 15)
        assert torch.equal(code[:, 0].to(torch.uint8), codes.codes[:, j])
        error = (left[:, j : j + 1] - scale * (code - zero)) / inverse[0, 0]
        left[:, j:] -= error * inverse[0]


@FORMATS
def test_gptq_and_awq_have_less_output_error_than_rounding(form: Int4Format) -> None:
    x, weight = correlated_inputs(400, 128), random(32, 128, seed=2)
    hessian = (x.T @ x).float()
    plain = output_error(weight, quantize_plainly(weight.float(), form), x)
    codes = compensated(weight.float(), hessian, form)
    assert codes is not None
    assert output_error(weight, codes, x) < 0.6 * plain
    scales = best_scales([(weight.float(), hessian)], x.abs().mean(0).float(), form)
    scaled = quantize_plainly(weight.float() * scales, form)
    error = ((scaled.values() / scales).double() - weight) @ x.T
    assert float(error.square().sum()) < plain


def test_gptq_needs_no_full_rank() -> None:
    """Fewer tokens than columns, and inputs that are always zero."""
    x = correlated_inputs(20, 64)
    x[:, 7] = 0
    codes = compensated(random(8, 64).float(), (x.T @ x).float(), SYMMETRIC)
    assert codes is not None
    assert codes.values().isfinite().all()
    assert compensated(random(8, 64).float(), torch.zeros(64, 64), SYMMETRIC) is not None


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_scale_accounts_for_the_rounding_of_the_norm(offset: float) -> None:
    norm = (random(256).float() * 0.3 + 1 - offset).bfloat16()
    norm[3] = -offset  # zero
    stored, scales = exact_quotient(norm, random(256, seed=3).float().exp(), torch.bfloat16, offset)
    assert stored.dtype == torch.bfloat16
    assert torch.allclose((stored.float() + offset) * scales, norm.float() + offset, rtol=1e-6, atol=0)
    assert (scales > 0).all()
