"""Highlighted code, also while it is still being written.

Owns the call of pygments and how little of a growing block is lexed again. Knows nothing of Markdown.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from edgelm.tui.lines import clean
from edgelm.tui.palette import Palette

if TYPE_CHECKING:
    from pygments.lexer import Lexer

CHUNK_LINES = 40  # a growing block is lexed from a multiple of this
MAX_LEXED_CHARS = 40_000  # pygments takes about 100 ms for it


@lru_cache(64)
def _lexer(language: str) -> Lexer | None:
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else None
    except ClassNotFound:
        return None


class Highlighter:
    """The lines of one block of code, kept between calls while the code grows at its end."""

    def __init__(self) -> None:
        self._key: tuple[str, str] | None = None
        self._code = ""
        self._lines: list[Text] = []

    def lines(self, code: str, language: str, palette: Palette, *, growing: bool) -> list[Text]:
        """Return the code's lines. While it grows, text that spans the chunks (a long string) may look plain."""
        key = (language, palette.name)
        if not growing:
            self._key = None
            return highlight(code, language, palette)
        if self._key != key or not code.startswith(self._code):
            self._key, self._code, self._lines = key, "", []
        rest = code[len(self._code) :].split("\n")
        while len(rest) > CHUNK_LINES:
            chunk, rest = "\n".join(rest[:CHUNK_LINES]), rest[CHUNK_LINES:]
            self._code += chunk + "\n"
            self._lines += highlight(chunk, language, palette)
        return [line.copy() for line in self._lines] + highlight("\n".join(rest), language, palette)


def highlight(code: str, language: str, palette: Palette) -> list[Text]:
    """Return the lines of a text in the colours of its language; plain where that is unknown or the text is huge."""
    lexer = _lexer(language.lower()) if len(code) <= MAX_LEXED_CHARS else None
    if lexer is None:
        return [Text(clean(line), palette.text) for line in code.split("\n")]
    line, lines = Text(style=palette.text), []
    for token, value in lexer.get_tokens(code):
        style = _style(str(token), palette)
        for i, part in enumerate(value.split("\n")):
            if i:
                lines.append(line)
                line = Text(style=palette.text)
            if part:
                line.append(clean(part), style)
    return [*lines, line]


def _style(token: str, palette: Palette) -> Style | None:
    """Return the style of the most special name of a token type, such as Token.Literal.String.Doc."""
    names = token.removeprefix("Token.").removeprefix("Literal.").split(".")
    for end in range(len(names), 0, -1):
        found = palette.syntax.get(".".join(names[:end]))
        if found is not None:
            return found
    return None
