"""Token counts, speed and savings of the saved answers, by model and by day.

Owns the sums and the two estimates of saved work. The store returns the figures of answers as they were saved; knows
nothing of how they are drawn.

Time saved by prefixes: prompt tokens that the endpoint had in its prefix cache, divided by the speed at which the same
model reads a prompt. That speed is the median over the model's answers of

    (prompt_tokens - cached_tokens) / first_token_s

over answers with at least MIN_NEW new prompt tokens: with fewer, the fixed cost of a request is most of the time. The
median leaves out the ones that waited for a model to load. A model without such an answer has no speed, and no time.

Steps saved by drafts: an accepted draft token is a token that needed no step of its own. The time of a step without a
draft is not known, so no time is claimed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from statistics import median
from time import localtime
from typing import Any

NUM_DAYS = 30
MIN_NEW = 64  # prompt tokens
MIN_FIRST_MS = 1e-3  # less was never measured
MAX_FIGURE = 1e12  # tokens, or milliseconds


@dataclass(slots=True)
class Sums:
    """Sums over answers, in tokens. `read` are prompt tokens that were computed, `cached` those that were not."""

    answers: int = 0
    read: int = 0
    cached: int = 0
    written: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Sums) -> None:
        """Add the sums of other answers."""
        self.answers += other.answers
        self.read += other.read
        self.cached += other.cached
        self.written += other.written
        self.drafted += other.drafted
        self.accepted += other.accepted

    @property
    def drafted_share(self) -> float:
        """The share of the written tokens that came from drafts, 0 to 1."""
        return min(self.accepted / self.written, 1.0) if self.written else 0.0


@dataclass(slots=True)
class ModelFigures:
    """The figures of one model. None: none of its answers tells."""

    model: str
    sums: Sums = field(default_factory=Sums)
    tokens_per_second: float | None = None  # the median of its answers
    prompt_speed: float | None = None  # prompt tokens a second
    saved_s: float | None = None  # by prefixes


@dataclass(slots=True)
class DayFigures:
    """The figures of one day, of all models and of each."""

    day: date
    sums: Sums = field(default_factory=Sums)
    written: dict[str, int] = field(default_factory=dict)  # by model


@dataclass(slots=True)
class Statistics:
    """All figures. `models` begins with the one that wrote the most, `days` are the last ones, oldest first."""

    total: Sums
    models: list[ModelFigures]
    days: list[DayFigures]

    @property
    def saved_s(self) -> float:
        """The seconds saved by prefixes, of the models whose speed is known."""
        return sum(figures.saved_s or 0.0 for figures in self.models)


def summarize(rows: Iterable[Sequence[Any]], today: date) -> Statistics:
    """Return the statistics of answers; a row is model, seconds since 1970, and statistics as JSON.

    Days are those of this machine's time. An answer without a number of written tokens is not counted.
    """
    total = Sums()
    models: dict[str, ModelFigures] = {}
    first = today - timedelta(days=NUM_DAYS - 1)
    days = {day: DayFigures(day) for day in (first + timedelta(days=i) for i in range(NUM_DAYS))}
    speeds: dict[str, list[float]] = defaultdict(list)
    prompt_speeds: dict[str, list[float]] = defaultdict(list)
    for model, created, text in rows:
        values = _figures(text)
        written, prompt = _whole(values, "completion_tokens"), _whole(values, "prompt_tokens")
        if not written:
            continue
        cached = min(_whole(values, "cached_tokens"), prompt)
        new = prompt - cached
        sums = Sums(1, new, cached, written, _whole(values, "drafted"), _whole(values, "accepted"))
        total.add(sums)
        if model not in models:
            models[model] = ModelFigures(model)
        models[model].sums.add(sums)
        if (day := days.get(date(*localtime(created)[:3]))) is not None:
            day.sums.add(sums)
            day.written[model] = day.written.get(model, 0) + written
        if speed := values.get("tokens_per_second"):
            speeds[model].append(speed)
        first_token_ms = values.get("first_token_ms")
        if first_token_ms and first_token_ms >= MIN_FIRST_MS and new >= MIN_NEW:
            prompt_speeds[model].append(1000 * new / first_token_ms)
    for figures in models.values():
        if figures.model in speeds:
            figures.tokens_per_second = median(speeds[figures.model])
        if figures.model in prompt_speeds:
            figures.prompt_speed = median(prompt_speeds[figures.model])
            figures.saved_s = figures.sums.cached / figures.prompt_speed
    by_written = sorted(models.values(), key=lambda figures: (-figures.sums.written, figures.model))
    return Statistics(total, by_written, list(days.values()))


def _figures(text: str) -> dict[str, float]:
    """Return the figures of an answer, without what is none: other programs wrote some of them."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    items = values.items() if isinstance(values, dict) else ()
    return {name: value for name, value in items if _is_figure(value)}


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_FIGURE


def _whole(values: Mapping[str, float], name: str) -> int:
    return int(values.get(name, 0))
