"""Quantized folders of every format load as the numbers that the format defines."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgelm.base.errors import ModelError
from edgelm.kernels.grouped import grouped_matmul
from edgelm.kernels.layout import PackedWeight, dequantize
from edgelm.models.loading.sources import FolderSource, dequantize_in_order
from tests.counts import Count
from tests.models.loading.packers import Codes, awq, folder, gptq, named, pack_quantized

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgelm.models.loading.packed.SLICE_WEIGHTS", 16 * 200)


class Sample:
    """A random quantized matrix, and what it stands for by the plain formula."""

    def __init__(
        self, seed: int, rows: int, columns: int, group: int, bits: int = 4, dtype: torch.dtype = torch.float16
    ) -> None:
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.group = columns if group == -1 else group
        groups = -(-columns // self.group)
        self.codes: Codes = rng.integers(0, 2**bits, (rows, columns))
        self.zeros: Codes = rng.integers(0, 2**bits, (rows, groups))
        self.scales = torch.from_numpy(rng.standard_normal((rows, groups))).to(dtype)
        self.groups: Codes = np.arange(columns) // self.group

    def values(self) -> Tensor:
        less = torch.from_numpy(self.codes - self.zeros[:, self.groups]).float()
        return self.scales.float()[:, torch.from_numpy(self.groups)] * less


def one(tensors: dict[str, Tensor], quantization: dict[str, Any] | None, **source: Any) -> FolderSource:
    with tempfile.TemporaryDirectory() as path:
        return folder(Path(path), named("a", tensors), quantization, **source)


def packed(source: FolderSource, name: str = "a.weight") -> PackedWeight:
    weight = source.matrix(name)
    assert isinstance(weight, PackedWeight)
    assert (weight.rows, weight.columns) == source.shape(name)
    return weight


def assert_rows_can_be_chosen(source: FolderSource, values: Tensor, seed: int) -> None:
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    for rows in (slice(3, -5), slice(8, 40), slice(0, None, 2), order):
        assert torch.equal(dequantize_in_order(source.matrix("a.weight", rows=rows)), values[rows])


@settings(max_examples=Count(test=15, soak=300))
@given(SEEDS, st.integers(1, 9), st.integers(1, 5), st.sampled_from((32, 64, 128, -1)))
def test_awq(seed: int, eighths: int, groups: int, group: int) -> None:
    sample = Sample(seed, 8 * eighths, 40 if group == -1 else groups * group, group)
    source = one(awq(sample.codes, sample.scales, sample.zeros), AWQ | {"group_size": group})
    assert list(source.names) == ["a.weight"]
    weight = packed(source)
    assert torch.equal(dequantize(weight), sample.values())
    assert torch.equal(source.vector("a.weight"), sample.values())
    assert_rows_can_be_chosen(source, sample.values(), seed)
    if group == 128:
        assert weight.layout.bits_per_weight == 4 + 24 / 128


@settings(max_examples=Count(test=20, soak=400))
@given(SEEDS, st.integers(1, 9), st.integers(1, 5), st.sampled_from((32, 128, -1)), st.booleans(), st.booleans())
def test_gptq(seed: int, eighths: int, groups: int, group: int, first_format: bool, act_order: bool) -> None:
    sample = Sample(seed, 8 * eighths, 40 if group == -1 else groups * group, group)
    if act_order:
        sample.rng.shuffle(sample.groups)
    tensors = gptq(sample.codes, sample.scales, sample.zeros, sample.groups, first_format=first_format)
    kind = "gptq" if first_format else "gptq_v2"
    source = one(tensors, GPTQ | {"group_size": group, "checkpoint_format": kind})
    weight = packed(source)
    assert torch.equal(dequantize_in_order(weight), sample.values())
    if weight.order is not None:
        assert torch.equal(dequantize(weight), sample.values()[:, weight.order])
    assert (weight.order is None) == bool((np.diff(sample.groups) >= 0).all())
    assert_rows_can_be_chosen(source, sample.values(), seed)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("first_format", [True, False])
def test_symmetric_gptq_keeps_no_zero_points(bits: int, first_format: bool) -> None:
    sample = Sample(1, 40, 96, 32, bits)
    sample.zeros[:] = 1 << (bits - 1)
    tensors = gptq(sample.codes, sample.scales, sample.zeros, sample.groups, bits, first_format=first_format)
    config = GPTQ | {"sym": True, "bits": bits, "checkpoint_format": "gptq" if first_format else "gptq_v2"}
    weight = packed(one(tensors, config))
    assert torch.equal(dequantize(weight), sample.values())
    assert weight.layout.bits_per_weight == bits + 0.5


def test_gptq_of_8_bits_with_zero_points() -> None:
    sample = Sample(2, 20, 64, 32, 8)
    source = one(gptq(sample.codes, sample.scales, sample.zeros, sample.groups, 8), GPTQ | {"bits": 8})
    assert torch.equal(dequantize(packed(source)), sample.values())


CT_GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": False}}}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": CT_GROUPS}


@settings(max_examples=Count(test=20, soak=400))
@given(
    SEEDS,
    st.integers(1, 45),
    st.integers(1, 5),
    st.sampled_from((32, 128, -1)),
    st.sampled_from((4, 8)),
    st.booleans(),
    st.sampled_from((torch.float16, torch.bfloat16)),
)
def test_packed_compressed_tensors(
    seed: int, rows: int, groups: int, group: int, bits: int, symmetric: bool, dtype: torch.dtype
) -> None:
    """Columns of channel-wise ones are no whole words."""
    sample = Sample(seed, rows, 75 if group == -1 else groups * group, group, bits, dtype)
    if symmetric:
        sample.zeros[:] = 1 << (bits - 1)
    source = one(pack_quantized(sample.codes, sample.scales, None if symmetric else sample.zeros, bits), CT)
    assert torch.equal(dequantize(packed(source)), sample.values())
    assert_rows_can_be_chosen(source, sample.values(), seed)


def test_compressed_tensors_with_act_order() -> None:
    sample = Sample(5, 24, 128, 32)
    sample.rng.shuffle(sample.groups)
    tensors = pack_quantized(sample.codes, sample.scales, sample.zeros)
    source = one(tensors | {"weight_g_idx": torch.from_numpy(sample.groups)}, CT)
    weight = packed(source)
    assert weight.order is not None
    assert torch.equal(dequantize_in_order(weight), sample.values())


def test_zero_points_that_are_not_packed() -> None:
    sample = Sample(6, 20, 64, 32)
    zeros = torch.from_numpy(sample.zeros - 8).to(torch.int8)
    source = one(pack_quantized(sample.codes, sample.scales) | {"weight_zero_point": zeros}, CT)
    assert torch.equal(dequantize(packed(source)), sample.values())


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("part", "shape", "block"),
    [
        ("weight_scale", (), (300, 200)),
        ("weight_scale", (1,), (300, 200)),
        ("weight_scale", (300,), (1, 200)),
        ("weight_scale", (300, 1), (1, 200)),
        ("weight_scale_inv", (3, 2), (128, 128)),
        ("weight_scale_inv", (5, 4), (64, 64)),
    ],
)
def test_fp8(part: str, shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype) -> None:
    """Every code but NaN; scales of the tensor, of rows, and of blocks whose last are cut off."""
    codes = torch.randint(0, 256, (300, 200), dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    weight = codes.view(torch.float8_e4m3fn)
    scales = torch.randn(shape).to(dtype)
    table = scales.float().reshape(*(shape if len(shape) == 2 else (-1, 1)))
    spread = table.repeat_interleave(block[0], 0)[:300].repeat_interleave(block[1], 1)[:, :200]
    config = FP8 | ({"weight_block_size": list(block)} if part.endswith("inv") else {})
    tensors = {"weight": weight, part: scales, "input_scale": torch.ones(())}
    source = one(tensors, config)
    assert list(source.names) == ["a.weight"]
    loaded = packed(source)
    assert torch.equal(dequantize(loaded), spread * weight.float())
    assert loaded.layout.code == "fp8"
    assert_rows_can_be_chosen(source, spread * weight.float(), 0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_compressed_tensors(symmetric: bool) -> None:
    weight = torch.randint(-128, 128, (50, 70), dtype=torch.int8)
    scales = torch.randn(50, 1, dtype=torch.bfloat16)
    zeros = torch.zeros(50, 1, dtype=torch.int8) if symmetric else torch.randint(-128, 128, (50, 1), dtype=torch.int8)
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "int", "symmetric": symmetric}}}
    config = CT | {"format": "int-quantized", "config_groups": groups}
    loaded = packed(one({"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}, config))
    assert torch.equal(dequantize(loaded), scales.float() * (weight.float() - zeros.float()))
    assert loaded.layout.code == ("signed" if symmetric else "unsigned")


def test_mxfp4_experts() -> None:
    """As transformers reads them; a tensor has the shape of the plain one, [experts, columns, rows]."""
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors  # a second, where tests are collected

    blocks = torch.randint(0, 256, (3, 24, 4, 16), dtype=torch.uint8)
    scales = torch.randint(90, 160, (3, 24, 4), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as path:
        tensors = {"experts.gate_blocks": blocks, "experts.gate_scales": scales}
        source = folder(Path(path), tensors, {"quant_method": "mxfp4"})
    theirs = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert list(source.names) == ["experts.gate"]
    assert source.shape("experts.gate") == theirs.shape
    weight = source.matrix("experts.gate", transposed=True)
    assert weight.num_matrices == 3
    assert torch.equal(dequantize(weight), theirs.mT)
    assert torch.equal(source.vector("experts.gate"), theirs)
    odd = source.matrix("experts.gate", transposed=True, rows=slice(1, None, 2))
    assert torch.equal(dequantize(odd), theirs.mT[:, 1::2])


def test_quantized_experts_become_one_stack() -> None:
    samples = [Sample(seed, 24, 64, 32) for seed in (1, 2, 3)]
    tensors = {}
    for i, sample in enumerate(samples):
        tensors |= named(f"e{i}", awq(sample.codes, sample.scales, sample.zeros))
    with tempfile.TemporaryDirectory() as path:
        source = folder(Path(path), tensors, AWQ)
    stack = source.stack([f"e{i}.weight" for i in range(3)])
    assert torch.equal(dequantize(stack), torch.stack([sample.values() for sample in samples]))


@pytest.mark.parametrize("shuffled", [(0, 1), (0,), (1,), ()])
def test_experts_have_their_columns_in_orders_of_their_own(shuffled: tuple[int, ...]) -> None:
    """Of a stack, the order of columns is a plane like all others: a matrix for each expert."""
    tensors, samples = {}, [Sample(i, 24, 64, 32) for i in range(2)]
    for i, sample in enumerate(samples):
        if i in shuffled:
            sample.rng.shuffle(sample.groups)
        tensors |= named(f"e{i}", gptq(sample.codes, sample.scales, sample.zeros, sample.groups))
    with tempfile.TemporaryDirectory() as path:
        source = folder(Path(path), tensors, GPTQ)
    stack = source.stack(["e0.weight", "e1.weight"])
    values = torch.stack([sample.values() for sample in samples])
    assert torch.equal(dequantize_in_order(stack), values)
    assert isinstance(stack, PackedWeight)
    assert (stack.order is None) == (not shuffled)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    experts = torch.tensor([[1], [0], [1]], dtype=torch.int32)
    expected = torch.stack([x[i] @ values[expert].T for i, expert in enumerate((1, 0, 1))])
    got = grouped_matmul(x, stack, experts, implementation="reference")
    torch.testing.assert_close(got, expected)  # as far as sums in another order agree


def test_layers_that_are_not_quantized_stay_as_they_are() -> None:
    sample = Sample(1, 16, 64, 32)
    plain = torch.randn(5, 7).half()
    tensors = named("a", awq(sample.codes, sample.scales, sample.zeros)) | {"head.weight": plain}
    with tempfile.TemporaryDirectory() as path:
        source = folder(Path(path), tensors, AWQ)
    assert sorted(source.names) == ["a.weight", "head.weight"]
    assert torch.equal(dequantize(source.matrix("head.weight")), plain.float())


# -- bad folders -------------------------------------------------------------------------------------------------------


def good(kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    sample = Sample(3, 16, 128, 32)
    if kind == "awq":
        return awq(sample.codes, sample.scales, sample.zeros), AWQ
    if kind == "gptq":
        return gptq(sample.codes, sample.scales, sample.zeros, sample.groups), GPTQ
    if kind == "packed":
        return pack_quantized(sample.codes, sample.scales, sample.zeros), CT
    weight = torch.randn(200, 128).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale_inv": torch.randn(2, 1)}, FP8 | {"weight_block_size": [128, 128]}


PARTS = {
    "awq": ("qzeros", "scales"),
    "gptq": ("qzeros", "scales"),
    "packed": ("weight_scale", "weight_shape"),
    "fp8": ("weight_scale_inv",),
}
KINDS = [(kind, part) for kind, parts in PARTS.items() for part in parts]


@pytest.mark.parametrize(("kind", "part"), KINDS)
def test_a_part_that_is_missing(kind: str, part: str) -> None:
    tensors, config = good(kind)
    del tensors[part]
    missing = "weight_scale" if kind == "fp8" else part
    with pytest.raises(ModelError, match=rf"tensor a\.{missing} is missing"):
        one(tensors, config).matrix("a.weight")


@pytest.mark.parametrize(("kind", "part"), [*KINDS, ("gptq", "g_idx"), ("packed", "weight_zero_point")])
def test_a_part_that_does_not_fit(kind: str, part: str) -> None:
    for change in (lambda t: t.repeat(2, *(1,) * (t.dim() - 1))[:-1], lambda t: t.reshape(1, *t.shape)):
        tensors, config = good(kind)
        tensors[part] = change(tensors[part]).contiguous()
        with pytest.raises(ModelError, match=r"a\.(\w+) (is|has)"):
            one(tensors, config).matrix("a.weight")


@pytest.mark.parametrize(("kind", "part"), [*KINDS, ("gptq", "g_idx"), ("packed", "weight_zero_point")])
def test_a_part_of_another_type(kind: str, part: str) -> None:
    tensors, config = good(kind)
    tensors[part] = tensors[part].double()
    with pytest.raises(ModelError, match=r"is F64, but must be \w+"):
        one(tensors, config).matrix("a.weight")


def test_groups_that_are_not_all_of_one_size() -> None:
    tensors, config = good("gptq")
    tensors["g_idx"][5] = 3
    with pytest.raises(ModelError, match=r"a\.g_idx has no groups of 32"):
        one(tensors, config).matrix("a.weight")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"bits": 4}, "method is not stated"),
        (AWQ | {"version": "gemv"}, "order gemv"),
        (AWQ | {"bits": 3}, "3 bits, but must have 4"),
        (AWQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"bits": 2}, "2 bits, but must have 4 or 8"),
        (GPTQ | {"bits": None}, "no stated number of bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "format marlin"),
        (GPTQ | {"dynamic": {"+:.*up": {"bits": 3}}}, r"3 bits, .*, in its rule for the modules \+:\.\*up"),
        (GPTQ | {"dynamic": {".*up": {"format": "marlin"}}}, r"the modules \.\*up has format = marlin"),
        (GPTQ | {"dynamic": {"(": {"bits": 8}}}, r"the modules \( has a pattern that cannot be read"),
        (GPTQ | {"dynamic": {".*up": 8}}, r"the modules \.\*up is 8"),
        (GPTQ | {"dynamic": [".*up"]}, "not in the form of GPTQModel"),
        (CT | {"format": "nvfp4-pack-quantized"}, "nvfp4"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        (CT | {"transform_config": {"config_groups": {"R1": {}}}}, "rotated"),
        (FP8 | {"weight_block_size": [128]}, "blocks of weights"),
    ],
)
def test_an_unsupported_quantization(config: dict[str, Any], match: str) -> None:
    tensors, _ = good("awq")
    with pytest.raises(ModelError, match=match):
        one(tensors, config)


def test_groups_that_no_kernel_has() -> None:
    sample = Sample(3, 16, 96, 48)
    with pytest.raises(ModelError, match="a scale for each 48 columns"):
        one(pack_quantized(sample.codes, sample.scales), CT).matrix("a.weight")


def test_a_quantized_folder_whose_config_does_not_say_so() -> None:
    with pytest.raises(ModelError, match="does not say how its weights are quantized"):
        one(good("awq")[0], None)
