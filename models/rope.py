"""Rotary position embeddings: every way of stretching them becomes frequencies and one scale of cosine and sine.

Owns the formulas. Knows nothing of files: the parameters are those of `RopeConfig`, whatever their names were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from edgelm.kernels.rope import Rope

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How the keys and queries of a layer are rotated. A field that its kind does not use is ignored."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    dim: int  # numbers of a head that are rotated, from its first on
    interleaved: bool = False  # pairs are (2i, 2i + 1), not (i, i + dim / 2)
    factor: float = 1.0  # by which the context is stretched
    original_context: int = 0  # positions before it was stretched
    low_frequency: float = 1.0  # llama3
    high_frequency: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: its ramp begins and ends at whole dimensions
    scale: float = 1.0  # of cosine and sine: other than 1 for yarn and longrope
    divisors: tuple[float, ...] = ()  # of the frequencies: what a file states instead of a formula
    long_divisors: tuple[float, ...] = ()  # longrope: in their place where the context is longer than the original


def build_rope(config: RopeConfig, context: int, device: torch.device | str) -> Rope:
    """Return the rotation for a cache of at most `context` positions."""
    inverse, scale = frequencies(config, context)
    return Rope(inverse.to(device), scale, config.interleaved)


def frequencies(config: RopeConfig, context: int) -> tuple[Tensor, float]:
    """Return the angle of each pair for one position, float32 [dim / 2], and the scale of cosine and sine.

    longrope and dynamic depend on the longest sequence. As llama.cpp does, the choice is made once, by the context
    that is served: keys that were rotated one way never meet queries that were rotated in another.
    """
    if config.kind == "dynamic":
        inverse = _inverse(_dynamic_theta(config, context), config.dim)
    else:
        inverse = _inverse(config.theta, config.dim)
    if config.kind == "linear":
        inverse = inverse / config.factor
    elif config.kind == "llama3":
        inverse = _llama3(inverse, config)
    elif config.kind == "yarn":
        inverse = _yarn(inverse, config)
    divisors = config.divisors
    if config.kind == "longrope" and context > config.original_context:
        divisors = config.long_divisors
    if divisors:
        inverse = inverse / torch.tensor(divisors, dtype=torch.float32)
    return inverse, config.scale


def _inverse(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic_theta(config: RopeConfig, context: int) -> float:
    """NTK-aware scaling: nothing changes up to the original context, and the base grows beyond it."""
    length = max(context, config.original_context)
    stretch = config.factor * length / config.original_context - (config.factor - 1)
    return float(config.theta * stretch ** (config.dim / (config.dim - 2)))


def _llama3(inverse: Tensor, config: RopeConfig) -> Tensor:
    """Slow pairs are slowed down by the factor, fast ones kept, those between blended (Llama 3.1)."""
    turns = config.original_context * inverse / (2 * math.pi)
    blend = (turns - config.low_frequency) / (config.high_frequency - config.low_frequency)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inverse / config.factor + blend * inverse


def _yarn(inverse: Tensor, config: RopeConfig) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp between interpolated and kept frequencies, over the dimensions."""
    low = _turning_dim(config.beta_fast, config)
    high = _turning_dim(config.beta_slow, config)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inverse / config.factor * interpolated + inverse * (1 - interpolated)


def _turning_dim(turns: float, config: RopeConfig) -> float:
    """Return the dimension whose pair makes so many turns over the original context."""
    return config.dim * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return how much sharper attention gets where YaRN stretches the context (section 3.3)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_scale(factor: float, original_context: int) -> float:
    """Return the same for LongRoPE (arXiv 2402.13753)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))
