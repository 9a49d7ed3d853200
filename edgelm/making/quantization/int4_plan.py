"""The plan of a folder's quantization: its matrices, the parts of the new folder, their sizes, and the refusals.

Owns every check that can be made before work begins. Reads no numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from edgelm.base.errors import ModelError, RequestError
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.quantization import quantization_label, quantization_section
from edgelm.checkpoints.safetensors import Safetensors
from edgelm.making.quantization.int4_job import GROUPS, Int4Job
from edgelm.making.quantization.int4_layer import Site, layer_sites
from edgelm.models.config import ModelConfig, read_config
from edgelm.models.families import LAYER, decoder_name
from edgelm.models.loading.decoder import unreadable_reason
from edgelm.models.loading.stored import PLAIN_TYPES

MAX_PART_BYTES = 5 * 10**9
SOURCES = "take the model's files of 16 or 32 bits"
TEXT_OF_OTHERS = re.compile(r"(?:embed|wte|wpe|norm)", re.IGNORECASE)  # matrices that no linear layer multiplies by
SCALE_BYTES = 2
GEMM_COPIES = 6  # of a layer in float32, while one matrix is quantized


class Source(NamedTuple):
    """A matrix to quantize, in the files: a tensor, or rows of one expert's part of a tensor."""

    tensor: str
    stem: str  # by which its parts are named in the new files
    expert: int | None = None
    rows: slice = slice(None)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one folder."""

    config: ModelConfig
    sites: list[list[Site]]  # of each layer
    sources: dict[str, Source]  # of the matrices of all sites
    layer_names: list[dict[str, str]]  # of each layer: the tensors in the files by their names in the family
    other_parts: dict[str, list[str]]  # tensors that are stored as they are
    embedding: str  # the tensor in the files
    ignore: list[str]  # linear layers that stay as they are
    scale_dtype: torch.dtype
    nbytes: int  # of the new weights
    layer_weights: int  # numbers of the largest layer
    hessian_bytes: int  # of the layer with the most

    @staticmethod
    def layer_part(i: int) -> str:
        return f"layer-{i:05d}"

    @property
    def parts(self) -> list[str]:
        return [*self.other_parts, *(self.layer_part(i) for i in range(len(self.sites)))]

    def memory_bytes(self, num_tokens: int) -> int:
        """Return about how many bytes calibration takes: the streams, one layer several times, its Hessians."""
        streams = num_tokens * self.config.hidden_size * 4
        return streams + GEMM_COPIES * 4 * self.layer_weights // 2 + 2 * self.hessian_bytes


def plan_folder(model: Safetensors, config: Mapping[str, Any], job: Int4Job) -> Plan:
    """Return the plan. Raises ModelError for a model that cannot be quantized, RequestError for a wrong group."""
    if section := quantization_section(config):
        label = quantization_label(section)
        raise ModelError(f"{model.name} is quantized already ({label})", SOURCES)
    decoder = read_config(config)
    if (decoder.names.expert_gate_up or decoder.family.dense_beside_experts) and decoder.experts:
        message = f"the experts of {decoder.family.name} are one tensor, for which the packed layout has no form"
        own = decoder.family.gguf == "gpt-oss"
        hint = "use its own MXFP4 files, which have 4 bits already" if own else "convert it, and quantize the GGUF"
        raise ModelError(message, hint)
    if reason := unreadable_reason(model, config):
        raise ModelError(reason, "")
    names = {decoder_name(name): name for name in model.tensors}
    layers: list[dict[str, str]] = [{} for _ in decoder.layers]
    others = []
    for name, file_name in names.items():
        match = LAYER.match(name)
        if match and int(match[1]) < len(layers):
            layers[int(match[1])][name] = file_name
        else:
            others.append(file_name)
    sites = [layer_sites(decoder, i, names) for i in range(len(layers))]
    stacked = _stacked(decoder, model, names)
    sources = {
        stem: stacked.get(stem) or Source(names[f"{stem}.weight"], names[f"{stem}.weight"].removesuffix(".weight"))
        for layer in sites
        for site in layer
        for stem in site.matrices
    }
    matrices = {source.tensor for source in sources.values()}
    for file_name in sorted(matrices):
        _require_fit(model, file_name, job.group)
    ends = (f"{decoder.names.embedding}.weight", f"{decoder.names.output}.weight")
    embedding = next(names[end] for end in ends if end in names)
    return Plan(
        config=decoder,
        sites=sites,
        sources=sources,
        layer_names=layers,
        other_parts=_other_parts(model, others),
        embedding=embedding,
        ignore=_ignored(model, matrices, embedding, ends[1]),
        scale_dtype=_scale_dtype(model, matrices),
        nbytes=_nbytes(model, matrices, job.group, symmetric=job.symmetric),
        layer_weights=max(sum(math.prod(model.tensors[name].shape) for name in layer.values()) for layer in layers),
        hessian_bytes=max(_hessian_bytes(model, sources, layer) for layer in sites),
    )


def _require_fit(model: Safetensors, name: str, group: int) -> None:
    tensor = model.tensors[name]
    if tensor.dtype.name not in PLAIN_TYPES:
        raise ModelError(f"tensor {shown(name)} of {model.name} is {tensor.dtype.name}", SOURCES)
    columns = tensor.shape[-1]
    if columns % group:
        fitting = [str(size) for size in GROUPS if columns % size == 0]
        hint = f"choose --group {' or '.join(fitting)}" if fitting else "such a model cannot be packed"
        raise RequestError(f"tensor {shown(name)} has {columns} columns, which groups of {group} do not divide", hint)


def _other_parts(model: Safetensors, names: list[str]) -> dict[str, list[str]]:
    """Return the tensors outside of the layers, in parts of up to 5 GB."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in names:
        nbytes = model.tensors[name].nbytes
        if parts[-1] and size + nbytes > MAX_PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += nbytes
    return {f"other-{i:05d}": part for i, part in enumerate(parts) if part}


def _ignored(model: Safetensors, matrices: set[str], embedding: str, output: str) -> list[str]:
    """Return the names of linear layers that stay as they are: routers, the output, and all outside of the decoder."""
    names = {output.removesuffix(".weight")}  # a model with a tied output has the module and no tensor
    for name, tensor in model.tensors.items():
        if name in matrices or name == embedding or len(tensor.shape) != 2 or not name.endswith(".weight"):
            continue
        if not TEXT_OF_OTHERS.search(name.rpartition(".")[0].rpartition(".")[2]):
            names.add(name.removesuffix(".weight"))
    return sorted(names)


def _scale_dtype(model: Safetensors, matrices: set[str]) -> torch.dtype:
    """Return the type of the scales: that of the weights, as readers compute with them, or 16 bits."""
    kinds = {model.tensors[name].dtype.name for name in matrices}
    return torch.bfloat16 if kinds == {"BF16"} else torch.float16


def _nbytes(model: Safetensors, matrices: set[str], group: int, *, symmetric: bool) -> int:
    total = 0
    for name, tensor in model.tensors.items():
        if name not in matrices:
            total += tensor.nbytes
            continue
        weights = tensor.num_elements
        groups = weights // group
        total += weights // 2 + groups * SCALE_BYTES + 16 + (0 if symmetric else groups // 2)
    return total


def _hessian_bytes(model: Safetensors, sources: Mapping[str, Source], sites: list[Site]) -> int:
    return sum(4 * model.tensors[sources[site.matrices[0]].tensor].shape[-1] ** 2 for site in sites)


def _stacked(config: ModelConfig, model: Safetensors, names: Mapping[str, str]) -> dict[str, Source]:
    """Return the matrices of experts that are two tensors in a layer, which become separate ones."""
    ours, matrices = config.names, {}
    for i in range(len(config.layers)):
        gate_up = ours.expert_gate_then_up.format(i=i)
        if gate_up not in names or config.experts is None:
            continue
        inner = model.tensors[names[gate_up]].shape[1] // 2
        down = ours.expert_down.replace(".{e}", "").format(i=i)
        prefix = names[gate_up].removesuffix(gate_up.removeprefix("model."))
        for e in range(config.experts.count):
            for pattern, tensor, rows in (
                (ours.expert_gate, gate_up, slice(0, inner)),
                (ours.expert_up, gate_up, slice(inner, 2 * inner)),
                (ours.expert_down, down, slice(None)),
            ):
                stem = pattern.format(i=i, e=e)
                matrices[stem] = Source(names[tensor], prefix + stem.removeprefix("model."), e, rows)
    return matrices
