"""The calls of tools in the transcript: a line about each and, where it is unfolded, its arguments and result below.

Owns the wording of the line, and how names and arguments from outside are made visible.
"""

from __future__ import annotations

import json
import unicodedata

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from edgelm.chats.tool_calls import ToolCall
from edgelm.tui.lines import HINT, FoldRow, Line, PlainRow, Row, SpaceRow, text_width
from edgelm.tui.palette import Palette

LEAST_ARGUMENTS = 8  # cells; fewer say nothing
MAX_REASON = 40  # characters of a failure on the line
LINES_OF_ROW = 20  # a long result is drawn in parts, as they come into view
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})  # categories of characters that show nothing, or move others


def visible(text: str) -> str:
    """Return a text with an escape in place of each character that would hide or reorder others."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character == "\n" or unicodedata.category(character) not in HIDDEN else _escape(character)
        for character in text
    )


def visible_line(text: str) -> str:
    """Return a visible text on one line."""
    return visible(text).replace("\n", "\\n")


def _escape(character: str) -> str:
    return json.dumps(character).strip('"')


def pretty_arguments(call_arguments: str) -> str:
    """Return arguments as a person reads them: every character of them can be seen."""
    try:
        text = json.dumps(json.loads(call_arguments), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = call_arguments
    return visible(text)


def short_arguments(call: ToolCall) -> str:
    """Return the arguments on one line: names with values."""
    values = call.values
    try:
        words = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in (values or {}).items()]
    except RecursionError:  # it was read with more room on the stack
        values = None
    return visible_line(" ".join(call.arguments.split()) if values is None else ", ".join(words))


def call_state(call: ToolCall, *, live: bool) -> str:
    """Return how far a call is. `live`: its answer is being written."""
    if call.state == "done":
        return f"{call.took_s:.1f} s"
    if call.state == "failed":
        reason = visible(" ".join(call.result.split()))
        return f"failed: {reason[:MAX_REASON]}{'…' if len(reason) > MAX_REASON else ''}"
    if call.state == "refused":
        return "refused"
    if call.state == "running":
        return "running" if live else "did not end"
    return "waits to be allowed" if live else "not run"


class CallRow(FoldRow):
    """The line about a call. Its arguments are shortened to the width."""

    def __init__(self, call: ToolCall, *, live: bool, unfolded: bool) -> None:
        super().__init__(unfolded=unfolded)
        self._call, self._live = call, live

    def draw(self, width: int, palette: Palette) -> list[Line]:
        call, width = self._call, text_width(width)
        head = f"{'▾' if self._unfolded else '▸'} tool {visible_line(call.name)}"
        state = f" · {call_state(call, live=self._live)}"
        arguments = short_arguments(call)
        room = width - cell_len(head) - cell_len(state) - 2
        if cell_len(arguments) > room:
            arguments = (
                set_cell_size(arguments, room - 1).rstrip() + "…" if room > LEAST_ARGUMENTS else arguments and "…"
            )
        text = Text(f"{head}({arguments})", palette.muted)
        text.append(state, palette.error if call.state == "failed" else "")
        if not self._unfolded and text.cell_len + len(HINT) <= width:
            text.append(HINT)
        text.truncate(max(width, 1), overflow="ellipsis")
        return [Line(text, prefix=len(text))]


def call_rows(call: ToolCall, *, live: bool, unfolded: bool) -> list[Row]:
    """Return the rows of a call."""
    rows: list[Row] = [CallRow(call, live=live, unfolded=unfolded)]
    if unfolded:
        lines = [*pretty_arguments(call.arguments).split("\n"), "", *call.answer.split("\n")]
        if live and not call.has_ended:
            lines = lines[: -1 - len(call.answer.split("\n"))]
        parts = (lines[i : i + LINES_OF_ROW] for i in range(0, len(lines), LINES_OF_ROW))
        rows += [PlainRow("\n".join(part), muted=True) for part in parts]
        rows.append(SpaceRow())
    return rows
