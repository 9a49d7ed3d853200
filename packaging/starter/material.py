"""The material for training: the guide's passages, questions about them, and questions about other things.

Owns the answer to each question, and the ranking of passages. Knows nothing of scenes, of tensors and of training.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from edgelm.base.passages import Passage
from edgelm.chats.knowledge.guide import TOPICS, question_groups, searchable_pages
from edgelm.chats.knowledge.passages import split_text
from edgelm.chats.knowledge.question import terms
from edgelm.chats.knowledge.quote import system_message
from edgelm.chats.knowledge.starter import SMALL_TALK, UNKNOWN, WITHOUT_PASSAGES, larger_model
from edgelm.library.catalog import entries

MAX_WHOLE_CHARS = 480  # of a section that is learnt as a whole; edgelm's grammar quotes whole sections of any length
MODELS = [entry.name for entry in entries() if entry.kind == "text"]
_LIST_ITEM = re.compile(r"[-*] |\d+\. ")


@dataclass(frozen=True)
class Question:
    text: str
    passage: int  # the place of the passage that has the answer
    answer: str


class Material:
    """The guide's passages, the questions about every passage, and the questions that the guide does not answer."""

    def __init__(self, own: Path, held_out: float = 0.0) -> None:
        self.passages = [p for page in searchable_pages() for p in split_text(page.topic, page.text, markdown=True)]
        self.questions: list[Question] = []
        for topic in TOPICS:
            for title, answer, texts in question_groups(topic):
                section = [(i, p) for i, p in enumerate(self.passages) if (p.source, p.heading) == (topic, title)]
                if not section:
                    raise SystemExit(f"{topic}.txt: the guide has no section {title!r}")
                place, span = max(((i, answer_in(p.text, answer)) for i, p in section), key=lambda it: it[1][0])
                whole = whole_answer(self.passages[place].text, span[1])
                self.questions += [Question(text, place, whole) for text in texts]
        self.small_talk = [(t, answer) for _, answer, texts in read_blocks(own / "small_talk.txt") for t in texts]
        assert {answer for _, answer in self.small_talk} == set(SMALL_TALK)
        lines = (own / "unknown.txt").read_text(encoding="utf-8").splitlines()
        self.general = [line[3:] for line in lines if line.startswith("Q: ")]
        self.similar = [line[3:] for line in lines if line.startswith("E: ")]
        rng = random.Random(7)
        rng.shuffle(self.questions)
        num_held = int(held_out * len(self.questions))
        self.held_out, self.questions = self.questions[:num_held], self.questions[num_held:]
        self.by_passage: dict[int, list[int]] = {}
        for number, question in enumerate(self.questions):
            self.by_passage.setdefault(question.passage, []).append(number)
        self.ranking = Ranking(self)

    def texts(self) -> Iterable[str]:
        """Yield texts for the vocabulary."""
        for passage in self.passages:
            yield f"{passage.name}\n\n{passage.text}"
        for question in self.questions:
            yield question.text
            yield question.answer
        yield from self.general
        yield from self.similar
        for text, answer in self.small_talk:
            yield text
            yield answer
        yield WITHOUT_PASSAGES
        for model in (None, *MODELS):
            yield system_message([larger_model(model)])
            yield unknown(model)


def unknown(model: str | None) -> str:
    """Return the answer to a question that the guide does not answer: it copies the passage about a larger model."""
    return f"{UNKNOWN} {larger_model(model).text}"


class Ranking:
    """BM25 over passages and their questions, as edgelm's index computes it; a question does not find itself."""

    def __init__(self, material: Material) -> None:
        self._counts = [Counter(words(f"{p.heading} " * 2 + p.text)) for p in material.passages]
        for question in material.questions:
            self._counts[question.passage].update(words(question.text))
        self._sizes = [sum(counts.values()) for counts in self._counts]
        self._mean = sum(self._sizes) / len(self._sizes)
        documents = Counter(word for counts in self._counts for word in counts)
        total = len(self._counts)
        self._rarity = {word: math.log(1 + (total - n + 0.5) / (n + 0.5)) for word, n in documents.items()}

    def best(self, text: str, own: int | None, limit: int = 8) -> list[int]:
        """Return the places of the passages for a question, best first. `own` is the passage that has its words."""
        asked = set(words(text))
        scores = {}
        for place, counts in enumerate(self._counts):
            frequency = {word: counts[word] - (place == own) for word in asked if word in counts}
            size = 1.2 * (0.25 + 0.75 * self._sizes[place] / self._mean)
            score = sum(self._rarity[word] * 2.2 * n / (n + size) for word, n in frequency.items() if n > 0)
            if score > 0:
                scores[place] = score
        return sorted(scores, key=lambda place: -scores[place])[:limit]


def words(text: str) -> list[str]:
    """Return the words of a text, without stop words and endings."""
    stems = []
    for word in re.findall(r"[^\W_]+", text.lower()):
        if terms(word):
            ending = next((e for e in ("ing", "ed", "es", "s") if word.endswith(e) and len(word) - len(e) >= 3), "")
            stems.append(word[: len(word) - len(ending)])
    return stems


def read_blocks(path: Path) -> Iterable[tuple[str, str, list[str]]]:
    """Yield title, answer and questions of the blocks of a file."""
    for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip()):
        lines = block.splitlines()
        answer = " ".join(line[3:] for line in lines if line.startswith("A: "))
        yield lines[0][3:].strip(), answer, [line[3:] for line in lines if line.startswith("Q: ")]


def answer_in(text: str, answer: str) -> tuple[float, str]:
    """Return a score and the paragraphs of a passage that have most words of a written answer in common with it."""
    units = paragraphs(text)
    expected = Counter(re.findall(r"\w+", answer.lower()))
    best = (-1.0, "")
    for begin in range(len(units)):
        for end in range(begin + 1, len(units) + 1):
            if begin and units[begin].startswith("    "):
                continue  # a code block belongs to the paragraph before it
            if end < len(units) and units[end].startswith("    "):
                continue
            piece = joined(units[begin:end])
            have = Counter(re.findall(r"\w+", piece.lower()))
            common = sum((expected & have).values())
            score = common / max(sum(expected.values()), 1) - 0.15 * (1 - common / max(sum(have.values()), 1))
            best = max(best, (score, piece))
    return best


def whole_answer(text: str, part: str) -> str:
    """Return the answer from a passage: its heading and its text; of a long text only the paragraphs `part`."""
    heading, _, body = text.strip("\n").partition("\n\n")
    if not heading.startswith("#"):
        return part
    return f"{heading}\n\n{body if len(body) <= MAX_WHOLE_CHARS else part}"


def is_from(answer: str, passage: Passage) -> bool:
    """Tell whether a passage has the heading and the text of an answer."""
    heading, _, body = answer.partition("\n\n")
    return answer in passage.text or (heading in passage.text and body in passage.text)


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs, list items and code blocks of a text without its headings."""
    units: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if not block.startswith("#"):
            units += block.split("\n") if _LIST_ITEM.match(block) else [block]
    return units


def joined(units: Sequence[str]) -> str:
    """Return paragraphs, list items and code blocks as a text."""
    text = units[0]
    for before, unit in pairwise(units):
        is_list = before.startswith("- ") and unit.startswith("- ")
        text += ("\n" if is_list else "\n\n") + unit
    return text
