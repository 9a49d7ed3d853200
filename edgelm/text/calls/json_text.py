"""JSON as it comes: passes on one value verbatim, and finds its end.

A value ends where it is no JSON any more, so that a model's broken arguments do not swallow the rest of the answer.

Owns the syntax of JSON. Knows no format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from edgelm.text.calls.reader import MARKS, Reader, Wait

_STRING_RUN = re.compile('[^"\\\\\udc00-\udfff]+')
_OUTSIDE = re.compile(r"[\[\]{}:,\"\s\w.+-]", re.ASCII)
_SCALAR = re.compile(r"[\w.+-]", re.ASCII)


def read_value(reader: Reader, sink: Callable[[str], None]) -> Wait:
    """Pass on one JSON value as it comes; return whether it is complete."""
    scan = _Scan()
    while (yield from reader.more()):
        begin = reader.at
        reader.at = scan.advance(reader.text, begin)
        if reader.at > begin:
            sink(reader.text[begin : reader.at])
        if scan.done is not None:
            return scan.done
    return scan.in_scalar


def read_string(reader: Reader) -> Generator[None, None, str | None]:
    """Read a JSON string. None: something else comes."""
    held: list[str] = []
    if not (yield from read_value(reader, held.append)):
        return None
    return string_of("".join(held))


def string_of(text: str) -> str | None:
    """Return the string that a JSON text spells. None: the text is no JSON string."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


class _Scan:
    """The place inside a value."""

    def __init__(self) -> None:
        self.done: bool | None = None  # whether the value is complete, once it has ended
        self.in_scalar = False  # a number or a word, which only the character behind it ends
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def advance(self, text: str, at: int) -> int:
        """Read a text from a place; return how far the value goes."""
        while at < len(text) and self.done is None:
            run = _STRING_RUN.match(text, at) if self._in_string and not self._escaped else None
            if run:
                at = run.end()
            else:
                at += self._in_text(text[at]) if self._in_string else self._outside(text[at])
        return at

    def _in_text(self, char: str) -> bool:
        """Take a character of a string; return whether it belongs to the value."""
        if MARKS.match(char):
            self.done = False
            return False
        self._in_string = self._escaped or char != '"'
        self._escaped = not self._escaped and char == "\\"
        if not self._in_string and not self._depth:
            self.done = True
        return True

    def _outside(self, char: str) -> bool:
        """Take a character outside strings; return whether it belongs to the value."""
        if self.in_scalar and not _SCALAR.match(char):
            self.done = True
        elif not _OUTSIDE.match(char) or (not self._depth and char in "}]:,"):
            self.done = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if not self._depth:
                self.done = True
                return True
        elif not self._depth:
            self.in_scalar = True
        return self.done is None
