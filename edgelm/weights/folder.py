"""What a folder of safetensors is, in the same numbers as a GGUF.

Owns what the folder's files say together: the configuration, its quantization, the tensors, the chat template. Loads
nothing, and knows no architecture: a layer of a kind that it does not know is counted as keeping keys and values.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from edgelm.errors import ModelError
from edgelm.weights.folder_config import CONFIG, FolderConfig, damaged
from edgelm.weights.json_scan import read_json
from edgelm.weights.mapped import shown
from edgelm.weights.safetensors import Safetensors
from edgelm.weights.safetensors_parse import Tensor
from edgelm.weights.shape import is_integer
from edgelm.weights.summary import MAX_NAME, ModelSummary

DECODER = r"(?:(?:model|language_model|transformer|text_model)\.)*"
LAYER = re.compile(DECODER + r"(?:layers|h)\.(\d{1,6})\..+")
EMBEDDING = re.compile(DECODER + r"(?:embed_tokens|wte|word_embeddings)\.weight")
CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")  # a folder of the hub's cache
FLOATS = {"F8_E4M3": "FP8", "F8_E5M2": "FP8", "F8_E4M3FNUZ": "FP8", "F8_E5M2FNUZ": "FP8"}  # dtype: its label
METHODS = {"awq": "AWQ", "gptq": "GPTQ", "bitsandbytes": "BNB", "hqq": "HQQ", "auto-round": "AutoRound"}
FP8_METHODS = frozenset({"fp8", "fbgemm_fp8"})
# what goes with packed weights and is none: scales, zero points, the order of columns, codebooks
BESIDE_WEIGHTS = re.compile(
    r".*(?:\.(?:qzeros|scales|g_idx|SCB|weight_format|absmax|quant_map|nested_absmax|nested_quant_map|k_scale|v_scale"
    r"|weight_(?:scale|scale_inv|scale_2|zero_point|shape|g_idx|global_scale)|input_(?:scale|global_scale))"
    r"|\.quant_state\..+|_scales|_scale_inv)"
)


def folder_summary(model: Safetensors) -> ModelSummary:
    """Summarize an open model with the config.json beside it. Raises ModelError where that cannot be true."""
    if not _is_file(model.folder / CONFIG):
        raise ModelError(f"{CONFIG} is missing beside {model.name}", "download all files of the model into one folder")
    config = FolderConfig(model.folder)
    _check_layers(model, config)
    quantization = _quantization_config(model.folder, config)
    key_len, value_len = config.head_lens
    return ModelSummary(
        name=_name(model.folder),
        architecture=config.architecture,
        parameters=sum(_num_weights(tensor, model, quantization) for tensor in model.tensors.values()),
        quantization=_label(quantization) if quantization else _widest(model),
        nbytes=model.size,
        context=config.context,
        layers=config.layers,
        width=config.width,
        heads=max(config.heads),
        kv_heads=config.kv_heads,
        key_lens=[key_len] * config.layers,
        value_lens=[value_len] * config.layers,
        sliding_window=config.sliding_window,
        vocab_size=config.vocab_size,
        has_chat_template=_has_chat_template(model.folder),
    )


def modelopt_quantization(folder: Path) -> dict[str, Any]:
    """Return how NVIDIA's ModelOpt packed the weights, which it says in a file of its own; empty: it did not."""
    path = folder / "hf_quant_config.json"
    value = read_json(path).get("quantization") if _is_file(path) else None
    if not isinstance(value, dict) or value.get("quant_algo") is None:  # it may be of the KV cache alone
        return {}
    return {"quant_method": "modelopt"} | value


def _name(folder: Path) -> str:
    """Return the folder's name, or that of the repository whose snapshot in the hub's cache it is."""
    for each in (folder, *folder.absolute().parents[:2]):
        if match := CACHED.fullmatch(each.name):
            return shown(match["name"], MAX_NAME)
    return shown(folder.absolute().name, MAX_NAME)


def _check_layers(model: Safetensors, config: FolderConfig) -> None:
    """Check that no layer is missing, and that the embedding has a row for each token."""
    layers: set[int] = set()
    for name, tensor in model.tensors.items():
        if match := LAYER.fullmatch(name):
            layers.add(int(match[1]))
        rows = config.vocab_size
        if EMBEDDING.fullmatch(name) and rows and len(tensor.shape) == 2 and tensor.shape[0] < rows:
            raise damaged(f"vocab_size is {rows:,}, and tensor {shown(name)} has {tensor.shape[0]:,} rows")
    for i in range(config.layers if layers else 0):
        if i not in layers:
            raise damaged(f"the model has {config.layers} layers, and layer {i} has no tensors")


def _has_chat_template(folder: Path) -> bool:
    if any(_is_file(folder / name) for name in ("chat_template.jinja", "chat_template.json")):
        return True
    path = folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if _is_file(path) else None
    return isinstance(template, str | list) and bool(template)


def _quantization_config(folder: Path, config: FolderConfig) -> dict[str, Any]:
    """Return how the weights are packed; empty where they are not."""
    for name in ("quantization_config", "compression_config"):
        value = config.decoder.get(name)
        if isinstance(value, dict):
            return value
    return modelopt_quantization(folder)


def _label(quantization: dict[str, Any]) -> str:
    """Return a name for a kind of quantization, such as `AWQ 4-bit`."""
    method = quantization.get("quant_method")
    method = method.lower() if isinstance(method, str) and method else "quantized"
    if method in FP8_METHODS:
        return "FP8"
    if method == "mxfp4":
        return "MXFP4"
    if method == "modelopt" and isinstance(algorithm := quantization.get("quant_algo"), str):
        return shown(algorithm, 20)
    if method == "compressed-tensors":
        kind = quantization.get("format")
        if isinstance(kind, str) and kind.startswith(("nvfp4", "mxfp4")):
            return kind[:5].upper()
        if _packed_weights(quantization).get("type") == "float" and _bits(quantization) == 8:
            return "FP8"
    bits = _bits(quantization)
    return METHODS.get(method, shown(method, 20)) + (f" {bits}-bit" if bits else "")


def _bits(quantization: dict[str, Any]) -> int:
    """Return how many bits a packed weight has, 0 where that is not said."""
    if quantization.get("load_in_4bit") is True:
        return 4
    if quantization.get("load_in_8bit") is True:
        return 8
    for bits in (quantization.get("bits"), quantization.get("w_bit"), _packed_weights(quantization).get("num_bits")):
        if is_integer(bits) and 1 <= bits <= 16:
            return bits
    return 0


def _packed_weights(quantization: dict[str, Any]) -> dict[str, Any]:
    """Return what compressed-tensors says of the weights of its first group."""
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    return weights if isinstance(weights, dict) else {}


def _num_weights(tensor: Tensor, model: Safetensors, quantization: dict[str, Any]) -> int:
    """Return how many weights of the model a tensor holds: a packed one more than it has elements."""
    if not quantization:
        return tensor.num_elements
    if BESIDE_WEIGHTS.fullmatch(tensor.name):
        return 0
    bnb = tensor.dtype.name == "U8" and f"{tensor.name}.absmax" in model.tensors
    if bnb or tensor.name.endswith("_blocks"):
        return tensor.num_elements * 2
    if tensor.name.endswith((".qweight", ".weight_packed")):
        bits = 4 if tensor.dtype.name == "U8" else _bits(quantization) or 4
        return tensor.num_elements * tensor.dtype.bits // bits
    return tensor.num_elements


def _widest(model: Safetensors) -> str:
    """Return the type that most bytes have."""
    nbytes: Counter[str] = Counter()
    for tensor in model.tensors.values():
        nbytes[tensor.dtype.name] += tensor.nbytes
    name = nbytes.most_common(1)[0][0] if nbytes else "none"
    return FLOATS.get(name, name)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return True  # reading it says what is wrong
