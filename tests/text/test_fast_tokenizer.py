"""Tokenizers without llama.cpp: of a GGUF's fields, which agree with llama.cpp's, and of a folder's tokenizer.json."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE, WordLevel

from edgelm.build.vocabulary import tokenizer_of_folder
from edgelm.errors import ModelError, RequestError
from edgelm.executors.llama_api import start_backend
from edgelm.text.fast_tokenizer import FastTokenizer
from edgelm.text.gguf_tokenizer import gguf_tokenizer
from edgelm.text.tokenizer import LlamaTokenizer, Tokenizer
from edgelm.weights.gguf import open_gguf
from edgelm.weights.gguf_parse import Array
from tests.conftest import SHARED_DATA
from tests.tiny import write_tiny

VOCABS = SHARED_DATA / "vocab"
SEPARATOR = b"\n__ggml_vocab_test__\n"
TEXTS = ["Hello, world!  Two spaces\n\nand 12345 numbers", "Größe 😀 \u200d漢字", " leading", "", "\t\r\n x"]

every_vocab = pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"])


def fields_of(path: Path) -> dict[str, Any]:
    with open_gguf(path) as gguf:
        return {key: list(value) if isinstance(value, Array) else value for key, value in gguf.metadata.items()}


@cache
def both(name: str) -> tuple[FastTokenizer, LlamaTokenizer]:
    """Return our tokenizer and llama.cpp's of one real vocabulary."""
    path = VOCABS / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip("no ../shared/data beside this checkout")
    start_backend()
    return gguf_tokenizer(fields_of(path)), LlamaTokenizer.from_file(path)


@every_vocab
def test_a_ggufs_own_fields_give_llama_cpps_tokens(name: str) -> None:
    ours, theirs = both(name)
    texts = (VOCABS / f"ggml-vocab-{name}.gguf.inp").read_bytes().split(SEPARATOR)
    wanted = (VOCABS / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    assert len(wanted) > 40
    assert not b"".join(texts[len(wanted) :]).strip()  # the file ends with a separator
    for raw, line in zip(texts, wanted, strict=False):
        tokens = ours.encode(raw.decode(), special=False, bos=False)
        assert tokens == [int(each) for each in line.split()], raw
        assert ours.decode(tokens) == theirs.decode(tokens)


@every_vocab
def test_the_rest_of_a_vocabulary_is_llama_cpps_too(name: str) -> None:
    ours, theirs = both(name)
    assert ours.num_tokens == theirs.num_tokens
    assert (ours.bos_id, ours.eos_id, ours.stop_ids) == (theirs.bos_id, theirs.eos_id, theirs.stop_ids)
    assert [ours.piece(token) for token in range(ours.num_tokens)] == [
        theirs.piece(token) for token in range(theirs.num_tokens)
    ]
    for text in TEXTS:
        assert ours.encode(text, special=True, bos=True) == theirs.encode(text, special=True, bos=True)


@every_vocab
@settings(max_examples=60)
@given(text=st.text(max_size=40))
def test_any_text_comes_back_and_is_what_llama_cpp_makes_of_it(name: str, text: str) -> None:
    ours, theirs = both(name)
    if name == "qwen2":  # brought to NFC by ours as by the model's own tokenizer; llama.cpp leaves the text as it is
        text = unicodedata.normalize("NFC", text)
    tokens = ours.encode(text, special=False, bos=False)
    assert tokens == theirs.encode(text, special=False, bos=False)
    assert ours.decode(tokens, strip_prefix_space=True) == text


@every_vocab
def test_no_users_text_becomes_a_control_token(name: str) -> None:
    ours, _ = both(name)
    control = {token for token in range(ours.num_tokens) if not ours.piece(token)}
    assert control
    for token in sorted(control)[:50]:
        text = ours.text_of(token)
        if text:
            assert not control & set(ours.encode(f"a {text} b", special=False, bos=False)), text


def test_the_tiny_models_own_vocabulary(tmp_path: Path) -> None:
    """Runs without the shared data: the vocabulary of the tests' own model."""
    path = write_tiny(tmp_path / "tiny.gguf")
    start_backend()
    ours, theirs = gguf_tokenizer(fields_of(path)), LlamaTokenizer.from_file(path)
    for text in ["abc", "Hello é 😀", " a  b"]:
        assert ours.encode(text, special=False, bos=True) == theirs.encode(text, special=False, bos=True)
    assert ours.stop_ids == theirs.stop_ids


# -- a folder ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small byte-level tokenizer, trained here."""
    rust = RustTokenizer(BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20, "größe und länge " * 20], trainer)
    rust.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|im_end|>", special=True)])
    rust.add_tokens([AddedToken("<tool>", special=False)])
    ids = rust.get_vocab(with_added_tokens=True)
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    path = tmp_path_factory.mktemp("folder")
    rust.save(str(path / "tokenizer.json"))
    return path


def load(folder: Path, **config: Any) -> Tokenizer:
    return FastTokenizer.of_folder(
        folder / "tokenizer.json",
        config={"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}} | config,
        generation={"eos_token_id": [7, 9]},
        model={"eos_token_id": 9},
        chat_template="{{ messages }}",
    )


def test_a_folders_tokenizer(folder: Path) -> None:
    tokenizer = load(folder)
    bos = tokenizer.bos_id
    assert bos is not None
    assert tokenizer.encode("the fox", special=False, bos=True)[0] == bos
    assert tokenizer.encode("<s>the fox", special=True, bos=True).count(bos) == 1
    assert tokenizer.encode("<s>", special=False, bos=False) != [bos]
    assert tokenizer.eos_id is not None
    assert tokenizer.stop_ids == {7, 9, tokenizer.eos_id}
    assert tokenizer.special_strings == {"<s>", "<|im_end|>", "<tool>"}
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.piece(bos) == b""
    tool = tokenizer.encode("<tool>", special=False, bos=False)
    assert len(tool) == 1
    assert tokenizer.piece(tool[0]) == b"<tool>"
    with pytest.raises(IndexError):
        tokenizer.piece(tokenizer.num_tokens)


@given(text=st.text(max_size=60))
def test_a_folders_text_comes_back(folder: Path, text: str) -> None:
    tokenizer = load(folder)
    tokens = tokenizer.encode(text, special=False, bos=False)
    assert tokenizer.decode(tokens) == text
    assert b"".join(map(tokenizer.piece, tokens)) == text.encode()


def test_half_a_character_is_the_requests_fault(folder: Path) -> None:
    with pytest.raises(RequestError, match="half a character"):
        load(folder).encode("a\ud800", special=False, bos=False)


def test_rows_of_the_model_without_a_token_are_no_text(folder: Path) -> None:
    """An embedding is often padded, and a model of random weights samples such a row."""
    plain = load(folder)
    padded = FastTokenizer.of_folder(
        folder / "tokenizer.json",
        config={},
        generation={},
        model={"vocab_size": plain.num_tokens + 64},
        chat_template=None,
    )
    assert padded.num_tokens == plain.num_tokens + 64
    assert padded.piece(plain.num_tokens + 63) == b""
    assert padded.text_of(plain.num_tokens) == ""
    assert padded.decode([padded.num_tokens - 1, *plain.encode("fox", special=False, bos=False)]) == "fox"
    with pytest.raises(IndexError):
        padded.piece(padded.num_tokens)


def test_the_rows_may_be_said_of_the_text_part(folder: Path) -> None:
    assert tokenizer_of_folder(folder, {"text_config": {"vocab_size": 9000}}).num_tokens == 9000


def test_special_tokens_are_one_texts_own_affair(folder: Path) -> None:
    """Threads share one tokenizer: what one of them lets be special is not so for another."""
    tokenizer = load(folder)
    asked = [bool(i % 3) for i in range(300)]
    wanted = {special: tokenizer.encode("<s>fox<|im_end|>", special=special, bos=False) for special in (True, False)}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda special: tokenizer.encode("<s>fox<|im_end|>", special=special, bos=False), asked))
    assert wanted[True] != wanted[False]
    assert found == [wanted[special] for special in asked]


def test_a_text_that_cannot_be_written_is_the_requests_fault(tmp_path: Path) -> None:
    rust = RustTokenizer(WordLevel({"a": 0}, unk_token="?"))  # and "?" is no token: the library raises
    rust.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match="cannot write"):
        tokenizer_of_folder(tmp_path, {}).encode("b", special=False, bos=False)


def test_what_only_looks_like_a_byte_is_text(tmp_path: Path) -> None:
    rust = RustTokenizer(BPE({"<0xZZ>": 0, "<0x41>": 1, "a": 2}, []))
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_of_folder(tmp_path, {})
    assert [tokenizer.piece(token) for token in range(3)] == [b"<0xZZ>", b"A", b"a"]


def llama_3_like() -> RustTokenizer:
    rust = RustTokenizer(BPE(ignore_merges=True))
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+|."), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(["the quick brown fox größe 12345 " * 20], trainer)
    rust.add_special_tokens([AddedToken(each, special=True) for each in ("<s>", "</s>", "<|eot_id|>")])
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", rust.token_to_id("<s>"))])
    rust.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return rust


def gemma_like() -> RustTokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefghijklmnopqrstuvwxyz"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("o", "x"), ("f", "ox")]
    tokens += ["".join(pair) for pair in merges]
    ids = {token: index for index, token in enumerate(tokens)}
    rust = RustTokenizer(BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    rust.normalizer = normalizers.Replace(" ", "\u2581")
    rust.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ("<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>")
    rust.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    rust.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("two words", normalized=True)])
    rust.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False)])
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return rust


@pytest.mark.parametrize("make", [llama_3_like, gemma_like])
def test_a_folders_tokens_are_those_of_transformers(make: Callable[[], RustTokenizer], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), tokenizer_of_folder(tmp_path, {})
    texts = [*TEXTS, "the fox", "x  <tool>  y", "two words", "a <|eot_id|> b", "a<end_of_turn>\n\nb", "größe 12345's"]
    for text in texts:
        for around in (True, False):
            tokens = ours.encode(text, special=True, bos=around)
            assert tokens == theirs.encode(text, add_special_tokens=around), text
            wanted = theirs.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(tokens) == wanted, text


def test_a_bug_of_the_library_is_one_line(tmp_path: Path) -> None:
    """A post-processor that names a token it does not have: the library panics, below Exception."""
    rust = json.loads(gemma_like().to_str())
    rust["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rust))
    with pytest.raises(ModelError, match="damaged"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}', "[1]", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="UTF-8"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "no vocabulary"),
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "needs llama.cpp"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "new"}, "split"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.0]},
            "score",
        ),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", 3]}, "no strings"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["x y"]}, "damaged"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        gguf_tokenizer(fields)


def test_the_text_of_a_vocabulary_is_a_tokenizer_json(tmp_path: Path) -> None:
    ours = gguf_tokenizer(fields_of(write_tiny(tmp_path / "tiny.gguf")))
    path = tmp_path / "tokenizer.json"
    path.write_text(ours.source)
    assert json.loads(ours.source)["model"]["type"] == "BPE"
    again = FastTokenizer.of_folder(path, config={}, generation={}, model={}, chat_template=None)
    assert again.encode("Hello", special=False, bos=False) == ours.encode("Hello", special=False, bos=False)
