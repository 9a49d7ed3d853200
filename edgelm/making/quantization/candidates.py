"""The types among which the types of a model's matrices are chosen, and the groups that get one type together.

Types that a processor multiplies fast: block formats with simple scales. The IQ3 and IQ2 types look numbers up in
tables, and are good only with importance data, so they come only with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edgelm.checkpoints.gguf_parse import TENSOR_TYPES, Tensor, TensorType

ALIGNMENT = 32  # bytes: llama.cpp pads tensors to it
SUPER_BLOCK = 256  # numbers of a row
BLOCK = 32
MAX_GROUPS = 64  # one for each matrix of a small model

TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
LARGE = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16")  # for rows of super-blocks
SMALL = ("IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16")
WITH_IMPORTANCE = ("IQ2_S", "IQ3_XXS", "IQ3_S")
# The file type that is named in a file where most bytes have a type.
FILE_TYPES = {
    "IQ2_S": "IQ2_M",
    "IQ3_XXS": "IQ3_XXS",
    "IQ3_S": "IQ3_S",
    "Q2_K": "Q2_K",
    "Q3_K": "Q3_K_M",
    "Q4_K": "Q4_K_M",
    "Q5_K": "Q5_K_M",
}
PROBES = ("Q4_K", "Q2_K")  # that a group is measured with, if its rows allow
SMALL_PROBES = ("Q5_0", "Q4_0")

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Group:
    """Matrices that get the same type: of one kind, in neighbouring layers."""

    name: str
    tensors: tuple[Tensor, ...]

    @property
    def kinds(self) -> tuple[TensorType, ...]:
        """The types that all of them can have by their rows, without those that need importance data."""
        return tuple(TYPES[name] for name in _fitting(self.tensors, LARGE, SMALL))

    @property
    def probes(self) -> tuple[TensorType, ...]:
        return tuple(TYPES[name] for name in _fitting(self.tensors, PROBES, SMALL_PROBES))

    def nbytes(self, kind: TensorType) -> int:
        """Return the size in the file, padding included."""
        return sum(padded(tensor.num_elements // kind.block_len * kind.block_bytes) for tensor in self.tensors)


def padded(nbytes: int) -> int:
    """Return the size of a tensor in a file."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def grouped(matrices: Sequence[Tensor], max_groups: int = MAX_GROUPS) -> list[Group]:
    """Return a group for each matrix if there are few, or else for each kind of matrix in bands of layers."""
    if len(matrices) <= max_groups:
        return [Group(tensor.name, (tensor,)) for tensor in matrices]
    kinds: dict[str, list[tuple[int, Tensor]]] = {}
    for tensor in matrices:
        match = _LAYER.fullmatch(tensor.name)
        layer, kind = (int(match[1]), match[2]) if match else (0, tensor.name)
        kinds.setdefault(kind, []).append((layer, tensor))
    num_bands = max(1, (max_groups - len(kinds)) // max(sum(len(rows) > 1 for rows in kinds.values()), 1))
    groups = []
    for kind, rows in kinds.items():
        rows.sort(key=lambda row: row[0])
        bands = min(num_bands, len(rows))
        for band in range(bands):
            part = rows[len(rows) * band // bands : len(rows) * (band + 1) // bands]
            name = kind if len(rows) == 1 else f"{kind} of layers {part[0][0]} to {part[-1][0]}"
            groups += [
                Group(name if len(shapes) == 1 else f"{name} {shape}", members)
                for shapes in [_by_shape(part)]
                for shape, members in shapes.items()
            ]
    return groups


def with_importance(group: Group, names: Collection[str]) -> tuple[TensorType, ...]:
    """Return the types that a group can have besides where all its matrices have importance data."""
    if not all(tensor.name in names and tensor.shape[0] % SUPER_BLOCK == 0 for tensor in group.tensors):
        return ()
    return tuple(TYPES[name] for name in WITH_IMPORTANCE)


def _by_shape(part: Sequence[tuple[int, Tensor]]) -> dict[tuple[int, ...], tuple[Tensor, ...]]:
    """Return the tensors of a band by their shapes: those of other row lengths may have other types."""
    shapes: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
    for _, tensor in part:
        shapes[tensor.shape] = (*shapes.get(tensor.shape, ()), tensor)
    return shapes


def _fitting(tensors: Sequence[Tensor], large: Sequence[str], small: Sequence[str]) -> Sequence[str]:
    if all(tensor.shape[0] % SUPER_BLOCK == 0 for tensor in tensors):
        return large
    if all(tensor.shape[0] % BLOCK == 0 for tensor in tensors):
        return small
    return ("F16",)
