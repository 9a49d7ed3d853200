"""Text from outside for a line of a terminal: nothing in it moves the cursor or writes to the clipboard."""

from __future__ import annotations


def printable(text: str, also: str = "") -> str:
    """Replace control characters and the like, except those of `also`."""
    return "".join(char if char.isprintable() or char in also else "\ufffd" for char in text)
