"""The tensors in a folder that make up one quantized matrix, checked before use.

Owns their names, the checks of types and shapes, and the errors. Knows no format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import DOWNLOAD, shown
from edgelm.checkpoints.quantization import OTHER
from edgelm.checkpoints.safetensors import Safetensors
from edgelm.kernels.layout import ScaleKind
from edgelm.models.loading.packed import Uploads, release_pages

INTEGERS = {"I64": "<i8", "I32": "<i4"}
WORDS = ("I32", "U32")
SCALE_KINDS: dict[str, ScaleKind] = {"F16": "f16", "BF16": "bf16", "F32": "f32"}
SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
MAIN_SUFFIXES = {".qweight": ".weight", ".weight_packed": ".weight", "_blocks": ""}  # of the codes: of the matrix


class TensorParts:
    """The tensors of one matrix: `main`, which holds the codes, and those that share its stem."""

    def __init__(self, model: Safetensors, main: str) -> None:
        self.model = model
        self.main = main
        self.source = model.name
        self.stem = main
        for suffix in (*MAIN_SUFFIXES, ".weight"):
            self.stem = self.stem.removesuffix(suffix)
        self.opened: set[str] = set()

    def name(self, part: str) -> str:
        return self.stem + ("" if part.startswith("_") else ".") + part

    def has(self, part: str) -> bool:
        return self.name(part) in self.model.tensors

    def dtype(self, part: str, supported: Sequence[str]) -> str:
        """Return the type of a tensor, which must be one of a few."""
        name = self.name(part)
        if name not in self.model.tensors:
            raise ModelError(f"{self.source}: tensor {shown(name)} is missing", DOWNLOAD)
        kind = self.model.tensors[name].dtype.name
        if kind not in supported:
            raise ModelError(f"{self.source}: tensor {shown(name)} is {kind}, but must be {supported[0]}", OTHER)
        return kind

    def shape(self, part: str) -> tuple[int, ...]:
        return self.model.tensors[self.name(part)].shape

    def require_dims(self, part: str, num_dims: int) -> None:
        if len(self.shape(part)) != num_dims or not math.prod(self.shape(part)):
            raise self.wrong_shape(part)

    def require(self, part: str, supported: Sequence[str], *shape: int) -> None:
        """Check the type and the shape of a tensor."""
        self.dtype(part, supported)
        if self.shape(part) != shape:
            raise self.wrong_shape(part, shape)

    def wrong_shape(self, part: str, expected: tuple[int, ...] = ()) -> ModelError:
        sizes = " x ".join(map(str, self.shape(part))) or "one number"
        rule = f", but {shown(self.main)} needs {' x '.join(map(str, expected))}" if expected else ""
        return ModelError(f"{self.source} is damaged: tensor {shown(self.name(part))} is {sizes}{rule}", DOWNLOAD)

    def bytes_of(self, part: str) -> NDArray[np.uint8]:
        """Return a tensor as bytes in its shape, with the bytes of a number last. A scalar becomes one row."""
        name = self.name(part)
        self.opened.add(name)
        raw = np.frombuffer(self.model.tensor_bytes(name), np.uint8)
        return raw.reshape(*(self.shape(part) or (1,)), -1)

    def integers(self, part: str) -> NDArray[np.int64]:
        """Return a vector of integers."""
        kind = INTEGERS[self.dtype(part, tuple(INTEGERS))]
        return self.bytes_of(part).view(kind).reshape(-1).astype(np.int64)

    def scale_kind(self, part: str) -> ScaleKind:
        return SCALE_KINDS[self.dtype(part, tuple(SCALE_KINDS))]

    def scales(self, part: str, uploads: Uploads) -> Tensor:
        """Return a tensor of scales on the device, in its shape."""
        dtype = SCALE_DTYPES[self.dtype(part, tuple(SCALE_DTYPES))]
        return uploads.send(self.bytes_of(part)).view(dtype).squeeze(-1).clone()

    def close(self) -> None:
        for name in self.opened:
            release_pages(self.model.tensor_bytes(name))
        self.opened.clear()
