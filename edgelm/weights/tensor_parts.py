"""The tensors of a folder that are one matrix, each checked before it is used.

Owns their names, the check of types and shapes, and the errors that say what is wrong. Knows no format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.errors import ModelError
from edgelm.kernels.layout import ScaleKind
from edgelm.weights.folder_quantization import OTHER
from edgelm.weights.mapped import DOWNLOAD, shown
from edgelm.weights.safetensors import Safetensors
from edgelm.weights.streaming import Uploads, give_back

INTEGERS = {"I64": "<i8", "I32": "<i4"}
WORDS = ("I32", "U32")
SCALE_KINDS: dict[str, ScaleKind] = {"F16": "f16", "BF16": "bf16", "F32": "f32"}
SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
MAIN = {".qweight": ".weight", ".weight_packed": ".weight", "_blocks": ""}  # the end of a name: that of the matrix's


class TensorParts:
    """The tensors of one matrix: `main`, and those whose names begin as its does."""

    def __init__(self, model: Safetensors, main: str) -> None:
        self.model = model
        self.main = main
        self.where = model.name
        self.stem = main
        for end in (*MAIN, ".weight"):
            self.stem = self.stem.removesuffix(end)
        self.opened: set[str] = set()

    def name(self, part: str) -> str:
        return self.stem + ("" if part.startswith("_") else ".") + part

    def has(self, part: str) -> bool:
        return self.name(part) in self.model.tensors

    def dtype(self, part: str, possible: Sequence[str]) -> str:
        """Return the type of a tensor's numbers, which must be one of a few."""
        name = self.name(part)
        if name not in self.model.tensors:
            raise ModelError(f"{self.where}: tensor {shown(name)} is missing", DOWNLOAD)
        kind = self.model.tensors[name].dtype.name
        if kind not in possible:
            raise ModelError(f"{self.where}: tensor {shown(name)} is {kind}, where {possible[0]} is expected", OTHER)
        return kind

    def shape(self, part: str) -> tuple[int, ...]:
        return self.model.tensors[self.name(part)].shape

    def require_sizes(self, part: str, count: int) -> None:
        if len(self.shape(part)) != count or not math.prod(self.shape(part)):
            raise self.odd(part)

    def require(self, part: str, possible: Sequence[str], *shape: int) -> None:
        """Check the type and the shape of a tensor."""
        self.dtype(part, possible)
        if self.shape(part) != shape:
            raise self.odd(part, shape)

    def odd(self, part: str, wanted: tuple[int, ...] = ()) -> ModelError:
        sizes = " x ".join(map(str, self.shape(part))) or "one number"
        where = f", where {' x '.join(map(str, wanted))} belongs to {shown(self.main)}" if wanted else ""
        return ModelError(f"{self.where} is damaged: tensor {shown(self.name(part))} is {sizes}{where}", DOWNLOAD)

    def bytes_of(self, part: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor in its shape, those of a number last; of one number a row."""
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
            give_back(self.model.tensor_bytes(name))
        self.opened.clear()
