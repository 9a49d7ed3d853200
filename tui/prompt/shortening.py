"""Shortening a conversation that has outgrown the model's context: the oldest messages are not sent any more.

Owns which messages can be left out, how many tokens that frees, and the dialog that shows both. Messages that are left
out stay in the chat. Knows nothing of how answers are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from edgelm.chats.attachments import with_attachments
from edgelm.chats.history import Message, split_sent
from edgelm.client.answer_stream import AnswerStats, stats_from_json
from edgelm.client.session import Session
from edgelm.tui.dialogs.basic import DIALOG_CSS, Dialog
from edgelm.tui.hints import CANCEL, Hint, footer
from edgelm.tui.lines import clean
from edgelm.tui.palette import list_text

TOKENS_PER_CHAR = 0.3  # of European languages and code, where no answer was measured
KEPT_SHARE = 0.5  # of the context, at most; the rest is for new messages


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message of the user and the answers to it."""

    messages: tuple[Message, ...]
    tokens: int  # estimated


@dataclass(frozen=True, slots=True)
class Shortening:
    """The exchanges of a branch, the first one that is sent now, and the one that should be."""

    exchanges: tuple[Exchange, ...]
    first: int  # index
    proposed: int  # index
    context: int | None  # tokens

    def left_out(self, first: int) -> tuple[int, int]:
        """Return the number of messages that `first` leaves out, and the tokens that this frees compared to now."""
        left_out, left_out_now = self.exchanges[:first], self.exchanges[: self.first]
        freed = sum(exchange.tokens for exchange in left_out) - sum(exchange.tokens for exchange in left_out_now)
        return sum(len(exchange.messages) for exchange in left_out), freed


def plan_shortening(session: Session, context: int | None) -> Shortening | None:
    """Plan the shortening of the branch on screen; None where it has only one question."""
    path = session.tree.path()
    past, _ = split_sent(path)
    starts = [i for i, message in enumerate(path) if message.role == "user"]
    if len(starts) < 2:
        return None
    done = [message for message in path if message.state == "done"]  # the stats of others have no token counts
    measured = [(message, stats) for message in done if (stats := stats_from_json(message.stats)) is not None]
    rate = _tokens_per_char(session, measured)
    if measured and measured[-1][1].context_size:
        context = measured[-1][1].context_size
    exchanges = tuple(
        Exchange(tuple(path[i:j]), round(rate * sum(map(sent_len, path[i:j]))))
        for i, j in zip(starts, [*starts[1:], len(path)], strict=True)
    )
    first = starts.index(len(past)) if past else 0
    # kept[i]: the tokens that are sent if exchange i is the first.
    kept = list(accumulate(exchange.tokens for exchange in reversed(exchanges)))[::-1]
    room = KEPT_SHARE * (context or kept[first]) - rate * len(session.chat.system)
    last = len(exchanges) - 1
    proposed = next((i for i in range(first + 1, last) if kept[i] <= room), last)
    return Shortening(exchanges, first, max(proposed, first), context)


def sent_len(message: Message) -> int:
    """Return the number of characters of a message for the model: its text, and those of its attachments."""
    return len(with_attachments(message.text, message.attachments))


def _tokens_per_char(session: Session, measured: Sequence[tuple[Message, AnswerStats]]) -> float:
    """Return the ratio of the last answer with a known prompt length, else a default."""
    for message, stats in reversed(measured):
        _, sent = session.turns(message)
        num_chars = sum(len(turn.text) for turn in sent)
        if stats.prompt_tokens and num_chars:
            return stats.prompt_tokens / num_chars
    return TOKENS_PER_CHAR


class Exchanges(OptionList):
    """The exchanges. A click shows the effect of a choice, as the arrow keys do; a second one takes it."""

    async def _on_click(self, event: events.Click) -> None:
        clicked = event.style.meta.get("option")
        if clicked is not None and clicked != self.highlighted:
            self.highlighted = clicked
            event.prevent_default()


class ShortenScreen(Dialog[int | None]):
    """Choose the first exchange that is sent; those above it are left out. Returns its index."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", show=False)]
    DEFAULT_CSS = (
        DIALOG_CSS.format(name="ShortenScreen")
        + """
        ShortenScreen OptionList { margin: 1 0; }
        ShortenScreen #freed { color: $text; }
        """
    )

    def __init__(self, shortening: Shortening) -> None:
        super().__init__()
        self._shortening = shortening
        self._shown = -1

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Go on from a shortened conversation"
            box.border_subtitle = footer([Hint("Enter", "goes on", "screen.choose"), CANCEL])
            yield Label("Which is the first message that the model still gets? Your last one always stays.")
            yield Exchanges(*(Option("") for _ in self._shortening.exchanges))
            yield Label("", id="freed")

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = self._shortening.proposed

    @on(OptionList.OptionHighlighted)
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        first = event.option_index
        if first == self._shown:
            return
        self._shown = first
        options = self.query_one(OptionList)
        for i, exchange in enumerate(self._shortening.exchanges):
            outline = list_text(_outline(exchange, sent=i >= first), self.app.current_theme)
            options.replace_option_prompt_at_index(i, outline)
        self.query_one("#freed", Label).update(self._summary(first))

    def _summary(self, first: int) -> str:
        count, freed = self._shortening.left_out(first)
        if not count:
            return "All messages are sent."
        messages = "1 message is" if count == 1 else f"{count:,} messages are"
        of = f" of {self._shortening.context:,}" if self._shortening.context else ""
        tokens = f"that frees about {freed:,} tokens{of}" if freed > 0 else "fewer than now"
        return f"{messages} left out: {tokens}. They stay in the chat; /whole sends them again."

    @on(OptionList.OptionSelected)
    def action_choose(self) -> None:
        self.dismiss(self.query_one(OptionList).highlighted)


def _outline(exchange: Exchange, *, sent: bool) -> Text:
    words = " ".join(clean(exchange.messages[0].text).split())[:200]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("✓ sent      " if sent else "✗ left out  ", "" if sent else "dim")
    text.append(f"{exchange.tokens:>7,}  ", "dim")
    text.append(words, "" if sent else "dim strike")
    return text
