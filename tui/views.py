"""A message as rows of the transcript.

Owns what of a message is shown and in which order. Knows nothing of where it stands on the screen.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from edgelm.chats.model import Message
from edgelm.tui.document import Document
from edgelm.tui.lines import Line, short_name
from edgelm.tui.palette import Palette
from edgelm.tui.rows import CutRow, HeadRow, NoteRow, PlainRow, Row, SpaceRow
from edgelm.tui.spans import Span, Spans

GO_ON = "F5 goes on from a shortened conversation"

NOTES = {
    "stopped": "stopped",
    "length": "the answer reached its longest length; /params max_tokens=… changes it",
    "context": f"the context is full; {GO_ON}",
    "content_filter": "the endpoint's content filter ended the answer",
}


class PendingRow(Row):
    """Stands for a text that has never been in view, and so has not been parsed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def draw(self, width: int, palette: Palette) -> list[Line]:
        return [Line(Text()) for _ in range(self.guess(width))]

    def guess(self, width: int) -> int:
        return sum(1 + len(line) // max(width, 1) for line in self._text.split("\n"))


class MessageView:
    """The rows of one message. `live`: this process is writing it now.

    A long conversation opens at once because an answer is parsed when it comes into view: until then it is `pending`.
    """

    def __init__(
        self,
        message: Message,
        *,
        version: int = 1,
        versions: int = 1,
        live: bool = False,
        thoughts: bool = False,
        left_out: int = 0,  # messages above, which the model does not get
        drafted: Spans | None = None,  # of the text
    ) -> None:
        self.message = message
        self._left_out = left_out
        self._drafted = drafted or Spans()
        self._live = live
        self._thoughts = thoughts
        self._status = ""
        self._versions = (version, versions)
        self._head = self._make_head()
        self._document = Document(growing=True) if live else None
        self.pending = message.role == "assistant" and not live
        self.rows: list[Row] = []
        if live and message.text:
            self.append(message.text, self._drafted)
        self._compose()

    def _make_head(self) -> HeadRow:
        version, versions = self._versions
        user = self.message.role == "user"
        who = "You" if user else short_name(self.message.model) or "Assistant"
        return HeadRow(who, user=user, version=version, versions=versions)

    def expand(self) -> None:
        """Parse the text: it comes into view."""
        assert self.pending
        self.pending = False
        self._document = Document(self.message.text, drafted=self._drafted)
        self._compose()

    def set_versions(self, version: int, versions: int) -> None:
        """Say which of several versions this is."""
        self._versions = (version, versions)
        self._head = self._make_head()
        self._compose()

    def set_model(self, model: str) -> None:
        """Say who answers, where that was not known at first."""
        self.message.model = model
        self._head = self._make_head()
        self._compose()

    def select(self, selected: bool) -> None:
        """Mark the message as the one that keys act on."""
        self._head.select(selected)

    def show_thoughts(self, shown: bool) -> None:
        """Show all of the model's reasoning, or one line about it."""
        self._thoughts = shown
        self._compose()

    def append(self, text: str, drafted: Iterable[Span] = ()) -> None:
        """Show text that came, parts of which were drafted; the message holds it already."""
        assert self._document is not None
        if text:
            self._document.append(text, drafted)
        self._compose()

    def set_status(self, status: str) -> None:
        """Say what is being waited for, where there is no answer yet."""
        self._status = status
        self._compose()

    def settle(self) -> None:
        """Show the message as it ended."""
        assert self._document is not None
        self._live = False
        self._document.settle()
        self._compose()

    def _compose(self) -> None:
        message = self.message
        rows: list[Row] = [CutRow(self._left_out), SpaceRow()] if self._left_out else []
        rows.append(self._head)
        if message.reasoning:
            rows += self._reasoning()
        if self.pending:
            rows.append(PendingRow(message.text))
        elif self._document is None:
            rows.append(PlainRow(message.text))
        else:
            for i, row in enumerate(self._document.rows):
                if i:
                    rows.append(SpaceRow())
                rows.append(row)
        if self._live and not message.text and self._status:
            rows.append(NoteRow(self._status))
        if message.state == "failed":
            rows.append(NoteRow(message.note, error=True))
        elif message.state == "streaming" and not self._live:
            rows.append(NoteRow("edgelm was closed while this was written; regenerate it for a whole answer"))
        elif message.note or message.state == "stopped":
            rows.append(NoteRow(NOTES.get(message.note or message.state, message.note)))
        self.rows = [*rows, SpaceRow()]

    def _reasoning(self) -> list[Row]:
        text = self.message.reasoning.strip("\n")
        if self._thoughts or (self._live and not self.message.text):
            return [PlainRow(text, muted=True), SpaceRow()]
        return [NoteRow(f"thought for {len(text.split()):,} words; Ctrl+T shows them"), SpaceRow()]
