"""The statistics as lines of text: sums in words, and tables of models and days.

Owns how numbers and times are written. Shared by the dialog and the plain chat.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

from edgelm.chats.statistics import Statistics, Sums
from edgelm.client.answer_stream import AnswerStats
from edgelm.tui.lines import clean, short_name

NO_ANSWERS = "no answers yet: write a message, and its figures are kept here"
NARROW = 66  # cells; below, the table of models has fewer columns
NAME_CELLS = (14, 24)  # of a model in a narrow and in a wide table


def summary_lines(statistics: Statistics, num_chats: int) -> list[str]:
    """Return the sums in words."""
    total = statistics.total
    answers = "1 answer" if total.answers == 1 else f"{total.answers:,} answers"
    chats = "1 chat" if num_chats == 1 else f"{num_chats:,} chats"
    done = f"{count_text(total.written)} tokens written, {count_text(total.read)} read"
    lines = [f"{answers} in {chats}: {done}, {count_text(total.cached)} found in the prefix cache"]
    if statistics.saved_s >= 1:
        lines.append(f"Prefixes saved about {time_text(statistics.saved_s)} of reading.")
    if total.accepted:
        share = f"{100 * total.drafted_share:.0f} %"
        lines.append(f"Drafts gave {share} of the tokens: {count_text(total.accepted)} steps saved.")
    return lines


def model_table(statistics: Statistics, width: int) -> list[str]:
    """Return a table of the models, with fewer columns where the width is small."""
    narrow = width < NARROW
    head = ["model", "answers", "read", "cached", "written", "tok/s", "drafts", "saved"]
    rows = [head]
    for figures in statistics.models:
        speed = f"{figures.tokens_per_second:.1f}" if figures.tokens_per_second else "-"
        saved = time_text(figures.saved_s) if figures.saved_s else "-"
        drafts = f"{100 * figures.sums.drafted_share:.0f} %" if figures.sums.accepted else "-"
        name = _cut(clean(short_name(figures.model)) or "?", NAME_CELLS[not narrow])
        rows.append([name, *_sums_cells(figures.sums), speed, drafts, saved])
    if narrow:
        rows = [[row[0], *row[2:6], row[7]] for row in rows]
    return table_lines(rows)


def day_table(statistics: Statistics) -> list[str]:
    """Return a table of the days with answers, newest first."""
    rows = [["day", "answers", "read", "cached", "written"]]
    rows += [[f"{day.day:%a %d %b}", *_sums_cells(day.sums)] for day in statistics.days[::-1] if day.sums.answers]
    return table_lines(rows) if len(rows) > 1 else []


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines: the first column to the left, the others to the right."""
    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first + " " * (widths[0] - cell_len(first))]
        cells += [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return lines


def count_text(count: int) -> str:
    """Return a number of tokens, at most five characters."""
    for limit, divisor, unit in ((10_000, 1, ""), (10_000_000, 1000, "k"), (10_000_000_000, 1_000_000, "M")):
        if count < limit:
            return f"{count / divisor:,.0f}{unit}"
    return f"{count / 1_000_000_000:,.0f}G"


def time_text(seconds: float) -> str:
    """Return a time in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 10 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 3600:,} h"


def figure_lines(stats: AnswerStats) -> list[str]:
    """Return all that is known of an answer, a line each."""
    engine = " on ".join(name for name in (stats.engine, stats.device) if name)
    lines = [engine] if engine else []
    if stats.prompt_tokens is not None:
        cached = f", {stats.cached_tokens:,} of them found in the prefix cache" if stats.cached_tokens else ""
        lines.append(f"{stats.prompt_tokens:,} tokens read{cached}")
    if stats.completion_tokens is not None:
        speed = f", {stats.tokens_per_second:.1f} a second" if stats.tokens_per_second else ""
        lines.append(f"{stats.completion_tokens:,} tokens written{speed}")
    if stats.first_token_ms is not None:
        lines.append(f"the first after {stats.first_token_ms / 1000:.2f} s")
    if stats.drafted:
        lines.append(f"{stats.accepted or 0:,} of {stats.drafted:,} drafted tokens accepted")
    if stats.context_used is not None:
        size = f" of {stats.context_size:,}" if stats.context_size else ""
        lines.append(f"{stats.context_used:,}{size} tokens of the context used")
    return lines


def speed_text(tokens_per_second: float) -> str:
    """Return a speed, with a decimal where it tells."""
    return f"{tokens_per_second:.0f} tok/s" if tokens_per_second >= 10 else f"{tokens_per_second:.1f} tok/s"


def _sums_cells(sums: Sums) -> list[str]:
    return [f"{sums.answers:,}", *map(count_text, (sums.read, sums.cached, sums.written))]


def _cut(text: str, cells: int) -> str:
    if cell_len(text) <= cells:
        return text
    while cell_len(text) >= cells:
        text = text[:-1]
    return f"{text}…"
