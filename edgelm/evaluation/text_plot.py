"""A plot of judged models in the cells of a terminal: size to the right, distance from the reference upwards.

Owns the cells. Uses no colour, so that it reads the same on any background and in a file. Knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from edgelm.evaluation.comparison import Row
from edgelm.evaluation.plot_data import BEATEN_TEXT, BEST_TEXT, PlotData, PlotPoint, number_text, plot_data
from edgelm.evaluation.plot_layout import Box, Spacing, marks_of, place_labels

BEST, BEATEN, REFERENCE = "●", "○", "◆"
MIN_WIDTH, MAX_WIDTH, HEIGHT = 40, 120, 18
COLUMNS_PER_TICK = 9
SPACING = Spacing(half=(0.5, 0.5), gap=(1.0, 0.0), step=1.0, num_distances=1)


def text_plot(rows: Sequence[Row], reference: str, width: int) -> list[str]:
    """Return the lines of a plot, none wider than `width` columns; no lines: there is nothing to show."""
    data = plot_data(rows, reference)
    if data is None:
        return []
    ticks = {_row_of(data, value): number_text(value) for value in data.y.ticks(HEIGHT // 2)}
    has_zero = any(point.y is None for point in data.points)
    margin = max(map(len, [*ticks.values(), "0"])) + 1
    columns = max(min(width, MAX_WIDTH), MIN_WIDTH) - margin - 1
    height = HEIGHT + 2 * has_zero
    cells = [[" "] * columns for _ in range(height)]
    places = [
        (round(data.x.place(point.x) * (columns - 1)), height - 1 if point.y is None else _row_of(data, point.y))
        for point in data.points
    ]
    places = _apart(places, columns)
    letters = _write_labels(cells, data, places)
    for i, (column, row) in enumerate(places):
        cells[row][column] = letters.get(i) or _mark(data.points[i])
    lines = [data.title + (" (logarithmic)" if data.y.is_log else "")]
    for row, line in enumerate(cells):
        label = "0" if has_zero and row == height - 1 else ticks.get(row, "")
        lines.append(f"{label:>{margin - 1}} {'┤' if label else '│'}{''.join(line)}".rstrip())
    named = [f"{letter} {data.points[i].label}" for i, letter in letters.items()]
    return [*lines, *_x_axis(data, margin, columns), *_wrapped([*named, *_legend(data)], width)]


def _apart(places: list[tuple[int, int]], columns: int) -> list[tuple[int, int]]:
    """Return the cells of the points, where one that is taken moves the next point by as little as possible."""
    taken: list[tuple[int, int]] = []
    for column, row in places:
        near = ((abs(away), (column + away, row)) for away in range(-len(places), len(places) + 1))
        free = [(away, cell) for away, cell in near if cell not in taken and 0 <= cell[0] < columns]
        taken.append(min(free)[1])
    return taken


def _write_labels(cells: list[list[str]], data: PlotData, places: list[tuple[int, int]]) -> dict[int, str]:
    """Write each label beside its point; return a letter for each point whose label has no room there."""
    area = Box(0, 0, len(cells[0]), len(cells))
    middles = [(column + 0.5, row + 0.5) for column, row in places]
    marks = marks_of(middles, SPACING)
    boxes = place_labels(middles, [(float(len(point.label)), 1.0) for point in data.points], area, SPACING)
    letters: dict[int, str] = {}
    written: list[Box] = []
    for i, box in enumerate(boxes):
        rounded = Box(round(box.left), round(box.top), round(box.left) + len(data.points[i].label), round(box.top) + 1)
        if rounded.overlap(area) < rounded.area or any(map(rounded.overlap, (*marks, *written))):
            letter = ascii_uppercase[len(letters) % len(ascii_uppercase)]
            letters[i] = letter if data.points[i].is_best else letter.lower()
            continue
        written.append(rounded)
        row, start = int(rounded.top), int(rounded.left)
        cells[row][start : start + len(data.points[i].label)] = data.points[i].label
    return letters


def _mark(point: PlotPoint) -> str:
    return REFERENCE if point.is_reference else BEST if point.is_best else BEATEN


def _wrapped(parts: list[str], width: int) -> list[str]:
    """Return the parts in lines of at most `width` columns."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}   {part}" if lines[-1] else part
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return [line for line in lines if line]


def _row_of(data: PlotData, value: float) -> int:
    return round((1 - data.y.place(value)) * (HEIGHT - 1))


def _x_axis(data: PlotData, margin: int, columns: int) -> list[str]:
    line, texts = ["─"] * columns, [" "] * (columns + margin + 1)
    free_from = 0
    for value in data.x.ticks(columns // COLUMNS_PER_TICK):
        column, text = round(data.x.place(value) * (columns - 1)), number_text(value)
        start = margin + 1 + column - len(text) // 2
        if start < free_from or start + len(text) > len(texts):
            continue
        line[column] = "┬"
        texts[start : start + len(text)] = text
        free_from = start + len(text) + 1
    name = f"size in {data.unit}" + (" (logarithmic)" if data.x.is_log else "")
    return [" " * margin + "└" + "".join(line), "".join(texts).rstrip(), f"{name:>{margin + 1 + columns}}"]


def _legend(data: PlotData) -> list[str]:
    """Return the parts of the legend. A letter in place of a mark is a capital where the mark would be full."""
    if not data.is_distance:
        return []
    parts = [f"{BEST} {BEST_TEXT}"]
    if any(not point.is_best and not point.is_reference for point in data.points):
        parts.append(f"{BEATEN} {BEATEN_TEXT}")
    if any(point.is_reference for point in data.points):
        parts.append(f"{REFERENCE} the reference")
    return parts
