"""Passages, and how a text is split into them.

Owns the order of the work: a text is divided at its headings, and a long section at its paragraphs. A passage is a
piece of the text as it stands there, and all passages together are the text. Knows nothing of files and of the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from edgelm.base.passages import SEPARATOR, Passage
from edgelm.chats.knowledge.outline import Mark, Outline, outline

MAX_CHARS = 1_200  # of a passage: a few hundred tokens
MAX_FENCE_CHARS = 3_600  # of a code fence, which stays in one piece
MAX_PATH_CHARS = 240

Lines = Sequence[str]


def split_text(source: str, text: str, *, markdown: bool = False) -> list[Passage]:
    """Split a text into passages, in its order. The ending of `source` tells what it is, unless it is Markdown."""
    lines = text.split("\n")
    found = outline(".md" if markdown else source, lines)
    fences = _Fences(found.fences)
    return [
        Passage(source, path, part)
        for path, begin, body, end in _sections(found, lines)
        for part in _parts(_blocks(lines, begin, body, end, fences))
    ]


def _sections(found: Outline, lines: Lines) -> Iterator[tuple[str, int, int, int]]:
    """Yield the sections: path of headings, first line, first line below the heading, end.

    A heading without a text of its own belongs to the next section.
    """
    begins = [(mark.line, mark.body) for mark in found.marks]
    bounds = pairwise([(0, 0), *begins, (len(lines), len(lines))])
    waiting: int | None = None
    for path, ((begin, body), (end, _)) in zip(["", *_paths(found)], bounds, strict=True):
        first = begin if waiting is None else waiting
        if _has_text(lines[body:end]) or (end == len(lines) and _has_text(lines[first:end])):
            yield path, first, body, end
            waiting = None
        else:
            waiting = first


def _paths(found: Outline) -> Iterator[str]:
    """Yield the path of each heading. The title of a whole text is no part of the paths below it."""
    title = found.title
    above: list[Mark] = []
    for mark in found.marks:
        above = [other for other in above if other.level < mark.level]
        yield SEPARATOR.join(other.name for other in (*above, mark) if other.name)[:MAX_PATH_CHARS]
        if mark is not title:
            above.append(mark)


class _Fences:
    """The lines of code fences."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.begins = frozenset(begin for begin, _ in spans)
        self.ends = frozenset(end for _, end in spans)
        self.inner = frozenset(line for begin, end in spans for line in range(begin + 1, end))


def _blocks(lines: Lines, begin: int, body: int, end: int, fences: _Fences) -> Iterator[tuple[Lines, int]]:
    """Yield the blocks of a section, each with the blank lines behind it, and how many characters may stay together.

    A block is a paragraph or a code fence. The first has the heading too.
    """
    first = next((line for line in range(body, end) if lines[line].strip()), end)
    starts = [begin]
    for line in range(first + 1, end):
        if line in fences.inner or not lines[line].strip():
            continue
        if not lines[line - 1].strip() or line in fences.begins or line in fences.ends:
            starts.append(line)
    for start, stop in pairwise([*starts, end]):
        has_fence = start in fences.begins or (start == begin and first in fences.begins)
        yield lines[start:stop], MAX_FENCE_CHARS if has_fence else MAX_CHARS


def _parts(blocks: Iterable[tuple[Lines, int]]) -> Iterator[str]:
    """Yield blocks in parts: as many together as fit, and the lines of one that is too long."""
    part: list[str] = []
    size = 0
    for block, limit in blocks:
        block_size = sum(map(len, block)) + len(block)
        pieces = [block] if block_size <= limit else [[line] for line in _short(block)]
        for piece in pieces:
            piece_size = sum(map(len, piece)) + len(piece)
            if size and size + piece_size > MAX_CHARS + 1:  # the last line has no end
                yield from _joined(part)
                part, size = [], 0
            part += piece
            size += piece_size
    yield from _joined(part)


def _short(lines: Lines) -> Iterator[str]:
    """Yield lines, and those that are too long in pieces, which end at a space if there is one."""
    for line in lines:
        while len(line) > MAX_CHARS:
            cut = line.rfind(" ", MAX_CHARS // 2, MAX_CHARS) + 1 or MAX_CHARS
            yield line[:cut]
            line = line[cut:]
        yield line


def _joined(lines: Lines) -> Iterator[str]:
    """Yield lines as a text without blank lines around it, unless all are blank."""
    filled = [i for i, line in enumerate(lines) if line.strip()]
    if filled:
        yield "\n".join(lines[filled[0] : filled[-1] + 1])


def _has_text(lines: Lines) -> bool:
    return any(line.strip() for line in lines)
