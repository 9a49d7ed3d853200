"""Weights loaded through a source equal the numbers that the file's own library reads."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
import safetensors.torch
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from edgelm.base.errors import ModelError
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.kernels.layout import DenseWeight, Layout, PackedWeight, dequantize, fuse_gated, fuse_rows, planes
from edgelm.models.loading.packed import Parts, pack
from edgelm.models.loading.sources import FolderSource, GGUFSource
from edgelm.models.loading.stored import BLOCK_TYPES
from tests.counts import Count

PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


def write_gguf(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> GGUF:
    """Write tensors of random bytes, of these types and (row-major) shapes; scales may be anything but NaN."""
    rng = np.random.default_rng()
    writer = library.GGUFWriter(path, "llama")
    for name, (kind, shape) in tensors.items():
        if kind in PLAIN:
            writer.add_tensor(name, rng.standard_normal(shape).astype(PLAIN[kind]))
            continue
        block_len, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        raw = rng.integers(0, 120, (*shape[:-1], shape[-1] // block_len * nbytes), np.uint8)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


def assert_equal(got: Tensor, expected: NDArray[Any]) -> None:
    np.testing.assert_array_equal(got.numpy(), expected.astype(np.float32), strict=True)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F16", "BF16", "F32"])
def test_a_matrix_of_a_gguf(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgelm.models.loading.packed.SLICE_WEIGHTS", 16 * 512)  # so that 39 rows come in three slices
    with write_gguf(tmp_path / "a.gguf", {"a": (kind, (39, 512))}) as gguf:
        source = GGUFSource(gguf)
        assert (list(source.names), source.shape("a")) == (["a"], (39, 512))
        weight = source.matrix("a")
        expected = gguf.dequantized("a")
        assert_equal(dequantize(weight), expected)
        assert_equal(source.vector("a"), expected)
        assert_equal(dequantize(source.matrix("a", rows=slice(3, 37))), expected[3:37])
        order = torch.randperm(39)
        assert_equal(dequantize(source.matrix("a", rows=order)), expected[order.numpy()])
        if isinstance(weight, PackedWeight):
            padded = 48 * 512
            assert weight.nbytes * 8 == padded * weight.layout.bits_per_weight
        else:
            assert weight.data.element_size() == (4 if kind == "F32" else 2)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q6_K", "MXFP4", "F16"])
def test_experts_of_a_gguf(tmp_path: Path, kind: str) -> None:
    with write_gguf(tmp_path / "a.gguf", {"a": (kind, (3, 40, 256)), "b": (kind, (40, 256))}) as gguf:
        source = GGUFSource(gguf)
        experts = source.matrix("a")
        assert experts.num_matrices == 3
        assert_equal(dequantize(experts), gguf.dequantized("a"))
        odd = source.matrix("a", rows=slice(1, None, 2))
        assert_equal(dequantize(odd), gguf.dequantized("a")[:, 1::2])
        both = source.stack(["b", "b"])
        assert both.num_matrices == 2
        assert_equal(dequantize(both), np.stack([gguf.dequantized("b")] * 2))


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "BF16"])
def test_loaded_weights_can_be_fused(tmp_path: Path, kind: str) -> None:
    """As the decoder does for q, k, v and for gate, up."""
    with write_gguf(tmp_path / "a.gguf", dict.fromkeys("abc", (kind, (32, 256)))) as gguf:
        source = GGUFSource(gguf)
        a, b, c = (source.matrix(name) for name in "abc")
        values = [gguf.dequantized(name) for name in "abc"]
        assert_equal(dequantize(fuse_rows([a, b, c])), np.concatenate(values))
        tiles = np.stack([value.reshape(2, 16, 256) for value in values[:2]], 1)
        assert_equal(dequantize(fuse_gated(a, b)), tiles.reshape(64, 256))


def test_odd_widths_are_padded(tmp_path: Path) -> None:
    """A row of 32 columns is half a chunk, and its padding dequantizes to zero."""
    with write_gguf(tmp_path / "a.gguf", {"a": ("Q8_0", (5, 32)), "b": ("Q4_0", (17, 96))}) as gguf:
        source = GGUFSource(gguf)
        for name in "ab":
            assert_equal(dequantize(source.matrix(name)), gguf.dequantized(name))


def test_tensors_that_are_not_matrices(tmp_path: Path) -> None:
    with write_gguf(tmp_path / "a.gguf", {"a": ("F32", (7,)), "b": ("F16", (2, 3, 2, 4))}) as gguf:
        source = GGUFSource(gguf)
        assert_equal(source.vector("a"), gguf.dequantized("a"))
        assert_equal(source.vector("b"), gguf.dequantized("b"))
        for name in "ab":
            with pytest.raises(ModelError, match="not a matrix"):
                source.matrix(name)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ2_XXS", "IQ3_S", "TQ1_0", "IQ1_S"])
def test_fewer_than_four_bits_are_refused_before_anything_is_loaded(tmp_path: Path, kind: str) -> None:
    gguf = write_gguf(tmp_path / "a.gguf", {"a": ("F32", (4, 4)), "b.weight": (kind, (16, 256))})
    with gguf, pytest.raises(ModelError, match=rf"b\.weight is {kind}.*llama"):
        GGUFSource(gguf)


def test_missing_tensors_and_rows(tmp_path: Path) -> None:
    with write_gguf(
        tmp_path / "a.gguf", {"a": ("Q4_0", (16, 64)), "b": ("Q8_0", (16, 64)), "c": ("Q4_0", (8, 64))}
    ) as g:
        source = GGUFSource(g)
        for ask in (source.matrix, source.vector, source.shape):
            with pytest.raises(ModelError, match="tensor z is missing"):
                ask("z")
        with pytest.raises(ModelError, match="has 16 rows, so it has no row 16"):
            source.matrix("a", rows=torch.tensor([1, 16]))
        with pytest.raises(ModelError, match="transposed"):
            source.matrix("a", transposed=True)
        for other in "bc":
            with pytest.raises(ModelError, match="differ in shape or quantization"):
                source.stack(["a", other])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_plain_matrices_of_a_folder(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a.weight": torch.randn(37, 100).to(dtype),
        "b.weight": torch.randn(3, 20, 24).to(dtype),
        "n.weight": torch.randn(11).to(dtype),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with open_safetensors(tmp_path) as model:
        source = FolderSource(model, {})
        for name in ("a.weight", "b.weight"):
            weight = source.matrix(name)
            assert isinstance(weight, DenseWeight)
            assert weight.data.dtype == dtype
            assert torch.equal(weight.data, tensors[name])
            turned = source.matrix(name, transposed=True)
            assert torch.equal(dequantize(turned), tensors[name].float().mT)
            assert torch.equal(
                dequantize(source.matrix(name, rows=slice(0, None, 2))), tensors[name].float()[..., ::2, :]
            )
        assert torch.equal(source.vector("n.weight"), tensors["n.weight"].float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_gets_the_same_planes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its pinned buffers, which are filled again while the copies from them may still run."""
    monkeypatch.setattr("edgelm.models.loading.packed.SLICE_WEIGHTS", 16 * 4096)
    with write_gguf(tmp_path / "a.gguf", {kind: (kind, (1000, 4096)) for kind in (*BLOCK_TYPES, "BF16")}) as gguf:
        source = GGUFSource(gguf)
        for name in source.names:
            there, here = source.matrix(name, "cuda"), source.matrix(name)
            assert torch.equal(dequantize(there).cpu(), dequantize(here))
            if isinstance(here, PackedWeight):
                assert isinstance(there, PackedWeight)
                for kind, plane in planes(here).items():
                    assert torch.equal(planes(there)[kind].cpu(), plane)


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    seen: list[int] = []
    kinds = {"a": ("Q4_K", (40, 256)), "b": ("F32", (9, 9)), "c": ("Q8_0", (2, 8, 32)), "n": ("F32", (5,))}
    with write_gguf(tmp_path / "a.gguf", kinds) as gguf:
        source = GGUFSource(gguf, progress=seen.append)
        for name in "abc":
            source.matrix(name)
        source.vector("n")
        assert seen == sorted(seen)
        assert seen[-1] == source.total_bytes


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_mapped_pages_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The parts that were read are no longer memory of this process, even while the rest is read."""
    monkeypatch.setattr("edgelm.models.loading.packed.SLICE_WEIGHTS", 2**20)
    mapped: list[int] = []
    rows = 2048 if kind == "F32" else 4096
    with write_gguf(tmp_path / "a.gguf", {"warm": (kind, (16, 4096)), "a": (kind, (rows, 4096))}) as gguf:
        half = gguf.tensors["a"].nbytes // 2
        source = GGUFSource(gguf, progress=lambda _: mapped.append(mapped_bytes()))
        source.matrix("warm")
        before = mapped_bytes()
        source.matrix("a")
        assert max(mapped) - before < half  # not 0: the system maps the pages around each read
        source.matrix("a", rows=torch.randperm(rows))  # random rows: the pages are released at the end
        assert mapped_bytes() - before < half


def mapped_bytes() -> int:
    """Return the bytes of mapped files, including libraries, that are memory of this process."""
    statm = Path("/proc/self/statm")
    if not statm.exists() or not hasattr(mmap, "MADV_DONTNEED"):
        pytest.skip("this system does not list mapped files")
    return int(statm.read_text().split()[2]) * mmap.PAGESIZE


LAYOUTS = st.builds(
    lambda bits, group, offset, scale: Layout(
        "any", bits, group, scale, offset=offset, zero=0 if offset == "zero" else 5
    ),
    st.sampled_from((4, 5, 6, 8)),
    st.sampled_from((16, 32, 64, 128, 192)),
    st.sampled_from(("none", "min", "zero")),
    st.sampled_from(("f16", "bf16", "f32")),
)


@settings(max_examples=Count(test=40, soak=2000))
@given(LAYOUTS, st.integers(1, 40), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_packing_changes_no_number(layout: Layout, rows: int, columns: int, seed: int) -> None:
    """The formula over unpacked codes and scales, in the same order of operations, gives the same bits."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // layout.group)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[layout.scale]
    codes = torch.randint(0, 2**layout.bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.randn(rows, groups, generator=generator).to(dtype)
    offsets = {
        "none": None,
        "min": torch.randn(rows, groups, generator=generator).to(dtype),
        "zero": torch.randint(0, 256, (rows, groups), generator=generator, dtype=torch.uint8),
    }[layout.offset]
    group = torch.arange(columns) // layout.group
    expected = codes.float() - layout.zero
    if layout.offset == "zero":
        assert offsets is not None
        expected = expected - offsets.float()[:, group]
    expected = scales.float()[:, group] * expected
    if layout.offset == "min":
        assert offsets is not None
        expected = expected + offsets.float()[:, group]
    weight = pack(layout, Parts(codes, scales, offsets))
    assert torch.equal(dequantize(weight), expected)
