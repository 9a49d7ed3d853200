"""Encodes texts with many special strings: llama.cpp takes quadratic time for them, minutes for 100,000.

Owns where a text may be cut. Knows no chat and no limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING

from edgelm.text.patterns import any_of
from edgelm.text.template import is_user_defined

if TYPE_CHECKING:
    from edgelm.text.tokenizer import Tokenizer

_CHUNK = 64  # special tokens
_SHORT = 4096  # characters: quick in one piece


def chunks(text: str, specials: re.Pattern[str]) -> Iterator[str]:
    """Yield a text in pieces of few special tokens."""
    done = 0
    for count, match in enumerate(specials.finditer(text)):
        if count % _CHUNK == _CHUNK - 1:  # in a chat model no special token depends on the text before it
            yield text[done : match.start()]
            done = match.start()
    yield text[done:]


class TextEncoder:
    """Encodes texts that come from no template, a piece at a time: the caller may stop when it has too many tokens.

    `unknown`: characters that the vocabulary lacks become its token for them.
    """

    def __init__(self, tokenizer: Tokenizer, *, unknown: bool = False) -> None:
        self.tokenizer = tokenizer
        self._encode = partial(tokenizer.encode, unknown=True) if unknown else tokenizer.encode

    def prompt(self, text: str, *, special: bool) -> Iterator[list[int]]:
        """Yield the tokens of a whole prompt, with those around it. Raises RequestError; see Tokenizer.encode."""
        encode = self._encode
        first, *others = self._pieces(text, special)
        ids = encode(first, special=special, bos=True)
        if not others:
            yield ids
            return
        _, end = self.around
        yield ids[: len(ids) - len(end)]
        for piece in others:
            yield encode(piece, special=special, bos=False)
        yield end

    def plain(self, text: str) -> Iterator[list[int]]:
        """Yield the tokens of a text without special tokens, a part of a prompt. Raises RequestError."""
        yield from self.part(text, special=False)

    def part(self, text: str, *, special: bool) -> Iterator[list[int]]:
        """Yield the tokens of a text without those around a prompt. Raises RequestError."""
        for piece in self._pieces(text, special):
            yield self._encode(piece, special=special, bos=False)

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The tokens that the model wants before and behind a text."""
        tokens, num_before = self.tokenizer.encode("", special=False, bos=True), self.tokenizer.num_before
        return tokens[:num_before], tokens[num_before:]

    def _pieces(self, text: str, special: bool) -> list[str]:
        if len(text) <= _SHORT:
            return [text]
        return list(chunks(text, self._specials if special else self._user_defined))

    @cached_property
    def _specials(self) -> re.Pattern[str]:
        return any_of(self.tokenizer.special_strings)

    @cached_property
    def _user_defined(self) -> re.Pattern[str]:
        """Matches the strings that are tokens in any text."""
        return any_of(text for text in self.tokenizer.special_strings if is_user_defined(text, self.tokenizer))
