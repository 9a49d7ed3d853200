"""docs/api.md says what the tables say."""

from __future__ import annotations

from pathlib import Path

from edgelm.server.api.field_table import markdown


def test_the_page_is_generated() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "api.md"
    command = "python -m edgelm.server.api.field_table > docs/api.md"
    assert page.read_text(encoding="utf-8") == markdown(), f"run: {command}"
