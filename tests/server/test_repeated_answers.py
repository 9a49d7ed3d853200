"""What the guide says of answers that repeat to the letter, on a real model through the endpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.counts import Count
from tests.real_models import real_model
from tests.server.harness import Front, serving

PROMPTS = Count(test=3, soak=200)
TOPICS = ("rain", "a red house", "how bread is made", "the moon", "old letters", "a fox in a garden", "ships", "time")


def texts(front: Front, numbers: Iterable[int]) -> dict[int, str]:
    """Return the answers to some questions, one after the other: even ones greedy, odd ones seeded."""
    answers = {}
    for number in numbers:
        sampling = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.8, "seed": number}
        prompt = f"{number}. Write about {TOPICS[number % len(TOPICS)]}."
        reply = front.chat("smollm2", prompt, max_tokens=48, **sampling)
        assert reply.is_success, reply.text
        answers[number] = reply.json()["choices"][0]["message"]["content"]
    return answers


@pytest.mark.parametrize("spec", ["off", "auto"])
def test_a_cache_of_8_bits_repeats_answers_to_the_letter(spec: str, own: dict[str, str], tmp_path: Path) -> None:
    """Cold and cached, with drafts and without, and in another process."""
    model = tmp_path / "smollm2.gguf"
    model.symlink_to(real_model("smollm2"))
    numbers = range(PROMPTS)
    environment = own | {"EDGELM_KV": "int8", "EDGELM_SPEC": spec}
    environment.pop("OMP_NUM_THREADS", None)
    with serving(environment, model, log=tmp_path / "log") as front:
        cold = texts(front, numbers)
        assert texts(front, numbers) == cold
    with serving(environment | {"EDGELM_SPEC": "off"}, model, log=tmp_path / "log") as front:
        assert texts(front, reversed(numbers)) == cold
