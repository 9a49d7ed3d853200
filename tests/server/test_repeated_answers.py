"""Answers that repeat to the letter, through the endpoint, with `--repeatable`."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.counts import Count
from tests.real_models import RealModelError, real_model
from tests.server.harness import LIMIT_S, Front, serving
from tests.tiny import write_tiny

PROMPTS = Count(test=9, soak=200)  # of the tiny model: more than run together
REAL_PROMPTS = Count(test=3, soak=40)
TOPICS = ("rain", "a red house", "how bread is made", "the moon", "old letters", "a fox in a garden", "ships", "time")
Answer = tuple[str, tuple[float, ...]]  # its text, and the log-probabilities of its tokens


def answer(front: Front, number: int) -> Answer:
    """Return the answer to a question; even ones are greedy, odd ones seeded, and each has a length of its own."""
    sampling: dict[str, Any] = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.8, "seed": number}
    prompt = f"{number}. Write about {TOPICS[number % len(TOPICS)]}. " + "Keep in mind what was said. " * (
        number % 3 * 9
    )
    limit = 16 + 11 * (number % 4)
    reply = front.chat("model", prompt, max_tokens=limit, logprobs=True, **sampling)
    assert reply.is_success, reply.text
    choice = reply.json()["choices"][0]
    return choice["message"]["content"], tuple(token["logprob"] for token in choice["logprobs"]["content"])


def answers(front: Front, numbers: Iterable[int], together: int = 1) -> dict[int, Answer]:
    front.http.timeout = 5 * LIMIT_S  # the first answer waits for a load, which measures what repeats on one thread
    numbers = list(numbers)
    with ThreadPoolExecutor(together) as pool:
        return dict(zip(numbers, pool.map(lambda number: answer(front, number), numbers), strict=True))


@pytest.fixture(params=["tiny", "smollm2", "gemma3-270m"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    if request.param == "tiny":
        return write_tiny(path, quant="q4_k", width=256, ffn=256, heads=4, head_dim=64, context=1024)
    try:
        path.symlink_to(real_model(request.param))
    except RealModelError as error:
        pytest.skip(str(error))
    return path


@pytest.mark.timeout(Count(test=900, soak=3600))
def test_repeatable_answers_are_equal_to_the_bit(model: Path, own: dict[str, str], tmp_path: Path) -> None:
    """Cold and cached, alone and together, with drafts and without, and behind a restart that has the snapshots."""
    environment = own | {"EDGELM_REPEATABLE": "true", "EDGELM_CTX": "1024", "EDGELM_THREADS": "1"}
    numbers = range(REAL_PROMPTS if model.is_symlink() else PROMPTS)
    with serving(environment | {"EDGELM_SPEC": "off"}, model, log=tmp_path / "log") as front:
        cold = answers(front, numbers)
        assert answers(front, numbers) == cold, "cached"
        assert answers(front, reversed(numbers), together=8) == cold, "together"
    with serving(environment | {"EDGELM_SPEC": "8"}, model, log=tmp_path / "log") as front:
        assert answers(front, reversed(numbers)) == cold, "with drafts, behind a restart"
        assert answers(front, numbers, together=3) == cold, "with drafts, together"


def test_a_request_demands_that_its_answer_repeats(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "other.gguf", quant="q8_0", context=512)
    with serving(own, tmp_path / "other.gguf", "--repeatable", log=tmp_path / "log") as front:
        replies = [front.chat("other", "hello", temperature=1, repeatable=True, max_tokens=40) for _ in range(2)]
        first, second = (reply.json()["choices"][0]["message"]["content"] for reply in replies)
        assert first == second, "without a seed, too"
        assert front.chat("other", "hello", temperature=1, repeatable=True, seed=5).is_success
