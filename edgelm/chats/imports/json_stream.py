"""The conversations of a file of JSON, one at a time: an export of years is larger than memory should have to be.

Owns where a value of the outermost list begins and ends. Does not check what is between: that is the parser's work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from edgelm.base.errors import RequestError

CHUNK = 2**20  # characters
MAX_VALUE = 32 * 2**20  # characters of one conversation
# A string, a bracket, or the beginning of a string whose end is not there yet.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\]]|"', re.DOTALL)
_SPACE = re.compile(r"[\s,\ufeff]*")


class TruncatedError(Exception):
    """The file ends in the middle of a value."""


def json_values(read: Callable[[int], str]) -> Iterator[str]:
    """Yield the text of each value of the outermost list, or of the values that stand one after the other.

    `read` returns the next characters, at most so many; an empty text at the end. Raises TruncatedError, and
    RequestError for a text that is no JSON, or has a value that is too long.
    """
    stream = _Stream(read)
    in_list = stream.peek() == "["
    if in_list:
        stream.at += 1
    while character := stream.peek():
        if in_list and character == "]":
            return
        if character not in "{[":
            raise RequestError("this is no list of conversations in JSON", "export them again")
        yield stream.take_value()
    if in_list:
        raise TruncatedError


class _Stream:
    def __init__(self, read: Callable[[int], str]) -> None:
        self.at = 0
        self._read = read
        self._text = ""

    def peek(self) -> str:
        """Return the next character that is no space or comma; empty at the end."""
        while True:
            match = _SPACE.match(self._text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self._text):
                return self._text[self.at]
            if not self._more():
                return ""

    def take_value(self) -> str:
        """Return the text from one bracket to the one that closes it."""
        depth, place = 0, self.at
        while True:
            for match in _TOKEN.finditer(self._text, place):
                mark = match[0]
                if mark == '"':
                    place = match.start()
                    break
                place = match.end()
                if mark in "{[":
                    depth += 1
                elif mark in "}]":
                    depth -= 1
                    if not depth:
                        self._check_length(place)
                        value, self.at = self._text[self.at : place], place
                        return value
            else:
                place = max(place, len(self._text))
            self._check_length(len(self._text))
            begin = self.at
            if not self._more():
                raise TruncatedError
            place -= begin - self.at

    def _check_length(self, end: int) -> None:
        if end - self.at > MAX_VALUE:
            limit = f"{MAX_VALUE // 2**20} MiB"
            raise RequestError(f"one conversation has more than {limit}", "take it out of the file")

    def _more(self) -> bool:
        """Read on, dropping what was taken; return False at the end. Reads more for a longer value."""
        rest = self._text[self.at :]
        added = self._read(min(max(CHUNK, len(rest)), max(CHUNK, MAX_VALUE)))
        self._text, self.at = rest + added, 0
        return bool(added)
