"""Rotary embedding: the angles, the two pairings, and the result of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from edgelm.kernels.rope import Rope, apply_rope, sine_cosine

ULP = 2.0**-23  # of a float32 at 1
# the angle within a quadrant (up to pi / 4) is rounded to float32 twice, and so are the last step and the sum
ANGLE_ERROR = 4 * ULP / 2


def frequencies(dim: int, base: float) -> Tensor:
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 5_000_000.0])
def test_sine_and_cosine_are_those_of_the_exact_product(base: float):
    rope = Rope(frequencies(128, base))
    positions = torch.cat([torch.arange(200), torch.randint(0, 1 << 20, (800,), generator=torch.Generator())])
    exact = positions.double()[:, None] * rope.frequencies.double()
    sine, cosine = sine_cosine(rope, positions.int())
    assert (sine - exact.sin()).abs().max() <= ANGLE_ERROR
    assert (cosine - exact.cos()).abs().max() <= ANGLE_ERROR


def test_every_quadrant_and_its_edges_have_the_right_signs():
    eighth = Rope(torch.tensor([math.pi / 4]))
    exact = torch.arange(17).double()[:, None] * eighth.frequencies.double()
    sine, cosine = sine_cosine(eighth, torch.arange(17))
    assert (sine - exact.sin()).abs().max() <= ANGLE_ERROR
    assert (cosine - exact.cos()).abs().max() <= ANGLE_ERROR


def test_neox_equals_transformers():
    from transformers import LlamaConfig  # two seconds, in each process that collects tests
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    dim, length = 64, 4096
    config = LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=length,
    )
    embedding = LlamaRotaryEmbedding(config)
    x = torch.randn(500, 2, dim)
    positions = torch.randint(0, length, (500,), dtype=torch.int32)
    cosine, sine = embedding(x, positions[None].long())
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cosine, sine)
    ours = apply_rope(x, positions, Rope(embedding.inv_freq))
    # their angle, up to 2048..4095, is a rounded float32 product: half a unit of 2**-12, times the length of a pair
    pair = x[..., : dim // 2].hypot(x[..., dim // 2 :]).max()
    assert (ours - theirs[0].transpose(0, 1)).abs().max() <= pair * (2.0**-13 + 2 * ANGLE_ERROR)


def test_interleaved_pairs_are_multiplied_as_complex_numbers():
    rope = Rope(frequencies(80, 10_000.0), interleaved=True)
    x = torch.randn(50, 3, 80)
    positions = torch.randint(0, 100_000, (50,))
    angle = positions.double()[:, None] * rope.frequencies.double()
    rotated = (
        torch.view_as_complex(x.double().reshape(50, 3, 40, 2)) * torch.polar(torch.ones(()).double(), angle)[:, None]
    )
    expected = torch.view_as_real(rotated).reshape(50, 3, 80)
    limit = x.abs().max() * 2 * (ANGLE_ERROR + ULP)
    assert (apply_rope(x, positions, rope) - expected).abs().max() <= limit


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_partial_rotation_leaves_the_other_dimensions_alone(interleaved: bool):
    rope = Rope(frequencies(32, 10_000.0), 1.25, interleaved)
    x = torch.randn(20, 2, 96)
    rotated = apply_rope(x, torch.arange(20), rope)
    assert torch.equal(rotated[..., 32:], x[..., 32:])
    assert not torch.equal(rotated[..., :32], x[..., :32])
    alone = apply_rope(x[..., :32], torch.arange(20), rope)
    assert torch.equal(rotated[..., :32], alone)


def test_the_scale_multiplies_the_result():
    x = torch.randn(20, 2, 64)
    plain = apply_rope(x, torch.arange(20), Rope(frequencies(64, 10_000.0)))
    scaled = apply_rope(x, torch.arange(20), Rope(frequencies(64, 10_000.0), 2.0))
    assert torch.equal(scaled, 2 * plain)


def test_position_0_changes_nothing():
    x = torch.randn(1, 4, 64)
    assert torch.equal(apply_rope(x, torch.zeros(1).int(), Rope(frequencies(64, 10_000.0))), x)


@pytest.mark.parametrize("start", [0, 1000, 130_000])
def test_products_depend_on_the_distance_only(start: int):
    rope = Rope(frequencies(64, 500_000.0))
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    at_0 = (apply_rope(q, torch.tensor([7]), rope) * apply_rope(k, torch.tensor([0]), rope)).double().sum()
    moved = apply_rope(q, torch.tensor([start + 7]), rope) * apply_rope(k, torch.tensor([start]), rope)
    limit = q.norm() * k.norm() * 4 * (ANGLE_ERROR + 2 * ULP)
    assert (moved.double().sum() - at_0).abs() <= limit
