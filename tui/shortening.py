"""Going on without the oldest messages, when a conversation has outgrown the model's context.

Owns which messages can be left out, how many tokens that frees, and the dialog that shows both. What is left out stays
in the chat. Knows nothing of how an answer is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from edgelm.chats.model import Message, split_sent
from edgelm.client.endpoint import AnswerStats, stats_from_json
from edgelm.tui.dialogs import DIALOG_CSS
from edgelm.tui.lines import clean
from edgelm.tui.session import Session

TOKENS_PER_CHAR = 0.3  # where no answer says: of European languages and code
KEPT_SHARE = 0.5  # of the context, at most; the rest is for what will be said


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question of the user's and what followed it."""

    messages: tuple[Message, ...]
    tokens: int  # about


@dataclass(frozen=True, slots=True)
class Shortening:
    """The exchanges of a branch: which is the first that is sent, and which should be."""

    exchanges: tuple[Exchange, ...]
    first: int
    proposed: int
    context: int | None  # tokens

    def left_out(self, first: int) -> tuple[int, int]:
        """Return how many messages are left out, and about how many tokens more that frees than now."""
        gone = self.exchanges[:first]
        freed = sum(each.tokens for each in gone) - sum(each.tokens for each in self.exchanges[: self.first])
        return sum(len(each.messages) for each in gone), freed


def plan_shortening(session: Session, context: int | None) -> Shortening | None:
    """Return what can be left out of the branch on screen; None where only its last question is there."""
    path = session.tree.path()
    past, _ = split_sent(path)
    starts = [i for i, message in enumerate(path) if message.role == "user"]
    if len(starts) < 2:
        return None
    stats = [(each, found) for each in path if (found := stats_from_json(each.stats)) is not None]
    rate = _tokens_per_char(session, stats)
    if stats and stats[-1][1].context_size:
        context = stats[-1][1].context_size
    exchanges = tuple(
        Exchange(tuple(path[i:j]), round(rate * sum(len(each.text) for each in path[i:j])))
        for i, j in zip(starts, [*starts[1:], len(path)], strict=True)
    )
    first = starts.index(len(past)) if past else 0
    # What remains when each of the exchanges is the first: the sums from the end.
    remains = list(accumulate(each.tokens for each in reversed(exchanges)))[::-1]
    room = KEPT_SHARE * (context or remains[first]) - rate * len(session.chat.system)
    last = len(exchanges) - 1
    proposed = next((i for i in range(first + 1, last) if remains[i] <= room), last)
    return Shortening(exchanges, first, max(proposed, first), context)


def _tokens_per_char(session: Session, stats: Sequence[tuple[Message, AnswerStats]]) -> float:
    """Return what the last answer says about this conversation and this model."""
    for message, each in reversed(stats):
        _, sent = session.turns(message)
        chars = sum(len(turn.text) for turn in sent)
        if each.prompt_tokens and chars:
            return each.prompt_tokens / chars
    return TOKENS_PER_CHAR


class ShortenScreen(ModalScreen[int | None]):
    """Choose the first exchange that is sent; those above it are left out."""

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
            box.border_subtitle = "↑↓ choose, Enter goes on, Esc cancels"
            yield Label("Which is the first message that the model still gets? Your last one always stays.")
            yield OptionList(*(Option("") for _ in self._shortening.exchanges), compact=True)
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
            options.replace_option_prompt_at_index(i, _outline(exchange, sent=i >= first))
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
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_index)


def _outline(exchange: Exchange, *, sent: bool) -> Text:
    words = " ".join(clean(exchange.messages[0].text).split())[:200]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("✓ sent      " if sent else "✗ left out  ", "" if sent else "dim")
    text.append(f"{exchange.tokens:>7,}  ", "dim")
    text.append(words, "" if sent else "dim strike")
    return text
