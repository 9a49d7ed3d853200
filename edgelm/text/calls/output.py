"""The parts of an answer, and what collects them: texts, calls, stop strings, and drafted characters.

Owns the parts and the white space beside marks. Knows no format and no token.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edgelm.text.calls.format import IdRule
from edgelm.text.calls.reader import MARKS, SPACES, Reader
from edgelm.text.calls.values import Tools
from edgelm.text.stream import TextStream

Kind = Literal["reasoning", "content"]
_ALNUM = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning. `drafted`: all its characters were drafted and accepted."""

    text: str
    drafted: bool = False


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text. `drafted`: all its characters were drafted and accepted."""

    text: str
    drafted: bool = False


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call has begun. `index` counts the calls of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Args:
    """A piece of the JSON of a call's arguments."""

    index: int
    json_text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is over. One that the end of the answer cuts off has no CallEnd."""

    index: int


Part = Reasoning | Content | CallBegin | Args | CallEnd


class Output:
    """The parts of an answer: white space beside marks, stop strings, and drafted characters."""

    def __init__(self, stop: Sequence[str], *, holds_space: bool) -> None:
        self.parts: list[Part] = []
        self.kind: Kind = "content"
        self.blank = True  # nothing but white space since the last mark
        self.prompt_len = 0  # characters of the text that the prompt has already
        self._stop_strings = stop
        self._stop = TextStream(stop) if stop else None
        self._holds_space = holds_space
        self._space: list[tuple[str, bool]] = []
        self._after_mark = False
        self._had: set[Kind] = set()  # kinds with text
        self._pieces: list[tuple[int, bool]] = []  # the end of each arrived piece, and whether it was drafted
        self._in_stop: list[tuple[str, bool]] = []  # what the stop strings hold back
        self._arrived = 0

    @property
    def stopped(self) -> bool:
        return self._stop is not None and self._stop.stopped

    @property
    def stop(self) -> str | None:
        return self._stop.matched if self._stop else None

    def arrived(self, size: int, drafted: bool) -> None:
        self._arrived += size
        if self._pieces and self._pieces[-1][1] == drafted:
            self._pieces.pop()
        self._pieces.append((self._arrived, drafted))

    def text(self, text: str, reader: Reader) -> None:
        """Take text that begins at the reader's place."""
        start = reader.offset
        if start < self.prompt_len:
            text, start = text[self.prompt_len - start :], self.prompt_len
        while self._pieces and self._pieces[0][0] <= start:
            del self._pieces[0]
        while text:
            end, drafted = self._pieces[0]
            self._run(MARKS.sub("", text[: end - start]), drafted)
            text, start = text[end - start :], end
            if text:
                del self._pieces[0]

    def change(self, kind: Kind) -> None:
        """Go on with another kind of text, after a mark."""
        self.mark()
        self.kind = kind

    def mark(self) -> None:
        """Note a mark: white space on both sides of it is no text."""
        self._space.clear()
        self.blank = self._after_mark = True
        if self.kind == "content":
            self._release()

    def add(self, part: Part) -> None:
        last = self.parts[-1] if self.parts else None
        match last, part:
            case Args(index, before), Args(other, text) if index == other:
                self.parts[-1] = Args(index, before + text)
            case Content(before, drafted), Content(text, other) if drafted == other:
                self.parts[-1] = Content(before + text, drafted)
            case Reasoning(before, drafted), Reasoning(text, other) if drafted == other:
                self.parts[-1] = Reasoning(before + text, drafted)
            case _:
                self.parts.append(part)

    def end(self) -> None:
        """Release what is held back at the end of the answer."""
        if self.kind == "content" and not self.stopped:
            for text, drafted in self._space:
                self._show(text, drafted)
        self._space.clear()
        self._release()

    def drop_space(self) -> None:
        """Forget white space that is held back."""
        self._space.clear()

    def take(self) -> list[Part]:
        parts, self.parts = self.parts, []
        return parts

    def _run(self, text: str, drafted: bool) -> None:
        if self._after_mark:
            text = text.lstrip(SPACES)
            if not text:
                return
            self._after_mark = False
            if self.kind in self._had:
                self._show("\n\n", False)
        body = text.rstrip(SPACES) if self._holds_space else text
        if body:
            for space, space_drafted in self._space:
                self._show(space, space_drafted)
            self._space.clear()
            self.blank = self.blank and not body.strip()
            self._had.add(self.kind)
            self._show(body, drafted)
        if len(body) < len(text):
            self._space.append((text[len(body) :], drafted))

    def _show(self, text: str, drafted: bool) -> None:
        if self.kind == "reasoning":
            self.add(Reasoning(text, drafted))
        elif self._stop is None:
            self.add(Content(text, drafted))
        elif not self._stop.stopped:
            self._in_stop.append((text, drafted))
            self._pass_stops(len(self._stop.push(text.encode("utf-8", "replace"))))

    def _release(self) -> None:
        """Show the content that may have been the beginning of a stop string: no content follows at once."""
        if self._stop is not None and not self._stop.stopped:
            held = sum(len(text) for text, _ in self._in_stop)
            self._stop = TextStream(self._stop_strings)
            self._pass_stops(held)

    def _pass_stops(self, size: int) -> None:
        """Show the first characters of those that the stop strings held back."""
        while size:
            text, drafted = self._in_stop.pop(0)
            self.add(Content(text[:size], drafted))
            if len(text) > size:
                self._in_stop.insert(0, (text[size:], drafted))
            size -= min(size, len(text))
        if self.stopped:
            self._in_stop.clear()


class Calls:
    """The calls of an answer: numbers them, and passes them on. A Sink of calls/bodies.py."""

    def __init__(self, out: Output, tools: Tools, id_rule: IdRule, new_id: Callable[[], str] | None) -> None:
        self._out = out
        self.tools = tools
        self._id_rule = id_rule
        self._new_id = new_id or (lambda: _new_id(id_rule))
        self.count = 0
        self.only_known = False
        self.truncated = False
        self.is_cut = False

    def accepts(self, name: str) -> bool:
        return name in self.tools.names or not self.only_known

    def begin(self, name: str, call_id: str = "") -> None:
        self._out.mark()
        self._out.kind = "content"
        if self._id_rule == "functions" and not call_id:
            call_id = f"functions.{name}:{self.count}"
        if self._id_rule == "index":  # it counts within a turn, and clients need other ids in each turn
            call_id = ""
        self._out.add(CallBegin(self.count, call_id or self._new_id(), name))
        self.count += 1
        self.is_cut = False

    def args(self, text: str) -> None:
        text = MARKS.sub("", text)
        if text:
            self._out.add(Args(self.count - 1, text))

    def cut(self) -> None:
        self.is_cut = True

    def end(self, *, cut_off: bool) -> None:
        """End the call, unless the answer ended inside it."""
        if not cut_off:
            self.is_cut = False
            self._out.add(CallEnd(self.count - 1))


def _new_id(rule: IdRule) -> str:
    prefix, size = ("", 9) if rule == "alnum9" else ("call_", 24)
    return prefix + "".join(secrets.choice(_ALNUM) for _ in range(size))


class RepeatedCalls:
    """Holds back a call that may be the same as an earlier one of the answer, and drops one that is.

    A small model that may call several tools calls the same one with the same arguments until its limit. No grammar can
    refer to what was written before. `found`: a call was the same as an earlier one; the answer ends before it.
    """

    def __init__(self) -> None:
        self.found = False
        self._seen: set[tuple[str, str]] = set()  # names and arguments of the complete calls
        self._name, self._arguments = "", ""  # of the current call
        self._held: list[Part] = []  # of a call that has begun like an earlier one

    def take(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that are certainly no repetition, those that were held back first."""
        decided: list[Part] = []
        for part in parts:
            if self.found:
                break
            match part:
                case CallBegin():
                    self._name, self._arguments = part.name, ""
                case Args():
                    self._arguments += part.json_text
                case CallEnd():
                    self.found = (self._name, self._arguments) in self._seen
                    self._seen.add((self._name, self._arguments))
                case _:
                    decided.append(part)
                    continue
            self._held.append(part)
            if self.found or (not isinstance(part, CallEnd) and self._may_repeat()):
                continue
            decided += self._held
            self._held.clear()
        return decided

    def _may_repeat(self) -> bool:
        return any(name == self._name and seen.startswith(self._arguments) for name, seen in self._seen)
