"""A tokenizer over the `tokenizers` library: for models whose vocabulary llama.cpp does not hold.

Owns what that library does not say: the bytes of a token, which ids end an answer, and a text in which no special token
is recognized. Reads no file of a model but tokenizer.json: its caller brings what the others say. Where the parts of a
GGUF become one of these: gguf_tokenizer.py.
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

from tokenizers import Tokenizer as RustTokenizer

from edgelm.errors import ModelError, RequestError

MAX_FILE_BYTES = 2**27  # of tokenizer.json: the largest known have 35 MB
SPACE = "\u2581"  # how a SentencePiece vocabulary writes a space
DOWNLOAD = "download the model's files again"
MAX_TOKENS = 2**24  # of a vocabulary, that a configuration may claim
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how a SentencePiece vocabulary writes a byte
Answer = TypeVar("Answer")
# What ends an answer by its text alone, where the files forget to say so: the list is llama.cpp's.
STOP_STRINGS = frozenset(
    "<|eot_id|>,<|im_end|>,<|end|>,<|return|>,<|call|>,<|calls|>,<end_of_turn>,<|endoftext|>,<|end_of_text|>,<|eom_id|>,"
    "< EOT >,_<EOT>,<EOT>,[EOT],[EOS],<end_of_utterance>,<|end_of_turn|>,</s>".split(",")
)


def _byte_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for, as GPT-2 has them."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyFacts:
    """What belongs to a vocabulary beside its tokens."""

    bos_id: int | None = None
    eos_id: int | None = None
    stop_ids: frozenset[int] = frozenset()
    prefix: tuple[int, ...] = ()  # the ids before and behind a text that the model wants
    suffix: tuple[int, ...] = ()
    chat_template: str | None = None
    byte_level: bool = False  # letters stand for bytes; otherwise as SentencePiece writes them
    control_ids: frozenset[int] = field(default=frozenset())  # tokens that add no text
    num_rows: int = 0  # of the model's embedding, which may have more than there are tokens: the rest adds no text


class FastTokenizer:
    """The `Tokenizer` of text/tokenizer.py over one of the library. Raises ModelError for what has no tokens."""

    def __init__(self, rust: RustTokenizer, facts: VocabularyFacts) -> None:
        self._rust = rust
        self._lock = Lock()  # of whether special tokens are recognized, which is a state of the library's object
        self._facts = facts
        self._added = {token: entry.content for token, entry in rust.get_added_tokens_decoder().items()}
        known = max(rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not known:
            raise ModelError("the model has no vocabulary", "take one with a tokenizer in its folder")
        self.num_tokens = max(known, facts.num_rows)
        self.bos_id = facts.bos_id
        self.eos_id = facts.eos_id
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
        """Read tokenizer.json; the rest is tokenizer_config.json, generation_config.json and config.json.

        Raises ModelError for a file that is missing, too large or none of a tokenizer.
        """
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ModelError(f"{path.name} is {path.stat().st_size:,} bytes long", DOWNLOAD)
            source = path.read_text(encoding="utf-8")
        except OSError as error:
            reason = f"{path.name} cannot be read: {error.strerror}"
            raise ModelError(reason, "the model's folder needs its tokenizer.json") from None
        except UnicodeDecodeError:
            raise ModelError(f"{path.name} is damaged: it is no UTF-8", DOWNLOAD) from None
        rust = _parsed(source)
        ids = rust.get_vocab(with_added_tokens=True)
        bos = _id_of(config.get("bos_token"), ids)
        eos = _id_of(config.get("eos_token"), ids)
        said = [*_ids(generation.get("eos_token_id")), *_ids(model.get("eos_token_id"))]
        stops = {eos, *said, *(ids[text] for text in STOP_STRINGS if text in ids)} - {None}
        prefix, suffix = _around(rust)
        if not prefix and config.get("add_bos_token") is True and bos is not None:
            prefix = (bos,)
        special = {token for token, entry in rust.get_added_tokens_decoder().items() if entry.special}
        rows = _ids(model.get("vocab_size"))
        facts = VocabularyFacts(
            bos_id=bos if bos is not None else next(iter(prefix), None),
            eos_id=eos if eos is not None else next(iter(said), None),
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

    def encode(self, text: str, *, special: bool, bos: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"character {error.start} of the text is half a character", "send UTF-8") from error
        try:
            with self._lock:
                self._rust.encode_special_tokens = not special
                tokens: list[int] = _called(lambda: self._rust.encode(text, add_special_tokens=False).ids)
        except _LibraryError as error:
            raise RequestError(f"the model's vocabulary cannot write the text: {error}", "send another") from None
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
            known = bytes(letter for letter in letters if letter is not None)
            return known if len(known) == len(text) else text.encode()
        if match := BYTE.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace(SPACE, " ").encode()

    def text_of(self, token: int) -> str:
        if not 0 <= token < self.num_tokens:
            raise IndexError(f"token {token} of a vocabulary of {self.num_tokens}")
        text: str | None = self._rust.id_to_token(token)
        return text or ""  # an id between others that has no token

    def decode(self, tokens: Iterable[int], *, strip_prefix_space: bool = False) -> str:
        data = b"".join(map(self.piece, tokens))
        if strip_prefix_space and self._adds_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    @cached_property
    def _adds_space(self) -> bool:
        return self.decode(self.encode("a", special=False, bos=False)).startswith(" ")


class _LibraryError(Exception):
    """What the library raised, in one line."""


def _called(work: Callable[[], Answer]) -> Answer:
    """Do what the library may fail at: it raises no narrower type than Exception, and a bug of its own as less."""
    try:
        return work()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _LibraryError(" ".join(str(error).split())[:120]) from None


def _parsed(source: str) -> RustTokenizer:
    try:
        rust = _called(lambda: RustTokenizer.from_str(source))
    except _LibraryError as error:
        raise ModelError(f"tokenizer.json is none of a tokenizer: {error}", DOWNLOAD) from None
    rust.no_truncation()
    rust.no_padding()
    return rust


def _around(rust: RustTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the model wants before and behind a text. Raises ModelError."""
    try:
        plain = _called(lambda: rust.encode("a", add_special_tokens=False).ids)
        full = _called(lambda: rust.encode("a", add_special_tokens=True).ids)
    except _LibraryError as error:
        raise ModelError(f"tokenizer.json is damaged: {error}", DOWNLOAD) from None
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    return (), ()


def _is_byte_level(rust: RustTokenizer) -> bool:
    """Whether the vocabulary's letters stand for bytes: what its decoder undoes."""
    decoder = json.loads(rust.decoder.__getstate__()) if rust.decoder else {}
    kinds = [decoder.get("type"), *(each.get("type") for each in decoder.get("decoders", []))]
    return "ByteLevel" in kinds


def _id_of(token: object, ids: Mapping[str, int]) -> int | None:
    """Return the id of a token as tokenizer_config.json names it: a string, or an object with its content."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return ids.get(text) if isinstance(text, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool)]
