"""The paged KV cache: its formats, its planes, and how they are allocated and read.

Owns the layout below. Knows nothing of sequences and block tables, of how new entries are written (kernels/write_kv) or
attended to (kernels/attention). `cache.quantize` defines the rounding to codes and the rotation.

A block is 32 positions of one layer. All planes are contiguous [blocks, num_kv_heads, ...] and aligned to 16 bytes.
`width` is head_dim padded to a multiple of 32; padding is stored as zeros. Formats:

    name    keys                         values                       bits per value, with scales
    f16     float16 or bfloat16          the same                     16
    int8    int8, scale for 32           int8, scale for 32           8.5
    fp8     e4m3, scale for the head     e4m3, scale for the head     8.1
    k8v4    int8, scale for 32           4 bits, scale for 32         6.5
    k6v4    6 bits, rotated, for 32      4 bits, rotated, for 32      5.5

k6v4 stores every group of 32 rotated. The rotation is its own inverse: a reader rotates q instead of the keys, and
rotates its output instead of the values. GPUs before sm_89 cannot convert e4m3, but
f16(((code & 127) << 7) | ((code & 128) << 8)) * 256 is exactly its value (no NaN is stored): 256 goes into the scale.

Keys: one row per token, tokens in natural order. Within a group g of 32 dimensions, lane lm (0..3) of a quad of a
tensor core takes the 8 consecutive dimensions 32 * g + 8 * lm + 4 * kk + 2 * jb + h (kk, jb, h = 0, 1): a "unit". Units
of one lane are adjacent until they fill 16 bytes. A row is

    [groups / span][lm: 4][span][unit]    g = span * first index + third index, span = gcd(groups, 16 / unit's bytes)

    f16      keys      f16    [32, width]         a unit is 16 bytes, span 1: the natural order
    8 bits   keys      uint8  [32, width]         a unit is 8 bytes, span 2 (1, if groups are odd)
    6 bits   keys      int32  [32, 4 * groups]    low 4 bits, a unit is a word; slot s = 2 * kk + jb: h = 0 at bit
                                                  4 * s, h = 1 at bit 16 + 4 * s; span 4, 2 or 1
             key_high  int32  [32, 4 * pairs]     top 2 bits, a unit is a word for a pair of groups (g = 2 * pair + e):
                                                  h = 0 at bit 2 * (s + 4 * e), h = 1 at 16 more;
                                                  pairs = ceil(groups / 2), span = gcd(pairs, 4) over pairs

Values: one row of 32 tokens per dimension, tokens in the order in which a lane multiplies them. Token
t = 16 * kk + 8 * jb + 2 * lm + h of the block is in column

    f16, 8 bits   values  [width, 32]              8 * lm + 4 * kk + 2 * jb + h
    4 bits        values  int32 [width / 16, 8, 8], as bytes [width / 16][l4: 8][32]: 8 * lm + 4 * kk + 2 * h + jb;
                          dimension 16 * i + l4 is the low nibble, 16 * i + l4 + 8 the high one

With 4 bits, word [i, l4, 2 * lm + kk] has the slots 2 * jb + rb of dimension 16 * i + 8 * rb + l4: h = 0 at bit
4 * slot, h = 1 at bit 16 + 4 * slot, like the words of weights (kernels/layout.py). No two tokens share a byte.

Scales: key_scales, value_scales  float16 [groups, 32 tokens in natural order]; for fp8 [1, 32].

    value = scale * code (int8, e4m3)    scale * (code - 32) (6 bits)    scale * (code - 8) (4 bits)    scales: any sign

`allocate` clears the planes, and `write_kv` adds no NaN of its own: entries that a reader masks out are finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgelm.kernels.cache import order, quantize
from edgelm.kernels.cache.order import BLOCK_LEN
from edgelm.kernels.cache.quantize import GROUP, CodeKind

__all__ = ["BLOCK_LEN", "FORMATS", "GROUP", "KVFormat", "LayerCache", "allocate", "read"]

CODE_BITS: dict[CodeKind | None, int] = {None: 16, "int8": 8, "fp8": 8, "int6": 6, "int4": 4}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a cache stores keys and values."""

    name: str
    key: CodeKind | None = None  # None: 16-bit floats
    value: CodeKind | None = None
    rotated: bool = False

    def width(self, head_dim: int) -> int:
        """Return the number of stored dimensions of a head, with padding."""
        return -(-head_dim // GROUP) * GROUP

    def bytes_per_token(self, num_kv_heads: int, head_dim: int) -> int:
        """Return the bytes of the key and the value of one token in one layer."""
        width = self.width(head_dim)
        size = 0
        for kind in (self.key, self.value):
            size += width * CODE_BITS[kind] // 8 + (2 * quantize.num_groups(width, kind) if kind else 0)
        if self.key == "int6" and width // GROUP % 2:
            size += 8  # the last pair of groups has one group
        return num_kv_heads * size


FORMATS = {
    kv_format.name: kv_format
    for kv_format in (
        KVFormat("f16"),
        KVFormat("int8", "int8", "int8"),
        KVFormat("fp8", "fp8", "fp8"),
        KVFormat("k8v4", "int8", "int4"),
        KVFormat("k6v4", "int6", "int4", rotated=True),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """The blocks of one layer."""

    format: KVFormat
    num_kv_heads: int
    head_dim: int
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    key_high: Tensor | None = None

    @property
    def width(self) -> int:
        return self.format.width(self.head_dim)

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[0]

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def planes(self) -> dict[str, Tensor]:
        """Every tensor of the cache, by name; the first dimension is the block."""
        names = ("keys", "values", "key_scales", "value_scales", "key_high")
        return {name: plane for name in names if (plane := getattr(self, name)) is not None}


def allocate(
    kv_format: KVFormat,
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    dtype16: torch.dtype = torch.float16,
) -> LayerCache:
    """Return cleared blocks for one layer; head_dim is a multiple of 8. `dtype16` is what format "f16" stores."""
    assert head_dim % 8 == 0
    assert dtype16 in (torch.float16, torch.bfloat16, torch.float32)
    width = kv_format.width(head_dim)
    groups = width // GROUP

    def plane(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(num_blocks, num_kv_heads, *shape, dtype=dtype, device=device)

    def scales(kind: CodeKind | None) -> Tensor | None:
        return None if kind is None else plane(torch.float16, quantize.num_groups(width, kind), BLOCK_LEN)

    byte_or_16 = {None: dtype16, "int8": torch.uint8, "fp8": torch.uint8}
    six, four = kv_format.key == "int6", kv_format.value == "int4"
    return LayerCache(
        kv_format,
        num_kv_heads,
        head_dim,
        keys=plane(torch.int32, BLOCK_LEN, 4 * groups) if six else plane(byte_or_16[kv_format.key], BLOCK_LEN, width),
        values=plane(torch.int32, width // 16, 8, 8) if four else plane(byte_or_16[kv_format.value], width, BLOCK_LEN),
        key_scales=scales(kv_format.key),
        value_scales=scales(kv_format.value),
        key_high=plane(torch.int32, BLOCK_LEN, 4 * (-(-groups // 2))) if six else None,
    )


def read(cache: LayerCache, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the first `length` positions of `blocks`, int64 [n].

    Both are float32 [length, num_kv_heads, head_dim]: the stored values, with the rotation undone.
    """
    keys, values = _read_keys(cache, blocks), _read_values(cache, blocks)  # [n, num_kv_heads, 32, width]
    if cache.format.rotated:
        keys, values = quantize.rotate(keys), quantize.rotate(values)
    return _flat(keys, cache, length), _flat(values, cache, length)


def _flat(entries: Tensor, cache: LayerCache, length: int) -> Tensor:
    """Return the first entries of blocks [n, num_kv_heads, 32, width] without padding."""
    return entries.transpose(1, 2).flatten(0, 1)[:length, :, : cache.head_dim].contiguous()


def _read_keys(cache: LayerCache, blocks: Tensor) -> Tensor:
    rows, kind = cache.keys[blocks], cache.format.key
    if kind is None:
        return rows.float()
    if cache.key_high is not None:
        codes = order.unpack_key_words(rows, cache.key_high[blocks])
    else:
        codes = order.unpack_key_bytes(rows)
    assert cache.key_scales is not None
    return quantize.decode(codes, cache.key_scales[blocks].transpose(-2, -1), kind)


def _read_values(cache: LayerCache, blocks: Tensor) -> Tensor:
    rows, kind = cache.values[blocks], cache.format.value
    column = order.token_column(torch.arange(BLOCK_LEN, device=rows.device), kind == "int4")
    if kind is None:
        return rows[..., column].transpose(-2, -1).float()
    if kind == "int4":
        packed = rows.view(torch.uint8)[..., column]  # [n, num_kv_heads, width / 16, 8, 32]
        codes = order.unpack_value_nibbles(packed.movedim(-1, -3))
    else:
        codes = rows[..., column].transpose(-2, -1).contiguous()
    assert cache.value_scales is not None
    return quantize.decode(codes, cache.value_scales[blocks].transpose(-2, -1), kind)
