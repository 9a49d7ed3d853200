"""What a folder's config.json says of how its weights are packed, checked.

Owns the methods that are read and the refusal of the others. Knows no tensors: those are in quantized_folder.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgelm.errors import ModelError
from edgelm.weights.mapped import shown
from edgelm.weights.shape import is_integer

OTHER = "take a GGUF of the model, or its AWQ, GPTQ, compressed-tensors, FP8 or 16-bit files"
Method = Literal["none", "awq", "gptq", "compressed-tensors", "fp8", "mxfp4"]
METHODS: dict[str, Method] = {
    "awq": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp4": "mxfp4",
}
CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
MAX_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a folder are packed. Sizes that tensors show are not repeated here."""

    method: Method = "none"
    bits: int = 0  # of a code; 0: it is for the tensors to show
    group: int = 0  # columns that share a scale; 0: it is for the tensors to show, -1: all of a row
    symmetric: bool = False  # there are no zero points, or all are in the middle
    zero_less_one: bool = False  # zero points are stored less one: GPTQ's first format
    block: tuple[int, int] | None = None  # rows and columns that share a scale


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """Read a parsed config.json. Raises ModelError for a method that is not read."""
    said = next((value for value in _sections(config) if isinstance(value, dict) and value), None)
    if said is None:
        return Quantization()
    name = said.get("quant_method")
    method = METHODS.get(name.lower()) if isinstance(name, str) else None
    if method is None:
        algorithm = said.get("quant_algo")  # of NVIDIA's ModelOpt
        named = _shown(name) if algorithm is None else f"{_shown(name)} {_shown(algorithm)}"
        raise _refused(f"its quantization method is {named}")
    if method == "awq":
        return _awq(said)
    if method == "gptq":
        return _gptq(said)
    if method == "compressed-tensors":
        return _compressed_tensors(said)
    return Quantization(method, block=_block(said.get("weight_block_size")))


def _sections(config: Mapping[str, Any]) -> list[Any]:
    nested = [config, *(config.get(name) for name in ("text_config", "llm_config", "language_config"))]
    names = ("quantization_config", "compression_config")
    return [each.get(name) for each in nested if isinstance(each, Mapping) for name in names]


def _awq(said: Mapping[str, Any]) -> Quantization:
    version = said.get("version", said.get("format", "gemm"))
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _refused(f"its AWQ weights are in the order {_shown(version)}, where gemm is read")
    return Quantization("awq", _bits(said, "bits", "w_bit", possible=(4,)), _group(said, "group_size", "q_group_size"))


def _gptq(said: Mapping[str, Any]) -> Quantization:
    kind = said.get("checkpoint_format", said.get("format", "gptq"))
    if kind not in ("gptq", "gptq_v2"):
        raise _refused(f"its GPTQ weights are in the format {_shown(kind)}, where gptq and gptq_v2 are read")
    bits = _bits(said, "bits", possible=(4, 8))
    group = _group(said, "group_size")
    return Quantization("gptq", bits, group, symmetric=said.get("sym") is True, zero_less_one=kind == "gptq")


def _compressed_tensors(said: Mapping[str, Any]) -> Quantization:
    kind = said.get("format", "mixed-precision")
    if kind not in CT_FORMATS:
        raise _refused(f"its compressed-tensors format is {_shown(kind)}")
    sparse = said.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise _refused("its weights are stored as sparse matrices")
    transforms = said.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise _refused("its weights are rotated, and its inputs must be too")
    groups = said.get("config_groups")
    weights = [
        group["weights"]
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    symmetric = bool(weights) and all(each.get("symmetric", True) is True for each in weights)
    blocks = [block for each in weights if (block := _block(each.get("block_structure"))) is not None]
    return Quantization("compressed-tensors", symmetric=symmetric, block=blocks[0] if blocks else None)


def _bits(said: Mapping[str, Any], *names: str, possible: tuple[int, ...]) -> int:
    value = next((said[name] for name in names if said.get(name) is not None), None)
    if not is_integer(value) or value not in possible:
        wanted = " and ".join(map(str, possible))
        raise _refused(f"its weights have {_shown(value)} bits, where {wanted} are read")
    return value


def _group(said: Mapping[str, Any], *names: str) -> int:
    value = next((said[name] for name in names if said.get(name) is not None), None)
    if not is_integer(value) or not (value == -1 or 0 < value <= MAX_BLOCK):
        raise _refused(f"{names[0]} is {_shown(value)}")
    return value


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(is_integer(n) and 0 < n <= MAX_BLOCK for n in value):
        raise _refused(f"its blocks of weights are {_shown(value)}")
    return value[0], value[1]


def _refused(what: str) -> ModelError:
    return ModelError(f"its weights cannot be read: {what}", OTHER)


def _shown(value: object) -> str:
    return "not said" if value is None else shown(str(value), 40)
