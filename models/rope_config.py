"""The rotation of a model's layers, from a GGUF's metadata or a config.json.

Owns the names and defaults of its parameters, and the scale that some kinds have. The frequencies are in rope.py. Knows
no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from edgelm.base.errors import ModelError
from edgelm.checkpoints.values import Values
from edgelm.models.families import Family

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
LAYER_TYPES = ("full_attention", "sliding_attention")  # in `layer_types`, and in rope parameters of their own
STOPPED = 1e30  # the divisor of a pair that does not turn, in files too
ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": "default",
    "none": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "proportional": "linear",  # with divisors that stop the last pairs
    "su": "longrope",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotation of a layer's keys and queries. A kind ignores the fields that it does not use."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    dim: int  # the first so many dimensions of a head are rotated
    interleaved: bool = False  # pairs are (2i, 2i + 1), not (i, i + dim / 2)
    factor: float = 1.0  # of context extension
    original_context: int = 0  # positions before the extension
    low_frequency: float = 1.0  # llama3
    high_frequency: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: the ramp begins and ends at whole dimensions
    scale: float = 1.0  # of sine and cosine; not 1 only for yarn and longrope
    divisors: tuple[float, ...] = ()  # of the frequencies, given in the file instead of a formula
    undivided: bool = False  # the divisors that a GGUF has as a tensor are not for it
    long_divisors: tuple[float, ...] = ()  # longrope: used instead if the context is longer than the original one
    sections: tuple[int, ...] = ()  # pairs that turn by each number of a picture's position; of text all are equal
    temperature: float = 0.0  # queries beyond the original context grow by it times a logarithm (Llama 4)


def gguf_rope(values: Values, family: Family, dim: int, context: int) -> RopeConfig:
    """Read the rotation of the layers without a window. `dim` numbers of a head are rotated."""
    kind = _rope_kind(values.get("rope.scaling.type") or "linear")
    factor = values.number("rope.scaling.factor", "rope.scale_linear", default=0.0) or 1.0
    attention = values.number("rope.scaling.attn_factor", default=1.0)
    if kind == "yarn":
        attention *= values.number("rope.scaling.yarn_attn_factor", default=yarn_scale(factor))
        attention /= yarn_scale(factor, values.number("rope.scaling.yarn_log_multiplier", default=0.0))
    return RopeConfig(
        kind=kind,
        theta=values.number("rope.freq_base", default=10_000.0),
        dim=dim,
        interleaved=family.gguf_interleaved,
        factor=factor,
        original_context=values.integer("rope.scaling.original_context_length", default=context),
        beta_fast=values.number("rope.scaling.yarn_beta_fast", default=0.0) or 32.0,
        beta_slow=values.number("rope.scaling.yarn_beta_slow", default=0.0) or 1.0,
        scale=attention,
        temperature=values.number("attention.temperature_scale", default=0.0),
    )


def gguf_local_rope(values: Values, family: Family, rope: RopeConfig, head_dim: int) -> RopeConfig:
    """Return the rotation of the layers with a window. Gemma's are not stretched and have a base of their own."""
    if family.gguf not in ("gemma3", "gemma4"):
        return rope
    dim = rope.dim if family.gguf == "gemma3" else values.integer("rope.dimension_count_swa", default=head_dim)
    return RopeConfig(theta=values.number("rope.freq_base_swa", default=10_000.0), dim=dim, undivided=True)


def folder_rope(values: Values, head_dim: int, context: int, *, local: bool, sections: bool = False) -> RopeConfig:
    """Read the rotation of the layers with a window (`local`) or of the others, under its old or new names.

    As in transformers, the old name, `rope_scaling`, has priority. An empty or null one counts as absent. With
    `sections`, pictures may have positions of several numbers; those of text are equal, so they are one.
    """
    scaling, parameters = values.section("rope_scaling"), values.section("rope_parameters")
    nested = any(isinstance(parameters.get(layer_type), Mapping) for layer_type in LAYER_TYPES)
    if nested:
        own = Values(parameters, values.source).section(LAYER_TYPES[local])
        parameters = own if local else {**own, **scaling}
    elif scaling:
        parameters = scaling
    local_base = values.get("rope_local_base_freq")
    theta = values.number("rope_theta", default=10_000.0)
    if local and local_base is not None and not nested:
        parameters, theta = {}, values.number("rope_local_base_freq")
    rope = Values(parameters, values.source, defaults={"rope_theta": theta})
    if rope.get("mrope_section") is not None and not sections:
        raise ModelError("positions of images (mrope) are not supported")
    rope_config = _stretched(rope, values, head_dim, context)
    if not sections:
        return rope_config
    pairs = tuple(map(int, rope.positive_numbers("mrope_section")))
    if len(pairs) not in (0, 3):
        raise values.damaged(f"mrope_section has {len(pairs)} numbers, but must have 3")
    return replace(rope_config, sections=pairs)


def _stretched(rope: Values, values: Values, head_dim: int, context: int) -> RopeConfig:
    kind = _rope_kind(rope.get("rope_type", "type") or "default")
    partial = rope.number("partial_rotary_factor", default=values.number("partial_rotary_factor", default=1.0))
    # Phi-3 has the key beside the rope parameters as well, and that value applies
    name = "original_max_position_embeddings"
    original = values.integer(name, default=rope.integer(name, default=context))
    if original < 2:
        raise values.damaged(f"{name} is {original}, but must be 2 or more")
    factor = rope.number("factor", default=context / original if kind in ("yarn", "longrope") else 1.0)
    short = rope.positive_numbers("short_factor")
    dim = int(head_dim * partial)
    if rope.get("rope_type", "type") == "proportional":  # all pairs count, and only the first ones turn
        dim, turning = head_dim, int(partial * head_dim // 2)
        short = (1.0,) * turning + (STOPPED,) * (head_dim // 2 - turning)
    if kind == "longrope" and not short:
        raise values.damaged("short_factor is missing")
    return RopeConfig(
        kind=kind,
        theta=rope.number("rope_theta"),
        dim=dim,
        factor=factor,
        original_context=context if kind == "dynamic" else original,
        low_frequency=rope.number("low_freq_factor", default=1.0),
        high_frequency=rope.number("high_freq_factor", default=4.0),
        beta_fast=rope.number("beta_fast", default=0.0) or 32.0,
        beta_slow=rope.number("beta_slow", default=0.0) or 1.0,
        truncate=rope.get("truncate") is not False,
        scale=_folder_scale(rope, kind, factor, original),
        divisors=short,
        long_divisors=rope.positive_numbers("long_factor"),
        temperature=rope.number("llama_4_scaling_beta", default=0.0),
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


def _rope_kind(name: object) -> RopeKind:
    if str(name) not in ROPE_KINDS:
        raise ModelError(f"RoPE of the kind {name!r} is not supported")
    return ROPE_KINDS[str(name)]


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's scale of sine and cosine, which makes attention sharper (section 3.3)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def longrope_scale(factor: float, original_context: int) -> float:
    """Return LongRoPE's scale of sine and cosine (arXiv 2402.13753)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))
