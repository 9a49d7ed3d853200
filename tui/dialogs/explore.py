"""The dialog that walks through the tokens of an answer, shows their alternatives, and goes on from another one.

Owns the chosen token, the alternatives that were asked for, and how both are drawn. Gets tokens and alternatives from
a `Prober`; knows nothing of endpoints and chats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rich.cells import cell_len
from rich.segment import Segment
from rich.text import Text
from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.timer import Timer
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from edgelm.base.errors import EdgeLMError
from edgelm.client.probing import Alternative
from edgelm.tui.dialogs.basic import FOCUS_CSS, Dialog
from edgelm.tui.hints import Hint, footer
from edgelm.tui.lines import clean, short_name

REST_S = 0.12  # on a token, until its alternatives are asked for
BAR = 12  # cells of a probability of 1
FOOTER = (
    Hint("←", "", "screen.move(-1)"),
    Hint("→", "token", "screen.move(1)"),
    Hint("Enter", "goes on from it", "screen.go_on"),
    Hint("Esc", "closes", "screen.dismiss(None)"),
)


class Prober(Protocol):
    """The source of tokens and alternatives. Both raise EdgeLMError."""

    async def pieces(self) -> list[str]:
        """Return the tokens of the answer as texts."""

    async def alternatives(self, begun: str) -> list[Alternative]:
        """Return the likeliest tokens behind a beginning of the answer, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of a token in one line."""

    token: int
    text: str


def lay_out(pieces: Sequence[str], width: int) -> list[list[Cell]]:
    """Return tokens in lines of at most `width` cells; a line begins at a token, or at a line break in one."""
    lines: list[list[Cell]] = [[]]
    used = 0
    for token, piece in enumerate(pieces):
        for place, part in enumerate(piece.split("\n")):
            if place:
                lines[-1].append(Cell(token, "⏎"))
                lines.append([])
                used = 0
            text = clean(part.replace("\t", "    "))
            if used and used + cell_len(text.rstrip()) > width:
                lines.append([])
                used, text = 0, text.removeprefix(" ")
            while cell_len(text) > width:  # a token wider than the dialog
                end = next(n for n in range(len(text), 0, -1) if n == 1 or cell_len(text[:n]) <= width)
                lines[-1].append(Cell(token, text[:end]))
                lines.append([])
                text = text[end:]
            if text:
                lines[-1].append(Cell(token, text))
                used += cell_len(text)
    return lines


class TokenText(ScrollView):
    """The answer, token by token; `chosen` is the place of one, or the end of the answer."""

    DEFAULT_CSS = """
    TokenText { height: 1fr; min-height: 3; scrollbar-size-vertical: 1; }
    TokenText > .token--chosen { background: $primary; color: $text; text-style: bold; }
    TokenText > .token--odd { background: $foreground 12%; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {"token--chosen", "token--odd"}

    @dataclass
    class Clicked(Message):
        """A token was clicked."""

        token: int

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.chosen = 0
        self._lines: list[list[Cell]] = []

    def show(self, pieces: list[str], chosen: int) -> None:
        """Show an answer."""
        self.pieces = pieces
        self._arrange()
        self.choose(chosen)

    def choose(self, token: int) -> None:
        """Choose a token, and scroll to it."""
        self.chosen = token
        for y, line in enumerate(self._lines):
            if any(cell.token == token for cell in line):
                self.scroll_to_region(Region(0, y, 1, 1), animate=False)
                break
        self.refresh()

    def on_resize(self) -> None:
        self._arrange()
        self.choose(self.chosen)

    def _arrange(self) -> None:
        width = self.scrollable_content_region.width
        if width > 0:
            self._lines = lay_out([*self.pieces, " "], width)  # the last one is the end of the answer
            self.virtual_size = Size(width, len(self._lines))

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        line = self._lines[y + round(self.scroll_y)] if y + round(self.scroll_y) < len(self._lines) else []
        chosen, odd = self.get_component_rich_style("token--chosen"), self.get_component_rich_style("token--odd")
        plain = self.rich_style
        styles = [chosen if cell.token == self.chosen else odd if cell.token % 2 else plain for cell in line]
        return Strip([Segment(cell.text, style) for cell, style in zip(line, styles, strict=True)]).adjust_cell_length(
            width, plain
        )

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        y = offset.y + round(self.scroll_y) if offset is not None else -1
        if offset is None or not 0 <= y < len(self._lines):
            return
        x = 0
        for cell in self._lines[y]:
            x += cell_len(cell.text)
            if offset.x < x:
                self.post_message(self.Clicked(cell.token))
                return


class ExploreScreen(Dialog[str | None]):
    """Choose a token of an answer and an alternative to it; returns the beginning of a new answer, None: cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Cancel", show=False),
        Binding("left", "move(-1)", "The token before", show=False, priority=True),
        Binding("right", "move(1)", "The next token", show=False, priority=True),
        Binding("ctrl+left", "move(-10)", "Ten tokens back", show=False, priority=True),
        Binding("ctrl+right", "move(10)", "Ten tokens on", show=False, priority=True),
        Binding("home", "move(-1000000)", "The first token", show=False, priority=True),
        Binding("end", "move(1000000)", "The end of the answer", show=False, priority=True),
    ]
    DEFAULT_CSS = (
        FOCUS_CSS.format(name="ExploreScreen")
        + """
    ExploreScreen { align: center middle; }
    ExploreScreen > Vertical {
        width: 96; max-width: 100%; height: 100%; max-height: 34;
        border: round $primary; border-title-color: $foreground; border-subtitle-color: $text-muted;
        background: $surface; padding: 0 1;
    }
    ExploreScreen #place { height: auto; max-height: 3; margin: 1 0 0 0; color: $text-muted; }
    ExploreScreen OptionList {
        height: auto; max-height: 11; min-height: 3; background: $surface;
        scrollbar-size-vertical: 1; text-wrap: nowrap; text-overflow: ellipsis;
    }
    """
    )

    def __init__(self, model: str, prober: Prober, first: int = 0) -> None:
        """`first` is the first place that has alternatives."""
        super().__init__()
        self._model = model
        self._prober = prober
        self._first = first
        self._known: dict[int, list[Alternative]] = {}  # by place
        self._rest: Timer | None = None
        self._text = TokenText()

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = Text(f"Explore an answer of {clean(short_name(self._model))}")
            box.border_subtitle = footer(FOOTER)
            yield self._text
            yield Static(id="place", markup=False)
            yield OptionList()

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._load()

    @property
    def _place(self) -> int:
        return self._text.chosen

    @work(group="explore")
    async def _load(self) -> None:
        self._say("reading the answer")
        try:
            pieces = await self._prober.pieces()
        except EdgeLMError as error:
            self._say(str(error))
            return
        self._text.show(pieces, min(self._first, len(pieces)))
        self._show()

    def action_move(self, by: int) -> None:
        self._go_to(self._place + by)

    @on(TokenText.Clicked)
    def _clicked(self, event: TokenText.Clicked) -> None:
        self._go_to(event.token)

    def action_go_on(self) -> None:
        """Go on from the chosen alternative."""
        self.query_one(OptionList).action_select()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._text.scroll_relative(y=-2, animate=False)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._text.scroll_relative(y=2, animate=False)

    def _go_to(self, place: int) -> None:
        pieces = self._text.pieces
        if pieces:
            self._text.choose(min(max(place, min(self._first, len(pieces))), len(pieces)))
            self._show()

    def _show(self) -> None:
        """Show the alternatives of the chosen token, or ask for them once the cursor rests."""
        if self._rest is not None:
            self._rest.stop()
        if self._place in self._known:
            self._fill(self._known[self._place])
        else:
            self._say(f"{self._position}: asking the model")
            self.query_one(OptionList).clear_options()
            self._rest = self.set_timer(REST_S, self._ask)

    @work(group="ask", exclusive=True)
    async def _ask(self) -> None:
        place = self._place
        try:
            self._known[place] = await self._prober.alternatives("".join(self._text.pieces[:place]))
        except EdgeLMError as error:
            self._say(str(error))
            return
        if place == self._place:
            self._fill(self._known[place])

    @property
    def _position(self) -> str:
        count = len(self._text.pieces)
        return "the end of the answer" if self._place == count else f"token {self._place + 1:,} of {count:,}"

    def _fill(self, items: Sequence[Alternative]) -> None:
        options = self.query_one(OptionList)
        options.clear_options()
        taken = self._place < len(self._text.pieces) and self._text.pieces[self._place]
        chosen = next((item for item in items if item.text and item.text == taken), None)
        for number, item in enumerate(items):
            options.add_option(Option(_line(item, item is chosen), id=str(number), disabled=not _can_follow(item)))
        note = "" if chosen or not items or taken is False else ", none of the likeliest"
        self._say(f"{self._position}{note}; Enter goes on from another one" if items else "the model names none")
        enabled = [number for number, item in enumerate(items) if _can_follow(item)]
        options.highlighted = enabled[0] if enabled else None

    def _say(self, text: str) -> None:
        self.query_one("#place", Static).update(clean(text))

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        item = self._known[self._place][int(event.option_id or 0)]
        self.dismiss("".join(self._text.pieces[: self._place]) + item.text)


def _can_follow(item: Alternative) -> bool:
    """Tell whether an answer can go on from a token: not from its end, nor from a part of a character."""
    return bool(item.text) and "\ufffd" not in item.text


def _line(item: Alternative, is_chosen: bool) -> Text:
    probability = math.exp(item.logprob)
    cells = round(BAR * probability)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{'▇' * cells}{'·' * (BAR - cells)} ", "" if cells else "dim")
    line.append(f"{probability:6.1%}  ")
    line.append(clean(repr(item.text or item.name)), "bold" if is_chosen else "")
    if is_chosen:
        line.append("  in the answer", "dim")
    elif not item.text:
        line.append("  ends the answer", "dim")
    elif not _can_follow(item):
        line.append("  a part of a character", "dim")
    return line
