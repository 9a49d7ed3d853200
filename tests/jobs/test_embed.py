"""Inputs become tokens and vectors: what is refused, what is cut, and whose token ids they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgelm.backends.build import build
from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.errors import EngineError, RequestError
from edgelm.base.workers.messages import EngineJob
from edgelm.engine.core import SamplingParams
from edgelm.jobs.embed import Embeddings
from edgelm.jobs.embed_request import EmbedRequest, RankRequest
from edgelm.jobs.request import ContextError
from tests.tiny import EOS, end_as_begin, write_tiny
from tests.tiny_bert import CONTEXT, tiny_bert, write_bert

SETTINGS = Settings(ctx=512, threads=1)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    loaded = build(
        EngineJob(
            model=write_bert(tiny_bert(), tmp_path_factory.mktemp("bert") / "bert.gguf"), settings=Settings(threads=1)
        )
    )
    yield loaded
    loaded.engine.close()


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    loaded = build(
        EngineJob(model=write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", endless=True), settings=SETTINGS)
    )
    yield loaded
    loaded.engine.close()


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    path = write_bert(tiny_bert(ranks=True), tmp_path_factory.mktemp("rank") / "rank.gguf", "rank")
    loaded = build(EngineJob(model=path, settings=Settings(threads=1)))
    yield loaded
    loaded.engine.close()


async def test_300_texts_at_once_have_the_vectors_of_each_alone(bert: LoadedModel) -> None:
    embeddings = Embeddings(bert)
    texts = [f"the cat {number} sat on a mat 日本 é 🙂" for number in range(300)]
    result = await embeddings.embed(EmbedRequest(inputs=texts))
    assert result.vectors.shape == (300, 64)
    assert np.linalg.norm(result.vectors, axis=1) == pytest.approx(np.ones(300), abs=1e-5)
    for index in (0, 150, 299):
        alone = await embeddings.embed(EmbedRequest(inputs=[texts[index]]))
        assert np.abs(alone.vectors[0] - result.vectors[index]).max() < 1e-5
        assert alone.num_tokens == [result.num_tokens[index]]


async def test_dimensions_are_cut_and_normalized_again(bert: LoadedModel) -> None:
    embeddings = Embeddings(bert)
    whole = (await embeddings.embed(EmbedRequest(inputs=["the cat"], normalize=False))).vectors[0]
    assert np.linalg.norm(whole) != pytest.approx(1, abs=0.01)
    cut = (await embeddings.embed(EmbedRequest(inputs=["the cat"], dimensions=7))).vectors[0]
    assert cut == pytest.approx(whole[:7] / np.linalg.norm(whole[:7]), abs=1e-6)
    with pytest.raises(RequestError, match=r"dimensions is 65.*64"):
        await embeddings.embed(EmbedRequest(inputs=["the cat"], dimensions=65))


async def test_a_cut_text_keeps_a_last_token_that_is_the_bos_too(tmp_path: Path) -> None:
    loaded = build(EngineJob(model=end_as_begin(write_tiny(tmp_path / "tiny.gguf")), settings=SETTINGS))
    try:
        embeddings = Embeddings(loaded)
        ids = loaded.tokenizer.encode("the cat sat on a mat", special=False, bos=False)[:4]
        cut, expected = [
            (await embeddings.embed(request)).vectors[0]
            for request in (
                EmbedRequest(inputs=["the cat sat on a mat"], truncate=True, max_tokens=5),
                EmbedRequest(inputs=[[*ids, EOS]]),
            )
        ]
        assert cut == pytest.approx(expected, abs=1e-5)
    finally:
        loaded.engine.close()


async def test_a_long_text_is_refused_or_cut_before_its_last_token(bert: LoadedModel) -> None:
    embeddings = Embeddings(bert)
    full = "cat " * (CONTEXT - 2)
    result = await embeddings.embed(EmbedRequest(inputs=[full]))
    assert result.num_tokens == [CONTEXT]
    with pytest.raises(ContextError, match=f"input 1 has {CONTEXT + 1}"):
        await embeddings.embed(EmbedRequest(inputs=["cat", full + "dog"]))
    cut = await embeddings.embed(EmbedRequest(inputs=[full + "dog", "dog " * 10**6], truncate=True))
    assert cut.num_tokens == [CONTEXT, CONTEXT]
    assert np.abs(cut.vectors[0] - result.vectors[0]).max() < 1e-5
    short = await embeddings.embed(EmbedRequest(inputs=["the cat sat"], truncate=True, max_tokens=4))
    assert np.abs(short.vectors - (await embeddings.embed(EmbedRequest(inputs=["the cat"]))).vectors).max() < 1e-5


@pytest.mark.parametrize("value", ["", [], "\ud800"])
async def test_an_input_without_content_is_refused(bert: LoadedModel, value: str | list[int]) -> None:
    with pytest.raises(RequestError, match=r"empty|half a character"):
        await Embeddings(bert).embed(EmbedRequest(inputs=[value]))


async def test_own_token_ids_are_the_text_and_foreign_ones_are_refused(writer: LoadedModel) -> None:
    embeddings = Embeddings(writer)
    text = "once upon there was a little girl and a big dog, 日本 she said"
    ids = writer.tokenizer.encode(text, special=False, bos=True)
    by_ids = await embeddings.embed(EmbedRequest(inputs=[ids]))
    by_text = await embeddings.embed(EmbedRequest(inputs=[text]))
    assert np.abs(by_ids.vectors - by_text.vectors).max() < 1e-5
    await embeddings.embed(EmbedRequest(inputs=[ids * 3]))
    foreign = np.random.default_rng(5).integers(3, writer.tokenizer.num_tokens, 40).tolist()
    for wrong in (foreign, [len(ids), 10**6], [-1]):
        with pytest.raises(RequestError, match="check_embedding_ctx_length=False"):
            await embeddings.embed(EmbedRequest(inputs=[wrong]))


async def test_a_model_of_text_answers_and_embeds_at_the_same_time(writer: LoadedModel) -> None:
    embeddings = Embeddings(writer)
    expected = (await embeddings.embed(EmbedRequest(inputs=["hello world"]))).vectors
    prompt = writer.tokenizer.encode("once upon", special=False, bos=True)
    params = SamplingParams(temperature=0, max_tokens=64)

    async def answer() -> list[int]:
        return [sample.id async for event in writer.engine.submit(prompt, params) for sample in event.sampled]

    alone = await answer()
    texts = ["hello world"] * 20
    answers, result = await asyncio.gather(
        asyncio.gather(*(answer() for _ in range(4))), embeddings.embed(EmbedRequest(inputs=texts))
    )
    assert [len(tokens) for tokens in answers] == [64] * 4
    assert alone[:1] == answers[0][:1]
    assert np.abs(result.vectors - expected).max() < 1e-5


async def test_a_cancelled_request_leaves_the_engine_free(bert: LoadedModel) -> None:
    embeddings = Embeddings(bert)
    task = asyncio.create_task(embeddings.embed(EmbedRequest(inputs=["cat " * 600] * 200)))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(60):
        await embeddings.embed(EmbedRequest(inputs=["dog"]))
    assert bert.engine.num_requests == 0


async def test_every_kind_of_model_says_what_it_does_not_do(
    bert: LoadedModel, writer: LoadedModel, ranker: LoadedModel
) -> None:
    rank = RankRequest(query="the cat", documents=["a dog", "the cat"])
    with pytest.raises(RequestError, match="computes embeddings and ranks no documents; take a reranker"):
        await Embeddings(bert).rank(rank)
    with pytest.raises(RequestError, match="writes text and ranks no documents"):
        await Embeddings(writer).rank(rank)
    with pytest.raises(RequestError, match="ranks documents and computes no embeddings"):
        await Embeddings(ranker).embed(EmbedRequest(inputs=["the cat"]))
    for encoder in (bert, ranker):
        with pytest.raises(RequestError, match="writes no text; take a model for chats"):
            encoder.require("text")
    ranked = await Embeddings(ranker).rank(rank)
    assert ranked.num_tokens == [7, 7]
    assert ranked.scores == pytest.approx([1 / (1 + np.exp(-score)) for score in ranked.raw_scores])


async def test_a_closed_engine_fails_open_requests(tmp_path: Path) -> None:
    loaded = build(EngineJob(model=write_bert(tiny_bert(), tmp_path / "bert.gguf"), settings=Settings(threads=1)))
    task = asyncio.create_task(Embeddings(loaded).embed(EmbedRequest(inputs=["cat " * 600] * 200)))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(loaded.engine.stop)
    with pytest.raises(EngineError, match="closed"):
        await task
    loaded.engine.close()
