"""The KV cache: its layout as documented, rounding in every format, allocating and reading blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, Tensor

from edgelm.kernels.cache import BLOCK_LEN, FORMATS, KVFormat, LayerCache, allocate, order, quantize, read
from edgelm.kernels.cache.quantize import CodeKind, decode, encode, rotate
from edgelm.kernels.write_kv import write_kv
from tests.counts import Count

HEAD_DIMS = (8, 16, 40, 64, 80, 96, 128, 256)
KINDS: tuple[CodeKind, ...] = ("int8", "fp8", "int6", "int4")
HALF_ULP = 2.0**-11  # of a float16: the largest relative error of a scale


def filled(kv_format: KVFormat, keys: Tensor, values: Tensor, blocks: Tensor, num_blocks: int) -> LayerCache:
    """Return a cache with keys and values [tokens, num_kv_heads, head_dim] in `blocks`."""
    tokens, num_kv_heads, head_dim = keys.shape
    cache = allocate(kv_format, num_blocks, num_kv_heads, head_dim, "cpu")
    at = torch.arange(tokens)
    slots = blocks[at // BLOCK_LEN] * BLOCK_LEN + at % BLOCK_LEN
    write_kv(keys, keys, values, at.int(), slots, cache, rope=None, implementation="reference")
    return cache


# -- layout: each place computed from the formulas of the docstring, one dimension at a time ---------------------------


@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
def test_rows_of_key_bytes_are_as_documented(width: int, generator: Generator):
    codes = torch.randint(0, 256, (width,), dtype=torch.uint8, generator=generator)
    row = order.pack_key_bytes(codes)
    span = 2 if width // 32 % 2 == 0 else 1
    for d in range(width):
        g, lm, element = d // 32, d % 32 // 8, d % 8
        assert row[((g // span * 4 + lm) * span + g % span) * 8 + element] == codes[d]
    assert torch.equal(order.unpack_key_bytes(row), codes)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
def test_rows_of_key_words_are_as_documented(width: int, generator: Generator):
    codes = torch.randint(0, 64, (3, width), dtype=torch.uint8, generator=generator)
    low, high = order.pack_key_words(codes)
    groups = width // 32
    pairs = (groups + 1) // 2
    assert low.shape == (3, 4 * groups)
    assert high.shape == (3, 4 * pairs)
    span = next(size for size in (4, 2, 1) if groups % size == 0)
    high_span = next(size for size in (4, 2, 1) if pairs % size == 0)
    for d in range(width):
        g, lm, slot, h = d // 32, d % 32 // 8, d % 8 // 2, d % 2
        word = low[:, (g // span * 4 + lm) * span + g % span]
        nibble = (word >> (4 * slot + 16 * h)) & 15
        pair, e = g // 2, g % 2
        word = high[:, (pair // high_span * 4 + lm) * high_span + pair % high_span]
        top = (word >> (2 * (slot + 4 * e) + 16 * h)) & 3
        assert torch.equal(nibble + 16 * top, codes[:, d].int())
    assert torch.equal(order.unpack_key_words(low, high), codes)


def test_columns_of_tokens_are_as_documented():
    for t in range(BLOCK_LEN):
        kk, jb, lm, h = t // 16, t // 8 % 2, t // 2 % 4, t % 2
        offset = torch.tensor(t)
        assert order.token_column(offset, nibbles=False) == 8 * lm + 4 * kk + 2 * jb + h
        assert order.token_column(offset, nibbles=True) == 8 * lm + 4 * kk + 2 * h + jb


def test_values_of_4_bits_lie_as_documented(generator: Generator):
    """Check the slots 2 * jb + rb of words, as a reader unpacks them; a writer counts bytes."""
    values = torch.randn(BLOCK_LEN, 2, 64, generator=generator)
    cache = filled(FORMATS["k8v4"], values, values, torch.tensor([1]), 2)
    codes, scales = encode(values, "int4")
    assert cache.value_scales is not None
    assert torch.equal(cache.value_scales[1], scales.permute(1, 2, 0))
    for t in range(BLOCK_LEN):
        kk, jb, lm, h = t // 16, t // 8 % 2, t // 2 % 4, t % 2
        for d in range(64):
            i, rb, l4 = d // 16, d // 8 % 2, d % 8
            word = cache.values[1, :, i, l4, 2 * lm + kk]
            assert torch.equal((word >> (4 * (2 * jb + rb) + 16 * h)) & 15, codes[t, :, d].int())


def test_values_of_bytes_and_floats_lie_as_documented(generator: Generator):
    values = torch.randn(BLOCK_LEN, 2, 32, generator=generator)
    columns = [8 * (t // 2 % 4) + 4 * (t // 16) + 2 * (t // 8 % 2) + t % 2 for t in range(BLOCK_LEN)]
    floats = filled(FORMATS["f16"], values, values, torch.tensor([0]), 1)
    assert torch.equal(floats.keys[0], values.half().transpose(0, 1))
    assert torch.equal(floats.values[0][..., columns], values.half().permute(1, 2, 0))
    codes, _ = encode(values, "int8")
    integers = filled(FORMATS["int8"], values, values, torch.tensor([0]), 1)
    assert torch.equal(integers.values[0][..., columns], codes.permute(1, 2, 0))


# -- rounding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 3000.0])
def test_no_value_is_further_off_than_its_scale_allows(kind: CodeKind, size: float, generator: Generator):
    x = torch.randn(2000, 64, generator=generator) * size
    x[:, 7] *= 20
    codes, scales = encode(x, kind)
    error = (decode(codes, scales, kind) - x).abs().reshape(2000, scales.shape[-1], -1)
    scale = scales.float()[..., None]
    largest = x.abs().reshape(error.shape).amax(-1, keepdim=True)
    # 2**-25 is half of the step between subnormal scales; codes reach up to 127, 32, 8 and 448
    reach = {"int8": 127, "fp8": 448, "int6": 32, "int4": 8}[kind]
    off = largest * HALF_ULP + reach * 2.0**-25
    if kind == "fp8":
        half_step = torch.maximum(x.abs().reshape(error.shape) * 2.0**-4, scale * 2.0**-10)
    else:
        # on the side without the extreme, the last half step has no code
        far = (x.reshape(error.shape) / scale > reach - 1) & (kind != "int8")
        half_step = torch.where(far, scale, scale / 2).abs()
    assert (error <= half_step * (1 + 2.0**-10) + off).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_value_is_nearly_kept_and_zeros_are_zeros(kind: CodeKind):
    x = torch.zeros(4, 32)
    x[0, 5], x[1, 6], x[2, 7], x[2, 8] = 3.0, -3.0, 2.0, -2.0
    values = decode(*encode(x, kind), kind)
    assert (values[0, 5] - 3).abs() <= 3 * HALF_ULP
    assert (values[1, 6] + 3).abs() <= 3 * HALF_ULP
    assert (values[2, 7] - 2).abs() <= 2 * HALF_ULP
    assert torch.equal(values[x == 0], torch.zeros_like(values[x == 0]))


@pytest.mark.parametrize("kind", KINDS)
def test_values_too_small_for_a_scale_are_zeros(kind: CodeKind):
    values = decode(*encode(torch.full((1, 32), 1e-9), kind), kind)
    assert torch.equal(values, torch.zeros(1, 32))


def test_ties_round_to_the_even_code():
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, *[0.0] * 26])
    codes, scales = encode(x, "int8")
    assert scales.item() == 1
    assert codes.view(torch.int8)[:6].tolist() == [127, 0, 2, 2, 0, -2]
    x = torch.tensor([-8.0, 0.5, 1.5, 2.5, 7.6, -0.5, *[0.0] * 26])
    codes, scales = encode(x, "int4")
    assert scales.item() == 1
    assert codes[:6].tolist() == [0, 8, 10, 10, 15, 8]


def test_e4m3_is_read_by_integers_as_documented():
    codes = torch.arange(256)
    codes = codes[(codes & 127) != 127]
    bits = ((codes & 127) << 7) | ((codes & 128) << 8)
    values = torch.where(bits >= 2**15, bits - 2**16, bits).to(torch.int16).view(torch.float16).float() * 256
    assert torch.equal(values, codes.to(torch.uint8).view(torch.float8_e4m3fn).float())


def test_hadamard_is_its_own_inverse_and_keeps_products(generator: Generator):
    index = torch.arange(32)
    ones = torch.tensor([int(common).bit_count() for common in (index[:, None] & index).flatten()]).view(32, 32)
    matrix = torch.where(ones % 2 == 1, -1.0, 1.0) * 32**-0.5
    q, k = torch.randn(2, 500, 96, generator=generator)
    expected = (k.double().reshape(500, 3, 32) @ matrix.double()).reshape(500, 96)
    # five additions and a factor are rounded, of sums up to sqrt(32) times the result
    limit = 6 * 2.0**-24 * k.reshape(500, 3, 32).norm(dim=-1).max()
    assert (rotate(k) - expected).abs().max() <= limit
    assert (rotate(rotate(k)) - k).abs().max() <= 2 * limit * 2
    assert torch.equal(matrix, matrix.T)
    assert (matrix.double() @ matrix.double() - torch.eye(32)).abs().max() <= 2.0**-22
    products = (rotate(q) * rotate(k)).double().sum(-1)
    assert (products - (q * k).double().sum(-1)).abs().max() <= q.norm(dim=-1).max() * k.norm(dim=-1).max() * 2.0**-20


def outlier_heavy(tokens: int, heads: int, head_dim: int, generator: Generator) -> Tensor:
    """Return keys in which 4 channels of each head are about 10 times as large as the others, as in trained models."""
    keys = torch.randn(tokens, heads, head_dim, generator=generator)
    channels = torch.rand(heads, head_dim, generator=generator).argsort(-1)[:, :4]
    return keys * torch.ones(heads, head_dim).scatter(1, channels, 10.0)


def relative_rmse(stored: Tensor, exact: Tensor) -> float:
    return ((stored - exact).square().mean() / exact.square().mean()).sqrt().item()


def test_errors_and_bytes_of_each_format(generator: Generator):
    """Print the table that docs quote: one layer of Llama-8B; errors are relative to the root mean square."""
    tokens, heads, dim = Count(test=256, soak=512), 8, 128
    gaussian = torch.randn(tokens, heads, dim, generator=generator)
    heavy = outlier_heavy(tokens, heads, dim, generator)
    q = torch.randn(64, heads, dim, generator=generator)
    exact = torch.einsum("qhd,thd->hqt", q, heavy)
    rows = {}
    for name, kv_format in FORMATS.items():
        blocks = torch.arange(tokens // BLOCK_LEN)
        keys, values = read(filled(kv_format, gaussian, gaussian, blocks, len(blocks)), blocks, tokens)
        heavy_keys, heavy_values = read(filled(kv_format, heavy, heavy, blocks, len(blocks)), blocks, tokens)
        rows[name] = (
            kv_format.bytes_per_token(heads, dim),
            relative_rmse(keys, gaussian),
            relative_rmse(heavy_keys, heavy),
            relative_rmse(torch.einsum("qhd,thd->hqt", q, heavy_keys), exact),
            relative_rmse(values, gaussian),
            relative_rmse(heavy_values, heavy),
        )
    print("\nformat  bytes/token  K gauss  K heavy   logits  V gauss  V heavy")
    for name, (size, *errors) in rows.items():
        print(f"{name:6}  {size:11d}  " + "  ".join(f"{error:7.5f}" for error in errors))
    assert [row[0] for row in rows.values()] == [4096, 2176, 2080, 1664, 1408]
    # uniform noise has step / sqrt(12); the largest of 32 is 2.07 +- 0.4 (mean square 4.6) standard deviations
    for name, column, steps in (("int8", 1, 127), ("k8v4", 1, 127), ("k6v4", 1, 32), ("k8v4", 4, 8), ("k6v4", 4, 8)):
        expected = (4.6**0.5 / steps) / 12**0.5
        assert 0.8 * expected < rows[name][column] < 1.2 * expected, (name, column)
    assert rows["fp8"][1] < 2.0**-4 / 3**0.5  # relative to each value, at most
    assert rows["f16"][1] < 2.0**-11


def test_rotation_is_what_keeps_6_bits_of_outlier_heavy_keys(generator: Generator):
    heavy = outlier_heavy(256, 4, 128, generator)
    plain = relative_rmse(decode(*encode(heavy, "int6"), "int6"), heavy)
    rotated = rotate(heavy)
    rotated = rotate(decode(*encode(rotated, "int6"), "int6"))
    assert relative_rmse(rotated, heavy) < plain / 1.5


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_planes_have_the_promised_size_and_start_as_zeros(name: str, head_dim: int):
    cache = allocate(FORMATS[name], 3, 2, head_dim, "cpu")
    size = sum(plane.numel() * plane.element_size() for plane in cache.planes.values())
    assert size == 3 * BLOCK_LEN * FORMATS[name].bytes_per_token(2, head_dim)
    assert all(plane.shape[:2] == (3, 2) and plane.is_contiguous() for plane in cache.planes.values())
    keys, values = read(cache, torch.tensor([2, 0]), 40)
    assert torch.equal(keys, torch.zeros(40, 2, head_dim))
    assert torch.equal(values, torch.zeros(40, 2, head_dim))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_is_what_was_stored_rounded(name: str, head_dim: int, generator: Generator):
    kv_format = FORMATS[name]
    keys, values = torch.randn(2, 70, 3, head_dim, generator=generator)
    blocks = torch.tensor([4, 0, 2])
    read_keys, read_values = read(filled(kv_format, keys, values, blocks, 5), blocks, 70)
    for kind, exact, stored in ((kv_format.key, keys, read_keys), (kv_format.value, values, read_values)):
        padded = torch.nn.functional.pad(exact, (0, kv_format.width(head_dim) - head_dim))
        if kv_format.rotated:
            padded = rotate(padded)
        rounded = padded.half().float() if kind is None else decode(*encode(padded, kind), kind)
        if kv_format.rotated:
            rounded = rotate(rounded)
        assert torch.equal(stored, rounded[..., :head_dim])


def test_groups_of_a_head():
    assert quantize.num_groups(96, "int8") == 3
    assert quantize.num_groups(96, "fp8") == 1
