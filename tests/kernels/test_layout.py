"""kernels/layout.py: the position of each bit as documented, the inverse conversions, and fused weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from edgelm.kernels import dequant_gemm, matmul
from edgelm.kernels import dequantize as dequantizing
from edgelm.kernels import layout as layouts
from edgelm.kernels.layout import (
    CHUNK,
    PART_WEIGHTS,
    SUPER,
    TILE,
    DenseWeight,
    Layout,
    PackedWeight,
    dequantize,
    fuse_gated,
    fuse_rows,
    pack_codes,
    pack_scales,
    planes,
    row_parts,
    same_planes,
    unpack_codes,
    unpack_scales,
)
from tests.kernels.cases.matmul import LAYOUTS, random_weight
from tests.kernels.seeds import SEED, generator


def _word(plane: torch.Tensor, *at: int) -> int:
    return int(plane.numpy()[at]) & 0xFFFFFFFF


def _stored(codes: torch.Tensor, high: torch.Tensor | None, bits: int, group: int, row: int, column: int) -> int:
    """Read a code from the planes as the module's docstring describes it."""
    tile, row = divmod(row, TILE)
    chunk, column = divmod(column, CHUNK)
    rb, l4 = divmod(row, 8)
    g, column = divmod(column, 32)
    if group == 16:
        p, column = divmod(column, 16)
        lm, column = divmod(column, 4)
    else:
        lm, column = divmod(column, 8)
        p, column = divmod(column, 4)
    jb, h = divmod(column, 2)
    lane, s = 4 * l4 + lm, 2 * g + p
    if bits == 8:
        word = _word(codes, tile, chunk, ((g * 32 + lane) * 2 + jb) * 2 + rb)
        return word >> 8 * (2 * p + h) & 255
    code = _word(codes, tile, chunk, (lane * 2 + jb) * 2 + rb) >> (4 * s + 16 * h) & 15
    if bits == 5:
        assert high is not None
        code |= (_word(high, tile, chunk, lane) >> (4 * (2 * jb + rb) + s + 16 * h) & 1) << 4
    elif bits == 6:
        assert high is not None
        code |= (_word(high, tile, chunk, lane * 2 + jb) >> (2 * (s + 4 * rb) + 16 * h) & 3) << 4
    return code


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_each_code_stands_where_the_documentation_says(bits: int, group: int, seed: int):
    codes = torch.randint(0, 1 << bits, (2 * TILE, 2 * CHUNK), generator=generator(seed)).to(torch.uint8)
    low, high = pack_codes(codes, bits, group)
    expected = codes.tolist()
    assert low.dtype == torch.int32
    assert low.shape == (2, 2, 256 if bits == 8 else 128)
    assert (None if high is None else high.shape) == {5: (2, 2, 32), 6: (2, 2, 64)}.get(bits)
    for row in range(2 * TILE):
        for column in range(2 * CHUNK):
            assert _stored(low, high, bits, group, row, column) == expected[row][column]


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_codes_and_scales_come_back_from_a_stack(bits: int, group: int, seed: int):
    codes = torch.randint(0, 1 << bits, (3, 2 * TILE, 3 * CHUNK), generator=generator(seed)).to(torch.uint8)
    low, high = pack_codes(codes, bits, group)
    assert torch.equal(unpack_codes(low, high, bits, group), codes)
    assert torch.equal(pack_codes(codes[1], bits, group)[0], low[1])
    scales = torch.randn((3, 2 * TILE, 12), generator=generator(seed))
    for per_entry in (1, 2, 4):
        packed = pack_scales(scales, per_entry)
        assert packed.shape == (3, 2, 12 // per_entry, 16, per_entry)
        assert packed[1, 1, 0, 5, per_entry - 1] == scales[1, 16 + 5, per_entry - 1]
        assert torch.equal(unpack_scales(packed), scales)


def test_signed_codes_are_stored_by_their_bits():
    codes = torch.arange(-128, 128).to(torch.int8).reshape(TILE, 16).repeat(1, 4)
    low, _ = pack_codes(codes, 8, 32)
    assert torch.equal(unpack_codes(low, None, 8, 32).view(torch.int8), codes)


def _value(weight: PackedWeight, row: int, column: int) -> float:
    """Return one value by the formula of the module's docstring, in Python's own numbers."""
    layout = weight.layout
    tile, entry = row // TILE, column // max(layout.group, CHUNK)
    at = (tile, entry, row % TILE, column % CHUNK // layout.group if layout.group < CHUNK else 0)
    code: float = _stored(weight.codes, weight.high, layout.bits, layout.group, row, column)
    if layout.code == "signed":
        code = code - 256 if code > 127 else code
    elif layout.code == "codebook":
        code = layout.codebook[int(code)]
    elif layout.code == "fp8":
        sign, exponent, mantissa = int(code) >> 7, int(code) >> 3 & 15, int(code) & 7
        code = (-1) ** sign * (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8)
    code -= layout.zero
    scale, low = float(weight.scales[at]), 0.0
    if layout.scale == "e8m0":
        scale = 2.0 ** (scale - 128)
    if layout.offset != "none":
        assert weight.offsets is not None
        low = float(weight.offsets[at])
    if layout.two_level:
        assert weight.supers is not None
        both = weight.supers[tile, column // SUPER, row % TILE]
        scale *= float(both[0])
        low *= float(both[-1])
    return scale * (code - low) if layout.offset == "zero" else scale * code + low


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_dequantize_computes_the_documented_formula(layout: Layout, seed: int):
    weight = random_weight(layout, 21, 300, generator(seed))
    values = dequantize(weight)
    assert values.shape == (21, 300)
    for row in (0, 7, 8, 15, 16, 20):
        for column in range(row % 8, 300, 11):
            expected = _value(weight, row, column)
            # three roundings of float32, each of a part that is at most as large as scale * code or the offset
            assert values[row, column] == pytest.approx(expected, rel=2**-21, abs=2**-19 * (1 + abs(expected)))


@pytest.mark.parametrize("seed", [SEED])
def test_values_are_rounded_no_more_than_the_formula_needs(seed: int):
    exact = random_weight(LAYOUTS["q8_0"], 16, 64, generator(seed))
    for row in range(16):
        assert float(dequantize(exact)[row, 40]) == _value(exact, row, 40)  # 11 bits times 8: no rounding at all


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "awq", "q5_0", "dense"])
def test_fused_weights_are_their_parts(name: str, seed: int):
    g = generator(seed)
    if name == "dense":
        first, second, third = (DenseWeight(torch.randn(n, 70, generator=g)) for n in (16, 48, 20))
        up = DenseWeight(torch.randn(48, 70, generator=g))
    else:
        first, second, third = (random_weight(LAYOUTS[name], n, 300, g) for n in (16, 48, 20))
        up = random_weight(LAYOUTS[name], 48, 300, g)
    parts = [dequantize(weight) for weight in (first, second, third)]
    fused = fuse_rows([first, second, third])
    assert fused.rows == 84
    assert torch.equal(dequantize(fused), torch.cat(parts))
    gated = fuse_gated(second, up)
    assert gated.gated
    pairs = dequantize(gated).reshape(3, 2, TILE, -1)
    assert torch.equal(pairs[:, 0].flatten(0, 1), dequantize(second))
    assert torch.equal(pairs[:, 1].flatten(0, 1), dequantize(up))


@pytest.mark.parametrize("seed", [SEED])
def test_what_cannot_be_one_weight_is_told(seed: int):
    g = generator(seed)
    plain, other = (random_weight(LAYOUTS[name], 32, 128, g) for name in ("q4_0", "q5_0"))
    ordered = replace(plain, order=torch.randperm(128, generator=g))
    assert same_planes([plain, plain])
    assert same_planes([ordered, ordered])
    assert not same_planes([plain, other])
    assert not same_planes([plain, ordered])
    assert not same_planes([ordered, replace(plain, order=torch.arange(128))])
    assert not same_planes([replace(plain, rows=31), plain])
    assert same_planes([plain, replace(plain, rows=31)])
    assert not same_planes([plain, DenseWeight(torch.zeros(32, 128))])


def test_bits_per_weight_are_those_of_the_planes():
    for layout in LAYOUTS.values():
        columns = 768 if layout.name == "int8" else 1024
        weight = random_weight(layout, 16, columns, generator(1))
        stored = sum(plane.nbytes for plane in planes(weight).values())
        assert 8 * stored / (16 * columns) == pytest.approx(layout.bits_per_weight)
        assert weight.nbytes == stored


@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("name", [*LAYOUTS, "dense"])
def test_parts_of_a_matrix_have_its_values(name: str, seed: int):
    g = generator(seed)
    dense = DenseWeight(torch.randn(84, 70, generator=g))
    weight = dense if name == "dense" else random_weight(LAYOUTS[name], 84, 300, g)
    parts = list(row_parts(weight, 40 * weight.columns))
    assert [part.rows for part in parts] == [32, 32, 20]
    assert torch.equal(torch.cat([dequantize(part) for part in parts]), dequantize(weight))
    assert [part.rows for part in row_parts(weight, 1)] == [16, 16, 16, 16, 16, 4]


@pytest.mark.parametrize("op", ["matmul", "dequant_gemm", "dequantize"])
def test_plain_torch_never_dequantizes_a_whole_vocabulary(op: str, monkeypatch: pytest.MonkeyPatch):
    """On a GPU these replace a kernel that is wrong there: beside a loaded model there is little memory."""
    sizes: list[int] = []

    def recorded(weight: DenseWeight) -> torch.Tensor:
        sizes.append(weight.rows * weight.columns)
        return weight.data.float()

    monkeypatch.setattr(layouts, "dequantize", recorded)
    monkeypatch.setattr(matmul.reference, "dequantize", recorded)
    weight = DenseWeight(torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta"))
    x = torch.empty(2, 4096, dtype=torch.bfloat16, device="meta")
    if op == "matmul":
        result = matmul.reference.matmul(x, weight, None, None, None, None, torch.float32)
    elif op == "dequant_gemm":
        result = dequant_gemm.reference.dequant_gemm(x, weight, None, None, None, torch.float32)
    else:
        result = dequantizing.reference.dequantize(weight, torch.bfloat16, out=torch.empty_like(weight.data))
    assert result.shape == ((128256, 4096) if op == "dequantize" else (2, 128256))
    assert sum(sizes) == weight.data.numel()
    assert max(sizes) <= PART_WEIGHTS
