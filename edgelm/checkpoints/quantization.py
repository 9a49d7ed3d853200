"""The quantization of a folder of safetensors, as its config.json states it, checked.

Owns the methods that can be loaded, the refusal of the others, and the label of each. Knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.json_scan import read_json
from edgelm.checkpoints.values import is_integer

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
LABELS = {"awq": "AWQ", "gptq": "GPTQ", "bitsandbytes": "BNB", "hqq": "HQQ", "auto-round": "AutoRound"}
CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
MAX_BLOCK = 2**20
MAX_RULES = 4096
MAX_PATTERN = 2000
# keys that a rule may change: the first three say how a module is stored, the others how its codes were found
RULE_KEYS = frozenset(
    {"bits", "group_size", "sym"}
    | {"desc_act", "act_group_aware", "static_groups", "mse", "fallback", "hessian", "gptaq", "foem"}
    | {"damp_percent", "damp_auto_increment"}
)
DECODERS = ("text_config", "llm_config", "language_config")  # of a model that reads images or sound as well
MODELOPT_FILE = "hf_quant_config.json"


class Rule(NamedTuple):
    """The quantization of the modules whose names begin as the pattern says; None: they are not quantized."""

    pattern: re.Pattern[str]
    quantization: Quantization | None


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a folder are quantized. Sizes that the tensors show are not repeated here."""

    method: Method = "none"
    bits: int = 0  # of a code; 0: the tensors show it
    group: int = 0  # columns that share a scale; 0: the tensors show it, -1: a whole row
    symmetric: bool = False  # there are no zero points, or all are in the middle
    zero_less_one: bool = False  # zero points are stored less one, as in GPTQ's first format
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    rules: tuple[Rule, ...] = ()  # of GPTQModel's `dynamic`; the first that matches a module holds

    def of(self, module: str) -> Quantization:
        """Return how one module is quantized, such as `model.layers.0.mlp.up_proj`."""
        rule = next((rule for rule in self.rules if rule.pattern.match(module)), None)
        return self if rule is None or rule.quantization is None else rule.quantization


def quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a parsed config.json that describes the quantization; empty where there is none."""
    for part in (config, *(config.get(name) for name in DECODERS)):
        for name in ("quantization_config", "compression_config"):
            if isinstance(part, Mapping) and isinstance(section := part.get(name), Mapping) and section:
                return section
    return {}


def modelopt_section(folder: Path) -> Mapping[str, Any]:
    """Return the same from the file that NVIDIA's ModelOpt writes; empty where there is none."""
    path = folder / MODELOPT_FILE
    section = read_json(path).get("quantization") if file_exists(path) else None
    if not isinstance(section, dict) or section.get("quant_algo") is None:  # it may be of the KV cache alone
        return {}
    return {"quant_method": "modelopt"} | section


def file_exists(path: Path) -> bool:
    """Tell whether a file exists, or may exist: reading it then raises the error."""
    try:
        return path.is_file()
    except OSError:
        return True


def quantization_label(section: Mapping[str, Any]) -> str:
    """Return a name for the quantization that a section describes, such as `AWQ 4-bit`."""
    method = section.get("quant_method")
    method = method.lower() if isinstance(method, str) and method else "quantized"
    if method == "mxfp4" or METHODS.get(method) == "fp8":
        return METHODS[method].upper()
    if method == "modelopt" and isinstance(algorithm := section.get("quant_algo"), str):
        return shown(algorithm, 20)
    bits = code_bits(section)
    if method == "compressed-tensors":
        kind = section.get("format")
        if isinstance(kind, str) and kind.startswith(("nvfp4", "mxfp4")):
            return kind[:5].upper()
        if bits == 8 and any(weights.get("type") == "float" for weights in _first_group(section)):
            return "FP8"
    return LABELS.get(method, shown(method, 20)) + (f" {bits}-bit" if bits else "")


def code_bits(section: Mapping[str, Any]) -> int:
    """Return the bits of a quantized weight, 0 where the section does not state them."""
    if section.get("load_in_4bit") is True:
        return 4
    if section.get("load_in_8bit") is True:
        return 8
    group_bits = [weights.get("num_bits") for weights in _first_group(section)]
    for bits in (section.get("bits"), section.get("w_bit"), *group_bits):
        if is_integer(bits) and 1 <= bits <= 16:
            return bits
    return 0


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """Read a parsed config.json. Raises ModelError for a method that cannot be loaded."""
    section = quantization_section(config)
    if not section:
        return Quantization()
    name = section.get("quant_method")
    method = METHODS.get(name.lower()) if isinstance(name, str) else None
    if method is None:
        algorithm = section.get("quant_algo")  # of NVIDIA's ModelOpt
        label = _described(name) if algorithm is None else f"{_described(name)} {_described(algorithm)}"
        raise _refused(f"its quantization method is {label}")
    if method == "awq":
        return _awq(section)
    if method == "gptq":
        return _gptq(section)
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    return Quantization(method, block=_block(section.get("weight_block_size")))


def _awq(section: Mapping[str, Any]) -> Quantization:
    version = section.get("version", section.get("format", "gemm"))
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _refused(f"its AWQ weights are in the order {_described(version)}, but must be gemm")
    bits = _bits(section, "bits", "w_bit", supported=(4,))
    return Quantization("awq", bits, _group(section, "group_size", "q_group_size"))


def _gptq(section: Mapping[str, Any]) -> Quantization:
    kind = section.get("checkpoint_format", section.get("format", "gptq"))
    if kind not in ("gptq", "gptq_v2"):
        raise _refused(f"its GPTQ weights are in the format {_described(kind)}, but must be gptq or gptq_v2")
    bits = _bits(section, "bits", supported=(4, 8))
    group = _group(section, "group_size")
    plain = Quantization("gptq", bits, group, symmetric=section.get("sym") is True, zero_less_one=kind == "gptq")
    return replace(plain, rules=tuple(_rules(section, plain)))


def _rules(section: Mapping[str, Any], plain: Quantization) -> Iterator[Rule]:
    """Yield the rules of GPTQModel's `dynamic`: patterns of module names with the values that differ.

    A pattern that begins with `-:` is of modules that are not quantized. `+:` before the others may be omitted.
    """
    dynamic = section.get("dynamic")
    if dynamic is None:
        return
    if not isinstance(dynamic, Mapping) or len(dynamic) > MAX_RULES:
        raise _refused("its rules for single modules (dynamic) are not in the form of GPTQModel")
    for name, values in dynamic.items():
        pattern = _pattern(name)
        if name.startswith("-:"):
            yield Rule(pattern, None)
            continue
        if not isinstance(values, Mapping):
            raise _refused(f"its rule for the modules {_described(name)} is {_described(values)}")
        other = next((key for key in sorted(values.keys() - RULE_KEYS) if values[key] != section.get(key)), None)
        if other is not None:
            raise _refused(f"its rule for the modules {_described(name)} has {other} = {_described(values[other])}")
        merged = {**section, **values}
        try:
            rule = replace(
                plain,
                bits=_bits(merged, "bits", supported=(4, 8)),
                group=_group(merged, "group_size"),
                symmetric=merged.get("sym") is True,
            )
        except ModelError as error:
            raise ModelError(f"{error.message}, in its rule for the modules {_described(name)}", OTHER) from None
        yield Rule(pattern, rule)


def _pattern(name: object) -> re.Pattern[str]:
    """Compile the pattern of a rule."""
    text = name.removeprefix("-:").removeprefix("+:") if isinstance(name, str) else ""
    try:
        if 0 < len(text) <= MAX_PATTERN:
            return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        pass
    raise _refused(f"its rule for the modules {_described(name)} has a pattern that cannot be read")


def _compressed_tensors(section: Mapping[str, Any]) -> Quantization:
    kind = section.get("format", "mixed-precision")
    if kind not in CT_FORMATS:
        raise _refused(f"its compressed-tensors format is {_described(kind)}")
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise _refused("its weights are stored as sparse matrices")
    transforms = section.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise _refused("its weights are rotated, and its inputs must be too")
    groups = list(_group_weights(section))
    symmetric = bool(groups) and all(weights.get("symmetric", True) is True for weights in groups)
    blocks = [block for weights in groups if (block := _block(weights.get("block_structure"))) is not None]
    return Quantization("compressed-tensors", symmetric=symmetric, block=blocks[0] if blocks else None)


def _group_weights(section: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what compressed-tensors states about the weights of each group."""
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(weights := group.get("weights"), Mapping):
            yield weights


def _first_group(section: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(_group_weights(section))[:1]


def _bits(section: Mapping[str, Any], *names: str, supported: tuple[int, ...]) -> int:
    value = next((section[name] for name in names if section.get(name) is not None), None)
    if not is_integer(value) or value not in supported:
        choices = " or ".join(map(str, supported))
        bits = "no stated number of" if value is None else _described(value)
        raise _refused(f"its weights have {bits} bits, but must have {choices}")
    return value


def _group(section: Mapping[str, Any], *names: str) -> int:
    value = next((section[name] for name in names if section.get(name) is not None), None)
    if not is_integer(value) or not (value == -1 or 0 < value <= MAX_BLOCK):
        raise _refused(f"{names[0]} is {_described(value)}")
    return value


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(is_integer(n) and 0 < n <= MAX_BLOCK for n in value):
        raise _refused(f"its blocks of weights are {_described(value)}")
    return value[0], value[1]


def _refused(reason: str) -> ModelError:
    return ModelError(f"its weights cannot be read: {reason}", OTHER)


def _described(value: object) -> str:
    return "not stated" if value is None else shown(str(value), 40)
