"""What a decode kernel takes of a weight: its planes, the constants that describe them, and the type of the dot.

Owns this translation of a `Weight`. Knows nothing of rows, grids or arithmetic.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from edgelm.kernels.choice import interpreting
from edgelm.kernels.layout import CHUNK, PackedWeight, Weight, layout_constants


def planes_and_constants(weight: Weight, dtype: torch.dtype) -> tuple[tuple[Tensor | None, ...], dict[str, object]]:
    """Return the planes as `decode_kernel` takes them, and the constexprs that describe them."""
    if not isinstance(weight, PackedWeight):
        # two different 16-bit types meet in float32: slow, and exact
        common = dtype if weight.data.dtype == dtype else torch.float32
        constants = layout_constants(None) | {"CHUNKS": -(-weight.columns // CHUNK)} | _dot_constants(common)
        return (weight.data, None, None, None, None), constants
    planes = (
        weight.codes,
        weight.high,
        _entry_words(weight.scales),
        None if weight.offsets is None else _entry_words(weight.offsets),
        None if weight.supers is None else _entry_words(weight.supers),
    )
    return planes, layout_constants(weight.layout) | {"CHUNKS": weight.codes.shape[-2]} | _dot_constants(dtype)


def _dot_constants(dtype: torch.dtype) -> dict[str, object]:
    """Return the type of the dot's operands, and whether assembly makes them: it makes 16-bit types only."""
    kinds = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    if interpreting():
        # the interpreter's dot takes the bits of bfloat16 for integers; in float32 the result is the same
        kinds[torch.bfloat16] = tl.float32
    return {"DTYPE": kinds[dtype], "ASM": not interpreting() and dtype != torch.float32}


def _entry_words(plane: Tensor) -> Tensor:
    """Return scales with one word for each entry, where an entry has several scales that fit into 32 bits."""
    assert plane.is_contiguous()
    width = plane.shape[-1] * plane.element_size()
    if plane.shape[-1] == 1 or width > 4:
        return plane
    return plane.flatten(-2).view(torch.int16 if width == 2 else torch.int32)  # a stack keeps its stride
