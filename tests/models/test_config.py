"""The configuration from a config.json or a GGUF equals that of transformers and llama.cpp."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.base.errors import ModelError
from edgelm.models.config import ModelConfig, read_config, unsupported_reason
from edgelm.models.families import FAMILIES
from tests.counts import Count
from tests.models.tiny_models import MODELS, SIZES

OUTER = {
    "gemma3",
    "mistral3",
    "gemma4",
    "gemma4_unified",
    "qwen3_5",
    "qwen3_5_moe",
}  # of models whose decoder has a type of its own
TYPES = sorted({model_type for family in FAMILIES for model_type in family.folder} - OUTER)
GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 128,
}


def saved(config: Any) -> dict[str, Any]:
    """Return the config.json that transformers writes."""
    return json.loads(config.to_json_string())


def gguf(architecture: str, **keys: Any) -> dict[str, Any]:
    plain = {key.replace("llama.", f"{architecture}.", 1): value for key, value in GGUF.items()}
    return {**plain, "general.architecture": architecture, **{f"{architecture}.{key}": keys[key] for key in keys}}


@pytest.mark.parametrize("name", MODELS)
def test_sizes(name: str) -> None:
    model_type, options = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **options})
    got = read_config(saved(config))
    assert (got.hidden_size, got.num_heads) == (64, 4)
    attending = next(layer for layer in got.layers if layer.delta is None)
    assert attending.num_kv_heads == options.get("num_key_value_heads", 2)
    assert got.layers[0].head_dim == {**SIZES, **options}["head_dim"]
    assert len(got.layers) == config.num_hidden_layers
    assert got.context == 256
    assert got.norm_eps == config.rms_norm_eps


def test_windows_of_each_layer() -> None:
    def windows(model_type: str, **options: Any) -> list[int]:
        config = {**SIZES, "model_type": model_type, "num_hidden_layers": 6, **options}
        return [layer.window for layer in read_config(config).layers]

    assert windows("mistral", sliding_window=9) == [9] * 6
    assert windows("mistral", sliding_window=None) == [0] * 6
    assert windows("mistral") == [4096] * 6
    assert windows("gemma2", sliding_window=9) == [9, 0] * 3
    assert windows("gemma3_text", sliding_window=9) == [9, 9, 9, 9, 9, 0]
    assert windows("gemma3_text", sliding_window=9, sliding_window_pattern=3) == [9, 9, 0] * 2
    assert windows("qwen2", sliding_window=9) == [0] * 6
    assert windows("qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=4) == [0] * 4 + [9] * 2
    assert windows("gpt_oss", num_local_experts=4, sliding_window=9) == [9, 0] * 3
    kinds = ["full_attention"] * 5 + ["sliding_attention"]
    assert windows("gemma2", sliding_window=9, layer_types=kinds) == [0] * 5 + [9]


def test_windows_of_a_gguf() -> None:
    def windows(architecture: str, **keys: Any) -> list[int]:
        metadata = gguf(architecture, **{"block_count": 6, "attention.sliding_window": 9, **keys})
        return [layer.window for layer in read_config(metadata).layers]

    assert windows("gemma2") == [9, 0] * 3
    assert windows("gemma2", **{"attention.sliding_window": None}) == [4096, 0] * 3
    assert windows("gemma3") == [9, 9, 9, 9, 9, 0]
    assert windows("gemma3", **{"attention.sliding_window_pattern": 2}) == [9, 0] * 3
    pattern = [True, True, False, False, False, True]
    assert windows("gemma3", **{"attention.sliding_window_pattern": pattern}) == [9, 9, 0, 0, 0, 9]
    assert windows("gpt-oss") == [9, 0] * 3
    assert windows("phi3") == [0] * 6  # llama.cpp ignores the stated window
    assert windows("llama") == [0] * 6


def test_the_two_rotations_of_gemma_3() -> None:
    keys = {
        "attention.sliding_window": 9,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "rope.freq_base": 1e6,
    }
    layers = read_config(gguf("gemma3", **keys, block_count=6)).layers
    assert [(layer.rope.theta, layer.rope.factor) for layer in layers if layer.rope] == [(1e4, 1.0)] * 5 + [(1e6, 8.0)]


def test_a_granite_without_positions() -> None:
    assert [layer.rope for layer in read_config(gguf("granite", **{"rope.scaling.finetuned": False})).layers] == [
        None
    ] * 2
    rotated = read_config(gguf("granite", **{"rope.scaling.finetuned": True}))
    assert rotated == read_config(gguf("granite"))
    assert all(layer.rope for layer in rotated.layers)


def test_attention_scale_of_the_largest_gemma() -> None:
    keys = {"attention.key_length": 128, "attention.value_length": 128, "embedding_length": 4608}
    keys |= {"attention.head_count": 32}
    assert read_config(gguf("gemma2", **keys, block_count=46)).attention_scale == pytest.approx(144**-0.5)
    assert read_config(gguf("gemma2", **keys, block_count=42)).attention_scale == pytest.approx(128**-0.5)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"model_type": "mamba"}, "does not support the architecture 'mamba'"),
        ({"architectures": ["What"]}, "does not support the architecture None"),
        (gguf("bloom"), "does not support the architecture 'bloom'"),
        (gguf("llama", **{"attention.head_count": [4, 8]}), "layers that differ in their number of heads"),
        (gguf("llama", residual_scale=0.22), "models with residual_scale = 0.22 are not supported"),
        (gguf("granite", **{"attention.temperature_scale": 0.1}), "models with attention.temperature_scale = 0.1"),
        (gguf("mistral3", logit_scale=8.0), "models with logit_scale = 8.0 are not supported"),
        (gguf("granite", residual_scale=-1.0), "sizes in the model's configuration cannot be true"),
        (gguf("llama", expert_shared_count=1), "models with expert_shared_count = 1 are not supported"),
        (gguf("llama", **{"attention.value_length": 8}), "heads whose keys and values differ in size"),
        (gguf("llama", **{"attention.key_length": 12, "attention.value_length": 12}), "heads of 12 numbers"),
        (gguf("llama", **{"rope.scaling.type": "spiral"}), "RoPE of the kind 'spiral' is not supported"),
        (gguf("llama", **{"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_fast": -1.0}), "sizes in the model's"),
        (gguf("llama", **{"attention.head_count_kv": 3}), "cannot share 3 key-value heads"),
        ({**SIZES, "model_type": "llama", "hidden_act": "relu2"}, "the activation 'relu2' is not supported"),
        ({**SIZES, "model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**SIZES, "model_type": "qwen3", "layer_types": ["linear_attention"] * 3}, "'linear_attention'"),
        ({**SIZES, "model_type": "llama", "hidden_size": "64"}, "hidden_size is a string"),
    ],
)
def test_an_unsupported_model_is_described_in_one_line(metadata: dict[str, Any], reason: str) -> None:
    message = unsupported_reason(metadata)
    assert message is not None
    assert reason in message
    assert "\n" not in message


def test_head_sizes_that_only_the_gpu_does_not_support() -> None:
    assert unsupported_reason(GGUF) is None
    odd = {**GGUF, "llama.embedding_length": 4 * 72}
    assert unsupported_reason(odd) is None
    assert "its heads have 72 numbers, and the GPU kernels take" in (unsupported_reason(odd, "triton") or "")
    assert unsupported_reason({**GGUF, "llama.embedding_length": 256}, "triton") is None


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-1, 9), st.none(), st.text(max_size=2)), max_size=4),
    st.just({"rope_type": "yarn", "factor": 0}),
    st.just({"rope_type": "longrope", "original_max_position_embeddings": 1, "short_factor": [0]}),
    st.just({"full_attention": {"rope_type": []}}),
    st.just({"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": -1}),
)
KEYS = (
    "head_dim num_key_value_heads num_hidden_layers hidden_size num_attention_heads rope_parameters rope_scaling "
    "rope_theta sliding_window layer_types use_sliding_window max_window_layers sliding_window_pattern rms_norm_eps "
    "hidden_act query_pre_attn_scalar num_experts num_local_experts num_experts_per_tok mlp_only_layers model_type "
    "decoder_sparse_step no_rope_layers partial_rotary_factor original_max_position_embeddings text_config "
    "max_position_embeddings embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
).split()


@settings(max_examples=Count(test=150, soak=20_000))
@given(st.sampled_from(TYPES), st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3))
def test_odd_values_are_refused_and_do_not_crash(model_type: str, changes: dict[str, Any]) -> None:
    try:
        config = read_config({**SIZES, "model_type": model_type, "num_local_experts": 4, **changes})
    except ModelError:
        return
    assert isinstance(config, ModelConfig)


GGUF_KEYS = (
    "embedding_length block_count attention.head_count attention.head_count_kv attention.key_length context_length "
    "attention.sliding_window attention.sliding_window_pattern rope.scaling.type rope.scaling.factor rope.freq_base "
    "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow "
    "rope.dimension_count rope.scaling.original_context_length expert_count expert_used_count attention.scale "
    "attn_logit_softcapping attention.layer_norm_rms_epsilon logit_scale residual_scale embedding_scale "
    "attention.temperature_scale rope.scaling.yarn_log_multiplier rope.scaling.finetuned"
).split()


@settings(max_examples=Count(test=150, soak=20_000))
@given(
    st.sampled_from([family.gguf for family in FAMILIES if family.gguf]),
    st.dictionaries(st.sampled_from(GGUF_KEYS), ODD, max_size=3),
)
def test_odd_metadata_is_refused_and_does_not_crash(architecture: str, changes: dict[str, Any]) -> None:
    try:
        config = read_config(gguf(architecture, **changes))
    except ModelError:
        return
    assert isinstance(config, ModelConfig)
