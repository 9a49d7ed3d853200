"""The plot as somebody sees it: every model is named, and its letter is where its size and distance are."""

from __future__ import annotations

import pytest

from edgelm.evaluation.comparison import Row
from edgelm.evaluation.plot import text_plot
from tests.evaluation.rows import REFERENCE, row, rows

CLOSE = [row(f"UD-Q4_K_XL-{i}", 3.5 + i / 100, 0.011 + i % 3 / 1e4) for i in range(8)]
SETS = {
    "two": rows(REFERENCE, "Q4_0"),
    "twelve": rows(),
    "close": [*CLOSE, *rows(REFERENCE)],
    "equal": [row("a", 3, 0.01), row("b", 3, 0.01), row("c", 3, 0.01)],
    "exact": [*rows(REFERENCE), row("copy", 23.2, 0.0)],
}


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", SETS)
def test_the_plot_fits_and_names_each_model(name: str, width: int) -> None:
    judged = SETS[name]
    lines = text_plot(judged, REFERENCE, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for model in judged:
        assert model.label in text
    assert "mean KL divergence from F32, nats per token" in lines[0]
    assert "size in MB" in text


def place_of(letter: str, lines: list[str]) -> tuple[int, int]:
    """Return the column and the row of a letter between the axes."""
    (place,) = [(line.index(letter), row) for row, line in enumerate(lines[1:-2]) if letter in line and "│" in line]
    return place


def test_letters_are_where_size_and_distance_are() -> None:
    lines = text_plot(SETS["twelve"], REFERENCE, 100)
    parts = [part.split() for line in lines[-2:] for part in line.split("   ")]
    legend = {part[1]: part[0] for part in parts if len(part[0]) == 1}
    (left, low), (middle, centre), (right, high) = (
        place_of(legend[name], lines) for name in ("Q8_0", "Q4_K_M", "Q2_K")
    )
    assert left > middle > right  # the larger
    assert low > centre > high  # the closer: rows are counted from above
    assert legend["Q5_K_M"].isupper()
    assert legend["Q4_0"].islower()  # another is no larger and closer
    assert "at 0, not drawn: F32, F16" in lines[-1] + lines[-2]


def test_nothing_is_drawn_without_figures() -> None:
    assert text_plot([row("lost", 1, 0, figures=None)], REFERENCE, 80) == []


def test_without_distances_the_perplexity_is_drawn() -> None:
    alone: Row = row("Q4_0", 3, 0.1)
    assert alone.figures
    alone.figures["mean_kl"] = None
    lines = text_plot([alone], "", 80)
    assert lines[0] == "perplexity"
    assert place_of("A", lines)
    assert lines[-1] == "A Q4_0"
