"""The configuration of the decoder, from a GGUF's metadata or a config.json.

Owns what the decoder needs beyond the sizes that `checkpoints` reads, and the reasons why a model is not supported.
Reads no tensors: biases, tied embeddings and the frequencies in a GGUF are for loading/decoder.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from edgelm.base.errors import ModelError
from edgelm.checkpoints.config_json import (
    decoder_values,
    folder_experts,
    folder_shape,
    layer_heads,
    read_config_json,
    sliding_window,
)
from edgelm.checkpoints.encoder import encoder_config, folder_pooling, is_encoder, other_encoder, other_module
from edgelm.checkpoints.shape import (
    MAX_HEAD_LEN,
    MAX_HEADS,
    MAX_LAYERS,
    Experts,
    Shape,
    gguf_experts,
    gguf_shape,
    gguf_windows,
)
from edgelm.checkpoints.values import Values
from edgelm.kernels.delta_sizes import DELTA_DIMS, DeltaSizes
from edgelm.kernels.gates import Gate, GateKind
from edgelm.models.families import FAMILIES, Family, Names, Routing, family_of_folder, family_of_gguf, names_of_next
from edgelm.models.rope_config import LAYER_TYPES, RopeConfig, folder_rope, gguf_local_rope, gguf_rope

ARCHITECTURE = "general.architecture"  # a key that every GGUF has
ACTIVATIONS: Mapping[str, GateKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
# keys that change the result and are not supported, with the values that have no effect
UNSUPPORTED_GGUF_KEYS: Mapping[str, tuple[object, ...]] = {
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "embedding_length_per_layer_input": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
}
# the same for families whose row does not have them
SCALES: Mapping[str, tuple[object, ...]] = {"logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1)}
TEMPERATURE: Mapping[str, tuple[object, ...]] = {
    "attention.temperature_scale": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
UNSUPPORTED_FOLDER_KEYS: Mapping[str, tuple[object, ...]] = {
    "use_bidirectional_attention": (False, "vision"),  # between tokens of pictures only
    "is_encoder_decoder": (False,),
    "num_kv_shared_layers": (0,),
    "hidden_size_per_layer_input": (0,),
    "kv_lora_rank": (),
    "attention_chunk_size": (),
    "qk_layernorm": (False,),
    "swiglu_alpha": (1.702,),
}
DELTA_LAYER = "linear_attention"  # in `layer_types`
MAX_CONV = 16  # positions that a convolution sees
DEFAULT_CONTEXT = 2048  # of a config.json that does not state it
CONTEXT_FREE_ROPES = ("default", "linear")
# Gemma's largest models do not divide by the head size, and their GGUF does not say so
GEMMA_27B_LAYERS: Mapping[str, int] = {"gemma2": 46, "gemma3": 62}
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """The properties that differ between layers."""

    head_dim: int
    num_kv_heads: int  # 0: the layer keeps no keys and values
    delta: DeltaSizes | None = None  # of a gated delta net, in place of attention
    window: int = 0  # positions that a token sees, including its own; 0: all before it
    rope: RopeConfig | None  # None: keys and queries are not rotated
    keys_are_values: bool | None = False  # before their norms; None: where the file has no matrix of values
    sparse: bool = False  # a mixture of experts, instead of one feed-forward network or beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """The experts of a sparse layer."""

    count: int
    used: int  # by each token
    routing: Routing
    normalised: bool  # the weights of a token's experts add up to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model, whatever the format of its files."""

    family: Family
    names: Names
    layers: tuple[LayerConfig, ...]
    hidden_size: int
    num_heads: int
    norm_eps: float
    norm_offset: float  # added to the norm weights in the files
    gate: Gate
    attention_scale: float
    attention_softcap: float  # 0: none
    final_softcap: float  # 0: none
    embedding_scale: float
    residual_scale: float  # of a block's result, before it is added to the residual stream
    logit_divisor: float
    context: int
    experts: ExpertConfig | None
    tied: bool | None  # the output matrix is the embedding; None: not stated, so it is if the file has no other
    next_layer: LayerConfig | None = None  # of the head that predicts the token after the next one

    def with_next_layer(self) -> ModelConfig:
        """Return the configuration whose last layer is that of the head, by the names that it has in the files."""
        assert self.next_layer is not None
        return replace(self, layers=(*self.layers, self.next_layer), names=names_of_next(self.names))

    # The decoder's residual stream is the family's over `residual_scale`: then blocks need not scale their results.

    @property
    def stream_scale(self) -> float:
        """The factor of an embedding that enters the decoder's residual stream."""
        return self.embedding_scale / self.residual_scale

    @property
    def stream_eps(self) -> float:
        """The epsilon by which a norm of the decoder's residual stream is that of the family's."""
        return self.norm_eps / self.residual_scale**2


def read_config(metadata: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a model, from a GGUF's metadata or from a parsed config.json.

    Raises ModelError for a model that the decoder does not support.
    """
    config = _read_gguf(metadata) if ARCHITECTURE in metadata else _read_folder(metadata)
    _require_possible(config)
    return config


def unsupported_reason(metadata: Mapping[str, Any], implementation: str = "reference") -> str | None:
    """Return in one line why these ops cannot run a model, or None where the configuration allows it."""
    try:
        config = read_config(metadata)
    except ModelError as error:
        return error.message
    if implementation == "triton":
        from edgelm.kernels.attention import HEAD_DIMS  # needs torch, which reading a configuration does not

        for layer in config.layers:
            if layer.delta and not {layer.delta.key_dim, layer.delta.value_dim} <= DELTA_DIMS:
                return f"its linear attention has heads of {layer.delta.key_dim} and {layer.delta.value_dim} numbers"
            if (head_dim := layer.head_dim) not in HEAD_DIMS:
                sizes = ", ".join(map(str, HEAD_DIMS))
                return f"its heads have {head_dim} numbers, and the GPU kernels take {sizes}"
    return None


def folder_problem(folder: Path) -> str:
    """Return why no engine runs a folder of safetensors, as far as its configuration tells; empty: nothing is known.

    Raises ModelError for a configuration that cannot be read.
    """
    config = read_config_json(folder)
    try:
        if is_encoder(config):
            encoder_config(folder, config)
            return ""
        if problem := other_encoder(config):
            return problem
        folder_pooling(folder)
    except ModelError as error:
        return error.message
    if module := other_module(folder):
        return f"its vectors pass through the module {module}, which the torch engine does not have"
    return unsupported_reason(config) or ""


# -- GGUF --------------------------------------------------------------------------------------------------------------


def _read_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    architecture = metadata[ARCHITECTURE]
    family = family_of_gguf(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise _unknown(architecture)
    values = Values(metadata, "the model's metadata", prefix=f"{architecture}.")
    _refuse_unsupported(values, UNSUPPORTED_GGUF_KEYS)
    _refuse_unsupported(values, {} if family.scaled else SCALES)
    _refuse_unsupported(values, {} if family.temperature else TEMPERATURE)
    shape = gguf_shape(values)
    num_heads = _num_heads(shape)
    window_head_dim = _window_head_dim(values, shape)
    experts = _experts(family, gguf_experts(values, shape.num_layers), family.normalised)
    rope_dim = values.integer("rope.dimension_count", default=shape.key_len)
    rope = gguf_rope(values, family, rope_dim, shape.context)
    local_rope = gguf_local_rope(values, family, rope, window_head_dim)
    num_layers = shape.num_layers - values.integer("nextn_predict_layers", high=shape.num_layers - 1, default=0)
    kinds = _gguf_deltas(values, family, num_layers)
    rotates = not (family.scaled and values.get("rope.scaling.finetuned") is False)  # Granite's sign for no rotation
    layers = [
        LayerConfig(
            head_dim=window_head_dim if window else shape.key_len,
            num_kv_heads=0 if kinds[i] else shape.num_kv_heads[i],
            delta=kinds[i],
            window=window,
            keys_are_values=None if family.value_norm else False,
            rope=(local_rope if window else rope) if rotates and _rotates(i, family.rope_every) else None,
            sparse=experts is not None,
        )
        for i, window in enumerate(_gguf_windows(values, family, num_layers))
    ]
    return ModelConfig(
        family=family,
        names=family.gguf_names,
        layers=tuple(layers),
        hidden_size=shape.hidden_size,
        num_heads=num_heads,
        norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        norm_offset=0.0,
        gate=Gate(family.gate),
        attention_scale=_gguf_attention_scale(values, family, shape, num_heads),
        attention_softcap=values.number("attn_logit_softcapping", default=50.0 if family.gguf == "gemma2" else 0.0),
        final_softcap=values.number("final_logit_softcapping", default=30.0 if family.gguf == "gemma2" else 0.0),
        embedding_scale=values.number("embedding_scale", default=0.0) or _embedding_scale(family, shape),
        residual_scale=values.number("residual_scale", default=0.0) or 1.0,
        logit_divisor=values.number("logit_scale", default=0.0) or 1.0,
        context=values.integer("context_length"),
        experts=experts,
        tied=None,
        next_layer=_next_layer(shape.num_layers - num_layers, layers),
    )


def _gguf_deltas(values: Values, family: Family, num_layers: int) -> list[DeltaSizes | None]:
    """Return the sizes of each layer that is a gated delta net."""
    if not family.delta:
        return [None] * num_layers
    heads, width = (values.integer(f"ssm.{name}", low=1, high=MAX_HEADS) for name in ("time_step_rank", "inner_size"))
    sizes = DeltaSizes(
        num_key_heads=values.integer("ssm.group_count", low=1, high=MAX_HEADS),
        num_value_heads=heads,
        key_dim=values.integer("ssm.state_size", low=1, high=MAX_HEAD_LEN),
        value_dim=width // heads,
        window=values.integer("ssm.conv_kernel", low=1, high=MAX_CONV),
        alternating=True,
    )
    interval = values.integer("full_attention_interval", low=1, high=MAX_LAYERS, default=4)
    return [sizes if (i + 1) % interval else None for i in range(num_layers)]


def _gguf_windows(values: Values, family: Family, num_layers: int) -> list[int]:
    """Return the window of each layer."""
    window = _uniform(gguf_windows(values, num_layers), "sliding window") if family.gguf_window else 0
    if family.gguf == "gemma2" and not window:
        window = 4096
    name = "attention.sliding_window_pattern"
    if not isinstance(values.get(name), int) and (entries := values.entries(name, num_layers)):
        return [window if entry else 0 for entry in entries]
    interval = values.integer(name, default=family.window_every)
    return [window if _has_window(i, interval) else 0 for i in range(num_layers)]


def _window_head_dim(values: Values, shape: Shape) -> int:
    """Return the size of the heads of layers with a window."""
    key_len = values.integer("attention.key_length_swa", low=1, high=MAX_HEAD_LEN, default=shape.key_len)
    if values.integer("attention.value_length_swa", low=1, high=MAX_HEAD_LEN, default=key_len) != key_len:
        raise ModelError("heads whose keys and values differ in size are not supported")
    return key_len


def _gguf_attention_scale(values: Values, family: Family, shape: Shape, num_heads: int) -> float:
    if family.value_norm:
        return 1.0
    divisor = shape.key_len
    if GEMMA_27B_LAYERS.get(family.gguf) == shape.num_layers:
        divisor = shape.hidden_size // max(num_heads, 1)
    return values.number("attention.scale", default=0.0) or float(max(divisor, 1) ** -0.5)


# -- config.json -------------------------------------------------------------------------------------------------------


def _read_folder(config: Mapping[str, Any]) -> ModelConfig:
    values = decoder_values(config)
    model_type = values.get("model_type")
    family = family_of_folder(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise _unknown(model_type)
    _refuse_unsupported(values, UNSUPPORTED_FOLDER_KEYS)
    shape = folder_shape(values)
    num_heads = _num_heads(shape)
    context = shape.context or DEFAULT_CONTEXT
    normalised = values.get("norm_topk_prob")
    experts = _experts(
        family, folder_experts(values, shape.num_layers), family.normalised if normalised is None else bool(normalised)
    )
    rotated = _rotated(values, family, shape.num_layers)
    kinds = _folder_deltas(values, family, shape.num_layers)
    heads = layer_heads(values, shape)
    layers = [
        LayerConfig(
            head_dim=heads[i].head_len,
            num_kv_heads=0 if kinds[i] else heads[i].num_kv_heads,
            delta=kinds[i],
            window=window,
            keys_are_values=family.value_norm and not window and values.get("attention_k_eq_v") is True,
            rope=(
                folder_rope(values, heads[i].head_len, context, local=bool(window), sections=family.delta)
                if rotated[i]
                else None
            ),
            sparse=experts is not None and _is_sparse(values, i),
        )
        for i, window in enumerate(_folder_windows(values, family, rotated))
    ]
    return ModelConfig(
        family=family,
        names=family.folder_names,
        layers=tuple(layers),
        hidden_size=shape.hidden_size,
        num_heads=num_heads,
        norm_eps=values.number("rms_norm_eps", default=1e-6),
        norm_offset=family.norm_offset,
        gate=_folder_gate(values, family),
        attention_scale=_folder_attention_scale(values, family, shape.key_len),
        attention_softcap=values.number("attn_logit_softcapping", default=0.0),
        final_softcap=values.number("final_logit_softcapping", default=0.0),
        embedding_scale=values.number("embedding_multiplier") if family.scaled else _embedding_scale(family, shape),
        residual_scale=values.number("residual_multiplier") if family.scaled else 1.0,
        logit_divisor=values.number("logits_scaling") if family.scaled else 1.0,
        context=context,
        experts=experts,
        tied=bool(values.get("tie_word_embeddings")),
        next_layer=_next_layer(values.integer("mtp_num_hidden_layers", default=0), layers),
    )


def _folder_deltas(values: Values, family: Family, num_layers: int) -> list[DeltaSizes | None]:
    """Return the sizes of each layer that is a gated delta net."""
    if not family.delta:
        return [None] * num_layers

    def number(name: str, high: int = MAX_HEADS) -> int:
        return values.integer(f"linear_{name}", low=1, high=high)

    sizes = DeltaSizes(
        num_key_heads=number("num_key_heads"),
        num_value_heads=number("num_value_heads"),
        key_dim=number("key_head_dim", MAX_HEAD_LEN),
        value_dim=number("value_head_dim", MAX_HEAD_LEN),
        window=number("conv_kernel_dim", MAX_CONV),
        alternating=False,
    )
    if layer_kinds := values.entries("layer_types", num_layers):
        return [sizes if kind == DELTA_LAYER else None for kind in layer_kinds]
    interval = values.integer("full_attention_interval", low=1, default=4)
    return [sizes if (i + 1) % interval else None for i in range(num_layers)]


def _folder_attention_scale(values: Values, family: Family, head_dim: int) -> float:
    if family.scaled:
        return values.number("attention_multiplier")
    if family.value_norm:
        return 1.0
    return float(max(values.number("query_pre_attn_scalar", default=head_dim), 0.5) ** -0.5)


def _folder_gate(values: Values, family: Family) -> Gate:
    if family.gate == "swiglu_oai":
        return Gate("swiglu_oai", limit=values.number("swiglu_limit", default=7.0))
    name = values.get("hidden_activation", "hidden_act")
    if name is None or (family.gate == "gelu_tanh" and name == "gelu"):  # Gemma's first files meant gelu_tanh
        return Gate(family.gate)
    if str(name) not in ACTIVATIONS:
        raise ModelError(f"the activation {name!r} is not supported")
    return Gate(ACTIVATIONS[str(name)])


def _is_sparse(values: Values, layer: int) -> bool:
    step = values.integer("decoder_sparse_step", default=1)
    return layer not in values.entries("mlp_only_layers") and step > 0 and (layer + 1) % step == 0


def _rotated(values: Values, family: Family, num_layers: int) -> list[bool]:
    """Tell for each layer whether it rotates keys and queries."""
    if entries := values.entries("no_rope_layers", num_layers):
        return [bool(entry) for entry in entries]  # despite the key's name, 1 means that the layer rotates
    interval = family.rope_every and values.integer("no_rope_layer_interval", low=1, default=family.rope_every)
    return [_rotates(i, interval) for i in range(num_layers)]


def _folder_windows(values: Values, family: Family, rotated: Sequence[bool]) -> list[int]:
    """Return the window of each layer; `rotated` tells which of them have RoPE."""
    num_layers = len(rotated)
    window = sliding_window(values)
    kinds = values.entries("layer_types", num_layers)
    if kinds:
        if family.value_norm:  # as in transformers
            kinds[-1] = "full_attention"
        known = (*LAYER_TYPES, DELTA_LAYER) if family.delta else LAYER_TYPES
        unsupported = next((kind for kind in kinds if kind not in known), None)
        if unsupported is not None:
            raise ModelError(f"layers of the kind {unsupported!r} are not supported")
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if family.window_is_optional and not values.get("use_sliding_window"):
        return [0] * num_layers
    if family.rope_every:  # the layers without RoPE have the window
        return [0 if rotates else window for rotates in rotated]
    if family.window_is_optional:
        first = values.integer("max_window_layers", default=0)
        return [window if i >= first else 0 for i in range(num_layers)]
    if family.delta:
        return [0] * num_layers
    interval = values.integer("sliding_window_pattern", default=family.window_every)
    windows = [window if _has_window(i, interval) else 0 for i in range(num_layers)]
    return [*windows[:-1], 0] if family.value_norm else windows


# -- both --------------------------------------------------------------------------------------------------------------


def _next_layer(count: int, layers: Sequence[LayerConfig]) -> LayerConfig | None:
    """Return the layer that predicts the token after the next one: it attends, as the others that do."""
    return next((layer for layer in layers if layer.delta is None), None) if count == 1 else None


def _embedding_scale(family: Family, shape: Shape) -> float:
    return math.sqrt(shape.hidden_size) if family.scaled_embedding else 1.0


def _num_heads(shape: Shape) -> int:
    if shape.key_len != shape.value_len:
        raise ModelError("heads whose keys and values differ in size are not supported")
    return _uniform(shape.num_heads, "number of heads")


def _experts(family: Family, experts: Experts, normalised: bool) -> ExpertConfig | None:
    if not experts.count:
        return None
    used = _uniform(experts.used, "number of experts")
    return ExpertConfig(count=experts.count, used=used, routing=family.routing, normalised=normalised)


def _uniform(entries: Sequence[T], name: str) -> T:
    """Return the one value that all layers have."""
    if any(entry != entries[0] for entry in entries):
        raise ModelError(f"layers that differ in their {name} are not supported")
    return entries[0]


def _rotates(layer: int, interval: int) -> bool:
    """Tell whether a layer rotates, where every `interval`-th layer does not; 0: all do."""
    return interval == 0 or (layer + 1) % interval != 0


def _has_window(layer: int, interval: int) -> bool:
    """Tell whether a layer has a window, where every `interval`-th layer has none; 0: all have one."""
    return interval == 0 or layer % interval < interval - 1


def _require_possible(config: ModelConfig) -> None:
    """Raise ModelError for sizes that no model has, or that no op supports."""
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    kv_heads = {layer.num_kv_heads for layer in config.layers if layer.delta is None}
    deltas = {layer.delta for layer in config.layers if layer.delta is not None}
    experts = config.experts
    possible = (
        all(0 < number <= config.num_heads and config.num_heads % number == 0 for number in kv_heads)
        and 0 < config.norm_eps < 1
        and config.context > 0
        and min(config.attention_scale, config.embedding_scale, config.logit_divisor) > 0
        and 1e-4 < config.residual_scale < 1e4
        and all(layer.rope is None or 0 < layer.rope.dim <= layer.head_dim for layer in config.layers)
        and all(rope.dim % 2 == 0 for rope in ropes)
        and all(rope.theta > 1 and rope.factor > 0 and rope.original_context >= 0 for rope in ropes)
        and all(rope.beta_fast > 0 and rope.beta_slow > 0 and rope.scale > 0 for rope in ropes)
        and all(rope.temperature == 0 or (rope.temperature > 0 and rope.original_context > 0) for rope in ropes)
        and all(rope.kind in CONTEXT_FREE_ROPES or (rope.original_context > 0 and rope.dim > 2) for rope in ropes)
        and all(len(factors) in (0, rope.dim // 2) for rope in ropes for factors in (rope.divisors, rope.long_divisors))
        and all(delta.num_value_heads % delta.num_key_heads == 0 for delta in deltas)
        and all(min(delta.key_dim, delta.value_dim) >= 8 for delta in deltas)
        and (experts is None or 0 < experts.used <= experts.count)
    )
    if not possible:
        raise ModelError("the sizes in the model's configuration cannot be true", "download the model again")
    odd = next((layer.head_dim for layer in config.layers if layer.head_dim % 8), 0)
    if odd:
        raise ModelError(f"heads of {odd} numbers are not supported: multiples of 8 are")


def _refuse_unsupported(values: Values, unsupported: Mapping[str, tuple[object, ...]]) -> None:
    for name, neutral in unsupported.items():
        value = values.get(name)
        if value is not None and value not in neutral:
            raise ModelError(f"models with {name} = {value} are not supported")


def _unknown(architecture: object) -> ModelError:
    names = ", ".join(family.name for family in FAMILIES)
    return ModelError(f"the torch engine does not support the architecture {architecture!r}", f"it runs {names}")
