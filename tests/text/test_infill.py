"""Prompts for the middle of a file: what is kept of too much, and where other files stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import RequestError
from edgelm.text.encoding import TextEncoder
from edgelm.text.fim import fim_tokens, infill_tokens
from tests.tiny import write_tiny

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
FILES = ("<|repo_name|>", "<|file_sep|>")


def encoder(folder: Path, *control: str) -> TextEncoder:
    return TextEncoder(LlamaTokenizer.from_file(write_tiny(folder / "m.gguf", control=control, vocab_only=True)))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return encoder(tmp_path_factory.mktemp("fim"), *FIM, *FILES)


def shown(texts: TextEncoder, ids: list[int]) -> str:
    tokenizer = texts.tokenizer
    return b"".join(tokenizer.piece(token) or tokenizer.text_of(token).encode() for token in ids).decode()


def test_without_other_files_it_is_the_plain_prompt(texts: TextEncoder) -> None:
    plain = [token for piece in fim_tokens(texts, "the day ", " and so") for token in piece]
    assert infill_tokens(texts, "the day ", " and so", [], 1000) == plain


def test_other_files_stand_before_under_their_names(texts: TextEncoder) -> None:
    ids = infill_tokens(texts, "the", "so", [("/etc/a", "one"), ("b", "two<|file_sep|>")], 1000)
    text = shown(texts, ids)
    first, second = FILES
    begin, repository, rest = text.partition(first)
    assert begin == "<s>"
    assert repository
    name, *files = rest.split(second)
    assert name.strip() == "myproject"
    assert "/etc/a" in files[0]
    assert "one" in files[0]
    marks = [token for token in ids if shown(texts, [token]) == second]
    assert len(marks) == 3, "one for each file and for the one that is filled in; that of a text is text"
    assert text.index(second) < text.index(FIM[0]) < text.index(FIM[1]) < text.index(FIM[2])


def test_of_files_the_last_are_kept_whole(texts: TextEncoder) -> None:
    plain = len(infill_tokens(texts, "the", "so", [], 1000))
    files = [("a", "hello " * 200), ("b", "hello"), ("c", "world")]
    text = shown(texts, infill_tokens(texts, "the", "so", files, plain + 80))
    assert "world" in text
    assert text.count("hello") == 1
    assert infill_tokens(texts, "the", "so", files, plain) == infill_tokens(texts, "the", "so", [], 1000)


def test_a_long_name_is_not_read(texts: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    encode = texts.plain
    monkeypatch.setattr(texts, "plain", lambda text: lengths.append(len(text)) or encode(text))
    files = [("a" * 100_000, "hello"), ("b", "world")]
    text = shown(texts, infill_tokens(texts, "the", "so", files, 200))
    assert "world" in text
    assert max(lengths) < 100_000


@pytest.mark.parametrize(("prefix", "suffix"), [(500, 500), (500, 3), (3, 500), (500, 0)])
def test_the_cursors_surroundings_are_kept(texts: TextEncoder, prefix: int, suffix: int) -> None:
    room = 120
    ids = infill_tokens(texts, "far " * prefix + "near", "next" + " away" * suffix, [("a", "x")], room)
    assert room - 8 <= len(ids) <= room
    text = shown(texts, ids)
    assert "near<|fim_suffix|>" in text
    assert text.partition(FIM[1])[2].strip().startswith("next")


def test_a_vocabulary_without_marks_of_files_gets_snippets(tmp_path: Path) -> None:
    texts = encoder(tmp_path, *FIM)
    assert "--- snippet ---\n\nhello" in shown(texts, infill_tokens(texts, "the", "so", [("a", "hello")], 1000))


def test_a_model_without_marks_refuses(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no tokens for filling in"):
        infill_tokens(encoder(tmp_path), "the", "so", [], 1000)
