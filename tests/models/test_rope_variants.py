"""The frequencies of every RoPE kind equal those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edgelm.models.config import read_config
from edgelm.models.rope import build_rope, frequencies
from edgelm.models.rope_config import RopeConfig

HEAD = 64
CONTEXT = 4096
# two ways to compute a frequency differ by a few float32 roundings; the largest exponent of theta doubles them
TOLERANCE = 2e-6
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "llama3, other bounds": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 1024,
    },
    "yarn, own factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 1024,
    },
    "yarn, two scales": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.03 * i for i in range(HEAD // 2)],
        "long_factor": [1.0 + 0.9 * i for i in range(HEAD // 2)],
        "original_max_position_embeddings": 1024,
    },
    "longrope, own factor": {
        "rope_type": "longrope",
        "factor": 16.0,
        "attention_factor": 1.5,
        "short_factor": [1.0] * (HEAD // 2),
        "long_factor": [2.0] * (HEAD // 2),
        "original_max_position_embeddings": 1024,
    },
}


def config_of(rope: dict[str, Any], **changes: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 50_000.0, **rope},
        **changes,
    )


def rope_of(config: PreTrainedConfig) -> RopeConfig:
    rope = read_config(config.to_dict()).layers[0].rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("context", [512, 1024, 1025, CONTEXT, 3 * CONTEXT])
@pytest.mark.parametrize("name", VARIANTS)
def test_frequencies(name: str, context: int) -> None:
    config = config_of(VARIANTS[name])
    want, scale = ROPE_INIT_FUNCTIONS[VARIANTS[name]["rope_type"]](config, torch.device("cpu"), seq_len=context)
    got, got_scale = frequencies(rope_of(config), context)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=0)
    assert got_scale == pytest.approx(scale, rel=1e-9)


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "yarn"])
def test_a_part_of_the_head_is_rotated(name: str) -> None:
    config = config_of(VARIANTS[name] | {"partial_rotary_factor": 0.5})
    want, _ = ROPE_INIT_FUNCTIONS[VARIANTS[name]["rope_type"]](config, torch.device("cpu"), seq_len=CONTEXT)
    assert len(want) == HEAD // 4
    torch.testing.assert_close(frequencies(rope_of(config), CONTEXT)[0], want, rtol=TOLERANCE, atol=0)


def test_the_default_has_no_scale() -> None:
    got, scale = frequencies(RopeConfig(theta=10_000.0, dim=8), CONTEXT)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=TOLERANCE, atol=0)
    assert scale == 1.0


def test_llama3_as_divisors_of_a_gguf() -> None:
    """A GGUF stores the result of the formula: the plain frequencies divided by the stretched ones."""
    rope = rope_of(config_of(VARIANTS["llama3"]))
    stretched, _ = frequencies(rope, CONTEXT)
    plain, _ = frequencies(RopeConfig(theta=rope.theta, dim=rope.dim), CONTEXT)
    stored = RopeConfig(theta=rope.theta, dim=rope.dim, divisors=tuple((plain / stretched).tolist()), interleaved=True)
    built = build_rope(stored, CONTEXT, "cpu")
    torch.testing.assert_close(built.frequencies, stretched, rtol=TOLERANCE, atol=0)
    assert built.interleaved
