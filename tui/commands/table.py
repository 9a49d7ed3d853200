"""Every command and every key, in tables, and the help page (F1) that shows them.

Owns names, arguments, keys and their one-line descriptions. A command's function is found by its path when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Input, Static

from edgelm.tui.dialogs.basic import FOCUS_CSS, Dialog
from edgelm.tui.fields import LineField
from edgelm.tui.hints import Hint, footer


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What the text in the prompt may become, and how the list shows it."""

    text: str
    usage: str
    help: str = ""
    command: Command | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """One command, and its function below edgelm.tui: `async def (face, argument)`, which may raise EdgeLMError."""

    name: str
    path: str  # of the function
    help: str
    argument: str = ""
    face: Literal["both", "screen", "lines"] = "both"  # where it makes sense, or where this row is in place of another

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def suggestion(self) -> Suggestion:
        return Suggestion(f"/{self.name} ", self.usage, self.help, self)

    async def run(self, face: Any, argument: str) -> None:
        """Run it on a face; its module is imported now. Raises EdgeLMError."""
        await self.function(face, argument)

    @property
    def function(self) -> Callable[[Any, str], Awaitable[None]]:
        module, _, name = self.path.rpartition(".")
        function: Callable[[Any, str], Awaitable[None]] = getattr(import_module(f"edgelm.tui.{module}"), name)
        return function


ALL_COMMANDS = (
    Command("new", "commands.chats.new", "Start a new chat"),
    Command("search", "commands.chats.search", "Search all chats", "[WORDS]", face="screen"),
    Command("search", "plain.commands.search", "Search all chats; #TAG filters", "WORDS", face="lines"),
    Command("find", "commands.messages.find", "Find words in this chat", "[WORDS]", face="screen"),
    Command("find", "plain.commands.find", "Find words in this chat", "WORDS", face="lines"),
    Command("chats", "plain.commands.chats", "List the newest chats", face="lines"),
    Command("open", "plain.commands.open_chat", "Open a chat of the last list", "NUMBER", face="lines"),
    Command("read", "plain.commands.read", "Read the last messages again", "[NUMBER]", face="lines"),
    Command("model", "commands.models.model", "Choose the model of this chat, or pull one", "[NAME]"),
    Command("preset", "commands.own.preset", "Choose or save a preset: prompt, model, sampling", "[NAME|save|off]"),
    Command("system", "commands.settings.system", "Set the system prompt of this chat", "[TEXT]"),
    Command("params", "commands.settings.params", "Set how this chat is sampled", "[NAME=VALUE …]"),
    Command("think", "commands.settings.think", "Set how much the model thinks", "[EFFORT]"),
    Command("reasoning", "plain.commands.reasoning", "Read the model's reasoning, or stop that", face="lines"),
    Command(
        "know", "commands.knowledge.know", "List, add or remove what is read for each question", "[PATH|off [PATH]]"
    ),
    Command("attach", "commands.messages.attach", "Attach a file, folder or page to the next message", "[PATH|URL]"),
    Command("shell", "commands.messages.shell", "Run a command of your shell, and attach its output", face="screen"),
    Command("paste", "commands.messages.paste", "Attach the picture on the clipboard"),
    Command("tools", "commands.tools.tools", "List the servers of tools, use one here, or none", "[NAME …|off]"),
    Command("reload", "commands.chats.reload", "Show what another window has changed in this chat"),
    Command("title", "commands.chats.title", "Rename the chat", "[TITLE]"),
    Command(
        "pull", "commands.models.pull", "Pull a model from the hub; stop keeps partial files", "[NAME|stop]",
        face="screen",
    ),
    Command(
        "pull", "plain.commands.pull", "Pull a model from the hub; Ctrl+C stops it and keeps partial files", "NAME",
        face="lines",
    ),
    Command("regenerate", "commands.messages.regenerate", "Answer again; the old answer is kept"),
    Command("edit", "commands.messages.edit", "Edit your last message; the old one is kept"),
    Command("shorten", "commands.messages.shorten", "Go on without the oldest messages"),
    Command("whole", "commands.messages.whole", "Send the whole conversation again"),
    Command("drafts", "commands.settings.drafts", "Tint the drafted words in answers of this run", face="screen"),
    Command(
        "inspect", "commands.engine.inspect", "Show the steps of the engine: prompt, drafts, tokens, KV cache",
        face="screen",
    ),
    Command(
        "explore", "commands.engine.explore", "See what else the model could have said, and go on from it",
        face="screen",
    ),
    Command(
        "compare", "commands.engine.compare", "Answer again with another model or settings, side by side",
        "[MODEL|SETTING]",
    ),
    Command("editor", "commands.own.editor", "Write the message in your editor ($EDITOR)", face="screen"),
    Command("editor", "plain.commands.editor", "Write the message in your editor ($EDITOR)", face="lines"),
    Command("copy", "commands.messages.copy", "Copy the last answer"),
    Command("code", "commands.messages.code", "Copy a block of code, or save it", "[NUMBER] [FILE]"),
    Command("export", "commands.chats.export", "Write the chat as md, json or html", "[FORMAT] [FILE]"),
    Command("pin", "commands.chats.pin", "Pin the chat at the top of the list, or unpin it"),
    Command("tag", "commands.chats.tag", "Tag the chat; -NAME takes a tag away", "[NAME …|-NAME]"),
    Command("archive", "commands.chats.archive", "Put the chat into the archive, or take it out"),
    Command("delete", "commands.chats.delete", "Delete the chat; /undo brings it back"),
    Command("undo", "commands.chats.undo", "Bring back the chat that was deleted last"),
    Command("trash", "commands.chats.trash", "Bring back a chat of the last 30 days", face="screen"),
    Command(
        "trash", "commands.chats.trash", "List the chats deleted in the last 30 days, or bring back one", "[NUMBER]",
        face="lines",
    ),
    Command("stats", "commands.chats.stats", "Show tokens, speed and saved time by model and day"),
    Command("status", "plain.commands.status", "Tell the model and the figures of the last answer", face="lines"),
    Command("theme", "commands.own.theme", "Choose the colours", "[NAME]", face="screen"),
    Command(
        "help", "commands.knowledge.help_page", "Show every key and command, or ask about edgelm", "[QUESTION]",
        face="screen",
    ),
    Command(
        "help", "commands.knowledge.help_page", "List the commands, or ask about edgelm", "[QUESTION]", face="lines"
    ),
    Command("quit", "commands.chats.leave", "Quit"),
)  # fmt: skip
COMMANDS = tuple(command for command in ALL_COMMANDS if command.face != "lines")  # of the full screen
PLAIN_COMMANDS = tuple(command for command in ALL_COMMANDS if command.face != "screen")
PLAIN_NOTES = (
    "Several lines: end a line with a backslash, or put three double quotes before and after the message.",
    "Ctrl+C stops an answer. At the prompt it quits if pressed twice, and Ctrl+D quits at once.",
)

_CALL = re.compile(r"/([a-z]+)(?:\s+(.*))?\s*", re.DOTALL)
_OFFER = re.compile(r"/(([^\s/:]+):\S+)(?:\s+(.*))?\s*", re.DOTALL)


def find_command(name: str) -> Command | None:
    """Return a command by its name, or by a prefix that only one command has."""
    matches = [command for command in COMMANDS if command.name.startswith(name)]
    exact = next((command for command in matches if command.name == name), None)
    return exact or (matches[0] if len(matches) == 1 else None)


def parse_call(text: str) -> tuple[str, str] | None:
    """Return the name and argument of a text that calls a command; None where it is a message.

    `/etc/hosts is empty` is a message. So is a text that begins with two slashes, one of which is dropped.
    """
    match = _CALL.fullmatch(text)
    return (match[1], (match[2] or "").strip()) if match else None


def as_typed(message: str) -> str:
    """Return what is typed for a message: one that begins with a slash gets another one, or it may be a command."""
    return f"/{message}" if message.startswith("/") else message


def in_lines(messages: Iterable[str]) -> str:
    """Return typed messages as one, below each other: a second slash is only for the begin of a message."""
    first, *others = [message for message in messages if message] or [""]
    return "\n".join((first, *(other.removeprefix("/") if other.startswith("//") else other for other in others)))


def parse_offer(text: str, servers: Collection[str]) -> tuple[str, str] | None:
    """Return name and argument of a text that asks for a prompt or resource of a server: `/SERVER:NAME …`."""
    match = _OFFER.fullmatch(text)
    return (match[1], (match[3] or "").strip()) if match and match[2] in servers else None


def complete(text: str) -> list[Command]:
    """Return the commands that a text is a prefix of."""
    if not re.fullmatch(r"/[a-z]*", text):
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:])]


KEY_NAMES = {
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
    "backspace": "Backspace",
    "enter": "Enter",
    "tab": "Tab",
    "space": "Space",
    "home": "Home",
    "end": "End",
}


@dataclass(frozen=True, slots=True)
class Key:
    """Keys with the same effect. `action` is empty where the widget reads the key itself: only the help needs it."""

    keys: str  # Textual's names, separated by commas
    action: str
    help: str
    priority: bool = False  # bound before the widget that has the focus

    @property
    def binding(self) -> Binding:
        return Binding(self.keys, self.action, self.help, show=False, priority=self.priority, id=self.action)

    @property
    def shown(self) -> str:
        """Return the keys as a person reads them."""
        keys = [key.split("+") for key in self.keys.split(",")]
        return ", ".join(
            "+".join(KEY_NAMES.get(part, part.upper() if len(key) > 1 or len(part) > 1 else part) for part in key)
            for key in keys
        )


GLOBAL_KEYS = (
    Key("f1", "run('help')", "Show every key and command", priority=True),
    Key("ctrl+p", "app.command_palette", "Find a command by name"),
    Key("ctrl+n", "run('new')", "Start a new chat", priority=True),
    Key("ctrl+f", "run('search')", "Search all chats", priority=True),
    Key("ctrl+l", "run('find')", "Find words in this chat", priority=True),
    Key("ctrl+b", "toggle_sidebar", "Show or hide the list of chats", priority=True),
    Key("escape", "stop", "Stop the answer; close what is open"),
    Key("ctrl+r", "run('regenerate')", "Answer again; the old answer is kept", priority=True),
    Key("f4", "run('edit')", "Edit your last message; the old one is kept", priority=True),
    Key("ctrl+y", "run('copy')", "Copy the last answer", priority=True),
    Key("ctrl+g", "run('code')", "Copy a block of code", priority=True),
    Key("ctrl+o", "run('model')", "Choose the model, or pull one", priority=True),
    Key("ctrl+t", "toggle_reasoning", "Show or hide the model's reasoning, and what was read", priority=True),
    Key("f2", "run('title')", "Rename the chat", priority=True),
    Key("f3", "run('drafts')", "Tint the drafted words in answers of this run", priority=True),
    Key("f5", "run('shorten')", "Go on without the oldest messages", priority=True),
    Key("f6", "run('inspect')", "Show the steps of the engine; again: enter, close", priority=True),
    Key("f7", "run('explore')", "See what else the model could have said", priority=True),
    Key("f8", "run('compare')", "Answer again with another model, side by side", priority=True),
    Key("f9", "run('editor')", "Write the message in your editor ($EDITOR)", priority=True),
    Key("ctrl+z", "suspend", "In an empty prompt: bring back the deleted chat, or go to the shell until `fg`"),
    Key("ctrl+c", "interrupt", "Copy the selection, or stop the answer; twice: quit", priority=True),
    Key("ctrl+q", "run('quit')", "Quit", priority=True),
)

PROMPT_KEYS = (
    Key("enter", "", "Send"),
    Key("alt+enter,ctrl+j,shift+enter", "", "Break the line"),
    Key("up", "", "In the first line: your earlier messages"),
    Key("/", "", "Commands; Tab completes them and paths"),
    Key("@", "", "Files and folders to attach; Tab opens a folder"),
    Key("!", "", "In an empty prompt: a command for your shell; its output is attached"),
    Key("backspace", "", "In an empty prompt: take off the last file"),
    Key("pageup,pagedown", "", "Scroll the conversation"),
    Key("shift+tab", "", "Go to the messages: copy, edit, versions"),
)

TRANSCRIPT_KEYS = (
    Key("up,k", "select(-1)", "The message above"),
    Key("down,j", "select(1)", "The message below, then the prompt"),
    Key("/", "screen.run('find')", "Find words"),
    Key("n", "find(1)", "The next place"),
    Key("N", "find(-1)", "The place before"),
    Key("left", "act('previous')", "The previous version"),
    Key("right", "act('next')", "The next version"),
    Key("e", "act('edit')", "Edit it: a new branch"),
    Key("r", "act('regenerate')", "Answer it again: a new branch"),
    Key("enter", "fold", "Show its reasoning, or what was read"),
    Key("z", "act('collapse')", "Fold it"),
    Key("Z", "act('collapse-all')", "Fold all long ones"),
    Key("shift+left", "pan(-1)", "Wide code: back"),
    Key("shift+right", "pan(1)", "Wide code: on"),
    Key("w", "toggle_wrap", "Wrap wide code"),
    Key("c,y", "act('copy')", "Copy it"),
    Key("u", "act('links')", "Its links"),
    Key("g", "act('code')", "Copy one of its blocks of code"),
    Key("x", "act('explore')", "What else it could have said"),
    Key("home", "scroll_home", "Go to the beginning"),
    Key("end", "scroll_end", "Go to the end"),
)

STATE_KEYS = (
    Key("left", "move(-1)", "The part before"),
    Key("right", "move(1)", "The next part"),
    Key("enter", "open", "Change it"),
)

FILE_KEYS = (
    Key("left", "move(-1)", "The file before"),
    Key("right", "move(1)", "The next file"),
    Key("enter", "use", "Pasted text: put it in; changed: attach it again"),
    Key("delete,backspace", "remove", "Take it off"),
    Key("down", "leave", "Back to the prompt"),
)

SIDEBAR_KEYS = (
    Key("enter", "", "Open it"),
    Key("r", "act('title')", "Rename it"),
    Key("p", "act('pin')", "Pin it, or unpin it"),
    Key("t", "act('tag')", "Tag it; #TAG in the search filters"),
    Key("a", "act('archive')", "Archive it, or take it out"),
    Key("delete", "act('delete')", "Delete it"),
    Key("ctrl+z", "screen.run('undo')", "Bring back the deleted chat"),
    Key("escape", "", "Back to the prompt"),
)

INSPECTOR_KEYS = (
    Key("space", "pause", "Stop the picture, or go on"),
    Key("left", "move(-1)", "One step back"),
    Key("right", "move(1)", "One step on"),
    Key("pageup", "move(-20)", "20 steps back"),
    Key("pagedown", "move(20)", "20 steps on"),
    Key("home", "move(-1000)", "The first step that is kept"),
    Key("end", "newest", "The newest step"),
)

Group = tuple[str, Sequence[Key]]  # a title of the help page, and its keys
EVERYWHERE = "Everywhere"
KEY_GROUPS: tuple[Group, ...] = (
    (EVERYWHERE, GLOBAL_KEYS),
    ("In the prompt", PROMPT_KEYS),
    ("On a message", TRANSCRIPT_KEYS),
    ("On attached files (Shift+Tab)", FILE_KEYS),
    ("On what is set, below the title (Shift+Tab)", STATE_KEYS),
    ("In the inspector", INSPECTOR_KEYS),
    ("In the list of chats", SIDEBAR_KEYS),
)

PLACES = {  # the ids of widgets, and the group that comes first where one of them has the focus
    "transcript": "On a message",
    "files": "On attached files (Shift+Tab)",
    "state": "On what is set, below the title (Shift+Tab)",
    "inspector": "In the inspector",
    "sidebar": "In the list of chats",
}

KEY_CELLS, KEY_CELLS_NARROW = 24, 14  # of the column of keys
ROOMY = 80  # columns of a terminal

HELP_NOTES = (
    "To select with the mouse in the terminal itself, hold Shift (Option in a Mac's Terminal).",
    "Copying uses OSC 52, which works over SSH; tmux needs `set -g set-clipboard on`, or `allow-passthrough on`.",
)


class HelpScreen(Dialog[None]):
    """The page that F1 opens: every key and command."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close", show=False),
        Binding("f1", "dismiss(None)", "Close", show=False, id="run('help')"),  # the user's own key closes it too
    ]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > Vertical {
        width: 84; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; border-title-color: $foreground; border-subtitle-color: $text-muted;
        background: $surface; padding: 0 1;
    }
    HelpScreen VerticalScroll {
        height: auto; max-height: 1fr; scrollbar-size-vertical: 1;
        scrollbar-background: $surface; scrollbar-background-hover: $surface; scrollbar-background-active: $surface;
    }
    HelpScreen Input { margin-bottom: 1; }
    HelpScreen Static { height: auto; link-style: none; link-color: $foreground; link-style-hover: underline; }
    """ + FOCUS_CSS.format(name="HelpScreen")

    def __init__(self, groups: Sequence[Group] | None = None) -> None:
        """Show the keys in force, `groups`; by default those of the tables."""
        super().__init__()
        self._groups = KEY_GROUPS if groups is None else groups

    def compose(self) -> ComposeResult:
        focused = self.app.screen_stack[0].focused
        places = [PLACES.get(node.id or "") for node in focused.ancestors_with_self] if focused is not None else []
        self._groups = sorted(self._groups, key=lambda group: group[0] not in places)
        with Vertical() as box:
            box.border_title = "Keys and commands"
            box.border_subtitle = footer([Hint("Esc", "closes", "screen.dismiss(None)")], "; a click runs a command")
            yield LineField(placeholder="type to filter")
            with VerticalScroll(can_focus=False):
                yield Static(self._page())

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        self.query_one(Static).update(self._page(event.value.lower().split()))
        self.query_one(VerticalScroll).scroll_home(animate=False)

    def _page(self, words: Sequence[str] = ()) -> Lines:
        return _help_page(self._groups, words, KEY_CELLS if self.app.size.width >= ROOMY else KEY_CELLS_NARROW)

    @on(Input.Submitted)
    def _submitted(self) -> None:
        self.dismiss(None)

    def on_key(self, event: events.Key) -> None:
        page = self.query_one(VerticalScroll)
        scrolls = {
            "up": page.scroll_up, "down": page.scroll_down,
            "pageup": page.scroll_page_up, "pagedown": page.scroll_page_down,
        }  # fmt: skip
        if (scroll := scrolls.get(event.key)) is not None:
            event.stop()
            scroll(animate=False)

    def action_use(self, action: str) -> None:
        """Run the command of the clicked line in the chat."""
        chat = self.app.screen_stack[0]
        self.dismiss(None)
        self.app.call_later(self.app.run_action, action, chat)


def _help_page(groups: Sequence[Group], words: Sequence[str], key_cells: int) -> Lines:
    """Return the lines that have all of these words, in lower case, below the titles of their groups."""
    # Left, right, and the action of a click.
    parts = [
        (title, [(key.shown, key.help, key.action if title == EVERYWHERE else "") for key in keys])
        for title, keys in groups
    ]
    parts.append(("Commands", [(command.usage, command.help, f"run({command.name!r})") for command in COMMANDS]))
    blocks: list[RenderableType] = []
    for title, lines in parts:
        shown = [line for line in lines if all(word in f"{line[0]} {line[1]}".lower() for word in words)]
        if shown:
            table = _help_table(key_cells)
            for left, right, action in shown:
                table.add_row(Text(left, _clickable("bold", action)), Text(right, _clickable("", action)))
            table.add_row("", "")
            blocks += [Text(title, "bold underline"), table]  # a title is as wide as both columns
    end = _help_table(key_cells)
    if not blocks:
        end.add_row("", "no key or command has these words; /help WORDS asks the guide")
    for note in () if words else HELP_NOTES:
        end.add_row("", note)
    return Lines(*blocks, end)


def _help_table(key_cells: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=key_cells)
    table.add_column()
    return table


def _clickable(style: str, action: str) -> Style:
    meta = {"@click": f"screen.use({action!r})"} if action else None
    return Style.parse(style) + Style(meta=meta)
