"""The weights of a GGUF or of a folder of safetensors, as weights of the kernels on any device.

Owns the interface that the decoder loads from: matrices, stacks of experts, vectors, by their names in the files. The
formats are in stored.py and quantized_folder.py. A source is used by one thread.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import DOWNLOAD, shown
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.quantization import OTHER, read_quantization
from edgelm.checkpoints.safetensors import Safetensors
from edgelm.kernels.layout import DenseWeight, PackedWeight, Weight, dequantize
from edgelm.models.loading.packed import (
    Progress,
    StoredMatrix,
    Uploads,
    load_matrices,
    release_pages,
    require_same_kind,
)
from edgelm.models.loading.quantize import QuantizedMatrix
from edgelm.models.loading.quantized_folder import is_packed, matrix_names, packed_matrices, packed_shape
from edgelm.models.loading.stored import BLOCK_TYPES, PLAIN_TYPES, BlockMatrix, PlainMatrix

LLAMA = "choose llama.cpp's engine (--engine llama)"
Quantize = Literal["int4"] | None
RowChoice = slice | Tensor | None
COMPARED_BYTES = 2**22  # of each of two tensors at a time


class WeightSource(ABC):
    """The weights of one model. Every method may raise ModelError.

    On the device "meta" a weight has its shape only: all checks are made, and no numbers are read.
    """

    _alternative: str  # the hint for a tensor that no kernel supports

    def __init__(
        self, model: GGUF | Safetensors, names: Mapping[str, str], quantize: Quantize, progress: Progress | None
    ) -> None:
        """Take for each name of a matrix or vector the name of its main tensor in the files."""
        self._model = model
        self._main = names
        self._quantize = quantize
        self._progress = progress
        self._uploads: dict[torch.device, Uploads] = {}
        self._num_bytes = 0

    @property
    def names(self) -> Collection[str]:
        return self._main.keys()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors. Progress exceeds it if a tensor is loaded twice."""
        return sum(tensor.nbytes for tensor in self._model.tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the sizes of a tensor, the columns last: [rows, columns], [experts, rows, columns] or [n]."""
        if name not in self._main:
            raise ModelError(f"{self._model.name}: tensor {shown(name)} is missing", DOWNLOAD)
        return self._shape(name)

    def matrix(
        self,
        name: str,
        device: torch.device | str = "cpu",
        *,
        rows: RowChoice = None,
        transposed: bool = False,
        exact: bool = False,
    ) -> Weight:
        """Load a matrix, or a stack if the tensor has three dimensions.

        `rows` selects rows of each matrix, in order. `transposed`: the file has it as [columns, rows]. `exact`: it is
        never quantized to 4 bits (routers of experts, positions).
        """
        num_dims = len(self.shape(name))
        return self._load(self._matrices(name, transposed), device, rows, exact=exact, stack=num_dims == 3)

    def stack(self, names: Sequence[str], device: torch.device | str = "cpu") -> Weight:
        """Load separate matrices, such as those of experts, as one stack."""
        matrices = [matrix for name in names for matrix in self._matrices(name, transposed=False)]
        return self._load(matrices, device, None, exact=False, stack=True)

    def vector(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Load any tensor as plain numbers: float32, in its shape."""
        shape = self.shape(name)  # raises if it is missing
        if torch.device(device).type == "meta":
            return torch.empty(shape, device="meta")
        return self._values(name).to(device)

    def equal(self, name: str, other: str) -> bool:
        """Tell whether two tensors have the same shape and bytes."""
        if self.shape(name) != self.shape(other):
            return False
        views = [self._model.tensor_bytes(self._main[tensor]) for tensor in (name, other)]
        slices = (slice(start, start + COMPARED_BYTES) for start in range(0, len(views[0]), COMPARED_BYTES))
        same = len(views[0]) == len(views[1]) and all(
            np.array_equal(np.frombuffer(views[0][part], np.uint8), np.frombuffer(views[1][part], np.uint8))
            for part in slices
        )
        for view in views:
            release_pages(view)
        return same

    @abstractmethod
    def _shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _stored(self, name: str, transposed: bool) -> Sequence[StoredMatrix]:
        """Return the matrices of a tensor with two or three dimensions."""

    @abstractmethod
    def _values(self, name: str) -> Tensor:
        """Return a tensor as float32 on the CPU."""

    def _matrices(self, name: str, transposed: bool) -> Sequence[StoredMatrix]:
        sizes = self.shape(name)
        if len(sizes) not in (2, 3) or not math.prod(sizes):
            raise self._error(name, f"is {' x '.join(map(str, sizes)) or 'one number'}, which is not a matrix")
        return self._stored(name, transposed)

    def _load(
        self, matrices: Sequence[StoredMatrix], device: torch.device | str, rows: RowChoice, *, exact: bool, stack: bool
    ) -> Weight:
        if self._quantize is not None and not exact:
            matrices = [
                QuantizedMatrix(matrix) if isinstance(matrix.kind, torch.dtype) else matrix for matrix in matrices
            ]
        device = torch.device(device)
        if device.type == "meta":
            return _outline(matrices, _row_numbers(rows, matrices[0]), stack=stack)
        if device not in self._uploads:
            self._uploads[device] = Uploads(device, self._advance)
        return load_matrices(matrices, self._uploads[device], _row_numbers(rows, matrices[0]), stack=stack)

    def _advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._num_bytes)

    def _error(self, name: str, reason: str) -> ModelError:
        return ModelError(f"{self._model.name}: tensor {shown(name)} {reason}", self._alternative)


class GGUFSource(WeightSource):
    """The weights of a GGUF. `progress` receives the number of bytes read so far."""

    _alternative = LLAMA

    def __init__(self, gguf: GGUF, quantize: Quantize = None, progress: Progress | None = None) -> None:
        """Raise ModelError where a matrix has a type that no kernel supports."""
        super().__init__(gguf, {name: name for name in gguf.tensors}, quantize, progress)
        self._gguf = gguf
        for tensor in gguf.tensors.values():
            kind = tensor.type.name
            if len(tensor.shape) > 1 and kind not in PLAIN_TYPES and kind not in BLOCK_TYPES:
                raise self._error(tensor.name, f"is {kind}, which the GPU kernels do not support")

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._gguf.tensors[name].shape[::-1]

    def _stored(self, name: str, transposed: bool) -> Sequence[StoredMatrix]:
        tensor = self._gguf.tensors[name]
        *stack, rows, columns = self.shape(name)
        pieces = _pieces(self._gguf.tensor_bytes(name), math.prod(stack))
        kind = tensor.type
        if kind.name in PLAIN_TYPES:
            shape = (columns, rows) if transposed else (rows, columns)
            dtype = PLAIN_TYPES[kind.name]
            return [PlainMatrix(name, piece, shape, dtype, transposed=transposed) for piece in pieces]
        if transposed:
            raise self._error(name, f"is {kind.name}, and cannot be transposed")
        blocks = BLOCK_TYPES[kind.name]
        return [BlockMatrix(name, piece, (rows, columns), blocks, kind.block_bytes) for piece in pieces]

    def _values(self, name: str) -> Tensor:
        values = np.array(self._gguf.dequantized(name), np.float32)
        self._advance(self._gguf.tensors[name].nbytes)
        return torch.from_numpy(values)


class FolderSource(WeightSource):
    """The weights of a folder of safetensors. A quantized matrix has the name of the plain one.

    An MXFP4 tensor has the shape of the plain one: [experts, columns, rows], to be loaded `transposed`.
    """

    _alternative = OTHER

    def __init__(
        self, model: Safetensors, config: Mapping[str, Any], quantize: Quantize = None, progress: Progress | None = None
    ) -> None:
        """Raise ModelError where the config.json names a quantization that is not supported."""
        self._quantization = read_quantization(config)
        super().__init__(model, matrix_names(model, self._quantization), quantize, progress)
        self._folder = model
        if self._quantization.method == "none" and any(is_packed(model, name) for name in model.tensors):
            raise ModelError(f"{model.name}: its config.json does not say how its weights are quantized", DOWNLOAD)

    def _shape(self, name: str) -> tuple[int, ...]:
        main = self._main[name]
        if is_packed(self._folder, main):
            return packed_shape(self._folder, main, self._quantization)
        return self._folder.tensors[main].shape

    def _stored(self, name: str, transposed: bool) -> Sequence[StoredMatrix]:
        sizes = self.shape(name)
        main = self._main[name]
        if is_packed(self._folder, main):
            if len(sizes) == 3 and not transposed:
                raise self._error(name, "has the quantized experts of a layer in one; one by one they can be loaded")
            if transposed != (len(sizes) == 3):
                raise self._error(name, "is quantized along its other dimension")
            return packed_matrices(self._folder, name, main, self._quantization)
        kind = self._folder.tensors[main].dtype.name
        dtype = PLAIN_TYPES.get(kind)
        if dtype is None:
            raise self._error(name, f"is {kind}, which cannot be multiplied")
        rows, columns = sizes[-1:-3:-1] if transposed else sizes[-2:]
        pieces = _pieces(self._folder.tensor_bytes(main), math.prod(sizes[:-2]))
        return [PlainMatrix(name, piece, (rows, columns), dtype, transposed=transposed) for piece in pieces]

    def _values(self, name: str) -> Tensor:
        main = self._main[name]
        if is_packed(self._folder, main):
            values = dequantize_in_order(self.matrix(name, transposed=len(self.shape(name)) == 3))
            return values.mT if values.dim() == 3 else values
        tensor = self._folder.tensors[main]
        array = np.array(self._folder.array(main))  # a copy: torch needs it writable and aligned
        self._advance(tensor.nbytes)
        if tensor.dtype.name == "BF16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
        return torch.from_numpy(array).float()


def dequantize_in_order(weight: Weight) -> Tensor:
    """Return the values of a weight, with the columns in the model's order."""
    values = dequantize(weight)
    if not isinstance(weight, PackedWeight) or weight.order is None:
        return values
    order = weight.order.unsqueeze(-2).expand_as(values)  # in a stack, each matrix has its own
    return torch.empty_like(values).scatter_(-1, order, values)


def _pieces(view: memoryview, count: int) -> list[memoryview]:
    """Divide the bytes of a stack into those of its matrices."""
    nbytes = len(view) // count
    return [view[start : start + nbytes] for start in range(0, len(view), nbytes)]


def _outline(matrices: Sequence[StoredMatrix], rows: NDArray[np.int64] | None, *, stack: bool) -> Weight:
    """Return a weight with the shape of these matrices and no numbers, once they are known to fit together."""
    require_same_kind(matrices)
    num_rows, columns = matrices[0].shape
    num_rows = num_rows if rows is None else len(rows)
    return DenseWeight(torch.empty(((len(matrices),) if stack else ()) + (num_rows, columns), device="meta"))


def _row_numbers(rows: RowChoice, matrix: StoredMatrix) -> NDArray[np.int64] | None:
    """Return the numbers of the selected rows, None for all."""
    num_rows = matrix.shape[0]
    if rows is None:
        return None
    if isinstance(rows, slice):
        return np.arange(num_rows)[rows]
    numbers: NDArray[np.int64] = rows.cpu().numpy().astype(np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < num_rows:
        message = f"tensor {shown(matrix.name)} has {num_rows:,} rows, so it has no row {numbers.max():,}"
        raise ModelError(message, DOWNLOAD)
    return numbers
