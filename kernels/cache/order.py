"""The order of codes within a block, as edgelm.kernels.cache documents it: packing and unpacking.

Owns the index arithmetic of the layout. Knows nothing of the meaning of codes, or of whole blocks and their planes.
"""

from __future__ import annotations

from math import gcd, prod

import torch
from torch import Tensor

BLOCK_LEN = 32  # positions


def span(units: int, unit_bytes: int) -> int:
    """Return how many units of a lane are adjacent, so that the lane loads up to 16 bytes at once."""
    return gcd(units, 16 // unit_bytes)


def token_column(offset: Tensor, nibbles: bool) -> Tensor:
    """Return the column, in a value plane, of the token at `offset` in its block."""
    kk, jb, lm, h = offset >> 4, offset >> 3 & 1, offset >> 1 & 3, offset & 1
    return 8 * lm + 4 * kk + (2 * h + jb if nibbles else 2 * jb + h)


def pack_key_bytes(codes: Tensor) -> Tensor:
    """Reorder codes, uint8 [..., width], into rows of the plane `keys`."""
    return _side_by_side(_last(codes, 4, 8), 8)


def unpack_key_bytes(rows: Tensor) -> Tensor:
    """Undo `pack_key_bytes`: return the codes, uint8 [..., width]."""
    return _apart(rows, 8, 8).flatten(-3)


def pack_key_words(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Pack 6-bit codes, uint8 [..., width], into rows of the planes `keys` and `key_high`, int32."""
    parts = _last(codes.int(), 4, 4, 2).transpose(-2, -1)  # [.., g, lm, h, s]
    low = _join((parts & 15).flatten(-2), 4)
    top = parts >> 4
    if top.shape[-4] % 2:
        top = torch.cat([top, torch.zeros_like(top[..., :1, :, :, :])], -4)
    pairs = top.shape[-4] // 2
    top = top.reshape(*codes.shape[:-1], pairs, 2, 4, 2, 4).movedim(-4, -2)  # [.., pair, lm, h, e, s]
    high = _join(top.flatten(-3), 2)
    return _side_by_side(low.unsqueeze(-1), 4), _side_by_side(high.unsqueeze(-1), 4)


def unpack_key_words(low: Tensor, high: Tensor) -> Tensor:
    """Undo `pack_key_words`: return the codes, uint8 [..., width]."""
    groups = low.shape[-1] // 4
    nibbles = _last(_split(_apart(low, 1, 4).squeeze(-1), 4), 4)  # [.., g, lm, h, s]
    top = _last(_split(_apart(high, 1, 4).squeeze(-1), 2), 2, 4).movedim(-2, -4)  # [.., pair, e, lm, h, s]
    codes = nibbles | top.flatten(-5, -4)[..., :groups, :, :, :] << 4
    return codes.transpose(-2, -1).flatten(-4).to(torch.uint8)


def pack_value_nibbles(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [..., width] into bytes, uint8 [..., width / 16, 8]: dimension l4 low, l4 + 8 high."""
    parts = _last(codes, 2, 8)
    return parts[..., 0, :] | parts[..., 1, :] << 4


def unpack_value_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_value_nibbles`: return the codes, uint8 [..., width]."""
    return torch.stack([packed & 15, packed >> 4], -2).flatten(-3)


def _last(x: Tensor, *sizes: int) -> Tensor:
    """Split the last dimension into several; the size of the first one follows from the others, `sizes`."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // prod(sizes), *sizes)


def _side_by_side(units: Tensor, unit_bytes: int) -> Tensor:
    """Return rows of units [..., count, lm, elements], with the units of a lane adjacent."""
    *lead, count, _, elements = units.shape
    adjacent = span(count, unit_bytes)
    return units.reshape(*lead, count // adjacent, adjacent, 4, elements).transpose(-3, -2).flatten(-4)


def _apart(rows: Tensor, elements: int, unit_bytes: int) -> Tensor:
    """Undo `_side_by_side`: return the units [..., count, lm, elements] of rows."""
    *lead, size = rows.shape
    count = size // (4 * elements)
    adjacent = span(count, unit_bytes)
    units = rows.reshape(*lead, count // adjacent, 4, adjacent, elements)
    return units.transpose(-3, -2).reshape(*lead, count, 4, elements)


def _join(parts: Tensor, bits: int) -> Tensor:
    """Pack the small numbers of the last dimension, of so many bits each, into one 32-bit word."""
    shifts = torch.arange(0, 32, bits, device=parts.device)
    total = (parts.long() << shifts).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def _split(words: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
