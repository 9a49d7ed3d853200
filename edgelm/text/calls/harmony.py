"""Harmony, the format of gpt-oss: an answer is a row of messages with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

`analysis` is reasoning, a message to a function is a call, and all else is content. Headers are often malformed: a
message without a known header is content. Where the model may not call, it still writes messages to tools that it knows
from its training: these are reasoning.

Owns the reading of messages. Knows nothing of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator

from edgelm.text.calls.json_text import read_value
from edgelm.text.calls.output import Calls, Output
from edgelm.text.calls.reader import MARKS, SPACES, Finder, Marks, Reader

_MAX_HEADER = 256
_RECIPIENT = re.compile("to=([^\\s\udc00-\udfff<]+)")


def message_starts(control: Collection[str]) -> list[str]:
    """Return the texts that begin a message inside another one, in a vocabulary with these control tokens.

    A vocabulary without them spells them as text: alone, these are text that a message may contain.
    """
    starts = {"<|start|>": ("assistant",), "<|channel|>": ("analysis", "commentary", "final")}
    return [mark + word for mark, words in starts.items() if mark not in control for word in words]


class Harmony:
    """Reads one answer in Harmony. The prompt ends with `<|start|>assistant`."""

    def __init__(self, reader: Reader, marks: Marks, out: Output, calls: Calls, *, may_call: bool = True) -> None:
        self._reader, self._out, self._calls = reader, out, calls
        self._may_call = may_call
        self._start, self._channel, self._message = map(marks.compiled, ("<|start|>", "<|channel|>", "<|message|>"))
        marks_of_starts = (mark for mark in (self._start, self._channel) if MARKS.match(mark))
        self._starts = (*marks_of_starts, *message_starts(marks.strings))
        self._ends = tuple(map(marks.compiled, ("<|end|>", "<|call|>", "<|return|>")))
        self._channel_name = re.compile(re.escape(self._channel) + r"\s*(\w*)")

    def run(self) -> Generator[None, None, None]:
        """Read an answer."""
        reader = self._reader
        body_ends = Finder((*self._starts, *self._ends))
        while True:
            header = yield from self._header()
            kind, name = self._meaning(header)
            if kind == "call" and self._calls.accepts(name):
                self._calls.begin(name)
                empty = yield from self._arguments(body_ends)
                is_cut = reader.ended and reader.at >= len(reader.text) and self._calls.truncated
                if empty and not is_cut:
                    self._calls.args("{}")
                if is_cut:
                    self._calls.cut()
                self._calls.end(cut_off=is_cut)
            else:
                self._out.change("reasoning" if kind == "reasoning" else "content")
                yield from reader.until(body_ends, lambda text: self._out.text(text, reader))
            for mark in self._ends:
                if (yield from reader.literal(mark)):
                    break
            self._out.change("content")
            if not (yield from reader.peek()):
                return

    def _arguments(self, ends: Finder) -> Generator[None, None, bool]:
        """Pass on a body as arguments; return whether it is empty."""
        held, count = "", 0

        def take(text: str) -> None:
            nonlocal held, count
            text = (held + text) if count else text.lstrip(SPACES)
            body = text.rstrip(SPACES)
            held = text[len(body) :]
            count += len(body)
            self._calls.args(body)

        if (yield from self._reader.peek()) == "{":  # a string in it may contain what looks like an end
            yield from read_value(self._reader, take)
        yield from self._reader.until(ends, take)
        return not count

    def _header(self) -> Generator[None, None, str]:
        """Read a header up to its mark; "" if there is none, with nothing read."""
        reader, here = self._reader, self._reader.at
        stops = Finder((self._message, *self._ends))
        while True:
            text = reader.text[here:]
            found = stops.search(reader.text, here) if self._may_begin(text) else None
            if found and found[0] == self._message and found.start() - here <= _MAX_HEADER:
                reader.at = found.end()
                return reader.text[here : found.start()] or " "
            if found or reader.ended or len(text) > _MAX_HEADER or not self._may_begin(text):
                reader.at = here
                is_begun = any(text.lstrip(SPACES).startswith(mark) for mark in (self._start, self._channel, "to="))
                if reader.is_cut and not found and is_begun and len(text) <= _MAX_HEADER and self._may_begin(text):
                    reader.at = len(reader.text)
                    return ""
                # A lone `<|start|>` or `<|channel|>` is no text, and must not be found again.
                for mark in (self._start, self._channel):
                    if text.startswith(mark):
                        reader.at += len(mark)
                return ""
            yield

    def _may_begin(self, text: str) -> bool:
        text = text.lstrip(SPACES)
        beginnings = (self._start, self._channel, self._message, "to=")
        return any(text.startswith(mark) or mark.startswith(text) for mark in beginnings)

    def _meaning(self, header: str) -> tuple[str, str]:
        """Return the kind of a message and, of a call, the name."""
        channel = self._channel_name.search(header)
        recipient = _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        is_analysis = channel is not None and channel[1] == "analysis"
        if recipient and (recipient[1].startswith("functions.") or name in self._calls.tools.names or not is_analysis):
            if self._may_call:
                return "call", name
            return ("content" if channel is not None and channel[1] == "final" else "reasoning"), ""
        return ("reasoning" if is_analysis else "content"), ""
