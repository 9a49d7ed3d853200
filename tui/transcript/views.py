"""The messages as rows, and the position of each row in the transcript.

Owns the rows of a message, and the heights and offsets of all rows: exact ones once drawn, guesses before. Knows
nothing of widgets and scrolling.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from rich.text import Text

from edgelm.chats.history import Message
from edgelm.client.answer_stream import AnswerStats, stats_from_json
from edgelm.tui.dialogs.stats_text import speed_text
from edgelm.tui.lines import (
    TEXT_WIDTH,
    CutRow,
    FoldedRow,
    FoldRow,
    FootRow,
    Line,
    NoteRow,
    PlainRow,
    Row,
    SpaceRow,
    guess_height,
    short_name,
    text_width,
)
from edgelm.tui.palette import Palette
from edgelm.tui.transcript.answer_parts import AnswerParts
from edgelm.tui.transcript.attachment_rows import MAX_SHOWN_CHARS, attachment_rows
from edgelm.tui.transcript.drafted import Span, Spans
from edgelm.tui.transcript.passages import reading_rows
from edgelm.tui.transcript.thought import Thought, ThoughtFigures, duration_text
from edgelm.tui.transcript.tool_rows import pretty_arguments

FOLDED_LINES = 6  # a message of more is folded with the others
GO_ON = "F5 goes on from a shortened conversation"

NOTES = {
    "stopped": "stopped",
    "length": "the answer reached its maximum length; /params max_tokens=… changes it",
    "context": f"the context is full; {GO_ON}",
    "tool_limit": "stopped: the model went on calling tools",
    "content_filter": "the endpoint's content filter ended the answer",
}


def figures(stats: AnswerStats | None, *, with_calls: bool = False) -> list[str]:
    """Return time, tokens and speed of an answer; `with_calls`: the first two are of its last part alone."""
    if stats is None:
        return []
    tokens, speed = stats.completion_tokens, stats.tokens_per_second
    parts = []
    if stats.first_token_ms is not None and tokens and speed and not with_calls:
        seconds = stats.first_token_ms / 1000 + (tokens - 1) / speed
        parts.append(f"{seconds:.1f} s" if seconds < 10 else duration_text(seconds))
    if tokens and not with_calls:
        parts.append(f"{tokens:,} token{'' if tokens == 1 else 's'}")
    return [*parts, speed_text(speed)] if speed else parts


class PendingRow(Row):
    """The place of a text that was never in view and so has not been parsed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def draw(self, width: int, palette: Palette) -> list[Line]:
        return [Line(Text()) for _ in range(self.guess(width))]

    def guess(self, width: int) -> int:
        return guess_height(self._text, text_width(width))


class MessageView:
    """The rows of one message. `live`: this process is writing it now.

    An answer is parsed when it comes into view, so that a long conversation opens at once; until then it is `pending`.
    """

    def __init__(
        self,
        message: Message,
        *,
        version: int = 1,
        num_versions: int = 1,
        live: bool = False,
        show_reasoning: bool = False,
        folded: bool = False,
        num_left_out: int = 0,  # messages above that are not sent to the model
        drafted: Spans | None = None,  # of the text
    ) -> None:
        self.message = message
        self._num_left_out = num_left_out
        self._drafted = drafted or Spans()
        self.live = live
        self._show_reasoning = show_reasoning
        self._folded = folded
        self._thought = Thought()
        self._reading = message.reading
        self._figures = self._saved_figures()
        self._status = ""
        self._version, self._num_versions = version, num_versions
        self._parts = AnswerParts(growing=True) if live else None
        self.pending = message.role == "assistant" and not live
        self.rows: list[Row] = []
        if live and message.text:
            self.append(message.text, self._drafted)
        self._compose()

    def expand(self) -> None:
        """Parse the text: it comes into view."""
        assert self.pending
        self.pending = False
        self._parts = AnswerParts(self.message.text, self.message.calls, self._drafted)
        self._compose()

    def set_versions(self, version: int, num_versions: int) -> None:
        """Change which of several versions this is."""
        self._version, self._num_versions = version, num_versions
        self._compose()

    def set_model(self, model: str) -> None:
        """Change the model that answers: it may be known only after the request."""
        self.message.model = model
        self._compose()

    def show_reasoning(self, shown: bool) -> None:
        """Show all of the model's reasoning, or of what was read, below the line about it, or the line alone."""
        if shown != self._show_reasoning:
            self._show_reasoning = shown
            self._compose()

    @property
    def is_long(self) -> bool:
        """Tell whether it is worth to be folded."""
        return not self.live and guess_height(self.message.text, TEXT_WIDTH) > FOLDED_LINES

    @property
    def is_folded(self) -> bool:
        return self._folded

    @property
    def searched(self) -> str:
        """Return the text in which words are found, also where it is folded."""
        return f"{self.folded_text}\n{self.message.text}"

    @property
    def folded_text(self) -> str:
        """Return the texts that are folded to a line each: the thought, files, what was read, calls of tools."""
        message = self.message
        texts = [message.reasoning, *(file.text[:MAX_SHOWN_CHARS] for file in message.attachments)]
        texts += [passage.text for passage in message.reading.passages] if message.reading is not None else []
        texts += [f"{pretty_arguments(call.arguments)}\n{call.answer}" for call in message.calls]
        return "\n".join(texts)

    @property
    def is_unfolded(self) -> bool:
        """Tell whether these texts are shown."""
        return self._show_reasoning

    def fold(self, folded: bool) -> None:
        """Show one line of the message, or all of it."""
        if folded != self._folded:
            self._folded = folded
            self._compose()

    def show_reading(self) -> None:
        """Show what was read for this question since it was drawn."""
        if self.message.reading != self._reading:
            self._compose()

    def show_pictures(self) -> None:
        """Show the pictures of the message, which are decoded now."""
        self._compose()

    def set_thought(self, figures: ThoughtFigures) -> None:
        """Show the size of the thought so far."""
        self._figures = figures
        self._compose()

    def append(self, text: str, drafted: Iterable[Span] = ()) -> None:
        """Show appended text, which the message holds already; `drafted` are spans of it."""
        assert self._parts is not None
        if text:
            self._parts.append(text, drafted)
        self._compose()

    def show_calls(self) -> None:
        """Show calls of tools that are new or have changed."""
        if self._parts is not None:
            self._parts.set_calls(self.message.calls)
        self._compose()

    def set_status(self, status: str) -> None:
        """Show what the answer is waiting for, until it has reasoning or text."""
        if status != self._status:
            self._status = status
            self._compose()

    def settle(self) -> None:
        """Show the message in its final state."""
        assert self._parts is not None
        self.live = False
        self._figures = self._saved_figures()
        self._parts.settle()
        self._compose()

    def _compose(self) -> None:
        message = self.message
        rows: list[Row] = [CutRow(self._num_left_out), SpaceRow()] if self._num_left_out else []
        if self._folded and not self.live and message.text.strip():
            self.rows = [*rows, FoldedRow(message.text), *self._foot(), SpaceRow()]
            return
        if message.reasoning:
            rows += self._thought.rows(message.reasoning, self._figures, unfolded=self._show_reasoning)
        if self.pending:
            rows.append(PendingRow(message.text))
        elif self._parts is None:
            rows += [PlainRow(message.text)] if message.text or not message.attachments else []
            rows += attachment_rows(message.attachments, unfolded=self._show_reasoning)
        else:
            rows += self._parts.rows(unfolded=self._show_reasoning)
        self._reading = message.reading
        if message.reading is not None:
            rows += reading_rows(message.reading, unfolded=self._show_reasoning)
        if message.state == "failed":
            rows.append(NoteRow(message.note, error=True))
        elif message.state == "streaming" and not self.live:
            rows.append(NoteRow("edgelm was closed while this was written; regenerate it for a complete answer"))
        elif message.note or message.state == "stopped":
            rows.append(NoteRow(NOTES.get(message.note or message.state, message.note)))
        if rows and isinstance(rows[-1], SpaceRow):  # below an unfolded text
            rows.pop()
        self.rows = [*rows, *self._foot(), SpaceRow()]

    def _foot(self) -> list[Row]:
        """Return the quiet line: of an answer always, so that none moves up when its figures come."""
        message, kept = self.message, 1
        if message.role == "user":
            parts: list[str] = []
        elif self.live:
            begun = "thinking" if message.reasoning and not message.text else "writing"
            parts = [short_name(message.model), begun if message.text or message.reasoning else self._status]
            kept = 2  # what it waits for
        else:
            parts = [
                short_name(message.model),
                *figures(stats_from_json(message.stats), with_calls=bool(message.calls)),
            ]
        if not any(parts) and self._num_versions == 1:
            return []
        return [FootRow(parts, kept=kept, version=self._version, num_versions=self._num_versions)]

    def _saved_figures(self) -> ThoughtFigures:
        stats = stats_from_json(self.message.stats) if self.message.reasoning else None
        if stats is None:
            return ThoughtFigures()
        seconds = None if stats.reasoning_ms is None else stats.reasoning_ms / 1000
        return ThoughtFigures(seconds, stats.reasoning_tokens)


class Flow:
    """The rows of all messages, stacked at one width."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._exact: list[bool] = []  # whether the height of a row is known
        self._offsets: list[int] = [0]  # the first line of each row, and the line after the last row
        self._owners: list[MessageView] = []
        self._width = 0
        self._palette: Palette | None = None

    @property
    def height(self) -> int:
        return self._offsets[-1]

    @property
    def is_guessed(self) -> bool:
        """Tell whether the height of a row is not known."""
        return not all(self._exact)

    def measure(self, views: Sequence[MessageView], width: int, palette: Palette) -> None:
        """Stack the rows in their present state."""
        self._width, self._palette = width, palette
        self.rows = [row for view in views for row in view.rows]
        self._owners = [view for view in views for _ in view.rows]
        heights = [row.height(width, palette) for row in self.rows]
        self._exact = [exact for _, exact in heights]
        self._offsets = [0, *accumulate(height for height, _ in heights)]

    def locate(self, y: int) -> tuple[int, int]:
        """Return the index of the row at a line, and the line within it; (-1, 0) where there is none."""
        if not 0 <= y < self.height:
            return -1, 0
        index = bisect_right(self._offsets, y) - 1
        return index, y - self._offsets[index]

    def top_of(self, row: Row) -> int | None:
        """Return the first line of a row."""
        try:
            return self._offsets[self.rows.index(row)]
        except ValueError:
            return None

    def draw(self, top: int, bottom: int) -> bool:
        """Draw the rows between two lines that were never drawn; return whether there was one."""
        first, _ = self.locate(max(top, 0))
        if first < 0:
            return False
        drawn = False
        for index in range(first, len(self.rows)):
            if self._offsets[index] >= bottom:
                break
            if not self._exact[index]:
                self._draw_row(index)
                drawn = True
        return drawn

    def draw_last_guess(self) -> bool:
        """Draw the lowest row that was never drawn; return whether there was one."""
        for index in range(len(self.rows) - 1, -1, -1):
            if not self._exact[index]:
                self._draw_row(index)
                self._exact[index] = True
                return True
        return False

    def release(self, top: int, bottom: int) -> None:
        """Drop the lines of all rows that are not between two lines."""
        for index, row in enumerate(self.rows):
            if self._offsets[index + 1] <= top or self._offsets[index] >= bottom:
                row.release()

    def _draw_row(self, index: int) -> None:
        owner = self._owners[index]
        if owner.pending and isinstance(self.rows[index], PendingRow):
            owner.expand()
        else:
            assert self._palette is not None
            self.rows[index].lines(self._width, self._palette)

    def line(self, y: int) -> Line | None:
        """Return the line at a height; None below the end, and where a guess was too long."""
        index, offset = self.locate(y)
        if index < 0:
            return None
        assert self._palette is not None
        lines = self.rows[index].lines(self._width, self._palette)
        return lines[offset] if offset < len(lines) else None

    def view_at(self, y: int) -> MessageView | None:
        """Return the message that a line belongs to."""
        index, _ = self.locate(y)
        return self._owners[index] if index >= 0 else None

    def is_fold_line(self, y: int) -> bool:
        """Tell whether a line is the one about a folded text: a thought, or what was read."""
        index, _ = self.locate(y)
        return index >= 0 and isinstance(self.rows[index], FoldRow)

    def is_asked(self, y: int) -> bool:
        """Tell whether a line is of a message of the user: not the space around it."""
        index, _ = self.locate(y)
        if index < 0 or self._owners[index].message.role != "user":
            return False
        return self.rows[index] is not self._owners[index].rows[-1] and not self._is_before(index)

    def _is_before(self, index: int) -> bool:
        """Tell whether a row is the note above the first message that is sent, or the space below it."""
        rows = self._owners[index].rows
        return isinstance(rows[0], CutRow) and self.rows[index] in rows[:2]

    def hidden(self, top: int, bottom: int) -> int:
        """Return the most cells by which a line between two heights is wider than its room."""
        return max((line.hidden for y in range(top, bottom) if (line := self.line(y)) is not None), default=0)

    def span_of(self, view: MessageView) -> tuple[int, int] | None:
        """Return the first line of a message and the line after its last; None where it is not stacked."""
        first, last = self.top_of(view.rows[0]), self.top_of(view.rows[-1])
        return None if first is None or last is None else (first, last + 1)
