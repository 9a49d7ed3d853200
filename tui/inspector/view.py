"""The inspector: the steps of an engine as they happen, in the terminal.

Owns the keys and the mouse that stop the picture and go back in it. It is fed with events, and knows nothing of
connections.
"""

from __future__ import annotations

import time
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import BindingType
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget

from edgelm.client.watching import Seen
from edgelm.tui.commands.table import INSPECTOR_KEYS
from edgelm.tui.hints import Hint
from edgelm.tui.inspector.picture import Line, picture
from edgelm.tui.inspector.steps import Steps

FRAME_S = 0.5  # between two drawings: they cost the engine time, and faster ones cannot be read
FIRST_S = 0.05  # to the drawing of an event after a pause


class Inspector(Widget, can_focus=True):
    """Draws the steps that it is fed with. `bandwidth` is that of the machine's memory, in bytes per second."""

    DEFAULT_CSS = """
    Inspector { height: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [key.binding for key in INSPECTOR_KEYS]

    def __init__(self, bandwidth: float = 0.0) -> None:
        super().__init__(id="inspector")
        self.steps = Steps()
        self.bandwidth = bandwidth
        self._notice = ""  # in place of the steps
        self._frame: Timer | None = None
        self._drawn_at = 0.0  # of time.monotonic
        self._was_paused = False
        self._lines: list[Line] = []  # as drawn
        self._strips: list[Strip] = []  # of these lines; empty: to be drawn again
        self._step_strips: dict[int, Strip] = {}  # of steps, which do not change
        self._base = Style()  # of all lines, as drawn

    @property
    def hints(self) -> list[Hint]:
        """The keys for the status line of the chat."""
        pause = Hint("Space", "goes on" if self.steps.is_paused else "stops", "pause")
        return [pause, Hint("←", "back", "move(-1)"), Hint("→", "on", "move(1)"), Hint("Esc", "leave", "screen.stop")]

    def feed(self, seen: Seen) -> None:
        """Take an event, and draw it with the next frame."""
        self.steps.take(seen)
        self._notice = ""
        if self._frame is None:
            self._frame = self.set_timer(max(self._drawn_at + FRAME_S - time.monotonic(), FIRST_S), self._draw)

    def tell(self, notice: str) -> None:
        """Show a notice in place of the steps, until the next event."""
        self._notice = notice
        self._draw()

    def _draw(self) -> None:
        """Draw the steps again."""
        self._frame = None
        self._drawn_at = time.monotonic()
        self._strips = []
        self.refresh()
        if self.steps.is_paused is not self._was_paused:
            self._was_paused = self.steps.is_paused
            self.refresh_bindings()  # the status line shows other hints

    def on_resize(self) -> None:
        self._step_strips = {}
        self._draw()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._step_strips = {}
        self._draw()

    def action_pause(self) -> None:
        self.steps.toggle_pause()
        self._draw()

    def action_move(self, num_steps: int) -> None:
        self.steps.move(num_steps)
        self._draw()

    def action_newest(self) -> None:
        if self.steps.is_paused:
            self.steps.toggle_pause()
        self._draw()

    def on_click(self, event: events.Click) -> None:
        """Stop at the step of the clicked line; elsewhere, stop or go on."""
        event.stop()
        offset = event.get_content_offset(self)
        number = self._lines[offset.y].step if offset is not None and offset.y < len(self._lines) else None
        if number is None:
            self.steps.toggle_pause()
        else:
            self.steps.stop_at(number)
        self._draw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(1)

    def render_line(self, y: int) -> Strip:
        width, height = self.content_size
        if not self._strips:
            self._base = self.rich_style  # computed from all ancestors: once a frame, not once a line
            if self._notice:
                self._lines = [Line(line) for line in Text(self._notice).wrap(self.app.console, max(width, 1))]
            else:
                self._lines = picture(self.steps, width, height, self.bandwidth)
            self._strips = [self._strip(line) for line in self._lines]
            shown = {line.step for line in self._lines}
            self._step_strips = {number: strip for number, strip in self._step_strips.items() if number in shown}
        strip = self._strips[y] if y < len(self._strips) else Strip.blank(width, self._base)
        return strip.crop_extend(0, width, self._base)

    def _strip(self, line: Line) -> Strip:
        if line.step is not None and not self.steps.is_paused and line.step in self._step_strips:
            return self._step_strips[line.step]
        console = self.app.console
        base = self._base + console.get_style(line.text.style)
        strip = Strip(Segment.apply_style(line.text.render(console, end=""), base))
        if line.step is not None and not self.steps.is_paused:  # the step that was stopped at is marked
            self._step_strips[line.step] = strip
        return strip
