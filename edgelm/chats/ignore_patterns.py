r"""The patterns of a .gitignore, matched in time that grows no faster than length of pattern times length of path.

Owns the syntax of a line: `*`, `?`, `[a-z]`, `**` between slashes, `!`, and `\` before a character. A folder comes from
anybody, so that no line of it may make the search for a match walk back: of runs without a wildcard between them, the
leftmost place is always good enough. A slash between brackets is not supported. Knows nothing of files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LINE = 500  # characters

_NEVER = "(?!)"  # matches nothing
_CLASSES = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "blank": r"\ \t", "cntrl": r"\x00-\x1f\x7f", "digit": "0-9",
    "graph": "!-~", "lower": "a-z", "print": r"\ -~", "punct": r"!-/:-@\[-`{-~", "space": r"\ \t-\r",
    "upper": "A-Z", "xdigit": "0-9A-Fa-f",
}  # fmt: skip

_Run = tuple[re.Pattern[str], ...]  # names of folders and files, one below the other


@dataclass(frozen=True, slots=True)
class Pattern:
    """A line; any folders may lie between two of its `runs`. The first run begins, the last one ends a path."""

    runs: tuple[_Run, ...]
    excludes: bool
    folders_only: bool

    def matches(self, path: str) -> bool:
        """Tell whether this is the pattern of a path, and not only of a folder above it."""
        names = path.split("/")
        *others, last = self.runs
        place = 0
        for number, run in enumerate(others):
            while not _fits(run, names, place):
                place += 1
                if number == 0 or place > len(names):
                    return False
            place += len(run)
        end = len(names) - len(last)
        return (end >= place if others else end == 0) and _fits(last, names, end)


def parse_line(line: str) -> Pattern | None:
    """Return the pattern of a line; None where it has none, is not valid, or is too long."""
    line = line.removesuffix("\r")
    if len(line) > MAX_LINE or line.startswith("#"):
        return None
    line = re.sub(r"(?<!\\) +$", "", line)
    excludes = not line.startswith("!")
    line = line if excludes else line[1:]
    body = line.removesuffix("/")
    is_name = "/" not in body  # in any folder
    body = re.sub(r"(\\[^/])|\\/", lambda escape: escape[1] or "/", body)
    names = body.removeprefix("/").split("/")
    if not all(names):
        return None
    runs: list[_Run] = [()] if is_name else []
    run: list[re.Pattern[str]] = []
    for name in names:
        if name == "**" and not is_name:
            runs.append(tuple(run))
            run = []
        else:
            run.append(re.compile(_regex(name), re.DOTALL))
    if not run:  # a/** is all below a
        run.append(re.compile(".*", re.DOTALL))
    return Pattern((*runs, tuple(run)), excludes, folders_only=line.endswith("/"))


def _fits(run: _Run, names: Sequence[str], place: int) -> bool:
    if place + len(run) > len(names):
        return False
    return all(regex.fullmatch(name) for regex, name in zip(run, names[place : place + len(run)], strict=True))


def _regex(pattern: str) -> str:
    """Return the expression for one name. An atomic group keeps the leftmost place of the characters behind a `*`."""
    runs = [""]
    place = 0
    while place < len(pattern):
        character = pattern[place]
        place += 1
        if character == "*":
            runs.append("")
        elif character == "?":
            runs[-1] += "."
        elif character == "[":
            expression, place = _bracket(pattern, place)
            runs[-1] += expression
        elif character == "\\":
            runs[-1] += re.escape(pattern[place]) if place < len(pattern) else _NEVER
            place += 1
        else:
            runs[-1] += re.escape(character)
    if len(runs) == 1:
        return runs[0]
    first, *middle, last = runs
    return first + "".join(f"(?>.*?{run})" for run in middle if run) + f".*{last}"


def _bracket(pattern: str, place: int) -> tuple[str, int]:
    """Return the expression for the [...] whose inside begins at a place, and the place behind it."""
    negates = pattern[place : place + 1] in ("!", "^")
    place += negates
    start = place
    parts: list[str] = []
    while place < len(pattern) and (pattern[place] != "]" or place == start):
        named = re.compile(r"\[:([a-z]*):\]").match(pattern, place)
        if named is not None:
            if named[1] not in _CLASSES:
                return _NEVER, len(pattern)
            parts.append(_CLASSES[named[1]])
            place = named.end()
            continue
        low, place = _character(pattern, place)
        high = low
        if pattern[place : place + 1] == "-" and pattern[place + 1 : place + 2] not in ("", "]"):
            high, place = _character(pattern, place + 1)
        if low <= high:
            parts.append(f"{re.escape(low)}-{re.escape(high)}")
    if place >= len(pattern):  # it has no end
        return _NEVER, len(pattern)
    if not parts:
        return ("." if negates else _NEVER), place + 1
    return f"[{'^' if negates else ''}{''.join(parts)}]", place + 1


def _character(pattern: str, place: int) -> tuple[str, int]:
    """Return the character at a place of a [...], and the place behind it."""
    place += pattern[place] == "\\" and place + 1 < len(pattern)
    return pattern[place], place + 1
