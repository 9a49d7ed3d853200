"""LoRA adapters for llama.cpp: checked against a model, and those of PEFT written as the GGUF that llama.cpp loads.

    adapters = find_adapters(gguf, settings.lora, places.cache)
    facts = with_adapters(facts, adapters)        # for the memory plan
    LlamaModel(path, adapters=adapters)

Owns the checks of a GGUF adapter, and the folder with the GGUFs of PEFT's, whose names stand for their content;
adapter_gguf.py writes them. Loads no native code, so that a plan needs none.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgelm.backends.llama.adapter_gguf import (
    EMBEDDING,
    MERGE,
    OTHER_MODEL,
    OUTPUT,
    changes_of,
    identity_of,
    write_adapter_gguf,
)
from edgelm.base.errors import ModelError
from edgelm.base.kept_files import keep_newest
from edgelm.base.places import expand_home
from edgelm.base.setting_checks import split_scale
from edgelm.checkpoints.adapter import open_adapter
from edgelm.checkpoints.files import file_identity, shown
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.llama_checks import NO_WEIGHTS
from edgelm.checkpoints.summary import ModelFacts, TensorFacts

KEPT = 16  # written files, the last used ones
_PAIR = re.compile(r"(?P<name>.+)\.(?P<part>lora_[ab])", re.DOTALL)


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
        """The fact that the identity of saved states includes."""
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
    if len(file.paths) > 1:
        raise ModelError(f"{file.name} is split, and llama.cpp reads an adapter from one file", "merge its parts")
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
        changes = changes_of(model, adapter)
        identity = identity_of(model, adapter)
        file = cache / "adapters" / f"{identity.hex()}.gguf"
        kept = _kept(model, file, scale, identity)
        if kept is None:
            write_adapter_gguf(file, model, adapter, changes)
            kept = _of_file(model, file, scale, identity)
            keep_newest(file.parent, KEPT)  # the unfinished ones of processes that died go, too
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
