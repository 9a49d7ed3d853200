"""The `Tokenizer` on llama.cpp's vocabularies: it checks calls that could abort the process, and loads no weights."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import weakref
from collections.abc import Iterable
from functools import cached_property
from itertools import compress, repeat
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from edgelm.backends.llama.binding import L
from edgelm.base.errors import ModelError, RequestError
from edgelm.text.byte_letters import missing_bytes, unwritable, without

if TYPE_CHECKING:
    from edgelm.text.wordpiece import WordPiece

_BLOCK = 64  # tokens whose pieces are read at once
_MAX_BYTES = 2**31 - 32  # llama.cpp counts bytes and tokens in 32 bits
_NOT_TEXT = L.LLAMA_TOKEN_ATTR_CONTROL | L.LLAMA_TOKEN_ATTR_UNKNOWN
_SPACE = "\u2581"  # a space in an SPM vocabulary
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in an SPM vocabulary
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")  # marks of gpt-oss
_HARMONY_BEGIN = re.compile("|".join(f"<(?={re.escape(mark[1:])})" for mark in _HARMONY))


class LlamaTokenizer:
    """A tokenizer on a vocabulary of llama.cpp. Raises ModelError if that is empty.

    `owner` keeps the memory of the vocabulary alive. `lowers` and `strips`: a BERT makes letters lower case, and strips
    their accents. `names_bos`, `names_eos`: the file says which token is the BOS, and which the EOS.
    """

    def __init__(
        self,
        vocab: Any,
        owner: object,
        chat_template: str | None = None,
        *,
        lowers: bool = True,
        strips: bool = True,
        names_bos: bool = True,
        names_eos: bool = True,
    ) -> None:
        if L.llama_vocab_type(vocab) == L.LLAMA_VOCAB_TYPE_NONE:
            raise ModelError("the model has no vocabulary", "take one with a tokenizer in its file")
        self._vocab = vocab
        self._owner = owner
        self._spm = L.llama_vocab_type(vocab) == L.LLAMA_VOCAB_TYPE_SPM
        self._bpe = L.llama_vocab_type(vocab) == L.LLAMA_VOCAB_TYPE_BPE
        self._wpm = L.llama_vocab_type(vocab) == L.LLAMA_VOCAB_TYPE_WPM
        self._lowers, self._strips = lowers, strips
        self._pieces: dict[int, bytes] = {}  # read on first use: a whole large vocabulary takes 0.2 s
        self._buffer: Any = ctypes.create_string_buffer(128)  # of a piece
        self._buffer_lock = threading.Lock()
        self.chat_template = chat_template
        self.num_tokens: int = L.llama_vocab_n_tokens(vocab)
        self.num_before = int(L.llama_vocab_get_add_bos(vocab))
        # llama.cpp's own default is GPT-2's old one, token 11, which is a comma in most vocabularies
        has_bos = names_bos or bool(self.num_before)
        self.bos_id = self._id_or_none(L.llama_vocab_bos(vocab)) if has_bos else None
        eos = self._id_or_none(L.llama_vocab_eos(vocab))
        is_text = eos is not None and not L.llama_vocab_get_attr(vocab, eos) & _NOT_TEXT
        self._no_stop = eos if is_text and not names_eos else None
        self.eos_id = eos if self._no_stop is None else None

    @classmethod
    def of_model(cls, model: Any, owner: object) -> Self:
        """Return the tokenizer of a loaded model, with its chat template; `model` is llama.cpp's pointer."""
        template = L.llama_model_chat_template(model, None)
        text = None if template is None else template.decode("utf-8", "replace")
        lowers, strips = (_flag(model, f"tokenizer.ggml.normalizer.{key}") for key in ("lowercase", "strip_accents"))
        bos, eos = (_has_key(model, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
        vocab = L.llama_model_get_vocab(model)
        return cls(vocab, owner, text, lowers=lowers, strips=strips, names_bos=bos, names_eos=eos)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Load a GGUF's vocabulary without its weights; it is freed with the tokenizer. Raises ModelError."""
        params = L.llama_model_default_params()
        params.vocab_only = True
        model = L.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise ModelError(f"{path.name} has no vocabulary that llama.cpp can read", "give a GGUF file")
        return cls.of_model(model, _OwnedModel(model))

    @cached_property
    def pair_separator(self) -> tuple[int, ...]:
        """The tokens between two encoded texts of a pair, each with the tokens around it."""
        joined = L.llama_vocab_type(self._vocab) == L.LLAMA_VOCAB_TYPE_WPM or not L.llama_vocab_get_add_sep(self._vocab)
        separator = self._id_or_none(L.llama_vocab_sep(self._vocab))
        return () if joined or separator is None else (separator,)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        ids = range(self.num_tokens)
        return frozenset(compress(ids, map(L.llama_vocab_is_eog, repeat(self._vocab), ids))) - {self._no_stop}

    @cached_property
    def special_strings(self) -> frozenset[str]:
        special = _NOT_TEXT | L.LLAMA_TOKEN_ATTR_USER_DEFINED
        ids = range(self.num_tokens)
        attrs = map(L.llama_vocab_get_attr, repeat(self._vocab), ids)
        return frozenset(self.text_of(token) for token, attr in zip(ids, attrs, strict=True) if attr & special)

    def encode(self, text: str, *, special: bool, bos: bool, unknown: bool = False) -> list[int]:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"character {error.start} of the text is half a character", "send UTF-8") from error
        if len(data) > _MAX_BYTES:
            raise RequestError(f"the text has {len(data):,} bytes", f"send at most {_MAX_BYTES:,}")
        if unspelled := self._unspelled(text, special):
            raise RequestError(f"the model's vocabulary cannot write {unspelled!r}", "remove it")
        cut = not special and self._harmony_ids and self._bpe and _HARMONY_BEGIN.search(text)
        if self._wpm and not special and self._is_split_otherwise(text):
            tokens = self._framed(self._words.encode(text), bos)
        else:
            tokens = self._tokenize_cut(text, bos) if cut else self._tokenize(data, special, bos)
        checked = not (unknown or self._spm or self._bpe)
        if checked and any(self._is_unknown(token, text) for token in set(tokens)):
            raise RequestError("the model's vocabulary cannot write a character of the text", "send another text")
        if not special:
            return self._as_text(tokens, bos) if self._spm else tokens
        doubled = bos and self.bos_id is not None and tokens[:2] == [self.bos_id] * 2
        return tokens[1:] if doubled else tokens

    def piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            self._read_pieces(self._checked(token) // _BLOCK * _BLOCK)
            piece = self._pieces[token]
        return piece

    def text_of(self, token: int) -> str:
        text: bytes = L.llama_vocab_get_text(self._vocab, self._checked(token))
        return text.decode("utf-8", "replace")

    def decode(self, tokens: Iterable[int], *, strip_prefix_space: bool = False) -> str:
        data = b"".join(map(self.piece, tokens))
        if strip_prefix_space and self._adds_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def _tokenize(self, data: bytes, special: bool, bos: bool) -> list[int]:
        size = len(data) + 16  # too small only for vocabularies that spell a space in several tokens
        for _ in range(2):
            buffer = (ctypes.c_int32 * size)()
            count: int = L.llama_tokenize(self._vocab, data, len(data), buffer, size, bos, special)
            if count >= 0:
                return buffer[:count]
            size = -count
        raise AssertionError(f"llama_tokenize asked twice for more room: {count}")

    def _tokenize_cut(self, text: str, bos: bool) -> list[int]:
        """Return the ids of a user's text, its marks of gpt-oss spelled: llama.cpp makes a mark of them in any text."""
        spelled: list[int] = []
        first = 0
        for mark in _HARMONY_BEGIN.finditer(text):
            spelled += self._tokenize(text[first : mark.end()].encode(), False, False)
            first = mark.end()
        spelled += self._tokenize(text[first:].encode(), False, False)
        return self._framed(spelled, bos)

    def _framed(self, tokens: list[int], bos: bool) -> list[int]:
        """Return tokens with those around a text, if `bos`."""
        around = self._tokenize(b"", False, bos)
        before = self.num_before if bos else 0
        return around[:before] + tokens + around[before:]

    def _as_text(self, tokens: list[int], bos: bool) -> list[int]:
        """Spell control tokens in bytes: SPM may merge `<s` and `>` of a user's text into the real BOS."""
        first = int(bos and L.llama_vocab_get_add_bos(self._vocab))
        last = len(tokens) - int(bos and L.llama_vocab_get_add_eos(self._vocab))
        merged = {token for token in set(tokens[first:last]) if self._attr(token) & _NOT_TEXT}
        if not merged:
            return tokens
        spelled = tokens[:first]
        for token in tokens[first:last]:
            spelled += self._spell(token) if token in merged else [token]
        return spelled + tokens[last:]

    def _spell(self, token: int) -> list[int]:
        text = self.text_of(token)
        try:
            return [self._byte_ids[byte] for byte in text.encode()]
        except KeyError as error:
            raise RequestError(f"the model's vocabulary cannot write {text!r} as text", "remove it") from error

    def _unspelled(self, text: str, special: bool) -> str:
        """Return the characters without a token and without byte tokens: llama.cpp aborts on them, or omits them."""
        unspelled = self._unspelled_chars(text)
        if not unspelled:  # nearly every text: the vocabulary's own tokens can only take characters away
            return ""
        # llama.cpp cuts these strings out of a text before it spells the rest.
        own_tokens = self.special_strings if special else self._user_defined
        return self._unspelled_chars(without(text, own_tokens))

    def _unspelled_chars(self, text: str) -> str:
        if self._bpe and self._missing_bytes:
            return unwritable(text, self._missing_bytes)
        if not self._spm or not text or len(self._byte_ids) == 256:
            return ""
        chars = sorted({_SPACE, *text.replace(" ", _SPACE)} - self._letters)
        return "".join(char for char in chars if not self._byte_ids.keys() >= set(char.encode()))

    def _is_unknown(self, token: int, text: str) -> bool:
        return bool(self._attr(token) & L.LLAMA_TOKEN_ATTR_UNKNOWN) and self.text_of(token) not in text

    def _is_split_otherwise(self, text: str) -> bool:
        from edgelm.text.wordpiece import is_split_alike  # only for a BERT

        return not is_split_alike(text)

    @cached_property
    def _words(self) -> WordPiece:
        """The vocabulary of a BERT; its special tokens are in no text."""
        from edgelm.text.wordpiece import WordPiece

        ids = {self.text_of(token): token for token in range(self.num_tokens) if not self._attr(token) & _NOT_TEXT}
        attrs = map(self._attr, range(self.num_tokens))
        unknown = next((i for i, attr in enumerate(attrs) if attr & L.LLAMA_TOKEN_ATTR_UNKNOWN), 0)
        return WordPiece(ids, unknown, lowers=self._lowers, strips_accents=self._strips)

    @cached_property
    def _harmony_ids(self) -> frozenset[int]:
        """The control tokens of gpt-oss that llama.cpp takes for text, so that its own server can parse them."""
        if not {"<|return|>", "<|call|>"} <= set(map(self.text_of, self.stop_ids)):
            return frozenset()
        return frozenset(token for token in range(self.num_tokens) if self.text_of(token) in _HARMONY)

    @cached_property
    def _user_defined(self) -> frozenset[str]:
        """The strings that become a token in any text."""
        ids = range(self.num_tokens)
        return frozenset(self.text_of(token) for token in ids if self._attr(token) & L.LLAMA_TOKEN_ATTR_USER_DEFINED)

    @cached_property
    def _missing_bytes(self) -> frozenset[int]:
        return missing_bytes(map(self.text_of, range(self.num_tokens)))

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        ids: dict[int, int] = {}  # by byte
        for token in range(self.num_tokens):
            if match := _BYTE.fullmatch(self.text_of(token)):
                ids[int(match[1], 16)] = token
                if len(ids) == 256:
                    break
        return ids

    @cached_property
    def _letters(self) -> frozenset[str]:
        texts = map(self.text_of, range(self.num_tokens))
        return frozenset(text for text in texts if len(text) == 1)

    @cached_property
    def _adds_space(self) -> bool:
        probe = "a" if not self._spm or len(self._byte_ids) == 256 else min(self._letters - {_SPACE}, default="")
        try:
            return self.decode(self.encode(probe, special=False, bos=False)).startswith(" ")
        except RequestError:  # a vocabulary without this letter
            return False

    def _read_pieces(self, first: int) -> None:
        """Read the pieces of a block of tokens: reading a whole vocabulary takes a third of the time then."""
        tokens = range(first, min(first + _BLOCK, self.num_tokens))
        to_piece, vocab, buffer, size = L.llama_token_to_piece, self._vocab, self._buffer, len(self._buffer)
        with self._buffer_lock:
            pieces = [buffer[: to_piece(vocab, token, buffer, size, 0, False)] for token in tokens]
        block = dict(zip(tokens, pieces, strict=True))
        for token in compress(tokens, map(not_, pieces)):  # a control token, or longer than the buffer
            block[token] = self._read_odd_piece(token)
        block.update(dict.fromkeys(self._harmony_ids.intersection(tokens), b""))
        self._pieces.update(block)  # at once: other threads read, too

    def _read_odd_piece(self, token: int) -> bytes:
        size: int = -L.llama_token_to_piece(self._vocab, token, None, 0, 0, False)
        if size <= 0:
            return b""
        buffer = ctypes.create_string_buffer(size)
        length: int = L.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
        assert length == size, f"llama_token_to_piece asked twice for more room: {length}"
        return buffer.raw

    def _attr(self, token: int) -> int:
        attr: int = L.llama_vocab_get_attr(self._vocab, self._checked(token))
        return L.LLAMA_TOKEN_ATTR_CONTROL if token in self._harmony_ids else attr

    def _id_or_none(self, token: int) -> int | None:
        return token if 0 <= token < self.num_tokens else None

    def _checked(self, token: int) -> int:
        """Return a valid token. llama.cpp aborts on an invalid one, so this is no assert."""
        if not 0 <= token < self.num_tokens:
            raise IndexError(f"token {token} of a vocabulary of {self.num_tokens}")
        return token


def _flag(model: Any, key: str) -> bool:
    """Return a flag of a model's metadata; True: it is not there."""
    buffer = ctypes.create_string_buffer(8)
    return L.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer)) < 0 or buffer.value != b"false"


def _has_key(model: Any, key: str) -> bool:
    """Tell whether a model's metadata has a key."""
    buffer = ctypes.create_string_buffer(8)
    return bool(L.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer)) >= 0)


class _OwnedModel:
    """Frees a model of llama.cpp when its last reference is gone."""

    def __init__(self, model: Any) -> None:
        weakref.finalize(self, L.llama_model_free, model)
