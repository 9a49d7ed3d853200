"""The plots as somebody sees them: every model is named once, nothing is outside, and no label covers another."""

from __future__ import annotations

import itertools
import random
from xml.etree import ElementTree as ET

import pytest

from edgelm.evaluation.comparison import Row
from edgelm.evaluation.plot_data import number_text, plot_data
from edgelm.evaluation.plot_layout import Box, Scale, Spacing, place_labels
from edgelm.evaluation.svg_plot import svg_plot
from edgelm.evaluation.text_plot import text_plot
from tests.evaluation.rows import REFERENCE, row, rows

SVG = "{http://www.w3.org/2000/svg}"
CLOSE = [row(f"UD-Q4_K_XL-{i}", 3.5 + i / 100, 0.011 + i % 3 / 1e4) for i in range(8)]
SETS = {
    "two": rows(REFERENCE, "Q4_0"),
    "twelve": rows(),
    "close": [*CLOSE, *rows(REFERENCE)],
    "equal": [row("a", 3, 0.01), row("b", 3, 0.01), row("c", 3, 0.01)],
    "exact": [*rows(REFERENCE), row("copy", 23.2, 0.0)],
}


def parsed(judged: list[Row]) -> ET.Element:
    picture = svg_plot(judged, REFERENCE, "m <&> models")
    assert picture
    return ET.fromstring(picture)


@pytest.mark.parametrize("name", SETS)
def test_the_picture_names_each_model_and_marks_it(name: str) -> None:
    judged = SETS[name]
    root = parsed(judged)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) <= width
        assert 10 <= float(text.attrib["y"]) <= height
    labels = [text.text for text in root.iter(f"{SVG}text") if text.attrib["class"] == "label"]
    assert sorted(filter(None, labels)) == sorted(model.label for model in judged)
    marks = [mark for mark in root.iter() if mark.tag in (f"{SVG}circle", f"{SVG}path")]
    legend = {mark.attrib["class"] for mark in marks}
    assert len(marks) == len(judged) + len(legend)
    words = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
    for word in ("mean KL divergence from F32, nats per token", "size, MB", "tokens per second", "m <&> models"):
        assert word in words


def test_the_picture_is_made_for_light_and_dark() -> None:
    style = next(parsed(SETS["two"]).iter(f"{SVG}style")).text or ""
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    classes = {element.attrib["class"] for element in parsed(SETS["twelve"]).iter() if "class" in element.attrib}
    for name in classes - {"axis", "grid", "leader", "front"}:
        assert f".{name}{{fill" in light or name in ("beaten", "label"), name
        assert f".{name}{{" in dark, name


def test_without_speeds_the_picture_has_one_part() -> None:
    plain = [row("Q4_0", 3, 0.1, decode_speed=None), *rows(REFERENCE)]
    assert "tokens per second" not in ET.tostring(parsed([plain[0]]), "unicode")


def test_the_labels_of_twelve_models_do_not_overlap() -> None:
    generator = random.Random(5)
    spacing = Spacing(half=(5, 5), gap=(4, 1), step=11, num_distances=7)
    area = Box(0, 0, 600, 400)
    for _ in range(4):
        points = [(generator.uniform(20, 580), generator.gauss(200, 60)) for _ in range(12)]
        sizes = [(generator.randint(25, 90), 14.0) for _ in points]
        boxes = place_labels(points, sizes, area, spacing)
        assert [(round(box.right - box.left), box.bottom - box.top) for box in boxes] == sizes
        for box in boxes:
            assert box.overlap(area) == pytest.approx(box.area)
        for one, other in itertools.combinations(boxes, 2):
            assert one.overlap(other) < 1


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", SETS)
def test_the_terminal_plot_fits_and_names_each_model(name: str, width: int) -> None:
    judged = SETS[name]
    lines = text_plot(judged, REFERENCE, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for model in judged:
        assert text.count(model.label) >= 1, text
    assert "size in MB" in text


def test_nothing_is_drawn_without_figures() -> None:
    lost = [row("lost", 1, 0, figures=None)]
    assert text_plot(lost, REFERENCE, 80) == []
    assert svg_plot(lost, REFERENCE, "") is None


def test_without_distances_the_perplexity_is_drawn() -> None:
    alone = row("Q4_0", 3, 0.1)
    assert alone.figures
    alone.figures["mean_kl"] = None
    data = plot_data([alone], "")
    assert data
    assert (data.title, data.points[0].y) == ("perplexity", 5.1)
    assert "best" not in "".join(text_plot([alone], "", 80))


@pytest.mark.parametrize(
    ("low", "high"), [(1e-5, 3.0), (0.01, 0.011), (2.7, 23.2), (3.0, 3.0), (400.0, 900.0), (1e-9, 1e-8)]
)
def test_ticks_are_round_and_within_the_scale(low: float, high: float) -> None:
    for is_log in (True, False):
        scale = Scale.over([low, high], is_log=is_log)
        assert 0 < scale.place(low) <= scale.place(high) < 1
        ticks = scale.ticks(9)
        assert 2 <= len(ticks) <= 9
        assert ticks == sorted(ticks)
        assert all(scale.low <= tick <= scale.high for tick in ticks)
        assert len({number_text(tick) for tick in ticks}) == len(ticks)
