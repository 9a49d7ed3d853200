"""The linear model that finds the section of the guide for a question."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.chats.knowledge.guide import TOPICS, question_groups, searchable_pages
from edgelm.chats.knowledge.passages import split_text
from edgelm.chats.knowledge.sections import NUM_FEATURES, features, guess

LATE = "packaging/starter/train_sections.py has to run again"


def test_it_knows_the_sections_that_the_guide_has() -> None:
    passages = [p for page in searchable_pages() for p in split_text(page.topic, page.text, markdown=True)]
    assert set(guess("hello").sections) == {(passage.source, passage.heading) for passage in passages}, LATE


def test_it_was_trained_with_the_questions_that_are_there() -> None:
    groups = [(topic, title, text) for topic in TOPICS for title, _, texts in question_groups(topic) for text in texts]
    known = 0
    for topic, title, text in random.Random(1).sample(groups, 300):
        sections = guess(text).sections
        known += sections[topic, title] >= sorted(sections.values())[-3]  # short pages repeat long ones
    assert known >= 250, LATE


@pytest.mark.parametrize(
    ("question", "section"),
    [
        ("how do i get rid of a modle that I dont need any more", ("models", "Remove a model and free disk space")),
        ("the chat is too dark for my eyes, other colours please", ("chat", "Change the colours of the chat")),
    ],
)
def test_it_finds_a_section_by_what_people_say(question: str, section: tuple[str, str]) -> None:
    about = guess(question)
    assert section in sorted(about.sections, key=about.sections.__getitem__)[-3:]
    assert about.unknown < 0.5


@pytest.mark.parametrize("question", ["Who wrote the Iliad?", "recipe for onion soup", "change a bicycle tube"])
def test_it_knows_what_is_about_something_else(question: str) -> None:
    assert guess(question).unknown > 0.7


@given(st.text())
def test_any_text_has_probabilities(question: str) -> None:
    assert all(0 <= feature < NUM_FEATURES for feature in features(question))
    about = guess(question)
    assert 0 <= about.unknown <= 1
    assert all(value <= 0 for value in about.sections.values())
