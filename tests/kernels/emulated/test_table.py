"""The table says what has run, what was taken over from another architecture, and what has not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kernels.emulated.case import all_cases
from tests.kernels.emulated.records import Records, digest_of_kernels
from tests.kernels.emulated.table import report


def line_of(capability: int, replayed: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a line of the case of `trial`."""
    case = next(case for case in all_cases() if case.op == "trial")
    fields = {"name": case.name, "op": case.op, "format": case.format, "kv": case.kv, "rows": case.rows}
    outcome = {"kernels": ["trial_kernel"], "difference": 0.25, "bound": 0.5, "share": 0.5, "fault": ""}
    counts = {"launches": 1, "replayed": replayed, "instructions": 70, "seconds": 1.0}
    return {**fields, "capability": capability, **outcome, **counts, "of": digest_of_kernels(), **changes}


def rows_of(path: Path, *lines: dict[str, Any]) -> list[str]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return list(report([str(path)]))


def test_it_counts_the_cases_that_have_run(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "cases.jsonl", line_of(80), line_of(86, replayed=1), line_of(90))
    trials = sum(case.op == "trial" for case in all_cases())
    assert any(row.startswith(f"3 of {5 * len(all_cases())} cases, 0 of 30 models; 0 wrong") for row in rows)
    assert [row.split() for row in rows if row.startswith("trial ")] == [
        ["trial", str(trials), *"1 (0) 1 (1) 0 (0) 1 (0) 0 (0)".split()],
        ["trial", "float16", "-", "few", "2.5e-01", "2.5e-01'", "-", "2.5e-01", "-", "5.0e-01", "0.500", "3"],
    ]
    assert any("llama f16 sm_90" in row for row in rows if row.startswith("Models that have not run"))
    assert sum(row.startswith("  sampling ") for row in rows) == sum(case.op == "sampling" for case in all_cases())


def test_lines_of_other_kernels_do_not_count(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "cases.jsonl", line_of(80), line_of(86, of="0"), line_of(80, difference=0.125))
    assert any(row.startswith("1 of ") for row in rows)
    assert "1 lines of other kernels are left out" in rows
    assert any("1.2e-01" in row for row in rows)  # the last line of a case counts


def test_a_wrong_result_is_told(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "cases.jsonl", line_of(80, fault="3 values are beyond their bounds"))
    assert any(row.endswith("1 wrong") for row in rows)
    assert any(row.startswith("WRONG: trial ") and row.endswith("beyond their bounds") for row in rows)


def test_a_run_goes_on_after_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    Records(path, ("name", "capability")).add({"name": "a", "capability": 80})
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": "b", "capability": 80, "of": "other kernels"}) + "\n")
    records = Records(path, ("name", "capability"))
    assert records.has("a", 80)
    assert not records.has("a", 86)
    assert not records.has("b", 80)
