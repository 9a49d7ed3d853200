"""Quantized matrices of a folder of safetensors: codes in one tensor, scales and zero points in others.

Owns the bit layouts of AWQ, GPTQ, compressed-tensors, FP8 and MXFP4, and the names of their tensors. The checks of the
config.json are in checkpoints/quantization.py. Knows nothing of the kernels' layouts of bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import DOWNLOAD, shown
from edgelm.checkpoints.folder import BESIDE_WEIGHTS
from edgelm.checkpoints.quantization import OTHER, Quantization
from edgelm.checkpoints.safetensors import Safetensors
from edgelm.kernels.layout import CHUNK, CodeKind, Layout, OffsetKind, ScaleKind
from edgelm.models.loading.packed import Parts, Rows, StoredMatrix, Uploads
from edgelm.models.loading.stored import MXFP4
from edgelm.models.loading.tensor_parts import INTEGERS, MAIN_SUFFIXES, SCALE_KINDS, WORDS, TensorParts

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of 8 neighbouring rows


def matrix_names(model: Safetensors, quantization: Quantization) -> dict[str, str]:
    """Return the tensor in the files that holds the codes or numbers, for each name of a tensor of the plain model."""
    if quantization.method == "none":
        return {name: name for name in model.tensors}
    names: dict[str, str] = {}
    for name in model.tensors:
        if BESIDE_WEIGHTS.fullmatch(name):
            continue
        suffix = next((suffix for suffix in MAIN_SUFFIXES if name.endswith(suffix)), "")
        names[name.removesuffix(suffix) + MAIN_SUFFIXES[suffix] if suffix else name] = name
    return names


def is_packed(model: Safetensors, main: str) -> bool:
    """Tell whether a tensor is part of a quantized matrix."""
    return main.endswith(tuple(MAIN_SUFFIXES)) or model.tensors[main].dtype.name in ("F8_E4M3", "F8_E5M2", "I8")


def packed_shape(model: Safetensors, main: str, quantization: Quantization) -> tuple[int, ...]:
    """Return the shape of the plain matrix."""
    stored = model.tensors[main].shape
    files = TensorParts(model, main)
    quantization = quantization.of(files.stem)
    if main.endswith(".qweight"):
        files.require_dims("qweight", 2)
        per_word = 32 // (quantization.bits or 4)
        return (stored[1] * per_word, stored[0]) if quantization.method == "awq" else (stored[1], stored[0] * per_word)
    if main.endswith(".weight_packed"):
        files.require("weight_shape", tuple(INTEGERS), 2)
        rows, columns = files.integers("weight_shape")
        if not (0 < rows < 2**31 and 0 < columns < 2**31):
            raise files.wrong_shape("weight_shape")
        return int(rows), int(columns)
    if main.endswith("_blocks"):
        files.require_dims("_blocks", 4)
        experts, rows, groups, _ = stored
        return experts, groups * MXFP4.group, rows  # as in the plain tensor: the rows last
    return stored


def packed_matrices(model: Safetensors, name: str, main: str, quantization: Quantization) -> Sequence[StoredMatrix]:
    """Return the matrices of a packed tensor. Raises ModelError where a part is missing or does not fit."""
    files = TensorParts(model, main)
    shape = packed_shape(model, main, quantization)
    quantization = quantization.of(files.stem)
    if main.endswith("_blocks"):
        return [_MXFP4Matrix(files, name, expert) for expert in range(shape[0])]
    if len(shape) != 2:
        raise ModelError(f"{files.source}: tensor {shown(name)} is quantized, but not a matrix", OTHER)
    two = (shape[0], shape[1])
    if main.endswith(".qweight"):
        if quantization.method == "awq":
            return [_AWQMatrix(files, name, two, quantization)]
        return [_GPTQMatrix(files, name, two, quantization)]
    if main.endswith(".weight_packed"):
        return [_PackedMatrix(files, name, two, quantization)]
    return [_ByteMatrix(files, name, two, quantization)]


class _Matrix(ABC):
    """Base of all formats: scales [rows, groups] and zero points are read once, codes by rows."""

    def __init__(self, files: TensorParts, name: str, shape: tuple[int, int], layout: Layout) -> None:
        self.name = name
        self.shape = shape
        self.kind: Layout | torch.dtype = layout
        self._files = files
        self._scales: Tensor | None = None
        self._zeros: Tensor | None = None

    def read(self, rows: Rows, uploads: Uploads) -> Parts:
        if self._scales is None:
            self._scales, self._zeros = self._open(uploads)
        selected = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(uploads.device)
        codes = self._codes(rows, selected, uploads)
        return Parts(codes, self._scales[selected], None if self._zeros is None else self._zeros[selected])

    def order(self) -> Tensor | None:
        return None

    def close(self) -> None:
        self._scales = self._zeros = None
        self._files.close()

    @abstractmethod
    def _open(self, uploads: Uploads) -> tuple[Tensor, Tensor | None]:
        """Return scales and zero points, and upload what cannot be read by rows."""

    @abstractmethod
    def _codes(self, rows: Rows, selected: slice | Tensor, uploads: Uploads) -> Tensor:
        """Return the codes of some rows; `selected` is `rows` as an index for tensors on the device."""


def _pairs(packed: Tensor) -> Tensor:
    """Split each byte into two nibbles, the low one first, along the last dimension."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _layout(
    files: TensorParts, bits: int, group: int, columns: int, scale: ScaleKind, offset: OffsetKind, code: CodeKind
) -> Layout:
    """Return a layout; a `group` of -1 is a whole row."""
    if group == -1 or group >= columns:
        group = -(-columns // CHUNK) * CHUNK
    if group not in (16, 32) and group % CHUNK:
        message = f"{files.source}: {shown(files.main)} has a scale for each {group} columns"
        raise ModelError(message, f"only groups of 16, 32 and multiples of {CHUNK} can be multiplied; {OTHER}")
    zero = 8 if bits == 4 and offset == "none" else 0
    name = ("fp8" if code == "fp8" else f"int{bits}") + f"_g{group}"
    name += ("" if scale == "f16" else f"_{scale}") + ("_zero" if offset == "zero" else "")
    return Layout(name, bits, group, scale, code, zero=zero, offset=offset)


class _AWQMatrix(_Matrix):
    """AWQ's gemm order: [columns, rows / 8] words, with shuffled nibbles."""

    def __init__(self, files: TensorParts, name: str, shape: tuple[int, int], quantization: Quantization) -> None:
        rows, columns = shape
        group = columns if quantization.group == -1 else quantization.group
        groups = -(-columns // group)
        kind = files.scale_kind("scales")
        files.require("qweight", WORDS, columns, rows // 8)
        files.require("scales", tuple(SCALE_KINDS), groups, rows)
        files.require("qzeros", WORDS, groups, rows // 8)
        super().__init__(files, name, shape, _layout(files, 4, group, columns, kind, "zero", "unsigned"))
        self._words: Tensor | None = None

    def _open(self, uploads: Uploads) -> tuple[Tensor, Tensor | None]:
        self._words = uploads.send_whole(self._files.bytes_of("qweight"))  # [columns, rows / 8, 4]
        zeros = self._unshuffled(uploads.send(self._files.bytes_of("qzeros")))
        return self._files.scales("scales", uploads).T, zeros.flatten(-2).T

    def _codes(self, rows: Rows, selected: slice | Tensor, uploads: Uploads) -> Tensor:
        assert self._words is not None
        if isinstance(selected, slice):  # of whole tiles, so of whole words
            return self._unshuffled(self._words[:, selected.start // 8 : selected.stop // 8]).flatten(-2).T
        numbers = torch.arange(self.shape[0], device=uploads.device)[selected]
        nibbles = self._unshuffled(self._words[:, numbers // 8])  # [columns, rows, 8]
        place = (numbers % 8).view(1, -1, 1).expand(len(nibbles), -1, 1)
        return nibbles.gather(-1, place).squeeze(-1).T

    def close(self) -> None:
        self._words = None
        super().close()

    @staticmethod
    def _unshuffled(words: Tensor) -> Tensor:
        """Return the nibbles of words [.., 4 bytes] in the order of the rows: [.., 8]."""
        return _pairs(words)[..., list(AWQ_PLACES)]


class _GPTQMatrix(_Matrix):
    """GPTQ: [columns / 8, rows] words of neighbouring columns. With act-order, a group's columns are far apart."""

    def __init__(self, files: TensorParts, name: str, shape: tuple[int, int], quantization: Quantization) -> None:
        rows, columns = shape
        self._bits = bits = quantization.bits
        per_word = 32 // bits
        group = columns if quantization.group == -1 else quantization.group
        groups = -(-columns // group)
        kind = files.scale_kind("scales")
        files.require("qweight", WORDS, columns // per_word, rows)
        files.require("scales", tuple(SCALE_KINDS), groups, rows)
        files.require("qzeros", WORDS, groups, -(-rows // per_word))
        self._groups = _column_groups(files, "g_idx", columns, group)
        self._zero_less_one = quantization.zero_less_one
        neutral = quantization.symmetric and bool((self._zero_points(files, rows) == 1 << (bits - 1)).all())
        offset: OffsetKind = "none" if neutral else "zero"
        code: CodeKind = "signed" if neutral and bits == 8 else "unsigned"
        super().__init__(files, name, shape, _layout(files, bits, group, columns, kind, offset, code))
        self._words: Tensor | None = None
        self._order: Tensor | None = None

    def _zero_points(self, files: TensorParts, rows: int) -> NDArray[np.uint8]:
        """Return the zero points [groups, rows]. They are few, so the host unpacks them."""
        words = files.bytes_of("qzeros").view("<u4").squeeze(-1)
        if self._zero_less_one:  # on whole words: this exactly undoes GPTQModel's subtraction
            words = words + np.uint32(0x11111111 if self._bits == 4 else 0x01010101)
        shifts = np.arange(0, 32, self._bits, dtype=np.uint32)
        zeros = (words[..., None] >> shifts) & np.uint32(2**self._bits - 1)
        return zeros.astype(np.uint8).reshape(len(words), -1)[:, :rows]

    def order(self) -> Tensor | None:
        return None if self._groups is None else torch.from_numpy(np.argsort(self._groups, kind="stable"))

    def _open(self, uploads: Uploads) -> tuple[Tensor, Tensor | None]:
        self._words = uploads.send_whole(self._files.bytes_of("qweight"))  # [columns / per word, rows, 4]
        order = self.order()
        self._order = None if order is None else order.to(uploads.device)
        scales = self._files.scales("scales", uploads).T
        if isinstance(self.kind, Layout) and self.kind.offset == "none":
            return scales, None
        zeros = np.ascontiguousarray(self._zero_points(self._files, self.shape[0]).T)
        return scales, torch.from_numpy(zeros).to(uploads.device)

    def _codes(self, rows: Rows, selected: slice | Tensor, uploads: Uploads) -> Tensor:
        assert self._words is not None
        words = self._words[:, selected]  # [columns / per word, rows, 4]
        codes = (_pairs(words) if self._bits == 4 else words).transpose(0, 1).flatten(1)
        if isinstance(self.kind, Layout) and self.kind.code == "signed":
            codes = codes ^ 128
        return codes if self._order is None else codes[:, self._order]

    def close(self) -> None:
        self._words = None
        super().close()


class _PackedMatrix(_Matrix):
    """compressed-tensors' pack-quantized: [rows, columns / 8] words of codes with 8 added, low nibbles first."""

    def __init__(self, files: TensorParts, name: str, shape: tuple[int, int], quantization: Quantization) -> None:
        rows, columns = shape
        files.dtype("weight_packed", ("I32",))
        files.require_dims("weight_packed", 2)
        self._bits = next((bits for bits in (4, 8) if files.shape("weight_packed")[1] == -(-columns * bits // 32)), 0)
        if not self._bits or files.shape("weight_packed")[0] != rows:
            message = f"{files.source}: tensor {shown(files.main)} has codes that are not of 4 or 8 bits, or is damaged"
            raise ModelError(message, OTHER)
        kind = files.scale_kind("weight_scale")
        self._spread = _spread(files, "weight_scale", shape, quantization)
        group = self._spread[1]
        has_zeros = files.has("weight_zero_point") and not quantization.symmetric
        offset: OffsetKind = "zero" if has_zeros else "none"
        code: CodeKind = "signed" if self._bits == 8 and not has_zeros else "unsigned"
        super().__init__(files, name, shape, _layout(files, self._bits, group, columns, kind, offset, code))
        self._groups = _column_groups(files, "weight_g_idx", columns, columns if group == -1 else group)
        self._order: Tensor | None = None

    def order(self) -> Tensor | None:
        return None if self._groups is None else torch.from_numpy(np.argsort(self._groups, kind="stable"))

    def _open(self, uploads: Uploads) -> tuple[Tensor, Tensor | None]:
        order = self.order()
        self._order = None if order is None else order.to(uploads.device)
        scales = _spread_rows(self._files.scales("weight_scale", uploads), self.shape[0], self._spread[0])
        if isinstance(self.kind, Layout) and self.kind.offset == "none":
            return scales, None
        return scales, _spread_rows(self._zero_points(uploads), self.shape[0], self._spread[0])

    def _zero_points(self, uploads: Uploads) -> Tensor:
        """Return the zero points in the shape of the scales. Packed ones have a word for 4 or 8 rows."""
        part, scales = "weight_zero_point", self._files.shape("weight_scale")
        if self._files.dtype(part, ("I32", "I8")) == "I8":
            self._files.require(part, ("I8",), *scales)
            stored = uploads.send(self._files.bytes_of(part)).squeeze(-1)
            return stored + (1 << (self._bits - 1))
        rows, groups = scales if len(scales) == 2 else (scales[0] if scales else 1, 1)
        self._files.require(part, ("I32",), -(-rows * self._bits // 32), groups)
        words = uploads.send(self._files.bytes_of(part))  # [rows / per word, groups, 4]
        zeros = _pairs(words) if self._bits == 4 else words
        return zeros.transpose(1, 2).flatten(0, 1)[:rows].clone()

    def _codes(self, rows: Rows, selected: slice | Tensor, uploads: Uploads) -> Tensor:
        words = uploads.send(self._files.bytes_of("weight_packed")[rows]).flatten(1)
        codes = (_pairs(words) if self._bits == 4 else words)[:, : self.shape[1]]
        if isinstance(self.kind, Layout) and self.kind.code == "signed":
            codes = codes ^ 128
        return codes if self._order is None else codes[:, self._order]


class _ByteMatrix(_Matrix):
    """One code in a byte: FP8, or compressed-tensors' INT8, with a scale for the tensor, a row, a group, or a block.

    Activations stay in 16 or 32 bits, so the scales of static ones (`input_scale`, `activation_scale`) are not used.
    """

    def __init__(self, files: TensorParts, name: str, shape: tuple[int, int], quantization: Quantization) -> None:
        stored = files.dtype("weight", ("F8_E4M3", "I8"))
        self._part = next((part for part in ("weight_scale_inv", "weight_scale") if files.has(part)), "weight_scale")
        kind = files.scale_kind(self._part)
        self._spread = _spread(files, self._part, shape, quantization)
        has_zeros = stored == "I8" and files.has("weight_zero_point") and not quantization.symmetric
        offset: OffsetKind = "zero" if has_zeros else "none"
        code: CodeKind = "fp8" if stored == "F8_E4M3" else "unsigned" if has_zeros else "signed"
        super().__init__(files, name, shape, _layout(files, 8, self._spread[1], shape[1], kind, offset, code))

    def _open(self, uploads: Uploads) -> tuple[Tensor, Tensor | None]:
        scales = _spread_rows(self._files.scales(self._part, uploads), self.shape[0], self._spread[0])
        if isinstance(self.kind, Layout) and self.kind.offset == "none":
            return scales, None
        self._files.require("weight_zero_point", ("I8",), *self._files.shape(self._part))
        zeros = uploads.send(self._files.bytes_of("weight_zero_point")).squeeze(-1) ^ 128
        return scales, _spread_rows(zeros, self.shape[0], self._spread[0])

    def _codes(self, rows: Rows, selected: slice | Tensor, uploads: Uploads) -> Tensor:
        codes = uploads.send(self._files.bytes_of("weight")[rows]).squeeze(-1)
        return codes ^ 128 if isinstance(self.kind, Layout) and self.kind.offset == "zero" else codes


class _MXFP4Matrix(_Matrix):
    """One expert of gpt-oss: [rows, groups, 16] bytes, low nibbles first, and a power of two for each group."""

    def __init__(self, files: TensorParts, name: str, expert: int) -> None:
        experts, rows, groups, _ = files.shape("_blocks")
        files.require("_blocks", ("U8",), experts, rows, groups, 16)
        files.require("_scales", ("U8",), experts, rows, groups)
        super().__init__(files, name, (rows, groups * MXFP4.group), MXFP4)
        self._expert = expert

    def _open(self, uploads: Uploads) -> tuple[Tensor, Tensor | None]:
        return uploads.send(self._files.bytes_of("_scales")[self._expert]).squeeze(-1).clone(), None

    def _codes(self, rows: Rows, selected: slice | Tensor, uploads: Uploads) -> Tensor:
        blocks = uploads.send(self._files.bytes_of("_blocks")[self._expert, rows]).squeeze(-1)
        return _pairs(blocks).flatten(1)


def _column_groups(files: TensorParts, part: str, columns: int, group: int) -> NDArray[np.int64] | None:
    """Return the group of each column, None where groups follow the order of the columns."""
    if not files.has(part):
        return None
    files.require(part, tuple(INTEGERS), columns)
    numbers = files.integers(part)
    in_order = np.arange(columns) // group
    if np.array_equal(numbers, in_order):
        return None
    if not np.array_equal(np.sort(numbers), in_order):
        raise ModelError(f"{files.source} is damaged: {shown(files.name(part))} has no groups of {group}", DOWNLOAD)
    return numbers


def _spread(files: TensorParts, part: str, shape: tuple[int, int], quantization: Quantization) -> tuple[int, int]:
    """Return the number of rows and of columns that share a scale; -1: all columns."""
    rows, columns = shape
    stored = files.shape(part)
    if math.prod(stored) == 1:
        return rows, -1
    if stored in ((rows,), (rows, 1)):
        return 1, -1
    if len(stored) == 2:
        high, wide = quantization.block or (128, 128)
        if stored == (-(-rows // high), -(-columns // wide)):
            return high, wide
        if stored[0] == rows and stored[1] and columns % stored[1] == 0:
            return 1, columns // stored[1]
    raise files.wrong_shape(part)


def _spread_rows(scales: Tensor, rows: int, high: int) -> Tensor:
    """Return scales [rows, groups] from those of blocks of `high` rows."""
    table = scales.reshape(len(scales) if scales.dim() else 1, -1)
    return table if len(table) == rows else table.repeat_interleave(high, 0)[:rows]
