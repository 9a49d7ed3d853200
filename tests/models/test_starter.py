"""The built-in model is small enough to ship, and answers the questions that it was trained for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgelm.backends.build import build
from edgelm.backends.model import LoadedModel
from edgelm.config import Settings
from edgelm.core import SamplingParams
from edgelm.library.local import find_local
from edgelm.text.template import ChatTemplate
from tests.completion import complete
from tests.counts import Count
from tests.text.test_chat import encode_chat

QUESTIONS = Count(test=25, soak=1000)  # there are 236
TEXT = Path(__file__).parents[2] / "packaging" / "starter" / "questions.txt"


@pytest.fixture(scope="module")
def starter() -> Iterator[LoadedModel]:
    loaded = build(find_local("starter").path, Settings())
    yield loaded
    loaded.engine.close()


def entries() -> list[tuple[str, str]]:
    """Return each question with its answer."""
    blocks = [block.splitlines() for block in TEXT.read_text().strip().split("\n\n")]
    return [(line[3:], lines[-1][3:]) for lines in blocks for line in lines[:-1]]


async def answer(starter: LoadedModel, question: str) -> str:
    template = ChatTemplate.of(starter.tokenizer)
    prompt = encode_chat(starter.tokenizer, template, [{"role": "user", "content": question}])
    params = SamplingParams(temperature=0, stop_ids=starter.tokenizer.stop_ids)
    return "".join([delta.text async for delta in complete(starter.engine, starter.tokenizer, prompt, params)])


def test_it_is_at_most_4_megabytes_with_a_chat_template(starter: LoadedModel) -> None:
    assert find_local("starter").path.stat().st_size <= 4_000_000
    assert starter.tokenizer.chat_template
    assert starter.name == "starter"


def test_it_answers_its_questions(starter: LoadedModel) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chosen = random.Random(seed).sample(entries(), min(QUESTIONS, len(entries())))

    async def ask_all() -> list[str]:
        return list(await asyncio.gather(*(answer(starter, question) for question, _ in chosen)))

    answers = asyncio.run(ask_all())
    assert [(question, reply) for (question, _), reply in zip(chosen, answers, strict=True)] == chosen


def test_it_admits_what_it_does_not_know(starter: LoadedModel) -> None:
    assert "I do not know that" in asyncio.run(answer(starter, "Who is the king of Norway?"))
