"""Texts with very many special strings: their tokens, and the time they take."""

from __future__ import annotations

import time

import pytest

from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.jobs.prompts import prompt_ids
from edgelm.jobs.request import ContextError
from edgelm.text.encoding import TextEncoder
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LlamaTokenizer:
    return LlamaTokenizer.from_file(write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf"))


@pytest.mark.parametrize("special", [True, False])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(tokenizer: LlamaTokenizer, special: bool) -> None:
    for text in ("", "once upon", "</s> a\n" * 1000, "x" + "</s></s>the day" * 1000):
        pieces = list(TextEncoder(tokenizer).prompt(text, special=special))
        assert [token for piece in pieces for token in piece] == tokenizer.encode(text, special=special, bos=True)
        assert len(pieces) == 1 or special


def test_a_prompt_that_is_too_long_is_refused_before_it_is_encoded(tokenizer: LlamaTokenizer) -> None:
    pieces = TextEncoder(tokenizer).prompt("</s>" * 200_000, special=True)
    began = time.process_time()
    with pytest.raises(ContextError, match="more than 512 tokens"):
        prompt_ids(pieces, 512)
    assert time.process_time() - began < 10  # in one piece: minutes
    assert next(pieces, None), "the rest is not encoded"
