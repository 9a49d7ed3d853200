"""WordPiece as BERT's own tokenizer computes it, for texts that llama.cpp splits in another way.

Owns the rules of transformers' BertNormalizer, BertPreTokenizer and WordPiece. llama.cpp drops the vowels of Hangul and
of Indic scripts, for example, and has another table of Unicode.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache

MARK = "\u2581"  # before a token that begins a word, as llama.cpp writes it
MAX_WORD = 100  # characters; a longer word is unknown
# Here both agree; apart from words that are too long.
_PLAIN = re.compile(r"[\t\n\r -~]*+")
_LONG = re.compile(rf"[A-Za-z0-9]{{{MAX_WORD + 1}}}")
_IDEOGRAPHS = re.compile(
    "([\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f\U0002b920-\U0002ceaf"
    "\uf900-\ufaff\U0002f800-\U0002fa1f])"
)


class WordPiece:
    """The tokens of a BERT by their text, in llama.cpp's spelling."""

    def __init__(self, ids: Mapping[str, int], unknown: int, *, lowers: bool, strips_accents: bool) -> None:
        self._ids = ids
        self._unknown = unknown
        self._lowers = lowers
        self._strips_accents = strips_accents
        self._longest = max(map(len, ids), default=0)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without those around it."""
        return [token for word in _words(self._normalized(text)) for token in self._pieces(word)]

    def _normalized(self, text: str) -> str:
        text = _IDEOGRAPHS.sub(r" \1 ", "".join(map(_clean, text)))
        if self._strips_accents:
            text = "".join(char for char in unicodedata.normalize("NFD", text) if unicodedata.category(char) != "Mn")
        return "".join(map(str.lower, text)) if self._lowers else text

    def _pieces(self, word: str) -> list[int]:
        """Return the longest tokens that a word begins with, one after the other."""
        if len(word) > MAX_WORD:
            return [self._unknown]
        rest, tokens = MARK + word, list[int]()
        while rest:
            for length in range(min(len(rest), self._longest), 0, -1):
                if (token := self._ids.get(rest[:length])) is not None and (length > 1 or tokens):
                    tokens.append(token)
                    rest = rest[length:]
                    break
            else:
                return [self._unknown]
        return tokens


def is_split_alike(text: str) -> bool:
    """Tell whether llama.cpp splits a text as BERT's tokenizer does."""
    return _PLAIN.fullmatch(text) is not None and _LONG.search(text) is None


@cache
def _clean(char: str) -> str:
    if char in "\t\n\r" or (char.isspace() and unicodedata.category(char) != "Cc"):
        return " "
    return "" if char == "\ufffd" or unicodedata.category(char) in ("Cc", "Cf", "Co") else char


@cache
def _is_punctuation(char: str) -> bool:
    return (char.isascii() and char.isprintable() and not char.isalnum()) or unicodedata.category(char)[0] == "P"


def _words(text: str) -> Iterator[str]:
    """Yield the words of a normalized text; a punctuation mark is one."""
    for part in text.split(" "):
        word = ""
        for char in part:
            if not _is_punctuation(char):
                word += char
                continue
            if word:
                yield word
            yield char
            word = ""
        if word:
            yield word
