"""How the matmul of a prompt is divided among programs: tiles of the weight, rows of x, parts of K.

Owns these choices. Knows nothing of the kernel's arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from edgelm.kernels.gpu_target import has_wgmma
from edgelm.kernels.layout import CHUNK, TILE, PackedWeight, Weight


class Shape(NamedTuple):
    """The size of a program."""

    tiles: int  # of the weight
    rows: int  # of x
    num_warps: int
    num_stages: int


class Split(NamedTuple):
    """How K is summed: in equal parts, which are then added in order. The result is the same, apart or not."""

    parts: int
    apart: bool  # each part by programs of its own, which needs a second kernel


LARGE = Shape(8, 128, 8, 3)
PROGRAMS = 128  # about the number of multiprocessors of the larger GPUs
LEAST_CHUNKS = 4  # of a part
COMBINING = 0.15  # of the time of a program without parts: what writing and adding them takes


def shape_for(rows: int, dtype: torch.dtype = torch.float16) -> Shape:
    """Return the shape of a program for a matrix that multiplies this many rows."""
    rows = min(max(1 << (rows - 1).bit_length(), 16), LARGE.rows)
    if dtype == torch.float32:  # operands go through shared memory: larger ones do not fit on sm_86, 89 and 120
        return Shape(4, min(rows, 32), 4, 1)
    return LARGE if rows == LARGE.rows else Shape(4, rows, 4, 3)


def max_registers(shape: Shape, *, wgmma: bool) -> int | None:
    """Return the maximum of registers per thread. On sm_90 two programs of the large shape hide each other's waits."""
    return 128 if shape.num_warps == 8 and wgmma else None


def parts_of(weight: Weight) -> int:
    """Return in how many parts K is summed: as many as give PROGRAMS to one block of rows.

    This depends on nothing else: neither the number of rows nor the GPU changes the order in which a row is summed.
    """
    chunks = weight.codes.shape[-2] if isinstance(weight, PackedWeight) else -(-weight.columns // CHUNK)
    programs, parts = _programs(weight), 1
    while programs * parts < PROGRAMS and chunks % (2 * parts) == 0 and chunks // (2 * parts) >= LEAST_CHUNKS:
        parts *= 2
    return parts


def split_of(rows: int, weight: Weight, num_sms: int) -> Split:
    """Return whether parts of K run apart: if that takes less time, counted in full turns of all multiprocessors."""
    parts = parts_of(weight)
    room = num_sms * (2 if has_wgmma() else 1)
    programs = _programs(weight) * row_blocks(rows)
    together, apart = -(-programs // room), -(-programs * parts // room) / parts
    return Split(parts, apart + COMBINING < together)


def row_blocks(rows: int) -> int:
    """Return how many programs of the large shape share the rows: all that a `Split` knows of their number."""
    return -(-rows // LARGE.rows)


def _programs(weight: Weight) -> int:
    """Return how many programs of the large shape share the rows of the weight."""
    return -(-weight.rows // (LARGE.tiles * TILE))
