"""The drafted parts of an answer: which characters speculation drafted, and their tint in rendered Markdown.

Owns the spans, and the mapping from characters of a block's source to characters of the rendered text. Knows nothing
of Markdown's elements.

markdown-it gives the lines of an element, not its characters. The rendered text is the source without its marks, in
the same order, so each piece is searched after the piece before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from rich.style import Style
from rich.text import Text

from edgelm.tui.lines import clean

MAX_SKIP = 12  # source characters between two neighbours in the rendered text, as in `&nbsp;`

Span = tuple[int, int]  # first character, and the one after the last


class Spans:
    """Ordered spans of a growing text. They do not overlap; spans that touch are joined."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self.add(spans)

    def __bool__(self) -> bool:
        return bool(self._begins)

    def __iter__(self) -> Iterator[Span]:
        return zip(self._begins, self._ends, strict=True)

    def add(self, spans: Iterable[Span], offset: int = 0) -> None:
        """Append spans after the last one; `offset` is added to both ends of each."""
        for begin, end in spans:
            if self._ends and self._ends[-1] >= begin + offset:
                self._ends[-1] = end + offset
            else:
                self._begins.append(begin + offset)
                self._ends.append(end + offset)

    def within(self, begin: int, end: int) -> list[Span]:
        """Return the spans inside a part of the text, clipped to it and relative to its beginning."""
        clipped: list[Span] = []
        for i in range(bisect_right(self._ends, begin), len(self._begins)):
            if self._begins[i] >= end:
                break
            clipped.append((max(self._begins[i], begin) - begin, min(self._ends[i], end) - begin))
        return clipped


class Tint:
    """Styles the drafted parts of one block's text. Pieces must be passed in the order of the source."""

    def __init__(self, source: str, spans: Sequence[Span], style: Style) -> None:
        self._source = source
        self._spans = spans
        self._style = style
        self._line_starts = [0]
        for line in source.split("\n"):
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)
        self._pos = 0  # in the source, after the last piece

    def begin(self, line: int, text: str = "") -> None:
        """Continue at a line of the source, or where `text` begins after that."""
        start = max(self._pos, self._line_starts[min(line, len(self._line_starts) - 1)])
        match = self._source.find(text.partition("\n")[0], start)
        self._pos = match if match >= 0 else start

    def skip(self, text: str) -> None:
        """Continue after a text that is not rendered in its source form."""
        match = self._source.find(text, self._pos)
        if match >= 0:
            self._pos = match + len(text)

    def paint(self, text: Text, at: int, content: str) -> None:
        """Style the drafted parts of a piece of the source, which `text` holds from `at` on."""
        match = self._source.find(content, self._pos)
        if match >= 0:
            self._pos = match + len(content)
            self._paint(text, at, content, match)
        else:  # it contains an escape or an entity
            self._paint_by_character(text, at, content)

    def _paint(self, text: Text, at: int, content: str, match: int) -> None:
        for begin, end in self._spans:
            first, last = max(begin - match, 0), min(end - match, len(content))
            if first < last:
                text.stylize(self._style, at + len(clean(content[:first])), at + len(clean(content[:last])))

    def _paint_by_character(self, text: Text, at: int, content: str) -> None:
        for i, char in enumerate(content):
            match = self._source.find(char, self._pos, self._pos + MAX_SKIP)
            if match >= 0:
                self._pos = match + 1
                if any(begin <= match < end for begin, end in self._spans):
                    text.stylize(self._style, at + i, at + i + 1)
