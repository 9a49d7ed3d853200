"""Pairs of a query and a document become the tokens that a reranker was trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgelm.backends.llama.api import start_backend
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import RequestError
from edgelm.text.pairs import PairEncoder
from tests.tiny import end_as_begin, write_tiny
from tests.tiny_bert import tiny_bert, write_bert

QWEN = "<|im_start|>user\n<Query>: {query}\n<Document>: {document}<|im_end|>\nsaid"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> LlamaTokenizer:
    start_backend()
    return LlamaTokenizer.from_file(
        write_bert(tiny_bert(ranks=True), tmp_path_factory.mktemp("bert") / "m.gguf", "rank")
    )


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> LlamaTokenizer:
    start_backend()
    path = tmp_path_factory.mktemp("decoder") / "m.gguf"
    return LlamaTokenizer.from_file(write_tiny(path, control=("<|im_start|>", "<|im_end|>")))


def texts(tokenizer: LlamaTokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.text_of(token) for token in ids]


def test_bert_reads_both_texts_between_its_special_tokens(bert: LlamaTokenizer) -> None:
    ids = PairEncoder(bert, None, bert.pair_separator).encode("the cat", "a dog 🙂", 100, truncate=False)
    words = ["[CLS]", "▁the", "▁cat", "[SEP]", "▁a", "▁dog", "[UNK]", "[SEP]"]
    assert texts(bert, ids) == words


def test_a_token_that_begins_and_ends_a_text_stands_where_the_vocabulary_puts_it(tmp_path: Path) -> None:
    tokenizer = LlamaTokenizer.from_file(end_as_begin(write_tiny(tmp_path / "m.gguf")))
    ids = PairEncoder(tokenizer, None, ()).encode("the cat", "a dog", 100, truncate=False)
    assert texts(tokenizer, ids) == ["▁the", "▁cat", "</s>", "▁a", "▁dog", "</s>"]


def test_a_template_is_encoded_as_one_text_between_its_special_tokens(decoder: LlamaTokenizer) -> None:
    ids = PairEncoder(decoder, QWEN, ()).encode("the cat", "a dog", 100, truncate=False)
    whole = QWEN.replace("{query}", "the cat").replace("{document}", "a dog")
    assert ids == decoder.encode(whole, special=True, bos=False), "the template has all tokens around the texts"


def test_a_text_never_becomes_a_special_token(decoder: LlamaTokenizer) -> None:
    pairs = PairEncoder(decoder, QWEN, ())
    end = decoder.encode("<|im_end|>", special=True, bos=False)[-1]
    assert pairs.encode("{document}<|im_end|>", "<|im_end|> {query}", 400, truncate=False).count(end) == 1


def test_only_the_document_is_cut(bert: LlamaTokenizer, decoder: LlamaTokenizer) -> None:
    for tokenizer, template in ((bert, None), (decoder, QWEN)):
        pairs = PairEncoder(tokenizer, template, ())
        whole = pairs.encode("the cat", "a dog " * 100, 10_000, truncate=False)
        cut = pairs.encode("the cat", "a dog " * 100, 100, truncate=True)
        assert len(cut) == 100
        assert cut[-1:] == whole[-1:]  # what follows the document stays
        with pytest.raises(RequestError, match="truncate"):
            pairs.encode("the cat", "a dog " * 100, 100, truncate=False)
        with pytest.raises(RequestError, match="query alone"):
            pairs.encode("the cat " * 100, "a dog", 100, truncate=True)
