"""The layout of quantized weights in a GPU's memory: codes in the order of the tensor cores, and their scales.

Owns the description of a layout, the planes of a weight, and the conversion of codes to planes and back. Knows nothing
of files. A weight is a matrix [rows, columns] (N, K), multiplied as `x @ weight.T`, or a stack of such matrices.

    value = scale * (code - zero) + offset                       with one scale for `group` columns of a row
    value = supers * scale * (code - zero) + super_min * min     where the scales themselves are quantized

Codes are stored in chunks of 16 rows by 64 columns, chunk after chunk along a row of chunks ("tile" = 16 rows). One
warp multiplies a chunk: of the rows l4 and l4 + 8 (rb = 0, 1), lane 4 * l4 + lm (l4 = 0..7, lm = 0..3) holds the
columns 32 * g + 8 * lm + 4 * p + 2 * jb + h   (g, p, jb, h = 0, 1), so it reads 8 neighbours of x at once. With groups
of 16 they are 32 * g + 16 * p + 4 * lm + 2 * jb + h, so one instruction of the tensor cores has one group.

    4 bits   [tile, chunk, lane, jb, rb]      a word: slot s = 2 * g + p, h = 0 at bit 4 * s, h = 1 at bit 16 + 4 * s
    +1 bit   [tile, chunk, lane]              `high`: h = 0 at bit 4 * (2 * jb + rb) + s, h = 1 is 16 bits higher
    +2 bits  [tile, chunk, lane, jb]          `high`: h = 0 at bit 2 * (s + 4 * rb), h = 1 is 16 bits higher
    8 bits   [tile, chunk, g, lane, jb, rb]   a word: byte 2 * p + h

Scales are [tile, entry, row of 16, n]. For groups of up to 64 columns an entry is a chunk and n = 64 / group; for
longer groups an entry is a group and n = 1. Rows are padded to 16 and columns to 64 (or to `group`, if it is longer),
with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

TILE = 16  # rows
CHUNK = 64  # columns
SUPER = 256  # columns that share the scale of scales
PART_WEIGHTS = 2**24  # that plain torch dequantizes at a time: about 16 bytes for each, 270 MB

ScaleKind = Literal["f16", "bf16", "f32", "e8m0", "u8", "i8"]
OffsetKind = Literal["none", "min", "zero"]
CodeKind = Literal["unsigned", "signed", "codebook", "fp8"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The meaning of a weight's planes: everything that a kernel is compiled for."""

    name: str  # such as "q4_k": for messages and benchmarks
    bits: int  # of a code: 4, 5, 6 or 8
    group: int  # columns that share a scale: 16, 32, or a multiple of 64
    scale: ScaleKind  # u8 and i8: two levels, with `supers`; e8m0: 2 ** (byte - 128)
    code: CodeKind = "unsigned"
    zero: int = 0  # subtracted from each unsigned code
    offset: OffsetKind = "none"  # min: added, of the scale's type; zero: uint8, subtracted from the code
    codebook: tuple[int, ...] = ()  # 16 values, each an integer of at most 8 bits

    def __post_init__(self) -> None:
        assert self.bits in (4, 5, 6, 8)
        assert self.group in (16, 32) or self.group % CHUNK == 0
        assert (self.code == "codebook") == (len(self.codebook) == 16)
        assert self.code in ("unsigned", "codebook") or self.bits == 8

    @property
    def two_level(self) -> bool:
        return self.scale in ("u8", "i8")

    @property
    def per_entry(self) -> int:
        """Return the number of scales that an entry holds for a row."""
        return max(CHUNK // self.group, 1)

    @property
    def bits_per_weight(self) -> float:
        """Return the bits that are read for each weight, without padding."""
        scale = {"f16": 16, "bf16": 16, "f32": 32, "e8m0": 8, "u8": 8, "i8": 8}[self.scale]
        offset = {"none": 0, "min": scale, "zero": 8}[self.offset]
        supers = (32 if self.offset == "min" else 16) / SUPER if self.two_level else 0
        return self.bits + (scale + offset) / self.group + supers


@cache
def layout_constants(layout: Layout | None) -> dict[str, object]:
    """Return the constexprs of a layout (None: dense rows). BOOK is the codebook's bytes as one number."""
    if layout is None:
        return {"BITS": 16, "GROUP": CHUNK, "SCALE": "f32", "CODE": "", "ZERO": 0, "OFFSET": "none", "BOOK": 0}
    book = sum((value & 255) << (8 * i) for i, value in enumerate(layout.codebook))
    return {
        "BITS": layout.bits, "GROUP": layout.group, "SCALE": layout.scale, "CODE": layout.code, "ZERO": layout.zero,
        "OFFSET": layout.offset, "BOOK": book,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A quantized matrix, or a stack of matrices with a leading dimension before all planes."""

    layout: Layout
    rows: int  # N, as the model has them
    columns: int  # K
    codes: Tensor  # int32: [tiles, chunks, 128], of 8 bits [tiles, chunks, 256]
    scales: Tensor  # [tiles, entries, 16, per_entry] of the layout's scale type
    high: Tensor | None = None  # int32: bits above the fourth: [tiles, chunks, 32], of 6 bits [tiles, chunks, 64]
    offsets: Tensor | None = None  # as scales; of "zero" uint8
    supers: Tensor | None = None  # float16 [tiles, chunks / 4, 16, 1 or 2]: d, and of "min" the factor of the mins
    order: Tensor | None = None  # int64 [columns]: column j multiplies x[..., order[j]] (GPTQ's act-order)
    gated: bool = False  # tiles of gate and up alternate

    @property
    def num_matrices(self) -> int:
        """Return the size of the stack; 0 for a single matrix."""
        return self.codes.shape[0] if self.codes.dim() == 4 else 0

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(plane.numel() * plane.element_size() for plane in planes(self).values())

    def to(self, device: torch.device | str) -> PackedWeight:
        moved: dict[str, Any] = {name: plane.to(device, non_blocking=True) for name, plane in planes(self).items()}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A matrix of 16 or 32 bits, row after row, or a stack of matrices."""

    data: Tensor  # [rows, columns] or [matrices, rows, columns]
    gated: bool = False  # tiles of 16 rows of gate and up alternate

    @property
    def rows(self) -> int:
        return self.data.shape[-2]

    @property
    def columns(self) -> int:
        return self.data.shape[-1]

    @property
    def num_matrices(self) -> int:
        """Return the size of the stack; 0 for a single matrix."""
        return self.data.shape[0] if self.data.dim() == 3 else 0

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def to(self, device: torch.device | str) -> DenseWeight:
        return replace(self, data=self.data.to(device, non_blocking=True))


Weight = PackedWeight | DenseWeight
PLANES = ("codes", "scales", "high", "offsets", "supers", "order")


def planes(weight: PackedWeight) -> dict[str, Tensor]:
    """Return the tensors of a weight by name."""
    return {name: plane for name in PLANES if (plane := getattr(weight, name)) is not None}


def pack_codes(codes: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor | None]:
    """Return the planes `codes` and `high` for codes, uint8 or int8 [..., rows, columns], padded to whole chunks."""
    *stack, rows, columns = codes.shape
    assert rows % TILE == 0
    assert columns % CHUNK == 0
    wide = codes.view(torch.uint8).to(torch.int32)
    n = len(stack)
    lead = tuple(range(n))
    if group == 16:
        parts = wide.reshape(*stack, rows // TILE, 2, 8, columns // CHUNK, 2, 2, 4, 2, 2).transpose(n + 5, n + 6)
    else:
        parts = wide.reshape(*stack, rows // TILE, 2, 8, columns // CHUNK, 2, 4, 2, 2, 2)
    # [.., tile, rb, l4, chunk, g, lm, p, jb, h] -> [.., tile, chunk, l4, lm, jb, rb, h, g, p]
    parts = parts.permute(*lead, *(n + d for d in (0, 3, 2, 5, 7, 1, 8, 4, 6)))
    if bits == 8:
        # -> [.., tile, chunk, g, l4, lm, jb, rb, p, h], a word for each (p, h)
        bytes8 = parts.permute(*lead, *(n + d for d in (0, 1, 7, 2, 3, 4, 5, 8, 6)))
        words = _join(bytes8.flatten(-2), torch.arange(0, 32, 8))
        return words.reshape(*stack, rows // TILE, columns // CHUNK, 256), None
    nibbles = (parts & 15).reshape(*parts.shape[:-3], 8)
    low = _join(nibbles, torch.arange(0, 32, 4)).reshape(*stack, rows // TILE, columns // CHUNK, 128)
    if bits == 4:
        return low, None
    top = (parts >> 4).flatten(-2)  # [.., tile, chunk, l4, lm, jb, rb, h, s]
    if bits == 5:
        # bit 4 * (2 * jb + rb) + s of the half h
        spread = top.permute(*lead, *(n + d for d in (0, 1, 2, 3, 6, 4, 5, 7))).flatten(-4)
        high = _join(spread, torch.arange(32))
        return low, high.reshape(*stack, rows // TILE, columns // CHUNK, 32)
    # bit 2 * (s + 4 * rb) of the half h, a word for each jb
    spread = top.permute(*lead, *(n + d for d in (0, 1, 2, 3, 4, 6, 5, 7))).flatten(-3)
    high = _join(spread, torch.arange(0, 32, 2))
    return low, high.reshape(*stack, rows // TILE, columns // CHUNK, 64)


def unpack_codes(codes: Tensor, high: Tensor | None, bits: int, group: int) -> Tensor:
    """Return the codes of planes, uint8 [..., rows, columns] with the padding: the inverse of `pack_codes`."""
    *stack, tiles, chunks, _ = codes.shape
    n = len(stack)
    lead = tuple(range(n))
    if bits == 8:
        words = codes.reshape(*stack, tiles, chunks, 2, 8, 4, 2, 2)
        parts = _split(words, torch.arange(0, 32, 8), 255).reshape(*words.shape, 2, 2)
        # [.., tile, chunk, g, l4, lm, jb, rb, p, h] -> [.., tile, rb, l4, chunk, g, lm, p, jb, h]
        parts = parts.permute(*lead, *(n + d for d in (0, 6, 3, 1, 2, 4, 7, 5, 8)))
        return _in_column_order(parts, n, group)
    words = codes.reshape(*stack, tiles, chunks, 8, 4, 2, 2)
    parts = _split(words, torch.arange(0, 32, 4), 15).reshape(*words.shape, 2, 2, 2)
    if bits == 5:
        assert high is not None
        top = _split(high.reshape(*stack, tiles, chunks, 8, 4), torch.arange(32), 1)
        top = top.reshape(*stack, tiles, chunks, 8, 4, 2, 2, 2, 2, 2)  # [.., h, jb, rb, g, p]
        parts = parts | top.permute(*lead, *(n + d for d in (0, 1, 2, 3, 5, 6, 4, 7, 8))) << 4
    elif bits == 6:
        assert high is not None
        top = _split(high.reshape(*stack, tiles, chunks, 8, 4, 2), torch.arange(0, 32, 2), 3)
        top = top.reshape(*stack, tiles, chunks, 8, 4, 2, 2, 2, 2, 2)  # [.., jb, h, rb, g, p]
        parts = parts | top.permute(*lead, *(n + d for d in (0, 1, 2, 3, 4, 6, 5, 7, 8))) << 4
    # [.., tile, chunk, l4, lm, jb, rb, h, g, p] -> [.., tile, rb, l4, chunk, g, lm, p, jb, h]
    parts = parts.permute(*lead, *(n + d for d in (0, 5, 2, 1, 7, 3, 8, 4, 6)))
    return _in_column_order(parts, n, group)


def _in_column_order(parts: Tensor, n: int, group: int) -> Tensor:
    """Return codes [.., tile, rb, l4, chunk, g, lm, p, jb, h], behind n dimensions, as uint8 [.., rows, columns]."""
    if group == 16:
        parts = parts.transpose(n + 5, n + 6)
    *stack, tiles, _, _, chunks = parts.shape[: n + 4]
    return parts.reshape(*stack, tiles * TILE, chunks * CHUNK).to(torch.uint8)


def pack_scales(scales: Tensor, per_entry: int) -> Tensor:
    """Return the plane of scales [..., rows, groups] that are padded to whole tiles and entries."""
    *stack, rows, groups = scales.shape
    assert rows % TILE == 0
    assert groups % per_entry == 0
    parts = scales.reshape(*stack, rows // TILE, TILE, groups // per_entry, per_entry)
    return parts.transpose(-3, -2).contiguous()


def unpack_scales(scales: Tensor) -> Tensor:
    """Return scales as [..., rows, groups] with the padding: the inverse of `pack_scales`."""
    *stack, tiles, entries, tile, per_entry = scales.shape
    return scales.transpose(-3, -2).reshape(*stack, tiles * tile, entries * per_entry)


def _join(parts: Tensor, shifts: Tensor) -> Tensor:
    """Join the small numbers of the last dimension, shifted so that they do not overlap, into one int32 word."""
    wide = parts.to(torch.int64) << shifts.to(parts.device)
    total = wide.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def _split(words: Tensor, shifts: Tensor, mask: int) -> Tensor:
    """Split each word into small numbers, as a new last dimension."""
    return (words.unsqueeze(-1) >> shifts.to(words.device, torch.int32)) & mask


def dequantize(weight: Weight) -> Tensor:
    """Return the values of a weight, float32 [..., rows, columns], in its own column order (`order` is not applied).

    The formula is computed in float32 in ggml's order of operations, so the results are equal to the last bit.
    """
    if isinstance(weight, DenseWeight):
        return weight.data.float()
    layout = weight.layout
    raw = unpack_codes(weight.codes, weight.high, layout.bits, layout.group)
    scale = _scale_values(weight).repeat_interleave(layout.group, -1)[..., : raw.shape[-1]]
    if layout.code == "signed":
        code = raw.view(torch.int8).float()
    elif layout.code == "fp8":
        code = raw.view(torch.float8_e4m3fn).float()
    elif layout.code == "codebook":
        code = torch.tensor(layout.codebook, dtype=torch.float32, device=raw.device)[raw.long()]
    else:
        code = raw.float() - layout.zero
    if layout.offset == "zero":
        assert weight.offsets is not None
        zeros = unpack_scales(weight.offsets).float().repeat_interleave(layout.group, -1)[..., : raw.shape[-1]]
        code = code - zeros
    value = scale * code
    if layout.offset == "min":
        value = value + _min_values(weight).repeat_interleave(layout.group, -1)[..., : raw.shape[-1]]
    return value[..., : weight.rows, : weight.columns]


def slice_rows(weight: Weight, start: int, end: int) -> Weight:
    """Return rows of a matrix as a weight that shares its memory, without its order; `start` begins a tile."""
    assert start % TILE == 0
    if isinstance(weight, DenseWeight):
        return replace(weight, data=weight.data[start:end])
    tiles = slice(start // TILE, -(-end // TILE))
    sliced: dict[str, Any] = {name: plane[tiles] for name, plane in planes(weight).items() if name != "order"}
    return replace(weight, rows=end - start, order=None, **sliced)


def row_parts(weight: Weight, most: int = PART_WEIGHTS) -> Iterator[Weight]:
    """Yield the rows of a matrix in parts of about `most` weights, so that an output matrix needs little memory."""
    assert weight.num_matrices == 0
    step = max(most // max(weight.columns, 1) // TILE, 1) * TILE
    for start in range(0, weight.rows, step):
        yield slice_rows(weight, start, min(start + step, weight.rows))


def _scale_values(weight: PackedWeight) -> Tensor:  # [..., rows, groups]
    scales = unpack_scales(weight.scales)
    if weight.layout.scale == "e8m0":
        byte = scales.int()  # the byte becomes the exponent; the two smallest powers are subnormal
        return torch.where(byte < 2, 0x200000 << (byte & 1), (byte - 1) << 23).view(torch.float32)
    if not weight.layout.two_level:
        return scales.float()
    return _super_values(weight, 0) * scales.float()


def _min_values(weight: PackedWeight) -> Tensor:
    assert weight.offsets is not None
    mins = unpack_scales(weight.offsets).float()
    return _super_values(weight, 1) * mins if weight.layout.two_level else mins


def _super_values(weight: PackedWeight, part: int) -> Tensor:
    assert weight.supers is not None
    supers = unpack_scales(weight.supers[..., part : part + 1].contiguous()).float()
    groups = unpack_scales(weight.scales).shape[-1]
    return supers.repeat_interleave(SUPER // weight.layout.group, -1)[..., :groups]


def same_planes(weights: list[Weight]) -> bool:
    """Return whether weights can be fused by rows: one layout, width and order; whole tiles, except in the last."""
    first = weights[0]
    if any(type(weight) is not type(first) or weight.columns != first.columns for weight in weights):
        return False
    if any(weight.rows % TILE for weight in weights[:-1]):
        return False
    if isinstance(first, DenseWeight):
        return all(isinstance(weight, DenseWeight) and weight.data.dtype == first.data.dtype for weight in weights)
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    return all(weight.layout == first.layout and _same_order(first.order, weight.order) for weight in packed)


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def fuse_rows(weights: list[Weight]) -> Weight:
    """Return one weight with the rows of all weights, one weight after the other: for q, k and v."""
    assert same_planes(weights)
    first = weights[0]
    if isinstance(first, DenseWeight):
        return DenseWeight(torch.cat([weight.data for weight in weights if isinstance(weight, DenseWeight)], -2))
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    return _fuse_planes(packed, torch.cat, gated=False)


def fuse_gated(gate: Weight, up: Weight) -> Weight:
    """Return one weight in which tiles of gate and up alternate, so that one program has both for an output."""
    assert same_planes([gate, up])
    assert gate.rows == up.rows
    if isinstance(gate, DenseWeight):
        assert isinstance(up, DenseWeight)
        assert gate.rows % TILE == 0
        stack = gate.data.shape[:-2]
        tiles = [weight.data.reshape(*stack, -1, 1, TILE, weight.columns) for weight in (gate, up)]
        return DenseWeight(torch.cat(tiles, -3).reshape(*stack, 2 * gate.rows, gate.columns), gated=True)
    assert isinstance(up, PackedWeight)
    # stacked as [.., tiles, 2, ..]
    return _fuse_planes([gate, up], lambda parts, dim: torch.stack(parts, dim + 1).flatten(dim, dim + 1), gated=True)


def _fuse_planes(
    weights: list[PackedWeight], join: Callable[[list[Tensor], int], Tensor], *, gated: bool
) -> PackedWeight:
    """Join each plane of the weights along the dimension of the tiles."""
    first = weights[0]
    dim = first.codes.dim() - 3
    joined: dict[str, Any] = {
        name: join([planes(weight)[name] for weight in weights], dim) for name in planes(first) if name != "order"
    }
    return replace(first, rows=sum(weight.rows for weight in weights), gated=gated, **joined)
