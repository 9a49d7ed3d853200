"""The box in which a message is written, its history, and the list of commands above it.

Owns Enter, line breaks, the walk through earlier messages and the choice among commands. Knows nothing of chats,
or of what commands do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text
from textual import events
from textual.app import RenderResult
from textual.message import Message as Event
from textual.reactive import reactive
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets.text_area import Edit, EditResult

from edgelm.tui.commands.table import Command, Suggestion, complete, in_lines
from edgelm.tui.control_codes import clean_text
from edgelm.tui.fields import TextField
from edgelm.tui.hints import Hint
from edgelm.tui.palette import list_text
from edgelm.tui.prompt.pasted import is_long, may_be_paths

LINE_BREAK_KEYS = frozenset({"alt+enter", "ctrl+j", "shift+enter"})
PLACEHOLDER = "Message: Enter sends, Ctrl+J breaks the line"
NO_PASTE = "a command is typed, not pasted; Esc makes this a message"
SHELL_TITLE = "Shell: Enter runs it, its output is attached"
MAX_LISTED = 8  # commands at a time
MIN_HELP = 12  # columns; in less room the help of a line is left out
BLINK_S = 10.0  # after the last key, as in other programs: a blinking cursor keeps the machine awake


class History:
    """The user's earlier messages, oldest first, and the place of the Up key among them."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts: list[str] = []
        self._index = 0
        self._unsent = ""  # the text that was being written when the walk began
        self.load(texts)

    def load(self, texts: Iterable[str]) -> None:
        """Insert older texts before those of this run."""
        before = list(map(clean_text, texts))  # as the prompt shows them
        self._texts = [*before, *self._texts]
        self._index += len(before)

    def add(self, text: str) -> None:
        """Append a text that was sent. A walk goes on: a message may be sent long after its Enter."""
        is_walking = self._index < len(self._texts)
        if not self._texts or self._texts[-1] != text:
            self._texts.append(text)
        if not is_walking:
            self._index = len(self._texts)

    def end(self) -> str:
        """End the walk: the next one begins at the end. Return the text that was being written before it."""
        unsent = "" if self._index == len(self._texts) else self._unsent
        self._index, self._unsent = len(self._texts), ""
        return unsent

    def written(self, current: str) -> str:
        """Return what is being written: the text before the walk, then that of the prompt where it was changed."""
        if self._index == len(self._texts):
            return current
        return in_lines((self._unsent, "" if self.shows(current) else current))

    def back(self, current: str) -> str | None:
        """Return the previous text; None at the oldest."""
        return self._move(current, -1)

    def forward(self, current: str) -> str | None:
        """Return the next text, the unsent one at the end; None after it."""
        return self._move(current, 1)

    def shows(self, text: str) -> bool:
        """Tell whether a text is the one that the walk has come to."""
        return self._index < len(self._texts) and self._texts[self._index] == text

    def _move(self, current: str, by: int) -> str | None:
        index = self._index + by
        if not 0 <= index <= len(self._texts):
            return None
        if self._index == len(self._texts):
            self._unsent = current
        self._index = index
        return self._unsent if index == len(self._texts) else self._texts[index]


class Prompt(TextField):
    """A text area that sends its text at Enter.

    Keys that concern more than the text call its owner: of what a message told, the next key of a read would know
    nothing yet.
    """

    DEFAULT_CSS = """
    Prompt {
        height: auto; min-height: 3; max-height: 10; min-width: 5;
        border: round $border-blurred; padding: 0 1; background: transparent;
        scrollbar-size-vertical: 1;
        border-title-color: $text-muted; border-subtitle-color: $text-muted;
    }
    Prompt:focus { border: round $primary; background: transparent; }
    Prompt.-editing, Prompt.-shell { border: round $warning; }
    Prompt .text-area--placeholder { color: $text-muted; }
    Prompt .text-area--cursor-line { background: transparent; }
    """

    @dataclass
    class Typed(Event):
        """The text changed."""

        text: str

    @dataclass
    class Ran(Event):
        """Enter was pressed on a command for the shell."""

        command: str

    class Undone(Event):
        """Ctrl+Z was pressed where there is no text to undo."""

    @dataclass
    class Paged(Event):
        """PageUp (-1) or PageDown (1) was pressed: the conversation scrolls."""

        by: int

    # The status line shows other hints where these change.
    completing = reactive(False, repaint=False, bindings=True)  # Up and Down move in the list above
    picking = reactive(False, repaint=False, bindings=True)  # files are listed for the word before the cursor

    def __init__(self) -> None:
        super().__init__(
            id="prompt", soft_wrap=True, show_line_numbers=False, tab_behavior="focus", placeholder=PLACEHOLDER,
            highlight_cursor_line=False,
        )  # fmt: skip
        self.sent = History()
        self.ran = History()  # commands for the shell
        self.is_shell = False  # the text is a command: each character of it came by a key since `!` or /shell
        self._is_typing = False  # a key writes
        self.send: Callable[[str], None] = _ignore  # a text that Enter took
        self.move: Callable[[int], None] = _ignore  # up (-1) or down (1) in the list above
        self.complete: Callable[[], None] = _ignore  # a command, or its path
        self.remove_file: Callable[[], None] = _ignore  # the last one above
        self.take_file: Callable[..., Awaitable[bool]] = _no_file  # of the @word before the cursor, if there is one
        self.attach: Callable[[str], Awaitable[bool]] = _no_file  # a pasted text, if it is a file, or as long as one
        self._blinking: Timer | None = None  # until the cursor stands still
        self.offering = False  # Down moves into the list above while there is no text
        self.offers_command = False  # Tab runs it while there is no text
        self._had_text = False

    def on_mount(self) -> None:
        self._blinking = self.set_timer(BLINK_S, self._stop_blinking)

    def on_focus(self) -> None:
        self._blink()

    def _blink(self) -> None:
        """Let the cursor blink from now on, for a while."""
        self.cursor_blink = True
        if self._blinking is not None:
            self._blinking.stop()
            self._blinking = self.set_timer(BLINK_S, self._stop_blinking)

    def _stop_blinking(self) -> None:
        self.cursor_blink = False

    def put(self, text: str) -> None:
        """Replace the text, with the cursor at its end. It is a message, whatever the text before was."""
        self.leave_shell()
        self._load(text)

    def _load(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)

    @property
    def written(self) -> str:
        """Return the message that is being written, also while an earlier one is shown."""
        return self.sent.written(self.text)

    def give_back(self, text: str) -> None:
        """Put a text that was taken above what was typed since."""
        if text:
            self.put(in_lines((text, self.written)))
            self.sent.end()

    def give_back_command(self, command: str) -> None:
        """Put a command that was not run back, unless something was written since; Up has it then."""
        self.ran.add(command)
        if self.begin_shell():
            self._load(command)

    def edit(self, edit: Edit) -> EditResult:
        """Change the text. One that no key has typed is never a command."""
        if edit.text and not self._is_typing:
            self.leave_shell()
        return super().edit(edit)

    async def _on_key(self, event: events.Key) -> None:
        self._blink()
        if self.is_shell and event.key.startswith("alt+") and (event.is_printable or event.key == "alt+enter"):
            self.leave_shell()  # Esc and the next key came in one read
        self._is_typing = True
        try:
            await self._take_key(event)
        finally:
            self._is_typing = False

    async def _take_key(self, event: events.Key) -> None:
        if event.key == "enter":
            self._consume(event)
            await self.action_take()
        elif not self.text and (event.key == "backspace" or event.character == "!") and self._begin(event.key):
            self._consume(event)
        elif event.key in LINE_BREAK_KEYS:
            self._consume(event)
            self.insert("\n")
        elif event.key == "down" and self.offering and not self.text:
            self._consume(event)
            self.move(1)
        elif event.key in ("up", "down") and self.completing:
            self._consume(event)
            self.move(-1 if event.key == "up" else 1)
        elif event.key in ("pageup", "pagedown"):
            self._consume(event)
            self.post_message(self.Paged(-1 if event.key == "pageup" else 1))
        elif (event.key in ("up", "down") and self._walk_history(event.key)) or (
            event.key == "tab" and await self.action_complete()
        ):
            self._consume(event)
        else:
            await super()._on_key(event)

    def _begin(self, key: str) -> bool:
        """Do what Backspace and ! mean in an empty prompt; return whether it is more than to write."""
        if key == "backspace":
            if not self.leave_shell():
                self.remove_file()
        elif not self.leave_shell():  # the second ! begins a message
            return self.begin_shell()
        else:
            return False
        return True

    async def _on_paste(self, event: events.Paste) -> None:
        if self.is_shell:
            self._consume(event)
            self.notify(NO_PASTE, severity="warning")
        elif is_long(event.text) or may_be_paths(event.text):
            self._consume(event)
            if not await self.attach(event.text):
                self.insert(event.text)

    def action_paste(self) -> None:
        if self.is_shell:
            self.notify(NO_PASTE, severity="warning")
        else:
            super().action_paste()

    def _consume(self, event: events.Event) -> None:
        event.stop()
        event.prevent_default()

    def _walk_history(self, key: str) -> bool:
        """Show an earlier or later text if the cursor is in the first or last line; return whether it was used."""
        row = self.wrapped_document.location_to_offset(self.cursor_location).y
        if row != (0 if key == "up" else self.wrapped_document.height - 1):
            return False
        history = self.ran if self.is_shell else self.sent
        text = history.back(self.text) if key == "up" else history.forward(self.text)
        if text is not None:
            self._load(text)
        return text is not None

    def on_text_area_changed(self) -> None:
        self.post_message(self.Typed(self.text))
        if bool(self.text) != self._had_text:
            self._had_text = bool(self.text)
            self.refresh_bindings()  # the status line shows other hints

    # The same by mouse

    @property
    def hints(self) -> list[Hint]:
        """Return the hints for the text."""
        close = Hint("Esc", "close", "screen.stop")
        if self.picking:
            return [Hint("Enter", "attach", "take"), Hint("Tab", "open", "complete"), close]
        if self.completing and self.text:
            return [Hint("Enter", "run", "send"), Hint("Tab", "complete", "complete"), close]
        if self.is_shell:
            return [Hint("Enter", "run", "send"), Hint("Esc", "leave", "screen.stop")]
        if self.text:
            hints = [Hint("Enter", "send", "send"), Hint("Ctrl+J", "line", "break_line")]
        else:
            files = Hint("@", "files", "list_files", optional=True)
            hints = [Hint("/", "commands", "list_commands", optional=True), files]
        return [Hint("Esc", "leave", "screen.stop"), *hints] if self.has_class("-editing") else hints

    def action_send(self) -> None:
        """Take the text out before the next key: what is typed from now on is no part of it."""
        text, was_shell = self.text, self.leave_shell()
        if was_shell:
            self.put("")
        elif text:
            before = self.sent.end()
            self.put("" if self.has_class("-editing") else before)
        if was_shell:
            self.post_message(self.Ran(text))
        else:
            self.send(text)

    def begin_shell(self) -> bool:
        """Let what is typed be a command for the shell; return False where there is a text, or a message is edited."""
        if self.text or self.has_class("-editing"):
            return False
        self.history.clear()  # undo would bring back the text of a message
        self._set_shell(is_shell=True)
        return True

    def leave_shell(self) -> bool:
        """Let the text be a message again; return whether it was a command for the shell."""
        was_shell = self.is_shell
        if was_shell:
            self._set_shell(is_shell=False)
        return was_shell

    def _set_shell(self, *, is_shell: bool) -> None:
        self.is_shell = is_shell
        self.ran.end()
        self.set_class(is_shell, "-shell")
        self.border_title = SHELL_TITLE if is_shell else ""
        self.refresh_bindings()
        self.post_message(self.Typed(self.text))  # the list above follows

    async def action_take(self) -> None:
        """Attach the chosen file, or send the text."""
        if self.is_shell or not await self.take_file(opens=False):
            self.action_send()

    async def action_complete(self) -> bool:
        """Complete an @word or a command; return whether there is one."""
        if self.is_shell or await self.take_file(opens=True):
            return True
        completes = self.text.startswith("/") or (self.offers_command and not self.text)
        if completes:
            self.complete()
        return completes

    def action_break_line(self) -> None:
        self.insert("\n")

    def action_undo(self) -> None:
        """Undo what was typed; where nothing was, tell the screen."""
        had_text = bool(self.text)
        super().action_undo()
        if not had_text and not self.text:
            self.post_message(self.Undone())

    def action_list_commands(self) -> None:
        self.put("/")

    def action_list_files(self) -> None:
        self.insert(" @" if self.text and not self.text[-1].isspace() else "@")

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Show an earlier message, as Up does, unless a text is being written."""
        if (not self.text or self.sent.shows(self.text)) and self._walk_history("up"):
            self._consume(event)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        if self.text and self.sent.shows(self.text) and self._walk_history("down"):
            self._consume(event)


def _ignore(*_: object) -> None:
    pass


async def _no_file(*_: object, **__: object) -> bool:
    return False


class Completion(Widget):
    """The commands that the typed text may become, the paths that Tab found, or what an empty prompt offers.

    Of offers none is chosen before Down is pressed: Enter in an empty prompt does nothing by accident.
    """

    DEFAULT_CSS = """
    Completion {
        height: auto; max-height: 8; padding: 0 2; background: $panel; display: none;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    Completion.-open { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(id="completion")
        self._suggestions: list[Suggestion] = []
        self._index = 0
        self._text = ""  # that the suggestions are for
        self._offers: list[Suggestion] = []
        self.more: Callable[[], Sequence[Command]] = tuple  # the prompts and resources of servers

    @property
    def chosen(self) -> Suggestion | None:
        return self._suggestions[self._index] if self._suggestions and self._index >= 0 else None

    @property
    def is_offering(self) -> bool:
        return bool(self._offers) and self._suggestions is self._offers

    @property
    def offered_command(self) -> str:
        """Return what Tab runs in an empty prompt: the chosen offer, else the command whose help says Tab."""
        if not self.is_offering:
            return ""
        if self.chosen is not None:
            return self.chosen.text
        return next((offer.text for offer in self._offers if "Tab" in offer.help), "")

    def offer(self, offers: list[Suggestion], text: str) -> None:
        """Show these while there is no text in the prompt; `text` is what it has now."""
        was_offering = self.is_offering
        self._offers = offers
        if was_offering or not text:
            self._show_offers()

    def update(self, text: str, *, again: bool = False) -> None:
        """Show the commands that a text is a prefix of; keep the suggestions that are shown for it, unless `again`."""
        if not text:
            self._show_offers()
        elif text != self._text or again:
            more = [command for command in self.more() if text[0] == "/" and command.name.startswith(text[1:])]
            self.show_for(text, [command.suggestion for command in (*complete(text), *more)])

    def show_for(self, text: str, suggestions: list[Suggestion]) -> None:
        """Show what a text may become."""
        self._text = text
        if suggestions != self._suggestions:
            self._show(suggestions, 0)

    def _show_offers(self) -> None:
        self._text = ""
        if self._suggestions is not self._offers:
            self._show(self._offers, -1)

    def _show(self, suggestions: list[Suggestion], index: int) -> None:
        self._suggestions, self._index = suggestions, index
        self.set_class(bool(suggestions), "-open")
        self.refresh(layout=True)

    def move(self, by: int) -> None:
        """Choose the line above (-1) or below (1); of offers also none."""
        if self._suggestions:
            none = 1 if self.is_offering else 0
            self._index = (self._index + none + by) % (len(self._suggestions) + none) - none
            self.refresh()

    def close(self) -> bool:
        """Hide the list; return whether it was open."""
        was_open = bool(self._suggestions)
        self._suggestions, self._text, self._offers = [], "", []
        self.remove_class("-open")
        return was_open

    @dataclass
    class Clicked(Event):
        """A line was clicked."""

        suggestion: Suggestion

    def on_click(self, event: events.Click) -> None:
        place = self._first + event.y
        if 0 <= place < len(self._suggestions):
            self.post_message(self.Clicked(self._suggestions[place]))

    @property
    def _first(self) -> int:
        """Return the place of the first line that is shown."""
        return max(0, min(self._index - MAX_LISTED // 2, len(self._suggestions) - MAX_LISTED))

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return min(len(self._suggestions), MAX_LISTED)

    def render(self) -> RenderResult:
        return list_text(self._lines(), self.app.current_theme)

    def _lines(self) -> Text:
        width = max((len(suggestion.usage) for suggestion in self._suggestions), default=0) + 2
        room = self.content_size.width - width
        longest = max((len(suggestion.help) for suggestion in self._suggestions), default=0)
        has_helps = room >= min(longest, MIN_HELP)
        first = self._first
        text = Text(no_wrap=True, overflow="ellipsis")
        for i, suggestion in enumerate(self._suggestions[first : first + MAX_LISTED], first):
            style = "reverse" if i == self._index else ""
            text.append(f"{suggestion.usage:<{width}}" if has_helps else suggestion.usage, f"bold {style}".strip())
            text.append((suggestion.help if has_helps else "") + "\n", style or "dim")
        text.rstrip()
        return text
