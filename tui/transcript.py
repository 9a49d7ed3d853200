"""The conversation on the screen: one widget that draws lines, however many messages there are.

Owns scrolling, following the end, the message that keys act on, and mouse selection. Knows nothing of how an answer
is made and what is saved.

Rows are drawn when they come into view and kept; text that streams draws its last block again and nothing else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message as Event
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.timer import Timer

from edgelm.tui.flow import Flow
from edgelm.tui.keys import TRANSCRIPT_KEYS
from edgelm.tui.lines import CONSOLE, Line, clean, wrap_words
from edgelm.tui.palette import Palette, make_palette
from edgelm.tui.rows import NoteRow, Row
from edgelm.tui.views import MessageView

WELCOME = """Write a message below.

F1 shows every key, / every command.
Ctrl+F searches all chats, Ctrl+O chooses or pulls a model.
Esc stops an answer; everything is saved as it is written."""
FRAME_S = 1 / 30
MAX_SHARE = 0.25  # of the time that drawing may take while text streams
MEASURE_SLICE_S = 0.004
KEPT_SCREENS = 4  # lines that far above and below are kept


class Transcript(ScrollView, can_focus=True):
    """Messages, newest at the bottom."""

    ALLOW_SELECT = True
    BINDINGS: ClassVar[list[BindingType]] = [key.binding for key in TRANSCRIPT_KEYS]
    DEFAULT_CSS = """
    Transcript {
        height: 1fr; padding: 0 0 0 1;
        overflow-x: hidden; overflow-y: scroll;
        scrollbar-size-vertical: 1;
    }
    """

    @dataclass
    class Act(Event):
        """A key was pressed on a message: edit, regenerate, copy, previous, next or leave."""

        action: str
        message_id: int

    @dataclass
    class Left(Event):
        """The cursor went below the last message."""

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self.views: list[MessageView] = []
        self._flow = Flow()
        self._following = True
        self._anchor: tuple[Row, int] | None = None  # what stands at the top while we do not follow the end
        self._arranging = False
        self._selected: int | None = None  # message id
        self._frame: Timer | None = None
        self._frame_cost_s = 0.0
        self._measuring: Timer | None = None
        self._palette: Palette | None = None
        self._notice = ""
        self._drafts = False

    # What is shown

    def show(self, views: list[MessageView]) -> None:
        """Show these messages, from the end."""
        self.views = views
        self._selected = None
        self._following = True
        self._anchor = None
        self.screen.clear_selection()
        self._arrange()

    def exchange(self, views: list[MessageView], keep: int | None = None) -> None:
        """Show other messages without moving; `keep` stays or becomes the selected one."""
        self.views = views
        if keep is not None:
            self._select(keep)
        self._arrange()

    def changed(self) -> None:
        """Draw what has changed at the next frame: text comes faster than a screen can show it."""
        if self._frame is None:
            wait = max(FRAME_S, self._frame_cost_s / MAX_SHARE)
            self._frame = self.set_timer(wait, self._draw_frame)

    def follow(self) -> None:
        """Go to the end and stay there."""
        self._following = True
        self._arrange()

    def reveal(self, message_id: int) -> None:
        """Go to a message and select it."""
        index = next((i for i, view in enumerate(self.views) if view.message.id == message_id), None)
        if index is not None:
            self._go_to(index)
            self.focus()

    def set_notice(self, notice: str) -> None:
        """Show an error while there is no message, or no error any more."""
        self._notice = clean(notice)
        self.refresh()

    def show_drafts(self, shown: bool) -> None:
        """Tint what was drafted, or no more."""
        self._drafts = shown
        self._palette = None
        self._arrange()

    @property
    def following(self) -> bool:
        return self._following

    def _draw_frame(self) -> None:
        self._frame = None
        started = time.perf_counter()
        self._arrange()
        self._frame_cost_s = time.perf_counter() - started

    # Layout

    @property
    def palette(self) -> Palette:
        if self._palette is None:
            self._palette = make_palette(self.app.current_theme, self.app.theme_variables, drafts=self._drafts)
        return self._palette

    def notify_style_update(self) -> None:
        super().notify_style_update()
        app = self.app
        if self._palette is not None and self._palette.name != app.current_theme.name:
            self._palette = None
            self.call_later(self._arrange)

    def on_resize(self, event: events.Resize) -> None:
        self._arrange()

    def _arrange(self) -> None:
        """Stack the rows, draw those in view, and put what the user looks at where it was."""
        region = self.scrollable_content_region
        width, height = region.width, region.height
        if width <= 0 or height <= 0:
            return
        self._arranging = True
        try:
            top = self._place(width, height)
            size = Size(width, self._flow.height)
            if size != self.virtual_size:
                self.virtual_size = size
            self._scroll_to(None, top, animate=False)
        finally:
            self._arranging = False
        self.refresh()
        if self._measuring is None:
            self._measuring = self.set_timer(0.05, self._measure)

    def _place(self, width: int, height: int) -> int:
        """Return the line at the top of the screen, when all rows in view are drawn."""
        flow = self._flow
        while True:
            flow.measure(self.views, width, self.palette)
            end = max(0, flow.height - height)
            top = end
            if not self._following and self._anchor is not None:
                row, line = self._anchor
                found = flow.top_of(row)
                top = min(end, round(self.scroll_y) if found is None else found + line)
            if not flow.draw(top, top + height):
                return top

    def _measure(self) -> None:
        """Draw rows that nobody has seen yet, a little at a time, so that the scroll bar tells the truth."""
        self._measuring = None
        until = time.perf_counter() + MEASURE_SLICE_S
        found = False
        while time.perf_counter() < until:
            if not self._flow.draw_last_unknown():
                break
            found = True
        height = self.scrollable_content_region.height
        top = round(self.scroll_y)
        self._flow.release(top - KEPT_SCREENS * height, top + (KEPT_SCREENS + 1) * height)
        if found and self._frame is None:
            self._frame = self.set_timer(0.02, self._draw_frame)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self._arranging or round(old_value) == round(new_value):
            return
        top = round(new_value)
        self._following = top >= self._flow.height - self.scrollable_content_region.height
        index, line = self._flow.locate(top)
        self._anchor = (self._flow.rows[index], line) if index >= 0 else None
        if self._flow.draw(top, top + self.scrollable_content_region.height):
            self.changed()

    # Drawing

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        at = round(self.scroll_y) + y
        line = self._flow.line(at) if self.views else self._welcome_line(y, width)
        base = self.rich_style
        if line is None:
            return Strip.blank(width, base)
        selection = self.text_selection
        span = selection.get_span(at) if selection is not None else None
        if span is not None:
            return _make_strip(line, width, base, at, span, self._selection_style)
        key = (width, at, base)
        if line.strip is None or line.strip_key != key:
            line.strip, line.strip_key = _make_strip(line, width, base, at), key
        return line.strip

    def _welcome_line(self, y: int, width: int) -> Line | None:
        palette = self.palette
        lines = wrap_words(Text("edgelm\n\n" + WELCOME, palette.muted), width)
        lines[0].text.stylize(palette.heading)
        if self._notice:
            lines += [Line(Text()), *NoteRow(self._notice, error=True).draw(width, palette)]
        return lines[y] if y < len(lines) else None

    @property
    def _selection_style(self) -> Style:
        return self.screen.get_component_rich_style("screen--selection")

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        first = selection.start.y if selection.start else 0
        last = min(selection.end.y if selection.end else self._flow.height, self._flow.height - 1)
        parts: list[str] = []
        for y in range(max(first, 0), last + 1):
            line, span = self._flow.line(y), selection.get_span(y)
            if line is None or span is None or 0 < len(line.text) <= line.prefix:
                continue  # nothing, or nothing but decoration
            start, end = span
            text = line.text.plain[max(start, line.prefix) : None if end == -1 else max(end, line.prefix)]
            parts += [line.joint if parts else "", text]
        return "".join(parts), "\n"

    # The message that keys act on

    @property
    def selected(self) -> int | None:
        """Return the id of the selected message."""
        return self._selected

    def on_focus(self) -> None:
        if self._selected is None and self.views:
            self._go_to(len(self.views) - 1)

    def on_blur(self) -> None:
        self._select(None)
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        view = self._flow.view_at(round(self.scroll_y) + event.y)
        if view is not None and self.has_focus:
            self._select(view.message.id)
            self._arrange()

    def action_select(self, by: int) -> None:
        """Select the message above (-1) or below (1)."""
        at = next((i for i, view in enumerate(self.views) if view.message.id == self._selected), len(self.views))
        if at + by >= len(self.views):
            self.post_message(self.Left())
        elif self.views:
            self._go_to(max(0, at + by))

    def action_act(self, action: str) -> None:
        if self._selected is not None:
            self.post_message(self.Act(action, self._selected))

    def _go_to(self, index: int) -> None:
        view = self.views[index]
        self._select(view.message.id)
        self._arrange()
        span = self._flow.span_of(view)
        if span is None:  # there is no room for a line
            return
        first, end = span
        height = self.scrollable_content_region.height
        top = round(self.scroll_y)
        if first < top or end - first > height:
            top = first
        elif end > top + height:
            top = end - height
        self._following = top >= self._flow.height - height
        index, line = self._flow.locate(top)
        self._anchor = (self._flow.rows[index], line) if index >= 0 else None
        self._arrange()

    def _select(self, message_id: int | None) -> None:
        self._selected = message_id
        for view in self.views:
            view.select(view.message.id == message_id)


def _make_strip(
    line: Line, width: int, base: Style, y: int, span: tuple[int, int] | None = None, selection: Style | None = None
) -> Strip:
    """Return a line as the screen wants it; each part knows its place in the text, for selection by mouse."""
    text = line.text
    if span is not None and selection is not None:
        text = text.copy()
        start, end = span
        text.stylize(selection, start, None if end == -1 else end)
    behind = base + line.fill if line.fill is not None else base
    segments: list[Segment] = []
    x = 0
    own = text.style if isinstance(text.style, Style) else None  # Rich leaves it out where there is no other
    for part in text.render(CONSOLE):
        style = behind + (part.style or own)
        segments.append(Segment(part.text, style + Style.from_meta({"offset": (x, y)})))
        x += len(part.text)
    return Strip(Segment.adjust_line_length(segments, width, behind), width)
