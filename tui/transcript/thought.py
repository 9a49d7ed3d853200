"""The thought of a reasoning model before its answer: a line about it and, where it is unfolded, its text below.

Owns the wording of the line, the time that a thought takes, and which part is wrapped again when text is appended: the
last paragraph only. Knows nothing of answers and endpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from edgelm.tui.lines import FoldRow, PlainRow, Row, SpaceRow

CHARS_PER_TOKEN = 5  # few texts have more on average


class ThoughtClock:
    """The time that a model has thought so far."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._since: float | None = None  # None: the model does not think now

    @property
    def running(self) -> bool:
        return self._since is not None

    @property
    def seconds(self) -> float:
        return self._ended_s + (monotonic() - self._since if self._since is not None else 0.0)

    def take(self, reasoning: str, text: str) -> None:
        """Start the clock with the first reasoning, and stop it with the first text after it."""
        if reasoning and self._since is None:
            self._since = monotonic()
        if text:
            self.stop()

    def stop(self) -> None:
        self._ended_s, self._since = self.seconds, None


@dataclass(frozen=True, slots=True)
class ThoughtFigures:
    """The size of a thought; None where it is not known. `running`: it is not complete, and `tokens` is estimated."""

    seconds: float | None = None
    tokens: int | None = None
    running: bool = False


def estimate_tokens(num_deltas: int, num_chars: int) -> int:
    """Return about how many tokens came: endpoints count them only at the end, and one delta may hold many."""
    return max(num_deltas, num_chars // CHARS_PER_TOKEN)


def thought_words(figures: ThoughtFigures) -> str:
    """Return the line about a thought."""
    seconds, tokens = figures.seconds, figures.tokens
    count = f"{tokens:,} token{'' if tokens == 1 else 's'}" if tokens else ""
    if figures.running:
        time = duration_text(seconds) if seconds and seconds >= 1 else ""
        known = " · ".join(part for part in (time, f"~{count}" if count else "") if part)
        return f"Thinking… {known}".rstrip()
    if seconds is None:
        time = "Thought"
    else:
        time = f"Thought for {duration_text(seconds) if seconds >= 1 else 'a moment'}"
    return f"{time} · {count}" if count else time


def duration_text(seconds: float) -> str:
    """Return a time as words."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Thought:
    """The rows of one thought. A folded one has a line only, whatever its length."""

    def __init__(self) -> None:
        self._line = FoldRow()
        self._paragraphs: list[PlainRow] = []
        self._num_closed = 0  # paragraphs that never change again
        self._open_at = 0  # the character at which the last paragraph begins
        self._open = ""  # its text

    def rows(self, reasoning: str, figures: ThoughtFigures, *, unfolded: bool) -> list[Row]:
        """Return the rows of a reasoning, which begins with the one of the last call."""
        self._line.show(thought_words(figures), unfolded=unfolded)
        if not unfolded:
            return [self._line, SpaceRow()]
        self._grow(reasoning.strip("\n"))
        return [self._line, *self._paragraphs, SpaceRow()]

    def _grow(self, text: str) -> None:
        tail = text[self._open_at :]
        if tail == self._open and self._paragraphs:
            return
        *closed, last = tail.split("\n")
        del self._paragraphs[self._num_closed :]
        self._paragraphs += [PlainRow(paragraph.removesuffix("\r"), muted=True) for paragraph in (*closed, last)]
        self._num_closed += len(closed)
        self._open_at += len(tail) - len(last)
        self._open = last
