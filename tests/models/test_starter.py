"""The built-in model: small enough to ship, and it answers the questions that it was made for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgelm.build import Loaded, build
from edgelm.completion import complete
from edgelm.config import Settings
from edgelm.core import SamplingParams
from edgelm.library.local import find_model
from edgelm.text.chat import encode_chat
from edgelm.text.template import ChatTemplate
from tests.counts import Count

QUESTIONS = Count(test=25, soak=1000)  # there are 236
TEXT = Path(__file__).parents[2] / "packaging" / "starter" / "questions.txt"


@pytest.fixture(scope="module")
def starter() -> Iterator[Loaded]:
    loaded = build(find_model("starter"), Settings())
    yield loaded
    loaded.engine.close()


def entries() -> list[tuple[str, str]]:
    """Return each question with its answer."""
    blocks = [block.splitlines() for block in TEXT.read_text().strip().split("\n\n")]
    return [(line[3:], lines[-1][3:]) for lines in blocks for line in lines[:-1]]


async def answer(starter: Loaded, question: str) -> str:
    template = ChatTemplate.of(starter.tokenizer)
    prompt = encode_chat(starter.tokenizer, template, [{"role": "user", "content": question}])
    params = SamplingParams(temperature=0, stop_ids=starter.tokenizer.stop_ids)
    return "".join([delta.text async for delta in complete(starter.engine, starter.tokenizer, prompt, params)])


def test_it_is_at_most_4_megabytes_with_a_chat_template(starter: Loaded) -> None:
    assert find_model("starter").stat().st_size <= 4_000_000
    assert starter.tokenizer.chat_template
    assert starter.name == "starter"


def test_it_answers_its_questions(starter: Loaded) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chosen = random.Random(seed).sample(entries(), min(QUESTIONS, len(entries())))

    async def ask_all() -> list[str]:
        return list(await asyncio.gather(*(answer(starter, question) for question, _ in chosen)))

    answers = asyncio.run(ask_all())
    assert [(question, said) for (question, _), said in zip(chosen, answers, strict=True)] == chosen


def test_it_knows_what_it_does_not_know(starter: Loaded) -> None:
    assert "I do not know that" in asyncio.run(answer(starter, "Who is the king of Norway?"))
