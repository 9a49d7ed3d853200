"""Every key, in one table: what the widgets bind, and what F1 shows.

Owns keys and their one-line descriptions. Knows nothing of what they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding

NAMES = {
    "ctrl": "Ctrl",
    "alt": "Alt",
    "shift": "Shift",
    "escape": "Esc",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "up": "↑",
    "down": "↓",
    "left": "←",
    "right": "→",
    "delete": "Del",
    "enter": "Enter",
    "tab": "Tab",
    "home": "Home",
    "end": "End",
}


@dataclass(frozen=True, slots=True)
class Key:
    """Keys that do the same. `action` empty: the widget reads the key itself, and only F1 needs it here."""

    keys: str  # Textual's names, with commas
    action: str
    help: str
    priority: bool = False  # before the widget that has the focus

    @property
    def binding(self) -> Binding:
        return Binding(self.keys, self.action, self.help, show=False, priority=self.priority)

    @property
    def shown(self) -> str:
        """Return the keys as a person reads them."""
        keys = [key.split("+") for key in self.keys.split(",")]
        return ", ".join(
            "+".join(NAMES.get(part, part.upper() if len(key) > 1 or len(part) > 1 else part) for part in key)
            for key in keys
        )


GLOBAL_KEYS = (
    Key("f1", "run('help')", "Show every key and command", priority=True),
    Key("ctrl+p", "command_palette", "Find a command by name"),
    Key("ctrl+n", "run('new')", "Start a new chat", priority=True),
    Key("ctrl+f", "run('search')", "Search all chats", priority=True),
    Key("ctrl+b", "toggle_sidebar", "Show or hide the list of chats", priority=True),
    Key("escape", "stop", "Stop the answer; leave what is open"),
    Key("ctrl+r", "run('regenerate')", "Answer again; the old answer is kept", priority=True),
    Key("f4", "run('edit')", "Edit your last message; the old one is kept", priority=True),
    Key("ctrl+y", "run('copy')", "Copy the last answer", priority=True),
    Key("ctrl+g", "run('code')", "Copy a block of code", priority=True),
    Key("ctrl+o", "run('model')", "Choose the model, or pull one", priority=True),
    Key("ctrl+t", "toggle_thoughts", "Show or hide the model's reasoning", priority=True),
    Key("f2", "run('title')", "Rename the chat", priority=True),
    Key("f3", "run('drafts')", "Tint the drafted words of answers since the start", priority=True),
    Key("f5", "run('shorten')", "Go on without the oldest messages", priority=True),
    Key("ctrl+c", "interrupt", "Copy what is selected, or stop, or twice: quit", priority=True),
    Key("ctrl+q", "run('quit')", "Quit", priority=True),
)

PROMPT_KEYS = (
    Key("enter", "", "Send"),
    Key("alt+enter,ctrl+j,shift+enter", "", "Break the line"),
    Key("up", "", "Earlier messages of yours, from the first line"),
    Key("/", "", "Commands; Tab completes"),
    Key("pageup,pagedown", "", "Scroll the conversation"),
    Key("shift+tab", "", "Go to the messages: copy, edit, versions"),
)

TRANSCRIPT_KEYS = (
    Key("up,k", "select(-1)", "The message above"),
    Key("down,j", "select(1)", "The message below, then the prompt"),
    Key("left", "act('previous')", "Its version before"),
    Key("right", "act('next')", "Its version after"),
    Key("e", "act('edit')", "Edit it: a new branch"),
    Key("r", "act('regenerate')", "Answer it again: a new branch"),
    Key("c,y", "act('copy')", "Copy it"),
    Key("g", "act('code')", "Copy a block of code of it"),
    Key("home", "scroll_home", "Go to the beginning"),
    Key("end", "scroll_end", "Go to the end"),
)

SIDEBAR_KEYS = (
    Key("enter", "", "Open the chat"),
    Key("delete", "delete_chat", "Delete the chat"),
    Key("escape", "", "Back to the prompt"),
)

KEY_GROUPS = (
    ("Everywhere", GLOBAL_KEYS),
    ("In the prompt", PROMPT_KEYS),
    ("On a message", TRANSCRIPT_KEYS),
    ("In the list of chats", SIDEBAR_KEYS),
)
