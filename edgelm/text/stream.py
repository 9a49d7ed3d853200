"""Turns the bytes of decoded tokens into text that can be shown at once.

Owns incomplete characters, stop strings and the end of a text by its indentation. Knows nothing of tokens,
tokenizers or the engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from edgelm.base.errors import RequestError

MAX_STOPS = 80  # 64 of a request, and those of a chat template


class TextStream:
    """Decodes UTF-8 piece by piece, and ends the text before a stop string.

    The first complete stop string wins; among those that end at the same character, the longest. So the text does not
    depend on how it is cut into pieces. Invalid bytes become U+FFFD. Raises RequestError for an empty stop string and
    for more than MAX_STOPS.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        assert not isinstance(stop, str), "pass a sequence, even for one stop string"
        if len(stop) > MAX_STOPS:
            raise RequestError(f"there are {len(stop)} stop strings", f"give at most {MAX_STOPS}")
        if not all(stop):
            raise RequestError("a stop string is empty", "remove it, or give at least one character")
        self.matched: str | None = None  # the stop string that ended the text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matches = [_PartialMatch(string) for string in stop]
        self._held = ""  # the longest end of the text that may be the beginning of a stop string
        self._flushed = False

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def push(self, piece: bytes) -> str:
        """Return the text that can be shown now; nothing after a stop string."""
        assert not self._flushed, "the text has ended"
        return "" if self.stopped else self._advance(self._decoder.decode(piece))

    def flush(self) -> str:
        """End the text; return the rest that was held back. An incomplete character becomes U+FFFD."""
        if self._flushed or self.stopped:
            return ""
        self._flushed = True
        shown = self._advance(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return shown + held

    def _advance(self, new: str) -> str:
        if not self._matches:
            return new
        for end, char in enumerate(new, 1):
            complete = [match.stop for match in self._matches if match.advance(char)]
            if complete:
                self.matched = max(complete, key=len)
                text, self._held = self._held + new[:end], ""
                return text[: -len(self.matched)]
        text = self._held + new
        end = len(text) - max(match.length for match in self._matches)
        self._held = text[end:]
        return text[:end]


class _PartialMatch:
    """The length of the beginning of `stop` that the text ends with (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # For stop[:1], stop[:2]..: the length of its longest proper prefix that is also its suffix. Only for as much as
        # a text has matched: a long stop string that no text begins costs nothing.
        self._borders = [0]

    def advance(self, char: str) -> bool:
        """Take the next character of the text; return whether `stop` is complete, which ends the text."""
        self.length = self._extend(self.length, char)
        if self.length > len(self._borders):
            self._borders.append(self._extend(self._borders[-1], char))
        return self.length == len(self.stop)

    def _extend(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._borders[length - 1]
        return length + 1 if self.stop[length] == char else 0


class IndentLimit:
    """Ends a text at the first line that is indented less than `least`, as llama-server's `n_indent` does; 0: never.

    It is for code that is written into a block. The first line belongs to the text before it.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self._width: int | None = None  # of the indentation of this line so far; None: it has another character
        self.reached = False

    def take(self, text: str) -> str:
        """Return the part of the next piece that belongs to the text."""
        if not self.least or self.reached:
            return "" if self.reached else text
        for at, letter in enumerate(text):
            if self._width is not None and letter in " \t":
                self._width += 1
            elif self._width is not None and self._width < self.least:
                self.reached = True
                return text[:at]
            else:
                self._width = 0 if letter == "\n" else None
        return text
