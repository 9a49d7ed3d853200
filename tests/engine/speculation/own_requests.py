"""Requests made of our own guide: a page rewritten with one word changed, records in one form, and fresh prose.

They stand beside recorded answers, which are not ours to pass on. A token is a word, a space or a mark.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from edgelm.chats.knowledge.guide import FOLDER
from tests.bench.drafter import Request

PAGES = ("chat", "models", "memory", "run", "measuring")
CITIES = ("Bern", "Oslo", "Lima", "Kyoto", "Quito", "Turin")
RECORDS = 12


class Words:
    """Numbers for the words of a text, in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        return [self._numbers.setdefault(word, len(self._numbers)) for word in re.findall(r"\w+|\s+|[^\w\s]", text)]


def own_requests(kind: str) -> list[Request]:
    """Return the requests of a kind: "edits", "records" or "prose"."""
    words = Words()
    return [Request(kind, [*words(prompt), *words(answer)], len(words(prompt))) for prompt, answer in _TEXTS[kind]()]


def _edits() -> Iterator[tuple[str, str]]:
    for page in _pages():
        yield f"Write llama in place of edgelm.\n{page}", page.replace("edgelm", "llama")


def _records() -> Iterator[tuple[str, str]]:
    rng = random.Random(5)
    for city in CITIES:
        rows = [f'{{"id": {i}, "city": "{city}", "degrees": {rng.randrange(40)}}}' for i in range(RECORDS)]
        yield f"List the weather in {city} as JSON.", ",\n".join(rows)


def _prose() -> Iterator[tuple[str, str]]:
    for page in _pages():
        title, _, text = page.partition("\n")
        yield title, text


def _pages() -> list[str]:
    return [(FOLDER / f"{page}.md").read_text(encoding="utf-8") for page in PAGES]


_TEXTS = {"edits": _edits, "records": _records, "prose": _prose}
