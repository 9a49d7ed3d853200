"""Characters that move the terminal's cursor or write to its clipboard, taken out of texts.

Knows nothing of lines and styles.
"""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
# Colours and the like (CSI), links and titles (OSC), and a choice of characters: whole ones only, that begin with ESC.
# Their forms of one character (\x9b) also stand in texts that were read in a wrong encoding.
_SEQUENCE = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b\r\n]*(?:\x07|\x1b\\\\)|[()][0-2AB])")


def without_controls(text: str) -> str:
    """Replace each control character but tab and newline by one character."""
    return _CONTROL.sub("\ufffd", text)


def clean_text(text: str) -> str:
    """Return a text for a field in which it is edited: without escape sequences, other control characters replaced.

    It keeps its tabs; its lines end with newlines.
    """
    return without_controls(_SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))
