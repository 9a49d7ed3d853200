"""The conversation on the screen: one widget that draws lines, whatever the number of messages.

Owns scrolling, following the end, the selected message, and mouse selection. Knows nothing of how answers are made
and saved.

Rows are drawn when they come into view, then kept; streamed text redraws only its last block.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

from rich.cells import split_graphemes
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import BindingType
from textual.geometry import Region, Size
from textual.message import Message as Event
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget

from edgelm.chats.knowledge import GUIDE
from edgelm.library.names import STARTER
from edgelm.tui.commands.keymap import keymap_of
from edgelm.tui.commands.table import TRANSCRIPT_KEYS
from edgelm.tui.hints import Hint
from edgelm.tui.lines import (
    ACT,
    COLUMN,
    CONSOLE,
    GUTTER,
    LINK,
    TEXT_WIDTH,
    Line,
    NoteRow,
    Row,
    clean,
    margin,
    wrap_words,
)
from edgelm.tui.palette import Palette, make_palette
from edgelm.tui.transcript.finding import FOUND, FOUND_HERE, Finding, Found, Place
from edgelm.tui.transcript.kitty import KittyPictures
from edgelm.tui.transcript.picture_rows import decode_previews, undecoded
from edgelm.tui.transcript.sixel import SixelPictures, SixelStrip
from edgelm.tui.transcript.views import Flow, MessageView

WELCOME = """{help} shows every key, / every command.
{search} searches all chats, {model} chooses a model.
Esc stops an answer; all is saved as it is written."""
WELCOME_KEYS = {"help": "F1", "search": "Ctrl+F", "model": "Ctrl+O"}
FRAME_S = 0.1  # a reader sees no difference, and the model on the same cores decodes meanwhile
MAX_SHARE = 0.1  # of the time, for drawing while text streams
MEASURE_SLICE_S = 0.004
MEASURE_DELAY_S = 0.05
MEASURED_FRAME_S = 1.0  # between two frames that show only what was measured: they cost more than measuring
RELEASE_S = 1.0  # between two times at which lines are dropped
KEPT_SCREENS = 4  # lines are kept this many screens above and below
# Left of a message: of the user's, of the selected one, and of the others while the widget has the focus.
ASKED, SELECTED, FOCUSED = "▌", "┃", "▏"
MORE = Style(dim=True)  # where a line of code goes on
PAN = 8  # cells by which a key moves wide code


class Transcript(ScrollView, can_focus=True):
    """Messages, newest at the bottom."""

    ALLOW_SELECT = True
    FOCUS_ON_CLICK = False  # `on_click` does it: focusing first may scroll, and the click would hit another line
    BINDINGS: ClassVar[list[BindingType]] = [key.binding for key in TRANSCRIPT_KEYS]
    DEFAULT_CSS = """
    Transcript {
        height: 1fr;
        overflow-x: hidden; overflow-y: scroll;
        scrollbar-size-vertical: 1;
    }
    """

    @dataclass
    class Act(Event):
        """A key was pressed on a message. `action`: a command, previous, next, collapse or
        collapse-all.
        """

        action: str
        message_id: int

    @dataclass
    class Folded(Event):
        """The thought of a message, or what was read for it, is to be shown, or hidden again."""

        message_id: int

    @dataclass
    class Unfolded(Event):
        """A folded message was unfolded: what is found is in it."""

        message_id: int

    @dataclass
    class Linked(Event):
        """A link was clicked."""

        address: str

    @dataclass
    class Left(Event):
        """Down was pressed on the last message."""

    def __init__(self, *, wraps_code: bool = False) -> None:
        super().__init__(id="transcript")
        self.views: list[MessageView] = []
        self._flow = Flow()
        self._text_width = 0  # cells for a row: from the gutter to the scroll bar
        self._marked: tuple[int, int] | None = None  # the lines of the selected message
        self._following = True
        self._anchor: tuple[Row, int] | None = None  # the row and its line at the top, while not following the end
        self._arranging = False
        self._begun: int | None = None  # id of the quotation that is shown from its top
        self.selected: int | None = None  # id of the message that keys act on
        self._has_frame = False  # that will be drawn
        self._grow: Callable[[], None] = _nothing  # takes what has come for the next frame
        self._drawn_at = 0.0  # the last frame
        self._costs_s = (0.0, 0.0)  # of the last two frames, on the processor
        self._measuring: Timer | None = None
        self._measured = False  # since the last arrangement
        self._arranged_at = self._released_at = 0.0
        self._palette: Palette | None = None
        self._base = Style()  # of the widget
        self._shown: list[Strip] = []  # on the screen; empty: not known
        self._shown_top = 0  # line at its top
        self._finished: dict[int, tuple[Strip, Strip]] = {}  # as Textual takes it, by the id of the strip
        self._finished_way: tuple[Any, ...] = ()  # how it was done
        self._notice = ""
        self._about: Sequence[str] = ()
        self._composed: tuple[tuple[object, ...], list[Line]] | None = None  # the first screen, and of what
        self._drafts = False
        self._wraps_code = wraps_code
        self._pictures: KittyPictures | SixelPictures | None = None
        self._pan = 0  # cells by which wide code is moved to the left
        self.can_explore = True  # the endpoint tells tokens
        self._finding: Finding | None = None
        self._found_at: tuple[int, int] | None = None  # line and character of the match that was gone to

    # Content

    def show(self, views: list[MessageView]) -> None:
        """Show these messages from the end."""
        self.views = views
        self._load_pictures()
        self.selected = None
        self._following = True
        self._anchor = None
        self._pan = 0
        self._finding = None
        self.screen.clear_selection()
        self._arrange()

    def replace(self, views: list[MessageView], selected: int | None = None) -> None:
        """Show other messages without scrolling; `selected` becomes the selected one."""
        self.views = views
        self._load_pictures()
        if selected is not None:
            self._select(selected)
        self._arrange()

    def draw_pictures(self, pictures: KittyPictures | SixelPictures) -> None:
        """Let the terminal draw the pictures."""
        self._pictures = pictures
        self._palette = None
        self._load_pictures()
        self._arrange()

    def _load_pictures(self) -> None:
        """Decode the pictures of the messages, and draw them when they are there."""
        waiting = [view for view in self.views if undecoded(view.message.attachments, self.palette)]
        if waiting:
            self.run_worker(self._decode_pictures(waiting), group="pictures", exclusive=True)

    async def _decode_pictures(self, views: list[MessageView]) -> None:
        for view in reversed(views):  # the end is in view
            await decode_previews(undecoded(view.message.attachments, self.palette), self.palette)
            view.show_pictures()
            self._arrange()

    def refold(self) -> None:
        """Draw messages whose folded text was unfolded, or folded again; the lines above it stay where they are."""
        if not any(view.live for view in self.views):  # a thought that grows is followed to its end
            self._following = False
            self._set_anchor(round(self.scroll_y))
        self._arrange()

    def changed(self, grow: Callable[[], None] | None = None) -> None:
        """Draw changes at the next frame, after `grow`: text arrives faster than a screen can show it."""
        if grow is not None:
            self._grow = grow
        if not self._has_frame:
            self._has_frame = True
            # One costly frame delays none: it imported the lexers of code, or the machine slept.
            due = self._drawn_at + max(FRAME_S, min(self._costs_s) / MAX_SHARE)
            # A timer of Textual is a task and an event each time.
            asyncio.get_running_loop().call_later(due - time.perf_counter(), self.call_later, self._draw_frame)

    def follow(self) -> None:
        """Scroll to the end and follow it."""
        self._following = True
        self._arrange()

    def reveal(self, message_id: int) -> None:
        """Scroll to a message and select it."""
        index = next((i for i, view in enumerate(self.views) if view.message.id == message_id), None)
        if index is not None:
            self._go_to(index)
            self.focus()

    def set_about(self, about: Sequence[str]) -> None:
        """Show these lines about the model where there is no message yet."""
        if about != self._about:
            self._about = about
            self.refresh()

    def set_notice(self, notice: str) -> None:
        """Show an error where there is no message yet; empty: none."""
        self._notice = clean(notice)
        self.refresh()

    def show_drafts(self, shown: bool) -> None:
        """Tint drafted words, or stop it."""
        self._drafts = shown
        self._palette = None
        self._arrange()

    def action_toggle_wrap(self) -> None:
        """Wrap long lines of code, or move them sideways again."""
        self._wraps_code = not self._wraps_code
        self._pan = 0
        self._palette = None
        self._following = False
        self._arrange()

    def action_pan(self, by: int) -> None:
        """Move wide code by some steps to the left."""
        hidden = self._flow.hidden(round(self.scroll_y), round(self.scroll_y) + self.size.height)
        self._pan = max(0, min(self._pan + by * PAN, hidden))
        self.refresh()

    def on_mouse_scroll_right(self, event: events.MouseScrollRight) -> None:
        self.action_pan(1)
        event.stop()

    def on_mouse_scroll_left(self, event: events.MouseScrollLeft) -> None:
        self.action_pan(-1)
        event.stop()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        if event.shift:
            self.action_pan(1)
            event.stop()
            event.prevent_default()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        if event.shift:
            self.action_pan(-1)
            event.stop()
            event.prevent_default()

    def _draw_frame(self) -> None:
        self._has_frame = False
        self._drawn_at, started = time.perf_counter(), time.thread_time()
        grow, self._grow = self._grow, _nothing
        grow()
        self._arrange()
        self._costs_s = self._costs_s[1], time.thread_time() - started

    # Layout

    @property
    def palette(self) -> Palette:
        if self._palette is None:
            self._palette = make_palette(
                self.app.current_theme,
                self.app.theme_variables,
                drafts=self._drafts,
                wraps_code=self._wraps_code,
                pictures=self._pictures,
            )
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
        """Stack the rows, draw those in view, and keep the position of the line at the top."""
        region = self.scrollable_content_region
        width, height = region.width, region.height
        if width <= 0 or height <= 0:
            return
        self._arranging = True
        self._measured, self._arranged_at = False, time.perf_counter()
        try:
            self._text_width = min(max(width - margin(width + 1) - GUTTER - 1, 1), TEXT_WIDTH)
            top = self._place(self._text_width, height)
            self._mark()
            size = Size(width, self._flow.height)
            if size != self.virtual_size:
                # Assigning it would lay out all widgets, and none of them moves.
                self.set_reactive(Widget.virtual_size, size)
                self._scroll_update(size)
            self._scroll_to(None, top, animate=False)
        finally:
            self._arranging = False
        self._refresh_changed(height)
        if not self._flow.is_guessed:
            if self._arranged_at >= self._released_at + RELEASE_S:
                self._release()
        elif self._measuring is None:
            self._measuring = self.set_timer(MEASURE_DELAY_S, self._measure)

    def _mark(self) -> None:
        """Find the lines of the selected message, without the empty one below it."""
        self._marked = None
        if self.selected is not None:
            view = next((view for view in self.views if view.message.id == self.selected), None)
            if view is not None and (span := self._flow.span_of(view)) is not None:
                self._marked = (span[0], span[1] - 1)
        self._found_at = None
        if self._finding is not None and (found := self._finding.found) is not None:
            view = next((view for view in self.views if view.message.id == found.message_id), None)
            if view is not None and (span := self._flow.span_of(view)) is not None:
                self._found_at = (span[0] + found.place.line, found.place.start)

    def _place(self, width: int, height: int) -> int:
        """Draw all rows in view and return the line at the top of the screen."""
        flow = self._flow
        while True:
            flow.measure(self.views, width, self.palette)
            self._begin_quotation(height)
            end = max(0, flow.height - height)
            top = end
            if not self._following and self._anchor is not None:
                row, line = self._anchor
                row_top = flow.top_of(row)
                top = min(end, round(self.scroll_y) if row_top is None else row_top + line)
            if not flow.draw(top, top + height):
                return top

    def _begin_quotation(self, height: int) -> None:
        """Stop following at the top of a quotation of the guide that is taller than the screen, once."""
        if len(self.views) < 2 or not self._following:
            return
        question, view = self.views[-2:]
        reading = question.message.reading
        is_quotation = view.message.model == STARTER and reading is not None and set(reading.roots) <= {GUIDE}
        if not is_quotation or view.message.id == self._begun:
            return
        span = self._flow.span_of(view)
        if span is not None and span[1] - span[0] > height:
            self._begun, self._following = view.message.id, False
            self._set_anchor(span[0])

    def _measure(self) -> None:
        """Draw a few rows that were never in view, so that the scroll bar becomes exact."""
        self._measuring = None
        until = time.perf_counter() + MEASURE_SLICE_S
        is_left = True
        while is_left and time.perf_counter() < until:
            is_left = self._flow.draw_last_guess()
            self._measured |= is_left
        if is_left and time.perf_counter() < self._arranged_at + MEASURED_FRAME_S:
            self._measuring = self.set_timer(MEASURE_DELAY_S, self._measure)
            return
        self._release()
        if self._measured:
            self.changed()

    def _release(self) -> None:
        """Drop lines that are far from the screen."""
        self._released_at = time.perf_counter()
        height = self.scrollable_content_region.height
        top = round(self.scroll_y)
        self._flow.release(top - KEPT_SCREENS * height, top + (KEPT_SCREENS + 1) * height)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self._arranging or round(old_value) == round(new_value):
            return
        top = round(new_value)
        self._following = top >= self._flow.height - self.scrollable_content_region.height
        self._set_anchor(top)
        if self._flow.draw(top, top + self.scrollable_content_region.height):
            self.changed()

    # Drawing

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        self._shown = []
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def _refresh_changed(self, height: int) -> None:
        """Let Textual draw the lines that are not on the screen."""
        before = self._shown
        strips = self._strips(range(height))
        if len(before) != height:
            self.refresh()
        elif changed := [y for y, (strip, shown) in enumerate(zip(strips, before, strict=True)) if strip != shown]:
            width = self.scrollable_content_region.width  # without the scroll bar, which is drawn again else
            super().refresh(*(Region(0, y, width, 1) for y in changed))
        self._shown, self._shown_top = strips, round(self.scroll_y)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the kept strips: Textual's own method makes those of all lines again when the text moves up by one.

        Textual asks for all lines of a widget where one has changed: each is finished once.
        """
        lines, width, base = crop.line_range, self.size.width, self.rich_style
        is_shown = self._shown and self._shown_top == round(self.scroll_y) and base == self._base
        if is_shown and len(self._shown) == len(lines) and not lines.start:
            strips = self._shown
        else:
            strips = self._strips(lines)
        background = self.background_colors[1]
        filters = self.get_line_filters()
        way = (width, base, background, *filters)
        known = self._finished if way == self._finished_way else {}
        self._finished_way, self._finished = way, {}
        for strip in strips:
            if (done := known.get(id(strip))) is None:
                finished = strip.adjust_cell_length(width, base)
                for line_filter in filters:
                    finished = finished.apply_filter(line_filter, background)
                done = strip, finished  # the first keeps its id
            self._finished[id(strip)] = done
        drawn = [self._finished[id(strip)][1] for strip in strips]
        return drawn if crop.column_span == (0, width) else [strip.crop(*crop.column_span) for strip in drawn]

    def render_line(self, y: int) -> Strip:
        return self._strips([y])[0]

    def _strips(self, lines: Sequence[int]) -> list[Strip]:
        """Return lines of the screen; those that have not changed are the same objects."""
        width, top = self.scrollable_content_region.width, round(self.scroll_y)
        base = self._base = self.rich_style
        if not self.views:
            welcome = self._welcome()
            first = max(0, self.scrollable_content_region.height - len(welcome)) // 3
            found = [welcome[y - first] if first <= y < first + len(welcome) else None for y in lines]
        else:
            found = [self._flow.line(top + y) for y in lines]
        look = _Look(width, base, self.text_selection, FOCUSED if self.has_focus else "")
        return [self._strip(line, top + y, look) for y, line in zip(lines, found, strict=True)]

    def _strip(self, line: Line | None, flow_y: int, look: _Look) -> Strip:
        width, base = look.width, look.base
        asked = bool(self.views) and self._flow.is_asked(flow_y)
        mark = ASKED if asked else look.mark
        if self._marked is not None and self._marked[0] <= flow_y < self._marked[1]:
            mark = SELECTED
        pan = min(self._pan, line.hidden) if line is not None else 0
        span = look.selection.get_span(flow_y) if look.selection is not None else None
        if line is not None and self.views and self._finding is not None:
            line = self._tinted(line, flow_y, self._finding)
        key = (width, flow_y, base, mark, pan)
        if line is not None and span is None and line.strip is not None and line.strip_key == key:
            return line.strip
        palette = self.palette
        around, inside = base, base + palette.asked if asked else base
        style = palette.user if asked and mark == ASKED else palette.mark
        left = [Segment(" " * margin(width + 1), around), Segment(mark.ljust(GUTTER), inside + style)]
        if line is None:
            return _blank(width, *left)
        fill_to = min(COLUMN - GUTTER, width - margin(width + 1) - GUTTER) if asked else line.fill_to
        layout = Layout(width, flow_y, pan, self._text_width, fill_to)
        if span is not None:
            return _make_strip(line, layout, left, inside, base, span, self._selection_style)
        line.strip, line.strip_key = _make_strip(line, layout, left, inside, base), key
        return line.strip

    def _tinted(self, line: Line, y: int, finding: Finding) -> Line:
        """Return a line with the words that are found in it, which may begin above or go on below."""
        matches = finding.matches([self._flow.line(y - 1) if y else None, line, self._flow.line(y + 1)])
        text = None
        for pieces in matches:
            begin = (y - 1 + pieces[0].line, pieces[0].start)
            for piece in pieces:
                if piece.line == 1:
                    text = text or line.text.copy()
                    text.stylize(FOUND_HERE if begin == self._found_at else FOUND, piece.start, piece.end)
        return line if text is None else replace(line, text=text, strip=None)

    def _welcome(self) -> list[Line]:
        """Return the lines of a chat without a message. Textual draws them again at each key."""
        key = (self.palette, self._text_width, self._about, self._notice)
        if self._composed is None or self._composed[0] != key:
            self._composed = key, self._welcome_lines()
        return self._composed[1]

    def _welcome_lines(self) -> list[Line]:
        palette, width = self.palette, self._text_width
        keymap = keymap_of(self.app)
        keys = {name: keymap.label(f"run({name!r})", key) or f"/{name}" for name, key in WELCOME_KEYS.items()}
        about = "".join(f"{clean(line)}\n" for line in self._about)
        welcome = Text.assemble(
            ("edgelm\n", palette.heading), (f"{about}\n", palette.text), (WELCOME.format(**keys), palette.muted)
        )
        lines = wrap_words(welcome, width)
        if self._notice:
            lines += [Line(Text()), *NoteRow(self._notice, error=True).draw(width, palette)]
        return lines

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
                continue  # no line here, or only decoration
            start, end = span
            text = line.text.plain[max(start, line.prefix) : None if end == -1 else max(end, line.prefix)]
            parts += [line.joint if parts else "", text]
        return "".join(parts), "\n"

    # The selected message

    def on_focus(self) -> None:
        if self.selected is None and self.views:
            self._go_to(len(self.views) - 1)

    def on_blur(self) -> None:
        self._select(None)
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        if self.text_selection is not None:  # the end of a selection by mouse
            return
        y = round(self.scroll_y) + event.y
        view = self._flow.view_at(y)
        if (address := event.style.meta.get(LINK)) is not None:
            self.post_message(self.Linked(address))
            return
        if view is not None and (act := event.style.meta.get(ACT)) is not None:
            self.post_message(self.Act(act, view.message.id))
            return
        if view is not None and self._flow.is_fold_line(y):
            self.post_message(self.Folded(view.message.id))
            return
        if view is not None:
            self._select(view.message.id)
        self.focus(scroll_visible=False)
        self._arrange()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Show the address of the link under the pointer."""
        address = event.style.meta.get(LINK)
        if address != self.tooltip:
            self.tooltip = address

    def action_select(self, by: int) -> None:
        """Select the message above (-1) or below (1)."""
        index = next((i for i, view in enumerate(self.views) if view.message.id == self.selected), len(self.views))
        if index + by >= len(self.views):
            self.post_message(self.Left())
        elif self.views:
            self._go_to(max(0, index + by))

    def action_fold(self) -> None:
        if self.selected is not None:
            self.post_message(self.Folded(self.selected))

    def action_act(self, action: str) -> None:
        if self.selected is not None:
            self.post_message(self.Act(action, self.selected))

    def _go_to(self, index: int) -> None:
        view = self.views[index]
        self._select(view.message.id)
        self._arrange()
        span = self._flow.span_of(view)
        if span is None:  # the terminal has no room for a line
            return
        first, end = span
        height = self.scrollable_content_region.height
        top = round(self.scroll_y)
        if first < top or end - first > height:
            top = first
        elif end > top + height:
            top = end - height
        self._following = top >= self._flow.height - height
        self._set_anchor(top)
        self._arrange()

    # Finding

    def find(self, words: str) -> int:
        """Tint these words and go to the first ones from the top of the screen on; empty: tint nothing any more.

        Return the number of messages that have them.
        """
        self._finding = Finding(words) if words.strip() else None
        self._mark()
        self.refresh()
        if self._finding is None:
            return 0
        self.action_find(0)
        return sum(self._finding.may_be_in(view.searched) for view in self.views)

    def action_find(self, by: int) -> None:
        """Go to the next (1) or previous (-1) place with the words; 0: to the first one from the top of the screen."""
        finding, num_views = self._finding, len(self.views)
        if finding is None or not num_views or self._text_width <= 0:
            return
        found = finding.found if by else None
        top = round(self.scroll_y)
        at = self._flow.view_at(top)
        index = next((i for i, view in enumerate(self.views) if view is at), 0)
        if found is not None:
            index = next((i for i, view in enumerate(self.views) if view.message.id == found.message_id), index)
        for turn in range(num_views + 1):
            view = self.views[(index + turn * (-1 if by < 0 else 1)) % num_views]
            if not finding.may_be_in(view.searched):
                continue
            places = self._places_in(view, finding)
            # Unfolding moves what is below: not while the place before is in this message.
            if not view.is_unfolded and finding.is_in(view.folded_text) and ((by and turn) or not places):
                view.show_reasoning(True)
                self.post_message(self.Folded(view.message.id))
                places = self._places_in(view, finding)
            places = places or ([Place(0, 0)] if finding.is_in(view.searched) else [])  # the words are of its Markdown
            if turn == 0 and places:
                span = self._flow.span_of(view)
                here = found.place if found is not None else Place(top - (span[0] if span else 0), -1)
                places = [place for place in places if (place < here if by < 0 else place > here)]
            if places:
                self._go_to_place(view, places[-1 if by < 0 else 0], finding)
                return

    def _places_in(self, view: MessageView, finding: Finding) -> list[Place]:
        """Return where a message has the words; all of it is drawn for that."""
        if view.is_folded:
            view.fold(False)
            self.post_message(self.Unfolded(view.message.id))
        flow = self._flow
        while True:
            flow.measure(self.views, self._text_width, self.palette)
            span = flow.span_of(view)
            if span is None:
                return []
            if not flow.draw(*span):
                break
        matches = finding.matches([flow.line(y) for y in range(*span)])
        return [Place(pieces[0].line, pieces[0].start) for pieces in matches]

    def _go_to_place(self, view: MessageView, place: Place, finding: Finding) -> None:
        finding.found = Found(view.message.id, place)
        if self.has_focus:
            self.selected = view.message.id
        height, top = self.scrollable_content_region.height, round(self.scroll_y)
        span = self._flow.span_of(view)
        y = (span[0] if span else 0) + place.line
        if not top <= y < top + height:
            top = max(0, y - height // 3)
        self._following = top >= self._flow.height - height
        self._set_anchor(min(top, max(0, self._flow.height - height)))
        self._arrange()

    def focus_found(self) -> None:
        """Take the keys, with the message selected whose place was gone to."""
        if self._finding is not None and self._finding.found is not None:
            self._select(self._finding.found.message_id)
        self.focus(scroll_visible=False)

    def _set_anchor(self, top: int) -> None:
        index, line = self._flow.locate(top)
        self._anchor = (self._flow.rows[index], line) if index >= 0 else None

    def _select(self, message_id: int | None) -> None:
        self.selected = message_id
        self._mark()

    @property
    def hints(self) -> list[Hint]:
        """Return the hints for the selected message."""
        actions = [
            ("c", "copy", "copy"),
            ("e", "edit", "edit"),
            ("r", "again", "regenerate"),
            ("g", "code", "code"),
            *([("x", "explore", "explore")] if self.can_explore else []),
        ]
        hints = [Hint(key, label, f"act({action!r})") for key, label, action in actions]
        hints += [
            Hint("z", "fold", "act('collapse')", optional=True),
            Hint("Z", "all", "act('collapse-all')", optional=True),
            Hint("w", "wrap", "toggle_wrap", optional=True),
        ]
        if self._finding is not None:
            hints = [Hint("n", "next", "find(1)"), Hint("N", "previous", "find(-1)"), *hints]
        return [*(hints if self.views else []), Hint("Esc", "back", "screen.stop")]


def _nothing() -> None:
    """Take nothing."""


@lru_cache(maxsize=64)
def _blank(width: int, before: Segment, mark: Segment) -> Strip:
    """Return the strip where there is no line: the same object, so that it is not drawn again."""
    return Strip(Segment.adjust_line_length([before, mark], width, before.style), width)


class _Look(NamedTuple):
    """What all lines of a screen have in common: cells of the widget, its style, what is selected, the usual mark."""

    width: int
    base: Style
    selection: Selection | None
    mark: str


class Layout(NamedTuple):
    """The place of a line: cells of the widget, its row, cells that it is moved to the left, and its room."""

    width: int
    y: int
    pan: int
    room: int
    fill_to: int


def _make_strip(
    line: Line,
    layout: Layout,
    left: Sequence[Segment],
    inside: Style,
    base: Style,
    span: tuple[int, int] | None = None,
    selection: Style | None = None,
) -> Strip:
    """Return a line as a strip of the screen, with `left` before it.

    Each segment has its offset in the text, for selection by mouse: -2 and less before it, as -1 is a line's end.
    """
    text = line.text
    if span is not None and selection is not None:
        text = text.copy()
        start, end = (
            max(span[0], line.prefix),
            span[1],
        )  # what is not copied keeps its colours: a picture's are its name
        text.stylize(selection, start, None if end == -1 else max(end, start))
    background = inside + line.fill if line.fill is not None else inside
    before = Style.from_meta({"offset": (-sum(len(part.text) for part in left) - 1, layout.y)})
    segments = [Segment(part.text, (part.style or base) + before) for part in left]
    own = text.style if isinstance(text.style, Style) else None  # Rich omits it where a part has no style
    parts = [(part.text, background + (part.style or own)) for part in text.render(CONSOLE)]
    if line.hidden:
        segments += _moved(parts, line.prefix, layout, background)
    else:
        x = 0
        for words, style in parts:
            segments.append(Segment(words, style + Style.from_meta({"offset": (x, layout.y)})))
            x += len(words)
    filled = layout.fill_to - (layout.room if line.hidden else text.cell_len)
    if filled > 0:
        segments.append(Segment(" " * filled, background))
    strip = Strip(Segment.adjust_line_length(segments, layout.width, base), layout.width)
    start = sum(len(part.text) for part in left)
    return SixelStrip(strip, start, text.cell_len, line.sixels, background) if line.sixels else strip


def _moved(parts: Sequence[tuple[str, Style]], prefix: int, layout: Layout, background: Style) -> list[Segment]:
    """Return the part of a wide line that its room shows, with marks where it goes on."""
    segments: list[Segment] = []
    hidden_to = prefix + layout.pan + 1 if layout.pan else prefix  # a mark stands in the place of a cell
    index = cells = used = 0
    for words, style in parts:
        kept, at = "", index
        for start, end, size in split_graphemes(words)[0]:  # an emoji may be several characters
            index += end - start
            if prefix <= cells < hidden_to:
                at = index
                if cells == prefix:
                    segments.append(Segment("‹", background + MORE))
                    used += 1
            elif used < layout.room:
                kept += words[start:end]
                used += size
            cells += size
        if kept:
            segments.append(Segment(kept, style + Style.from_meta({"offset": (at, layout.y)})))
    room = layout.room
    if cells - layout.pan <= room:
        return Segment.adjust_line_length(segments, room, background)
    return [*Segment.adjust_line_length(segments, room - 1, background), Segment("›", background + MORE)]
