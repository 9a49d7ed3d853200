"""Vectors and scores of llama.cpp equal those of transformers, for encoders and for decoders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, PoolingType
from numpy.typing import NDArray

from edgelm.backends.llama import embedding
from edgelm.backends.llama.embedding import EmbedderOptions, LlamaEmbedder
from edgelm.backends.llama.memory import LlamaMemory
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.errors import EngineError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import kind_and_pooling, model_facts
from edgelm.engine.core import Pooling
from tests.models.tiny_gguf import write_gguf
from tests.models.tiny_models import VOCAB, build
from tests.tiny_bert import CONTEXT, VOCABULARY, tiny_bert, write_bert

F32 = 1e-4
LENGTHS = (1, 2, 17, CONTEXT)  # the last is longer than the first context, and than llama.cpp's usual micro-batch


def random_ids(length: int, vocabulary: int, first: int) -> list[int]:
    return np.random.default_rng(length).integers(first, vocabulary, length).tolist()


def unit(vectors: NDArray[Any]) -> NDArray[Any]:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def hidden_states(model: Any, ids: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].numpy()


def open_embedder(path: Path, pooling: Pooling, context: int) -> LlamaEmbedder:
    with open_gguf(path) as gguf:
        facts = model_facts(gguf)
    memory = LlamaMemory(facts, sequences=1)
    return LlamaEmbedder(LlamaModel(path), memory, EmbedderOptions(pooling=pooling, context=context))


def vectors_of(embedder: LlamaEmbedder, inputs: list[list[int]], piece: int = 48) -> NDArray[np.float32]:
    batch = embedder.begin(inputs)
    while batch.step(piece):
        pass
    return batch.vectors()


@pytest.fixture(params=["mean", "cls"])
def bert(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, str, LlamaEmbedder]]:
    pooling: Literal["mean", "cls"] = request.param
    model = tiny_bert()
    path = write_bert(model, tmp_path / "bert.gguf", pooling)
    with open_gguf(path) as gguf:
        assert kind_and_pooling(gguf) == ("embedding", pooling)
    embedder = open_embedder(path, pooling, CONTEXT)
    yield model, pooling, embedder
    embedder.close()


def test_vectors_of_bert_are_those_of_transformers(bert: tuple[Any, str, LlamaEmbedder]) -> None:
    model, pooling, embedder = bert
    inputs = [random_ids(length, len(VOCABULARY), 5) for length in LENGTHS]
    hidden = [hidden_states(model, ids) for ids in inputs]
    expected = np.stack([states.mean(0) if pooling == "mean" else states[0] for states in hidden])
    alone = np.concatenate([vectors_of(embedder, [ids]) for ids in inputs])
    assert np.abs(unit(alone) - unit(expected)).max() < F32
    together = vectors_of(embedder, inputs)
    assert np.abs(unit(together) - unit(expected)).max() < F32


def test_scores_of_a_ranking_bert_are_those_of_transformers(tmp_path: Path) -> None:
    model = tiny_bert(ranks=True)
    embedder = open_embedder(write_bert(model, tmp_path / "rank.gguf", "rank"), "rank", CONTEXT)
    inputs = [random_ids(length, len(VOCABULARY), 5) for length in LENGTHS]
    with torch.no_grad():
        expected = np.array([model(torch.tensor([ids])).logits[0, 0].item() for ids in inputs])
    scores = vectors_of(embedder, inputs)
    embedder.close()
    assert scores.shape == (len(inputs), 1)
    assert scores[:, 0] == pytest.approx(expected, abs=2e-3)  # of logits of some units; llama.cpp's GELU is a table


@pytest.mark.parametrize("name", ["llama2", "qwen2"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_of_a_decoder_are_those_of_transformers(name: str, pooling: Pooling, tmp_path: Path) -> None:
    changes = {"use_sliding_window": False} if name == "qwen2" else {}
    model = build(name, max_position_embeddings=1024, **changes)
    embedder = open_embedder(write_gguf(model, tmp_path / "model.gguf"), pooling, 1024)
    inputs = [random_ids(length, VOCAB, 3) for length in (700, 1, 17, 2)]
    expected = [hidden_states(model.model, ids) for ids in inputs]
    pooled = np.stack([states.mean(0) if pooling == "mean" else states[-1] for states in expected])
    for piece in (7, 512):
        assert np.abs(unit(vectors_of(embedder, inputs, piece)) - unit(pooled)).max() < F32
    embedder.close()


def test_scores_of_a_ranking_decoder_are_those_of_its_classifier(tmp_path: Path) -> None:
    model = build("qwen3", max_position_embeddings=1024)
    classifier = torch.randn((2, model.config.hidden_size), generator=torch.Generator().manual_seed(3)) / 4

    def add(writer: GGUFWriter) -> None:
        writer.add_pooling_type(PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"])
        writer.add_tensor("cls.output.weight", classifier.numpy())

    path = write_gguf(model, tmp_path / "rank.gguf", add=add)
    with open_gguf(path) as gguf:
        assert kind_and_pooling(gguf) == ("rerank", "rank")
    embedder = open_embedder(path, "rank", 1024)
    inputs = [random_ids(length, VOCAB, 3) for length in (700, 1, 17)]
    last = torch.from_numpy(np.stack([hidden_states(model.model, ids)[-1] for ids in inputs]))
    expected = torch.softmax(last @ classifier.T, 1).numpy()
    for piece in (9, 512):
        assert np.abs(vectors_of(embedder, inputs, piece) - expected).max() < F32
    embedder.close()


def test_a_batch_that_needs_too_much_memory_is_refused_and_the_next_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = open_embedder(write_bert(tiny_bert(), tmp_path / "bert.gguf"), "mean", CONTEXT)
    free = embedder._memory.embedding_bytes(512, 512, flash=False, cached=False) / embedding.USABLE + 1
    monkeypatch.setattr(embedding, "available_memory_bytes", lambda: free)
    with pytest.raises(EngineError, match="GiB of memory"):
        embedder.begin([random_ids(CONTEXT, len(VOCABULARY), 5)])
    assert vectors_of(embedder, [[5, 6]]).shape == (1, 64)
    embedder.close()
