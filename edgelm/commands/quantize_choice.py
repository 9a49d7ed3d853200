"""The table of the types that `edgelm quantize --to auto` chose, and by what.

Owns the words for a report of `making/quantization/automatic.py`, which comes as JSON from a worker.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from edgelm.library.progress import size_text


def choice_table(report: dict[str, Any]) -> Table:
    """Return a table with a row for each group of matrices."""
    probes = list(dict.fromkeys(kind for row in report["rows"] for kind in row["probes"]))
    table = Table(box=None, pad_edge=False)
    table.add_column("MATRICES", overflow="fold")
    for title in ("WEIGHTS", *(f"KL AS {kind}" for kind in probes)):
        table.add_column(title, justify="right")
    table.add_column("TYPE")
    for title in ("SIZE", "KL"):
        table.add_column(title, justify="right")
    for row in report["rows"]:
        alone = [_number(row["probes"].get(kind)) for kind in probes]
        size = size_text(row["nbytes"])
        name = row["name"].removesuffix(".weight")
        table.add_row(name, f"{row['numbers']:,}", *alone, row["type"], size, _number(row["predicted"]))
    return table


def choice_lines(report: dict[str, Any]) -> list[str]:
    """Return the lines below the table."""
    size, budget = size_text(report["nbytes"]), size_text(report["budget_bytes"])
    lines = [f"{size} of {budget}, KL divergence of the source about {report['predicted']:.5f} by the sum of the rows"]
    if report["measured"] is not None:
        lines.append(f"all types together: {report['measured']:.5f}, on {report['num_tokens']:,} tokens of the text")
    return lines


def _number(divergence: float | None) -> str:
    return "" if divergence is None else f"{divergence:.2g}"
