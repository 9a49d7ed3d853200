"""Every key that a config.json may omit has the default of transformers' configuration class."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from edgelm.base.errors import ModelError
from edgelm.checkpoints.config_json import DEFAULTS
from edgelm.models.config import ModelConfig, read_config
from tests.models.test_config import OUTER, TYPES, saved

# sizes with which no default is right by chance: a head of hidden_size / num_attention_heads numbers has 48
STATED = {
    "vocab_size": 96,
    "hidden_size": 384,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# values that are no family's default, of all keys that the decoder depends on
OTHERS: dict[str, Any] = {
    "head_dim": 40,
    "rms_norm_eps": 1e-3,
    "rope_theta": 5e4,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
    "sliding_window": 12,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "sliding_window_pattern": 3,
    "rope_local_base_freq": 7e3,
    "no_rope_layer_interval": 3,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 7.0,
    "attn_logit_softcapping": 8.0,
    "swiglu_limit": 3.0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.125,
    "logits_scaling": 8.0,
}
OLD_OF_GEMMA_3 = ("sliding_window_pattern", "rope_local_base_freq")
OLD = (
    "rope_theta",
    *OLD_OF_GEMMA_3,
)  # no fields of the classes: read from old files, where null makes transformers fail
LINEAR = {"rope_type": "linear", "factor": 3.0}
Config = dict[str, Any]


def others(model_type: str) -> Config:
    """Return the keys that a family has, with values that are not its defaults."""
    plain = transformers.CONFIG_MAPPING[model_type]()
    names = {"rope_theta", *(field.name for field in fields(plain))}
    if model_type == "gemma3_text":
        names.update(OLD_OF_GEMMA_3)
    return {
        **STATED,
        **{name: value for name, value in OTHERS.items() if name in names},
        "tie_word_embeddings": not plain.tie_word_embeddings,
    }


def variants(model_type: str) -> Iterator[tuple[str, Config]]:
    """Yield configurations with few keys, with all but one, and with a null."""
    full = others(model_type)
    yield "all", full
    yield "few", STATED
    yield "only the layers", {key: value for key, value in STATED.items() if "heads" not in key}
    for name, value in full.items():
        if name not in STATED:
            yield f"only {name}", {**STATED, name: value}
        if name not in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):  # always stated
            yield f"without {name}", {key: value for key, value in full.items() if key != name}
            if name not in OLD:
                yield f"null {name}", {**full, name: None}
    if model_type == "phi3":  # it has other kinds of RoPE
        return
    if model_type.startswith("gemma4"):  # there transformers knows no old names
        yield "null rope_parameters", {**full, "rope_parameters": None}
        yield "a length of whole layers", {**full, "global_head_dim": 64}
        yield "heads of whole layers", {**full, "num_global_key_value_heads": 2}
        yield "heads without the flag", {**full, "num_global_key_value_heads": 2, "attention_k_eq_v": False}
        return
    for name in ("rope_scaling", "rope_parameters"):
        yield f"null {name}", {**full, name: None}
        yield f"empty {name}", {**full, name: {}}
        if model_type != "gemma3_text":  # there transformers fails with a rope_parameters of one level
            yield f"linear {name}", {**full, name: LINEAR}
    if model_type != "gemma3_text":
        yield "both names", {**full, "rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 5.0}}


def resolved(model_type: str, config: Config) -> Config | None:
    """Return the config.json once transformers has filled its defaults in; None where it refuses the values."""
    try:
        return saved(transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(config))))
    except StrictDataclassError:
        return None


def outcome(config: Config) -> ModelConfig | str:
    """Return the configuration, or the reason why there is none, without its numbers."""
    try:
        return read_config(config)
    except ModelError as error:
        return error.message.split(":")[0]


@pytest.mark.parametrize("model_type", TYPES)
def test_an_absent_key_has_the_default_of_transformers(model_type: str) -> None:
    different = []
    for label, config in variants(model_type):
        theirs = resolved(model_type, config)
        if theirs is None:
            continue
        got, want = outcome({**config, "model_type": model_type}), outcome(theirs)
        if isinstance(got, ModelConfig) and isinstance(want, ModelConfig):
            names = [field.name for field in fields(want) if getattr(got, field.name) != getattr(want, field.name)]
            different += [(label, names)] if names else []
        elif got != want:  # such as 8 heads that share 32
            different.append((label, [str(got)[:60], str(want)[:60]]))
    assert not different


def test_a_bert_has_the_defaults_of_its_class() -> None:
    plain = transformers.CONFIG_MAPPING["bert"]()
    assert dict(DEFAULTS["bert"]) == {name: getattr(plain, name) for name in DEFAULTS["bert"]}


def test_the_table_has_no_family_that_is_not_compared() -> None:
    assert set(DEFAULTS) - {"bert", *OUTER} <= set(TYPES)
    assert DEFAULTS["gemma3"] == DEFAULTS["gemma3_text"]
    assert DEFAULTS["qwen3_5"] == DEFAULTS["qwen3_5_text"]
    assert DEFAULTS["qwen3_5_moe"] == DEFAULTS["qwen3_5_moe_text"]
    assert DEFAULTS["mistral3"] == DEFAULTS["mistral"]
    assert DEFAULTS["gemma4"] == DEFAULTS["gemma4_text"]
    assert DEFAULTS["gemma4_unified"] == DEFAULTS["gemma4_unified_text"]


def test_another_sharpness_of_the_gate_is_refused() -> None:
    """It is a constant of our kernels."""
    config = {**others("gpt_oss"), "model_type": "gpt_oss"}
    assert read_config({**config, "swiglu_alpha": 1.702}) == read_config(config)
    with pytest.raises(ModelError, match=r"models with swiglu_alpha = 1\.5 are not supported"):
        read_config({**config, "swiglu_alpha": 1.5})
