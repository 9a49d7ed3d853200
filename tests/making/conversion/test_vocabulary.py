"""The vocabulary of a converted folder: llama.cpp splits texts as the folder's own tokenizer does."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter, TokenType
from tokenizers import Tokenizer as RustTokenizer

from edgelm.backends.llama.api import start_backend
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import ModelError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.making.conversion.tokenizer_files import read_tokenizer_files, tokenizer_paths
from edgelm.making.conversion.vocabulary import Vocabulary, read_vocabulary, write_vocabulary_keys
from tests.counts import Count
from tests.making.conversion.folders import TEMPLATE, VOCAB, pieces_file, write_letters, write_pieces
from tests.real_data import data_file, with_vocabulary
from tests.real_data import vocabulary as vocabulary_file
from tests.text.gguf_tokenizer import gguf_tokenizer

TEXTS = Count(test=60, soak=3000)
ALPHABET = (
    "abc the hello world She said once 123456 \n\t' 's 'LL don't é \u017f … 你好 あ 🚀 Ж हिन्दी "
    "_-/=+.,!?<|im_end|><tool> "
)
NUM_REAL = Count(test=1, soak=5)  # large vocabularies take seconds
REAL = {"llama-spm": "llama", "gpt-2": "gpt2", "phi-3": "llama", "llama-bpe": "gpt2", "qwen2": "gpt2"}


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ALPHABET.split(" ")
    return ["", " ", "\n", *(_text(rng, words) for _ in range(TEXTS))]


def _text(rng: random.Random, words: list[str]) -> str:
    return "".join(rng.choice([*words, *ALPHABET, " ", "  "]) for _ in range(rng.randint(1, 25)))


def write_vocabulary(vocabulary: Vocabulary, path: Path, name: str = "") -> Path:
    """Write a GGUF that holds nothing but a vocabulary."""
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    write_vocabulary_keys(writer, vocabulary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_tokenizer(folder: Path, num_rows: int = VOCAB) -> LlamaTokenizer:
    """Return llama.cpp's tokenizer for a folder."""
    start_backend()
    vocabulary = read_vocabulary(read_tokenizer_files(folder), num_rows)
    return LlamaTokenizer.from_file(write_vocabulary(vocabulary, folder / "vocabulary.gguf"))


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "qwen35", "gpt-4o", "tekken", "pieces", "gemma"])
def test_texts_are_split_as_by_the_folders_tokenizer(kind: str, tmp_path: Path) -> None:
    if kind in ("pieces", "gemma"):
        write_pieces(tmp_path, gemma=kind == "gemma")
    else:
        write_letters(tmp_path, kind)
    own = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = llama_tokenizer(tmp_path)
    for text in texts(seed=3):
        assert tokenizer.encode(text, special=True, bos=True) == own.encode(text).ids, text


def test_keys_of_a_byte_level_vocabulary(tmp_path: Path) -> None:
    write_letters(tmp_path, "llama-bpe")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    tokenizer = llama_tokenizer(tmp_path)
    keys = {name: field.contents() for name, field in GGUFReader(tmp_path / "vocabulary.gguf").fields.items()}
    tokens = keys["tokenizer.ggml.tokens"]
    assert keys["tokenizer.ggml.pre"] == "llama-bpe"
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.add_eos_token"] is False
    assert tokens[keys["tokenizer.ggml.bos_token_id"]] == "<|begin|>"
    assert tokens[keys["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert keys["tokenizer.ggml.eot_token_id"] == 3  # llama.cpp would not know it by its text
    assert {3, 4} <= tokenizer.stop_ids
    assert keys["tokenizer.chat_template"] == TEMPLATE
    types = keys["tokenizer.ggml.token_type"]
    assert types[tokens.index("<tool>")] == TokenType.USER_DEFINED
    assert types[tokens.index("<|im_start|>")] == TokenType.CONTROL
    assert len(tokens) == VOCAB
    assert (tokens[-1], types[-1]) == (f"[PAD{VOCAB - 1}]", TokenType.UNUSED)


def test_a_tokenizer_model_has_the_scores(tmp_path: Path) -> None:
    rows = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    rows += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    rows += [
        ("\u2581", -9.0, 1),
        ("a", -8.0, 1),
        ("b", -7.0, 1),
        ("ab", -1.5, 1),
        ("\u2581ab", -2.5, 1),
        ("ba", -1.0, 1),
    ]
    (tmp_path / "tokenizer.model").write_bytes(pieces_file(rows))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("own")
    vocabulary = read_vocabulary(read_tokenizer_files(tmp_path), len(rows))
    assert list(zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)) == rows
    assert vocabulary.special.ids == {"bos": 1, "eos": 2}
    assert vocabulary.adds_space is True
    assert vocabulary.templates == {"default": "own"}
    ids = {text: token for token, (text, *_) in enumerate(rows)}
    tokenizer = llama_tokenizer(tmp_path, len(rows))
    assert tokenizer.encode("abab", special=False, bos=True) == [1, ids["\u2581"], ids["a"], ids["ba"], ids["b"]]


def test_several_templates_keep_their_names(tmp_path: Path) -> None:
    write_pieces(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    llama_tokenizer(tmp_path)
    keys = {name: field.contents() for name, field in GGUFReader(tmp_path / "vocabulary.gguf").fields.items()}
    assert keys["tokenizer.chat_template"] == "d"
    assert keys["tokenizer.chat_template.tool_use"] == "t"
    assert keys["tokenizer.chat_templates"] == ["tool_use"]


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    write_pieces(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("own")
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "rag.jinja").write_text("r")
    (extra / "._rag.jinja").write_bytes(b"\0\5\x16\7\xff")  # of macOS
    assert read_tokenizer_files(tmp_path).templates == {"default": "own", "rag": "r"}
    assert [path.name for path in tokenizer_paths(tmp_path) if path.parent == extra] == ["rag.jinja"]


@pytest.mark.parametrize("name", with_vocabulary(REAL)[:NUM_REAL])
def test_real_vocabularies(name: str, tmp_path: Path) -> None:
    """A tokenizer.json of a vocabulary that llama.cpp's converter made becomes that vocabulary again."""
    start_backend()
    original = vocabulary_file(name)
    with open_gguf(original) as gguf:
        keys = dict(gguf.metadata)
        tokens = list(keys["tokenizer.ggml.tokens"])
        own = gguf_tokenizer(keys)
    (tmp_path / "tokenizer.json").write_text(own.source, encoding="utf-8")
    vocabulary = read_vocabulary(read_tokenizer_files(tmp_path), len(tokens))
    assert vocabulary.model == REAL[name]
    assert vocabulary.pre == keys["tokenizer.ggml.pre"]
    assert list(vocabulary.tokens) == tokens
    path = write_vocabulary(vocabulary, tmp_path / "vocabulary.gguf", str(keys.get("general.name", "")))
    tokenizer, reference = LlamaTokenizer.from_file(path), LlamaTokenizer.from_file(original)
    samples = (
        data_file(f"vocab/ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    )
    for text in [*samples, *texts(seed=5)]:
        ids = tokenizer.encode(text, special=False, bos=False)
        assert ids == reference.encode(text, special=False, bos=False) == own.encode(text, special=False, bos=False), (
            text
        )


def broken(document: dict[str, Any], folder: Path) -> str:
    """Return the error for a folder with this tokenizer.json."""
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ModelError) as caught:
        read_vocabulary(read_tokenizer_files(folder), VOCAB)
    return str(caught.value)


def test_damaged_and_unknown_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        read_tokenizer_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_tokenizer_files(tmp_path)
    write_letters(tmp_path, "qwen2")
    good = json.loads((tmp_path / "tokenizer.json").read_text())
    model = good["model"]
    assert "no vocabulary" in broken(good | {"model": model | {"vocab": {}}}, tmp_path)
    assert "two tokens have one id" in broken(good | {"model": model | {"vocab": {"a": 1, "b": 1}}}, tmp_path)
    assert "the id of a token" in broken(good | {"model": model | {"vocab": {"a": "x"}}}, tmp_path)
    assert "a merge is not a pair" in broken(good | {"model": model | {"merges": [["a"]]}}, tmp_path)
    assert "added token" in broken(good | {"added_tokens": [{"id": 5}]}, tmp_path)
    assert "pre_tokenizer has no steps" in broken(good | {"pre_tokenizer": {"type": "Sequence"}}, tmp_path)
    rule = {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated"}
    steps = {"type": "Sequence", "pretokenizers": [rule, good["pre_tokenizer"]["pretokenizers"][-1]]}
    assert "splits texts by a rule that llama.cpp does not have (x+)" in broken(
        good | {"pre_tokenizer": steps}, tmp_path
    )
    large = {**model["vocab"], "more": VOCAB}
    assert f"has a token {VOCAB}" in broken(good | {"model": model | {"vocab": large}}, tmp_path)
    words = {"type": "WordPiece", "vocab": {"a": 0}}
    plain = good | {"model": words, "pre_tokenizer": None, "decoder": None, "normalizer": None}
    assert "its pieces have another mark" in broken(plain, tmp_path)


def test_a_damaged_tokenizer_model_is_refused(tmp_path: Path) -> None:
    data = pieces_file([("<unk>", 0.0, 2), ("a", -1.0, 1)])
    for cut in range(1, len(data)):
        (tmp_path / "tokenizer.model").write_bytes(data[:cut])
        with suppress(ModelError):  # a shorter file may be a whole one too
            assert read_vocabulary(read_tokenizer_files(tmp_path), 2).tokens
    (tmp_path / "tokenizer.model").write_bytes(pieces_file([("a", -1.0, 1)], model_type=1))
    with pytest.raises(ModelError, match="no BPE model"):
        read_vocabulary(read_tokenizer_files(tmp_path), 2)
