"""The inspector: the steps of an engine as they happen, in the terminal.

Owns the keys and the mouse that stop the picture and go back in it. It is fed with events, and knows nothing of
connections.
"""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import RenderResult
from textual.binding import Binding, BindingType
from textual.timer import Timer
from textual.widget import Widget

from edgelm.client.watching import Seen
from edgelm.tui.engine_picture import picture
from edgelm.tui.steps import Steps

FRAME_S = 0.1  # between two drawings: faster ones cannot be read
PAGE = 20  # steps


class Inspector(Widget, can_focus=True):
    """Draws the steps that it is fed with. `bandwidth` is that of the machine's memory, in bytes per second."""

    DEFAULT_CSS = """
    Inspector { height: 1fr; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "pause", "Stop or go on"),
        Binding("left", "move(-1)", "One step back"),
        Binding("right", "move(1)", "One step on"),
        Binding("pageup", f"move({-PAGE})", "Back"),
        Binding("pagedown", f"move({PAGE})", "On"),
        Binding("home", "move(-1000)", "First"),
        Binding("end", "newest", "Newest"),
    ]

    def __init__(self, bandwidth: float = 0.0) -> None:
        super().__init__(id="inspector")
        self.steps = Steps()
        self.bandwidth = bandwidth
        self.notice = ""  # an error in place of the steps
        self._frame: Timer | None = None

    def feed(self, seen: Seen) -> None:
        """Take an event, and draw it with the next frame."""
        self.steps.take(seen)
        self.notice = ""
        if self._frame is None:
            self._frame = self.set_timer(FRAME_S, self._draw)

    def fail(self, notice: str) -> None:
        """Show why there are no steps."""
        self.notice = notice
        self.refresh()

    def _draw(self) -> None:
        self._frame = None
        self.refresh()

    def action_pause(self) -> None:
        self.steps.toggle_pause()
        self.refresh()

    def action_move(self, num_steps: int) -> None:
        self.steps.move(num_steps)
        self.refresh()

    def action_newest(self) -> None:
        if self.steps.is_paused:
            self.steps.toggle_pause()
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Stop at the step of the clicked line; elsewhere, stop or go on."""
        event.stop()
        lines = picture(self.steps, self.content_size.width, self.content_size.height, self.bandwidth)
        offset = event.get_content_offset(self)
        number = lines[offset.y].step if offset is not None and offset.y < len(lines) else None
        if number is None:
            self.steps.toggle_pause()
        else:
            self.steps.stop_at(number)
        self.refresh()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(1)

    def render(self) -> RenderResult:
        if self.notice:
            return Text(self.notice)
        lines = picture(self.steps, self.content_size.width, self.content_size.height, self.bandwidth)
        return Text("\n").join(line.text for line in lines)
