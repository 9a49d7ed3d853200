"""Where a model's weights come from: a GGUF or a folder of safetensors, as weights of the kernels on any device.

Owns what the architectures ask for: matrices, stacks of experts, vectors. What their names are is the architectures'
matter, how a format keeps them that of ggml_blocks.py and quantized_folder.py. A source is used by one thread.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.errors import ModelError
from edgelm.kernels.layout import PackedWeight, Weight, dequantize
from edgelm.weights.folder_quantization import OTHER, read_quantization
from edgelm.weights.ggml_blocks import BLOCK_TYPES
from edgelm.weights.gguf import GGUF
from edgelm.weights.gguf_parse import Tensor as GGUFTensor
from edgelm.weights.mapped import DOWNLOAD, shown
from edgelm.weights.packed import StoredMatrix, load
from edgelm.weights.quantize import QuantizedMatrix
from edgelm.weights.quantized_folder import is_packed, matrix_names, packed_matrices, packed_shape
from edgelm.weights.safetensors import Safetensors
from edgelm.weights.stored import PLAIN_TYPES, BlockMatrix, PlainMatrix
from edgelm.weights.streaming import Progress, Uploads

LLAMA = "choose llama.cpp's engine (--engine llama)"
Quantize = Literal["int4"] | None
RowChoice = slice | Tensor | None


class WeightSource(Protocol):
    """The weights of one model, by their names in its files. All raise ModelError for what cannot be packed."""

    @property
    def names(self) -> Collection[str]: ...

    @property
    def total_bytes(self) -> int: ...  # of all tensors; progress passes it where one is loaded twice

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the sizes of a tensor, the columns last: [rows, columns], [experts, rows, columns] or [n]."""
        ...

    def matrix(
        self,
        name: str,
        device: torch.device | str = "cpu",
        *,
        rows: RowChoice = None,
        transposed: bool = False,
        exact: bool = False,
    ) -> Weight:
        """Load a matrix, or the stack that a tensor of three dimensions is.

        `rows` chooses rows (of each matrix) and their order. `transposed`: the file has it as [columns, rows].
        `exact`: it is never made 4-bit (routers of experts, positions).
        """
        ...

    def stack(
        self,
        names: Sequence[str],
        device: torch.device | str = "cpu",
        *,
        rows: RowChoice = None,
        transposed: bool = False,
        exact: bool = False,
    ) -> Weight:
        """Load separate matrices, such as those of experts, as one stack."""
        ...

    def vector(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Load any tensor as plain numbers: float32, in its shape."""
        ...


def unreadable_reason(model: GGUF | Safetensors, config: Mapping[str, Any]) -> str | None:
    """Return in one line why no source can be made of a model, None where it can; `config` is that of a folder."""
    try:
        GGUFSource(model) if isinstance(model, GGUF) else FolderSource(model, config)
    except ModelError as error:
        return error.message
    return None


class _Source(ABC):
    """What the sources share: weights from matrices that a format offers."""

    _instead: str  # what to do where this format has what no kernel reads

    def __init__(self, name: str, quantize: Quantize, progress: Progress | None) -> None:
        self._name = name
        self._quantize = quantize
        self._progress = progress
        self._uploads: dict[torch.device, Uploads] = {}
        self._num_bytes = 0

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    def matrix(
        self,
        name: str,
        device: torch.device | str = "cpu",
        *,
        rows: RowChoice = None,
        transposed: bool = False,
        exact: bool = False,
    ) -> Weight:
        matrices = self._stored(name, transposed=transposed)
        return self._load(matrices, device, rows, exact=exact, stack=len(self.shape(name)) == 3)

    def stack(
        self,
        names: Sequence[str],
        device: torch.device | str = "cpu",
        *,
        rows: RowChoice = None,
        transposed: bool = False,
        exact: bool = False,
    ) -> Weight:
        matrices = [matrix for name in names for matrix in self._stored(name, transposed=transposed)]
        return self._load(matrices, device, rows, exact=exact, stack=True)

    def vector(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        return self._values(name).to(device)

    @abstractmethod
    def _stored(self, name: str, *, transposed: bool) -> Sequence[StoredMatrix]:
        """Return the matrices that a tensor is."""

    @abstractmethod
    def _values(self, name: str) -> Tensor:
        """Return the numbers of a tensor, float32, on the CPU."""

    def _load(
        self, matrices: Sequence[StoredMatrix], device: torch.device | str, rows: RowChoice, *, exact: bool, stack: bool
    ) -> Weight:
        if self._quantize is not None and not exact:
            matrices = [QuantizedMatrix(each) if isinstance(each.kind, torch.dtype) else each for each in matrices]
        uploads = self._uploads_to(torch.device(device))
        return load(matrices, uploads, _row_numbers(rows, matrices[0]), stack=stack)

    def _uploads_to(self, device: torch.device) -> Uploads:
        if device not in self._uploads:
            self._uploads[device] = Uploads(device, self._advance)
        return self._uploads[device]

    def _advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._num_bytes)

    def _missing(self, name: str) -> ModelError:
        return ModelError(f"{self._name}: tensor {shown(name)} is missing", DOWNLOAD)

    def _no_matrix(self, name: str) -> ModelError:
        sizes = " x ".join(map(str, self.shape(name))) or "one number"
        return ModelError(f"{self._name}: tensor {shown(name)} is {sizes}, and no matrix", self._instead)


class GGUFSource(_Source):
    """The weights of a GGUF. `progress` is told how many bytes have been read so far."""

    _instead = LLAMA

    def __init__(self, gguf: GGUF, quantize: Quantize = None, progress: Progress | None = None) -> None:
        """Raise ModelError where a matrix has a type that cannot be packed."""
        super().__init__(gguf.name, quantize, progress)
        self._gguf = gguf
        for tensor in gguf.tensors.values():
            if len(tensor.shape) > 1:
                self._require_packable(tensor)

    @property
    def names(self) -> Collection[str]:
        return self._gguf.tensors.keys()

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._gguf.tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._gguf.tensors:
            raise self._missing(name)
        return self._gguf.tensors[name].shape[::-1]

    def _stored(self, name: str, *, transposed: bool) -> Sequence[StoredMatrix]:
        sizes = self.shape(name)
        tensor = self._gguf.tensors[name]
        if len(sizes) not in (2, 3):
            raise self._no_matrix(name)
        *stack, rows, columns = sizes
        self._require_packable(tensor)
        pieces = _pieces(self._gguf.tensor_bytes(name), math.prod(stack))
        kind = tensor.type
        if kind.name in PLAIN_TYPES:
            shape = (columns, rows) if transposed else (rows, columns)
            dtype = PLAIN_TYPES[kind.name]
            return [PlainMatrix(name, piece, shape, dtype, transposed=transposed) for piece in pieces]
        if transposed:
            raise ModelError(f"{self._name}: tensor {shown(name)} is {kind.name}, and cannot be transposed", LLAMA)
        blocks = BLOCK_TYPES[kind.name]
        return [BlockMatrix(name, piece, (rows, columns), blocks, kind.block_bytes) for piece in pieces]

    def _values(self, name: str) -> Tensor:
        if name not in self._gguf.tensors:
            raise self._missing(name)
        values = np.array(self._gguf.dequantized(name), np.float32)
        self._advance(self._gguf.tensors[name].nbytes)
        return torch.from_numpy(values)

    def _require_packable(self, tensor: GGUFTensor) -> None:
        kind = tensor.type.name
        if kind not in PLAIN_TYPES and kind not in BLOCK_TYPES:
            raise ModelError(
                f"{self._name}: tensor {shown(tensor.name)} is {kind}, which the GPU kernels do not read", LLAMA
            )


class FolderSource(_Source):
    """The weights of a folder of safetensors, quantized ones by the names of the matrices that they stand for.

    Of MXFP4, a tensor has the shape of the plain one: [experts, columns, rows], to be loaded `transposed`.
    """

    _instead = OTHER

    def __init__(
        self,
        model: Safetensors,
        config: Mapping[str, Any],
        quantize: Quantize = None,
        progress: Progress | None = None,
    ) -> None:
        """Raise ModelError where the config.json names a quantization that is not read."""
        super().__init__(model.name, quantize, progress)
        self._model = model
        self._quantization = read_quantization(config)
        self._main = matrix_names(model, self._quantization)
        if self._quantization.method == "none" and any(is_packed(model, name) for name in model.tensors):
            raise ModelError(f"{self._name}: its config.json does not say how its weights are quantized", DOWNLOAD)

    @property
    def names(self) -> Collection[str]:
        return self._main.keys()

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._model.tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._main:
            raise self._missing(name)
        main = self._main[name]
        if is_packed(self._model, main):
            return packed_shape(self._model, main, self._quantization)
        return self._model.tensors[main].shape

    def _stored(self, name: str, *, transposed: bool) -> Sequence[StoredMatrix]:
        sizes = self.shape(name)
        main = self._main[name]
        if len(sizes) not in (2, 3) or not math.prod(sizes):
            raise self._no_matrix(name)
        if is_packed(self._model, main):
            if transposed != (len(sizes) == 3):
                raise ModelError(f"{self._name}: tensor {shown(name)} is quantized along its other dimension", OTHER)
            return packed_matrices(self._model, name, main, self._quantization)
        dtype = PLAIN_TYPES.get(self._model.tensors[main].dtype.name)
        if dtype is None:
            kind = self._model.tensors[main].dtype.name
            raise ModelError(f"{self._name}: tensor {shown(name)} is {kind}, which cannot be multiplied", OTHER)
        rows, columns = sizes[-1:-3:-1] if transposed else sizes[-2:]
        pieces = _pieces(self._model.tensor_bytes(main), math.prod(sizes[:-2]))
        return [PlainMatrix(name, piece, (rows, columns), dtype, transposed=transposed) for piece in pieces]

    def _values(self, name: str) -> Tensor:
        if name not in self._main:
            raise self._missing(name)
        main = self._main[name]
        if is_packed(self._model, main):
            numbers = dequantize_in_order(self.matrix(name, transposed=len(self.shape(name)) == 3))
            return numbers.mT if numbers.dim() == 3 else numbers
        dtype = self._model.tensors[main].dtype
        array = np.array(self._model.array(main))  # a copy: torch wants it writable and aligned
        self._advance(self._model.tensors[main].nbytes)
        if dtype.name == "BF16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
        return torch.from_numpy(array).float()


def dequantize_in_order(weight: Weight) -> Tensor:
    """Return what a weight stands for, its columns in the order of the model's."""
    values = dequantize(weight)
    if not isinstance(weight, PackedWeight) or weight.order is None:
        return values
    order = weight.order.unsqueeze(-2).expand_as(values)  # of a stack, each matrix has its own
    return torch.empty_like(values).scatter_(-1, order, values)


def _pieces(view: memoryview, count: int) -> list[memoryview]:
    """Cut the bytes of a stack into those of its matrices."""
    nbytes = len(view) // count
    return [view[start : start + nbytes] for start in range(0, len(view), nbytes)]


def _row_numbers(rows: RowChoice, matrix: StoredMatrix) -> NDArray[np.int64] | None:
    """Return which rows are meant, None for all."""
    num_rows = matrix.shape[0]
    if rows is None:
        return None
    if isinstance(rows, slice):
        return np.arange(num_rows)[rows]
    numbers: NDArray[np.int64] = rows.cpu().numpy().astype(np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < num_rows:
        message = f"tensor {shown(matrix.name)} has {num_rows:,} rows, and row {numbers.max():,} is wanted"
        raise ModelError(message, DOWNLOAD)
    return numbers
