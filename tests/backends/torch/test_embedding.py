"""Vectors of our own kernels equal those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edgelm.backends.model import open_model
from edgelm.backends.torch import embedding
from edgelm.backends.torch.build import load_decoder
from edgelm.backends.torch.embedding import USABLE, TorchEmbedder
from edgelm.base.config import Settings
from edgelm.base.errors import EngineError
from edgelm.engine.core import Pooling
from tests.models.tiny_models import VOCAB, build, write

F32 = 1e-4


@pytest.mark.parametrize(("name", "pooling"), [("qwen3", "mean"), ("llama2", "last"), ("gemma3", "mean")])
def test_vectors_are_those_of_transformers(name: str, pooling: Pooling, tmp_path: Path) -> None:
    model = build(name)
    with open_model(write(model, tmp_path / "model")) as opened:
        decoder = load_decoder(opened, Settings(), "cpu", 256)
    embedder = TorchEmbedder(decoder, pooling, 256)
    rng = np.random.default_rng(1)
    inputs = [rng.integers(3, VOCAB, length).tolist() for length in (1, 37, 2, 256, 16)]
    with torch.no_grad():
        states = [model.model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in inputs]
    expected = np.stack([rows.mean(0) if pooling == "mean" else rows[-1] for rows in states])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    for piece in (13, 512):
        batch = embedder.begin(inputs)
        while batch.step(piece):
            pass
        vectors = batch.vectors()
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        assert np.abs(vectors - expected).max() < F32
    embedder.close()


def test_a_folder_of_sentence_transformers_says_how_its_vectors_are_made(tmp_path: Path) -> None:
    folder = write(build("llama2"), tmp_path / "model")
    with open_model(folder) as opened:
        assert (opened.facts.summary.kind, opened.facts.summary.pooling) == ("text", "mean")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}'
    )
    with open_model(folder) as opened:
        assert (opened.facts.summary.kind, opened.facts.summary.pooling) == ("embedding", "last")
        assert opened.torch_problem() == ""
    (folder / "2_Dense").mkdir()
    with open_model(folder) as opened:
        assert "Dense" in opened.torch_problem()


def test_the_states_of_recurrent_layers_need_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model(write(build("qwen3_5"), tmp_path / "model")) as opened:
        decoder = load_decoder(opened, Settings(), "cpu", 256)
    allocated = TorchEmbedder(decoder, "last", 256)
    allocated.begin([[3, 4, 5]])
    nbytes = sum(plane.nbytes for cache in allocated._caches for plane in cache.planes.values())
    embedder = TorchEmbedder(decoder, "last", 256)
    monkeypatch.setattr(embedding, "available_memory_bytes", lambda: int(0.99 * nbytes / USABLE))
    with pytest.raises(EngineError, match="GiB of memory"):
        embedder.begin([[3, 4, 5]])
    monkeypatch.setattr(embedding, "available_memory_bytes", lambda: int(1.01 * nbytes / USABLE))
    embedder.begin([[3, 4, 5]])
