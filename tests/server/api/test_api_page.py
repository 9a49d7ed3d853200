"""docs/api.md says what the tables say."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "packaging"))

from api_page import markdown  # noqa: E402


def test_the_page_is_generated() -> None:
    page = ROOT / "docs" / "api.md"
    assert page.read_text(encoding="utf-8") == markdown(), "run: python packaging/api_page.py > docs/api.md"
