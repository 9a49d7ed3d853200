"""A tokenizer on the `tokenizers` library, for models whose vocabulary llama.cpp does not have.

Owns what that library lacks: the bytes of a token, the ids that end an answer, and encoding without special tokens.
Reads only tokenizer.json; the caller passes the contents of the model's other files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Self, TypeVar

from tokenizers import Encoding
from tokenizers import Tokenizer as RustTokenizer

from edgelm.base.errors import ModelError, RequestError
from edgelm.text.byte_letters import BYTE_LETTERS, missing_bytes, unwritable, without
from edgelm.text.known_vocabularies import SPACE, STOP_STRINGS

MAX_FILE_BYTES = 2**27  # of tokenizer.json; real ones have up to 35 MB
DOWNLOAD = "download them again (edgelm pull --verify MODEL)"
MAX_TOKENS = 2**24  # that config.json may claim for a vocabulary
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how a SentencePiece vocabulary writes a byte
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyFacts:
    """The facts of a vocabulary besides its tokens."""

    bos_id: int | None = None
    eos_id: int | None = None
    stop_ids: frozenset[int] = frozenset()
    prefix: tuple[int, ...] = ()  # the ids that the model wants before and after a text
    suffix: tuple[int, ...] = ()
    chat_template: str | None = None
    byte_level: bool = False  # letters stand for bytes, as in GPT-2; otherwise the spelling is SentencePiece's
    control_ids: frozenset[int] = field(default=frozenset())  # tokens that add no text
    num_rows: int = 0  # of the model's embedding; it may have more rows than there are tokens, which add no text


class FastTokenizer:
    """A `Tokenizer` (text/tokenizer.py) on one of the library. Raises ModelError if it has no tokens."""

    def __init__(self, rust: RustTokenizer, facts: VocabularyFacts) -> None:
        self._rust = rust
        self._lock = Lock()  # encode_special_tokens is a state of the library's object
        self._facts = facts
        self._added = {token: entry.content for token, entry in rust.get_added_tokens_decoder().items()}
        num_tokens = max(rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not num_tokens:
            raise ModelError("the model has no vocabulary", "take one with a tokenizer in its folder")
        self.num_tokens = max(num_tokens, facts.num_rows)
        self.bos_id = facts.bos_id
        self.eos_id = facts.eos_id
        self.num_before = len(facts.prefix)
        self.chat_template = facts.chat_template

    @classmethod
    def of_folder(
        cls,
        path: Path,
        *,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        model: Mapping[str, Any],
        chat_template: str | None,
    ) -> Self:
        """Read the tokenizer.json at `path`.

        `config`, `generation` and `model` are the contents of tokenizer_config.json, generation_config.json and
        config.json. Raises ModelError for a file that is missing, too large, or no tokenizer.
        """
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ModelError(f"{path.name} is {path.stat().st_size:,} bytes long", DOWNLOAD)
            source = path.read_text(encoding="utf-8")
        except OSError as error:
            reason = f"{path.name} cannot be read: {error.strerror}"
            raise ModelError(reason, "the model's folder needs its tokenizer.json") from None
        except UnicodeDecodeError:
            raise ModelError(f"{path.name} is damaged: it is not UTF-8", DOWNLOAD) from None
        rust = _parsed(source)
        ids = rust.get_vocab(with_added_tokens=True)
        bos = _id_of(config.get("bos_token"), ids)
        eos = _id_of(config.get("eos_token"), ids)
        ends = [*_ids(generation.get("eos_token_id")), *_ids(model.get("eos_token_id"))]
        stops = {eos, *ends, *(ids[text] for text in STOP_STRINGS if text in ids)} - {None}
        prefix, suffix = _prefix_and_suffix(rust)
        if not prefix and config.get("add_bos_token") is True and bos is not None:
            prefix = (bos,)
        special = {token for token, entry in rust.get_added_tokens_decoder().items() if entry.special}
        rows = _ids(model.get("vocab_size"))
        facts = VocabularyFacts(
            bos_id=bos if bos is not None else next(iter(prefix), None),
            eos_id=eos if eos is not None else next(iter(ends), None),
            stop_ids=frozenset(token for token in stops if token is not None),
            prefix=prefix,
            suffix=suffix,
            chat_template=chat_template,
            byte_level=_is_byte_level(rust),
            control_ids=frozenset(special),
            num_rows=rows[0] if rows and rows[0] <= MAX_TOKENS else 0,
        )
        return cls(rust, facts)

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._facts.stop_ids

    @property
    def source(self) -> str:
        """The vocabulary as the text of a tokenizer.json."""
        return str(self._rust.to_str())

    @cached_property
    def special_strings(self) -> frozenset[str]:
        return frozenset(self._added.values()) | frozenset(map(self.text_of, self._facts.control_ids))

    def encode(self, text: str, *, special: bool, bos: bool, unknown: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"character {error.start} of the text is half a character", "send UTF-8") from error
        try:
            with self._lock:
                self._rust.encode_special_tokens = not special
                encoding: Encoding = _call(lambda: self._rust.encode(text, add_special_tokens=False))
        except _LibraryError as error:
            raise RequestError(f"the model's vocabulary cannot write the text: {error}", "send another text") from None
        if not unknown and (unspelled := self._unspelled(text, encoding, special)):
            raise RequestError(f"the model's vocabulary cannot write {unspelled!r}", "remove it")
        tokens: list[int] = encoding.ids
        if not bos:
            return tokens
        prefix = list(self._facts.prefix)
        doubled = special and prefix and tokens[: len(prefix)] == prefix
        return [*([] if doubled else prefix), *tokens, *self._facts.suffix]

    def piece(self, token: int) -> bytes:
        if token in self._facts.control_ids:
            return b""
        if token in self._added:
            return self._added[token].encode()
        text = self.text_of(token)
        if self._facts.byte_level:
            letters = [BYTE_LETTERS.get(letter) for letter in text]
            data = bytes(byte for byte in letters if byte is not None)
            return data if len(data) == len(text) else text.encode()
        if match := BYTE.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace(SPACE, " ").encode()

    def text_of(self, token: int) -> str:
        if not 0 <= token < self.num_tokens:
            raise IndexError(f"token {token} of a vocabulary of {self.num_tokens}")
        text: str | None = self._rust.id_to_token(token)
        return text or ""  # an id without a token

    def decode(self, tokens: Iterable[int], *, strip_prefix_space: bool = False) -> str:
        data = b"".join(map(self.piece, tokens))
        if strip_prefix_space and self._adds_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def _unspelled(self, text: str, encoding: Encoding, special: bool) -> str:
        """Return the characters that the library wrote as the unknown token, or left out."""
        if self._missing_bytes:
            if not unwritable(text, self._missing_bytes):  # nearly every text
                return ""
            control = self._facts.control_ids
            own = [string for token, string in self._added.items() if special or token not in control]
            return unwritable(without(text, own), self._missing_bytes)
        unknown, string = self._unknown
        if unknown is None and not self._facts.byte_level:
            spelled = {place for start, end in encoding.offsets for place in range(start, end)}
            left_out = {char for place, char in enumerate(text) if place not in spelled and not char.isspace()}
            return "".join(sorted(left_out))
        if unknown is None or unknown not in encoding.ids:
            return ""
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        runs = [text[start:end] for token, (start, end) in pairs if token == unknown]
        # The string of the unknown token, written as itself.
        return "".join(sorted({char for run in runs if not (special and run == string) for char in run or SPACE}))

    @cached_property
    def _unknown(self) -> tuple[int | None, str]:
        model = self._rust.model
        string = getattr(model, "unk_token", None)
        if string is None and (token := getattr(model, "unk_id", None)) is not None:
            string = self._rust.id_to_token(token)
        return (None, "") if string is None else (self._rust.token_to_id(string), string)

    @cached_property
    def _missing_bytes(self) -> frozenset[int]:
        return missing_bytes(map(self.text_of, range(self.num_tokens))) if self._facts.byte_level else frozenset()

    @cached_property
    def _adds_space(self) -> bool:
        try:
            return self.decode(self.encode("a", special=False, bos=False)).startswith(" ")
        except RequestError:  # a vocabulary without this letter
            return False


class _LibraryError(Exception):
    """An error of the library, in one line."""


def _call(work: Callable[[], T]) -> T:
    """Call the library. It raises plain Exception, and for its own bugs a PanicException, which is none.

    Raises _LibraryError for both.
    """
    try:
        return work()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _LibraryError(" ".join(str(error).split())[:120]) from None


def _parsed(source: str) -> RustTokenizer:
    try:
        rust = _call(lambda: RustTokenizer.from_str(source))
    except _LibraryError as error:
        raise ModelError(f"tokenizer.json is not a tokenizer: {error}", DOWNLOAD) from None
    rust.no_truncation()
    rust.no_padding()
    return rust


def _prefix_and_suffix(rust: RustTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the model wants before and after a text. Raises ModelError."""
    try:
        plain = _call(lambda: rust.encode("a", add_special_tokens=False).ids)
        full = _call(lambda: rust.encode("a", add_special_tokens=True).ids)
    except _LibraryError as error:
        raise ModelError(f"tokenizer.json is damaged: {error}", DOWNLOAD) from None
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    return (), ()


def _is_byte_level(rust: RustTokenizer) -> bool:
    """Return whether the letters of the vocabulary stand for bytes: its decoder tells."""
    decoder = json.loads(rust.decoder.__getstate__()) if rust.decoder else {}
    kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))]
    return "ByteLevel" in kinds


def _id_of(token: object, ids: Mapping[str, int]) -> int | None:
    """Return the id of a token of tokenizer_config.json: a string, or an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return ids.get(text) if isinstance(text, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]
