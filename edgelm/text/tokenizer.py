"""Tokenizers: from text to token ids and back, and which ids end an answer.

Owns the seam `Tokenizer` and its implementation over llama.cpp's vocabularies, which guards what would kill the
process. Loads no weights. Knows nothing of chat templates but their text, and nothing of the engine.
"""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Iterable
from functools import cached_property
from itertools import compress, repeat
from pathlib import Path
from typing import Any, Protocol, Self

from llama_cpp import llama_cpp as L

from edgelm.errors import ModelError, RequestError

_MAX_BYTES = 2**31 - 32  # llama.cpp counts bytes and tokens in 32 bits
_NOT_TEXT = L.LLAMA_TOKEN_ATTR_CONTROL | L.LLAMA_TOKEN_ATTR_UNKNOWN
_SPACE = "\u2581"  # how an SPM vocabulary writes a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # and a byte


class Tokenizer(Protocol):
    """What turns text into token ids and back. Safe to call from several threads."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends an answer."""

    @property
    def special_strings(self) -> frozenset[str]:
        """The strings that become one token wherever `special` holds; user-defined ones do in any text."""

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        """Return the ids of a text.

        `special` lets the strings of control tokens become these tokens: for a template's own output, never for what
        a user wrote. `bos` adds the tokens that the model wants around a text, but no second BOS. Raises RequestError
        for a text that is not valid Unicode or that the vocabulary cannot spell.
        """

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text, none for a control token. Raises IndexError."""

    def text_of(self, token: int) -> str:
        """Return a token's string as the vocabulary spells it. Raises IndexError."""

    def decode(self, tokens: Iterable[int], *, strip_prefix_space: bool = False) -> str:
        """Return the text of tokens, U+FFFD for invalid bytes.

        `strip_prefix_space` takes away the space that some vocabularies put before an encoded text. The first space of
        an answer, which continues a prompt, is its own.
        """


class LlamaTokenizer:
    """A tokenizer over a vocabulary of llama.cpp, which lives as long as `owner`. Raises ModelError if it is empty."""

    def __init__(self, vocab: Any, owner: object, chat_template: str | None = None) -> None:
        if L.llama_vocab_type(vocab) == L.LLAMA_VOCAB_TYPE_NONE:
            raise ModelError("the model has no vocabulary", "take one with a tokenizer in its file")
        self._vocab = vocab
        self._owner = owner
        self._spm = L.llama_vocab_type(vocab) == L.LLAMA_VOCAB_TYPE_SPM
        self._pieces: dict[int, bytes] = {}  # read on first use: all of a large vocabulary would take 0.2 s
        self.chat_template = chat_template
        self.num_tokens: int = L.llama_vocab_n_tokens(vocab)
        self.bos_id = self._known_id(L.llama_vocab_bos(vocab))
        self.eos_id = self._known_id(L.llama_vocab_eos(vocab))

    @classmethod
    def of_model(cls, model: Any, owner: object) -> Self:
        """Return the tokenizer of a loaded model, with its chat template; `model` is llama.cpp's pointer."""
        template = L.llama_model_chat_template(model, None)
        text = None if template is None else template.decode("utf-8", "replace")
        return cls(L.llama_model_get_vocab(model), owner, text)

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
    def stop_ids(self) -> frozenset[int]:
        ids = range(self.num_tokens)
        return frozenset(compress(ids, map(L.llama_vocab_is_eog, repeat(self._vocab), ids)))

    @cached_property
    def special_strings(self) -> frozenset[str]:
        wanted = _NOT_TEXT | L.LLAMA_TOKEN_ATTR_USER_DEFINED
        ids = range(self.num_tokens)
        attrs = map(L.llama_vocab_get_attr, repeat(self._vocab), ids)
        return frozenset(self.text_of(token) for token, attr in zip(ids, attrs, strict=True) if attr & wanted)

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"character {error.start} of the text is half a character", "send UTF-8") from error
        if len(data) > _MAX_BYTES:
            raise RequestError(f"the text has {len(data):,} bytes", f"send at most {_MAX_BYTES:,}")
        if self._spm and (unspelled := self._unspelled(text)):
            raise RequestError(f"the model's vocabulary cannot write {unspelled!r}", "leave it out")
        tokens = self._tokenize(data, special, bos)
        if not special:
            return self._as_text(tokens, bos) if self._spm else tokens
        doubled = bos and self.bos_id is not None and tokens[:2] == [self.bos_id] * 2
        return tokens[1:] if doubled else tokens

    def piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(self._checked(token))
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
        size = len(data) + 16  # enough but for vocabularies that spell a space in several tokens
        for _ in range(2):
            buffer = (ctypes.c_int32 * size)()
            count: int = L.llama_tokenize(self._vocab, data, len(data), buffer, size, bos, special)
            if count >= 0:
                return buffer[:count]
            size = -count
        raise AssertionError(f"llama_tokenize asked twice for more room: {count}")

    def _as_text(self, tokens: list[int], bos: bool) -> list[int]:
        """Spell control tokens in bytes: an SPM vocabulary may merge `<s` and `>` of a user's text to the real BOS."""
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
            raise RequestError(f"the model's vocabulary cannot write {text!r} as text", "leave it out") from error

    def _unspelled(self, text: str) -> str:
        """Return the characters that are no token and have no byte tokens: llama.cpp would abort on them."""
        if not text or len(self._byte_ids) == 256:
            return ""
        chars = sorted({_SPACE, *text.replace(" ", _SPACE)} - self._letters)
        return "".join(char for char in chars if not self._byte_ids.keys() >= set(char.encode()))

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for token in range(self.num_tokens):
            if match := _BYTE.fullmatch(self.text_of(token)):
                found[int(match[1], 16)] = token
                if len(found) == 256:
                    break
        return found

    @cached_property
    def _letters(self) -> frozenset[str]:
        texts = map(self.text_of, range(self.num_tokens))
        return frozenset(text for text in texts if len(text) == 1)

    @cached_property
    def _adds_space(self) -> bool:
        probe = "a" if not self._spm or len(self._byte_ids) == 256 else min(self._letters - {_SPACE}, default="")
        return self.decode(self.encode(probe, special=False, bos=False)).startswith(" ")

    def _read_piece(self, token: int) -> bytes:
        size = 128
        for _ in range(2):
            buffer = ctypes.create_string_buffer(size)
            length: int = L.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            if length >= 0:
                return buffer.raw[:length]
            size = -length
        raise AssertionError(f"llama_token_to_piece asked twice for more room: {length}")

    def _attr(self, token: int) -> int:
        attr: int = L.llama_vocab_get_attr(self._vocab, self._checked(token))
        return attr

    def _known_id(self, token: int) -> int | None:
        return token if 0 <= token < self.num_tokens else None

    def _checked(self, token: int) -> int:
        """Return a valid token; another one would end the process, so this is no assert."""
        if not 0 <= token < self.num_tokens:
            raise IndexError(f"token {token} of a vocabulary of {self.num_tokens}")
        return token


class _OwnedModel:
    """Frees a model of llama.cpp when the last reference is gone."""

    def __init__(self, model: Any) -> None:
        weakref.finalize(self, L.llama_model_free, model)
