"""Where a text ends by its indentation."""

from __future__ import annotations

import pytest

from edgelm.text.indent import IndentLimit


@pytest.mark.parametrize(
    ("least", "text", "shown"),
    [
        (0, "a\nb\n", "a\nb\n"),
        (4, "a\n    b\n    c", "a\n    b\n    c"),
        (4, "a\n    b\nc", "a\n    b\n"),
        (2, "first line is free\n  b\n c", "first line is free\n  b\n "),
        (2, "a\n\tb", "a\n\t"),
        (1, "a\n\n b", "a\n"),
    ],
)
@pytest.mark.parametrize("width", [1, 2, 100])
def test_the_text_ends_at_a_line_with_less(least: int, text: str, shown: str, width: int) -> None:
    limit = IndentLimit(least)
    pieces = [limit.take(text[at : at + width]) for at in range(0, len(text), width)]
    assert "".join(pieces) == shown
    assert limit.reached == (shown != text)
