"""What the decoder is built from, settled once: a GGUF's metadata or a config.json becomes a ModelConfig.

Owns the names that sizes have, their defaults, and the reasons why a model cannot be computed here. Reads no tensors:
what only they say (biases, tied embeddings, frequencies that a GGUF stores) is load.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgelm.errors import ModelError
from edgelm.kernels.attention import HEAD_DIMS
from edgelm.kernels.gate import Gate, GateKind
from edgelm.models.families import FAMILIES, Family, Names, Routing, family_of_folder, family_of_gguf
from edgelm.models.rope import RopeConfig
from edgelm.models.rope_config import LAYER_TYPES, folder_rope, gguf_local_rope, gguf_rope
from edgelm.models.values import Values

ARCHITECTURE = "general.architecture"  # the key that a GGUF's metadata has
TEXT_PARTS = ("text_config", "llm_config", "language_config")  # where a model reads images or sound as well
ACTIVATIONS: Mapping[str, GateKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
# what would change the result and is not computed, with the values that leave it as it is
FOREIGN_GGUF_KEYS: Mapping[str, tuple[object, ...]] = {
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}
FOREIGN_FOLDER_KEYS: Mapping[str, tuple[object, ...]] = {
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "num_kv_shared_layers": (0,),
    "kv_lora_rank": (),
    "attention_chunk_size": (),
    "qk_layernorm": (False,),
}
MAX_LAYERS = 1024
PLAIN_ROPES = ("default", "linear")  # they do not depend on the context
# Gemma's largest models divide by another number than the head size, and their GGUF does not say so
GEMMA_27B_LAYERS: Mapping[str, int] = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What differs from layer to layer."""

    window: int = 0  # positions that a token sees, its own included; 0: all before it
    rope: RopeConfig | None  # None: keys and queries are not rotated
    sparse: bool = False  # a mixture of experts, not one feed-forward network


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """The experts of a sparse layer."""

    count: int
    used: int  # by each token
    routing: Routing
    normalised: bool  # the routes of a token sum up to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model, whatever the format of its files."""

    family: Family
    names: Names
    layers: tuple[LayerConfig, ...]
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    norm_offset: float  # added to the norm weights that the files have
    gate: Gate
    attention_scale: float
    attention_softcap: float  # 0: none
    final_softcap: float  # 0: none
    embedding_scale: float
    context: int
    experts: ExpertConfig | None
    tied: bool  # the output matrix is the embedding, even if the files have another


def read_config(metadata: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a model, from a GGUF's metadata or from a parsed config.json.

    Raises ModelError for a model that the decoder cannot compute.
    """
    config = _read_gguf(metadata) if ARCHITECTURE in metadata else _read_folder(metadata)
    _require_possible(config)
    return config


def unsupported_reason(metadata: Mapping[str, Any], implementation: str = "reference") -> str | None:
    """Return in one line why a model cannot be computed by these ops, None where nothing is known against it."""
    try:
        config = read_config(metadata)
    except ModelError as error:
        return error.message
    if implementation == "triton" and config.head_dim not in HEAD_DIMS:
        return f"its heads have {config.head_dim} numbers, and the GPU kernels take {', '.join(map(str, HEAD_DIMS))}"
    return None


# -- GGUF --------------------------------------------------------------------------------------------------------------


def _read_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    architecture = metadata[ARCHITECTURE]
    family = family_of_gguf(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise _unknown(architecture)
    values = Values(metadata, f"{architecture}.")
    _refuse_foreign(values, FOREIGN_GGUF_KEYS)
    width = values.integer("embedding_length")
    heads = values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", default=width // max(heads, 1))
    if values.integer("attention.value_length", default=head_dim) != head_dim:
        raise ModelError("heads whose keys and values differ in size are not supported")
    num_layers = values.integer("block_count", most=MAX_LAYERS)
    experts = None
    if values.integer("expert_count", default=0):
        experts = ExpertConfig(
            count=values.integer("expert_count"),
            used=values.integer("expert_used_count"),
            routing=family.routing,
            normalised=family.normalised,
        )
    rope = gguf_rope(values, family, values.integer("rope.dimension_count", default=head_dim))
    window = values.integer("attention.sliding_window", default=0) if family.gguf_window else 0
    if family.gguf == "gemma2" and not window:
        window = 4096
    windows = _gguf_windows(values, family, num_layers, window)
    return ModelConfig(
        family=family,
        names=family.gguf_names,
        layers=tuple(
            LayerConfig(
                window=each,
                rope=_layer_rope(family, i, gguf_local_rope(values, family, rope) if each else rope),
                sparse=experts is not None,
            )
            for i, each in enumerate(windows)
        ),
        width=width,
        heads=heads,
        kv_heads=values.integer("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        norm_offset=0.0,
        gate=Gate(family.gate),
        attention_scale=_gguf_attention_scale(values, family, num_layers, width, heads, head_dim),
        attention_softcap=values.number("attn_logit_softcapping", default=50.0 if family.gguf == "gemma2" else 0.0),
        final_softcap=values.number("final_logit_softcapping", default=30.0 if family.gguf == "gemma2" else 0.0),
        embedding_scale=math.sqrt(width) if family.scaled_embedding else 1.0,
        context=values.integer("context_length"),
        experts=experts,
        tied=False,
    )


def _gguf_windows(values: Values, family: Family, num_layers: int, window: int) -> list[int]:
    name = "attention.sliding_window_pattern"
    if not isinstance(values.get(name), int):
        entries = values.entries(name, num_layers)
        if entries:
            return [window if entry else 0 for entry in entries]
    every = values.integer(name, default=family.window_every)
    return [window if _has_window(i, every) else 0 for i in range(num_layers)]


def _gguf_attention_scale(
    values: Values, family: Family, num_layers: int, width: int, heads: int, head_dim: int
) -> float:
    if GEMMA_27B_LAYERS.get(family.gguf) == num_layers:
        head_dim = width // max(heads, 1)
    return values.number("attention.scale", default=0.0) or float(max(head_dim, 1) ** -0.5)


# -- config.json -------------------------------------------------------------------------------------------------------


def _read_folder(config: Mapping[str, Any]) -> ModelConfig:
    text = dict(config)
    for part in TEXT_PARTS:
        if isinstance(config.get(part), Mapping):
            text |= config[part]
    model_type = text.get("model_type")
    family = family_of_folder(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise _unknown(model_type)
    values = Values(text, defaults=family.defaults)
    _refuse_foreign(values, FOREIGN_FOLDER_KEYS)
    width = values.integer("hidden_size")
    heads = values.integer("num_attention_heads")
    head_dim = values.integer("head_dim", default=width // max(heads, 1))
    num_layers = values.integer("num_hidden_layers", most=MAX_LAYERS)
    windows = _folder_windows(values, family, num_layers)
    experts = _folder_experts(values, family)
    rotating = values.entries("no_rope_layers", num_layers)  # 1: it does rotate
    return ModelConfig(
        family=family,
        names=family.folder_names,
        layers=tuple(
            LayerConfig(
                window=window,
                rope=_layer_rope(family, i, folder_rope(values, head_dim, local=bool(window)), rotating),
                sparse=experts is not None and _is_sparse(values, i),
            )
            for i, window in enumerate(windows)
        ),
        width=width,
        heads=heads,
        kv_heads=values.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        norm_eps=values.number("rms_norm_eps", default=1e-6),
        norm_offset=family.norm_offset,
        gate=_folder_gate(values, family),
        attention_scale=max(values.number("query_pre_attn_scalar", default=head_dim), 0.5) ** -0.5,
        attention_softcap=values.number("attn_logit_softcapping", default=0.0),
        final_softcap=values.number("final_logit_softcapping", default=0.0),
        embedding_scale=math.sqrt(width) if family.scaled_embedding else 1.0,
        context=values.integer("max_position_embeddings", default=2048),
        experts=experts,
        tied=bool(values.get("tie_word_embeddings")),
    )


def _folder_gate(values: Values, family: Family) -> Gate:
    if family.gate == "swiglu_oai":
        return Gate("swiglu_oai", limit=values.number("swiglu_limit", default=7.0))
    named = values.get("hidden_activation", "hidden_act")
    if named is None or (family.gate == "gelu_tanh" and named == "gelu"):  # Gemma's first files meant the other one
        return Gate(family.gate)
    if str(named) not in ACTIVATIONS:
        raise ModelError(f"the activation {named!r} is not supported")
    return Gate(ACTIVATIONS[str(named)])


def _folder_experts(values: Values, family: Family) -> ExpertConfig | None:
    count = values.integer("num_experts", "num_local_experts", default=0)
    if not count:
        return None
    normalised = values.get("norm_topk_prob")
    return ExpertConfig(
        count=count,
        used=values.integer("num_experts_per_tok", "experts_per_token"),
        routing=family.routing,
        normalised=family.normalised if normalised is None else bool(normalised),
    )


def _is_sparse(values: Values, layer: int) -> bool:
    step = values.integer("decoder_sparse_step", default=1)
    return layer not in values.entries("mlp_only_layers") and step > 0 and (layer + 1) % step == 0


def _folder_windows(values: Values, family: Family, num_layers: int) -> list[int]:
    window = values.integer("sliding_window", default=0)
    kinds = values.entries("layer_types", num_layers)
    if kinds:
        strange = next((kind for kind in kinds if kind not in LAYER_TYPES), None)
        if strange is not None:
            raise ModelError(f"layers of the kind {strange!r} are not supported")
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if family.window_is_optional and not values.get("use_sliding_window"):
        return [0] * num_layers
    if family.window_is_optional:
        first = values.integer("max_window_layers", default=0)
        return [window if i >= first else 0 for i in range(num_layers)]
    every = values.integer("sliding_window_pattern", default=family.window_every)
    return [window if _has_window(i, every) else 0 for i in range(num_layers)]


# -- both --------------------------------------------------------------------------------------------------------------


def _layer_rope(family: Family, layer: int, rope: RopeConfig, rotating: Sequence[object] = ()) -> RopeConfig | None:
    if rotating:
        return rope if rotating[layer] else None
    every = family.rope_every
    return None if every and (layer + 1) % every == 0 else rope


def _has_window(layer: int, every: int) -> bool:
    """Tell whether a layer has a window where every n-th has none; 0: all have."""
    return every == 0 or layer % every < every - 1


def _require_possible(config: ModelConfig) -> None:
    """Raise ModelError for sizes that no model has, or that no op takes."""
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    experts = config.experts
    possible = (
        len(config.layers) > 0
        and config.width > 0
        and 0 < config.kv_heads <= config.heads
        and config.heads % config.kv_heads == 0
        and config.head_dim > 0
        and 0 < config.norm_eps < 1
        and config.context > 0
        and config.attention_scale > 0
        and all(0 < rope.dim <= config.head_dim and rope.dim % 2 == 0 for rope in ropes)
        and all(rope.theta > 1 and rope.factor > 0 and rope.original_context >= 0 for rope in ropes)
        and all(rope.kind in PLAIN_ROPES or (rope.original_context > 0 and rope.dim > 2) for rope in ropes)
        and all(len(each) in (0, rope.dim // 2) for rope in ropes for each in (rope.divisors, rope.long_divisors))
        and (experts is None or 0 < experts.used <= experts.count)
    )
    if not possible:
        raise ModelError("the sizes in the model's configuration cannot be true", "download the model again")
    if config.head_dim % 8:
        raise ModelError(f"heads of {config.head_dim} numbers are not supported: multiples of 8 are")


def _refuse_foreign(values: Values, foreign: Mapping[str, tuple[object, ...]]) -> None:
    for name, neutral in foreign.items():
        said = values.get(name)
        if said is not None and said not in neutral:
            raise ModelError(f"models with {name} = {said} are not supported")


def _unknown(architecture: object) -> ModelError:
    known = ", ".join(family.name for family in FAMILIES)
    return ModelError(f"the architecture {architecture!r} is not among those of the torch engine: {known}")
