"""A growing Markdown text: its blocks, each with lines that are made once.

Owns which part is parsed and drawn again when text is appended: the last block only. Knows nothing of widgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from edgelm.tui.lines import Line, Row, guess_height, text_width
from edgelm.tui.palette import Palette
from edgelm.tui.transcript.drafted import Span, Spans, Tint
from edgelm.tui.transcript.markdown import Highlighter, Renderer, parser

if TYPE_CHECKING:
    from markdown_it.token import Token


class MarkdownRow(Row):
    """One top-level block. `drafted` are the spans of the whole text, in which the block begins at `at`.

    `num_codes` are the blocks of code above it in the answer.
    """

    def __init__(
        self,
        source: str,
        at: int,
        tokens: Sequence[Token],
        highlighter: Highlighter,
        drafted: Spans,
        *,
        growing: bool,
        num_codes: int = 0,
    ) -> None:
        super().__init__()
        self._source = source
        self._at = at
        self._tokens: Sequence[Token] | None = tokens
        self.highlighter = highlighter
        self._drafted = drafted
        self._growing = growing
        self.num_codes = num_codes
        self.num_own_codes = sum(token.type in ("fence", "code_block") for token in tokens)

    def draw(self, width: int, palette: Palette) -> list[Line]:
        # Tokens take much memory and a block is rarely drawn twice: they are dropped, and parsed again then.
        tokens = self._tokens if self._tokens is not None else parser().parse(self._source)
        if not self._growing:
            self._tokens = None
        tint = None
        if palette.drafted is not None:
            spans = self._drafted.within(self._at, self._at + len(self._source))
            tint = Tint(self._source, spans, palette.drafted) if spans else None
        first_line = tokens[0].map[0] if tokens and tokens[0].map else 0
        renderer = Renderer(
            palette, self.highlighter, growing=self._growing, tint=tint, first_line=first_line, num_codes=self.num_codes
        )
        return renderer.render(tokens, text_width(width))

    def guess(self, width: int) -> int:
        return guess_height(self._source, text_width(width))

    def is_same(self, source: str, at: int, num_codes: int, *, growing: bool) -> bool:
        """Tell whether a row of this source, which begins at a character of the text, would look like this one."""
        return (source, at, num_codes, growing) == (self._source, self._at, self.num_codes, self._growing)

    def settle(self) -> None:
        """Mark the block as complete; code in it is highlighted once more as a whole."""
        if self._growing:
            self._growing = False
            if any(token.type in ("fence", "code_block") for token in self._tokens or ()):
                self.forget()


class Document:
    """The blocks of one answer."""

    def __init__(
        self, text: str = "", *, growing: bool = False, drafted: Iterable[Span] = (), num_codes: int = 0
    ) -> None:
        """`num_codes` are the blocks of code above the text in its answer."""
        self._num_codes = num_codes
        self.rows: list[MarkdownRow] = []
        self._text = ""
        self._open_at = 0  # character at which the first row that may change begins
        self._open_row = 0
        self._held = ""  # a carriage return that may be the first half of a line break
        self._growing = growing
        self._drafted = Spans()
        if text:
            self.append(text, drafted)
        if not growing:
            self._flush_held()

    def append(self, text: str, drafted: Iterable[Span] = ()) -> None:
        """Append text; `drafted` are spans of it."""
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
        open_rows = self.rows[self._open_row :]
        del self.rows[self._open_row :]
        at = self._open_at
        line = 0
        for i, (tokens, start, end) in enumerate(blocks):
            at += sum(len(skipped) + 1 for skipped in lines[line:start])
            line = start
            source = "\n".join(lines[start:end]) + ("\n" if end < len(lines) else "")
            growing = self._growing and i == len(blocks) - 1
            old = open_rows[i] if i < len(open_rows) else None
            num_codes = self.num_codes
            if old is not None and old.is_same(source, at, num_codes, growing=growing):
                self.rows.append(old)
            else:
                highlighter = old.highlighter if old is not None else Highlighter()
                row = MarkdownRow(source, at, tokens, highlighter, self._drafted, growing=growing, num_codes=num_codes)
                self.rows.append(row)
        if blocks:
            self._close(blocks, lines)

    @property
    def num_codes(self) -> int:
        """Return the number of blocks of code in the answer up to the end of this text."""
        return self.rows[-1].num_codes + self.rows[-1].num_own_codes if self.rows else self._num_codes

    def _close(self, blocks: list[tuple[list[Token], int, int]], lines: list[str]) -> None:
        """Close all rows before the last block whose first line is complete: they never change again.

        An incomplete line may still become something else: `*` begins a list, `**bold**` is text of the block above.
        """
        closed = len(blocks) - 1
        if closed and blocks[closed][1] == len(lines) - 1:
            closed -= 1
        self._open_row += closed
        self._open_at += sum(len(line) + 1 for line in lines[: blocks[closed][1]])

    def settle(self) -> None:
        """Mark the text as complete."""
        self._flush_held()
        self._growing = False
        if self.rows:
            self.rows[-1].settle()

    def _flush_held(self) -> None:
        if self._held:
            self._held = ""
            self.append("\n")


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _top_level(tokens: list[Token]) -> list[tuple[list[Token], int, int]]:
    """Return the outermost blocks, each with its first line and the line after its last."""
    blocks: list[tuple[list[Token], int, int]] = []
    depth = begin = 0
    for i, token in enumerate(tokens):
        depth += token.nesting
        if depth == 0:
            span = tokens[begin].map
            assert span is not None, "every outermost block has a line range"
            blocks.append((tokens[begin : i + 1], span[0], span[1]))
            begin = i + 1
    return blocks
