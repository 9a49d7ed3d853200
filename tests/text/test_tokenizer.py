"""Real vocabularies against llama.cpp's own expected ids.

And what would end the process, or let a user write control tokens.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType

from edgelm.backends.llama.api import start_backend
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import ModelError, RequestError
from edgelm.text.template import ChatTemplate
from edgelm.text.tokenizer import Tokenizer
from tests.real_data import data_file, vocabulary, with_vocabulary
from tests.tiny import BOS, EOS, FIRST_BYTE, write_tiny

STOP_IDS = {
    "llama-bpe": {128001, 128009},
    "qwen2": {151643, 151645, 128247},  # the last is `</s>`, which llama.cpp recognizes by its text
    "llama-spm": {2},
    "phi-3": {2, 32000, 32007},
    "gpt-2": {50256},
}
BOS_IDS = {"llama-bpe": 128000, "llama-spm": 1, "phi-3": 1}
SPM = {"llama-spm", "phi-3"}
SEPARATOR = "\n__ggml_vocab_test__\n"

every_vocab = pytest.mark.parametrize("name", with_vocabulary(STOP_IDS))


@pytest.fixture(autouse=True)
def _silence() -> None:
    start_backend()


@cache
def load(name: str) -> LlamaTokenizer:
    return LlamaTokenizer.from_file(vocabulary(name))


@pytest.fixture(scope="module", autouse=True)
def _free_vocabularies() -> Iterator[None]:
    yield
    load.cache_clear()


@pytest.fixture
def tiny(tmp_path: Path) -> LlamaTokenizer:
    return LlamaTokenizer.from_file(
        write_tiny(tmp_path / "tiny.gguf", vocab_only=True, chat_template="{{ bos_token }}")
    )


def start_gguf(path: Path, tokenizer: str) -> GGUFWriter:
    writer = GGUFWriter(path, "llama")
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_feed_forward_length):
        add(64)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(tokenizer)
    return writer


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_spm(
    path: Path, pieces: list[str], *, num_bytes: int = 256, add_space: bool = True, eos: bool = False
) -> Path:
    """Write an SPM vocabulary: three control tokens, then byte tokens, then `pieces`."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(num_bytes)]
    texts = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * num_bytes + [TokenType.NORMAL] * len(pieces)
    writer = start_gguf(path, "llama")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_scores([-float(rank) for rank in range(len(texts))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_eos_token(eos)
    writer.add_add_space_prefix(add_space)
    return finish(writer, path)


def control_ids(tokenizer: LlamaTokenizer) -> set[int]:
    flags = L.LLAMA_TOKEN_ATTR_CONTROL | L.LLAMA_TOKEN_ATTR_UNKNOWN
    return {token for token in range(tokenizer.num_tokens) if L.llama_vocab_get_attr(tokenizer._vocab, token) & flags}


def cases(name: str) -> list[tuple[str, list[int]]]:
    inputs = data_file(f"vocab/ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(SEPARATOR)
    outputs = data_file(f"vocab/ggml-vocab-{name}.gguf.out").read_text().split("\n")
    expected = [[int(token) for token in line.split()] for line in outputs]
    return list(zip(inputs, expected, strict=False))


@every_vocab
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    tokenizer, texts = load(name), cases(name)
    assert len(texts) >= 46
    for text, expected in texts:
        assert tokenizer.encode(text, special=False, bos=False) == expected, repr(text)


@every_vocab
def test_joined_pieces_give_the_text(name: str) -> None:
    tokenizer = load(name)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    alphabet = "  \t\nab,.!?'\"<s>|é日🦙\u200dÄ0123\u0000" + "".join(
        chr(rng.randrange(0x20, 0xD800)) for _ in range(20)
    )
    texts = [text for text, _ in cases(name)]
    texts += ["".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(300)]
    for text in texts:
        tokens = tokenizer.encode(text, special=False, bos=False)
        joined = b"".join(map(tokenizer.piece, tokens))
        assert joined == (" " * (name in SPM and bool(text)) + text).encode(), repr(text)
        assert tokenizer.decode(tokens, strip_prefix_space=True) == text
        assert tokenizer.decode(tokens) == joined.decode()


@every_vocab
def test_every_end_of_generation_token_stops(name: str) -> None:
    tokenizer = load(name)
    assert tokenizer.stop_ids == STOP_IDS[name]
    assert tokenizer.eos_id in tokenizer.stop_ids


@every_vocab
def test_users_cannot_write_control_tokens(name: str) -> None:
    tokenizer = load(name)
    control = control_ids(tokenizer)
    some = sorted(control)[:200]
    for text in [tokenizer.text_of(token) for token in some]:
        for around in (text, f"a{text}b", f" {text}\n"):
            tokens = tokenizer.encode(around, special=False, bos=False)
            assert control.isdisjoint(tokens), repr(around)
            assert tokenizer.decode(tokens, strip_prefix_space=True) == around


def test_a_template_can_write_control_tokens() -> None:
    tokenizer = load("qwen2")
    end = "<|im_end|>"
    assert tokenizer.encode(f"hi{end}", special=True, bos=False)[-1] == 151645
    assert 151645 not in tokenizer.encode(f"hi{end}", special=False, bos=True)
    assert tokenizer.text_of(151645) == end
    assert tokenizer.piece(151645) == b""


def test_special_strings_are_control_and_user_defined_tokens() -> None:
    assert {"<unk>", "<s>", "</s>", "<|user|>", "<|end|>"} <= load("phi-3").special_strings
    assert load("gpt-2").special_strings == {"<|endoftext|>"}
    assert "[PAD151646]" in load("qwen2").special_strings  # user-defined


def test_a_chat_template_comes_with_the_vocabulary() -> None:
    assert load("gpt-2").chat_template is None
    template = load("phi-3").chat_template
    assert template is not None
    assert "<|assistant|>" in template


@every_vocab
def test_bos_is_added_if_the_model_wants_it_and_never_twice(name: str) -> None:
    tokenizer, bos = load(name), BOS_IDS.get(name)
    plain = tokenizer.encode("hi", special=False, bos=False)
    assert tokenizer.encode("hi", special=False, bos=True) == ([bos] if bos else []) + plain
    assert tokenizer.encode("", special=False, bos=True) == ([bos] if bos else [])
    assert tokenizer.encode("", special=True, bos=False) == []
    if bos:
        text = tokenizer.text_of(bos) + "hi"
        assert tokenizer.encode(text, special=True, bos=True) == tokenizer.encode(text, special=True, bos=False)
        assert tokenizer.encode(text, special=True, bos=True).count(bos) == 1
        assert tokenizer.encode(text, special=False, bos=True).count(bos) == 1
        assert tokenizer.encode(text, special=False, bos=True)[1] != bos


@pytest.mark.parametrize(("named", "added", "bos"), [(False, False, None), (True, False, 12), (False, True, 11)])
def test_a_bos_that_the_file_does_not_name_is_none(tmp_path: Path, named: bool, added: bool, bos: int | None) -> None:
    """llama.cpp takes token 11 for it: a template would begin every prompt with a comma."""
    writer = start_gguf(tmp_path / "bpe.gguf", "gpt2")
    letters = [chr(ord("!") + i) for i in range(12)]  # as in GPT-2 and Qwen: the twelfth is a comma
    writer.add_token_list([*letters, "<|im_start|>", "<|im_end|>"])
    writer.add_token_types([TokenType.NORMAL] * 12 + [TokenType.CONTROL] * 2)
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(13)
    writer.add_add_bos_token(added)
    if named:
        writer.add_bos_token_id(12)
    tokenizer = LlamaTokenizer.from_file(finish(writer, tmp_path / "bpe.gguf"))
    assert tokenizer.bos_id == bos
    assert ChatTemplate.of(tokenizer).bos == ("" if bos is None else tokenizer.text_of(bos))


@pytest.mark.parametrize("named", [True, False])
def test_an_eos_that_the_file_does_not_name_ends_no_answer(tmp_path: Path, named: bool) -> None:
    """llama.cpp takes token 11 for it: answers would end at a comma."""
    writer = start_gguf(tmp_path / "bpe.gguf", "gpt2")
    writer.add_token_list([*(chr(ord("!") + i) for i in range(12)), "<|im_start|>", "<|im_end|>"])
    writer.add_token_types([TokenType.NORMAL] * 12 + [TokenType.CONTROL] * 2)
    writer.add_token_merges(['! "'])
    if named:
        writer.add_eos_token_id(13)
    tokenizer = LlamaTokenizer.from_file(finish(writer, tmp_path / "bpe.gguf"))
    assert tokenizer.eos_id == (13 if named else None)
    assert tokenizer.stop_ids == {13}, "<|im_end|> by its name"


@every_vocab
@pytest.mark.parametrize("method", ["piece", "text_of"])
def test_ids_out_of_range_are_refused(name: str, method: str) -> None:
    tokenizer = load(name)
    read = getattr(tokenizer, method)
    for token in (-1, tokenizer.num_tokens, 2**31 - 1, -(2**31), 2**40):
        with pytest.raises(IndexError):
            read(token)
    read(0)
    read(tokenizer.num_tokens - 1)


@pytest.mark.parametrize("name", ["qwen2", "phi-3"])
def test_threads_may_encode_at_once(name: str) -> None:
    tokenizer = load(name)
    texts = [text * 20 for text, _ in cases(name)]
    expected = [tokenizer.encode(text, special=False, bos=True) for text in texts]
    fresh = LlamaTokenizer(tokenizer._vocab, tokenizer)  # has no cached pieces

    def work(index: int) -> tuple[list[int], str]:
        tokens = fresh.encode(texts[index], special=False, bos=True)
        return tokens, fresh.decode(tokens, strip_prefix_space=True)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, [*range(len(texts))] * 5))
    assert results == list(zip(expected, texts, strict=True)) * 5


def test_half_a_character_is_refused(tiny: LlamaTokenizer) -> None:
    for text in ("a\ud83d", b"\xff".decode("utf-8", "surrogateescape")):
        with pytest.raises(RequestError):
            tiny.encode(text, special=False, bos=True)


def test_a_zero_character_is_text(tiny: LlamaTokenizer) -> None:
    tokens = tiny.encode("a\0b", special=False, bos=False)
    assert FIRST_BYTE in tokens
    assert tiny.decode(tokens, strip_prefix_space=True) == "a\0b"


def test_a_tiny_vocabulary_reads_as_it_was_written(tiny: LlamaTokenizer) -> None:
    seam: Tokenizer = tiny
    assert (seam.num_tokens, seam.bos_id, seam.eos_id, seam.stop_ids) == (512, BOS, EOS, frozenset({EOS}))
    assert seam.chat_template == "{{ bos_token }}"
    assert seam.piece(FIRST_BYTE + 0xFF) == b"\xff"
    assert seam.decode([BOS, FIRST_BYTE + 0xFF, FIRST_BYTE + 0x41]) == "\ufffdA"


def test_an_answer_keeps_its_first_space(tiny: LlamaTokenizer) -> None:
    tokens = tiny.encode("the day", special=False, bos=False)
    assert tiny.decode(tokens) == " the day"
    assert tiny.decode(tokens, strip_prefix_space=True) == "the day"


def test_a_vocabulary_without_the_added_space_loses_none(tmp_path: Path) -> None:
    tokenizer = LlamaTokenizer.from_file(write_spm(tmp_path / "v.gguf", ["\u2581", "a"], add_space=False))
    tokens = tokenizer.encode(" a", special=False, bos=False)
    assert tokenizer.decode(tokens, strip_prefix_space=True) == " a"


@pytest.mark.parametrize("add_space", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_letters_that_merge_into_a_control_token_stay_text(tmp_path: Path, add_space: bool, eos: bool) -> None:
    pieces = ["\u2581", "<", "s", ">", "/", "<s", "</", "</s", "a"]
    tokenizer = LlamaTokenizer.from_file(write_spm(tmp_path / "v.gguf", pieces, add_space=add_space, eos=eos))
    for text in ("<s>", "</s>", "a<s>a</s>", "<s><s>"):
        tokens = tokenizer.encode(text, special=False, bos=False)
        assert not {0, 1, 2} & set(tokens), text
        assert tokenizer.decode(tokens, strip_prefix_space=True) == text
        assert tokenizer.encode(text, special=False, bos=True) == [1, *tokens, *[2] * eos]
    assert 1 in tokenizer.encode("<s>", special=True, bos=False)


def test_a_text_that_a_vocabulary_cannot_spell_is_refused(tmp_path: Path) -> None:
    pieces = ["\u2581", "a", "é", "<", "s", ">", "<s"]
    tokenizer = LlamaTokenizer.from_file(write_spm(tmp_path / "v.gguf", pieces, num_bytes=0x30))
    for text in ("aé a", "a!", "\n"):
        tokens = tokenizer.encode(text, special=False, bos=False)
        assert tokenizer.decode(tokens, strip_prefix_space=True) == text
    for text in ("ab", "日", "<s>"):
        with pytest.raises(RequestError, match="cannot write"):
            tokenizer.encode(text, special=False, bos=False)


def test_a_vocabulary_without_any_space_is_refused_a_text(tmp_path: Path) -> None:
    tokenizer = LlamaTokenizer.from_file(write_spm(tmp_path / "v.gguf", ["a"], num_bytes=0x30))
    with pytest.raises(RequestError, match="cannot write"):
        tokenizer.encode("a", special=False, bos=False)
    assert tokenizer.encode("", special=False, bos=True) == [1]


def test_a_space_of_several_tokens_fits(tmp_path: Path) -> None:
    tokenizer = LlamaTokenizer.from_file(write_spm(tmp_path / "v.gguf", ["a"]))
    assert len(tokenizer.encode(" " * 100, special=False, bos=False)) == 303


def test_a_long_piece_is_read_whole(tmp_path: Path) -> None:
    long = "ab" * 500
    tokenizer = LlamaTokenizer.from_file(write_spm(tmp_path / "v.gguf", [long]))
    assert tokenizer.piece(tokenizer.num_tokens - 1) == long.encode()


def test_no_thread_sees_a_long_piece_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = LlamaTokenizer.from_file(write_spm(tmp_path / "v.gguf", ["a" * 500, "b"]))
    seen: list[int] = []
    read = LlamaTokenizer._read_odd_piece

    def reading(tokenizer: LlamaTokenizer, token: int) -> bytes:
        seen.append(len(tokenizer._pieces))
        return read(tokenizer, token)

    monkeypatch.setattr(LlamaTokenizer, "_read_odd_piece", reading)
    tokens = range(tokenizer.num_tokens // 64 * 64, tokenizer.num_tokens)
    assert [tokenizer.piece(token) for token in tokens][-2:] == [b"a" * 500, b"b"]
    assert set(seen) == {0}


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF, or so it says")
    for path in (garbage, tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(ModelError):
            LlamaTokenizer.from_file(path)


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    writer = start_gguf(path, "no_vocab")
    writer.add_vocab_size(100)
    finish(writer, path)
    with pytest.raises(ModelError, match="no vocabulary"):
        LlamaTokenizer.from_file(path)


def test_the_vocabulary_lives_as_long_as_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[object] = []
    free = L.llama_model_free

    def record(model: object) -> None:
        freed.append(model)
        free(model)

    monkeypatch.setattr(L, "llama_model_free", record)
    encode = LlamaTokenizer.from_file(write_tiny(tmp_path / "tiny.gguf", vocab_only=True)).encode
    gc.collect()
    assert not freed
    assert encode("the", special=False, bos=True)[0] == BOS
    del encode
    gc.collect()
    assert len(freed) == 1


def test_the_process_ends_cleanly_with_a_loaded_vocabulary(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", vocab_only=True)
    code = (
        "import pathlib, sys\n"
        "from edgelm.backends.llama.tokenizer import LlamaTokenizer\n"
        "t = LlamaTokenizer.from_file(pathlib.Path(sys.argv[1]))\n"
        "print(t.decode(t.encode('the cat', special=False, bos=True), strip_prefix_space=True))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "the cat\n")
