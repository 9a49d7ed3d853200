"""What memory planning needs of a model: its summary, and its tensors as names, types and sizes.

Owns the reading of both from a header. It is data: whether the header lies on this disk or came over the network is
not known here, and no tensor is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from edgelm.weights.folder import folder_summary
from edgelm.weights.folder_config import FolderConfig
from edgelm.weights.gguf import GGUF
from edgelm.weights.safetensors import Safetensors
from edgelm.weights.shape import number, per_layer
from edgelm.weights.summary import ModelSummary, model_summary

MAX_EXPERTS = 2**16
MAX_STATE = 2**24
F32_BYTES = 4


class TensorFacts(NamedTuple):
    """One tensor. `shape` is in ggml's order: the numbers of a row first."""

    name: str
    type: str  # "Q4_0", "BF16", ...
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as far as its memory depends on it."""

    summary: ModelSummary
    tensors: tuple[TensorFacts, ...]
    experts: int = 0  # of a layer; 0: not a mixture
    experts_used: int = 0  # by a token
    state_bytes: int = 0  # what the recurrent layers keep of one sequence, whatever its length

    @property
    def tied(self) -> bool:
        """Whether the output matrix is the token embedding."""
        return all(tensor.name != "output.weight" for tensor in self.tensors)


class WeightBytes(NamedTuple):
    """What the weights of a model take in an engine, in bytes."""

    resident: int  # once loaded
    copied: int  # of these, in a copy of the engine's own: the rest is the mapped file
    load_peak: int  # of the process while it loads, with mapped pages that the system takes back when it needs them
    read_per_token: int  # when one sequence decodes


def model_facts(gguf: GGUF) -> ModelFacts:
    """Read the facts of an open model. Raises ModelError where its metadata cannot be true."""
    summary = model_summary(gguf)
    return ModelFacts(
        summary=summary,
        tensors=tuple(
            TensorFacts(each.name, each.type.name, each.shape, each.nbytes) for each in gguf.tensors.values()
        ),
        experts=number(gguf, "expert_count", 0, MAX_EXPERTS, 0),
        experts_used=max(per_layer(gguf, "expert_used_count", summary.layers, MAX_EXPERTS) or [0]),
        state_bytes=recurrent_state_bytes(gguf, summary),
    )


def folder_facts(model: Safetensors) -> ModelFacts:
    """Read the facts of an open folder of safetensors. Raises ModelError where its configuration cannot be true."""
    config = FolderConfig(model.folder)
    return ModelFacts(
        summary=folder_summary(model),
        tensors=tuple(
            TensorFacts(each.name, each.dtype.name, each.shape[::-1], each.nbytes) for each in model.tensors.values()
        ),
        experts=config.number(("num_experts", "num_local_experts", "n_routed_experts"), 0, MAX_EXPERTS, 0),
        experts_used=config.number(("num_experts_per_tok", "experts_per_token"), 0, MAX_EXPERTS, 0),
    )


def recurrent_state_bytes(gguf: GGUF, summary: ModelSummary) -> int:
    """Return the bytes of one sequence's state in all recurrent layers: convolution windows and state matrices."""
    inner = number(gguf, "ssm.inner_size", 0, MAX_STATE, 0)
    states = number(gguf, "ssm.state_size", 0, MAX_STATE, 0)
    groups = number(gguf, "ssm.group_count", 0, MAX_STATE, 0)
    window = max(number(gguf, "ssm.conv_kernel", 0, MAX_STATE, 0) - 1, 0) * (inner + 2 * groups * states)
    window += max(number(gguf, "shortconv.l_cache", 0, MAX_STATE, 0) - 1, 0) * summary.width
    recurrent = sum(heads == 0 for heads in summary.kv_heads)
    return F32_BYTES * recurrent * (window + inner * states)
