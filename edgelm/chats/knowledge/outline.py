"""The headings of a text, and its code fences.

Owns what a heading is in Markdown, in reStructuredText and in code. Plain text has none. Knows nothing of passages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

MAX_LINE = 300  # characters: a longer line is no heading
MAX_NAME = 100

_FENCE = re.compile(r"\s*(?:(`{3,})[^`]*|(~{3,}).*)")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(\S.*))?[ \t]*")
_CLOSING = re.compile(r"(?:^|[ \t])#+[ \t]*$")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*")
_NO_TITLE = re.compile(r" {0,3}(?:[-*+>|<#]|\d+[.)]\s)|    |\t")  # lists, quotes, tables, indented code
_RST_LINE = re.compile(r"([!-/:-@\[-`{-~])\1*[ \t]*")

_WORDS = (
    "export|default|declare|pub|public|private|protected|internal|static|final|abstract|sealed|async|unsafe|extern|"
    "inline|const|constexpr|open|data|partial|override|local|virtual"
)
_KINDS = (
    "def|class|function|func|fn|fun|struct|enum|union|trait|impl|interface|type|typedef|module|namespace|object|"
    "protocol|extension|record|defmodule|package|sub|proc"
)
_DEFINITION = re.compile(
    rf"(?:(?:{_WORDS})(?:\([a-z]+\))? )*((?:{_KINDS})(?: \([^()]*\)|<[^<>]*>)? +[\w$]+(?:(?:::|\.)[\w$]+)*)"
)
_ASSIGNED = re.compile(r"(?:export )?(?:const|let|var) +([\w$]+) *= *(?:async *)?(?:function\b|\([^()]*\) *=>|\w+ *=>)")
_C_FUNCTION = re.compile(r"[A-Za-z_][\w:*&<>, ]*[ *&]([A-Za-z_][\w:~]*)\((?!.*;[ \t]*$)")
_SHELL_FUNCTION = re.compile(r"(?:function +)?([\w:-]+) *\( *\)")
_TABLE = re.compile(r"\[+ *([^\[\]]+?) *\]+[ \t]*(?:[#;].*)?")
_TARGET = re.compile(r"([\w./%-]+) *:(?:[ \t].*)?$")
_CREATE = re.compile(r"create +(?:or +replace +)?([a-z]+ +(?:if +not +exists +)?[\w.\"]+)", re.IGNORECASE)
_REMARK = ("#", "//", "/*", " *", "*", "@", "--", ";")

_CODE = ".py .pyi .js .mjs .cjs .jsx .ts .tsx .rs .go .java .kt .swift .scala .cs .rb .php .lua .pl .ex .exs .dart .zig"
_C = ".c .h .cc .cpp .cxx .hh .hpp .cu .cuh .m .mm"


@dataclass(frozen=True, slots=True)
class Mark:
    """A heading: its first line, the line below it, its level (1 is the highest) and its name."""

    line: int
    body: int
    level: int
    name: str


@dataclass(slots=True)
class Outline:
    """The headings of a text, in order, and the lines of its code fences: first, and behind the last."""

    marks: list[Mark] = field(default_factory=list)
    fences: list[tuple[int, int]] = field(default_factory=list)

    @property
    def title(self) -> Mark | None:
        """The title of the whole text: its first heading, if no other is as high."""
        if len(self.marks) < 2 or any(mark.level <= self.marks[0].level for mark in self.marks[1:]):
            return None
        return self.marks[0]


def outline(name: str, lines: Sequence[str]) -> Outline:
    """Return the outline of the text of a file, as its name tells what it is."""
    base = PurePosixPath(name.lower())
    read = _READERS.get(base.suffix) or _READERS.get(base.name)
    return read(lines) if read else Outline()


def _markdown(lines: Sequence[str]) -> Outline:
    found = Outline()
    fence, opened = "", 0
    first = _front_matter(lines)
    for i in range(first, len(lines)):
        line = lines[i]
        if fence:
            if (text := line.strip()) and text[0] == fence[0] and len(text) >= len(fence) and not text.strip(fence[0]):
                found.fences.append((opened, i + 1))
                fence = ""
        elif len(line) > MAX_LINE:
            continue
        elif match := _FENCE.fullmatch(line):
            fence, opened = match[1] or match[2], i
        elif match := _ATX.fullmatch(line):
            found.marks.append(Mark(i, i + 1, len(match[1]), _plain(_CLOSING.sub("", match[2] or ""))))
        elif (match := _UNDERLINE.fullmatch(line)) and i > first and _is_title(lines, i - 1, found, first):
            found.marks.append(Mark(i - 1, i + 1, 1 if match[1][0] == "=" else 2, _plain(lines[i - 1])))
    if fence:
        found.fences.append((opened, len(lines)))
    return found


def _front_matter(lines: Sequence[str]) -> int:
    """Return the line behind the metadata that some Markdown begins with."""
    if lines[0].rstrip() not in ("---", "+++"):
        return 0
    mark = lines[0].rstrip()
    return next((i + 1 for i, line in enumerate(lines[1:100], 1) if line.rstrip() == mark), 0)


def _is_title(lines: Sequence[str], line: int, found: Outline, first: int) -> bool:
    """Tell whether a line is a paragraph of its own: only such a one may be underlined as a heading."""
    if not lines[line].strip() or len(lines[line]) > MAX_LINE or _NO_TITLE.match(lines[line]):
        return False
    if (found.marks and found.marks[-1].body > line) or (found.fences and found.fences[-1][1] > line):
        return False
    begins = line == first or not lines[line - 1].strip()
    return begins or bool(found.marks and found.marks[-1].body == line)


def _rst(lines: Sequence[str]) -> Outline:
    found = Outline()
    styles: list[tuple[str, bool]] = []  # the order of their first use is that of the levels
    for i in range(1, len(lines)):
        line, title = lines[i], lines[i - 1].rstrip()
        if len(line) > MAX_LINE or not title or not (match := _RST_LINE.fullmatch(line)):
            continue
        over = i > 1 and lines[i - 2].rstrip() == line.rstrip()
        before = i - 2 - over
        if len(line.rstrip()) < max(len(title.strip()), 2) or _RST_LINE.fullmatch(title):
            continue
        if (before >= 0 and lines[before].strip()) or (title[0].isspace() and not over):
            continue
        style = (match[1], over)
        if style not in styles:
            styles.append(style)
        found.marks.append(Mark(i - 1 - over, i + 1, styles.index(style) + 1, _plain(title)))
    return found


def _definitions(*patterns: re.Pattern[str]) -> Callable[[Sequence[str]], Outline]:
    """Return a reader of code: what is defined at the left margin is a heading, with the remarks right above it."""

    def read(lines: Sequence[str]) -> Outline:
        found = Outline()
        for i, line in enumerate(lines):
            if not line or line[0].isspace() or len(line) > MAX_LINE:
                continue
            match = next(filter(None, (pattern.match(line) for pattern in patterns)), None)
            if match is None:
                continue
            begin, least = i, found.marks[-1].body if found.marks else 0
            while begin > least and lines[begin - 1].startswith(_REMARK):
                begin -= 1
            found.marks.append(Mark(begin, i, 1, _line(match[1])))
        return found

    return read


def _plain(text: str) -> str:
    """Return a heading without its markup, on one line."""
    text = re.sub(r"!?\[([^\[\]]*)\](?:\([^()]*\)|\[[^\[\]]*\])?", r"\1", text)
    text = re.sub(r"\{[#.][^{}]*\}|</?[a-zA-Z][^<>]*>|[`*\\]", "", text)
    return _line(text)


def _line(text: str) -> str:
    """Return a text on one line that a terminal can show."""
    text = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(text.split())[:MAX_NAME].strip()


def _table() -> Iterator[tuple[str, Callable[[Sequence[str]], Outline]]]:
    for suffix in ".md .markdown .mdown .mkd .mdx .qmd .rmd".split():
        yield suffix, _markdown
    for suffix in (".rst", ".rest"):
        yield suffix, _rst
    for suffix in _CODE.split():
        yield suffix, _definitions(_DEFINITION, _ASSIGNED)
    for suffix in _C.split():
        yield suffix, _definitions(_DEFINITION, _C_FUNCTION)
    for suffix in ".sh .bash .zsh".split():
        yield suffix, _definitions(_SHELL_FUNCTION)
    for suffix in ".toml .ini .cfg .conf .desktop .service".split():
        yield suffix, _definitions(_TABLE)
    for suffix in ".yaml .yml .mk makefile dockerfile".split():
        yield suffix, _definitions(_TARGET)
    yield ".sql", _definitions(_CREATE)


_READERS = dict(_table())
