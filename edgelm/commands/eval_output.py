"""The output of `edgelm eval` for several models: a table, a plot, advice; or JSON or CSV; and the file of `--svg`.

Owns the forms. Computes nothing.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from edgelm.base.atomic import atomic_write
from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.machine.conditions import Conditions, joined
from edgelm.commands.list import plain_console
from edgelm.evaluation.comparison import Row, advice, beaten_by
from edgelm.evaluation.plot import text_plot
from edgelm.library.progress import size_text

WIDE = 95  # columns beside the labels from which errors and types have room in the table
MAX_REFERENCE = 16  # characters of its label in a title
NOISE_MARK = "≈ "  # before a divergence that is not distinguishable from noise
STEADY = 1.5  # the spread of speeds from which a note says so
PLOT_WIDTH = 100  # columns of a plot in a file
SVG_WIDTH = 130  # columns of a picture: all columns of most tables
# Rich's format without a window around the text and without fonts from elsewhere, for a light and a dark background.
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>{styles}
.paper {{ fill: #ffffff }}
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px }}
.{unique_id}-matrix text {{ fill: #1f2328 }}
@media (prefers-color-scheme: dark) {{ .paper {{ fill: #0d1117 }} .{unique_id}-matrix text {{ fill: #e6edf3 }} }}
</style>
<defs>{lines}</defs>
<rect class="paper" width="{width}" height="{height}"/>
<g class="{unique_id}-matrix" transform="translate(9, 9)">
{matrix}
</g>
</svg>
"""
FIELDS = (
    "name", "label", "bytes", "bits_per_weight", "perplexity", "perplexity_stderr", "mean_kl", "mean_kl_stderr",
    "p99_kl", "kl_noise_floor", "distinguishable", "top1_agreement", "prompt_tokens_per_second",
    "decode_tokens_per_second", "types", "beaten_by", "error",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the result is printed."""

    plot: bool = False
    svg: Path | None = None
    as_json: bool = False
    as_csv: bool = False

    def check(self) -> None:
        """Raise RequestError for forms that exclude each other, or a picture that could not be written at the end."""
        if self.as_json and self.as_csv:
            raise RequestError("--json and --csv are two forms of the output", "give one of them")
        if self.svg and not os.access(self.svg.expanduser().absolute().parent, os.W_OK):
            raise RequestError(f"{self.svg} cannot be written", "give a file in a folder of yours")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The models of one command, judged."""

    rows: list[Row]
    family: str  # what all names begin with
    reference: str  # its label
    text: str  # name of the file

    @property
    def heading(self) -> str:
        """The number of models, the text, and the measured part of it."""
        measured = next((row for row in self.rows if row.figures and "tokens" in row.figures), None)
        tokens = f": {measured.figures['tokens']:,} tokens" if measured and measured.figures else ""
        num_windows = measured.figures["windows"] if measured and measured.figures else 0
        windows = f" in {num_windows:,} window{'s' if num_windows > 1 else ''}" if num_windows else ""
        family = f"{self.family}, " if self.family else ""
        count = f"{len(self.rows)} model{'s' if len(self.rows) > 1 else ''}"
        return f"{family}{count} on {self.text}{tokens}{windows}"


def print_judgement(judgement: Judgement, form: Form) -> None:
    """Print the models, and write the picture. Raises EdgeLMError if that cannot be written."""
    if form.svg:
        _write_svg(judgement, form.svg.expanduser())
    if form.as_json:
        print(json.dumps(_document(judgement), ensure_ascii=False))
    elif form.as_csv:
        writer = csv.DictWriter(sys.stdout, FIELDS)
        writer.writeheader()
        writer.writerows(_record(row, judgement.rows) | {"types": row.main_types} for row in judgement.rows)
    else:
        _print_table(judgement, plain_console())
        if form.plot:
            console = Console(highlight=False, markup=False)
            width = console.width if console.is_terminal else PLOT_WIDTH
            print()
            print("\n".join(text_plot(judgement.rows, judgement.reference, width)))


def _write_svg(judgement: Judgement, path: Path) -> None:
    plot = text_plot(judgement.rows, judgement.reference, PLOT_WIDTH)
    if not plot:
        print(f"note: there is nothing to draw, so {path} was not written", file=sys.stderr)
        return
    console = Console(highlight=False, markup=False, width=SVG_WIDTH, record=True, file=io.StringIO())
    _print_table(judgement, console)
    console.print("\n" + "\n".join(plot))
    picture = console.export_svg(code_format=SVG)
    try:
        atomic_write(path, picture.encode(), mode=0o644)
    except OSError as error:
        raise EdgeLMError(f"{path} cannot be written: {error.strerror}", "give another file") from None


def _document(judgement: Judgement) -> dict[str, Any]:
    return {
        "text": judgement.text,
        "reference": judgement.reference,
        "models": [
            _record(row, judgement.rows) | {"types": row.types, "figures": row.figures} for row in judgement.rows
        ],
        "advice": advice(judgement.rows, judgement.reference),
    }


def _record(row: Row, rows: list[Row]) -> dict[str, Any]:
    figures = row.figures or {}
    better = None if row.is_reference else beaten_by(row, [other for other in rows if not other.is_reference])
    values = (
        row.name, row.label, row.nbytes, row.bits_per_weight, row.perplexity, figures.get("stderr"), row.kl,
        figures.get("mean_kl_stderr"), figures.get("p99_kl"), row.noise_floor, row.distinguishable, row.same_top,
        row.prompt_speed, row.decode_speed, None, better.label if better else None, row.problem or None,
    )  # fmt: skip
    return dict(zip(FIELDS, values, strict=True))


def _print_table(judgement: Judgement, console: Console) -> None:
    rows = judgement.rows
    wide = console.width >= WIDE + max(len(row.label) for row in rows)
    console.print(judgement.heading)
    table = Table(box=None, pad_edge=False)
    titles = ["MODEL", "SIZE", "BITS", "PERPLEXITY"]
    has_distance = any(row.kl is not None and not row.is_reference for row in rows)
    named = wide and len(judgement.reference) <= MAX_REFERENCE
    titles += [f"KL FROM {judgement.reference.upper()}" if named else "KL", "SAME TOKEN"] if has_distance else []
    has_speed = any(row.decode_speed for row in rows)
    titles += ["PROMPT/S", "DECODE/S"] if has_speed else []
    titles += ["TYPES"] if wide else []
    for title in titles:
        left = title in ("MODEL", "TYPES")
        table.add_column(title, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for row in rows:
        table.add_row(*_cells(row, wide=wide, has_distance=has_distance, has_speed=has_speed))
    console.print(table)
    for line in _below(judgement, wide=wide):
        console.print(line)


def _cells(row: Row, *, wide: bool, has_distance: bool, has_speed: bool) -> Iterator[str]:
    figures = row.figures or {}
    yield row.label
    yield size_text(row.nbytes) if row.nbytes else ""
    yield f"{row.bits_per_weight:.2f}" if row.bits_per_weight else ""
    error = f" ± {figures['stderr']:.4f}" if wide and "stderr" in figures else ""
    yield "" if row.perplexity is None else f"{row.perplexity:.4f}{error}"
    if has_distance:
        if row.is_reference:
            yield from ("reference", "")
        elif row.kl is None or row.same_top is None:
            yield from ("", "")
        else:
            mark = NOISE_MARK if row.distinguishable is False else ""
            yield mark + _kl(row.kl) + (f" ± {_kl(row.kl_error)}" if wide else "")
            yield f"{row.same_top:.2%}".replace("%", " %")
    if has_speed:
        yield _speed(row.prompt_speed)
        yield _speed(row.decode_speed)
    if wide:
        yield row.main_types


def _below(judgement: Judgement, *, wide: bool) -> Iterator[str]:
    """Yield the lines below the table: reasons, types where the table has no room for them, engines, advice."""
    rows = judgement.rows
    for row in rows:
        if row.problem:
            yield f"{row.label} was not evaluated: {row.problem}"
    notes = [
        *_noise(judgement),
        *_engines(rows),
        *_uncertain(rows),
        *([] if wide else _types(rows)),
        *advice(rows, judgement.reference),
    ]
    if notes:
        yield ""
    yield from notes


def _noise(judgement: Judgement) -> Iterator[str]:
    """Yield the noise floor, and which rows are not above twice of it."""
    floors = [row.noise_floor for row in judgement.rows if row.noise_floor is not None]
    if not floors:
        return
    least, most = _kl(min(floors)), _kl(max(floors))
    floor = least if least == most else f"{least} to {most}"
    yield f"noise floor: KL {floor} of a model from itself, one token a step"
    same = ", ".join(row.label for row in judgement.rows if row.distinguishable is False)
    if same:
        yield f"{NOISE_MARK}not distinguishable from {judgement.reference}, KL not above twice the floor: {same}"


def _engines(rows: list[Row]) -> Iterator[str]:
    makers: dict[str, list[str]] = {}
    for row in rows:
        if row.figures:
            flash = ", flash attention" if row.figures.get("flash_attention") else ""
            maker = f"{row.figures['kv']} cache{flash}, {row.figures['engine']} on {row.figures['device']}"
            makers.setdefault(maker, []).append(row.label)
    for maker, labels in makers.items():
        yield maker if len(makers) == 1 else f"{', '.join(labels)}: {maker}"
    measured = [row.figures["measured"] for row in rows if row.figures and "measured" in row.figures]
    yield from map(str, joined(Conditions(**one) for one in measured))


def _uncertain(rows: list[Row]) -> Iterator[str]:
    spread = max(row.speed_spread for row in rows)
    if spread > STEADY:
        yield f"the speeds say little: those of one model differed {spread:.1f} times, so something else is computing"


def _types(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        if row.main_types and row.main_types.upper() != row.label.upper():
            yield f"{row.label}: {row.main_types}"


def _kl(value: float) -> str:
    return f"{value:.6f}" if value >= 1e-4 or not value else f"{value:.1e}"


def _speed(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
