"""A LoRA adapter as PEFT writes it, in adapter_config.json and adapter_model.safetensors, read and checked.

Owns the format: the names of its tensors, and the options that say how they change a weight. An option that would
change weights in a way unknown to us is refused. Knows neither the model that it was made for nor the form that
llama.cpp loads.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import DOWNLOAD, shown
from edgelm.checkpoints.json_scan import read_json
from edgelm.checkpoints.safetensors import Safetensors, open_safetensors
from edgelm.checkpoints.values import Values, described, is_integer, is_number

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
MAX_RANK = 2**16
BLOCK = 2**22  # numbers that are checked, or bytes that are read at a time
MAX_ALPHA = 1e6
MAX_PATTERNS = 2**14
RETRAIN = "train or save the adapter without it"
EXPECTED = "give the folder with adapter_config.json and adapter_model.safetensors, or a GGUF of it"

_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?!weight\Z|bias\Z)[^.]+)?(?:\.weight)?",
    re.DOTALL,
)
_WHOLE = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.[^.]+)?|\.base_layer)?\.(?P<kind>weight|bias)", re.DOTALL)
# A language model may be part of a larger one, or be saved without its output matrix.
_WRAPPED = re.compile(r"\A(?:model\.|language_model\.)*(?=(?:layers|embed_tokens|norm|lm_head)\.)")
_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.\*?){1,200}")
MAX_STARS = 3  # in a pattern: each multiplies the time of a match
_TYPES = ("F32", "F16", "BF16", "F64")
# Options that change more than B x A, or another part of the model.
_REFUSED = {
    "lora_bias": "its matrices have biases of their own",
    "fan_in_fan_out": "it was made for layers that are stored transposed, as in GPT-2",
    "target_parameters": "it changes parameters that belong to no layer, such as experts in one tensor",
    "trainable_token_indices": "it has rows of single tokens",
    "layer_replication": "it repeats layers of the model",
    "alora_invocation_tokens": "it acts only after certain tokens (aLoRA)",
    "use_qalora": "its inputs are grouped (QA-LoRA)",
    "use_bdlora": "its matrices are stored in blocks (BD-LoRA)",
    "arrow_config": "it chooses among several adapters for each token (Arrow)",
    "kasa_config": "it changes singular values (KaSA)",
    "monteclora_config": "it samples its weights (MonteCLoRA)",
}
# Ways to begin the training that change the model's own weights, too.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one matrix W [out, in]: scaling * B @ A, with A [rank, in] and B [out, rank].

    Of an embedding [vocab, width] it is scaling * (B @ A).T, with A [rank, vocab] and B [width, rank]. With a
    `magnitude` (DoRA), each row of the sum with W then gets this length.
    """

    module: str  # as in the model: "model.layers.0.self_attn.q_proj"
    rank: int
    scaling: float
    shape: tuple[int, int]  # of the matrix that it changes
    a: str  # the names of its tensors in the file
    b: str
    embedding: bool = False
    magnitude: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of the model that the adapter replaces, trained or resized with it."""

    name: str  # as in the model: "lm_head.weight"
    source: str  # in the file
    shape: tuple[int, ...]
    trained: bool = True  # False: it is the model's own, saved beside the change


class Adapter:
    """An open adapter. Tensors are read from the mapped file on access, as float32."""

    def __init__(self, folder: Path, file: Safetensors, config: Mapping[str, Any]) -> None:
        self.path = folder
        self.file = file
        self.alpha = _number(config, "lora_alpha", file.name)
        self.low_rank, self.whole = _read_names(file, config)
        self.num_bytes = sum(tensor.nbytes for tensor in file.tensors.values())

    @property
    def name(self) -> str:
        return shown(self.path.name)

    def tensor(self, source: str, first: int = 0, last: int | None = None) -> NDArray[np.float32]:
        """Return rows of a tensor of the file, or all. Raises ModelError for numbers that are not finite."""
        raw = self.file.array(source)
        raw = raw[first:last] if raw.ndim else raw
        if self.file.tensors[source].dtype.name == "BF16":
            values: NDArray[np.float32] = (raw.astype(np.uint32) << 16).view(np.float32)
        else:
            with np.errstate(over="ignore"):  # F64 may become infinite
                values = raw.astype(np.float32)
        if not np.isfinite(values).all():
            raise self.damaged(f"tensor {shown(source)} has numbers that are not finite")
        return values

    def require_finite(self) -> None:
        """Read all tensors, some rows at a time. Raises ModelError for numbers that are not finite."""
        for source, tensor in self.file.tensors.items():
            num_rows = tensor.shape[0] if tensor.shape else 1
            step = max(1, BLOCK * num_rows // max(tensor.num_elements, 1))
            for first in range(0, num_rows, step):
                self.tensor(source, first, first + step)

    def content(self) -> bytes:
        """Return 16 bytes that identify the adapter's files by all that is in them. Raises ModelError."""
        digest = hashlib.blake2b(digest_size=16)
        try:
            for path in (self.path / CONFIG, *self.file.paths):
                with path.open("rb") as file:
                    while block := file.read(BLOCK):
                        digest.update(block)
        except OSError as error:
            raise ModelError(f"{self.name} cannot be read any more: {error.strerror}", "try again") from None
        return digest.digest()

    def damaged(self, reason: str) -> ModelError:
        return ModelError(f"the adapter {self.name} is damaged: {reason}", DOWNLOAD)

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plain_name(name: str) -> str:
    """Return the name of a decoder's tensor or layer without the names of models around it: "layers.0.mlp.up_proj"."""
    return _WRAPPED.sub("", name + ".").removesuffix(".")


def open_adapter(path: Path) -> Adapter:
    """Open the adapter in a folder, or of a file in it, and check all of it but its numbers. Raises ModelError."""
    folder = path.parent if path.name in (WEIGHTS, CONFIG) else path
    _require_files(folder)
    with ExitStack() as opened:
        config = read_json(folder / CONFIG)
        _check_options(config, shown(folder.name))
        file = opened.enter_context(open_safetensors(folder / WEIGHTS))
        adapter = Adapter(folder, file, config)
        opened.pop_all()
        return adapter


def _require_files(folder: Path) -> None:
    name = shown(folder.name or str(folder))
    try:
        if not folder.exists():
            raise ModelError(f"there is no adapter {shown(str(folder), 200)}", EXPECTED)
        if not folder.is_dir():
            raise ModelError(f"{name} is not an adapter", EXPECTED)
        if not (folder / CONFIG).exists():
            raise ModelError(f"{name} is not an adapter: {CONFIG} is missing", EXPECTED)
        if (folder / WEIGHTS).exists():
            return
        pickled = (folder / PICKLED).exists()
    except (OSError, ValueError) as error:
        raise ModelError(f"the adapter {name} cannot be opened: {error}") from None
    if pickled:
        hint = "save the adapter as safetensors: that is PEFT's default"
        raise ModelError(f"{name} holds a pickled adapter ({PICKLED}), which can run code and is not read", hint)
    raise ModelError(f"{name} is not a whole adapter: {WEIGHTS} is missing", EXPECTED)


# -- options -----------------------------------------------------------------------------------------------------------


def _check_options(config: Mapping[str, Any], name: str) -> None:
    """Refuse an adapter of another kind, and options with which B x A is not all that it changes."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{name} is an adapter of the kind {shown(str(kind), 30)}, and only LoRA can be used")
    for option, reason in _REFUSED.items():
        if config.get(option):
            raise ModelError(f"the adapter {name} cannot be used: {reason} ({option})", RETRAIN)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGED_BASE):
        hint = "convert it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        message = f"its training began with {shown(start, 30)}, which changes the model's own weights"
        raise ModelError(f"the adapter {name} cannot be used: {message}", hint)


def _number(config: Mapping[str, Any], key: str, name: str) -> float:
    value = config.get(key)
    if not is_number(value) or not abs(value) <= MAX_ALPHA:
        raise ModelError(f"{name}: {key} is {described(value)}, but must be a number", DOWNLOAD)
    return float(value)


class _Scaling:
    """The rank and the scaling of each layer, by the options of the adapter."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._name = name
        values = Values(config, f"{name}: {CONFIG}")
        self._rank = values.integer("r", low=1, high=MAX_RANK)
        self._alpha = _number(config, "lora_alpha", name)
        self._root = bool(config.get("use_rslora"))
        self._ranks = self._patterns(config.get("rank_pattern"), "rank_pattern")
        self._alphas = self._patterns(config.get("alpha_pattern"), "alpha_pattern")

    def rank(self, module: str) -> int:
        return int(_first_match(self._ranks, module, self._rank))

    def scaling(self, module: str) -> float:
        rank = self.rank(module)
        return _first_match(self._alphas, module, self._alpha) / (math.sqrt(rank) if self._root else rank)

    def _patterns(self, value: object, key: str) -> list[tuple[re.Pattern[str], float]]:
        """Return the patterns of layers' names and their numbers. PEFT takes them as regular expressions."""
        if not value:
            return []
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            raise ModelError(f"{self._name}: {key} is not a table of layers", DOWNLOAD)
        patterns = []
        for pattern, number in value.items():
            if not _PATTERN.fullmatch(pattern) or pattern.count("*") > MAX_STARS:
                raise ModelError(f"{self._name}: {key} has {shown(pattern)}, which is no plain name", RETRAIN)
            fits = is_integer(number) and 1 <= number <= MAX_RANK if key == "rank_pattern" else is_number(number)
            if not fits or not abs(number) <= MAX_ALPHA:
                raise ModelError(f"{self._name}: {key} of {shown(pattern)} is {described(number)}", DOWNLOAD)
            patterns.append((re.compile(rf"(?:.*\.)?(?:{pattern})\Z"), float(number)))
        return patterns


def _first_match(patterns: list[tuple[re.Pattern[str], float]], module: str, default: float) -> float:
    return next((number for pattern, number in patterns if pattern.match(module)), default)


# -- tensors -----------------------------------------------------------------------------------------------------------


def _read_names(file: Safetensors, config: Mapping[str, Any]) -> tuple[dict[str, LowRank], dict[str, Whole]]:
    """Return the changes by layer, and the replaced tensors by name."""
    parts: dict[str, dict[str, str]] = {}
    whole: dict[str, Whole] = {}
    for source, tensor in file.tensors.items():
        name = source.removeprefix(_PREFIX)
        if tensor.dtype.name not in _TYPES:
            raise ModelError(f"{file.name}: tensor {shown(source)} is {tensor.dtype.name}, not a type of adapters")
        if match := _PART.fullmatch(name):
            tensors = parts.setdefault(match["module"], {})
            if match["part"] in tensors:
                raise _damaged(file, f"layer {shown(match['module'])} has two of lora_{match['part']}")
            tensors[match["part"]] = source
        elif ".lora_" not in name and (match := _WHOLE.fullmatch(name)):
            target = f"{match['module']}.{match['kind']}"
            if len(tensor.shape) not in (1, 2):
                raise ModelError(f"{file.name}: tensor {shown(source)} has more than two dimensions", RETRAIN)
            if target in whole:
                raise _damaged(file, f"tensor {shown(target)} is there twice")
            whole[target] = Whole(target, source, tensor.shape, trained=".base_layer." not in name)
        else:
            message = f"{file.name}: tensor {shown(source)} is of a kind that edgelm does not know"
            raise ModelError(message, "update edgelm, or merge the adapter with PEFT")
    scaling = _Scaling(config, file.name)
    low_rank = {module: _low_rank(file, module, tensors, scaling) for module, tensors in parts.items()}
    if not low_rank and not whole:
        raise _damaged(file, "it holds no tensors")
    return low_rank, whole


def _low_rank(file: Safetensors, module: str, parts: Mapping[str, str], scaling: _Scaling) -> LowRank:
    """Return the change of one layer, whose tensors must fit each other and the options."""
    layer = f"layer {shown(module)}"
    embedding = "embedding_A" in parts or "embedding_B" in parts
    kinds = ("embedding_A", "embedding_B") if embedding else ("A", "B")
    magnitude = parts.get("magnitude_vector", "")
    if set(parts) - {"magnitude_vector"} != set(kinds):
        raise _damaged(file, f"{layer} has only {' and '.join(f'lora_{part}' for part in sorted(parts))}")
    if embedding and magnitude:
        raise ModelError(f"{file.name}: {layer} is an embedding with DoRA, which cannot be used", RETRAIN)
    a, b = (file.tensors[parts[kind]] for kind in kinds)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ModelError(f"{file.name}: {layer} is a convolution or has more than two dimensions", RETRAIN)
    rank = scaling.rank(module)
    if a.shape[0] != rank or b.shape[1] != rank:
        sizes = " and ".join(" x ".join(map(str, tensor.shape)) for tensor in (a, b))
        raise _damaged(file, f"A and B of {layer} are {sizes}, which is not of rank {rank}")
    shape = (a.shape[1], b.shape[0]) if embedding else (b.shape[0], a.shape[1])
    if magnitude and math.prod(file.tensors[magnitude].shape) != shape[0]:
        raise _damaged(file, f"the magnitude of {layer} has not one number for each of {shape[0]:,} rows")
    return LowRank(module, rank, scaling.scaling(module), shape, a.name, b.name, embedding, magnitude)


def _damaged(file: Safetensors, reason: str) -> ModelError:
    return ModelError(f"{file.name} is damaged: {reason}", DOWNLOAD)
