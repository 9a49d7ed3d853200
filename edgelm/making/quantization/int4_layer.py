"""The matrices of one layer that are quantized: which share an input, what is before them, and their codes.

Owns the names of a layer's matrices in all families, where the scales of AWQ are folded, and the choice of the method
for each matrix. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from edgelm.making.quantization.awq import best_scales, exact_quotient, powers_of_two
from edgelm.making.quantization.gptq import compensated_or_plain
from edgelm.making.quantization.int4 import Codes, Int4Format, quantize_plainly
from edgelm.models.config import ModelConfig

Role = Literal["attention_in", "attention_out", "feed_in", "feed_out"]
ALL_TOKENS = -1  # in place of an expert


class Place(NamedTuple):
    """An input of matrices within a layer."""

    role: Role
    expert: int = ALL_TOKENS


class Site(NamedTuple):
    """The matrices that have one input."""

    place: Place
    matrices: tuple[str, ...]  # names without `.weight`


class Statistics:
    """The inputs of some matrices, as far as they matter: X^T X and the mean of |X|, of rows X."""

    def __init__(self, columns: int, device: torch.device | str) -> None:
        self.hessian = torch.zeros(columns, columns, device=device)
        self._sizes = torch.zeros(columns, device=device)
        self.num_rows = 0

    def add(self, x: Tensor) -> None:
        """Add rows [rows, columns]."""
        x = x.float()
        self.hessian.addmm_(x.T, x)
        self._sizes += x.abs().sum(0)
        self.num_rows += len(x)

    @property
    def magnitude(self) -> Tensor:
        return self._sizes / max(self.num_rows, 1)

    def divide(self, scales: Tensor) -> None:
        """Change the columns of all rows, afterwards: they are divided by these scales."""
        self.hessian /= scales[:, None] * scales
        self._sizes /= scales


@dataclass(slots=True, eq=False)
class LayerWeights:
    """The weights of a layer that quantization changes, by the names of the family."""

    matrices: dict[str, Tensor]  # float32 [rows, columns], by the name without `.weight`
    plain: dict[str, Tensor]  # norms, biases and routers, as the file has them


def layer_sites(config: ModelConfig, i: int, tensors: Collection[str]) -> list[Site]:
    """Return the matrices of layer i to quantize; `tensors` are the names that the model has."""
    names, sparse, delta = config.names, config.layers[i].sparse, config.layers[i].delta

    def stems(*patterns: str) -> tuple[str, ...]:
        return tuple(pattern.format(i=i) for pattern in patterns)

    def has(pattern: str) -> bool:
        return f"{pattern.format(i=i)}.weight" in tensors

    qkv = stems(names.qkv) if has(names.qkv) else stems(*filter(has, (names.q, names.k, names.v)))
    read, out = (stems(names.delta_qkv, names.delta_z), names.delta_out) if delta else (qkv, names.out)
    sites = [Site(Place("attention_in"), read), Site(Place("attention_out"), stems(out))]
    if not sparse or names.shared_gate:
        gate_up = stems(names.gate, names.up) if has(names.gate) else stems(names.gate_up)
        sites += [Site(Place("feed_in"), gate_up), Site(Place("feed_out"), stems(names.down))]
    if not sparse:
        return sites
    assert config.experts is not None
    for expert in range(config.experts.count):
        gate, up, down = (
            pattern.format(i=i, e=expert) for pattern in (names.expert_gate, names.expert_up, names.expert_down)
        )
        sites += [Site(Place("feed_in", expert), (gate, up)), Site(Place("feed_out", expert), (down,))]
    return sites


def scale_layer(
    weights: LayerWeights,
    config: ModelConfig,
    i: int,
    sites: list[Site],
    statistics: Mapping[Place, Statistics],
    form: Int4Format,
) -> None:
    """Scale the columns of a layer's matrices as AWQ does; what is before them divides by the same numbers."""
    for role in ("attention_in", "feed_in"):
        shared = [site for site in sites if site.place.role == role and statistics[site.place].num_rows]
        if shared:
            _scale_after_norm(weights, config, i, shared, statistics, form)
    for site in sites:
        if site.place.role == "attention_out" and (config.family.value_norm or config.layers[i].delta):
            continue  # a norm of values or of results would undo the scales
        if site.place.role in ("attention_out", "feed_out") and statistics[site.place].num_rows:
            _scale_after_rows(weights, config, i, site, statistics[site.place], form)


def quantize_layer(
    weights: LayerWeights, sites: list[Site], statistics: Mapping[Place, Statistics], form: Int4Format, *, gptq: bool
) -> dict[str, Codes]:
    """Return the codes of all matrices. Without statistics, and for experts without a token, they are rounded."""
    codes = {}
    for site in sites:
        seen = statistics.get(site.place)
        for name in site.matrices:
            weight = weights.matrices[name]
            if seen is None or not seen.num_rows:
                codes[name] = quantize_plainly(weight, form)
            elif gptq:
                codes[name] = compensated_or_plain(weight, seen.hessian, form)
            else:
                codes[name] = quantize_plainly(weight, form, seen.hessian.diagonal())
    return codes


def _scale_after_norm(
    weights: LayerWeights,
    config: ModelConfig,
    i: int,
    shared: list[Site],
    statistics: Mapping[Place, Statistics],
    form: Int4Format,
) -> None:
    """Scale the matrices that read the result of one norm: those of attention, or of feed-forward or all experts."""
    seen = [statistics[site.place] for site in shared]
    num_rows = sum(one.num_rows for one in seen)
    magnitude = torch.stack([one.magnitude * (one.num_rows / num_rows) for one in seen]).sum(0)
    matrices = [(weights.matrices[name], statistics[site.place].hessian) for site in shared for name in site.matrices]
    scales = best_scales(matrices, magnitude, form)
    attention = shared[0].place.role == "attention_in"
    norm = (config.names.attention_norm if attention else config.names.feed_norm).format(i=i) + ".weight"
    exact = [f"{name.format(i=i)}.weight" for name in _exact_readers(config, i, attention=attention)]
    if exact:  # they read the norm too, and keep all their digits
        scales = powers_of_two(scales)
    before = weights.plain[norm].to(scales.device)
    stored, scales = exact_quotient(before, scales, before.dtype, config.norm_offset)
    weights.plain[norm] = stored.cpu()
    for name in exact:
        weights.plain[name] = weights.plain[name] * scales.to(weights.plain[name])
    for name in _readers(shared, weights, config, i):
        weights.matrices[name] = weights.matrices[name] * scales
    for one in seen:
        one.divide(scales)


def _exact_readers(config: ModelConfig, i: int, *, attention: bool) -> list[str]:
    """Return the matrices that read a norm and stay as they are: routers and gates of experts, rates of delta nets."""
    names, layer = config.names, config.layers[i]
    if attention:
        return [names.delta_beta, names.delta_alpha] if layer.delta else []
    return [name for name in (names.router, names.shared_gate) if name] if layer.sparse else []


def _readers(shared: list[Site], weights: LayerWeights, config: ModelConfig, i: int) -> list[str]:
    """Return all matrices after the norm, those of experts that no token used too."""
    readers = [name for site in shared if site.place.expert == ALL_TOKENS for name in site.matrices]
    if not config.layers[i].sparse or shared[0].place.role == "attention_in":
        return readers
    assert config.experts is not None
    names = (config.names.expert_gate, config.names.expert_up)
    readers += [name.format(i=i, e=e) for e in range(config.experts.count) for name in names]
    return [name for name in readers if name in weights.matrices]


def _scale_after_rows(
    weights: LayerWeights, config: ModelConfig, i: int, site: Site, seen: Statistics, form: Int4Format
) -> None:
    """Scale the columns of a matrix whose inputs are proportional to the rows of another: v, or up."""
    (name,) = site.matrices
    attention = site.place.role == "attention_out"
    num_kv_heads, head_dim = config.layers[i].num_kv_heads, config.layers[i].head_dim
    before, rows = _rows_before(weights, config, i, site)
    magnitude = seen.magnitude
    if attention:  # several heads read one row of v
        heads = magnitude.view(num_kv_heads, -1, head_dim)
        magnitude = heads.mean(1, keepdim=True).expand_as(heads).flatten()
    scales = best_scales([(weights.matrices[name], seen.hessian)], magnitude, form)
    narrow = scales.view(num_kv_heads, -1, head_dim)[:, 0].flatten() if attention else scales
    if (bias := f"{before}.bias") in weights.plain:
        whole = weights.plain[bias].clone()
        part = whole[rows].to(scales.device)
        stored, narrow = exact_quotient(part, narrow, part.dtype)
        whole[rows] = stored.cpu()
        weights.plain[bias] = whole
    if attention:
        per_kv = config.num_heads // num_kv_heads
        parts = narrow.view(num_kv_heads, 1, head_dim).expand(-1, per_kv, -1)
        scales = parts.flatten()
    else:
        scales = narrow
    source = weights.matrices[before].clone()
    source[rows] /= narrow[:, None]
    weights.matrices[before] = source
    weights.matrices[name] = weights.matrices[name] * scales
    seen.divide(scales)


def _rows_before(weights: LayerWeights, config: ModelConfig, i: int, site: Site) -> tuple[str, slice]:
    """Return the matrix that makes the inputs of a site, and its rows that do: all, or the last of a fused one."""
    names = config.names
    if site.place.role == "attention_out":
        v, rows = names.v.format(i=i), config.layers[i].num_kv_heads * config.layers[i].head_dim
        return (v, slice(0, rows)) if v in weights.matrices else (names.qkv.format(i=i), slice(-rows, None))
    (down,) = site.matrices
    width = weights.matrices[down].shape[1]
    pattern = names.up if site.place.expert == ALL_TOKENS else names.expert_up
    up = pattern.format(i=i, e=site.place.expert)
    return (up, slice(0, width)) if up in weights.matrices else (names.gate_up.format(i=i), slice(-width, None))
