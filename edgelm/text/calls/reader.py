"""Reader: the text of an answer while it arrives, for parsers written as generators.

A generator yields when it needs more text, and goes on where it was when text has come: nothing is read twice.

A control token has no text of its own. `Marks` gives each one that a format needs a character that no text contains, so
that a spelled-out `[TOOL_CALLS]` in a user's document is text, and the token is a mark.

Owns the buffer and the marks. Knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import fields, replace

from edgelm.text.calls.format import CallFormat, parts_of
from edgelm.text.patterns import any_of

Wait = Generator[None, None, bool]

SPACES = " \t\r\n"
_FIRST_MARK = 0xDC00  # a lone surrogate: decoded UTF-8 has none
MARKS = re.compile("[\udc00-\udfff]")


class Marks:
    """The control tokens of a vocabulary that formats need: their ids by string."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._chars = {text: chr(_FIRST_MARK + index) for index, text in enumerate(sorted(ids))}
        self._by_id = {ids[text]: char for text, char in self._chars.items()}
        self._pattern = any_of(self._chars)

    @property
    def strings(self) -> Collection[str]:
        """The control tokens."""
        return self._chars.keys()

    def of_token(self, token: int | None) -> str:
        """Return the character of a control token; "" for any other token."""
        return "" if token is None else self._by_id.get(token, "")

    def compiled(self, text: str) -> str:
        """Return a text with a character for each control string."""
        return self._pattern.sub(lambda match: self._chars[match[0]], text)

    def compiled_format(self, form: CallFormat) -> CallFormat:
        """Return a format with a character for each control string in it."""
        return changed_format(form, self.compiled)


def changed_format(form: CallFormat, change: Callable[[str], str]) -> CallFormat:
    """Return a format with `change` applied to all its marks."""
    changes: dict[str, object] = {}
    for field in fields(form):
        value = getattr(form, field.name)
        if field.name in ("body", "raw", "id_rule", "keys", "name"):
            continue
        if isinstance(value, str):
            changes[field.name] = change(value)
        elif field.name == "also":
            changes[field.name] = tuple(changed_format(other, change) for other in value)
        elif isinstance(value, tuple):
            changes[field.name] = tuple(map(change, value))
    return replace(form, **changes)  # type: ignore[arg-type]  # the values have the types of their fields


class Finder:
    """Finds the first of several strings in a text that arrives in pieces. No string contains another one."""

    def __init__(self, strings: Collection[str]) -> None:
        self.strings = tuple(
            text for text in set(strings) if not any(other in text for other in strings if other and other != text)
        )
        self._pattern = any_of(self.strings)
        self._beginnings = frozenset(text[:size] for text in self.strings for size in range(1, len(text)))
        self._most = max(map(len, self.strings), default=1) - 1

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at) if self.strings else None

    def held(self, text: str, at: int) -> int:
        """Return the length of the longest end of a text that may be the beginning of a string."""
        for size in range(min(self._most, len(text) - at), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0


class Reader:
    """The text that has come and is not read yet, from `at`."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False  # no more text comes
        self.is_cut = False  # a limit has ended the text
        self.ran_out = False  # at the end of the text: what was read may be the beginning of something
        self.start = 0  # of `text` in the whole answer

    @property
    def offset(self) -> int:
        """The position in the whole answer."""
        return self.start + self.at

    def add(self, text: str) -> None:
        self.text += text

    def forget(self) -> None:
        """Drop what is read. Positions from before this call are invalid."""
        self.text = self.text[self.at :]
        self.start += self.at
        self.at = 0

    def more(self) -> Wait:
        """Wait for a character; return whether there is one."""
        while self.at >= len(self.text):
            if self.ended:
                self.ran_out = True
                return False
            yield
        return True

    def peek(self) -> Generator[None, None, str]:
        """Return the next character after white space, which is read; "" at the end."""
        while (yield from self.more()):
            if self.text[self.at] not in SPACES:
                return self.text[self.at]
            self.at += 1
        return ""

    def literal(self, text: str) -> Wait:
        """Read a string, if it comes next."""
        while True:
            have = self.text[self.at : self.at + len(text)]
            if have == text:
                self.at += len(text)
                return True
            if not text.startswith(have):
                return False
            if self.ended:
                self.ran_out = True
                return False
            yield

    def mark(self, mark: str) -> Wait:
        """Read a mark, with any white space before it and where `parts_of` cuts it."""
        start = self.at
        for part in parts_of(mark):
            yield from self.peek()
            if not (yield from self.literal(part)):
                self.at = start
                return False
        return True

    def run(self, pattern: re.Pattern[str], most: int) -> Generator[None, None, str]:
        """Read the characters that match a pattern of one character, at most `most`."""
        begin = self.at
        while (yield from self.more()):
            if self.at - begin >= most or not pattern.match(self.text[self.at]):
                break
            self.at += 1
        return self.text[begin : self.at]

    def until(
        self, finder: Finder, sink: Callable[[str], None], *, own_line: bool = False, drops: Finder | None = None
    ) -> Generator[None, None, str]:
        """Pass text on as it comes, up to one of the strings, which is not read. Return that, "" at the end.

        With `own_line` the line break before the string is a part of it. Where the text is cut, the beginning of one of
        the strings of `drops` is not passed on.
        """
        while True:
            found = finder.search(self.text, self.at)
            unsure = drops if self.is_cut else None if self.ended else finder
            end = found.start() if found else len(self.text) - (unsure.held(self.text, self.at) if unsure else 0)
            stop = end
            if own_line and end > self.at and self.text[end - 1] == "\n" and (found or not self.ended):
                stop -= 1
            if stop > self.at:
                sink(self.text[self.at : stop])
            self.at = end if found or self.ended else stop
            if found:
                return found[0]
            if self.ended:
                return ""
            self.forget()
            yield
