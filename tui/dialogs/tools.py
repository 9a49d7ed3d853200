"""The dialogs about tools: whether a call may run, whether an answer may make more, and the servers of a chat.

Owns their look and keys. Words from outside are shown with every character visible.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Label, OptionList, Static
from textual.widgets.option_list import Option

from edgelm.chats.tools.listing import Listing
from edgelm.chats.tools.settings import ToolServer
from edgelm.client.tool_runner import CallQuestion, LimitQuestion, Permit
from edgelm.tui.dialogs.basic import DIALOG_CSS, Dialog
from edgelm.tui.hints import Hint, footer
from edgelm.tui.palette import list_text
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.transcript.tool_rows import pretty_arguments, visible

QUIET_S = 0.6  # without typing, before a key or a click answers: the dialog may come while the user writes
MAX_TITLE = 40
MAX_CLAIM = 300
MAX_SHOWN = 20_000  # characters of arguments
ASK_CSS = """
{name} Label {{ margin: 0 0 1 0; color: $text; }}
{name} #changed {{ color: $text-warning; text-style: bold; }}
{name} VerticalScroll {{ height: auto; max-height: 60vh; scrollbar-size-vertical: 1; border-left: blank; }}
{name} VerticalScroll:focus {{ border-left: outer $primary; }}
{name} #arguments {{ height: auto; margin: 0 0 1 0; padding: 0 1; background: $boost; }}
{name} #claims {{ color: $text-muted; }}
"""


class AskScreen(Dialog[Permit]):
    """A question that typing ahead cannot answer: keys and clicks count only after a moment without any typing."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "refuse", "No", show=False)]
    SAFE: ClassVar[Permit] = "no"

    def __init__(self) -> None:
        super().__init__()
        self._quiet_since = time.monotonic()
        self._is_abandoned = False

    def abandon(self) -> None:
        """Close the dialog without a result: nobody waits for one any more."""
        self._is_abandoned = True
        if self.is_current:
            self.app.pop_screen()

    @on(events.ScreenResume)
    def _begin_quiet(self) -> None:
        self._quiet_since = time.monotonic()
        if self._is_abandoned:  # it was below another dialog
            self.app.call_later(self.app.pop_screen)
        else:
            self.query_one(OptionList).focus()

    def on_key(self, event: events.Key) -> None:
        if event.is_printable:
            self._quiet_since = time.monotonic()

    @property
    def _answers(self) -> bool:
        return time.monotonic() - self._quiet_since >= QUIET_S

    def action_refuse(self) -> None:
        if self._answers:
            self.dismiss(self.SAFE)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        permits: dict[str | None, Permit] = {"no": "no", "once": "once", "chat": "chat", "always": "always"}
        if self._answers:
            self.dismiss(permits[event.option_id])


class CallScreen(AskScreen):
    """Ask whether a call of a tool may run."""

    DEFAULT_CSS = DIALOG_CSS.format(name="CallScreen") + ASK_CSS.format(name="CallScreen")

    def __init__(self, question: CallQuestion) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        question, tool = self._question, self._question.tool
        name = visible(f"{tool.server}/{tool.name}")
        with Vertical() as box:
            box.border_title = Content(f"Run the tool {name}?")
            box.border_subtitle = footer(
                [Hint("Esc:", "no", "screen.refuse"), Hint("Tab:", "scroll", "screen.focus_next")]
            )
            with VerticalScroll():
                if question.changed:
                    yield Label("This tool or its server has changed since you allowed it.", id="changed")
                yield Label(_asked(question), markup=False)
                yield Static(_shown_arguments(question.arguments), id="arguments", markup=False)
                yield Label(_claims(question), id="claims", markup=False)
            yield OptionList(
                Option("No: refuse this call", id="no"),
                Option("Once: run this call", id="once"),
                Option("In this chat: run it, and ask no more here", id="chat"),
                Option("Always: run it, and ask no more in any chat", id="always"),
            )


def _asked(question: CallQuestion) -> str:
    server = visible(one_line(question.server.words))
    return f"The model asks for it in the chat “{_title(question.title)}”.\nServer: {server}"


def _claims(question: CallQuestion) -> str:
    """Return what the server says of the tool, which may be wrong."""
    tool = question.tool
    description = visible(" ".join(tool.description.split()))
    words = description[:MAX_CLAIM] + ("…" if len(description) > MAX_CLAIM else "")
    lines = [f"The server says, unchecked: {words}"] if words else []
    return "\n".join([*lines, *([f"Also: {tool.claims}"] if tool.claims else [])])


def _title(title: str) -> str:
    shown = visible(one_line(title))
    return shown if len(shown) <= MAX_TITLE else shown[: MAX_TITLE - 1] + "…"


def _shown_arguments(arguments: str) -> str:
    text = pretty_arguments(arguments)
    if len(text) <= MAX_SHOWN:
        return text
    return f"Only the first {MAX_SHOWN:,} of {len(text):,} characters are shown here.\n\n{text[:MAX_SHOWN]}…"


class LimitScreen(AskScreen):
    """Ask whether an answer with many calls may go on. Returns `once` where it may."""

    DEFAULT_CSS = DIALOG_CSS.format(name="LimitScreen") + ASK_CSS.format(name="LimitScreen")

    def __init__(self, question: LimitQuestion) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        question = self._question
        calls = "1 more call" if question.num_more == 1 else f"{question.num_more:,} more calls"
        with Vertical() as box:
            box.border_title = "Go on calling tools?"
            box.border_subtitle = footer([Hint("Esc:", "no", "screen.refuse")])
            yield Label(
                f"The answer in the chat “{_title(question.title)}” has made {question.num_calls:,} calls, "
                f"and the model asks for {calls}. It may go round in circles.",
                markup=False,
            )
            yield OptionList(Option("No: end the answer here", id="no"), Option("Yes: go on", id="once"))


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """A server as the dialog shows it."""

    server: ToolServer
    used: bool  # in this chat
    listing: Listing
    error: str
    num_allowed: int  # of its tools, always or in this chat


@dataclass(frozen=True, slots=True)
class ServerAct:
    """What the user chose to do with a server: `toggle` its use in this chat, or `forget` what was allowed."""

    act: str
    name: str


class ToolsScreen(Dialog[ServerAct | None]):
    """The servers of the settings with their tools."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close", show=False),
        Binding("delete", "forget", "Ask again", show=False),
    ]
    DEFAULT_CSS = (
        DIALOG_CSS.format(name="ToolsScreen")
        + """
        ToolsScreen OptionList { margin: 1 0 0 0; max-height: 8; }
        ToolsScreen VerticalScroll { height: auto; max-height: 12; margin: 1 0; scrollbar-size-vertical: 1; }
        ToolsScreen #tools { height: auto; color: $text-muted; }
        """
    )

    def __init__(self, entries: Sequence[ServerEntry], chosen: str = "") -> None:
        super().__init__()
        self._entries = entries
        self._chosen = chosen

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Tools of this chat"
            hints = [Hint("Enter", "on or off", "screen.use"), Hint("Del", "asks again", "screen.forget")]
            box.border_subtitle = footer([*hints, Hint("Esc", "closes", "screen.dismiss(None)")])
            yield Label("The model may ask for the tools of these servers; nothing runs before you allow it.")
            theme = self.app.current_theme
            yield OptionList(*(Option(list_text(_line(entry), theme), id=entry.server.name) for entry in self._entries))
            with VerticalScroll():
                yield Static(id="tools", markup=False)

    def on_mount(self) -> None:
        names = [entry.server.name for entry in self._entries]
        self.query_one(OptionList).highlighted = names.index(self._chosen) if self._chosen in names else 0
        self.query_one(OptionList).focus()

    @on(OptionList.OptionHighlighted)
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        self.query_one("#tools", Static).update(_details(self._entries[event.option_index]))

    @on(OptionList.OptionSelected)
    def action_use(self) -> None:
        self._act("toggle")

    def action_forget(self) -> None:
        self._act("forget")

    def _act(self, act: str) -> None:
        if (index := self.query_one(OptionList).highlighted) is not None:
            self.dismiss(ServerAct(act, self._entries[index].server.name))


def _line(entry: ServerEntry) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("✓ on   " if entry.used else "  off  ", "" if entry.used else "dim")
    text.append(entry.server.name, "bold")
    if entry.error:
        text.append(f"  {visible(one_line(entry.error))}", "bold $text-error")
    elif entry.listing.tools:
        text.append(f"  {_count(len(entry.listing.tools), 'tool')}")
    if entry.num_allowed:
        text.append(f"  {entry.num_allowed} run without a question")
    text.append(f"  {visible(one_line(entry.server.words))}", "dim")
    return text


def _details(entry: ServerEntry) -> Text:
    """Return the tools of a server, with the first line of each description."""
    if entry.error:
        return Text(visible(one_line(entry.error)))
    if not entry.listing.tools and not entry.listing.notes:
        return Text("Enter starts it and lists its tools." if not entry.used else "It has no tools.")
    text = Text()
    for tool in entry.listing.tools:
        text.append(visible(tool.name), "bold")
        words = visible(tool.description.strip().split("\n")[0])[:200]
        text.append(f"  {words}\n" if words else "\n")
    text.append("\n".join(visible(one_line(note)) for note in entry.listing.notes))
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
