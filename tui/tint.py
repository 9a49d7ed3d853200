"""The tint of drafted words: from characters of a block's Markdown source to characters of the rendered text.

Markdown-it says on which lines an element stands, not at which characters. What is rendered is, in order, what was
written, less the marks between: so each piece is looked for behind the one before it.

Owns that search. Knows nothing of the elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from edgelm.tui.lines import clean
from edgelm.tui.spans import Span

MAX_SKIP = 12  # characters between two that follow each other: `&nbsp;` and its like


class Tint:
    """Styles the drafted parts of one block's text. The pieces come in the order of the source."""

    def __init__(self, source: str, spans: Sequence[Span], style: Style) -> None:
        self._source = source
        self._spans = spans
        self._style = style
        self._line_starts = [0]
        for line in source.split("\n"):
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)
        self._at = 0  # behind the last piece

    def begin(self, line: int, text: str = "") -> None:
        """Go on at a line of the source, or behind it where a text begins."""
        start = max(self._at, self._line_starts[min(line, len(self._line_starts) - 1)])
        found = self._source.find(text.partition("\n")[0], start)
        self._at = found if found >= 0 else start

    def skip(self, text: str) -> None:
        """Go on behind a text that is not rendered as it stands."""
        found = self._source.find(text, self._at)
        if found >= 0:
            self._at = found + len(text)

    def paint(self, text: Text, at: int, content: str) -> None:
        """Style what was drafted of a piece of the source, which stands in `text` from `at` on."""
        found = self._source.find(content, self._at)
        if found >= 0:
            self._at = found + len(content)
            self._paint(text, at, content, found)
        else:  # an escape or an entity is in it
            self._paint_one_by_one(text, at, content)

    def _paint(self, text: Text, at: int, content: str, found: int) -> None:
        for begin, end in self._spans:
            first, last = max(begin - found, 0), min(end - found, len(content))
            if first < last:
                text.stylize(self._style, at + len(clean(content[:first])), at + len(clean(content[:last])))

    def _paint_one_by_one(self, text: Text, at: int, content: str) -> None:
        for i, char in enumerate(content):
            found = self._source.find(char, self._at, self._at + MAX_SKIP)
            if found >= 0:
                self._at = found + 1
                if any(begin <= found < end for begin, end in self._spans):
                    text.stylize(self._style, at + i, at + i + 1)
