"""The guide: pages of Markdown about using edgelm, and the search for a section of them.

Owns the topics and their order, and how a page is cut into sections. The pages are in docs/guide, which `pages` beside
this file links to. `questions` has what people ask of each section, in their words: a search finds a section by them,
and the starter is trained on them. Knows nothing of commands and terminals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from edgelm.base.errors import UsageError

FOLDER = Path(__file__).parent / "pages"
QUESTIONS = Path(__file__).parent / "questions"
TOPICS = (
    "start", "chat", "keys", "knowledge", "models", "memory", "speed", "run", "tools-and-json", "embeddings", "serve",
    "service", "apis", "agents", "editors", "gpu", "settings", "commands", "measuring", "making", "privacy",
    "troubleshooting",
)  # fmt: skip
MAX_FOUND = 3  # sections
TITLE_WEIGHT = 3.0  # of a word in a title; in the text: 1
LEAST_SHARE = 0.6  # of the best section's score
_MARK = re.compile(r"<!--.*?-->\n?", re.DOTALL)  # of packaging/guide_pages.py
_STOP_WORDS = frozenset(
    "a an and are as at be by can do does for from get has have how i if in is it its me my of on or so that the there "
    "these this to use want was what when where which why will with you your".split()
)


class Page(NamedTuple):
    """A page for a search: each paragraph on one line, and what people ask of its sections."""

    topic: str
    text: str  # Markdown
    asked: Mapping[str, str]  # questions by the titles of the sections that answer them


class Group(NamedTuple):
    """Questions that a section answers. `answer`: the sentences of it that do."""

    title: str
    answer: str
    questions: tuple[str, ...]


class Section(NamedTuple):
    """A passage under a heading `##`."""

    topic: str
    title: str
    text: str  # Markdown, without the heading


def pages() -> Iterator[tuple[str, str]]:
    """Yield the topics and their pages, as Markdown."""
    for topic in TOPICS:
        yield topic, page(topic)


def page(topic: str) -> str:
    """Return the page of a topic, as Markdown. Raises UsageError."""
    if topic not in TOPICS:
        raise UsageError(f"the guide has no topic {topic!r}", "the topics are " + ", ".join(TOPICS))
    text = (FOLDER / f"{topic}.md").read_text(encoding="utf-8")
    return re.sub(r"\n{3,}", "\n\n", _MARK.sub("", text))


def unwrapped_page(topic: str) -> str:
    """Return the page of a topic with each paragraph and each item of a list on one line. Raises UsageError."""
    lines: list[str] = []
    is_fenced = False
    for line in page(topic).split("\n"):
        if line.startswith("```"):
            is_fenced = not is_fenced
            lines.append(line)
        elif lines and not is_fenced and _continues(line, lines[-1]):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return "\n".join(lines)


def _continues(line: str, before: str) -> bool:
    """Tell whether a line goes on with the paragraph or the item of the line before it."""
    if not line.strip() or not before.strip() or before.startswith(("    ", "#", "|", "```")):
        return False
    return not re.match(r"[-*] |\d+\. |    |[#|]", line)


def searchable_pages() -> Iterator[Page]:
    """Yield all pages for a search."""
    for topic in TOPICS:
        asked: dict[str, list[str]] = {}
        for group in question_groups(topic):
            asked.setdefault(group.title, []).extend(group.questions)
        yield Page(topic, unwrapped_page(topic), {title: "\n".join(texts) for title, texts in asked.items()})


def question_groups(topic: str) -> Iterator[Group]:
    """Yield the questions about a page, together with their answer. Raises UsageError."""
    page(topic)
    text = (QUESTIONS / f"{topic}.txt").read_text(encoding="utf-8")
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.split("\n")
        texts = tuple(line.removeprefix("Q: ") for line in lines if line.startswith("Q: "))
        answer = " ".join(line.removeprefix("A: ") for line in lines if line.startswith("A: "))
        yield Group(lines[0].removeprefix("## ").strip(), answer, texts)


def summary(topic: str) -> str:
    """Return what a page is about, in one sentence: its first paragraph."""
    return " ".join(page(topic).split("\n\n")[1].split())


@cache
def sections() -> tuple[Section, ...]:
    """Return the sections of all pages, in order."""
    found = []
    for topic, text in pages():
        for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
            title, _, body = part.partition("\n")
            found.append(Section(topic, title.strip(), body.strip()))
    return tuple(found)


def find_sections(words: str) -> list[Section]:
    """Return the sections that fit a few words best; none if no section has any of them."""
    titles = [_terms(section.title) for section in sections()]
    texts = [_terms(section.text) for section in sections()]
    counts = {
        term: sum(term in title or term in text for title, text in zip(titles, texts, strict=True))
        for term in _terms(words)
    }
    scores = [
        sum(
            math.log(1 + len(texts) / count) * (TITLE_WEIGHT * (term in title) + (term in text))
            for term, count in counts.items()
            if count
        )
        for title, text in zip(titles, texts, strict=True)
    ]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:MAX_FOUND]
    return [sections()[index] for index in best if scores[index] > LEAST_SHARE * scores[best[0]]]


def _terms(text: str) -> set[str]:
    """Return the words that a search compares: lower case, no endings of plurals, no words that every text has."""
    words = set(re.findall(r"[a-z0-9][a-z0-9.]*[a-z0-9]|[a-z0-9]", text.lower())) - _STOP_WORDS
    return {word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word for word in words}
