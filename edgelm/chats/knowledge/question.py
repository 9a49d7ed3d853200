"""A question in words, as the query that FTS5 takes.

Owns the words that say nothing, and words with a typing error. Knows nothing of the index's tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Protocol

MAX_QUESTION = 2_000  # characters that are read
MAX_TERMS = 48
LEAST_PREFIX = 4  # letters of a word that stands for longer ones, too
LEAST_CORRECTED = 4  # letters of a word that may have a typing error
MOST_CORRECTED = 30  # ... and more is no word: it has thousands of neighbours of its own length
LEAST_REPLACED = 6  # letters of a word in which one may be wrong: short words have too many neighbours

_WORD = re.compile(r"[^\W_]+")
_STOP_WORDS = frozenset(
    "a about after again all already also always am an and any are aren as at be because been before being both "
    "but by can cannot could couldn did didn do does doesn doing don done down each else ever every few for from "
    "get gets give go goes going gonna got had has have haven having he hello her here hers hey hi him his "
    "how i if in into is isn it its itself just know let like ll many may maybe me might mine more most much must "
    "my myself need no nor not now of off ok okay on once one only or other our ours out over own please pls "
    "really s same shall she should so some someone something such t tell than thank thanks that the their theirs "
    "them then there these they thing things this those through to too under until up us use used uses using ve "
    "very via want wants was wasn way we well were what whats when where whether which while who whom whose why "
    "will with won work would wouldn yes yet you your yours".split()
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ENDINGS = ("", *"s es d ed ing ion ions ation ations er ers ment ments".split())  # that the index may have cut off


class Words(Protocol):
    """The words of an index."""

    def has(self, word: str) -> bool:
        """Tell whether a word, or one that begins with it, is in a passage."""
        ...

    def which(self, stems: Iterable[str]) -> set[str]:
        """Return those of some stems that the index has."""
        ...


def terms(question: str) -> list[str]:
    """Return the words of a question that say something, each once, in lower case."""
    found = dict.fromkeys(match[0].lower() for match in _WORD.finditer(question[:MAX_QUESTION]))
    return [word for word in found if word not in _STOP_WORDS][:MAX_TERMS]


def query(question: str, words: Words) -> str:
    """Return the query for passages with any of the question's words: bm25 ranks them by how rare the words are.

    A long word matches those that begin with it, too, and counts twice where it stands exactly. Words are in quotes, so
    that no character of a question is an operator of FTS5. Empty: the question has no such words.
    """
    names = _names(question)
    parts = []
    for word in terms(question):
        for term in (word, *(() if word in names else _corrections(word, words))):
            parts.append(f'"{term}"')
            if len(term) >= LEAST_PREFIX and not term.isdigit():
                parts.append(f'"{term}"*')
    return " OR ".join(parts)


def _names(question: str) -> set[str]:
    """Return the words that are names, as they are written: these are no typing errors."""
    found = [match[0] for match in _WORD.finditer(question[:MAX_QUESTION])]
    return {word.lower() for word in found[1:] if word[0].isupper() and not word.isupper()}


def _corrections(word: str, words: Words) -> Iterator[str]:
    """Yield the words of the index that a word with one typing error may stand for, if the index does not have it."""
    if not LEAST_CORRECTED <= len(word) <= MOST_CORRECTED or not (word.isascii() and word.isalpha()) or words.has(word):
        return
    found = words.which(stem for edit in _edits(word) for stem in _stems(edit))
    yield from sorted(stem for stem in found if len(stem) >= LEAST_CORRECTED - 1 and stem not in _STOP_WORDS)[:4]


def _stems(word: str) -> Iterator[str]:
    """Yield a word without the endings that the index may have cut off."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) > len(ending) + 2:
            yield word.removesuffix(ending)
    if word.endswith("y"):
        yield word[:-1] + "i"
    if word.endswith("e"):
        yield word[:-1]


def _edits(word: str) -> set[str]:
    """Return the words at one typing error behind the first letter: one too many, too few, wrong, or two swapped."""
    edits = set()
    for i in range(1, len(word) + 1):
        before, after = word[:i], word[i:]
        edits |= {before + letter + after for letter in _LETTERS}
        if after:
            edits.add(before + after[1:])
            if len(word) >= LEAST_REPLACED:
                edits |= {before + letter + after[1:] for letter in _LETTERS}
        if len(after) > 1:
            edits.add(before + after[1] + after[0] + after[2:])
    return edits - {word}
