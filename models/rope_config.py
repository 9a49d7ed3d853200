"""The rotation of a model's layers, out of a GGUF's metadata or a config.json.

Owns the names and defaults of its parameters. The formulas are rope.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgelm.errors import ModelError
from edgelm.models.families import Family
from edgelm.models.rope import RopeConfig, RopeKind, longrope_scale, yarn_scale
from edgelm.models.values import Values

LAYER_TYPES = ("full_attention", "sliding_attention")  # of `layer_types`, and of rope parameters for each
ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": "default",
    "none": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


def gguf_rope(values: Values, family: Family, dim: int) -> RopeConfig:
    """Read the rotation of the layers without a window, of `dim` numbers of a head."""
    kind = _rope_kind(values.get("rope.scaling.type") or "linear")
    factor = values.number("rope.scaling.factor", "rope.scale_linear", default=0.0) or 1.0
    attention = values.number("rope.scaling.attn_factor", default=1.0)
    if kind == "yarn":
        attention *= values.number("rope.scaling.yarn_attn_factor", default=yarn_scale(factor))
    return RopeConfig(
        kind=kind,
        theta=values.number("rope.freq_base", default=10_000.0),
        dim=dim,
        interleaved=family.gguf_interleaved,
        factor=factor,
        original_context=values.integer("rope.scaling.original_context_length", "context_length"),
        beta_fast=values.number("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=values.number("rope.scaling.yarn_beta_slow", default=1.0),
        scale=attention,
    )


def gguf_local_rope(values: Values, family: Family, rope: RopeConfig) -> RopeConfig:
    """Return the rotation of the layers with a window: Gemma 3's are not stretched, and have a base of their own."""
    if family.gguf != "gemma3":
        return rope
    return RopeConfig(theta=values.number("rope.freq_base_swa", default=10_000.0), dim=rope.dim)


def folder_rope(values: Values, head_dim: int, *, local: bool) -> RopeConfig:
    """Read the rotation of the layers with a window (`local`) or of the others, old names and new."""
    parameters = values.part("rope_parameters", "rope_scaling")
    nested = any(isinstance(parameters.get(each), Mapping) for each in LAYER_TYPES)
    if nested:
        parameters = Values(parameters).part(LAYER_TYPES[local])
    local_base = values.get("rope_local_base_freq")
    theta = values.number("rope_theta", default=10_000.0)
    if local and local_base is not None and not nested:
        parameters, theta = {}, values.number("rope_local_base_freq")
    return _stretched(Values(parameters, defaults={"rope_theta": theta}), values, head_dim)


def _stretched(rope: Values, values: Values, head_dim: int) -> RopeConfig:
    kind = _rope_kind(rope.get("rope_type", "type") or "default")
    if rope.get("mrope_section") is not None:
        raise ModelError("positions of images (mrope) are not supported")
    partial = rope.number("partial_rotary_factor", default=values.number("partial_rotary_factor", default=1.0))
    context = values.integer("max_position_embeddings", default=2048)
    # Phi-3 has it beside the others, and that one holds
    original = values.integer(
        "original_max_position_embeddings", default=rope.integer("original_max_position_embeddings", default=context)
    )
    if original < 2:
        raise ModelError("the model's configuration has no usable original_max_position_embeddings")
    factor = rope.number("factor", default=context / original if kind in ("yarn", "longrope") else 1.0)
    short = rope.numbers("short_factor")
    if kind == "longrope" and not short:
        raise ModelError("the model's configuration has no usable short_factor", "download the model again")
    return RopeConfig(
        kind=kind,
        theta=rope.number("rope_theta"),
        dim=int(head_dim * partial),
        factor=factor,
        original_context=context if kind == "dynamic" else original,
        low_frequency=rope.number("low_freq_factor", default=1.0),
        high_frequency=rope.number("high_freq_factor", default=4.0),
        beta_fast=rope.number("beta_fast", default=0.0) or 32.0,
        beta_slow=rope.number("beta_slow", default=0.0) or 1.0,
        truncate=rope.get("truncate") is not False,
        scale=_folder_scale(rope, kind, factor, original),
        divisors=short,
        long_divisors=rope.numbers("long_factor"),
    )


def _folder_scale(rope: Values, kind: RopeKind, factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if kind == "longrope":
        return longrope_scale(factor, original)
    some, all_dims = rope.number("mscale", default=0.0), rope.number("mscale_all_dim", default=0.0)
    if some > 0 and all_dims > 0:
        return yarn_scale(factor, some) / yarn_scale(factor, all_dims)
    return yarn_scale(factor)


def _rope_kind(named: object) -> RopeKind:
    if str(named) not in ROPE_KINDS:
        raise ModelError(f"RoPE of the kind {named!r} is not supported")
    return ROPE_KINDS[str(named)]
