"""LoRA adapters for llama.cpp: checked against a model, and those of PEFT written as the GGUF that llama.cpp loads.

    adapters = find_adapters(gguf, settings.lora, places.cache)
    facts = with_adapters(facts, adapters)        # for the memory plan
    LlamaModel(path, adapters=adapters)

Owns the names of layers in a GGUF, the rows that its converter permutes, and the folder with the written files, whose
names stand for their content. Loads no native code, so that a plan needs none.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGUFType, GGUFWriter
from numpy.typing import NDArray

from edgelm.checkpoints.adapter import Adapter, LowRank, open_adapter, plain_name
from edgelm.checkpoints.files import file_identity, shown
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.llama_checks import NO_WEIGHTS
from edgelm.checkpoints.shape import gguf_shape
from edgelm.checkpoints.summary import ModelFacts, TensorFacts
from edgelm.disk import require_space
from edgelm.errors import EdgeLMError, ModelError
from edgelm.models.families import FAMILIES, Family, family_of_gguf
from edgelm.places import expand_home
from edgelm.setting_checks import split_scale

FORMAT = 1  # of the written files: a part of their names
KEPT = 16  # written files, the last used ones
OTHER_MODEL = "give an adapter that was trained on this model"
MERGE = "merge it into the model's folder: edgelm convert FOLDER OUT.gguf --lora ADAPTER"
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
_LAYERS = frozenset(
    "embedding output qkv q k v out gate_up gate up down router expert_gate expert_up expert_down".split()
)
_PAIR = re.compile(r"(?P<name>.+)\.(?P<part>lora_[ab])", re.DOTALL)

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LlamaAdapter:
    """An adapter that fits its model, in a file that llama.cpp loads."""

    path: Path
    name: str  # as the user gave it, for messages
    scale: float
    identity: bytes  # of its content
    tensors: tuple[TensorFacts, ...]

    @property
    def state_fact(self) -> tuple[str, float]:
        """What saved states depend on."""
        return self.identity.hex(), self.scale


def find_adapters(model: GGUF, lora: Sequence[str], cache: Path) -> tuple[LlamaAdapter, ...]:
    """Return the adapters of the setting `lora` for a model, in order; those with a scale of 0 change nothing.

    Raises ModelError for an adapter that is damaged, does not fit the model, or that llama.cpp cannot apply;
    EdgeLMError where there is no room to write its file.
    """
    found = []
    for text in lora:
        name, scale = split_scale(text)
        path = Path(expand_home(name))
        adapter = _of_file(model, path, scale) if path.name.endswith(".gguf") else _of_peft(model, path, scale, cache)
        if scale:
            found.append(adapter)
    return tuple(found)


def with_adapters(facts: ModelFacts, adapters: Sequence[LlamaAdapter]) -> ModelFacts:
    """Return the facts of a model whose adapters are loaded beside it. Each tensor lies beside the one it changes."""
    return replace(facts, tensors=(*facts.tensors, *(tensor for adapter in adapters for tensor in adapter.tensors)))


def adapter_bytes(facts: ModelFacts) -> int:
    """Return the bytes of all adapters in the facts of a model."""
    return sum(tensor.nbytes for tensor in facts.tensors if _PAIR.fullmatch(tensor.name))


# -- a GGUF adapter ----------------------------------------------------------------------------------------------------


def _of_file(model: GGUF, path: Path, scale: float, identity: bytes = b"") -> LlamaAdapter:
    """Check a GGUF adapter against a model, since llama.cpp aborts on some that do not fit."""
    with open_gguf(path) as file:
        _check_keys(model, file)
        shapes = _check_tensors(model, file)
        if not identity:
            for name in file.tensors:
                if not np.isfinite(file.dequantized(name)).all():
                    raise ModelError(f"{file.name}: tensor {shown(name)} has numbers that are not finite")
        tensors = tuple(
            TensorFacts(name, tensor.type.name, tensor.shape, tensor.nbytes) for name, tensor in file.tensors.items()
        )
        if not shapes:
            raise ModelError(f"{file.name} holds no tensors of an adapter", OTHER_MODEL)
    return LlamaAdapter(path, shown(path.name), scale, identity or _identity(path), tensors)


def _identity(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    try:
        for part in file_identity([path]):
            digest.update(part)
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read any more: {error.strerror}", "try again") from None
    return digest.digest()


def _check_keys(model: GGUF, file: GGUF) -> None:
    if file.metadata.get("general.type") != "adapter":
        raise ModelError(f"{file.name} is not an adapter", "give a LoRA adapter: a folder of PEFT's, or a GGUF of it")
    kind = file.metadata.get("adapter.type")
    if kind != "lora":
        raise ModelError(f"{file.name} is an adapter of the kind {shown(str(kind), 30)}, and only lora can be used")
    if file.architecture != model.architecture:
        message = f"{file.name} is an adapter for {file.architecture}, and {model.name} is {model.architecture}"
        raise ModelError(message, OTHER_MODEL)
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise ModelError(f"{file.name} acts only after certain tokens (aLoRA), which edgelm does not do")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not np.isfinite(alpha):
        raise file.values.damaged(f"adapter.lora.alpha is {shown(str(alpha), 30)}")


def _check_tensors(model: GGUF, file: GGUF) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of A and B of each tensor that an adapter changes."""
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in file.tensors.items():
        match = _PAIR.fullmatch(name)
        if match is None:
            raise ModelError(f"{file.name}: llama.cpp cannot apply the tensor {shown(name)}", MERGE)
        if tensor.type.name in NO_WEIGHTS:
            raise file.values.damaged(f"tensor {shown(name)} is {tensor.type.name}, which is not a type for weights")
        pairs.setdefault(match["name"], {})[match["part"]] = tensor.shape
    for name, shapes in pairs.items():
        if len(shapes) < 2:
            raise file.values.damaged(f"{shown(name)} has only {next(iter(shapes))}")
        _check_pair(model, file.name, name, shapes["lora_a"], shapes["lora_b"])
    return pairs


def _check_pair(model: GGUF, source: str, name: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Check the shapes of A and B, in ggml's order, against the tensor of the model."""
    tensor = model.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{source} changes {shown(name)}, which {model.name} does not have", OTHER_MODEL)
    if name == EMBEDDING:
        if OUTPUT not in model.tensors:  # llama.cpp would multiply the output by A, and abort
            message = f"{source} changes the embedding, which is the output matrix of {model.name}, too"
            raise ModelError(message, "train the adapter without the embedding")
        expected: tuple[tuple[int, ...], ...] = (a[0], tensor.shape[1]), (a[0], tensor.shape[0])
    else:
        rank = a[1] if len(a) > 1 else 0
        expected = (tensor.shape[0], rank, *tensor.shape[2:]), (rank, *tensor.shape[1:])
    if len(tensor.shape) < 2 or (a, b) != expected:
        sizes = " and ".join(" x ".join(map(str, shape)) for shape in (a, b, tensor.shape))
        raise ModelError(f"{source} does not fit {model.name}: A, B and {shown(name)} are {sizes}", OTHER_MODEL)


# -- an adapter of PEFT ------------------------------------------------------------------------------------------------


def _of_peft(model: GGUF, path: Path, scale: float, cache: Path) -> LlamaAdapter:
    with open_adapter(path) as adapter:
        changes = _changes(model, adapter)
        identity = _content(model, adapter)
        file = cache / "adapters" / f"{identity.hex()}.gguf"
        kept = _kept(model, file, scale, identity)
        if kept is None:
            _write(file, model, adapter, changes)
            kept = _of_file(model, file, scale, identity)
            _remove_oldest(file.parent)
    return replace(kept, name=adapter.name)


def _kept(model: GGUF, file: Path, scale: float, identity: bytes) -> LlamaAdapter | None:
    """Return the file that was written before; None: there is none, or it is damaged."""
    if not file.exists():
        return None
    try:
        adapter = _of_file(model, file, scale, identity)
        os.utime(file)
    except (ModelError, OSError):
        return None
    return adapter


class _Change(NamedTuple):
    """The change of one tensor of a GGUF: of a matrix, or of a part of a tensor with all experts."""

    layer: LowRank
    expert: int | None
    heads: int  # whose rows the GGUF has in another order; 0: the same order


def _changes(model: GGUF, adapter: Adapter) -> dict[str, list[_Change]]:
    """Return the changes by the tensors of the GGUF. Raises ModelError for those that llama.cpp cannot apply."""
    family = family_of_gguf(model.architecture)
    if family is None:
        message = f"edgelm does not know how an adapter's layers are named in a GGUF of {model.architecture}"
        raise ModelError(message, "give a GGUF of the adapter, made by llama.cpp's convert_lora_to_gguf.py")
    for whole in adapter.whole.values():
        if whole.trained:
            message = f"{adapter.name} replaces {shown(whole.name)}, which llama.cpp cannot do beside a model"
            raise ModelError(message, MERGE)
    names = _Names(family)
    shape = gguf_shape(model.values)
    changes: dict[str, list[_Change]] = {}
    for layer in adapter.low_rank.values():
        if layer.magnitude:
            raise ModelError(f"{adapter.name} is DoRA, which llama.cpp cannot apply beside a model", MERGE)
        place = names.find(layer.module)
        if place is None or place.layer >= shape.num_layers:
            message = f"{adapter.name} changes {shown(layer.module)}, which {model.name} does not have"
            raise ModelError(message, OTHER_MODEL)
        heads = {"q": shape.num_heads, "k": shape.num_kv_heads}.get(place.field) if family.gguf_interleaved else None
        change = _Change(layer, place.expert, heads[place.layer] if heads else 0)
        changes.setdefault(place.name, []).append(change)
    for name, parts in changes.items():
        _check_change(model, adapter, name, parts)
    return changes


def _check_change(model: GGUF, adapter: Adapter, name: str, parts: list[_Change]) -> None:
    tensor = model.tensors.get(name)
    if tensor is None and name == OUTPUT:
        message = f"{adapter.name} changes the output matrix, which is the embedding of {model.name}, too"
        raise ModelError(message, "train the adapter without lm_head")
    if tensor is None:
        raise ModelError(f"{adapter.name} changes {shown(name)}, which {model.name} does not have", OTHER_MODEL)
    experts = [part.expert for part in parts]
    num_experts = tensor.shape[2] if len(tensor.shape) == 3 else None
    fits = experts == [None] if num_experts is None else None not in experts and len(set(experts)) == len(experts)
    if not fits or (num_experts is not None and max(expert or 0 for expert in experts) >= num_experts):
        raise ModelError(f"{adapter.name} changes other experts of {shown(name)} than {model.name} has", OTHER_MODEL)
    for part in parts:
        if part.layer.shape != tensor.shape[1::-1]:
            sizes = (" x ".join(map(str, shape)) for shape in (part.layer.shape, tensor.shape[1::-1]))
            message = f"{adapter.name} changes {shown(part.layer.module)} as {next(sizes)}"
            raise ModelError(f"{message}, and that of {model.name} is {next(sizes)}", OTHER_MODEL)


class _Place(NamedTuple):
    name: str  # in the GGUF
    field: str  # of `Names`
    layer: int
    expert: int | None


class _Names:
    """From the layers' names in a folder to those of the tensors in a GGUF."""

    def __init__(self, family: Family) -> None:
        self._gguf = family.gguf_names
        # A GGUF of Llama may be of Mistral and Mixtral, which have no architecture of their own.
        folders = [family, *(other for other in FAMILIES if not other.gguf and family.gguf == "llama")]
        self._patterns = [
            (field.name, re.compile(_pattern(plain_name(getattr(names, field.name)))))
            for names in dict.fromkeys(folder.folder_names for folder in folders)
            for field in fields(names)
            if field.name in _LAYERS and getattr(names, field.name) and getattr(self._gguf, field.name)
        ]

    def find(self, module: str) -> _Place | None:
        """Return the place of a layer; None: there is none with this name."""
        for field, pattern in self._patterns:
            if match := pattern.fullmatch(plain_name(module)):
                layer, expert = (int(number) if (number := match.groupdict().get(key)) else None for key in "ie")
                name = getattr(self._gguf, field).format(i=layer) + ".weight"
                return _Place(name, field, layer or 0, expert)
        return None


def _pattern(name: str) -> str:
    """Return the regular expression of a name with {i} and {e}."""
    pattern = re.escape(name)
    for key in "ie":
        pattern = pattern.replace(rf"\{{{key}\}}", rf"(?P<{key}>\d{{1,4}})")
    return pattern


# -- the written file --------------------------------------------------------------------------------------------------


def _content(model: GGUF, adapter: Adapter) -> bytes:
    """Return 16 bytes that identify the written file: the adapter's files, and what it takes from the model."""
    shape = gguf_shape(model.values)
    facts = FORMAT, model.architecture, shape, adapter.content()
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


def _write(path: Path, model: GGUF, adapter: Adapter, changes: dict[str, list[_Change]]) -> None:
    """Write the GGUF in one step: another process sees the whole file or none."""
    require_space(path.parent, 2 * adapter.num_bytes, "the adapter as a GGUF")  # of 16 bits it becomes float32
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        writer = GGUFWriter(temporary, model.architecture)
        writer.add_type(GGUFType.ADAPTER)
        writer.add_string("adapter.type", "lora")
        alpha = adapter.alpha or 1.0  # llama.cpp divides it by the rank, and takes 0 for none
        writer.add_float32("adapter.lora.alpha", alpha)
        for name, parts in changes.items():
            num_experts = model.tensors[name].shape[2] if parts[0].expert is not None else 0
            for part, array in _matrices(adapter, parts, alpha, num_experts):
                writer.add_tensor(f"{name}.{part}", array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        temporary.replace(path)
    except OSError as error:
        raise EdgeLMError(
            f"the adapter cannot be written to {path.parent}: {error.strerror}", "free some space, or move that folder"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def _matrices(adapter: Adapter, parts: list[_Change], alpha: float, num_experts: int) -> Iterator[tuple[str, Array]]:
    """Yield A and B of one tensor. llama.cpp scales by alpha / rank, so B takes the rest of the scaling.

    Experts are stacked: those without a change, and columns beyond an expert's own rank, are zeros.
    """
    rank = max(part.layer.rank for part in parts)
    loaded = []
    for part in parts:
        a, b = adapter.tensor(part.layer.a), adapter.tensor(part.layer.b)
        factor = part.layer.scaling * rank / alpha
        loaded.append((a, _interleaved(b if factor == 1 else b * np.float32(factor), part.heads)))
    a, b = loaded[0]
    if num_experts:
        all_a = np.zeros((num_experts, rank, a.shape[1]), np.float32)
        all_b = np.zeros((num_experts, len(b), rank), np.float32)
        for part, (a, b) in zip(parts, loaded, strict=True):
            all_a[part.expert, : len(a)] = a
            all_b[part.expert, :, : len(a)] = b
        a, b = all_a, all_b
    yield "lora_a", np.ascontiguousarray(a.T) if parts[0].layer.embedding else a
    yield "lora_b", b


def _interleaved(b: Array, heads: int) -> Array:
    """Return the rows of B of a query or key in the order of the GGUF: the two halves of each head alternate."""
    if not heads:
        return b
    halves = b.reshape(heads, 2, len(b) // heads // 2, b.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(b.shape)


def _remove_oldest(folder: Path) -> None:
    """Remove the files that were not used for the longest time, and unfinished ones of processes that died."""
    with suppress(OSError):
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[KEPT:]:
            file.unlink()
