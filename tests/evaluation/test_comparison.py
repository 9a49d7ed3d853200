"""Which of several models others beat, and the advice that follows from the figures."""

from __future__ import annotations

import pytest

from edgelm.evaluation.comparison import advice, beaten_by, by_size, front, short_labels
from tests.evaluation.rows import row, rows


def test_the_front_has_no_model_that_another_beats() -> None:
    judged = rows()
    labels = [model.label for model in front(judged)]
    assert labels == ["Q2_K", "Q3_K_M", "IQ4_XS", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0", "F16", "F32"]
    for model in judged:
        better = beaten_by(model, judged)
        assert (better is None) == (model.label in labels)
        if better:
            assert better.nbytes <= model.nbytes
            assert (better.kl or 0) <= (model.kl or 0)


def test_equal_models_do_not_beat_each_other() -> None:
    twins = [row("A", 3, 0.1), row("B", 3, 0.1)]
    assert front(twins) == twins


def test_models_within_the_noise_are_as_close_as_each_other() -> None:
    """Q6_K is smaller; that Q8_0 is nearer by less than the noise says nothing."""
    judged = rows("F32", "Q8_0", "Q6_K", "Q4_0")
    assert beaten_by(judged[1], judged) is None
    for one, kl in ((judged[1], 3e-4), (judged[2], 1.2e-3)):
        assert one.figures
        one.figures.update(noise_floor={"mean_kl": kl}, against={"noise_floor": {"mean_kl": 1e-3}})
        one.figures["distinguishable"] = False
    assert beaten_by(judged[1], judged) is judged[2]
    assert [one.noise_floor for one in judged] == [None, 1e-3, 1.2e-3, None]
    assert [one.distinguishable for one in judged] == [None, False, False, None]


def test_the_advice_names_what_is_beaten_and_the_smallest_for_a_share() -> None:
    assert advice(rows(), "F32") == [
        "no larger, and no farther from F32: IQ4_XS than Q4_K_S, Q4_0",
        "the smallest with F32's next token for 99 %: Q5_K_S; for 95 %: IQ4_XS; for 90 %: Q3_K_M",
    ]
    assert advice(rows("F32", "Q8_0"), "F32") == []
    assert advice(rows("Q8_0", "Q4_0"), "itself") == [], "they were compared with different models"


def test_a_model_without_figures_is_neither_best_nor_beaten() -> None:
    judged = [*rows("F32", "Q4_0"), row("lost", 1, 0, figures=None, problem="it is cut short")]
    assert [model.label for model in front(judged)] == ["Q4_0", "F32"]
    assert by_size(judged)[-1].label == "lost"
    assert judged[-1].kl is judged[-1].perplexity is judged[-1].same_top is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["starter-F32", "starter-Q8_0"], ("starter-", ["F32", "Q8_0"])),
        (["qwen3:4b:Q4_K_M", "qwen3:4b:Q4_0"], ("qwen3:4b:", ["Q4_K_M", "Q4_0"])),
        (["q-7b.Q4_0", "q-7b.Q8_0"], ("q-7b.", ["Q4_0", "Q8_0"])),
        (["a2.5-1", "a2.6-1"], ("", ["a2.5-1", "a2.6-1"])),
        (["a-1", "b-1"], ("", ["a-1", "b-1"])),
        (["starter", "starter-Q8_0"], ("", ["starter", "starter-Q8_0"])),
        (["m-", "m-Q8"], ("", ["m-", "m-Q8"])),
        (["alone-Q8"], ("", ["alone-Q8"])),
        ([], ("", [])),
    ],
)
def test_labels_leave_out_the_common_beginning(names: list[str], expected: tuple[str, list[str]]) -> None:
    assert short_labels(names) == expected


def test_the_types_of_a_row_are_shares_of_its_bytes() -> None:
    assert row("x", 1, 0, types={"Q4_K": 730, "Q6_K": 260, "F32": 10}).main_types == "Q4_K 73 %, Q6_K 26 %"
    assert row("x", 1, 0, types={"F16": 999, "F32": 1}).main_types == "F16"
    assert row("x", 1, 0, types={}).main_types == row("x", 1, 0).main_types == ""
