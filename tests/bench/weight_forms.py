"""Forms in which a matrix could be stored: codes of few bits, columns kept in 16 bits, weights left out.

Each form returns the matrix that it would be read as, and its size in bits with everything that belongs to it. Owns
the roundings and the counts. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import gguf
import numpy as np
import torch
from llama_cpp._ggml import libggml
from torch import Tensor

from tests.bench.plain_llama import Seen

RANGES = (1.0, 0.92, 0.84, 0.76, 0.68)  # shares of a group's smallest and largest weight that the codes may span
INDEX_BITS = 16  # of a column kept in 16 bits
SCALE_BITS = 32  # of a group's scale and min
_chunk = libggml.ggml_quantize_chunk
_chunk.restype = ctypes.c_size_t
_FLOATS = ctypes.POINTER(ctypes.c_float)
_chunk.argtypes = [ctypes.c_int, _FLOATS, ctypes.c_void_p, *[ctypes.c_int64] * 3, _FLOATS]


class Stored(NamedTuple):
    """A matrix as it would be read, and its size."""

    values: Tensor  # float32 [rows, columns]
    bits: float  # of the whole matrix


Form = Callable[[Tensor, Seen], Stored]


def half(weight: Tensor, seen: Seen) -> Stored:
    """Store 16 bits a weight."""
    return Stored(weight.half().float(), 16.0 * weight.numel())


def ggml(kind: str, weight: Tensor, seen: Seen, *, weighed: bool = False) -> Stored:
    """Round as ggml does, with the importance of the columns if `weighed`. A last block may be filled with zeros."""
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    rows, columns = weight.shape
    source = torch.nn.functional.pad(weight, (0, -columns % block)).contiguous().numpy()
    importance = torch.nn.functional.pad(seen.mean_square, (0, -columns % block)).contiguous().numpy()
    packed = np.zeros(source.size // block * block_bytes, np.uint8)
    floats = importance.ctypes.data_as(_FLOATS) if weighed else None
    _chunk(int(number), source.ctypes.data_as(_FLOATS), packed.ctypes.data, 0, rows, source.shape[1], floats)
    values = gguf.quants.dequantize(packed.reshape(rows, -1), number)[:, :columns]
    return Stored(torch.from_numpy(np.ascontiguousarray(values)), 8.0 * packed.size)


def codes(bits: int, group: int, weight: Tensor, seen: Seen) -> Stored:
    """Store codes with a scale and a min of 16 bits a group: the range with the least error at the outputs.

    The error of a column counts by the mean square of what it is multiplied with.
    """
    values, num_groups = _coded(bits, group, weight, seen.mean_square.expand_as(weight))
    return Stored(values, float(bits * weight.numel() + SCALE_BITS * num_groups))


def _coded(bits: int, group: int, weight: Tensor, importance: Tensor) -> tuple[Tensor, int]:
    """Return rounded weights and the number of groups; both tensors [rows, columns]."""
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight.unsqueeze(0), (0, -columns % group), mode="replicate")[0]
    groups = whole.reshape(rows, -1, group)
    counted = torch.nn.functional.pad(importance + 1e-12, (0, -columns % group)).reshape(groups.shape)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    best, least = groups, torch.full_like(low, torch.inf)
    for lower, upper in product(RANGES, RANGES):
        minimum = (low * lower).half().float()
        scale = ((high * upper - low * lower) / (2**bits - 1)).clamp_min(1e-7).half().float()
        read = ((groups - minimum) / scale).round().clamp(0, 2**bits - 1) * scale + minimum
        error = ((read - groups).square() * counted).sum(-1, keepdim=True)
        best = torch.where(error < least, read, best)
        least = torch.minimum(error, least)
    return best.reshape(rows, -1)[:, :columns], rows * groups.shape[1]


def outliers(count: int, by: str, rest: Form, weight: Tensor, seen: Seen) -> Stored:
    """Keep `count` columns in 16 bits: those with the largest inputs, or with the largest error at the outputs.

    The count is kind to the idea: the codes of these columns are not counted, though a packed layout has them.
    """
    plain = rest(weight, seen)
    effect = seen.mean_square * (plain.values - weight).square().sum(0)
    kept = torch.topk(seen.largest if by == "largest" else effect, count).indices
    others = weight.clone()
    others[:, kept] = 0
    ignored = seen.squares.clone()
    ignored[kept] = 0
    stored = rest(others, Seen(ignored, seen.largest, seen.rows))
    values = stored.values.clone()
    values[:, kept] = weight[:, kept].half().float()
    rows, columns = weight.shape
    return Stored(values, stored.bits * (1 - count / columns) + count * (16.0 * rows + INDEX_BITS))


def pruned(share: float, by: str, bits: int | None, group: int, weight: Tensor, seen: Seen) -> Stored:
    """Leave out a share of each row; the others are stored in 16 bits (`bits` None) or as codes.

    `by` is "magnitude", or "activation": |weight| times the norm of its inputs (Sun and others 2023, Wanda). A mask has
    a bit for each weight.
    """
    rows, columns = weight.shape
    out = torch.topk(_score(by, weight, seen), round(share * columns), largest=False).indices
    mask = torch.ones_like(weight).scatter(1, out, 0)
    num_kept = rows * (columns - out.shape[1])
    if bits is None:
        return Stored(weight.half().float() * mask, 16.0 * num_kept + weight.numel())
    values, num_groups = _coded(bits, group, weight * mask, seen.mean_square * mask)
    return Stored(values * mask, float(bits * num_kept + SCALE_BITS * num_groups + weight.numel()))


def two_of_four(by: str, bits: int | None, group: int, weight: Tensor, seen: Seen) -> Stored:
    """Keep two of four neighbours, as the sparse tensor cores of GPUs do: 2 bits a kept weight say which two.

    Codes are stored for the kept weights alone, and a group has `group` of them.
    """
    rows, columns = weight.shape
    keep = torch.topk(_score(by, weight, seen).reshape(rows, -1, 4), 2).indices.sort(-1).values
    places = (keep + torch.arange(0, columns, 4)[:, None]).flatten(1)  # [rows, columns / 2]
    kept = weight.gather(1, places)
    if bits is None:
        values, size = kept.half().float(), 16.0 * kept.numel()
    else:
        values, num_groups = _coded(bits, group, kept, seen.mean_square[places])
        size = float(bits * kept.numel() + SCALE_BITS * num_groups)
    return Stored(torch.zeros_like(weight).scatter(1, places, values), size + 2.0 * kept.numel())


def _score(by: str, weight: Tensor, seen: Seen) -> Tensor:
    return weight.abs() if by == "magnitude" else weight.abs() * seen.squares.sqrt()
