"""The body of an answer as rows: its text, as Markdown, with the calls of tools where they were made.

Owns which part grows when text is appended: the one behind the last calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgelm.chats.tool_calls import ToolCall, segments
from edgelm.tui.lines import Row, SpaceRow
from edgelm.tui.transcript.document import Document
from edgelm.tui.transcript.drafted import Span, Spans
from edgelm.tui.transcript.tool_rows import call_rows


class AnswerParts:
    """The rows of one answer. `growing`: text is appended at its end."""

    def __init__(
        self, text: str = "", calls: Sequence[ToolCall] = (), drafted: Iterable[Span] = (), *, growing: bool = False
    ) -> None:
        self._text = text
        self._growing = growing
        self._drafted = Spans(drafted)
        self._drawn: dict[tuple[ToolCall, bool, bool], list[Row]] = {}  # rows of calls, which may be long
        self._calls = tuple(calls)
        self._documents: list[Document] = []
        self._place()

    def append(self, text: str, drafted: Iterable[Span] = ()) -> None:
        """Append text; `drafted` are spans of it."""
        drafted = list(drafted)
        self._drafted.add(drafted, len(self._text))
        self._text += text
        self._documents[-1].append(text, drafted)

    def set_calls(self, calls: tuple[ToolCall, ...]) -> None:
        """Show calls that are new or have changed."""
        before, self._calls = self._calls, calls
        if [call.at for call in calls] != [call.at for call in before]:
            self._place()

    def settle(self) -> None:
        """Mark the text as complete."""
        self._growing = False
        self._documents[-1].settle()

    def rows(self, *, unfolded: bool) -> list[Row]:
        """Return the rows; unfolded, with the arguments and results of calls."""
        rows: list[Row] = []
        drawn, self._drawn = self._drawn, {}
        for document, (_, calls) in zip(self._documents, segments(self._text, self._calls), strict=True):
            for row in document.rows:
                rows += [SpaceRow()] if rows else []
                rows.append(row)
            rows += [SpaceRow()] if rows and calls else []
            for call in calls:
                key = (call, self._growing, unfolded)
                self._drawn[key] = drawn.get(key) or call_rows(call, live=self._growing, unfolded=unfolded)
                rows += self._drawn[key]
            if calls and isinstance(rows[-1], SpaceRow):  # below an unfolded call
                rows.pop()
        return rows

    def _place(self) -> None:
        """Begin a document behind each group of calls."""
        parts = list(segments(self._text, self._calls))
        self._documents.clear()
        at = 0
        for number, (text, _) in enumerate(parts, 1):
            drafted = self._drafted.within(at, at + len(text))
            growing = self._growing and number == len(parts)
            num_codes = self._documents[-1].num_codes if self._documents else 0
            self._documents.append(Document(text, growing=growing, drafted=drafted, num_codes=num_codes))
            at += len(text)
