"""A Markdown text that grows: its blocks, each with lines that are made once.

Owns what has to be parsed and drawn again when text comes: the last block, nothing above it. Knows nothing of widgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from edgelm.tui.code import Highlighter
from edgelm.tui.lines import Line
from edgelm.tui.markdown import Renderer, parser
from edgelm.tui.palette import Palette
from edgelm.tui.rows import Row
from edgelm.tui.spans import Span, Spans
from edgelm.tui.tint import Tint

if TYPE_CHECKING:
    from markdown_it.token import Token


class Drafted(NamedTuple):
    """What was drafted of a text, and where in it a block begins."""

    spans: Spans
    at: int

    def of(self, source: str) -> list[Span]:
        """Return what was drafted of the block's source."""
        return self.spans.within(self.at, self.at + len(source))


class MarkdownRow(Row):
    """One top-level block."""

    def __init__(
        self, source: str, tokens: Sequence[Token], highlighter: Highlighter, drafted: Drafted, *, growing: bool
    ) -> None:
        super().__init__()
        self._drafted = drafted
        self._source = source
        self.highlighter = highlighter
        self._tokens: Sequence[Token] | None = tokens
        self._growing = growing

    def draw(self, width: int, palette: Palette) -> list[Line]:
        # Tokens are many objects, and drawing a block twice is rare: they are parsed again then.
        tokens = self._tokens if self._tokens is not None else parser().parse(self._source)
        if not self._growing:
            self._tokens = None
        tint = None
        if palette.drafted is not None and (spans := self._drafted.of(self._source)):
            tint = Tint(self._source, spans, palette.drafted)
        first_line = tokens[0].map[0] if tokens and tokens[0].map else 0
        renderer = Renderer(palette, self.highlighter, growing=self._growing, tint=tint, first_line=first_line)
        return renderer.render(tokens, width)

    def guess(self, width: int) -> int:
        return sum(1 + len(line) // max(width, 1) for line in self._source.split("\n"))

    def is_same(self, source: str, at: int, *, growing: bool) -> bool:
        """Say whether the row of this source, which begins at a character, would look like this one."""
        return source == self._source and at == self._drafted.at and growing == self._growing

    def settle(self) -> None:
        """Draw it once more as a whole: nothing will be added."""
        if self._growing:
            self._growing = False
            if any(token.type in ("fence", "code_block") for token in self._tokens or ()):
                self.forget()


class Document:
    """The blocks of one answer."""

    def __init__(self, text: str = "", *, growing: bool = False, drafted: Iterable[Span] = ()) -> None:
        self.rows: list[MarkdownRow] = []
        self._text = ""
        self._open_at = 0  # where the source of the first row that may change begins
        self._open_row = 0
        self._held = ""  # a carriage return that may be half of a line's end
        self._growing = growing
        self._drafted = Spans()
        if text:
            self.append(text, drafted)
        if not growing:
            self._take_held()

    def append(self, text: str, drafted: Iterable[Span] = ()) -> None:
        """Add text at the end; `drafted` are parts of it."""
        text, held = self._held + text, len(self._held)
        spans = ((held + begin, held + end) for begin, end in drafted)
        if "\r" in text:
            spans = ((len(_unix(text[:begin])), len(_unix(text[:end]))) for begin, end in spans)
        self._drafted.add(spans, len(self._text))
        self._held = "\r" if text.endswith("\r") else ""
        self._text += _unix(text.removesuffix("\r"))
        tail = self._text[self._open_at :]
        lines = tail.split("\n")
        blocks = _top_level(parser().parse(tail))
        before = self.rows[self._open_row :]
        del self.rows[self._open_row :]
        at = self._open_at
        line = 0
        for i, (tokens, start, end) in enumerate(blocks):
            at += sum(len(each) + 1 for each in lines[line:start])
            line = start
            source = "\n".join(lines[start:end]) + ("\n" if end < len(lines) else "")
            growing = self._growing and i == len(blocks) - 1
            old = before[i] if i < len(before) else None
            if old is not None and old.is_same(source, at, growing=growing):
                self.rows.append(old)
            else:
                highlighter = old.highlighter if old is not None else Highlighter()
                drafts = Drafted(self._drafted, at)
                self.rows.append(MarkdownRow(source, tokens, highlighter, drafts, growing=growing))
        if blocks:
            self._close(blocks, lines)

    def _close(self, blocks: list[tuple[list[Token], int, int]], lines: list[str]) -> None:
        """Move the end of what will never change to the last block whose first line is complete.

        An incomplete line may still become something else: `*` begins a list, `**bold**` is text of the block above.
        """
        closed = len(blocks) - 1
        if closed and blocks[closed][1] == len(lines) - 1:
            closed -= 1
        self._open_row += closed
        self._open_at += sum(len(line) + 1 for line in lines[: blocks[closed][1]])

    def settle(self) -> None:
        """Say that nothing will be added."""
        self._take_held()
        self._growing = False
        if self.rows:
            self.rows[-1].settle()

    def _take_held(self) -> None:
        if self._held:
            self._held = ""
            self.append("\n")


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _top_level(tokens: list[Token]) -> list[tuple[list[Token], int, int]]:
    """Return the outermost blocks with their first line and the line behind their last."""
    blocks: list[tuple[list[Token], int, int]] = []
    depth = begin = 0
    for i, token in enumerate(tokens):
        depth += token.nesting
        if depth == 0:
            span = tokens[begin].map
            assert span is not None, "every outermost block knows its lines"
            blocks.append((tokens[begin : i + 1], span[0], span[1]))
            begin = i + 1
    return blocks
