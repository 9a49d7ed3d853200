"""A folder of safetensors in the same numbers as a GGUF.

Owns reading them from the folder's files together: configuration, quantization, tensors, chat template. Loads nothing,
and knows no architecture: a layer of an unknown kind counts as one that keeps keys and values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgelm.base.errors import ModelError
from edgelm.checkpoints.config_json import (
    CONFIG,
    architecture_name,
    cached_kv_heads,
    decoder_values,
    delta_state_bytes,
    folder_experts,
    folder_shape,
    layer_heads,
    read_config_json,
    sliding_window,
    vocab_size,
)
from edgelm.checkpoints.encoder import folder_pooling, is_encoder
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.quantization import (
    Quantization,
    code_bits,
    file_exists,
    quantization_label,
    quantization_section,
    read_quantization,
)
from edgelm.checkpoints.safetensors import Safetensors
from edgelm.checkpoints.safetensors_parse import Tensor
from edgelm.checkpoints.summary import MAX_NAME, ModelFacts, ModelKind, ModelSummary, TensorFacts
from edgelm.checkpoints.values import Values
from edgelm.engine.core import Pooling

DECODER = r"(?:(?:model|language_model|transformer|text_model)\.)*"
LAYER = re.compile(DECODER + r"(?:layers|h)\.(\d{1,6})\..+")
EMBEDDING = re.compile(DECODER + r"(?:embed_tokens|wte|word_embeddings)\.weight")
CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")  # a folder of the hub's cache
FLOATS = {"F8_E4M3": "FP8", "F8_E5M2": "FP8", "F8_E4M3FNUZ": "FP8", "F8_E5M2FNUZ": "FP8"}  # dtype: its label
# tensors beside quantized weights that hold no weights: scales, zero points, the order of columns, codebooks
BESIDE_WEIGHTS = re.compile(
    r".*(?:\.(?:qzeros|scales|g_idx|SCB|weight_format|absmax|quant_map|nested_absmax|nested_quant_map|k_scale|v_scale"
    r"|weight_(?:scale|scale_inv|scale_2|zero_point|shape|g_idx|global_scale)|input_(?:scale|global_scale)"
    r"|activation_scale)"
    r"|\.quant_state\..+|_scales|_scale_inv)"
)


def folder_summary(model: Safetensors) -> ModelSummary:
    """Summarize an open model with the config.json beside it. Raises ModelError where that cannot be true."""
    return _summary(model, _config(model))


def folder_facts(model: Safetensors) -> ModelFacts:
    """Read the facts of an open folder. Raises ModelError where its configuration cannot be true."""
    config = _config(model)
    summary = _summary(model, config)
    experts = folder_experts(decoder_values(config), summary.layers)
    tensors = model.tensors.values()
    return ModelFacts(
        summary=summary,
        tensors=tuple(
            TensorFacts(tensor.name, tensor.dtype.name, tensor.shape[::-1], tensor.nbytes) for tensor in tensors
        ),
        experts=experts.count,
        experts_used=max(experts.used),
        mtp_heads=folder_heads(model, config),
        state_bytes=delta_state_bytes(decoder_values(config), summary.kv_heads),
    )


def folder_heads(model: Safetensors, config: Mapping[str, Any]) -> int:
    """Return how many layers predict the tokens after the next one, where the torch engine can run them: 1 or 0."""
    count = decoder_values(config).integer("mtp_num_hidden_layers", default=0)
    return int(count == 1 and "mtp.fc.weight" in model.tensors)


def _config(model: Safetensors) -> Mapping[str, Any]:
    if not file_exists(model.folder / CONFIG):
        raise ModelError(f"{CONFIG} is missing beside {model.name}", "download all files of the model into one folder")
    return read_config_json(model.folder)


def _summary(model: Safetensors, config: Mapping[str, Any]) -> ModelSummary:
    values = decoder_values(config)
    shape = folder_shape(values)
    _check_layers(model, values, shape.num_layers)
    section = quantization_section(config)
    quantization = _quantization(config)
    kind, pooling = _kind_and_pooling(model.folder, config)
    key_lens = [heads.head_len for heads in layer_heads(values, shape)]
    return ModelSummary(
        name=folder_name(model.folder),
        architecture=architecture_name(config),
        parameters=sum(_num_weights(tensor, model, section, quantization) for tensor in model.tensors.values()),
        quantization=quantization_label(section) if section else _largest_type(model),
        nbytes=model.size,
        context=shape.context,
        layers=shape.num_layers,
        width=shape.hidden_size,
        heads=max(shape.num_heads),
        kv_heads=cached_kv_heads(values, shape),
        key_lens=key_lens,
        value_lens=key_lens if shape.value_len == shape.key_len else [shape.value_len] * shape.num_layers,
        sliding_window=0 if values.get("use_sliding_window") is False else sliding_window(values),
        vocab_size=vocab_size(values),
        kind=kind,
        pooling=pooling,
    )


def _kind_and_pooling(folder: Path, config: Mapping[str, Any]) -> tuple[ModelKind, Pooling]:
    """Return the kind and pooling of a model: sentence-transformers states them in a folder's modules."""
    try:
        stated = folder_pooling(folder)
    except ModelError:  # `folder_problem` says why it does not run
        return "embedding", "mean"
    return "embedding" if stated or is_encoder(config) else "text", stated or "mean"


def folder_name(folder: Path) -> str:
    """Return the folder's name, or the repository's name for a snapshot in the hub's cache."""
    for parent in (folder, *folder.absolute().parents[:2]):
        if match := CACHED.fullmatch(parent.name):
            return shown(match["name"], MAX_NAME)
    return shown(folder.absolute().name, MAX_NAME)


def _check_layers(model: Safetensors, values: Values, num_layers: int) -> None:
    """Check that no layer is missing, and that the embedding has a row for each token."""
    layers: set[int] = set()
    num_tokens = vocab_size(values)
    for name, tensor in model.tensors.items():
        if match := LAYER.fullmatch(name):
            layers.add(int(match[1]))
        if EMBEDDING.fullmatch(name) and len(tensor.shape) == 2 and tensor.shape[0] < num_tokens:
            raise values.damaged(f"vocab_size is {num_tokens:,}, and tensor {shown(name)} has {tensor.shape[0]:,} rows")
    for i in range(num_layers if layers else 0):
        if i not in layers:
            raise values.damaged(f"the model has {num_layers} layers, and layer {i} has no tensors")


def _quantization(config: Mapping[str, Any]) -> Quantization:
    """Return how the weights are quantized; nothing of a method that cannot be loaded."""
    try:
        return read_quantization(config)
    except ModelError:
        return Quantization()


def _num_weights(tensor: Tensor, model: Safetensors, section: Mapping[str, Any], quantization: Quantization) -> int:
    """Return how many weights of the model a tensor holds; a quantized one holds more than it has elements."""
    if not section:
        return tensor.num_elements
    if BESIDE_WEIGHTS.fullmatch(tensor.name):
        return 0
    bnb = tensor.dtype.name == "U8" and f"{tensor.name}.absmax" in model.tensors
    if bnb or tensor.name.endswith("_blocks"):
        return tensor.num_elements * 2
    if tensor.name.endswith((".qweight", ".weight_packed")):
        own = quantization.of(tensor.name.rpartition(".")[0]).bits
        bits = 4 if tensor.dtype.name == "U8" else own or code_bits(section) or 4
        return tensor.num_elements * tensor.dtype.bits // bits
    return tensor.num_elements


def _largest_type(model: Safetensors) -> str:
    """Return the type that takes the most bytes."""
    nbytes: Counter[str] = Counter()
    for tensor in model.tensors.values():
        nbytes[tensor.dtype.name] += tensor.nbytes
    name = nbytes.most_common(1)[0][0] if nbytes else "none"
    return FLOATS.get(name, name)
