"""The random model has the requested types, and weights of a size that keeps logits in range."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFReader
from gguf.quants import dequantize

from edgelm.backends.llama.random_gguf import ALL_QUANTS, NUM_TOKENS, random_matrix, write_random_gguf


@pytest.mark.parametrize("kind", ALL_QUANTS, ids=lambda kind: kind.name)
def test_weights_are_about_as_large_as_trained_ones(kind: Quant) -> None:
    rows, columns = 64, 512
    data = random_matrix(np.random.default_rng(0), kind, rows, columns)
    weights = dequantize(data, kind).reshape(rows, columns)
    assert np.isfinite(weights).all()
    assert 0.25 < weights.std() * columns**0.5 < 4
    assert abs(weights.mean()) < weights.std()
    assert len(np.unique(weights.round(6), axis=0)) > 1


def test_a_large_matrix_is_tiled_but_whole() -> None:
    data = random_matrix(np.random.default_rng(0), Quant.Q8_0, 2048, 2048)
    assert data.shape == (2048, 2048 // 32 * 34)
    assert data.any(axis=1).all()


def test_types_are_taken_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    quants = [Quant.Q4_0, Quant.F16, Quant.Q6_K]
    write_random_gguf(path, layers=3, width=256, ffn=512, kv_heads=2, quants=quants)
    tensors = GGUFReader(path).tensors
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    assert len(matrices) == 1 + 3 * 7 + 1
    assert [tensor.tensor_type for tensor in matrices] == (quants * 8)[: len(matrices)]
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in matrices}  # [columns, rows]
    assert shapes["token_embd.weight"] == (256, NUM_TOKENS)
    assert shapes["blk.2.attn_k.weight"] == (256, 128)
    assert shapes["blk.0.ffn_down.weight"] == (512, 256)
