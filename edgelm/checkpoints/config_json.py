"""The config.json of a folder of safetensors: its decoder's values, checked.

Owns the part that describes the decoder, the names that families use for the same value, and the values that a family
may omit. How weights are quantized is in quantization.py. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import DOWNLOAD, shown
from edgelm.checkpoints.json_scan import read_json
from edgelm.checkpoints.quantization import DECODERS, modelopt_section, quantization_section
from edgelm.checkpoints.shape import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEAD_LEN,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WINDOW,
    Experts,
    Shape,
    require_shared_heads,
)
from edgelm.checkpoints.values import Values, described, is_number

CONFIG = "config.json"
MAX_ROPE_THETA = 1e15
# layers that keep no keys and values
WITHOUT_KV = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "moe", "mlp"})
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_query_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
HEAD_LEN = ("head_dim", "kv_channels", "attention_head_dim")
CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS_USED = ("num_experts_per_tok", "experts_per_token", "top_k_experts")

GEMMA_2_AND_3: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA_3 = {**GEMMA_2_AND_3, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0, "max_position_embeddings": 131_072}
QWEN = {
    "num_attention_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
QWEN_2_AND_3 = {**QWEN, "num_key_value_heads": 32, "max_window_layers": 28}
QWEN_3_5 = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32_768,
}
QWEN_3_5_MOE = {**QWEN_3_5, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
GEMMA_4_EVERY = 6  # layers, of which the last has no window
GEMMA_4 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "enable_moe_block": False,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
GEMMA_4_UNIFIED = {
    **{name: value for name, value in GEMMA_4.items() if name != "hidden_size_per_layer_input"},
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
}
MISTRAL = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
}
# by model_type: what a config.json may omit, and the value that transformers then takes
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bert": {
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "max_position_embeddings": 512,
    },
    "llama": {"num_attention_heads": 32},
    "mistral": MISTRAL,
    "mistral3": MISTRAL,  # of a text_config without a model_type
    "ministral3": {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "granite": {
        "num_attention_heads": 32,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "max_position_embeddings": 2048,
    },
    "mixtral": {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 131_072,
    },
    "smollm3": {
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "max_position_embeddings": 32_768,
    },
    "qwen2": QWEN_2_AND_3,
    "qwen3": {**QWEN_2_AND_3, "head_dim": 128},
    "qwen3_moe": {
        **QWEN,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "qwen3_5": QWEN_3_5,
    "qwen3_5_text": QWEN_3_5,
    "qwen3_5_moe": QWEN_3_5_MOE,
    "qwen3_5_moe_text": QWEN_3_5_MOE,
    "gemma": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        **GEMMA_2_AND_3,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "max_position_embeddings": 8192,
    },
    "gemma3": GEMMA_3,
    "gemma3_text": GEMMA_3,
    "gemma4": GEMMA_4,
    "gemma4_text": GEMMA_4,
    "gemma4_unified": GEMMA_4_UNIFIED,
    "gemma4_unified_text": GEMMA_4_UNIFIED,
    "phi3": {
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    "gpt_oss": {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 150_000.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json, with the quantization that ModelOpt states in a file of its own.

    Raises ModelError for a file that is missing, too large or no JSON.
    """
    config = read_json(folder / CONFIG)
    if not quantization_section(config) and (section := modelopt_section(folder)):
        config["quantization_config"] = section
    return config


def decoder_values(config: Mapping[str, Any]) -> Values:
    """Return the values that hold for the decoder. Raises ModelError for a number that would turn logits into NaN."""
    decoder = dict(config)
    for name in DECODERS:
        if isinstance(part := config.get(name), Mapping):
            decoder |= part
    if decoder.get("rope_parameters") is None:  # unlike other keys, a null here stands for the default
        decoder.pop("rope_parameters", None)
    model_type = decoder.get("model_type")
    defaults = DEFAULTS.get(model_type) if isinstance(model_type, str) else None
    values = Values(decoder, CONFIG, defaults=defaults)
    _check_fractions(values)
    return values


def architecture_name(config: Mapping[str, Any]) -> str:
    """Return `model_type`, else the first of `architectures`. Raises ModelError where there is neither."""
    classes = config.get("architectures")
    for value in (config.get("model_type"), classes[0] if isinstance(classes, list) and classes else None):
        if isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable():
            return value
    raise ModelError(f"{CONFIG} does not say which architecture the model has", DOWNLOAD)


def folder_shape(values: Values) -> Shape:
    """Read the sizes of the decoder. Raises ModelError where they are missing or cannot be true."""
    num_layers = values.integer(*LAYERS, low=1, high=MAX_LAYERS)
    hidden_size = values.integer(*HIDDEN_SIZE, low=1, high=MAX_HIDDEN_SIZE)
    num_heads = _heads(values, HEADS, num_layers) or [0] * num_layers
    latent = values.get("kv_lora_rank") is not None
    multi_query = values.get("multi_query") is True and not values.get("new_decoder_architecture")
    if latent or multi_query:  # one head for all queries
        num_kv_heads = [1] * num_layers
    else:
        num_kv_heads = _heads(values, KV_HEADS, num_layers) or list(num_heads)
    require_shared_heads(values, num_heads, num_kv_heads)
    if latent:
        key_len = values.integer("kv_lora_rank", low=1, high=MAX_HEAD_LEN)
        key_len += values.integer("qk_rope_head_dim", high=MAX_HEAD_LEN, default=0)
        value_len = 0
    else:
        head_len = max(1, hidden_size // max(1, *num_heads))
        key_len = values.integer(*HEAD_LEN, low=1, high=MAX_HEAD_LEN, default=head_len)
        value_len = values.integer("v_head_dim", low=1, high=MAX_HEAD_LEN, default=key_len)
    return Shape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_len=key_len,
        value_len=value_len,
        context=values.integer(*CONTEXT, low=1, high=MAX_CONTEXT, default=0),
    )


class LayerHeads(NamedTuple):
    """The heads of keys and values in one layer."""

    head_len: int
    num_kv_heads: int


def layer_heads(values: Values, shape: Shape) -> list[LayerHeads]:
    """Return the heads of each layer: Gemma 4's layers without a window have their own, under old or new names."""
    usual = [LayerHeads(shape.key_len, count) for count in shape.num_kv_heads]
    if values.get("global_head_dim") is None:
        return usual
    kinds = _layer_kinds(values, shape.num_layers)
    names = {"head_dim": "global_head_dim"}
    if values.get("attention_k_eq_v") is True:
        names["num_key_value_heads"] = "num_global_key_value_heads"
    own = values.section("per_layer_config")
    heads = []
    for i, (head_len, count) in enumerate(usual):
        whole = kinds[i] == "full_attention" if kinds else i % GEMMA_4_EVERY == GEMMA_4_EVERY - 1
        whole = whole or i == shape.num_layers - 1
        layer = Values(own, values.source).section(str(i))
        if not own and whole:
            layer = {name: values.get(other) for name, other in names.items()}
        of_layer = Values(layer, values.source)
        heads.append(
            LayerHeads(
                of_layer.integer("head_dim", low=1, high=MAX_HEAD_LEN, default=head_len),
                of_layer.integer("num_key_value_heads", low=1, high=MAX_HEADS, default=count),
            )
        )
    return heads


def cached_kv_heads(values: Values, shape: Shape) -> list[int]:
    """Return the key-value heads of each layer, 0 for one that keeps no keys and values or shares another's."""
    interval = values.integer("full_attention_interval", high=shape.num_layers, default=0)
    num_shared = values.integer("num_kv_shared_layers", high=shape.num_layers, default=0)
    kinds = _layer_kinds(values, shape.num_layers)
    kv_heads = [heads.num_kv_heads for heads in layer_heads(values, shape)]
    for i in range(shape.num_layers):
        without = kinds[i] in WITHOUT_KV if kinds else interval and (i + 1) % interval
        if without or i >= shape.num_layers - num_shared or not shape.num_heads[i]:
            kv_heads[i] = 0
    return kv_heads


def delta_state_bytes(values: Values, kv_heads: list[int]) -> int:
    """Return the bytes of one sequence's state in all gated delta nets, which are the layers without KV heads."""
    if values.get("linear_num_value_heads") is None:
        return 0

    def number(name: str, high: int) -> int:
        return values.integer(f"linear_{name}", high=high, default=0)

    width = number("num_value_heads", MAX_HEADS) * number("value_head_dim", MAX_HEAD_LEN)
    key_len = number("key_head_dim", MAX_HEAD_LEN)
    window = max(number("conv_kernel_dim", MAX_HEADS) - 1, 0) * (
        2 * number("num_key_heads", MAX_HEADS) * key_len + width
    )
    return 4 * kv_heads.count(0) * (window + width * key_len)


def folder_experts(values: Values, num_layers: int) -> Experts:
    """Read the experts of the decoder. Raises ModelError where they cannot be true."""
    has_experts = values.get("enable_moe_block") is not False  # as Gemma 4 does not, unless its file says so
    count = values.integer(*EXPERTS, high=MAX_EXPERTS, default=0) if has_experts else 0
    return Experts(count, [values.integer(*EXPERTS_USED, high=MAX_EXPERTS, default=0)] * num_layers)


def sliding_window(values: Values) -> int:
    """Return how many positions a layer with a window sees; 0: there is no window."""
    return values.integer("sliding_window", high=MAX_WINDOW, default=0)


def vocab_size(values: Values) -> int:
    """Return the number of tokens; 0: not stated."""
    return values.integer("vocab_size", low=1, high=MAX_VOCAB, default=0)


def _heads(values: Values, names: tuple[str, ...], num_layers: int) -> list[int] | None:
    return values.per_layer(*names, num_layers=num_layers, high=MAX_HEADS, exact=True)


def _layer_kinds(values: Values, num_layers: int) -> list[str]:
    """Return the kind of each layer, or nothing where the configuration does not state it."""
    for name in ("layer_types", "layers_block_type"):
        kinds = values.get(name)
        if isinstance(kinds, list) and len(kinds) >= num_layers:
            return [kind if isinstance(kind, str) else "" for kind in kinds]
    return []


def _check_fractions(values: Values) -> None:
    for name, value in values.mapping.items():
        epsilon = name.endswith(("_eps", "_epsilon"))
        if not (epsilon or name == "rope_theta") or value is None:
            continue
        low, high = (0.0, 1.0) if epsilon else (1.0, MAX_ROPE_THETA)
        if not is_number(value) or not low <= value <= high:
            raise values.damaged(f"{shown(name)} is {described(value)}, but must be {low:g} to {high:g}")
