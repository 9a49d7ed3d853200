"""An answer told in lines: its waiting, its thought, its text and its end.

Owns the order and the words. Knows nothing of how answers are made.
"""

from __future__ import annotations

from edgelm.chats.history import Message
from edgelm.chats.knowledge import GUIDE
from edgelm.chats.reading import Reading
from edgelm.client.answer_stream import AnswerStats
from edgelm.library.names import STARTER
from edgelm.tui.answers import Answer
from edgelm.tui.lines import short_name
from edgelm.tui.plain.lines import Notices, Writer
from edgelm.tui.plain.tools import call_line
from edgelm.tui.transcript.passages import one_line
from edgelm.tui.transcript.views import GO_ON, NOTES

LOADING_S = 2.0  # a model that loads faster is not worth a line


class SpokenAnswer:
    """Writes one answer as it comes. `reads_reasoning`: the thought is read, too."""

    def __init__(self, answer: Answer, writer: Writer, *, reads_reasoning: bool) -> None:
        self._answer = answer
        self._writer = writer
        self._reads_reasoning = reads_reasoning
        self._notices = Notices(writer)
        self._num_reasoning = 0  # characters that were written
        self._num_text = 0
        self._num_calls = 0  # that were told
        self._is_named = False  # the model, before the text that is written now

    def changed(self) -> None:
        """Write the text since the last call."""
        message = self._answer.message
        self._tell_calls()
        if self._reads_reasoning and len(message.reasoning) > self._num_reasoning:
            if not self._num_reasoning:
                self._tell_reading()
                self._writer.stream("reasoning: ")
            self._writer.stream(message.reasoning[self._num_reasoning :])
            self._num_reasoning = len(message.reasoning)
        if not self._num_text:
            begin = len(message.text) - len(message.text.lstrip())
            if begin == len(message.text):
                return
            self._begin_text()
            self._num_text = begin
        elif not self._is_named and len(message.text) > self._num_text:
            self._name_author()
        self._writer.stream(message.text[self._num_text :])
        self._num_text = len(message.text)

    def progressed(self, activity: str) -> None:
        """Tell the reason for waiting from time to time."""
        message = self._answer.message
        if message.state != "streaming" or message.text or (message.reasoning and self._reads_reasoning):
            return
        if self._answer.clock.running:
            activity = f"thinking, {self._answer.clock.seconds:.0f} s"
        self._notices.show(activity, LOADING_S if activity.startswith("loading") else None)

    def ended(self) -> None:
        """Tell how the answer ended, unless it is simply complete."""
        message = self._answer.message
        self._tell_calls()
        if not self._num_text and not message.calls:
            self._begin_text()
            if message.state == "done":
                self._writer.stream("no text")
        self._writer.end()
        if message.state == "failed":
            self._writer.error(in_lines(message.note))
        elif note := note_of(message):
            self._writer.line(note)

    def _tell_calls(self) -> None:
        """Tell the calls of tools that have ended since the last time."""
        message = self._answer.message
        for call in message.calls[self._num_calls :]:
            if not call.has_ended and message.state == "streaming":
                return
            self._writer.line(call_line(call))
            self._num_calls += 1
            self._is_named = False

    def _begin_text(self) -> None:
        if not self._num_reasoning:
            self._tell_reading()
        self._writer.end()
        message = self._answer.message
        if message.reasoning and not self._reads_reasoning:
            seconds = self._answer.clock.seconds
            self._writer.line(f"thought for {seconds:.0f} s" if seconds >= 1 else "thought for a moment")
        if message.text.strip() or message.state in ("streaming", "done"):
            self._name_author()

    def _name_author(self) -> None:
        self._writer.stream(f"{short_name(self._answer.message.model) or 'assistant'}: ")
        self._is_named = True

    def _tell_reading(self) -> None:
        reading = self._answer.question.reading
        if reading is None or (self._answer.message.model == STARTER and set(reading.roots) <= {GUIDE}):
            return  # the starter reads the guide for every question
        if words := reading_line(reading):
            self._writer.line(words)


def reading_line(reading: Reading) -> str:
    """Return the passages that were read for a question, with their numbers; empty: none."""
    if reading.passages:
        names = (f"{number} {one_line(passage.name)}" for number, passage in enumerate(reading.passages, 1))
        return f"read: {'; '.join(names)}"
    return f"read nothing: {in_lines(reading.note)}" if reading.note else ""


def note_of(message: Message) -> str:
    """Return the line about how an answer ended; empty where it is complete."""
    if message.state == "failed":
        return f"error: {in_lines(message.note)}"
    if message.state == "streaming":
        return "edgelm was closed while this was written; /regenerate writes it again"
    words = NOTES.get(message.note or message.state, message.note)
    return in_lines(words)


def in_lines(text: str) -> str:
    """Return a text about a chat, on one line, with commands instead of the keys of the full screen."""
    return " ".join(text.replace(GO_ON, "/shorten goes on without the oldest messages").split())


def figures(stats: AnswerStats) -> list[str]:
    """Return the figures of an answer in words."""
    parts = []
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens per second")
    if stats.first_token_ms is not None:
        parts.append(f"first token after {stats.first_token_ms / 1000:.1f} seconds")
    if stats.context_used is not None:
        size = f" of {stats.context_size:,}" if stats.context_size else ""
        parts.append(f"context: {stats.context_used:,}{size} tokens")
    if stats.drafted:
        parts.append(f"drafts: {stats.accepted or 0:,} of {stats.drafted:,} tokens accepted")
    if engine := " on ".join(name for name in (stats.engine, stats.device) if name):
        parts.append(f"engine: {engine}")
    return parts
