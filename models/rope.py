"""Rotary position embeddings: each scheme of context extension becomes frequencies and one scale of sine and cosine.

Owns the formulas. Knows nothing of files and of the names that they give to the parameters of `RopeConfig`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from edgelm.kernels.rope import Rope
from edgelm.models.rope_config import RopeConfig


def build_rope(config: RopeConfig, context: int, device: torch.device | str) -> Rope:
    """Return the rotation for a cache of at most `context` positions."""
    inverse, scale = frequencies(config, context)
    growth = query_growth(config, context)
    growth = None if growth is None else growth.to(device)
    return Rope(inverse.to(device), scale, config.interleaved, growth, config.original_context)


def query_growth(config: RopeConfig, context: int) -> Tensor | None:
    """Return the factor of queries in each span of the original context, float32 [spans]; None: they do not grow."""
    if not config.temperature or context <= config.original_context:
        return None
    spans = torch.arange(-(-context // config.original_context), dtype=torch.float64)
    return (1 + config.temperature * torch.log1p(spans)).float()


def frequencies(config: RopeConfig, context: int) -> tuple[Tensor, float]:
    """Return the angle per position of each pair, float32 [dim / 2], and the scale of sine and cosine.

    longrope and dynamic depend on the longest sequence. As in llama.cpp, the choice is made once, by the served
    context, so that all keys and queries are rotated in the same way.
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
    divisors = config.long_divisors if uses_long(config, context) else config.divisors
    if divisors:
        inverse = inverse / torch.tensor(divisors, dtype=torch.float32)
    return inverse, config.scale


def uses_long(config: RopeConfig, context: int) -> bool:
    """Tell whether longrope takes its long factors for a served context."""
    return config.kind == "longrope" and context > config.original_context


def _inverse(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _dynamic_theta(config: RopeConfig, context: int) -> float:
    """Return the base of NTK-aware scaling: it is unchanged up to the original context, and grows beyond it."""
    length = max(context, config.original_context)
    stretch = config.factor * length / config.original_context - (config.factor - 1)
    return float(config.theta * stretch ** (config.dim / (config.dim - 2)))


def _llama3(inverse: Tensor, config: RopeConfig) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend those between (Llama 3.1)."""
    turns = config.original_context * inverse / (2 * math.pi)
    blend = (turns - config.low_frequency) / (config.high_frequency - config.low_frequency)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inverse / config.factor + blend * inverse


def _yarn(inverse: Tensor, config: RopeConfig) -> Tensor:
    """Blend interpolated and original frequencies by a ramp over the dimensions (YaRN, arXiv 2309.00071, 3.2)."""
    low = _turning_dim(config.beta_fast, config)
    high = _turning_dim(config.beta_slow, config)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    ramp_len = high - low if high != low else 0.001
    interpolated = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / ramp_len).clamp(0, 1)
    return inverse / config.factor * interpolated + inverse * (1 - interpolated)


def _turning_dim(turns: float, config: RopeConfig) -> float:
    """Return the dimension whose pair makes `turns` turns over the original context."""
    return config.dim * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))
