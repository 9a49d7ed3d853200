"""What a tokenizer is: text to token ids and back, and the ids that end an answer.

Owns the protocol. Knows only the source text of chat templates, and nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Tokenizer(Protocol):
    """Turns text into token ids and back. Safe to call from several threads."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""

    @property
    def special_strings(self) -> frozenset[str]:
        """The strings that become one token with `special`; user-defined ones become a token in any text."""

    @property
    def num_before(self) -> int:
        """How many of the tokens that the model wants around a text are before it."""

    chat_template: str | None

    def encode(self, text: str, *, special: bool, bos: bool, unknown: bool = False) -> list[int]:
        """Return the ids of a text.

        With `special`, strings of control tokens become these tokens: for a template's output, never for text of a
        user. `bos` adds the tokens that the model wants around a text, but no second BOS.

        Raises RequestError for a text that is not valid Unicode, or with a character that the vocabulary cannot spell:
        one with neither a token nor tokens for its bytes. There transformers writes `<unk>`, and llama.cpp leaves the
        character out or aborts; with either the model would answer another text than the one that was sent.
        `unknown` allows the `<unk>`: for a vector it is good enough.
        """

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text; a control token adds none. Raises IndexError."""

    def text_of(self, token: int) -> str:
        """Return a token's string as the vocabulary spells it. Raises IndexError."""

    def decode(self, tokens: Iterable[int], *, strip_prefix_space: bool = False) -> str:
        """Return the text of tokens, U+FFFD for invalid bytes.

        `strip_prefix_space` removes the space that some vocabularies put before an encoded text. Do not use it for an
        answer: that continues a prompt, and its first space is its own.
        """
