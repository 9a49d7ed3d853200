"""A plot of judged models in the cells of a terminal: size to the right, distance from the reference upwards.

Owns the choice between that distance and the perplexity, and the letters of the models; plotext draws. Uses no colour,
so that it reads the same on any background and in a file. Knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from edgelm.evaluation.comparison import Row, front

NO_DISTANCE = 1e-5  # nats: less is 0, so that a copy in 16 bits does not stretch the scale
MIN_WIDTH, MAX_WIDTH, HEIGHT = 40, 120, 20
UNITS = (("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))


def text_plot(rows: Sequence[Row], reference: str, width: int) -> list[str]:
    """Return the lines of a plot, none wider than `width` columns; no lines: there is nothing to show."""
    measured = [row for row in rows if row.figures or row.is_reference]
    has_distance = any(row.kl is not None and not row.is_reference for row in measured)
    heights = [(row, row.kl if has_distance else row.perplexity) for row in measured]
    known = [(row, height) for row, height in heights if height is not None]
    if not known:
        return []
    width = max(min(width, MAX_WIDTH), MIN_WIDTH)
    floor = min(NO_DISTANCE, max(height for _, height in known) / 1000) if has_distance else 0.0
    drawn = [(row, height) for row, height in known if height > floor]
    best = front([row for row, _ in known]) if has_distance else [row for row, _ in drawn]
    unit, unit_bytes = _unit(max(row.nbytes for row, _ in known))
    points, legend = [], []
    for i, (row, height) in enumerate(drawn):
        letter = ascii_uppercase[i % len(ascii_uppercase)]
        letter = letter if row in best else letter.lower()
        points.append((row.nbytes / unit_bytes, height, letter))
        legend.append(f"{letter} {row.label}")
    if any(letter.islower() for _, _, letter in points):
        legend.append("(small letters: another is no larger and closer)")
    if at_zero := ", ".join(row.label for row, height in known if height <= floor):
        legend.append(f"(at 0, not drawn: {at_zero})")
    title = f"mean KL divergence from {reference}, nats per token (logarithmic)" if has_distance else "perplexity"
    picture = _picture(points, width, is_log=has_distance) if points else []
    return [title, *picture, f"{f'size in {unit} (logarithmic)':>{width}}", *_wrapped(legend, width)]


def _picture(points: Sequence[tuple[float, float, str]], width: int, *, is_log: bool) -> list[str]:
    """Return the lines of the axes and letters. In one cell, the letter of a best model hides that of another."""
    import plotext  # only plots need it

    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.plot_size(width, HEIGHT)
    plotext.theme("clear")
    lowest, highest = min(y for _, y, _ in points), max(y for _, y, _ in points)
    if is_log and lowest == highest:  # plotext would turn a logarithmic axis of one value around
        plotext.scatter([points[0][0]] * 2, [lowest / 2, highest * 2], marker=" ")
    for x, y, letter in sorted(points, key=lambda point: point[2].isupper()):
        plotext.scatter([x], [y], marker=letter)
    plotext.xscale("log")
    plotext.yscale("log" if is_log else "linear")
    return [line.rstrip() for line in plotext.uncolorize(plotext.build()).rstrip().split("\n")]


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


def _unit(nbytes: int) -> tuple[str, int]:
    fitting = [(name, unit) for name, unit in UNITS if nbytes >= unit]
    return fitting[-1] if fitting else UNITS[0]
