"""The tokenizer of a folder's tokenizer.json, which has llama.cpp's ids where it is made of a GGUF's vocabulary."""

from __future__ import annotations

import contextlib
import json
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE, WordLevel

from edgelm.backends.llama.api import start_backend
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.backends.torch.build import tokenizer_of_folder
from edgelm.base.errors import ModelError, RequestError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.gguf_parse import Array
from edgelm.text.byte_letters import BYTE_LETTERS
from edgelm.text.calls.format import HARMONY_MARKS
from edgelm.text.chat import render_chat
from edgelm.text.chat_tokens import encode_rendered
from edgelm.text.fast_tokenizer import FastTokenizer
from edgelm.text.template import ChatTemplate
from edgelm.text.tokenizer import Tokenizer
from tests.real_data import data_file, vocabulary, with_vocabulary
from tests.text.gguf_tokenizer import gguf_tokenizer
from tests.text.test_tokenizer import finish, start_gguf
from tests.tiny import write_tiny

SEPARATOR = b"\n__ggml_vocab_test__\n"
TEXTS = ["Hello, world!  Two spaces\n\nand 12345 numbers", "Größe 😀 \u200d漢字", " leading", "", "\t\r\n x"]

every_vocab = pytest.mark.parametrize("name", with_vocabulary(["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"]))


def fields_of(path: Path) -> dict[str, Any]:
    with open_gguf(path) as gguf:
        return {key: list(value) if isinstance(value, Array) else value for key, value in gguf.metadata.items()}


@cache
def both(name: str) -> tuple[FastTokenizer, LlamaTokenizer]:
    """Return our tokenizer and llama.cpp's for a real vocabulary."""
    path = vocabulary(name)
    start_backend()
    return gguf_tokenizer(fields_of(path)), LlamaTokenizer.from_file(path)


@every_vocab
def test_a_ggufs_own_fields_give_llama_cpps_tokens(name: str) -> None:
    ours, theirs = both(name)
    texts = data_file(f"vocab/ggml-vocab-{name}.gguf.inp").read_bytes().split(SEPARATOR)
    expected = data_file(f"vocab/ggml-vocab-{name}.gguf.out").read_text().splitlines()
    assert len(expected) > 40
    assert not b"".join(texts[len(expected) :]).strip()  # the file ends with a separator
    for raw, line in zip(texts, expected, strict=False):
        tokens = ours.encode(raw.decode(), special=False, bos=False)
        assert tokens == [int(token) for token in line.split()], raw
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
@example(text="\u2581")
def test_any_text_is_restored_and_has_llama_cpps_tokens(name: str, text: str) -> None:
    ours, theirs = both(name)
    if name == "qwen2":  # ours normalizes to NFC, as the model's own tokenizer does; llama.cpp does not
        text = unicodedata.normalize("NFC", text)
    tokens = ours.encode(text, special=False, bos=False)
    assert tokens == theirs.encode(text, special=False, bos=False)
    if name in ("llama-spm", "phi-3"):  # an SPM vocabulary spells a space as this character
        text = text.replace("\u2581", " ")
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
    """The vocabulary of the tests' own model: needs no shared data."""
    path = write_tiny(tmp_path / "tiny.gguf")
    start_backend()
    ours, theirs = gguf_tokenizer(fields_of(path)), LlamaTokenizer.from_file(path)
    for text in ["abc", "Hello é 😀", " a  b"]:
        assert ours.encode(text, special=False, bos=True) == theirs.encode(text, special=False, bos=True)
    assert ours.stop_ids == theirs.stop_ids


@pytest.mark.parametrize("begins", [True, False])
def test_marks_of_gpt_oss_are_control_tokens(tmp_path: Path, begins: bool) -> None:
    """llama.cpp takes five of them for text, which an answer and a user could write."""
    writer = start_gguf(tmp_path / "v.gguf", "gpt2")
    letters = [*BYTE_LETTERS, "en", "end"]
    writer.add_token_list([*letters, "<s>", *HARMONY_MARKS])
    writer.add_token_types([TokenType.NORMAL] * len(letters) + [TokenType.CONTROL] * (1 + len(HARMONY_MARKS)))
    writer.add_token_merges(["e n", "en d"])
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_bos_token_id(len(letters))
    writer.add_add_bos_token(begins)
    path = finish(writer, tmp_path / "v.gguf")
    start_backend()
    ours, theirs = gguf_tokenizer(fields_of(path)), LlamaTokenizer.from_file(path)
    marks = range(len(letters) + 1, len(letters) + 1 + len(HARMONY_MARKS))
    assert [theirs.piece(mark) for mark in marks] == [ours.piece(mark) for mark in marks] == [b""] * len(HARMONY_MARKS)
    assert theirs.special_strings >= set(HARMONY_MARKS)
    text = "".join(f"{mark}assistant{mark} end" for mark in HARMONY_MARKS) + "<|end"
    special = theirs.encode(text, special=True, bos=True)
    assert special == ours.encode(text, special=True, bos=True)
    assert set(marks) <= set(special)
    for some in (text, "<|end|>", "a<|end|>", "<|end|><|end|>b", "<|<|start|>|>"):
        tokens = theirs.encode(some, special=False, bos=True)
        assert tokens[0] == len(letters) or not begins
        assert not set(tokens).intersection(marks)
        assert theirs.decode(tokens) == some


@pytest.mark.parametrize("text", ["<|user|>\n Hi <|end|>\n\n x", "<s> a</s> \t b<|endoftext|> c", "<|assistant|> \n"])
def test_special_tokens_of_phi_3_take_the_white_space_behind_them(text: str) -> None:
    ours, theirs = both("phi-3")
    assert ours.encode(text, special=True, bos=False) == theirs.encode(text, special=True, bos=False)


def write_small_vocabulary(path: Path, kind: str) -> Path:
    """Write a vocabulary that spells few letters: neither é nor a newline nor b."""
    letters = ["a", "c", ".", ":", *"AUserint"] + (["\u2581"] if kind == "llama" else ["\u0120", "\u00c3", "ac"])
    letters = list(dict.fromkeys(letters))
    writer = start_gguf(path, kind)
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters, "b<tool>"])
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.NORMAL] * len(letters)]
    writer.add_token_types([*kinds, TokenType.USER_DEFINED])
    if kind == "llama":
        writer.add_token_scores([-float(rank) for rank in range(len(letters) + 4)])
    else:
        writer.add_token_merges(["a c"])
        writer.add_tokenizer_pre("gpt-2")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return finish(writer, path)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_a_vocabulary_cannot_spell_is_the_same_error_everywhere(kind: str, tmp_path: Path) -> None:
    path = write_small_vocabulary(tmp_path / "small.gguf", kind)
    start_backend()
    for tokenizer in (gguf_tokenizer(fields_of(path)), LlamaTokenizer.from_file(path)):
        plain = tokenizer.encode("ac. a", special=False, bos=False)
        assert tokenizer.decode(plain, strip_prefix_space=True) == "ac. a"
        assert tokenizer.encode("a</s>", special=True, bos=False)[-1] == 2
        assert len(tokenizer.encode("b<tool>", special=False, bos=False)) <= 2
        for text, strange in (("aéb", "bé"), ("a\nc", "\n"), ("a</s>", "/<>")):
            with pytest.raises(RequestError) as caught:
                tokenizer.encode(text, special=False, bos=False)
            assert caught.value.message == f"the model's vocabulary cannot write {strange!r}", type(tokenizer)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_text_is_encoded_without_a_walk_over_the_vocabulary(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real vocabularies lack bytes too, and have 49,000 tokens: a walk takes 25 ms, at every text and every mask."""
    start_backend()
    tokenizer = LlamaTokenizer.from_file(write_small_vocabulary(tmp_path / "small.gguf", kind))
    read: list[int] = []
    texts = [("ac. a", False), ("a</s>", True), ("ac\n", False), ("ac\n", True)]

    def encode_all() -> None:
        for text, special in texts:
            with contextlib.suppress(RequestError):  # it has no newline
                tokenizer.encode(text, special=special, bos=False)

    encode_all()
    for name in ("llama_vocab_get_text", "llama_vocab_get_attr"):
        original = getattr(L, name)

        def noted(vocab: object, token: int, original: Callable[[object, int], object] = original) -> object:
            read.append(token)
            return original(vocab, token)

        monkeypatch.setattr(L, name, noted)
    encode_all()
    assert len(read) <= sum(len(text) for text, _ in texts)  # the ids that came out may be looked at


def test_an_unknown_token_is_an_error_for_a_folder_too(tmp_path: Path) -> None:
    rust = RustTokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.add_special_tokens([AddedToken("[UNK]", special=True)])
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_of_folder(tmp_path, {})
    assert tokenizer.encode("a a", special=False, bos=False) == [0, 0]
    assert tokenizer.encode("[UNK]", special=True, bos=False) == [1]
    with pytest.raises(RequestError, match="cannot write 'b'"):
        tokenizer.encode("a b", special=False, bos=False)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_vocabulary_without_a_newline_has_a_generic_template(kind: str, tmp_path: Path) -> None:
    path = write_small_vocabulary(tmp_path / "small.gguf", kind)
    start_backend()
    for tokenizer in (gguf_tokenizer(fields_of(path)), LlamaTokenizer.from_file(path)):
        template = ChatTemplate.of(tokenizer)
        rendered = render_chat(template, [{"role": "user", "content": "a"}])
        assert rendered.text == "<s>User: a  Assistant:"
        assert template.stop_strings == (" User:",)
        assert encode_rendered(tokenizer, template, rendered)[0] == 1


# -- a folder ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small byte-level tokenizer; return its folder."""
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
def test_a_folders_tokenizer_restores_any_text(folder: Path, text: str) -> None:
    tokenizer = load(folder)
    tokens = tokenizer.encode(text, special=False, bos=False)
    assert tokenizer.decode(tokens) == text
    assert b"".join(map(tokenizer.piece, tokens)) == text.encode()


def test_half_a_character_fails_the_request(folder: Path) -> None:
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


def test_the_number_of_rows_may_be_in_the_text_config(folder: Path) -> None:
    assert tokenizer_of_folder(folder, {"text_config": {"vocab_size": 9000}}).num_tokens == 9000


def test_threads_do_not_share_whether_special_tokens_are_recognized(folder: Path) -> None:
    """Threads share one tokenizer, and each passes its own `special`."""
    tokenizer = load(folder)
    flags = [bool(i % 3) for i in range(300)]
    expected = {special: tokenizer.encode("<s>fox<|im_end|>", special=special, bos=False) for special in (True, False)}
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda special: tokenizer.encode("<s>fox<|im_end|>", special=special, bos=False), flags))
    assert expected[True] != expected[False]
    assert ids == [expected[special] for special in flags]


def test_a_text_that_cannot_be_written_fails_the_request(tmp_path: Path) -> None:
    rust = RustTokenizer(WordLevel({"a": 0}, unk_token="?"))  # and "?" is no token: the library raises
    rust.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match="cannot write"):
        tokenizer_of_folder(tmp_path, {}).encode("b", special=False, bos=False)


def test_a_token_that_only_looks_like_a_byte_is_text(tmp_path: Path) -> None:
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
    rust.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<|eot_id|>")])
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
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
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
            expected = theirs.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(tokens) == expected, text


def test_a_bug_of_the_library_is_one_line(tmp_path: Path) -> None:
    """A post-processor names a missing token: the library panics, and a panic is no Exception."""
    rust = json.loads(gemma_like().to_str())
    rust["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rust))
    with pytest.raises(ModelError, match="damaged"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}', "[1]", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_an_invalid_tokenizer_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
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


def test_the_text_of_a_vocabulary_is_a_tokenizer_json(tmp_path: Path) -> None:
    ours = gguf_tokenizer(fields_of(write_tiny(tmp_path / "tiny.gguf")))
    path = tmp_path / "tokenizer.json"
    path.write_text(ours.source)
    assert json.loads(ours.source)["model"]["type"] == "BPE"
    again = FastTokenizer.of_folder(path, config={}, generation={}, model={}, chat_template=None)
    assert again.encode("Hello", special=False, bos=False) == ours.encode("Hello", special=False, bos=False)
