"""A plot of judged models: its points, its words and its numbers as text, the same in every form.

Owns the choice between the distance from the reference and the perplexity. Draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgelm.evaluation.comparison import Row, front
from edgelm.evaluation.plot_layout import Scale

NO_DISTANCE = 1e-5  # nats: less is drawn as 0, so that a copy in 16 bits does not stretch the scale
BEST_TEXT = "best of its size"
BEATEN_TEXT = "beaten: another is no larger and closer"
UNITS = (("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A model. `y` is None where it is practically 0 on a logarithmic scale: the reference, or an exact copy."""

    label: str
    x: float
    y: float | None
    error: float
    is_best: bool  # on the front
    is_reference: bool


@dataclass(frozen=True, slots=True)
class PlotData:
    """The points of a plot, its scales, and the titles of its axes. `x` is in `unit`."""

    points: list[PlotPoint]
    x: Scale
    y: Scale
    unit: str
    title: str  # of the vertical axis
    is_distance: bool  # from the reference; otherwise it is the perplexity


def plot_data(rows: Sequence[Row], reference: str) -> PlotData | None:
    """Return the plot of the rows that have figures; None: there are none."""
    measured = [row for row in rows if row.figures or row.is_reference]
    is_distance = any(row.kl is not None and not row.is_reference for row in measured)
    shown = [row for row in measured if (row.kl if is_distance else row.perplexity) is not None]
    if not shown:
        return None
    unit, unit_bytes = _unit(max(row.nbytes for row in shown))
    best = {row.label for row in (front(shown) if is_distance else shown)}
    floor = min(NO_DISTANCE, max((row.kl or 0.0 for row in shown), default=0.0) / 1000) if is_distance else 0.0
    points = []
    for row in shown:
        y = row.kl if is_distance else row.perplexity
        error = row.kl_error if is_distance else float((row.figures or {}).get("stderr", 0.0))
        points.append(
            PlotPoint(
                row.label,
                row.nbytes / unit_bytes,
                y if y is not None and y > floor else None,
                error,
                row.label in best,
                row.is_reference,
            )
        )
    heights = [point.y for point in points if point.y]
    y_scale = Scale.over(heights or [1e-6, 1.0], is_log=True if is_distance else None, margin=0.09)
    title = f"mean KL divergence from {reference}, nats per token" if is_distance else "perplexity"
    return PlotData(points, Scale.over([point.x for point in points]), y_scale, unit, title, is_distance)


def number_text(value: float) -> str:
    """Return the number of a tick: 0.002, 1e-05, 1,500."""
    if value and abs(value) < 0.99e-4:
        return f"{value:.2g}"
    return f"{value:,.6f}".rstrip("0").rstrip(".") if abs(value) < 10 else f"{value:,.6g}"


def _unit(nbytes: int) -> tuple[str, int]:
    fitting = [(name, unit) for name, unit in UNITS if nbytes >= unit]
    return fitting[-1] if fitting else UNITS[0]
