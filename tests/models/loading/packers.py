"""Writes the tensors of quantized folders from codes, scales and zero points, following the description of each format.

Plain loops over words, in the opposite direction to the readers, so that both do not share an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.models.loading.sources import FolderSource

Codes = NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # for the nibbles of a word, from the lowest: the number of the neighbour


def words(numbers: Codes, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack the last dimension into int32 words, the first number in the lowest bits; the last word is padded with 0."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    count = -(-numbers.shape[-1] // per_word)
    packed = np.zeros((*numbers.shape[:-1], count), np.uint64)
    for j in range(count):
        for place, which in enumerate(order):
            index = j * per_word + which
            if index < numbers.shape[-1]:
                packed[..., j] |= numbers[..., index].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def awq(codes: Codes, scales: Tensor, zeros: Codes) -> dict[str, Tensor]:
    """Codes [rows, columns], scales and zeros [rows, groups]: AWQ keeps all of them with the columns first."""
    return {
        "qweight": words(codes.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }


def gptq(
    codes: Codes, scales: Tensor, zeros: Codes, groups: Codes, bits: int = 4, *, first_format: bool = True
) -> dict[str, Tensor]:
    """`groups` is the group of each column. The first format subtracts 1 from each zero point of a word."""
    stored = words(zeros.T, bits)
    if first_format:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        less = (stored.numpy().view(np.uint32).astype(np.uint64) + 2**32 - ones) % 2**32
        stored = torch.from_numpy(less.astype(np.uint32).view(np.int32))
    return {
        "qweight": words(codes, bits).T.contiguous(),  # [columns / per word, rows]
        "qzeros": stored,
        "scales": scales.T.contiguous(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


def pack_quantized(codes: Codes, scales: Tensor, zeros: Codes | None = None, bits: int = 4) -> dict[str, Tensor]:
    """compressed-tensors: codes already have 2 ** (bits - 1) added; zeros are packed along the rows."""
    tensors = {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
    if zeros is not None:
        tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    return tensors


def folder(path: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None, **source: Any) -> FolderSource:
    """Write one layer's tensors, named `a.` and so on, and open them. The mapping ends with the source."""
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    config = {} if quantization is None else {"quantization_config": quantization}
    return FolderSource(open_safetensors(path), config, **source)


def named(stem: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{stem}.{name}": tensor for name, tensor in tensors.items()}
