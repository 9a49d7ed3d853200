"""A plot of judged models as an SVG: size and distance from the reference, and beside it the speed here.

Owns the drawing: it is read on a light and on a dark background, by the browser's own preference, and needs no font of
ours. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from edgelm.evaluation.comparison import Row
from edgelm.evaluation.plot_data import BEATEN_TEXT, BEST_TEXT, PlotData, PlotPoint, number_text, plot_data
from edgelm.evaluation.plot_layout import Box, Spacing, place_labels

LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "faint": "#59636e", "grid": "#d8dee4", "accent": "#0b69c7"}
DARK = {"paper": "#0d1117", "ink": "#e6edf3", "faint": "#9198a1", "grid": "#2f363e", "accent": "#58a6ff"}
WIDTH, PLOT_WIDTH = 920, 620
LEFT, TOP, BOTTOM, RIGHT = 64, 62, 76, 20  # around the plot
PLOT_HEIGHT, ZERO_HEIGHT = 380, 34  # the second: the strip for no distance at all
BAR_TOP, BAR_HEIGHT, BAR_STEP = 86, 13, 34
RADIUS = 4.5
CHAR_WIDTH, LINE_HEIGHT = 6.6, 14.0  # of a label, a bit more than most fonts have at 12 px
MAX_LABEL, MAX_BAR_LABEL = 32, 22
SPACING = Spacing(half=(RADIUS + 1, RADIUS + 1), gap=(4, 1), step=11, num_distances=7)


def svg_plot(rows: Sequence[Row], reference: str, heading: str) -> str | None:
    """Return the picture; None: there is nothing to show."""
    data = plot_data(rows, reference)
    if data is None:
        return None
    timed = [row for row in rows if row.decode_speed]
    width = WIDTH if timed else PLOT_WIDTH + RIGHT
    strip = ZERO_HEIGHT if any(point.y is None for point in data.points) else 0
    height = max(TOP + PLOT_HEIGHT + strip + BOTTOM, BAR_TOP + BAR_STEP * len(timed) + 20)
    shape = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {shape} font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(heading)}</title>",
        _style(),
        f'<rect class="paper" width="{width}" height="{height}"/>',
        _text(LEFT, 22, heading, "ink", extra=' font-size="14" font-weight="600"'),
        *_distance_panel(data, strip),
        *(_speed_panel(timed) if timed else ()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _style() -> str:
    return f"<style>{_rules(LIGHT)}\n@media (prefers-color-scheme: dark) {{{_rules(DARK)}}}</style>"


def _rules(colours: dict[str, str]) -> str:
    paper, ink, faint, grid, accent = (colours[name] for name in ("paper", "ink", "faint", "grid", "accent"))
    return (
        f".paper{{fill:{paper}}}.ink{{fill:{ink}}}.faint{{fill:{faint}}}.grid{{stroke:{grid}}}.axis{{stroke:{faint}}}"
        f".accent{{fill:{accent}}}.front{{stroke:{accent};fill:none}}.beaten{{stroke:{faint};fill:{paper}}}"
        f".leader{{stroke:{faint}}}.label{{fill:{ink};stroke:{paper};stroke-width:3px;paint-order:stroke}}"
    )


def _distance_panel(data: PlotData, strip: int) -> Iterator[str]:
    right, base = PLOT_WIDTH, TOP + PLOT_HEIGHT
    heights = [base + strip * 0.55 if point.y is None else _y(data, point.y) for point in data.points]
    places = [(_x(data, point.x), y) for point, y in zip(data.points, heights, strict=True)]
    title = data.title + (" (logarithmic)" if data.y.is_log else "")
    yield _text(LEFT, 44, title, "faint")
    for value in data.y.ticks(9):
        y = _y(data, value)
        yield _line(LEFT, y, right, y, "grid")
        yield _text(LEFT - 8, y + 4, number_text(value), "faint", "end")
    if strip:
        y = base + strip * 0.55
        yield _line(LEFT, y, right, y, "grid", ' stroke-dasharray="2 3"')
        yield _text(LEFT - 8, y + 4, "0", "faint", "end")
    yield _line(LEFT, base + strip, right, base + strip, "axis")
    free_from = 0.0
    for value in data.x.ticks(9):
        x, text = _x(data, value), number_text(value)
        half = len(text) * CHAR_WIDTH / 2
        if x - half < free_from:
            continue
        free_from = x + half + 8
        yield _line(x, base + strip, x, base + strip + 5, "axis")
        yield _text(x, base + strip + 18, text, "faint", "middle")
    name = f"size, {data.unit}" + (" (logarithmic)" if data.x.is_log else "")
    yield _text(right, base + strip + 38, name, "faint", "end")
    yield from _legend(data, base + strip + 60)
    best = sorted((place for point, place in zip(data.points, places, strict=True) if point.is_best and point.y))
    if len(best) > 1 and data.is_distance:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in best)
        yield f'<polyline class="front" points="{path}" stroke-width="1.5" stroke-opacity="0.55"/>'
    yield from _points(data, places, Box(LEFT + 4, TOP, right, base + strip))


def _points(data: PlotData, places: list[tuple[float, float]], area: Box) -> Iterator[str]:
    labels = [_short(point.label) for point in data.points]
    sizes = [(len(label) * CHAR_WIDTH, LINE_HEIGHT) for label in labels]
    boxes = place_labels(places, sizes, area, SPACING)
    for (x, y), box in zip(places, boxes, strict=True):
        near_x, near_y = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
        if max(abs(near_x - x), abs(near_y - y)) > RADIUS + 6:
            yield _line(x, y, near_x, near_y, "leader", ' stroke-width="0.8"')
    for point, (x, y) in zip(data.points, places, strict=True):
        yield from _error_bar(data, point, x)
        yield _mark(x, y, point)
    for label, box, (x, _) in zip(labels, boxes, places, strict=True):
        if box.left > x:
            yield _text(box.left, box.top + 11, label, "label")
        elif box.right < x:
            yield _text(box.right, box.top + 11, label, "label", "end")
        else:
            yield _text((box.left + box.right) / 2, box.top + 11, label, "label", "middle")


def _error_bar(data: PlotData, point: PlotPoint, x: float) -> Iterator[str]:
    if point.y is None or point.error <= 0:
        return
    top = _y(data, min(point.y + point.error, data.y.high))
    bottom = _y(data, max(point.y - point.error, data.y.low))
    if bottom - top > 2 * RADIUS:
        yield _line(x, top, x, bottom, "axis", ' stroke-width="1"')


def _mark(x: float, y: float, point: PlotPoint) -> str:
    if point.is_reference:
        r = RADIUS + 1
        path = f"M{x:.1f} {y - r:.1f}L{x + r:.1f} {y:.1f}L{x:.1f} {y + r:.1f}L{x - r:.1f} {y:.1f}Z"
        return f'<path class="ink" d="{path}"/>'
    kind = "accent" if point.is_best else "beaten"
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" stroke-width="1.5"/>'


def _legend(data: PlotData, y: float) -> Iterator[str]:
    if not data.is_distance:
        return
    x = float(LEFT)
    shown = [(PlotPoint("", 0, 0, 0, True, False), BEST_TEXT)]
    if any(not point.is_best and not point.is_reference for point in data.points):
        shown.append((PlotPoint("", 0, 0, 0, False, False), BEATEN_TEXT))
    if any(point.is_reference for point in data.points):
        shown.append((PlotPoint("", 0, 0, 0, False, True), "reference"))
    for point, text in shown:
        yield _mark(x + 4, y - 4, point)
        yield _text(x + 14, y, text, "faint")
        x += 14 + len(text) * 5.9 + 20


def _speed_panel(rows: Sequence[Row]) -> Iterator[str]:
    """Draw a bar for each model in the order of the table: the decode speed, and the prompt speed as text."""
    left, room = PLOT_WIDTH + 36, WIDTH - PLOT_WIDTH - 36 - RIGHT
    yield _text(left, 44, "speed here, tokens per second", "faint")
    yield _text(left, 60, "the bar is decoding", "faint", extra=' font-size="11"')
    greatest = max(row.decode_speed or 0.0 for row in rows)
    for i, row in enumerate(rows):
        y = BAR_TOP + i * BAR_STEP
        length = (row.decode_speed or 0.0) / greatest * (room - 52)
        yield _text(left, y, _short(row.label, MAX_BAR_LABEL), "ink")
        if row.prompt_speed:
            yield _text(left + room, y, f"prompt {_speed(row.prompt_speed)}", "faint", "end", ' font-size="11"')
        yield f'<rect class="accent" x="{left}" y="{y + 5}" width="{length:.1f}" height="{BAR_HEIGHT - 4}" rx="2"/>'
        yield _text(left + length + 6, y + 13, _speed(row.decode_speed or 0.0), "ink", extra=' font-size="11"')


def _x(data: PlotData, value: float) -> float:
    return LEFT + data.x.place(value) * (PLOT_WIDTH - LEFT)


def _y(data: PlotData, value: float) -> float:
    return TOP + (1 - data.y.place(value)) * PLOT_HEIGHT


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _short(label: str, most: int = MAX_LABEL) -> str:
    """Return a label of at most so many characters; its end says most, since that has the quantization."""
    end = most * 2 // 3
    return label if len(label) <= most else f"{label[: most - end - 1]}…{label[-end:]}"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, extra: str = "") -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{extra}/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
