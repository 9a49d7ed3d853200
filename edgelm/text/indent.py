"""Ends a text at the first new line that is indented less than a limit, as llama-server's `n_indent` does.

For code that is written into a block: the end of the block is the end of the answer. Knows nothing of tokens.
"""

from __future__ import annotations


class IndentLimit:
    """The limit of one text, which comes in pieces. The first line belongs to the text before it. 0: no limit."""

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
