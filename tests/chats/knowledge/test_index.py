"""The index: what is indexed again, and what is found."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgelm.base.errors import EdgeLMError
from edgelm.base.passages import Passage
from edgelm.chats.knowledge import GUIDE, index
from edgelm.chats.knowledge.guide import Page
from edgelm.chats.knowledge.index import Knowledge, fused
from edgelm.chats.knowledge.question import query
from tests.chats.knowledge.conftest import Write

ALL = 100_000  # characters: more than eight passages have


def names(passages: Sequence[Passage]) -> list[str]:
    return [passage.name for passage in passages]


def find(knowledge: Knowledge, root: Path | str, question: str) -> list[str]:
    return names(knowledge.search([str(root)], question, max_chars=ALL))


# -- what is indexed -----------------------------------------------------------------------------------------------


def test_changed_files_are_indexed_again_and_deleted_ones_forgotten(
    folder: Path, write: Write, knowledge: Knowledge
) -> None:
    root = [str(folder)]
    write("a.md", "# Apples\n\nred\n")
    write("b.md", "# Pears\n\ngreen\n")
    assert knowledge.refresh(root)[:3] == (2, 2, 2)
    assert knowledge.refresh(root)[:3] == (2, 2, 0)
    write("a.md", "# Apricots\n\norange\n\n# Plums\n\nblue\n")
    assert knowledge.refresh(root)[:3] == (2, 3, 1)
    assert find(knowledge, folder, "plums") == ["a.md › Plums"]
    assert find(knowledge, folder, "apples") == []
    (folder / "b.md").unlink()
    assert knowledge.refresh(root)[:3] == (1, 2, 1)
    assert find(knowledge, folder, "pears") == []


def test_a_change_of_the_same_size_and_time_is_seen(folder: Path, write: Write, knowledge: Knowledge) -> None:
    path = write("a.md", "apples")
    os.utime(path, ns=(10**18, 10**18))
    knowledge.refresh([str(folder)])
    write("a.md", "orange")
    os.utime(path, ns=(10**18, 10**18))
    assert knowledge.refresh([str(folder)]).num_changed == 1
    assert find(knowledge, folder, "orange") == ["a.md"]


def test_an_unchanged_file_is_not_read_again(
    folder: Path, write: Write, knowledge: Knowledge, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.md", "apples")
    monkeypatch.setattr("edgelm.chats.knowledge.files.RACY_NS", 0)  # the file is old
    knowledge.refresh([str(folder)])
    monkeypatch.setattr("edgelm.chats.knowledge.index.Root.read", None)
    assert knowledge.refresh([str(folder)])[:3] == (1, 1, 0)
    os.utime(folder / "a.md")
    with pytest.raises(TypeError):
        knowledge.refresh([str(folder)])


def test_new_times_alone_are_no_change(folder: Path, write: Write, knowledge: Knowledge) -> None:
    path = write("a.md", "apples")
    knowledge.refresh([str(folder)])
    os.utime(path, ns=(10**18, 10**18))
    assert knowledge.refresh([str(folder)]).num_changed == 0


def test_a_file_that_is_no_knowledge_any_more_is_forgotten(folder: Path, write: Write, knowledge: Knowledge) -> None:
    write("a.md", "apples")
    knowledge.refresh([str(folder)])
    write("a.md", b"apples\0")
    state = knowledge.refresh([str(folder)])
    assert state[:3] == (0, 0, 1)
    assert state.left_out == (("a.md", "not a text file"),)
    assert find(knowledge, folder, "apples") == []
    assert knowledge.refresh([str(folder)]).left_out == state.left_out


def test_a_root_that_is_gone_is_forgotten(folder: Path, write: Write, knowledge: Knowledge) -> None:
    write("a.md", "apples")
    knowledge.refresh([str(folder)])
    folder.rename(folder.parent / "moved")
    with pytest.raises(EdgeLMError, match="does not exist"):
        knowledge.refresh([str(folder)])
    assert find(knowledge, folder, "apples") == []


def test_a_root_that_is_not_used_for_long_is_forgotten(
    folder: Path, write: Write, knowledge: Knowledge, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.md", "apples")
    write("other/b.md", "apples")
    knowledge.refresh([str(folder)])
    later = time.time() + (index.KEPT_DAYS + 1) * 86_400
    monkeypatch.setattr(time, "time", lambda: later)
    knowledge.refresh([str(folder / "other")])
    assert find(knowledge, folder, "apples") == []
    assert find(knowledge, folder / "other", "apples") == ["b.md"]


def test_only_the_named_roots_are_searched(folder: Path, write: Write, knowledge: Knowledge) -> None:
    for name in ("one/a.md", "two/b.md", "three/c.md"):
        write(name, "# Apples\n\nred")
    one, two, three = (str(folder / name) for name in ("one", "two", "three"))
    knowledge.refresh([one, two, three])
    assert find(knowledge, one, "apples") == ["a.md › Apples"]
    assert find(knowledge, f"{folder}/two/../two/", "apples") == ["b.md › Apples"]
    assert knowledge.search([], "apples", max_chars=ALL) == []


def test_the_same_text_in_two_roots_is_found_once(folder: Path, write: Write, knowledge: Knowledge) -> None:
    path = write("sub/a.md", "# Apples\n\nred")
    knowledge.refresh([str(folder), str(folder / "sub"), str(path)])
    assert len(knowledge.search([str(folder), str(folder / "sub"), str(path)], "apples", max_chars=ALL)) == 1


def test_the_guide_is_a_root(tmp_path: Path) -> None:
    pages = {"start": "# Start\n\n## Install\n\nRun make.\n", "keys": "# Keys\n\nctrl+q ends.\n"}
    knowledge = Knowledge(tmp_path / "k.db", lambda: [Page(topic, text, {}) for topic, text in pages.items()])
    assert knowledge.refresh([GUIDE])[:3] == (2, 2, 2)
    assert find(knowledge, GUIDE, "how to install?") == ["start › Install"]
    pages["start"] = "# Start\n\n## Setup\n\nRun make.\n"
    del pages["keys"]
    assert knowledge.refresh([GUIDE])[:3] == (1, 1, 2)
    assert knowledge.refresh([GUIDE])[:3] == (1, 1, 0)
    assert find(knowledge, GUIDE, "ctrl") == []
    knowledge.close()


def test_a_section_of_the_guide_is_found_by_the_words_of_those_who_ask(tmp_path: Path) -> None:
    text = "# Models\n\n## Pull\n\nDownloads weights.\n\n## Remove\n\nFrees the disk.\n"
    pages = [Page("models", text, {"Pull": "how do I fetch a brain?\nobtain an LLM"})]
    knowledge = Knowledge(tmp_path / "k.db", lambda: pages)
    knowledge.refresh([GUIDE])
    assert find(knowledge, GUIDE, "i want another brian") == ["models › Pull"]  # a typing error, too
    assert all("brain" not in passage.text for passage in knowledge.search([GUIDE], "brain", max_chars=ALL))
    pages[0] = Page("models", text, {"Remove": "how do I fetch a brain?"})
    assert knowledge.refresh([GUIDE]).num_changed == 1
    assert find(knowledge, GUIDE, "brain") == ["models › Remove"]
    knowledge.close()


# -- what is found -------------------------------------------------------------------------------------------------

# With a digit no word is stemmed or corrected; some begin as others.
WORDS = [first + "o" + last for first in "bdfghklmnp" for last in ("1", "rb1", "rb1x", "lk1")]


def bm25(documents: Sequence[Sequence[list[str]]], phrases: Sequence[Callable[[str], bool]]) -> list[float]:
    """Return the score of each document (three columns) as FTS5's documentation defines it."""
    k1, b, weights = 1.2, 0.75, (index.SOURCE_WEIGHT, index.HEADING_WEIGHT, index.TEXT_WEIGHT)
    lengths = [sum(map(len, document)) for document in documents]
    mean = sum(lengths) / len(documents)
    scores = [0.0] * len(documents)
    for fits in phrases:
        counts = [[sum(map(fits, column)) for column in document] for document in documents]
        num_with = sum(any(count) for count in counts)
        rarity = max(math.log((len(documents) - num_with + 0.5) / (num_with + 0.5)), 1e-6)
        for i, count in enumerate(counts):
            frequency = sum(weight * hits for weight, hits in zip(weights, count, strict=True))
            scores[i] += rarity * frequency * (k1 + 1) / (frequency + k1 * (1 - b + b * lengths[i] / mean))
    return scores


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(WORDS), min_size=1, max_size=5, unique=True))
def test_the_ranking_is_that_of_all_passages_compared(
    tmp_path_factory: pytest.TempPathFactory, seed: int, asked: list[str]
) -> None:
    rng = random.Random(seed)
    root = tmp_path_factory.mktemp("corpus")
    documents = {}
    for number in range(rng.randrange(2, 15)):
        heading, text = rng.choices(WORDS, k=rng.randrange(1, 4)), rng.choices(WORDS, k=rng.randrange(1, 40))
        name = f"x{number:02}"
        (root / f"{name}.md").write_text(f"# {' '.join(heading)}\n\n{' '.join(text)}\n")
        documents[name] = ([name, "md", *heading], heading, [*heading, *text])
    knowledge = Knowledge(tmp_path_factory.mktemp("cache") / "k.db")
    knowledge.refresh([str(root)])
    phrases: list[Callable[[str], bool]] = [word.__eq__ for word in asked]
    phrases += [lambda other, word=word: other.startswith(word) for word in asked if len(word) >= 4]
    scores = bm25(list(documents.values()), phrases)
    best = max(scores)
    expected = {name: score for name, score in zip(documents, scores, strict=True) if score > 0}
    ranked = sorted(expected.values(), reverse=True)
    num_expected = sum(place < 3 or score >= 0.3 * best for place, score in enumerate(ranked))
    found = [p.source.removesuffix(".md") for p in knowledge.search([str(root)], " ".join(asked), max_chars=ALL)]
    knowledge.close()
    assert len(found) == min(num_expected, 8)
    assert [expected[name] for name in found] == pytest.approx(ranked[: len(found)])


GUIDE_PAGE = """# Models

## Commands

`edgelm list` shows the models on this machine. `edgelm show MODEL` shows one model.

## Pull

`edgelm pull` downloads a model from the hub.

## Memory

A model needs as much memory as its file is large. Choose a smaller quantization.
"""


@pytest.mark.parametrize(
    ("question", "heading"),
    [
        ("which command shows me the models that I already have?", "Commands"),
        ("wich comand lists modles", "Commands"),
        ("How do I download a model?", "Pull"),
        ("downloading", "Pull"),
        ("how much memroy is needed", "Memory"),
        ("MEMROY", "Memory"),
        ("quantisation", "Memory"),
        ("QUANTIZATIONS", "Memory"),
        ("quantiz", "Memory"),
    ],
)
def test_questions_find_their_passage(write: Write, knowledge: Knowledge, question: str, heading: str) -> None:
    path = write("guide.md", GUIDE_PAGE)
    knowledge.refresh([str(path)])
    assert find(knowledge, path, question)[0] == f"guide.md › {heading}"


@pytest.mark.parametrize(
    "question", ["", "  ", "what is it?", "hi, how are you", "?!*", "xyzzyq", "in Memoro", "'\"", "\0", "﷽"]
)
def test_a_question_without_words_finds_nothing(write: Write, knowledge: Knowledge, question: str) -> None:
    path = write("guide.md", GUIDE_PAGE)
    knowledge.refresh([str(path)])
    assert find(knowledge, path, question) == []


@settings(max_examples=40)
@given(st.one_of(st.text(), st.text(st.sampled_from("models AND OR NOT NEAR ( ) \" * ^ : - + { } , \0 ' \ud800"))))
def test_no_question_is_an_error(tmp_path_factory: pytest.TempPathFactory, question: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "no-error"
    folder.mkdir(exist_ok=True)
    (folder / "guide.md").write_text(GUIDE_PAGE)
    knowledge = Knowledge(folder / ".cache" / "k.db")
    knowledge.refresh([str(folder)])
    find(knowledge, folder, question)
    knowledge.close()


def test_a_long_question_is_answered(write: Write, knowledge: Knowledge) -> None:
    path = write("guide.md", GUIDE_PAGE)
    knowledge.refresh([str(path)])
    assert find(knowledge, path, "memory " + " ".join(f"w{n}" for n in range(100_000)))[0] == "guide.md › Memory"


def test_a_long_string_of_letters_is_no_word_to_correct() -> None:
    """Such as a sequence of DNA: its neighbours would take hundreds of MB."""
    asked: list[str] = []

    class Empty:
        def has(self, _: str) -> bool:
            return False

        def which(self, stems: Iterable[str]) -> set[str]:
            asked.extend(stems)
            return set()

    sequence = "acgt" * 500
    assert query(sequence, Empty()) == f'"{sequence}" OR "{sequence}"*'
    assert not asked


def test_passages_fit_the_characters_best_first(folder: Path, write: Write, knowledge: Knowledge) -> None:
    write("a.md", "apples apples apples " + "x" * 900)
    write("b.md", "apples " + "y" * 200)
    knowledge.refresh([str(folder)])
    for max_chars, expected in ((2_000, ["a.md", "b.md"]), (600, ["b.md"]), (100, [])):
        passages = knowledge.search([str(folder)], "apples", max_chars=max_chars)
        assert names(passages) == expected
        assert sum(passage.size for passage in passages) <= max_chars


# -- vectors -------------------------------------------------------------------------------------------------------


class Colours:
    """An embedding model that knows a word by its colour. `texts` are those that it was asked for."""

    GROUPS = (("apple", "cherry", "red"), ("lime", "pea", "green"), ("sky", "sea", "blue"))

    def __init__(self, model: str = "colours", width: int = 4) -> None:
        self.model = model
        self.texts: list[str] = []
        self._width = width

    def __call__(self, texts: Sequence[str], /) -> NDArray[np.float32]:
        self.texts += texts
        vectors = np.full((len(texts), self._width), 0.01, np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for column, group in enumerate(self.GROUPS):
                row[column] += sum(word in text for word in group)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def fruits(folder: Path, write: Write, knowledge: Knowledge) -> str:
    write("fruit.md", "an apple a day")
    write("water.md", "the sea is wide")
    write("grass.md", "a lime tree")
    knowledge.refresh([str(folder)])
    return str(folder)


def test_vectors_find_what_words_do_not(knowledge: Knowledge, fruits: str) -> None:
    embed = Colours()
    assert find(knowledge, fruits, "red") == []
    while knowledge.embed([fruits], embed, at_most=2):
        pass
    assert names(knowledge.search([fruits], "red", max_chars=ALL, embed=embed))[0] == "fruit.md"
    assert names(knowledge.search([fruits], "blue", max_chars=ALL, embed=embed))[0] == "water.md"


def test_a_passage_is_embedded_once_until_it_changes(knowledge: Knowledge, fruits: str, write: Write) -> None:
    embed = Colours()
    assert knowledge.embed([fruits], embed) == 3
    assert knowledge.embed([fruits], embed) == 0
    knowledge.search([fruits], "apple", max_chars=ALL, embed=embed)
    assert len(embed.texts) == 4  # and the question
    write("fruit.md", "a cherry a day")
    knowledge.refresh([fruits])
    assert knowledge.embed([fruits], embed) == 1
    assert embed.texts[-1] == "fruit.md\n\na cherry a day"


def test_what_words_find_is_embedded_by_the_search(knowledge: Knowledge, fruits: str) -> None:
    embed = Colours()
    assert names(knowledge.search([fruits], "apple", max_chars=ALL, embed=embed)) == ["fruit.md"]
    assert embed.texts == ["apple", "fruit.md\n\nan apple a day"]


def test_vectors_of_two_models_are_not_mixed(knowledge: Knowledge, fruits: str) -> None:
    first, second, wider = Colours(), Colours("other"), Colours(width=7)
    for embed in (first, second, wider):
        assert names(knowledge.search([fruits], "apple", max_chars=ALL, embed=embed)) == ["fruit.md"]
        assert len(embed.texts) == 2
    assert knowledge.embed([fruits], second) == 2
    assert names(knowledge.search([fruits], "apple", max_chars=ALL, embed=first)) == ["fruit.md"]


def test_rankings_are_fused_by_their_places() -> None:
    assert fused([1, 2, 3], [3, 2, 4]) == [3, 2, 1, 4]
    assert fused([1, 2], []) == [1, 2]
    assert fused() == []
