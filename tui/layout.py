"""What stands where on the chat screen, and how it fits the terminal.

Owns the widgets, and the keys that move between them or between their lines. Knows nothing of chats and answers.
"""

from __future__ import annotations

from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Static

from edgelm.errors import EdgeLMError
from edgelm.tui.completion import Completion
from edgelm.tui.keys import GLOBAL_KEYS
from edgelm.tui.lines import clean
from edgelm.tui.prompt import Prompt
from edgelm.tui.pullbar import PullBar
from edgelm.tui.sidebar import Sidebar
from edgelm.tui.status import StatusLine
from edgelm.tui.transcript import Transcript

NARROW = 80  # columns; below, the list of chats opens above the conversation


class ChatLayout(Screen[None]):
    """List of chats, conversation, prompt and status line."""

    BINDINGS: ClassVar[list[BindingType]] = [key.binding for key in GLOBAL_KEYS]
    DEFAULT_CSS = """
    ChatLayout { layers: base above; }
    ChatLayout #chat { width: 1fr; height: 1fr; }
    ChatLayout #title { height: 1; padding: 0 1; color: $text-muted; text-style: bold; }
    """

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Sidebar()
            with Vertical(id="chat"):
                yield Static(id="title", markup=False)
                yield Transcript()
                yield Completion()
                yield Prompt()
        yield PullBar()
        yield StatusLine()

    @property
    def is_laid_out(self) -> bool:
        """Say whether the widgets are there: workers outlive them for a moment when the chat is left."""
        return bool(self.query(PullBar))

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def prompt(self) -> Prompt:
        return self.query_one(Prompt)

    @property
    def sidebar(self) -> Sidebar:
        return self.query_one(Sidebar)

    @property
    def pull_bar(self) -> PullBar:
        return self.query_one(PullBar)

    @property
    def status(self) -> StatusLine:
        return self.query_one(StatusLine)

    def complain(self, error: EdgeLMError) -> None:
        """Show an error that belongs to no message."""
        self.notify(clean(str(error)), severity="error", timeout=10, markup=False)

    def copy(self, text: str) -> None:
        """Put a text on the clipboard of whoever sits at the terminal."""
        self.app.copy_to_clipboard(text)
        lines = text.count("\n") + 1
        self.notify(f"copied {lines:,} lines" if lines > 1 else f"copied {len(text):,} characters")

    def on_resize(self, event: events.Resize) -> None:
        self.adapt(event.size.width)

    def adapt(self, width: int) -> None:
        """Show the list of chats beside the conversation where there is room."""
        narrow = width < NARROW
        if self.sidebar.has_class("-narrow") != narrow:
            self.sidebar.set_class(narrow, "-narrow")
            self.sidebar.display = not narrow

    def action_toggle_sidebar(self) -> None:
        sidebar = self.sidebar
        sidebar.display = not sidebar.display
        if not sidebar.display:
            self.prompt.focus()
        elif sidebar.has_class("-narrow"):
            sidebar.query_one("#chats").focus()

    @on(Sidebar.Closed)
    def leave_sidebar(self) -> None:
        """Go back to the prompt."""
        if self.sidebar.has_class("-narrow"):
            self.sidebar.display = False
        self.prompt.focus()

    @on(Transcript.Left)
    def _left_transcript(self) -> None:
        self.transcript.follow()
        self.prompt.focus()

    @on(Prompt.Paged)
    def _paged(self, event: Prompt.Paged) -> None:
        if event.by < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    @on(Prompt.Moved)
    def _moved(self, event: Prompt.Moved) -> None:
        self.query_one(Completion).move(event.by)

    @on(Prompt.TabPressed)
    def _tab(self, event: Prompt.TabPressed) -> None:
        command = self.query_one(Completion).chosen
        if command is not None:
            self.prompt.put(f"/{command.name} ")
