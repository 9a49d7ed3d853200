"""A pattern that finds any of many strings, as fast as one."""

from __future__ import annotations

import re
from collections.abc import Iterable


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest string at each place. Its time does not grow with their number."""
    nonempty = sorted({text for text in strings if text})
    return re.compile(_trie(nonempty) if nonempty else r"(?!)")


def _trie(strings: list[str]) -> str:
    """Return the pattern of sorted, distinct strings; the first may be empty."""
    optional = strings[0] == ""
    groups: dict[str, list[str]] = {}
    for text in strings[optional:]:
        groups.setdefault(text[0], []).append(text)
    branches = []
    for group in groups.values():
        prefix = _common_prefix(group[0], group[-1])
        branches.append(re.escape(prefix) + _trie([text[len(prefix) :] for text in group]))
    if len(branches) == 1 and not optional:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if optional else ''}" if branches else ""


def _common_prefix(one: str, other: str) -> str:
    pairs = zip(one, other, strict=False)
    return one[: next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]
