"""Deltas that come together travel as one, and lose nothing."""

from __future__ import annotations

from edgelm.engine.core import Sampled
from edgelm.jobs.request import AnswerDelta, joined
from edgelm.text.parse import Content


def delta(text: str, token: int, choice: int = 0, **fields: object) -> AnswerDelta:
    return AnswerDelta((Content(text),), (Sampled(token),), choice, **fields)  # type: ignore[arg-type]


def test_deltas_of_a_choice_become_one_with_all_its_tokens_and_its_end() -> None:
    (one,) = joined([delta("a", 1), delta("b", 2), delta("c", 3, reason="stop", reasoning_tokens=7, notes=("n",))])
    assert (one.text, [sample.id for sample in one.sampled]) == ("abc", [1, 2, 3])
    assert (one.reason, one.reasoning_tokens, one.notes) == ("stop", 7, ("n",))


def test_choices_stay_apart_and_in_order() -> None:
    deltas = joined([delta("a", 1), delta("b", 2, 1), delta("c", 3, 1), delta("d", 4)])
    assert [(one.choice, one.text) for one in deltas] == [(0, "a"), (1, "bc"), (0, "d")]
